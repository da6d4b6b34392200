"""Requests that wait in a REQUESTS of 1 MiB while finished ones pass: none is discarded, and new ones are accepted."""

import dataclasses
import functools

import pytest
from nats.aio.client import Client

from penstock.gateway.admission.storage import LogCapacity
from penstock.gateway.base.gateway_metrics import GatewayMetrics
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.puller import sequence, stored_ns
from penstock.infra.metrics.scope import MetricScope
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.requests import Priority
from penstock.schemas.streams import StreamSpec, topology
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import eventually
from tests.router.support import Clients, room, routing
from tests.workers.support import request

SIZE = 1 << 20
BODY = bytes(10_000)


@pytest.fixture
async def pipeline(nc: Client, subjects: Subjects) -> Subjects:
    whole = topology(subjects)

    def shrink(spec: StreamSpec) -> StreamSpec:
        return dataclasses.replace(spec, max_bytes=SIZE) if spec.name == subjects.stream("REQUESTS") else spec

    await apply(nc, dataclasses.replace(whole, streams=tuple(map(shrink, whole.streams))))
    return subjects


class CapacityProbe:
    """A gateway's capacity check, and finished requests of others."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.stream = bus.subjects.stream("REQUESTS")
        self.room = LogCapacity(bus, GatewayMetrics(MetricScope()))

    async def passes(self, count: int) -> None:
        """Requests that are finished as soon as they are stored: no router's consumer is behind them."""
        for _ in range(count):
            await self.bus.js.publish(f"{self.bus.subjects.namespace}.request.m.finished", BODY)

    async def check(self) -> None:
        names = [f"router-{priority.value}" for priority in Priority]
        await self.room.refresh([await self.bus.js.consumer_info(self.stream, name) for name in names], ())
        self.room.check()


@pytest.mark.parametrize("parked", [False, True], ids=["held", "sent-away"])
async def test_held_requests_are_published_again_and_block_no_others(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, parked: bool
) -> None:
    async with routing(broker, pipeline, max_held_bytes=room(4)) as one:
        await clients.stub("w1")
        await one.knows("w1")
        probe = CapacityProbe(clients.bus)
        asked = [request(model="missing") for _ in range(3 if parked else 1)]  # a quarter of the room is one
        await clients.ask(*asked)
        await eventually(lambda: len(one.waiting) == 1)
        for _ in range(3 * SIZE // len(BODY) // 20):
            await probe.passes(20)
            await eventually(functools.partial(is_moved, probe))
            await probe.check()
        first = (await clients.bus.js.stream_info(probe.stream)).state.first_seq
        assert first > len(asked), "their first messages are discarded"
        await clients.stub("late", model="missing", slots=100)
        for each in asked:
            await clients.placed(each)  # one job each
        await eventually(functools.partial(nothing_waits, clients))


async def is_moved(probe: CapacityProbe) -> bool:
    info = await probe.bus.js.consumer_info(probe.stream, "router-standard")
    await probe.room._requests.look()
    floor = info.ack_floor.stream_seq if info.ack_floor else 0
    return probe.room._requests.share_from(floor + 1) < 0.75


async def nothing_waits(clients: Clients) -> bool:
    return await clients.unacknowledged() == 0


@pytest.mark.parametrize(
    "reply",
    [
        "$JS.ACK.ps_REQUESTS.router-batch.1.17.4.1700000000.0",
        "$JS.ACK.hub.ACCHASH.ps_REQUESTS.router-batch.1.17.4.1700000000.0.tok",
    ],
)
def test_sequence_and_time_are_read_from_both_forms_of_an_acknowledgement_subject(reply: str) -> None:
    assert (sequence(reply), stored_ns(reply)) == (17, 1700000000)
