"""Answering over ASGI: a request's body in, server-sent events or one JSON body out.

Plain ASGI without a framework: per-token work has no place for layers.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
import structlog

from gateway.exchange import Exchange
from gateway.prepare import Prepared
from gateway.render import Collector, Renderer
from gateway.responses import error_body
from gateway.service import Gateway
from gateway.tracing import of_http, traced
from schemas.errors import Code, ServingError

log = structlog.get_logger("gateway")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON = (b"content-type", b"application/json")
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
REQUEST_ID = b"x-request-id"
BODY_S = 30.0

_json = msgspec.json.encode


class Gone(Exception):
    """The client closed the connection."""


class Completions:
    """``POST /v1/chat/completions`` and ``/v1/completions``."""

    def __init__(self, gateway: Gateway, endpoint: str) -> None:
        self._gateway = gateway
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        began = time.monotonic()
        code, accepted = "ok", ""
        try:
            body = await read_body(scope, receive, gateway.settings.max_body_bytes)
            prepared = await gateway.prepare(self._endpoint, body)
            prepared = traced(prepared, of_http(scope["headers"], gateway.settings.tracing))
            exchange = await gateway.submit(prepared.request)
            accepted = prepared.request.id
            gateway.metrics.prompt.inc(prepared.prompt_tokens)
            code = await self._answer(scope, prepared, exchange, receive, send, began)
        except ServingError as error:
            code = error.code.value
            await send_error(send, error, accepted)
        except Gone:
            code = Code.cancelled.value
        except Exception:
            code = Code.internal.value
            log.exception("http_handler_failed", path=scope["path"])
            with contextlib.suppress(RuntimeError):  # the answer had begun: all that is left is to end it
                await send_error(send, INTERNAL, accepted)
        finally:
            gateway.metrics.requests.labels("http", code).inc()
            gateway.metrics.e2e.observe(time.monotonic() - began)

    async def _answer(
        self, scope: Scope, prepared: Prepared, exchange: Exchange, receive: Receive, send: Send, began: float
    ) -> str:
        """Send what the request comes to; returns the code for the metrics."""
        gateway = self._gateway
        answer = Answer(gateway, exchange, receive, send, began)
        if not prepared.stream:
            return await answer.whole(Collector(prepared.request, gateway.model.detokenizer))
        renderer = Renderer(prepared.request, gateway.model.detokenizer, include_usage=prepared.include_usage)
        return await answer.stream(renderer)


class Reattach:
    """``GET /v1/requests/{id}/stream``: the answer from its beginning, or behind ``Last-Event-ID``.

    Args:
        pictures: sends the answer of a request for pictures: (request, Last-Event-ID, scope, receive, send).
    """

    def __init__(self, gateway: Gateway, pictures: Callable[..., Awaitable[None]]) -> None:
        self._gateway = gateway
        self._pictures = pictures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        try:
            request = await gateway.find(bare_id(scope["path_params"]["id"]))
            last = dict(scope["headers"]).get(b"last-event-id", b"").decode("latin-1")
            if request.diffusion is not None:
                await self._pictures(request, last, scope, receive, send)
                return
            renderer = Renderer(request, gateway.model.detokenizer, include_usage=True)
            if last:
                try:
                    renderer.resume(last)
                except ValueError as error:
                    raise ServingError(Code.invalid_request, str(error), param="Last-Event-ID") from None
            exchange = await gateway.attach(request)
            await Answer(gateway, exchange, receive, send, time.monotonic(), owner=False).stream(renderer)
        except ServingError as error:
            await send_error(send, error)
        except Gone:
            pass


class Answer:
    """Sends one exchange's items to one client. ``owner``: if this client leaves, the request is cancelled."""

    def __init__(
        self, gateway: Gateway, exchange: Exchange, receive: Receive, send: Send, began: float, owner: bool = True
    ) -> None:
        self._gateway = gateway
        self._exchange = exchange
        self._receive = receive
        self._send = send
        self._began = began
        self._leave = gateway.leave if owner else gateway.detach

    async def stream(self, renderer: Renderer) -> str:
        """Server-sent events; returns the code for the metrics.

        Raises:
            ServingError: the request failed before its first event, or the client went away before it.
        """
        send, exchange = self._send, self._exchange
        watcher = asyncio.ensure_future(self._watch())
        started = False
        try:
            while True:
                try:
                    data = renderer.push(await exchange.take())
                except ServingError as error:
                    renderer.error = renderer.error or error
                    data = renderer.fail(error)
                if not started:
                    if not data:
                        continue
                    if renderer.error is not None:
                        raise renderer.error
                    started = True
                    request_id = exchange.request.id.encode()
                    headers = [*SSE_HEADERS, (REQUEST_ID, request_id)]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    self._gateway.metrics.ttft.observe(time.monotonic() - self._began)
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": not renderer.done})
                if renderer.done:
                    return self._account(renderer)
        finally:
            await end_task(watcher)
            self._leave(exchange)

    async def whole(self, collector: Collector) -> str:
        """One JSON body; returns the code for the metrics.

        Raises:
            ServingError: the request failed, or the client went away.
        """
        exchange = self._exchange
        watcher = asyncio.ensure_future(self._watch())
        try:
            while not collector.push(await exchange.take()):
                pass
            body = await written(collector)
            headers = [JSON, (b"content-length", b"%d" % len(body)), (REQUEST_ID, exchange.request.id.encode())]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})
            return self._account(collector)
        finally:
            await end_task(watcher)
            self._leave(exchange)

    async def _watch(self) -> None:
        """Fail the exchange once the client has gone, so that whoever waits for items wakes up."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._exchange.fail(DISCONNECTED)

    def _account(self, answer: Renderer | Collector) -> str:
        usage = answer.usage
        self._gateway.metrics.output.inc(usage.completion_tokens)
        self._gateway.metrics.cached.inc(usage.prompt_tokens_details.cached_tokens)
        return answer.error.code.value if answer.error is not None else "ok"


async def written(collector: Collector) -> bytes:
    """The JSON body of an answer; a large one is written in a thread, beside the streams of others.

    Raises:
        ServingError: the request failed.
    """
    return await asyncio.to_thread(collector.response) if collector.large else collector.response()


INTERNAL = ServingError(Code.internal, "internal error; the gateway's log has the details")
DISCONNECTED = ServingError(Code.cancelled, "the client disconnected")


async def end_task(task: "asyncio.Future[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The request body.

    Raises:
        ServingError: larger than ``limit`` bytes, or too slow.
        Gone: the client went away.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        body: bytes = message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        return body
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                if message["type"] == "http.disconnect":
                    raise Gone
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
                if not message.get("more_body"):
                    return b"".join(parts)
                message = await receive()
    except TimeoutError:
        raise ServingError(Code.invalid_request, f"the body did not arrive within {BODY_S:g} s") from None


def _too_large(limit: int) -> ServingError:
    return ServingError(Code.body_too_large, f"the body is larger than {limit} bytes (--max-body-bytes)")


async def send_error(send: Send, error: ServingError, request_id: str = "") -> None:
    if error is DISCONNECTED:
        return
    body = _json(error_body(error))
    headers = [JSON, (b"content-length", b"%d" % len(body))]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after))))
    if request_id:
        headers.append((REQUEST_ID, request_id.encode()))
    await send({"type": "http.response.start", "status": error.code.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def bare_id(text: str) -> str:
    return text.removeprefix("chatcmpl-").removeprefix("cmpl-")
