"""``GET /v1/usage`` on a real broker: hours that lie in the time that was asked for, and how long a question waits."""

import json
import time
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from penstock.gateway.access.authentication import ANYONE, CALLER
from penstock.gateway.http import usage
from penstock.gateway.http.usage import UsageEndpoint
from penstock.infra.bus.connection import Bus
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import Subjects
from penstock.schemas.usage import UsagePart, UsageRow
from penstock.schemas.wire import encode
from tests.workers.support import dial


def endpoint(bus: Bus) -> UsageEndpoint:
    gateway: Any = SimpleNamespace(bus=bus, cells=[SimpleNamespace(bus=bus)])
    return UsageEndpoint(gateway)


async def page(asked: UsageEndpoint, since_s: int) -> Any:
    query = f"start_time={since_s}&end_time={since_s + 1}&bucket_width=1h".encode()
    answer = await asked.get(Request({"type": "http", "query_string": query, CALLER: ANYONE}))
    return json.loads(bytes(answer.body))


async def test_an_hour_counts_in_which_nothing_has_ended_since_the_beginning(
    broker: EmbeddedNats, pipeline: Subjects
) -> None:
    """Its part of the ledger was stored before."""
    async with dial(broker, pipeline) as bus:
        since_s = int(time.time()) + 5
        part = UsagePart(1, rows=(UsageRow(since_s // 3600, "acme", requests=1, prompt=7),))
        await bus.js.publish(bus.subjects.usage(1), encode(part))
        (bucket,) = (await page(endpoint(bus), since_s))["data"]
        assert bucket["start_time"] == since_s // 3600 * 3600
        assert bucket["results"][0]["input_tokens"] == 7


async def test_a_question_waits_for_those_before_it_for_a_bounded_time(
    broker: EmbeddedNats, pipeline: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "TURN_S", 0.05)
    async with dial(broker, pipeline) as bus:
        asked = endpoint(bus)
        async with asked._turn:
            with pytest.raises(ServingError) as caught:
                await page(asked, 0)
        assert caught.value.code is Code.overloaded
        assert (await page(asked, 0))["data"] == []
