"""The limits of keys, on a real nats-server."""

import asyncio

import pytest

from penstock.gateway.admission.rate_limits import limiter
from penstock.gateway.admission.rate_limits.limiter import Limiter
from penstock.infra.bus.connection import Bus
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.keys import ApiKey
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import opened

KEY = ApiKey("k" * 12, b"", requests_per_minute=10)


@pytest.mark.parametrize("clustered", [True, False], ids=["cluster", "one server"])
async def test_in_a_cluster_a_bucket_without_a_leader_is_waited_for(
    broker: EmbeddedNats, subjects: Subjects, monkeypatch: pytest.MonkeyPatch, clustered: bool
) -> None:
    """Its servers are restarted one by one: of 719 requests, one was refused meanwhile."""
    monkeypatch.setattr(limiter, "WITHIN_S", 0.2)
    monkeypatch.setattr(Bus, "clustered", property(lambda bus: clustered))
    async with opened(broker, subjects) as bus:
        limits, stream = Limiter(bus, "gw"), f"KV_{subjects.bucket('budgets')}"
        config = (await bus.js.stream_info(stream)).config
        await bus.js.delete_stream(stream)
        reserving = asyncio.create_task(limits.reserve(KEY, 1))
        if clustered:
            await asyncio.sleep(2 * limiter.WITHIN_S)
            await bus.js.add_stream(config)
            await reserving
        else:
            with pytest.raises(ServingError) as refused:
                await reserving
            assert refused.value.code is Code.broker_unavailable
