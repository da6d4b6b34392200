"""Stored responses over HTTP: created, fetched, streamed again, cancelled, deleted, listed. All of it from the log."""

import asyncio
import time

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.access.authentication import Sight, caller_of
from penstock.gateway.apis.chat.segments import WholeAnswer
from penstock.gateway.apis.responses.bodies import InputItem
from penstock.gateway.apis.responses.objects import DeletedResponse, InputItemList
from penstock.gateway.apis.responses.objects import Response as ResponseObject
from penstock.gateway.apis.responses.record import PREFIX, input_items, listed_item, read_stored
from penstock.gateway.apis.responses.render import ResponseBuilder, response
from penstock.gateway.base.request_bodies import RESPONSE, invalid, page_of
from penstock.gateway.http.answers import JSON, HttpExchange, Responder, answer_text, id_headers, send_error
from penstock.gateway.http.asgi import Receive, Scope, Send
from penstock.gateway.http.request_list import running_progress
from penstock.gateway.request_log.lookup import StoredRequest
from penstock.gateway.service.gateway import Gateway
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas import done
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import WHOLE_REQUEST
from penstock.schemas.wire import TOKEN_BYTES

log = structlog.get_logger("gateway")

CANCELLED_S = 5.0  # how long a cancelled response is waited for
LOOK_S = 0.05
PAGE, MOST = 20, 100  # input items

_json = msgspec.json.encode


async def answer_response(gateway: Gateway, accepted: HttpExchange) -> str:
    """Send the answer of a response; returns the code for the metrics. In the background, it is only announced.

    Raises:
        ServingError: the request failed, or the client disconnected, before anything was sent.
    """
    request = accepted.inflight.request
    if accepted.prepared.stream or not read_stored(request.client_body).body.background:
        return await answer_text(gateway, accepted)
    if accepted.prepared.repeated:
        gateway.release(accepted.inflight)
    else:
        gateway.tasks.spawn(_count(gateway, accepted), name="count", on_failure=_not_counted)
    if accepted.prepared.repeated:
        body = _json(await current_response(gateway, await gateway.look_up(request.id, Sight(request.tenant))))
    else:
        body = _json(ResponseBuilder(request, await _detokenizer(gateway, request)).response("queued"))
    headers = [JSON, (b"content-length", b"%d" % len(body)), *id_headers(request)]
    await accepted.send({"type": "http.response.start", "status": 200, "headers": headers})
    await accepted.send({"type": "http.response.body", "body": body})
    return ""


async def _count(gateway: Gateway, accepted: HttpExchange) -> None:
    """Count a response that runs in the background when it ends, as one with a client is."""
    inflight, metrics = accepted.inflight, gateway.metrics.of(accepted.inflight.request.model)
    tokens, cached, open_, code, started = 0, 0, inflight.request.n, "ok", False
    try:
        while open_ > 0:
            for item in await inflight.take():
                tokens += len(item.tokens) // TOKEN_BYTES if item.choice >= 0 else 0
                if item.finish is not None:
                    open_ = 0 if item.choice == WHOLE_REQUEST else open_ - 1
                    cached, code = item.finish.cached_tokens, item.finish.code or code
            if tokens and not started:
                started = True
                metrics.ttft.observe(time.monotonic() - accepted.began)
    except ServingError as error:
        code = error.code.value
    finally:
        gateway.release(inflight)
    metrics.output.inc(tokens)
    metrics.cached.inc(cached)
    metrics.input_length.observe(accepted.prepared.prompt_tokens)
    metrics.output_length.observe(tokens)
    metrics.requests.labels("http", code).inc()
    metrics.e2e.observe(time.monotonic() - accepted.began)


def _not_counted(error: BaseException) -> None:
    log.warning("response_not_counted", error=repr(error))


class StoredResponses:
    """``/v1/responses/{id}`` and what is below it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """GET: as it is now; with ``stream=true`` its events, after ``starting_after`` or ``Last-Event-ID``."""
        request = Request(scope)
        try:
            found = await self._find(request)
            if request.query_params.get("stream") != "true":
                await _reply(_json(await current_response(self._gateway, found)))(scope, receive, send)
                return
            renderer = await self._gateway.renderer(found.request, ended_ns=lambda: inflight.ended_ns)
            after = request.query_params.get("starting_after") or request.headers.get("last-event-id")
            if after:
                renderer.resume(after)
            inflight = await self._gateway.attach(*found)
            responder = Responder(self._gateway, inflight, scope, send, time.monotonic(), owner=False, again=True)
            await responder.stream(renderer)
        except ServingError as error:
            await send_error(send, error)

    async def cancel(self, request: Request) -> Response:
        """The response as it ended, or as it is if that takes long. One that is over stays as it is.

        Raises:
            ServingError: invalid_request: it is not in the background, whether it runs or is over.
        """
        found = await self._find(request)
        if not read_stored(found.request.client_body).body.background:
            raise invalid("id", "only responses with background: true can be cancelled; to stop another, disconnect")
        if found.record is None:
            found = await self._stopped(found, request)
        return _reply(_json(await current_response(self._gateway, found)))

    async def delete(self, request: Request) -> Response:
        """Erase it, or what is left of it; one that still runs is cancelled first."""
        found = await self._find(request, deleted=True)
        if found.record is None:
            found = await self._stopped(found, request)
        if found.record is None:
            raise ServingError(
                Code.broker_unavailable, f"response {PREFIX}{found.request.id} is being cancelled; delete it again"
            )
        await self._gateway.erase(found.request.id)
        return _reply(_json(DeletedResponse(PREFIX + found.request.id)))

    async def input_items(self, request: Request) -> Response:
        """What the response was made from: its own input after that and the output of those that it continues.

        Responses that were deleted since, or have expired, are left out.
        """
        found = await self._find(request)
        stored = read_stored(found.request.client_body)
        turns = await self._gateway.conversations.remaining(
            stored.ancestors, self._gateway.fleet.sight(caller_of(request.scope))
        )
        items: list[InputItem] = []
        for turn in turns:
            items += [*input_items(turn.id, turn.input), *turn.output]
        items += input_items(PREFIX + found.request.id, stored.body.input or ())
        page = page_of(items[::-1], request.query_params, default=PAGE, most=MOST)
        return _reply(_json(InputItemList(**page._asdict() | {"data": [listed_item(item) for item in page.data]})))

    async def _find(self, request: Request, *, deleted: bool = False) -> StoredRequest:
        """
        Args:
            deleted: also one of which something is left.
        """
        name = request.path_params["id"]
        found: StoredRequest | None = None
        try:
            sight = self._gateway.fleet.sight(caller_of(request.scope))
            found = await self._gateway.look_up(name.removeprefix(PREFIX), sight, deleted=deleted)
        except ServingError as error:
            if error.code not in (Code.request_not_found, Code.request_erased):
                raise
        if found is None or found.request.endpoint != RESPONSE or found.request.no_store:
            message = f"response {name[:80]!r} is not known: it was deleted, made with store: false, or has expired"
            raise ServingError(Code.request_not_found, message, param="id")
        return found

    async def _stopped(self, found: StoredRequest, request: Request) -> StoredRequest:
        """Cancel a response; returns when it has ended, or after ``CANCELLED_S``.

        Raises:
            ServingError: request_not_found: it was deleted meanwhile.
        """
        await self._gateway.cancel_surely(found.request.id, "cancelled by request")
        until = time.monotonic() + CANCELLED_S
        while found.record is None and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
            found = await self._find(request)
        return found


async def current_response(gateway: Gateway, found: StoredRequest) -> ResponseObject:
    """A response as it is now, or as it ended."""
    request, record = found
    if record is None:
        request = await gateway.as_run(request)
    detokenizer = await _detokenizer(gateway, request)
    ended_ns = record.timings.ended_ns if record is not None else gateway.bus.clock.now_ns()  # it has ended just now
    whole = WholeAnswer(request, detokenizer, response, lambda: ended_ns)
    if record is not None:
        whole.push(done.items(record))
        return response(request, whole.answer)
    progress = await running_progress(gateway, request, whole)
    if progress is None:
        return response(request, whole.answer)
    return ResponseBuilder(request, detokenizer).response("in_progress" if progress.attempt > 0 else "queued")


async def _detokenizer(gateway: Gateway, request: GenerateRequest) -> Detokenizer:
    """
    Raises:
        ServingError: model_unavailable.
    """
    detokenizer = await gateway.fleet.detokenizer(request)
    assert detokenizer is not None
    return detokenizer


def _reply(body: bytes) -> Response:
    return Response(body, media_type="application/json")
