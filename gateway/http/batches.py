"""HTTP endpoints of files and batches, as OpenAI's clients use them, and of batches of messages, as Anthropic's do."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from penstock.gateway.access.authentication import Caller, caller_of
from penstock.gateway.apis.messages.objects import PAGE_LIMITS
from penstock.gateway.base.request_bodies import decode_body, invalid, page_of
from penstock.gateway.batches.batch import (
    ENDPOINTS,
    MESSAGE_BATCH,
    MESSAGES_PATH,
    RESULTS_KEPT_S,
    BatchList,
    DeletedFile,
    DeletedMessageBatch,
    ExpiresAfter,
    FileList,
    MessageBatchPage,
    batch_object,
    check_metadata,
    decode_create,
    entered,
    file_object,
    kept_s,
    message_batch,
    message_batch_id,
    message_input,
    message_results,
    read_form,
    too_large,
    window_s,
)
from penstock.gateway.batches.driver import Batches
from penstock.gateway.batches.store import MAX_FILE_BYTES, BatchStore, count_by_tenant, not_found
from penstock.gateway.http.asgi import ClientDisconnected, read_body
from penstock.gateway.http.images import FILE_NAME, base_url
from penstock.gateway.service.gateway import Gateway
from penstock.schemas.batches import BATCH, DAY_S, FILE, Batch, BatchStatus, StoredFile
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import new_request_id

FORM_BYTES = 64 << 10  # of an upload, beyond the file
MAX_UPLOADS = 2  # in memory at a time; others are read when one of these has been stored
UPLOAD_WAIT_S = 60.0
MAX_UNFINISHED = 100  # batches of a tenant
TRIES = 20  # to cancel a batch whose driver changes its entry meanwhile

_json = msgspec.json.encode
_NS = 1_000_000_000


class FilesAndBatches:
    """The endpoints below ``/v1/files``, ``/v1/batches`` and ``/v1/messages/batches``."""

    def __init__(self, gateway: Gateway, batches: Batches) -> None:
        self._gateway = gateway
        self._batches = batches
        self._uploads = asyncio.Semaphore(MAX_UPLOADS)

    @property
    def _store(self) -> BatchStore:
        """
        Raises:
            ServingError: broker_unavailable.
        """
        if not self._batches.store.ready:
            raise ServingError(
                Code.broker_unavailable,
                "files and batches have not been read from the broker yet; try again (has it its streams: 'penstock "
                "streams apply'?)",
                retry_after=1.0,
            )
        return self._batches.store

    def _new_id(self, kind: str) -> str:
        gateway = self._gateway
        return kind + new_request_id(self._now_ns(), cell=max(0, gateway.settings.cell))

    def _now_ns(self) -> int:
        return self._gateway.bus.clock.now_ns()

    @asynccontextmanager
    async def _upload_slot(self) -> AsyncIterator[None]:
        """
        Raises:
            ServingError: overloaded, other uploads were not stored within ``UPLOAD_WAIT_S``.
        """
        try:
            async with asyncio.timeout(UPLOAD_WAIT_S):
                await self._uploads.acquire()
        except TimeoutError:
            raise ServingError(
                Code.overloaded, "other files or batches are being uploaded to this gateway; try again", retry_after=5.0
            ) from None
        try:
            yield
        finally:
            self._uploads.release()

    # --- files ---

    async def upload(self, request: Request) -> Response:
        store, caller = self._store, caller_of(request.scope)
        async with self._upload_slot():
            return await self._upload(store, caller, request)

    async def _upload(self, store: BatchStore, caller: Caller, request: Request) -> Response:
        limit = MAX_FILE_BYTES + FORM_BYTES
        try:
            body = await _body(request, limit)
        except ServingError as error:
            if error.code is Code.body_too_large:
                raise too_large(f"more than {MAX_FILE_BYTES}", MAX_FILE_BYTES) from None
            raise
        form = await asyncio.to_thread(read_form, request.headers.get("content-type", ""), body)
        del body
        if (purpose := form.fields.get("purpose", "")) != "batch":
            raise invalid("purpose", f"purpose {purpose[:40]!r} is not supported; use 'batch'")
        if not form.content:
            raise invalid("file", "the file is empty")
        if len(form.content) > MAX_FILE_BYTES:
            raise too_large(str(len(form.content)), MAX_FILE_BYTES)
        kept = kept_s(_expiry(form.fields), "expires_after[seconds]")
        self._check_space(caller, len(form.content))
        now_ns = self._now_ns()
        file = StoredFile(
            self._new_id(FILE), caller.tenant, form.name, purpose, len(form.content), now_ns, now_ns + kept * _NS
        )
        await store.put_file(file, form.content)
        return _reply(file_object(file))

    def _check_space(self, caller: Caller, size: int) -> None:
        """
        Raises:
            ServingError: rate_limit_exceeded: the tenant's files would take more than their share.
        """
        most, used = self._gateway.settings.max_tenant_file_bytes, self._store.bytes_of(caller.tenant)
        if used + size > most:
            raise ServingError(
                Code.rate_limit_exceeded,
                f"the files of tenant {caller.tenant!r} take {used} bytes, and this one {size}; the limit is {most} "
                "(--max-tenant-file-bytes): delete files that you do not need",
                param="file",
            )

    async def files(self, request: Request) -> Response:
        caller, purpose = caller_of(request.scope), request.query_params.get("purpose")
        found = [each for each in self._store.of(caller.sees, StoredFile) if isinstance(each, StoredFile)]
        objects = [file_object(each) for each in found if purpose in (None, each.purpose)]
        return _reply(FileList(**page_of(objects, request.query_params, default=1000, most=10_000)._asdict()))

    async def file(self, request: Request) -> Response:
        name = request.path_params["id"]
        if FILE_NAME.fullmatch(name):  # generated images were served here
            return RedirectResponse(f"/v1/media/{name}", status_code=308)
        return _reply(file_object(await self._found_file(request)))

    async def content(self, request: Request) -> Response:
        file = await self._found_file(request)
        data = await self._store.content(file)
        headers = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
        return Response(data, media_type="application/jsonl", headers=headers)

    async def delete(self, request: Request) -> Response:
        file = await self._found_file(request)
        await self._store.remove(file)
        return _reply(DeletedFile(file.id))

    async def _found_file(self, request: Request) -> StoredFile:
        found = await self._store.find(request.path_params["id"], caller_of(request.scope).sees, StoredFile)
        assert isinstance(found.value, StoredFile)
        return found.value

    # --- batches ---

    async def create(self, request: Request) -> Response:
        store, caller = self._store, caller_of(request.scope)
        body = decode_body(decode_create, await _body(request, FORM_BYTES))
        if body.endpoint not in ENDPOINTS:
            raise invalid("endpoint", f"endpoint {body.endpoint[:80]!r} must be one of {', '.join(ENDPOINTS)}")
        seconds = window_s(body.completion_window)
        kept = kept_s(body.output_expires_after, "output_expires_after.seconds")
        check_metadata(body.metadata)
        source = await store.find(body.input_file_id, caller.tenant, StoredFile)
        assert isinstance(source.value, StoredFile)
        if source.value.purpose != "batch":
            raise invalid("input_file_id", f"the purpose of {source.value.id} is not 'batch'")
        self._check_number(caller)
        now_ns = self._now_ns()
        batch = Batch(
            self._new_id(BATCH),
            caller.tenant,
            body.endpoint,
            source.value.id,
            body.completion_window,
            now_ns,
            now_ns + seconds * _NS,
            keep_s=kept,
            key=caller.key.id if caller.key is not None else "",
            metadata=body.metadata,
        )
        await store.change(batch, 0)
        return _reply(batch_object(batch))

    def _check_number(self, caller: Caller) -> None:
        """
        Raises:
            ServingError: queue_full.
        """
        if count_by_tenant(self._store.entries.values())[caller.tenant] >= MAX_UNFINISHED:
            raise ServingError(
                Code.queue_full, f"{MAX_UNFINISHED} batches of tenant {caller.tenant!r} have not ended; wait for one"
            )

    def _listed(self, request: Request, *, messages: bool) -> list[Batch]:
        """Those of the caller's tenant, of messages or of other requests, the newest first."""
        found = self._store.of(caller_of(request.scope).sees, Batch)
        return [each for each in found if isinstance(each, Batch) and (each.endpoint == MESSAGES_PATH) is messages]

    async def batches(self, request: Request) -> Response:
        found = self._listed(request, messages=False)
        page = page_of(map(batch_object, found), request.query_params, default=20, most=100)
        return _reply(BatchList(**page._asdict()))

    async def batch(self, request: Request) -> Response:
        return _reply(batch_object(await self._found(request)))

    async def _found(self, request: Request, prefix: str = BATCH) -> Batch:
        name = BATCH + request.path_params["id"].removeprefix(prefix)
        found = await self._store.find(name, caller_of(request.scope).sees, Batch)
        assert isinstance(found.value, Batch)
        return found.value

    async def cancel(self, request: Request) -> Response:
        return _reply(batch_object(await self._cancelled(request)))

    async def _cancelled(self, request: Request, prefix: str = BATCH) -> Batch:
        """The batch, once its cancellation is stored.

        Raises:
            ServingError: invalid_request: it has ended, or is about to; request_not_found; broker_unavailable.
        """
        store, sees = self._store, caller_of(request.scope).sees
        for _ in range(TRIES):
            found = await store.find(BATCH + request.path_params["id"].removeprefix(prefix), sees, Batch)
            batch = found.value
            assert isinstance(batch, Batch)
            if batch.status in (BatchStatus.cancelling, BatchStatus.cancelled):
                return batch
            if batch.status not in (BatchStatus.validating, BatchStatus.in_progress):
                raise invalid("id", f"batch {batch.id} is {batch.status.value}, and can be cancelled no longer")
            cancelling = entered(batch, BatchStatus.cancelling, self._now_ns())
            if await store.change(cancelling, found.revision) is not None:
                return cancelling
        raise ServingError(Code.broker_unavailable, "the batch changes too often; try again", retry_after=1.0)

    # --- batches of messages, as Anthropic's clients use them ---

    async def create_messages(self, request: Request) -> Response:
        store, caller = self._store, caller_of(request.scope)
        async with self._upload_slot():
            content = await asyncio.to_thread(message_input, await _body(request, MAX_FILE_BYTES))
            self._check_space(caller, len(content))
            self._check_number(caller)
            now_ns, name = self._now_ns(), self._new_id(BATCH)
            kept_ns = now_ns + (DAY_S + RESULTS_KEPT_S) * _NS
            file = StoredFile(
                self._new_id(FILE), caller.tenant, f"{name}_input.jsonl", "batch", len(content), now_ns, kept_ns
            )
            await store.put_file(file, content)
        batch = Batch(
            name,
            caller.tenant,
            MESSAGES_PATH,
            file.id,
            "24h",
            now_ns,
            now_ns + DAY_S * _NS,
            keep_s=RESULTS_KEPT_S,
            key=caller.key.id if caller.key is not None else "",
            total=content.count(b"\n"),
        )
        await store.change(batch, 0)
        return self._shown(request, batch)

    def _shown(self, request: Request, batch: Batch) -> Response:
        return _reply(message_batch(batch, base_url(request.scope, self._gateway)))

    async def message_batches(self, request: Request) -> Response:
        base = base_url(request.scope, self._gateway)
        found = [message_batch(each, base) for each in self._listed(request, messages=True)]
        return _reply(MessageBatchPage(**page_of(found, request.query_params, **PAGE_LIMITS)._asdict()))

    async def message_batch(self, request: Request) -> Response:
        return self._shown(request, await self._found_messages(request))

    async def _found_messages(self, request: Request) -> Batch:
        batch = await self._found(request, MESSAGE_BATCH)
        if batch.endpoint != MESSAGES_PATH:
            raise not_found("batch of messages", request.path_params["id"])
        return batch

    async def cancel_messages(self, request: Request) -> Response:
        batch = await self._found_messages(request)
        return self._shown(request, batch if batch.status.ended else await self._cancelled(request, MESSAGE_BATCH))

    async def delete_messages(self, request: Request) -> Response:
        batch = await self._found_messages(request)
        if not batch.status.ended:
            raise invalid("id", f"batch {message_batch_id(batch.id)} has not ended; cancel it first")
        for name in filter(None, (batch.input_file, batch.output_file, batch.error_file)):
            with suppress(ServingError):  # it has expired, or was deleted
                found = await self._store.find(name, batch.tenant, StoredFile)
                await self._store.remove(found.value)
        await self._store.remove(batch)
        return _reply(DeletedMessageBatch(message_batch_id(batch.id)))

    async def message_results(self, request: Request) -> Response:
        batch = await self._found_messages(request)
        if not batch.status.ended:
            raise invalid("id", f"batch {message_batch_id(batch.id)} has not ended, so it has no results yet")
        contents = []
        for name in filter(None, (batch.output_file, batch.error_file)):
            found = await self._store.find(name, batch.tenant, StoredFile)
            assert isinstance(found.value, StoredFile)
            contents.append(await self._store.content(found.value))
        data = await asyncio.to_thread(message_results, *contents)
        return Response(data, media_type="application/x-jsonl", headers={"x-content-type-options": "nosniff"})


async def _body(request: Request, limit: int) -> bytes:
    """
    Raises:
        ServingError: it is too large, or damaged; cancelled: its client has gone.
    """
    try:
        return await read_body(request.scope, request.receive, limit)
    except ClientDisconnected:
        raise ServingError(Code.cancelled, "the client disconnected") from None


def _expiry(fields: dict[str, str]) -> ExpiresAfter | None:
    """
    Raises:
        ServingError: invalid_request.
    """
    seconds = fields.get("expires_after[seconds]")
    if seconds is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", seconds) or fields.get("expires_after[anchor]") != "created_at":
        raise invalid("expires_after", "expires_after needs the anchor 'created_at', and seconds as a number")
    return ExpiresAfter("created_at", int(seconds))


def _reply(value: Any) -> Response:
    return Response(_json(value), media_type="application/json")
