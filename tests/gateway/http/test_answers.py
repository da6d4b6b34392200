"""Answers over HTTP, with a connection of the test's own."""

import asyncio
from collections.abc import MutableMapping
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from gateway.anthropic.render import PING, ClientBody, MessageRenderer
from gateway.http.answers import Responder
from gateway.http.connections import SCOPE
from gateway.log.inflight import InflightRequest
from infra.bus.loop_lag import TurnBudget
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
