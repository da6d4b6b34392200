"""Answering over ASGI: a request's body in, server-sent events or one JSON body out.

Plain ASGI without a framework: per-token work has no place for layers.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import structlog

from penstock.gateway.access.authentication import caller_of
from penstock.gateway.admission.rate_limits.limiter import Limiter
from penstock.gateway.apis.chat.prepare_chat import PreparedRequest, with_trace
from penstock.gateway.apis.endpoints import (
    Aggregator,
    Renderer,
    UndecidedRenderer,
    encode_portions,
    ignored_options,
    listed,
    renderer_for,
)
from penstock.gateway.base.chat_objects import error_body, stopping, unconfirmed
from penstock.gateway.base.event_stream import within_lines
from penstock.gateway.base.gateway_metrics import ModelMetrics, account
from penstock.gateway.base.request_bodies import CHAT, COMPLETION, MESSAGE, OLLAMA, RESPONSE
from penstock.gateway.http import asgi
from penstock.gateway.http.idempotency_key import submit_once
from penstock.gateway.http.server import FOLLOWED, SCOPE, HttpConnection
from penstock.gateway.request_log.inflight import CONTINUES, InflightRequest
from penstock.gateway.service.gateway import Gateway
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.keys import Limited
from penstock.schemas.requests import GenerateRequest, new_request_id, request_of_answer
from penstock.schemas.tokens import TokenItem
from penstock.schemas.wire import TOKEN_BYTES

log = structlog.get_logger("gateway")

JSON = (b"content-type", b"application/json")
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
LINES_HEADERS = [(b"content-type", b"application/x-ndjson"), *SSE_HEADERS[1:]]
MODEL = "penstock.model"  # in the ASGI scope: the canonical name of the request's model
ANSWERED_BY = b"x-penstock-model"
IGNORED_OPTIONS = b"x-penstock-ignored-options"
HEAD_S = 0.05  # how long a stream's header waits for the first token: an error by then gets its own status code
HEAD_CONSTRAINED_S = 5.0  # the same for constrained output: a worker may refuse what this gateway cannot check

_json = msgspec.json.encode


class HttpExchange(NamedTuple):
    """A request that is stored, and the client that waits for its answer.

    Attributes:
        began: when the client's request came, monotonic seconds.
        owner: the request is cancelled if this client leaves.
    """

    prepared: PreparedRequest
    inflight: InflightRequest
    scope: asgi.Scope
    send: asgi.Send
    began: float
    owner: bool


SendError = Callable[[asgi.Send, ServingError, str], Awaitable[None]]  # (send, error, id of the accepted request or "")
BodyAnswer = Callable[
    [Gateway, bytes, asgi.ClientIds, Callable[[bytes], Awaitable[PreparedRequest]], asgi.Scope, asgi.Send, float],
    Awaitable[str],
]
# Sends the answer; returns the code for the metrics, "": the request is counted elsewhere.
Answer = Callable[[Gateway, HttpExchange], Awaitable[str]]


class GenerationEndpoint:
    """A POST endpoint that generates something: reads the body, has the request accepted, sends its answer.

    Args:
        endpoint: what ``Gateway.prepare`` makes of the body, as in ``GenerateRequest.endpoint``.
        answer: sends the answer of an accepted request.
        refuse: sends an error in the shape of the API.
        answer_body: answers a body that does not make one request, such as several prompts; returns the code for the
            metrics, "": it makes one.
    """

    def __init__(
        self,
        gateway: Gateway,
        endpoint: str,
        answer: Answer,
        refuse: SendError | None = None,
        answer_body: BodyAnswer | None = None,
    ) -> None:
        self._gateway = gateway
        self._endpoint = endpoint
        self._answer = answer
        self._send_error = refuse or send_error
        self._answer_body = answer_body

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        gateway = self._gateway
        began = time.monotonic()
        code, accepted, body = "ok", "", b""
        confirmed = True  # the request that is named by ``accepted`` is stored
        reserved: list[str] = []  # ids of requests that the caller's limits were asked for
        limited = caller_of(scope).limited_by
        try:
            if limited:
                gateway.limiter.check(limited)
            body = await asgi.read_body(scope, receive, gateway.settings.max_body_bytes)
            await gateway.turns.enter()
            gateway.metrics.request_bytes.inc(len(body))
            unapplied = gateway.fleet.unapplied_by(body, caller_of(scope))
            ignored = await gateway.run_for(body, ignored_options, self._endpoint, body, unapplied)
            if ignored:
                send = asgi.with_header(send, IGNORED_OPTIONS, listed(ignored).encode())
            names = asgi.read_client_ids(scope["headers"])
            prepare_body = partial(self._prepare, scope, names, reserved)
            if self._answer_body:
                answered = await self._answer_body(gateway, body, names, prepare_body, scope, send, began)
                if answered:
                    code = answered
                    return
            prepare = partial(prepare_body, body)
            if names.key:
                prepared, inflight = await submit_once(
                    gateway, caller_of(scope).tenant, names.key, self._endpoint, body, prepare
                )
                accepted = inflight.request.id
            else:
                prepared = await prepare()
                accepted, confirmed = prepared.request.id, False
                inflight = await gateway.submit(prepared.request, owner=not prepared.detached)
                confirmed = True
            model = scope[MODEL] = prepared.request.model
            gateway.metrics.of(model).prompt.inc(prepared.prompt_tokens)
            owner = not (names.key or prepared.detached)
            code = await self._answer(gateway, HttpExchange(prepared, inflight, scope, send, began, owner))
        except ServingError as problem:
            error = problem
            if error.code is Code.shutting_down and not confirmed:  # its publisher was closed
                error = unconfirmed(accepted)
            code = error.code.value
            if error.code is Code.rate_limit_exceeded and limited and len(reserved) < 2:
                show_limits(scope, gateway.limiter, limited)
            send = asgi.with_status_of_full(send, error.code, gateway.settings.queue_full_status)
            await self._send_error(send, error, accepted)
        except asgi.ClientDisconnected:
            code = Code.cancelled.value
        except asyncio.CancelledError:  # the gateway stops, and this was not under way yet
            error = stopping(accepted) if confirmed else unconfirmed(accepted)
            code = error.code.value
            with contextlib.suppress(RuntimeError):
                await self._send_error(send, error, accepted)
        except Exception:
            code = Code.internal.value
            log.exception("http_handler_failed", path=scope["path"])
            with contextlib.suppress(RuntimeError):  # the answer had begun: all that is left is to end it
                await self._send_error(send, INTERNAL, accepted)
        finally:
            for request_id in reserved:
                gateway.charges.abandon(request_id)
            if code:
                counted = gateway.metrics.of(scope.get(MODEL) or gateway.fleet.name_in(body))
                counted.requests.labels("http", code).inc()
                counted.e2e.observe(time.monotonic() - began)

    async def _prepare(
        self, scope: asgi.Scope, names: asgi.ClientIds, reserved: list[str], body: bytes
    ) -> PreparedRequest:
        """
        Raises:
            ServingError: the body cannot be served, the queue is full, or a limit of the caller's is reached.
        """
        caller = caller_of(scope)
        prepared = await self._gateway.prepare(self._endpoint, body, no_store=names.no_store, caller=caller)
        scope[MODEL] = prepared.request.model
        if caller.limited_by:
            reserved.append(prepared.request.id)
            await self._gateway.charges.reserve(caller, prepared)
            if len(reserved) == 1:
                show_limits(scope, self._gateway.limiter, caller.limited_by)
        prepared = asgi.with_client_id(prepared, names)
        return with_trace(prepared, asgi.from_http_headers(scope["headers"], self._gateway.settings.tracing))


_PLAIN = frozenset({CHAT, COMPLETION})  # OpenAI's events of these are data alone; those of responses have more
_EVENT_IDS = b"x-penstock-event-ids"
_ID_LINES = re.compile(rb"^id: [^\n]*\n", re.MULTILINE)


def takes_data_alone(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a client would take ids of events, and comments, for JSON.

    Load generators that parse streams by themselves do (``vllm bench serve``, SGLang's ``bench_serving``). Nothing but
    aiohttp's own User-Agent tells them from other clients.
    """
    agent = b""
    for name, value in headers:
        if name == _EVENT_IDS:
            return value.strip().lower() in (b"0", b"false")
        if name == b"user-agent":
            agent = value
    return agent.startswith(b"Python/") and b" aiohttp/" in agent


async def answer_text(gateway: Gateway, accepted: HttpExchange) -> str:
    """Send the answer of a request for text; returns the code for the metrics.

    Raises:
        ServingError: the request failed, or the client disconnected, before anything was sent.
    """
    prepared, inflight, scope, send, began, owner = accepted
    responder = Responder(gateway, inflight, scope, send, began, owner)
    if not prepared.stream:
        return await responder.whole()
    try:
        request, include_usage = inflight.request, prepared.include_usage
        if request.fallbacks:
            renderer = await gateway.renderer(request, include_usage=include_usage, ended_ns=lambda: inflight.ended_ns)
        else:
            renderer = renderer_for(
                request,
                await gateway.fleet.detokenizer(request),
                include_usage=include_usage,
                ended_ns=lambda: inflight.ended_ns,
            )
    except BaseException:
        responder.leave()
        raise
    return await responder.stream(renderer, plain=request.endpoint in _PLAIN and takes_data_alone(scope["headers"]))


class Reattach:
    """``GET /v1/requests/{id}/stream``: the answer from its beginning, or after ``Last-Event-ID``.

    Args:
        images: answers requests for images and videos: (request, Last-Event-ID, scope, receive, send).
    """

    def __init__(self, gateway: Gateway, images: Callable[..., Awaitable[None]]) -> None:
        self._gateway = gateway
        self._images = images

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        gateway = self._gateway
        try:
            request, record = await gateway.look_up(
                request_of_answer(scope["path_params"]["id"]), gateway.fleet.sight(caller_of(scope))
            )
            last = dict(scope["headers"]).get(b"last-event-id", b"").decode("latin-1")
            if request.diffusion is not None:
                await self._images(request, last, scope, receive, send)
                return
            renderer = await gateway.renderer(request, ended_ns=lambda: inflight.ended_ns)
            if last:
                renderer.resume(last)
            inflight = await gateway.attach(request, record)
            await Responder(gateway, inflight, scope, send, time.monotonic(), owner=False, again=True).stream(renderer)
        except ServingError as error:
            await send_error(send, error)


class IdleTimer:
    """Tells when a stream has had no event for ``seconds``, again and again. One timer, however many events there are.

    Args:
        seconds: 0: never.
        on_idle: called then.
    """

    def __init__(self, seconds: float, on_idle: Callable[[], None]) -> None:
        self._seconds = seconds
        self._on_idle = on_idle
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = self._loop.call_later(seconds, self._due) if seconds else None

    def sent(self) -> None:
        """Something goes out now."""
        if self._timer is not None:
            self._last = self._loop.time()

    def _due(self) -> None:
        left = self._last + self._seconds - self._loop.time()
        if left <= 0:
            left = self._seconds
            self._on_idle()
        self._timer = self._loop.call_later(left, self._due)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class StreamClock:
    """Times the events of one stream, for the metrics.

    Args:
        began: when the request's body was read, by the monotonic clock.
        again: its first token was sent before, to another client.
    """

    def __init__(self, metrics: ModelMetrics, began: float, *, again: bool = False) -> None:
        self._again = again
        self._metrics = metrics
        self._last = began
        self._started = False
        self._bytes = 0

    def sends(self, items: Sequence[TokenItem], size: int) -> None:
        """``size`` bytes are about to be sent, rendered from these items; none: they are not part of the answer."""
        self._bytes += size
        if not items:
            return
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        if self._started:
            packed = len(items[0].tokens) if len(items) == 1 else sum([len(item.tokens) for item in items])
            if packed:
                self._metrics.itl.observe(seconds * TOKEN_BYTES / packed)
        else:
            self._started = True
            if not self._again:
                self._metrics.ttft.observe(seconds)

    def ends(self) -> None:
        """Nothing more is sent."""
        self._metrics.response_bytes.inc(self._bytes)


class Responder:
    """Sends one request's items to one client.

    Args:
        owner: if this client leaves, the request is cancelled.
        again: another client got the answer before, or gets it, too: the request was counted with that.
    """

    def __init__(
        self,
        gateway: Gateway,
        inflight: InflightRequest,
        scope: asgi.Scope,
        send: asgi.Send,
        began: float,
        owner: bool = True,
        *,
        again: bool = False,
    ) -> None:
        self._again = again
        self._gateway = gateway
        self._metrics = gateway.metrics.of(inflight.request.model)
        self._inflight = inflight
        self._connection: HttpConnection = scope[SCOPE]
        self._send = send
        self._began = began
        self._release = gateway.cancel_unfinished if owner else gateway.release

    def open(self) -> None:
        """From now on the in-flight request fails when the client goes or the gateway stops."""
        inflight, connection = self._inflight, self._connection
        gone = partial(inflight.fail, DISCONNECTED)
        connection.on_lost = gone
        if connection.lost:
            gone()
        inflight.abort = connection.abort
        self._gateway.answering.add(inflight)

    def leave(self) -> None:
        """The answer cannot be sent at all."""
        self._release(self._inflight)

    def close(self) -> None:
        inflight = self._inflight
        self._connection.on_lost = inflight.abort = None
        self._gateway.answering.discard(inflight)
        self._release(inflight)

    async def begin_stream(self, *, followed: bool = False) -> None:
        """
        Args:
            followed: the first part of the body is sent right after the head.
        """
        request = self._inflight.request
        headers = [*(LINES_HEADERS if request.endpoint in OLLAMA else SSE_HEADERS), *id_headers(request)]
        start: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": headers}
        if followed:
            start[FOLLOWED] = True
        await self._send(start)

    async def stream(self, renderer: Renderer, *, plain: bool = False) -> str:
        """Server-sent events; returns the code for the metrics.

        Args:
            plain: they have neither ids nor comments.
        Raises:
            ServingError: the request failed before the header was sent, or the client went away before it.
        """
        send, inflight = self._send, self._inflight
        started = False
        if isinstance(renderer, UndecidedRenderer):
            renderer.follow(lambda: inflight.request)
        wait_s = HEAD_S if inflight.request.constraint is None else HEAD_CONSTRAINED_S
        clock = StreamClock(self._metrics, self._began, again=self._again)
        idle = IdleTimer(self._gateway.settings.stream_ping_s, inflight.nudge)
        self.open()
        try:
            while True:
                items: Sequence[TokenItem] = ()
                try:
                    items = await (inflight.take(nudged=True) if started else inflight.take_within(wait_s))
                    data = renderer.push(items) or (renderer.ping if started and not items and not plain else b"")
                except ServingError as error:
                    data = renderer.fail(error, finished=error.code not in CONTINUES)
                done = renderer.done
                if not started:
                    if (failed := renderer.error) is not None:
                        # A stored response is there also if it failed: its last event says so.
                        shown = self._again and inflight.request.endpoint == RESPONSE
                        if not shown or failed.code in CONTINUES:
                            raise failed
                    started = True
                    await self.begin_stream(followed=bool(data) or done)
                if data or done:  # a client that has seen every event still gets the end of the body
                    clock.sends(items, len(data))
                    idle.sent()
                    if b"\xe2" in data or b"\xc2" in data:  # their first bytes, found in a fiftieth of the time
                        data = within_lines(data)
                    if plain:
                        data = _ID_LINES.sub(b"", data)
                    await send({"type": "http.response.body", "body": data, "more_body": not done})
                if done:
                    return self._account(renderer)
        finally:
            idle.close()
            clock.ends()
            self.close()

    async def whole(self) -> str:
        """One JSON body; returns the code for the metrics.

        Raises:
            ServingError: the request failed, or the client went away.
        """
        inflight = self._inflight
        self.open()
        try:
            collector = await self._gateway.collected(inflight)
            portions = await encode_portions(collector)
            size = sum(map(len, portions))
            self._metrics.response_bytes.inc(size)
            headers = [JSON, (b"content-length", b"%d" % size), *id_headers(inflight.request)]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers, FOLLOWED: True})
            for number, portion in enumerate(portions, 1):
                await self._send({"type": "http.response.body", "body": portion, "more_body": number < len(portions)})
            return self._account(collector)
        finally:
            self.close()

    def _account(self, answer: Renderer | Aggregator) -> str:
        if not self._again:
            account(self._metrics, answer.usage)
        return answer.error.code.value if answer.error is not None else "ok"


def id_headers(request: GenerateRequest) -> list[tuple[bytes, bytes]]:
    """Headers with the request's id; Anthropic's clients look for it under another name. If another model runs
    it than was asked for, that one's name."""
    headers = [(asgi.REQUEST_ID, request.id.encode())]
    if request.endpoint == MESSAGE:
        headers.append((b"request-id", request.id.encode()))
    if request.asked:
        headers.append((ANSWERED_BY, quote(request.named).encode()))
    return headers


INTERNAL = ServingError(Code.internal, "internal error; the gateway's log has the details")
DISCONNECTED = ServingError(Code.cancelled, "the client disconnected")


async def send_error(send: asgi.Send, error: ServingError, request_id: str = "") -> None:
    name = (request_id or new_request_id()).encode()
    await send_refusal(send, error, error.code.status, _json(error_body(error)), [(asgi.REQUEST_ID, name)])


async def send_refusal(
    send: asgi.Send, error: ServingError, status: int, body: bytes, ids: Sequence[tuple[bytes, bytes]]
) -> None:
    """
    Args:
        body: of the error, as the client's API has it.
        ids: headers that name the request.
    """
    if error is DISCONNECTED:
        return
    headers = [JSON, (b"content-length", b"%d" % len(body))]
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after))))
    if error.code is Code.insufficient_quota:  # clients of OpenAI and Anthropic repeat every other 429
        headers.append((b"x-should-retry", b"false"))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *ids]})
    await send({"type": "http.response.body", "body": body})


def show_limits(scope: MutableMapping[str, Any], limiter: Limiter, limited: Sequence[Limited]) -> None:
    """Have the answer say what the caller has left. Without a layer around ``send``, which every event would pass."""
    connection: HttpConnection = scope[SCOPE]
    connection.add_lines(limit_lines(limiter, limited))


_LIMIT_LINES = [
    b"x-ratelimit-limit-%b: %%d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%ds\r\n" % (of, of, of)
    for of in (b"requests", b"tokens")
]


def limit_lines(limiter: Limiter, limited: Sequence[Limited]) -> bytes:
    """Headers as OpenAI names them, of requests and tokens per minute: limit, rest, seconds until all of it is free
    again. They are written together, as each answer has six of them."""
    requests, tokens = limiter.standing(limited)
    lines = _LIMIT_LINES[0] % requests if requests.limit else b""
    return lines + _LIMIT_LINES[1] % tokens if tokens.limit else lines
