"""Answers a completion of several prompts: a request for each, in the log and for its worker, and one answer.

``split_prompts`` makes a body for each prompt; ``merge_answers`` and ``PromptListRenderer`` make one answer of theirs.
These are pure.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import chain

import msgspec
from msgspec import Raw, Struct

from penstock.gateway.apis.chat.prepare_chat import PreparedRequest
from penstock.gateway.apis.chat.stream_renderer import StreamRenderer
from penstock.gateway.apis.endpoints import Aggregator, aggregator_for, encode_answer
from penstock.gateway.base.chat_objects import PromptTokensDetails, UsageBody
from penstock.gateway.base.event_stream import COMMENT, DONE, error_event, within_lines
from penstock.gateway.base.gateway_metrics import account
from penstock.gateway.base.request_bodies import invalid, unsupported, without_lone_surrogates
from penstock.gateway.http.answers import DISCONNECTED, HEAD_S, JSON, SSE_HEADERS, IdleTimer, StreamClock, id_headers
from penstock.gateway.http.asgi import ClientIds, Scope, Send
from penstock.gateway.http.server import SCOPE, HttpConnection
from penstock.gateway.request_log.inflight import CONTINUES, InflightRequest
from penstock.gateway.service.gateway import Gateway
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest
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
        self._renderer = PromptListRenderer(requests, detokenizer, include_usage=include_usage)
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


MAX_PROMPTS = 256

_json = msgspec.json.encode


class _Peek(Struct):
    prompt: Raw = Raw()


class _Answer(Struct):
    id: str
    created: int
    model: str
    choices: list[Raw]
    usage: UsageBody
    object: str = "text_completion"


_peek = msgspec.json.Decoder(_Peek).decode
_prompts = msgspec.json.Decoder(list[Raw]).decode
_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode


def split_prompts(data: bytes) -> Sequence[bytes]:
    """A body for each prompt; empty: there are not several, or the body is to be refused as a whole.

    Raises:
        ServingError: too many.
    """
    try:
        prompt = bytes(_peek(data).prompt).lstrip()
        if not prompt.startswith(b"["):
            return ()
        prompts = _prompts(prompt)
        if len(prompts) < 2 or not all(bytes(each).lstrip()[:1] in (b'"', b"[") for each in prompts):
            return ()  # token ids of one prompt, or a mixture
        fields = _fields(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return () if (repaired := without_lone_surrogates(data)) == data else split_prompts(repaired)
    if len(prompts) > MAX_PROMPTS:
        raise invalid("prompt", f"prompt has {len(prompts)} prompts; the limit is {MAX_PROMPTS}")
    return [_json(fields | {"prompt": each}) for each in prompts]


def merge_answers(bodies: Sequence[bytes]) -> bytes:
    """One body of those of the prompts, in their order: choices are numbered on, usage is added up."""
    answers = [_decode_answer(body) for body in bodies]
    first = answers[0]
    choices = [_numbered(at, raw) for at, raw in enumerate(chain.from_iterable(each.choices for each in answers))]
    return _json(msgspec.structs.replace(first, choices=choices, usage=_sum([each.usage for each in answers])))


def _sum(usages: Sequence[UsageBody]) -> UsageBody:
    return UsageBody(
        sum(each.prompt_tokens for each in usages),
        sum(each.completion_tokens for each in usages),
        sum(each.total_tokens for each in usages),
        PromptTokensDetails(sum(each.prompt_tokens_details.cached_tokens for each in usages)),
    )


def _numbered(index: int, choice: Raw) -> Raw:
    """A choice with another index, which is its first field."""
    encoded = bytes(choice)
    return Raw(b'{"index":%d' % index + encoded[encoded.index(b",") :])


_EVENT_ID = re.compile(rb"(?m)^id: [^\n]*\n")


class PromptListRenderer:
    """One stream of the answers of several prompts: their events as they come, with choices numbered on.

    Events have no ids: no single request has the whole stream, so it cannot be continued elsewhere.

    Args:
        requests: of the prompts, in their order; each has as many choices as the others.
    """

    def __init__(
        self, requests: Sequence[GenerateRequest], detokenizer: Detokenizer, *, include_usage: bool = False
    ) -> None:
        first = requests[0]
        self._parts = [
            StreamRenderer(request, detokenizer, include_usage=include_usage, part_of=first, offset=place * request.n)
            for place, request in enumerate(requests)
        ]
        self._include_usage = include_usage
        created = first.created_ns // 1_000_000_000
        names = {"id": "cmpl-" + first.id, "object": "text_completion", "created": created, "model": first.model}
        self._head = b"data: " + _json(names)[:-1]

    @property
    def usage(self) -> UsageBody:
        return _sum(self.usages)

    @property
    def usages(self) -> list[UsageBody]:
        """Of each prompt."""
        return [part.usage for part in self._parts]

    def push(self, place: int, items: Iterable[TokenItem]) -> bytes:
        """Events for these items of the prompt at ``place``.

        Raises:
            ServingError: its request failed.
        """
        part = self._parts[place]
        data = part.push(items)
        if part.error is not None:
            raise part.error
        return _EVENT_ID.sub(b"", data)

    def ended(self, place: int) -> bool:
        return self._parts[place].done

    def end(self) -> bytes:
        """The end of the stream, once every answer has ended."""
        usage = b""
        if self._include_usage:
            usage = b'%b,"choices":[],"usage":%b}\n\n' % (self._head, _json(self.usage))
        return usage + DONE
