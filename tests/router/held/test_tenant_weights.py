"""Tenants' weights are followed from their bucket on a real broker, whenever it can be read."""

import asyncio

import pytest
from nats.aio.client import Client

import penstock.router.held.tenant_weights
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.router.held.tenant_weights import TenantWeights
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects
from penstock.schemas.tenants import Limits
from penstock.schemas.wire import encode
from tests.infra.bus.support import eventually
from tests.workers.support import dial


async def weigh(nc: Client, subjects: Subjects, tenant: str, weight: float | None) -> None:
    data = b"" if weight is None else encode(Limits(weight=weight))
    await nc.jetstream().publish(f"$KV.{subjects.bucket('tenants')}.{tenant}", data)


async def test_weights_follow_the_bucket_even_if_it_is_made_after_the_router_has_started(
    broker: EmbeddedNats, pipeline: Subjects, nc: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(penstock.router.held.tenant_weights, "AGAIN_S", 0.05)
    await nc.jetstream().delete_stream(f"KV_{pipeline.bucket('tenants')}")
    async with dial(broker, pipeline, "router-0") as bus, asyncio.TaskGroup() as tasks:
        weights = TenantWeights(bus)
        started = tasks.create_task(weights.start())
        await eventually(lambda: weights._reported)
        assert not started.done()
        await apply(nc, topology(pipeline))
        await weigh(nc, pipeline, "acme", 3.0)
        await started
        await eventually(lambda: weights.weights == {"acme": 3.0})
        await weigh(nc, pipeline, "acme", None)
        await eventually(lambda: weights.weights == {})
        await weights.stop()
