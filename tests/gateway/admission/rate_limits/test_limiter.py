"""The limits of keys, on a real nats-server."""

import asyncio

import pytest

from penstock.gateway.access.authentication import Caller
from penstock.gateway.admission.rate_limits import limiter
from penstock.gateway.admission.rate_limits.limiter import Limiter
from penstock.infra.bus.connection import Bus
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.keys import ApiKey
from penstock.schemas.subjects import Subjects
from penstock.schemas.tenants import Limits
from tests.infra.bus.support import opened

TENANT = Limits(requests_per_minute=2, tokens_per_minute=50)
KEY = ApiKey("k" * 12, b"", requests_per_minute=10)
OF_KEY = Caller("acme", "acme", key=KEY).limited_by


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
        reserving = asyncio.create_task(limits.reserve(OF_KEY, 1))
        if clustered:
            await asyncio.sleep(2 * limiter.WITHIN_S)
            await bus.js.add_stream(config)
            await reserving
        else:
            with pytest.raises(ServingError) as refused:
                await reserving
            assert refused.value.code is Code.broker_unavailable


async def test_what_a_tenant_is_refused_takes_nothing_of_its_key(broker: EmbeddedNats, subjects: Subjects) -> None:
    both = Caller("acme", "acme", key=KEY, limits=TENANT).limited_by
    tenant = Caller("acme", "acme", limits=TENANT).limited_by
    async with opened(broker, subjects) as bus:
        limits = Limiter(bus, "gw")
        paid = await limits.reserve(both, 20)
        await limits.reserve(both, 20)
        for tokens, reached in ((1, "2 requests per minute"), (60, "50 per minute")):
            with pytest.raises(ServingError, match=f"the tenant 'acme' has .*{reached}") as refused:
                await limits.reserve(both, tokens)
            assert refused.value.code is Code.rate_limit_exceeded
        assert limits.standing(OF_KEY)[0].remaining == 8
        requests, left = limits.standing(both)
        assert [(each.limit, each.remaining) for each in (requests, left)] == [(2, 0), (50, 10)]
        limits.undo(paid)
        assert (limits.standing(OF_KEY)[0].remaining, limits.standing(tenant)[0].remaining) == (9, 1)
        await limits.reserve(tenant, 1)  # one that comes without the key
