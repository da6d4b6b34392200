"""Answers over HTTP, with a connection of the test's own."""

import asyncio
from collections.abc import MutableMapping
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from configs.settings import GatewaySettings
from gateway.access.caller import ANYONE, CALLER
from gateway.anthropic.render import PING, ClientBody, MessageRenderer
from gateway.http.answers import Generations, Responder, SendError, answer_text, send_error
from gateway.http.connections import SCOPE
from gateway.http.messages import send_message_error
from gateway.log.inflight import InflightRequest
from infra.bus.loop_lag import TurnBudget
from schemas.errors import Code, ServingError
from tests.gateway.answers import DETOKENIZER, STOP, items, request


async def test_a_stream_of_messages_shows_that_it_lives_while_it_waits_for_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.http.answers.PING_S", 0.001)
    monkeypatch.setattr("gateway.http.answers.HEAD_S", 0.001)
    asked = request("message", msgspec.json.encode(ClientBody(100)))
    inflight = InflightRequest(asked)
    sent, pings = bytearray(), asyncio.Event()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.extend(message.get("body", b""))
        if sent.count(PING) >= 3:
            pings.set()

    gateway = MagicMock(turns=TurnBudget())
    scope = {SCOPE: MagicMock(lost=False)}
    streaming = asyncio.create_task(
        Responder(gateway, inflight, scope, send, 0.0).stream(MessageRenderer(asked, DETOKENIZER))
    )
    async with asyncio.timeout(10):
        await pings.wait()
        gateway.metrics.ttft.observe.assert_not_called()
        for seq, item in enumerate(items("Hi there.", STOP)):
            inflight.feed(item, seq)
        assert await streaming == "ok"
    assert sent.endswith(b'data: {"type":"message_stop"}\n\n')
    alone = MessageRenderer(asked, DETOKENIZER).push(items("Hi there.", STOP))
    assert bytes(sent).replace(PING, b"") == alone.replace(PING, b""), "pings change no number"


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
    await Generations(gateway, "chat", answer_text)({"headers": [], CALLER: ANYONE}, receive, send)
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
    await Generations(gateway, "chat", answer_text, refuse)({"headers": [], CALLER: ANYONE}, receive, send)
    assert (sent[0]["status"], dict(sent[0]["headers"])[b"retry-after"]) == (status, b"1")
    assert msgspec.json.decode(sent[1]["body"])["error"]["code"] == code.value
