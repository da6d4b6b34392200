"""Answers a completion of several prompts: a request for each, in the log and for its worker, and one answer."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from penstock.gateway.apis.chat.prepare_chat import PreparedRequest
from penstock.gateway.apis.chat.prompt_batch import BatchRenderer, merge_answers, split_prompts
from penstock.gateway.apis.endpoints import Aggregator, aggregator_for, encode_answer
from penstock.gateway.base.event_stream import COMMENT, error_event, within_lines
from penstock.gateway.base.gateway_metrics import account
from penstock.gateway.base.request_bodies import unsupported
from penstock.gateway.http.answers import DISCONNECTED, HEAD_S, JSON, SSE_HEADERS, IdleTimer, StreamClock, id_headers
from penstock.gateway.http.asgi import ClientIds, Scope, Send
from penstock.gateway.http.server import SCOPE, HttpConnection
from penstock.gateway.request_log.inflight import CONTINUES, InflightRequest
from penstock.gateway.service.gateway import Gateway
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas.errors import ServingError
from penstock.schemas.tokens import TokenItem


async def answer_prompts(
    gateway: Gateway,
    body: bytes,
    names: ClientIds,
    prepare: Callable[[bytes], Awaitable[PreparedRequest]],
    scope: Scope,
    send: Send,
    began: float,
) -> str:
    """Answer a body of several prompts; returns the code for the metrics, "": there are not several.

    If a prompt cannot be served, none is; if a request fails, the others are cancelled.

    Args:
        began: when the client's request came, monotonic seconds.
    Raises:
        ServingError: of the first prompt that cannot be served, or the first request that failed.
    """
    bodies = await gateway.run_for(body, split_prompts, body)
    if not bodies:
        return ""
    if names.key:
        raise unsupported("Idempotency-Key", "Idempotency-Key is not supported with several prompts")
    prepared = []
    for each in bodies:
        await gateway.turns.enter()
        prepared.append(await prepare(each))
    return await _answer(gateway, prepared, scope, send, began)


async def _answer(gateway: Gateway, prepared: Sequence[PreparedRequest], scope: Scope, send: Send, began: float) -> str:
    """Returns the code for the metrics.

    Raises:
        ServingError: of the first request that failed.
    """
    inflights: list[InflightRequest] = []
    connection: HttpConnection = scope[SCOPE]
    try:
        for each in prepared:
            gateway.metrics.of(each.request.model).prompt.inc(each.prompt_tokens)
            request = each.request
            if request.fallbacks:  # one model answers all: the answer has one name for it
                request = msgspec.structs.replace(request, fallbacks=())
            inflights.append(await gateway.submit(request))
        gone = partial(_fail, inflights)
        connection.on_lost = gone
        if connection.lost:
            gone()
        gateway.answering.update(inflights)
        if prepared[0].stream:
            detokenizer = await gateway.fleet.detokenizer(prepared[0].request)
            usage = prepared[0].include_usage
            return await _PromptStream(gateway, inflights, send, began, detokenizer, include_usage=usage).run()
        await _whole(gateway, inflights, send)
        return "ok"
    finally:
        connection.on_lost = None
        for inflight in inflights:
            gateway.answering.discard(inflight)
            gateway.cancel_unfinished(inflight)


async def _whole(gateway: Gateway, inflights: Sequence[InflightRequest], send: Send) -> None:
    """
    Raises:
        ServingError: of the first request that failed.
    """
    collectors = await _collected(gateway, inflights)
    parts = [await encode_answer(collector) for collector in collectors]
    whole = await asyncio.to_thread(merge_answers, parts)
    headers = [JSON, (b"content-length", b"%d" % len(whole)), *id_headers(inflights[0].request)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": whole})
    metrics = gateway.metrics.of(inflights[0].request.model)
    for collector in collectors:
        account(metrics, collector.usage)
    metrics.response_bytes.inc(len(whole))


class _PromptStream:
    """Sends the events of several requests as they come."""

    def __init__(
        self,
        gateway: Gateway,
        inflights: Sequence[InflightRequest],
        send: Send,
        began: float,
        detokenizer: Detokenizer | None,
        *,
        include_usage: bool,
    ) -> None:
        assert detokenizer is not None
        self._metrics = gateway.metrics.of(inflights[0].request.model)
        self._inflights = inflights
        self._send = send
        requests = [inflight.request for inflight in inflights]
        self._renderer = BatchRenderer(requests, detokenizer, include_usage=include_usage)
        self._turn = asyncio.Lock()  # of the connection
        self._idle = IdleTimer(gateway.settings.stream_ping_s, self._nudge)
        self._clocks = [StreamClock(self._metrics, began) for _ in inflights]

    async def run(self) -> str:
        """Returns the code for the metrics.

        Raises:
            ServingError: a request failed before anything was sent, or the client went away.
        """
        try:
            return await self._run()
        finally:
            self._idle.close()
            for clock in self._clocks:
                clock.ends()

    def _nudge(self) -> None:
        """One of those that wait says for all that the stream is idle."""
        for place, inflight in enumerate(self._inflights):
            if not self._renderer.ended(place):
                inflight.nudge()
                return

    async def _run(self) -> str:
        # An error before that has its own status code.
        first, code = await self._inflights[0].take_within(HEAD_S), "ok"
        begun = self._renderer.push(0, first)
        headers = [*SSE_HEADERS, *id_headers(self._inflights[0].request)]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._body(0, first, begun)
            async with asyncio.TaskGroup() as group:
                for place in range(len(self._inflights)):
                    group.create_task(self._follow(place))
            last = self._renderer.end()
        except ExceptionGroup as failures:
            error = failures.exceptions[0]
            if not isinstance(error, ServingError) or error is DISCONNECTED:
                raise error from None
            last, code = error_event(error, finished=error.code not in CONTINUES), error.code.value
        await self._body(0, (), last, more=False)
        for usage in self._renderer.usages:
            account(self._metrics, usage)
        return code

    async def _follow(self, place: int) -> None:
        """
        Raises:
            ServingError: the request failed, or the client went away.
        """
        renderer, inflight = self._renderer, self._inflights[place]
        while not renderer.ended(place):
            items = await inflight.take(nudged=True)
            await self._body(place, items, renderer.push(place, items) if items else COMMENT)

    async def _body(self, place: int, items: Sequence[TokenItem], data: bytes, *, more: bool = True) -> None:
        if data or not more:
            self._clocks[place].sends(items, len(data))
            self._idle.sent()
            async with self._turn:
                await self._send({"type": "http.response.body", "body": within_lines(data), "more_body": more})


async def _collected(gateway: Gateway, inflights: Sequence[InflightRequest]) -> list[Aggregator]:
    """
    Raises:
        ServingError: of the first request that failed.
    """
    detokenizer = await gateway.fleet.detokenizer(inflights[0].request)
    collectors = [aggregator_for(inflight.request, detokenizer) for inflight in inflights]
    try:
        async with asyncio.TaskGroup() as group:
            for collector, inflight in zip(collectors, inflights, strict=True):
                group.create_task(_collect(collector, inflight))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return collectors


async def _collect(collector: Aggregator, inflight: InflightRequest) -> None:
    """
    Raises:
        ServingError: the request failed, or the client went away.
    """
    while not collector.push(await inflight.take()):
        pass
    if collector.error is not None:
        raise collector.error


def _fail(inflights: Sequence[InflightRequest]) -> None:
    for inflight in inflights:
        inflight.fail(DISCONNECTED)
