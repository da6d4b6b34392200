"""Files and batches on the broker: their entries as a live table, contents as objects, and the log of each batch.

All of it is in the home cell. An entry is changed in the place of the revision that was read, so of two gateways that
change one at the same time, the second reads it again.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.gateway.batches.batch import BatchProgress
from penstock.infra.bus import object_store
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get_last, read
from penstock.infra.bus.jetstream import WRONG_LAST_SEQUENCE, compare_and_set, decode_publish_reply
from penstock.infra.bus.log_tail import LogTail
from penstock.schemas.batches import (
    BATCH,
    FILE,
    LONGEST_S,
    Batch,
    BatchMessage,
    BatchOpened,
    StoredFile,
    decode_entry,
    decode_message,
)
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.wire import encode

log = structlog.get_logger("gateway")

BUCKET = "batches"
MAX_FILE_BYTES = 200_000_000
CONTENT_S = 120.0  # to store or read a content
WRITE_S = 5.0
AGAIN_S = 0.5
MARKER_S = 60  # that an entry was deleted is known for so long
_ID = re.compile(rf"({FILE}|{BATCH})[0-9a-f]{{8}}-[0-9a-f]{{4}}-[0-9a-f]{{4}}-[0-9a-f]{{4}}-[0-9a-f]{{12}}")


class LeaseLost(Exception):
    """Another gateway drives this batch, or it was deleted."""


class BucketEntry(NamedTuple):
    """``seen``: when this gateway first saw this revision, monotonic."""

    value: StoredFile | Batch
    revision: int
    seen: float = 0.0


def key_of(value: StoredFile | Batch) -> str:
    return f"{value.tenant}.{value.id}"


def not_found(kind: str, name: str) -> ServingError:
    return ServingError(
        Code.request_not_found, f"no {kind} {name[:80]!r}; files and batches expire after 30 days", param="id"
    )


class BatchStore:
    """
    Args:
        on_batch: called with each change of a batch.

    Attributes:
        entries: by key.
        ready: they have been read.
    """

    def __init__(self, bus: Bus, on_batch: Callable[[BucketEntry], None] = lambda stored: None) -> None:
        self._bus = bus
        self._bucket = bus.subjects.bucket(BUCKET)
        self._on_batch = on_batch
        self._tail = LogTail.of_bucket(bus, BUCKET, self._on_entry, self._forget)
        self._expired: list[str] = []
        self.entries: dict[str, BucketEntry] = {}
        self.ready = False

    async def start(self) -> None:
        """
        Raises:
            ServingError: the bucket cannot be read.
        """
        await self._tail.start()
        self.ready = True

    async def stop(self) -> None:
        await self._tail.stop()

    def _forget(self) -> None:
        self.entries.clear()

    def _on_entry(self, entry: Entry) -> None:
        key = entry.subject.removeprefix(f"$KV.{self._bucket}.")
        if not entry.data:
            gone = self.entries.pop(key, None)
            if gone is not None and isinstance(gone.value, StoredFile):
                self._expired.append(key)
            return
        try:
            value = decode_entry(entry.data)
        except msgspec.MsgspecError as error:
            log.warning("batch_unreadable", key=key, error=str(error))
            return
        stored = self.entries[key] = BucketEntry(value, entry.seq, time.monotonic())
        if isinstance(value, Batch):
            self._on_batch(stored)

    def of(self, tenant: str | None, kind: type[StoredFile] | type[Batch]) -> list[StoredFile | Batch]:
        """Those that a tenant may see, the newest first. None: of all tenants."""
        found = (each.value for each in self.entries.values() if isinstance(each.value, kind))
        return sorted((each for each in found if tenant in (None, each.tenant)), key=lambda each: each.id, reverse=True)

    def bytes_of(self, tenant: str) -> int:
        """What a tenant's files take."""
        return sum(
            each.value.size
            for each in self.entries.values()
            if isinstance(each.value, StoredFile) and each.value.tenant == tenant
        )

    async def find(self, name: str, tenant: str | None, kind: type[StoredFile] | type[Batch]) -> BucketEntry:
        """As the broker has it.

        Args:
            tenant: whose; None: anyone's.
        Raises:
            ServingError: request_not_found; broker_unavailable.
        """
        found = None
        if _ID.fullmatch(name):
            subject = f"$KV.{self._bucket}.{tenant or '*'}.{name}"
            found = await get_last(self._bus, f"KV_{self._bucket}", subject, newest=True, within_s=WRITE_S)
        if found is not None and found.data:
            value = decode_entry(found.data)
            if isinstance(value, kind):
                return BucketEntry(value, found.seq, time.monotonic())
        raise not_found("file" if kind is StoredFile else "batch", name)

    async def change(self, value: StoredFile | Batch, revision: int) -> BucketEntry | None:
        """Store an entry in the place of a revision (0: a new one); None: it has another revision.

        Raises:
            ServingError: broker_unavailable: not confirmed. It may be stored nevertheless.
        """
        left_s = (value.expires_ns - self._bus.clock.now_ns()) / 1e9 + (LONGEST_S if isinstance(value, Batch) else 0)
        subject = f"$KV.{self._bucket}.{key_of(value)}"
        try:
            reply = await compare_and_set(
                self._bus.nc, subject, encode(value), revision, WRITE_S, ttl_s=max(1, round(left_s))
            )
        except (NatsError, OSError, TimeoutError, msgspec.MsgspecError) as error:
            raise _unavailable(repr(error)) from None
        if reply.error is None:
            return BucketEntry(value, reply.seq, time.monotonic())
        if reply.error.err_code == WRONG_LAST_SEQUENCE:
            return None
        raise _unavailable(str(reply.error))

    async def put_file(self, file: StoredFile, content: bytes) -> None:
        """Store a file, over an earlier one of the same id.

        Raises:
            ServingError: broker_unavailable.
        """
        await object_store.replace(self._bus, BUCKET, key_of(file), content, timeout=CONTENT_S)
        for _ in range(3):
            try:
                revision = (await self.find(file.id, file.tenant, StoredFile)).revision
            except ServingError as error:
                if error.code is not Code.request_not_found:
                    raise
                revision = 0
            if await self.change(file, revision) is not None:
                return
        raise _unavailable(f"{file.id} is being written by others")

    async def content(self, file: StoredFile) -> bytes:
        """
        Raises:
            ServingError: request_not_found; broker_unavailable.
        """
        return await object_store.get(self._bus, BUCKET, key_of(file), limit=1 << 32, newest=True, timeout=CONTENT_S)

    async def remove(self, value: StoredFile | Batch) -> None:
        """Discard an entry, of a file with its content.

        Raises:
            ServingError: broker_unavailable.
        """
        headers = {"KV-Operation": "PURGE", "Nats-Rollup": "sub", "Nats-TTL": str(MARKER_S)}
        subject = f"$KV.{self._bucket}.{key_of(value)}"
        try:
            reply = await self._bus.nc.request(subject, b"", timeout=WRITE_S, headers=headers)
            error = decode_publish_reply(reply.data).error
        except (NatsError, OSError, TimeoutError, msgspec.MsgspecError) as problem:
            raise _unavailable(repr(problem)) from None
        if error is not None:
            raise _unavailable(str(error))
        if isinstance(value, StoredFile):
            await object_store.delete(self._bus, BUCKET, key_of(value))

    async def discard_expired(self) -> None:
        """Delete the contents of files whose entries have expired. What is left expires by its age."""
        while self._expired:
            with suppress(ServingError):
                await object_store.delete(self._bus, BUCKET, self._expired.pop())


class BatchLog:
    """The log of one batch, for the gateway that drives it."""

    def __init__(self, bus: Bus, batch: Batch) -> None:
        self._bus = bus
        self._stream = bus.subjects.stream("BATCHES")
        self._subject = bus.subjects.batch(batch.tenant, batch.id)
        self._last = 0
        self._appending = asyncio.Lock()  # each message names the one before

    async def open(self, driver: str) -> BatchProgress:
        """Read it, and be the one who appends to it.

        Raises:
            ServingError: it cannot be read.
            LeaseLost: another gateway opened it meanwhile.
        """
        progress = BatchProgress()
        async for entry in read(self._bus, self._stream, self._subject):
            progress.push(decode_message(entry.data))
            self._last = entry.seq
        await self.append(BatchOpened(driver))
        return progress

    async def append(self, message: BatchMessage) -> None:
        """Store a message; while the broker is away, try again until this is cancelled.

        Raises:
            LeaseLost: another gateway has opened the log since.
        """
        async with self._appending:
            await self._append(encode(message))

    async def _append(self, payload: bytes) -> None:
        refused = ""
        while True:
            with suppress(NatsError, OSError, TimeoutError, ServingError, msgspec.MsgspecError):
                reply = await compare_and_set(self._bus.nc, self._subject, payload, self._last, WRITE_S)
                if reply.error is None:
                    self._last = reply.seq
                    return
                if reply.error.err_code == WRONG_LAST_SEQUENCE:  # also if the confirmation of this one was lost
                    stored = await get_last(self._bus, self._stream, self._subject, newest=True)
                    if stored is None or stored.data != payload or stored.seq <= self._last:
                        raise LeaseLost
                    self._last = stored.seq
                    return
                if str(reply.error) != refused:
                    refused = str(reply.error)
                    log.warning("batch_log_refused", subject=self._subject, error=refused)
            await asyncio.sleep(AGAIN_S)

    async def messages(self) -> Iterable[BatchMessage]:
        """
        Raises:
            ServingError: it cannot be read.
        """
        return [decode_message(entry.data) async for entry in read(self._bus, self._stream, self._subject)]

    async def purge(self) -> None:
        """Delete it. What is left expires by its age."""
        request = msgspec.json.encode({"filter": self._subject})
        with suppress(NatsError, OSError, TimeoutError):
            await self._bus.nc.request(f"$JS.API.STREAM.PURGE.{self._stream}", request, timeout=WRITE_S)


def count_by_tenant(entries: Iterable[BucketEntry]) -> Counter[str]:
    """Batches that have not ended."""
    return Counter(
        each.value.tenant for each in entries if isinstance(each.value, Batch) and not each.value.status.ended
    )


def _unavailable(why: str) -> ServingError:
    return ServingError(Code.broker_unavailable, f"the broker does not store it ({why}); try again", retry_after=1.0)
