import asyncio
from collections.abc import MutableMapping
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import msgspec
import pytest

from penstock.configs.settings import GatewaySettings
from penstock.gateway.base.event_stream import COMMENT
from penstock.gateway.http.asgi import ClientIds
from penstock.gateway.http.prompt_batch import _PromptStream, answer_prompts
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.schemas.errors import Code, ServingError
from tests.gateway.answers import DETOKENIZER, STOP, items, request


async def test_each_prompt_of_a_batch_waits_for_its_portion() -> None:
    steps: list[str] = []
    gateway = MagicMock()

    async def enter() -> None:
        steps.append("portion")

    async def prepare(body: bytes) -> MagicMock:
        steps.append(body.decode())
        if body == b"c":
            raise ServingError(Code.invalid_request, "this is all")
        return MagicMock()

    gateway.turns.enter, gateway.run_for = enter, AsyncMock(return_value=[b"a", b"b", b"c"])
    with pytest.raises(ServingError):
        await answer_prompts(gateway, b"", MagicMock(spec=ClientIds, key=""), prepare, {}, AsyncMock(), 0.0)
    assert steps == ["portion", "a", "portion", "b", "portion", "c"]


async def test_a_stream_of_several_prompts_shows_that_it_lives_while_all_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.http.prompt_batch.HEAD_S", 0.001)
    asked = [msgspec.structs.replace(request("text", parsing=None), id=f"r{number}") for number in range(3)]
    inflights = [InflightRequest(each) for each in asked]
    sent, seen = bytearray(), asyncio.Event()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.extend(message.get("body", b""))
        if sent.count(COMMENT) >= 3:
            seen.set()

    gateway = MagicMock(settings=GatewaySettings(stream_ping_s=0.001))
    stream = _PromptStream(gateway, inflights, send, 0.0, DETOKENIZER, include_usage=False)
    streaming = asyncio.create_task(stream.run())
    async with asyncio.timeout(10):
        await seen.wait()
        for inflight in inflights:
            for seq, item in enumerate(items("Hi there.", STOP)):
                inflight.feed(msgspec.structs.replace(item, request=inflight.request.id), seq)
        await streaming
    assert sent.endswith(b"data: [DONE]\n\n")
    assert bytes(sent).replace(COMMENT, b"").count(b'"finish_reason":"stop"') == 3
