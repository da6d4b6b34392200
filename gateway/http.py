"""The HTTP door: OpenAI's endpoints over ASGI, answers as server-sent events or JSON.

Routing is Starlette's; the answering endpoints are plain ASGI, since per-token work has no place for layers.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.exchange import Exchange
from gateway.openapi import document
from gateway.prepare import CHAT, TEXT
from gateway.render import Collector, Renderer
from gateway.responses import ErrorDetail, Status, error_body
from gateway.service import Gateway
from schemas import done
from schemas.errors import Code, ServingError
from schemas.requests import GenerateRequest
from schemas.tokens import Finish, TokenItem

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


class _Gone(Exception):
    """The client closed the connection."""


def application(gateway: Gateway) -> App:
    """The ASGI application of one gateway."""
    answering: dict[str, App] = {
        "/v1/chat/completions": _Completions(gateway, CHAT),
        "/v1/completions": _Completions(gateway, TEXT),
    }
    others = _others(gateway, answering)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        # Past Starlette's layers, which handle every message sent: 5 % of a gateway's time.
        direct = answering.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (direct or others)(scope, receive, send)

    return app


def _others(gateway: Gateway, answering: Mapping[str, App]) -> Starlette:
    """Everything but the answering endpoints, and their wrong methods."""
    api = _Api(gateway)
    page = (Path(__file__).parent / "docs.html").read_bytes()
    openapi = _json(document(version("penstock")))

    async def docs(request: Request) -> Response:
        return Response(page, media_type="text/html")

    async def openapi_json(request: Request) -> Response:
        return Response(openapi, media_type="application/json")

    return Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in answering.items()),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/v1/requests/{id}", api.request, methods=["GET"]),
            Route("/v1/requests/{id}", api.cancel, methods=["DELETE"]),
            Route("/v1/requests/{id}/stream", _Reattach(gateway)),
            Route("/health/live", api.live),
            Route("/health/ready", api.ready),
            Route("/metrics", api.metrics),
            Route("/openapi.json", openapi_json),
            Route("/docs", docs),
        ],
        exception_handlers={HTTPException: _http_error, ServingError: _serving_error, Exception: _crash},
    )


# --- answers ---


class _Completions:
    """``POST /v1/chat/completions`` and ``/v1/completions``."""

    def __init__(self, gateway: Gateway, endpoint: str) -> None:
        self._gateway = gateway
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        began = time.monotonic()
        code, accepted = "ok", ""
        try:
            body = await _body(scope, receive, gateway.settings.max_body_bytes)
            prepared = await gateway.prepare(self._endpoint, body)
            exchange = await gateway.submit(prepared.request)
            accepted = prepared.request.id
            gateway.metrics.prompt.inc(prepared.prompt_tokens)
            answer = _Answer(gateway, exchange, receive, send, began)
            if prepared.stream:
                renderer = Renderer(
                    prepared.request, gateway.model.detokenizer, include_usage=prepared.include_usage
                )
                code = await answer.stream(renderer)
            else:
                code = await answer.whole(Collector(prepared.request, gateway.model.detokenizer))
        except ServingError as error:
            code = error.code.value
            await _send_error(send, error, accepted)
        except _Gone:
            code = Code.cancelled.value
        except Exception:
            code = Code.internal.value
            log.exception("http_handler_failed", path=scope["path"])
            with contextlib.suppress(RuntimeError):  # the answer had begun: all that is left is to end it
                await _send_error(send, _INTERNAL, accepted)
        finally:
            gateway.metrics.requests.labels("http", code).inc()
            gateway.metrics.e2e.observe(time.monotonic() - began)


class _Reattach:
    """``GET /v1/requests/{id}/stream``: the answer from its beginning, or behind ``Last-Event-ID``."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        try:
            request = await gateway.find(_bare_id(scope["path_params"]["id"]))
            renderer = Renderer(request, gateway.model.detokenizer, include_usage=True)
            if last := dict(scope["headers"]).get(b"last-event-id"):
                try:
                    renderer.resume(last.decode("latin-1"))
                except ValueError as error:
                    raise ServingError(Code.invalid_request, str(error), param="Last-Event-ID") from None
            exchange = await gateway.attach(request)
            await _Answer(gateway, exchange, receive, send, time.monotonic(), owner=False).stream(renderer)
        except ServingError as error:
            await _send_error(send, error)
        except _Gone:
            pass


class _Answer:
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
            await _end(watcher)
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
            body = collector.response()
            headers = [JSON, (b"content-length", b"%d" % len(body)), (REQUEST_ID, exchange.request.id.encode())]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})
            return self._account(collector)
        finally:
            await _end(watcher)
            self._leave(exchange)

    async def _watch(self) -> None:
        """Fail the exchange once the client has gone, so that whoever waits for items wakes up."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._exchange.fail(_DISCONNECTED)

    def _account(self, answer: Renderer | Collector) -> str:
        usage = answer.usage
        self._gateway.metrics.output.inc(usage.completion_tokens)
        self._gateway.metrics.cached.inc(usage.prompt_tokens_details.cached_tokens)
        return answer.error.code.value if answer.error is not None else "ok"


_INTERNAL = ServingError(Code.internal, "internal error; the gateway's log has the details")
_DISCONNECTED = ServingError(Code.cancelled, "the client disconnected")


async def _end(task: "asyncio.Future[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The request body.

    Raises:
        ServingError: larger than ``limit`` bytes, or too slow.
        _Gone: the client went away.
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
                    raise _Gone
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


async def _send_error(send: Send, error: ServingError, request_id: str = "") -> None:
    if error is _DISCONNECTED:
        return
    body = _json(error_body(error))
    headers = [JSON, (b"content-length", b"%d" % len(body))]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after))))
    if request_id:
        headers.append((REQUEST_ID, request_id.encode()))
    await send({"type": "http.response.start", "status": error.code.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# --- the rest of the API ---


class _Api:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def _model_card(self, name: str) -> dict[str, Any]:
        gateway = self._gateway
        return {
            "id": name,
            "object": "model",
            "created": gateway.started_ns // 1_000_000_000,
            "owned_by": "penstock",
            "max_model_len": gateway.model.max_model_len,
        }

    async def models(self, request: Request) -> Response:
        return _reply({"object": "list", "data": [self._model_card(name) for name in self._gateway.names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._gateway.names:
            raise ServingError(Code.model_not_found, f"model {name[:200]!r} is not served here", param="model")
        return _reply(self._model_card(name))

    async def request(self, request: Request) -> Response:
        gateway = self._gateway
        found = await gateway.find(_bare_id(request.path_params["id"]))
        return _reply(await status_of(gateway, found))

    async def cancel(self, request: Request) -> Response:
        found = await self._gateway.find(_bare_id(request.path_params["id"]))
        await self._gateway.cancel(found.id, "cancelled by request")
        return _reply({"id": found.id, "cancelled": True}, status=202)

    async def live(self, request: Request) -> Response:
        return _reply({"status": "live"})

    async def ready(self, request: Request) -> Response:
        reasons = self._gateway.not_ready()
        return _reply(
            {"status": "not ready" if reasons else "ready", "reasons": reasons}, status=503 if reasons else 200
        )

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def status_of(gateway: Gateway, request: GenerateRequest) -> Status:
    """State and result of a request, from the log alone."""
    collector = Collector(request, gateway.model.detokenizer)
    exchange = await gateway.attach(request)
    try:
        items = exchange.available()
        complete = collector.push(items)
    finally:
        gateway.detach(exchange)
    event = await gateway.outcome(request)
    if not complete and event is not None:  # the token log keeps less long than the terminal events
        collector = Collector(request, gateway.model.detokenizer)
        complete = collector.push(_items_of(event))
    state: Literal["queued", "running", "done", "failed", "cancelled"] = "running" if items else "queued"
    result: msgspec.Raw | None = None
    error: ErrorDetail | None = None
    if complete:
        try:
            result, state = msgspec.Raw(collector.response()), "done"
        except ServingError as failure:
            error = error_body(failure).error
            state = "cancelled" if failure.code is Code.cancelled else "failed"
    return Status(
        id=request.id,
        model=request.model,
        state=state,
        created=request.created_ns // 1_000_000_000,
        deadline=request.deadline_ns // 1_000_000_000,
        gateway=request.gateway,
        worker=event.worker if event else "",
        attempt=max(exchange.fold.attempt, event.attempt if event else 0, 0),
        output_tokens=collector.usage.completion_tokens,
        result=result,
        error=error,
    )


def _items_of(event: done.Done) -> list[TokenItem]:
    """A terminal event as the token items that would say the same."""
    failed = event.code != ""
    return [
        TokenItem(
            event.request,
            event.attempt,
            index,
            0,
            choice.tokens,
            Finish(
                "cancelled" if event.code == Code.cancelled else "error" if failed else choice.reason,
                choice.stop,
                event.usage.cached,
                event.code,
                event.message,
            ),
        )
        for index, choice in enumerate(event.choices)
    ] or [TokenItem(event.request, event.attempt, 0, 0, b"", Finish("error", None, 0, event.code, event.message))]


def _bare_id(text: str) -> str:
    return text.removeprefix("chatcmpl-").removeprefix("cmpl-")


def _reply(value: Any, status: int = 200) -> Response:
    return Response(_json(value), status_code=status, media_type="application/json")


async def _serving_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    return _reply(error_body(error), error.code.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}; see /docs"
    body = error_body(ServingError(Code.invalid_request, message))
    return Response(_json(body), status_code=error.status_code, media_type="application/json", headers=error.headers)


async def _crash(request: Request, error: Exception) -> Response:
    log.error("http_handler_failed", path=request.url.path, error=repr(error))
    return _reply(error_body(_INTERNAL), 500)
