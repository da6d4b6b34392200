"""The capacity check on a real stream of 1 MiB: new requests are refused before any waiting one is discarded."""

import dataclasses
from typing import Any

import pytest
from nats.aio.client import Client

from penstock.gateway.admission.storage import LogCapacity
from penstock.gateway.base.gateway_metrics import GatewayMetrics
from penstock.infra.bus.connection import Bus
from penstock.infra.metrics.scope import MetricScope
from penstock.infra.nats_server.apply_streams import apply
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Priority
from penstock.schemas.streams import StreamSpec, topology
from penstock.schemas.subjects import Subjects
from tests.infra.metrics.support import value_of

SIZE = 1 << 20
BODY = bytes(10_000)


class SubmittingGateway:
    """Stores requests as a gateway does, while its capacity check accepts them."""

    def __init__(self, nc: Client, subjects: Subjects) -> None:
        self.metrics = GatewayMetrics(MetricScope())
        self.nc, self.subjects = nc, subjects
        self.bus = Bus(nc, subjects)
        self.capacity = LogCapacity(self.bus, self.metrics)
        self.open: list[tuple[str, int]] = []

    async def refresh(self) -> None:
        names = [f"router-{priority.value}" for priority in Priority]
        infos = [await self.bus.js.consumer_info(self.subjects.stream("REQUESTS"), name) for name in names]
        await self.capacity.refresh(infos, self.open)

    async def submit(self, priority: Priority = Priority.standard, tenant: str | None = None) -> None:
        self.capacity.check(tenant)
        await self.bus.js.publish(self.subjects.request("m", priority.value, "r"), BODY)

    async def until_refused(self, priority: Priority = Priority.standard) -> ServingError:
        for _ in range(3 * SIZE // len(BODY)):
            try:
                await self.submit(priority)
            except ServingError as error:
                return error
            await self.refresh()
        raise AssertionError("never refused")

    async def place(self, count: int, priority: Priority = Priority.standard) -> None:
        """As a router does."""
        pull = await self.bus.js.pull_subscribe_bind(f"router-{priority.value}", self.subjects.stream("REQUESTS"))
        for _ in range(count):
            (message,) = await pull.fetch(1, timeout=5)
            await message.ack_sync()
        await pull.unsubscribe()

    async def state(self) -> Any:
        return (await self.bus.js.stream_info(self.subjects.stream("REQUESTS"))).state


@pytest.fixture
async def gateway(nc: Client, subjects: Subjects) -> SubmittingGateway:
    whole = topology(subjects)

    def shrink(spec: StreamSpec) -> StreamSpec:
        return dataclasses.replace(spec, max_bytes=SIZE) if spec.name == subjects.stream("REQUESTS") else spec

    await apply(nc, dataclasses.replace(whole, streams=tuple(map(shrink, whole.streams))))
    made = SubmittingGateway(nc, subjects)
    await made.refresh()
    return made


async def test_waiting_requests_are_never_discarded_and_new_ones_are_refused_with_the_fix(
    gateway: SubmittingGateway,
) -> None:
    error = await gateway.until_refused()
    assert error.code is Code.queue_full
    assert "_REQUESTS holds 8" in error.message
    assert "1 MiB" in error.message
    assert "add workers, or enlarge it: nats stream edit" in error.message
    state = await gateway.state()
    assert state.first_seq == 1
    assert state.bytes > 0.79 * SIZE
    gauge = gateway.metrics.unfinished.labels(gateway.subjects.stream("REQUESTS"))
    assert 0.8 <= value_of(gauge) < 0.9
    await gateway.place(state.messages // 2)
    await gateway.refresh()
    await gateway.submit()


async def test_finished_history_of_three_times_the_limit_refuses_no_request(gateway: SubmittingGateway) -> None:
    for _ in range(3 * SIZE // len(BODY)):
        await gateway.submit()
        await gateway.place(1)
        await gateway.refresh()
    assert (await gateway.state()).first_seq > SIZE // len(BODY)


async def test_one_class_s_history_does_not_count_for_another_s_first_request(gateway: SubmittingGateway) -> None:
    await gateway.submit(Priority.batch)
    await gateway.place(1, Priority.batch)
    for _ in range(SIZE // len(BODY)):
        await gateway.submit(Priority.interactive)
        await gateway.place(1, Priority.interactive)
    await gateway.submit(Priority.batch)  # unplaced, and its consumer's floor is at the very beginning
    await gateway.refresh()
    await gateway.submit(Priority.interactive)
    assert value_of(gateway.metrics.unfinished.labels(gateway.subjects.stream("REQUESTS"))) < 0.05


async def test_when_room_is_scarce_a_tenant_beyond_its_share_is_refused_before_others(
    gateway: SubmittingGateway,
) -> None:
    gateway.open = [("loud", 480_000), ("quiet", 400)]
    while gateway.capacity._requests.level < 0.65:
        await gateway.submit()
        await gateway.refresh()
    await gateway.submit(tenant="quiet")
    with pytest.raises(ServingError, match="tenant 'loud' has more than its share"):
        await gateway.submit(tenant="loud")
