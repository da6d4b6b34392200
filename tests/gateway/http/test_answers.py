"""Answers over HTTP, with a connection of the test's own."""

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from penstock.configs.settings import GatewaySettings
from penstock.gateway.access.authentication import ANYONE, CALLER
from penstock.gateway.admission.queues import unstored
from penstock.gateway.apis.endpoints import renderer_for
from penstock.gateway.apis.messages.render import ClientBody, MessageEvents
from penstock.gateway.apis.responses.bodies import ResponsesRequest
from penstock.gateway.apis.responses.record import encode_stored
from penstock.gateway.base.chat_objects import stopping
from penstock.gateway.base.event_stream import COMMENT as PING_COMMENT
from penstock.gateway.http.answers import (
    GenerationEndpoint,
    IdleTimer,
    Responder,
    SendError,
    answer_text,
    send_error,
    takes_data_alone,
)
from penstock.gateway.http.app import send_message_error
from penstock.gateway.http.server import SCOPE
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.infra.process.turns import TurnBudget
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from tests.gateway.answers import DETOKENIZER, STOP, items, request
from tests.gateway.nats.support import Running

STREAMS = [
    (request("chat"), PING_COMMENT),
    (request("text", parsing=None), PING_COMMENT),
    (request("response", encode_stored(ResponsesRequest(input="hi", model="demo"))), PING_COMMENT),
    (request("message", msgspec.json.encode(ClientBody(100))), MessageEvents.ping),
]


AIOHTTP = (b"user-agent", b"Python/3.12 aiohttp/3.14.5")


@pytest.mark.parametrize(
    ("headers", "alone"),
    [
        ([], False),
        ([(b"user-agent", b"AsyncOpenAI/Python 3.57.0")], False),
        ([(b"user-agent", b"litellm/1.110 aiohttp/3.14.5")], False),
        ([AIOHTTP], True),
        ([AIOHTTP, (b"x-penstock-event-ids", b"1")], False),
        ([(b"x-penstock-event-ids", b"0"), (b"user-agent", b"curl/8")], True),
    ],
)
def test_ids_and_comments_are_left_out_for_clients_that_take_them_for_data(
    headers: list[tuple[bytes, bytes]], alone: bool
) -> None:
    assert takes_data_alone(headers) is alone


async def test_a_plain_stream_is_data_alone_also_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.http.answers.HEAD_S", 0.001)
    asked, sent, began = request("chat"), bytearray(), asyncio.Event()
    inflight = InflightRequest(asked)
    text = "id: 1\nHi there."

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.extend(message.get("body", b""))
        began.set()

    renderer = renderer_for(asked, DETOKENIZER)
    waits = MagicMock(return_value=PING_COMMENT)
    monkeypatch.setattr(type(renderer), "ping", property(waits))
    gateway = MagicMock(turns=TurnBudget(), settings=GatewaySettings(stream_ping_s=0.001))
    responder = Responder(gateway, inflight, {SCOPE: MagicMock(lost=False)}, send, 0.0)
    streaming = asyncio.create_task(responder.stream(renderer, plain=True))
    async with asyncio.timeout(10):
        await began.wait()
        inflight.nudge()
        for seq, item in enumerate(items(text, STOP)):
            inflight.feed(item, seq)
            await asyncio.sleep(0)
        assert await streaming == "ok"
    waits.assert_not_called()
    *events, end = bytes(sent).split(b"\n\n")
    assert (events.pop(), end) == (b"data: [DONE]", b"")
    chunks = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in events]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == text


@pytest.mark.parametrize(("asked", "ping"), STREAMS, ids=lambda value: getattr(value, "endpoint", ""))
async def test_a_stream_sends_comments_while_it_waits_for_tokens(
    monkeypatch: pytest.MonkeyPatch, asked: GenerateRequest, ping: bytes
) -> None:
    monkeypatch.setattr("penstock.gateway.http.answers.HEAD_S", 0.001)
    inflight = InflightRequest(asked)
    sent, pings = bytearray(), asyncio.Event()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.extend(message.get("body", b""))
        if sent.count(ping) >= 3:
            pings.set()

    gateway = MagicMock(turns=TurnBudget(), settings=GatewaySettings(stream_ping_s=0.001))
    scope = {SCOPE: MagicMock(lost=False)}
    renderer = renderer_for(asked, DETOKENIZER)
    streaming = asyncio.create_task(Responder(gateway, inflight, scope, send, 0.0).stream(renderer))
    async with asyncio.timeout(10):
        await pings.wait()
        gateway.metrics.of.return_value.ttft.observe.assert_not_called()
        for seq, item in enumerate(items("Hi there.", STOP)):
            inflight.feed(item, seq)
        assert await streaming == "ok"
    alone = renderer_for(asked, DETOKENIZER).push(items("Hi there.", STOP))
    assert bytes(sent).replace(ping, b"") == alone.replace(ping, b""), "pings are no events and change no number"
    assert b"id:" not in ping


@pytest.mark.parametrize("error", [unstored("r"), stopping("r")], ids=lambda error: error.code.value)
@pytest.mark.parametrize("asked", [asked for asked, _ in STREAMS], ids=lambda asked: asked.endpoint)
async def test_a_stream_that_was_cut_off_continues_elsewhere_without_a_gap(
    asked: GenerateRequest, error: ServingError
) -> None:
    inflight = InflightRequest(asked)
    gateway = MagicMock(turns=TurnBudget(), settings=GatewaySettings())
    sent = bytearray()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.extend(message.get("body", b""))

    answer = items("Look: it is here, and there is more of it.")
    for seq, item in enumerate(answer[: len(answer) // 2]):
        inflight.feed(item, seq)
    inflight.fail(error)
    responder = Responder(gateway, inflight, {SCOPE: MagicMock(lost=False)}, send, 0.0)
    assert await responder.stream(renderer_for(asked, DETOKENIZER)) == error.code.value
    *seen, last = bytes(sent).removesuffix(b"\n\n").split(b"\n\n")
    assert b"error" in last
    assert not last.startswith(b"id:"), "what goes on elsewhere has another event of that number"

    elsewhere = renderer_for(asked, DETOKENIZER)
    elsewhere.resume(seen[-1].partition(b"\n")[0].removeprefix(b"id: ").decode())
    rest = elsewhere.push(answer).removesuffix(b"\n\n").split(b"\n\n")
    assert [*seen, *rest] == renderer_for(asked, DETOKENIZER).push(answer).removesuffix(b"\n\n").split(b"\n\n")


@pytest.mark.parametrize("asked", [asked for asked, _ in STREAMS], ids=lambda asked: asked.endpoint)
@pytest.mark.parametrize("error", [unstored("r"), ServingError(Code.engine_error, "x")], ids=lambda error: error.code)
async def test_read_again_only_a_response_that_failed_is_streamed_with_its_failure(
    asked: GenerateRequest, error: ServingError
) -> None:
    """That it cannot be read now is no part of it: the client is to come again."""
    inflight = InflightRequest(asked)
    inflight.fail(error)
    gateway = MagicMock(turns=TurnBudget(), settings=GatewaySettings())
    sent = bytearray()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.extend(message.get("body", b""))

    responder = Responder(gateway, inflight, {SCOPE: MagicMock(lost=False)}, send, 0.0, again=True)
    streaming = responder.stream(renderer_for(asked, DETOKENIZER))
    if asked.endpoint == "response" and error.code is Code.engine_error:
        assert await streaming == error.code.value
        assert b"response.failed" in sent
    else:
        with pytest.raises(ServingError) as caught:
            await streaming
        assert (caught.value.code, bytes(sent)) == (error.code, b"")


class Clock:
    """Of the test's own: what ``IdleTimer`` needs of an event loop."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[[], None]) -> MagicMock:
        self.timers.append((self.now + seconds, call))
        return MagicMock()

    def to(self, now: float) -> None:
        while self.timers and self.timers[0][0] <= now:
            self.now, call = self.timers.pop(0)
            call()
        self.now = now


def test_a_stream_has_a_comment_only_when_no_event_came_for_so_long_and_with_0_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, idle = Clock(), MagicMock()
    monkeypatch.setattr("asyncio.get_running_loop", lambda: clock)
    timer = IdleTimer(10.0, idle)
    for now in (4.0, 9.0, 18.0, 27.5):
        clock.to(now)
        timer.sent()
    clock.to(37.4)
    idle.assert_not_called()
    clock.to(37.5)
    idle.assert_called_once()
    clock.to(67.5)
    assert idle.call_count == 4
    assert len(clock.timers) == 1
    timer.close()
    off = IdleTimer(0, idle)
    off.sent()
    off.close()
    assert len(clock.timers) == 1


async def test_a_nudge_that_items_overtake_is_forgotten() -> None:
    inflight = InflightRequest(request("chat"))
    inflight.nudge()
    assert await inflight.take(nudged=True) == []
    inflight.nudge()
    given = items("Hi", None)
    inflight.feed(given[0], 0)
    assert await inflight.take(nudged=True)
    taking = asyncio.create_task(inflight.take(nudged=True))
    await asyncio.sleep(0)
    assert not taking.done()
    inflight.nudge()
    assert await taking == []


async def test_a_request_waits_for_its_portion_when_its_body_has_arrived() -> None:
    steps: list[str] = []
    gateway = MagicMock()
    gateway.settings.max_body_bytes = 100

    async def enter() -> None:
        steps.append("portion")

    async def receive() -> MutableMapping[str, Any]:
        steps.append("body")
        return {"type": "http.request", "body": b"{}"}

    async def prepare(*_: object) -> None:
        steps.append("prepare")
        raise ServingError(Code.invalid_request, "this is all")

    async def send(message: MutableMapping[str, Any]) -> None:
        steps.append(str(message.get("status", "end")))

    gateway.turns.enter, gateway.run_for = enter, prepare
    await GenerationEndpoint(gateway, "chat", answer_text)({"headers": [], CALLER: ANYONE}, receive, send)
    assert steps == ["body", "portion", "prepare", "400", "end"]


@pytest.mark.parametrize("refuse", [send_error, send_message_error])
@pytest.mark.parametrize(("code", "status"), [(Code.queue_full, 503), (Code.rate_limit_exceeded, 429)])
async def test_a_full_queue_can_have_another_status_than_a_keys_limits(
    refuse: SendError, code: Code, status: int
) -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    async def prepare(*_: object) -> None:
        raise ServingError(code, "try again later", retry_after=1.0)

    async def nothing(*_: object) -> None:
        return None

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    settings = GatewaySettings(queue_full_status=503)
    gateway = MagicMock(settings=settings, turns=MagicMock(enter=nothing), run_for=prepare)
    await GenerationEndpoint(gateway, "chat", answer_text, refuse)({"headers": [], CALLER: ANYONE}, receive, send)
    assert (sent[0]["status"], dict(sent[0]["headers"])[b"retry-after"]) == (status, b"1")
    assert msgspec.json.decode(sent[1]["body"])["error"]["code"] == code.value


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "publisher closed"])
async def test_a_request_that_is_not_confirmed_when_its_gateway_stops_is_not_said_to_continue(
    cut: bool, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told ``shutting_down``, by which it goes on, and nobody ever found it."""
    sent: list[MutableMapping[str, Any]] = []
    submitted: asyncio.Queue[str] = asyncio.Queue()

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b'{"model": "tiny", "prompt": "a b c", "max_tokens": 4}'}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def submit(asked: GenerateRequest, *, owner: bool) -> InflightRequest:
        submitted.put_nowait(asked.id)
        if not cut:
            raise ServingError(Code.shutting_down, "the process is stopping")
        await asyncio.Event().wait()  # for a broker that confirms nothing
        raise AssertionError

    monkeypatch.setattr(running.gateway, "submit", submit)
    scope = {"headers": [], CALLER: ANYONE}
    asking = asyncio.create_task(GenerationEndpoint(running.gateway, "completion", answer_text)(scope, receive, send))
    async with asyncio.timeout(10):
        name = await submitted.get()
        if cut:
            asking.cancel()
        await asking
    error = msgspec.json.decode(sent[1]["body"])["error"]
    headers = dict(sent[0]["headers"])
    assert (sent[0]["status"], error["code"]) == (503, Code.broker_unavailable.value)
    assert (headers[b"x-request-id"].decode(), headers[b"retry-after"]) == (name, b"1")
    assert f"has not confirmed request {name}" in error["message"]
