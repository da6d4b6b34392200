"""Lost leases are counted by the names that workers keep, for ten minutes, and by whoever saw them."""

import asyncio

import pytest

from infra.broker.server import EmbeddedNats
from infra.metrics.scope import MetricScope
from infra.operate.observe import lost_leases
from infra.operate.routers import routers
from router.cluster.lease_losses import NAMES, WINDOW_NS, LeaseLosses
from router.metrics import Metrics
from schemas import fleet
from schemas.routers import LostLeases, Member
from schemas.subjects import Subjects
from tests.infra.bus.support import eventually
from tests.router.support import routing
from tests.workers.support import LogClient, run_worker

MINUTE = 60_000_000_000


def test_losses_are_counted_by_name_for_ten_minutes() -> None:
    losses = LeaseLosses()
    for minute, name in enumerate(["a", "b", "b"], 1):
        losses.add(name, "aggregated", "m", minute * MINUTE)
    assert losses.recent(3 * MINUTE) == (
        LostLeases("b", "aggregated", "m", 2, 3 * MINUTE),
        LostLeases("a", "aggregated", "m", 1, MINUTE),
    )
    again = LeaseLosses()
    again.add("b", "aggregated", "m", 3 * MINUTE)
    again.update(losses.part())
    assert again.recent(3 * MINUTE) == losses.recent(3 * MINUTE)
    assert [each.worker for each in losses.recent(2 * MINUTE + WINDOW_NS)] == ["b"]
    assert losses.recent(4 * MINUTE + WINDOW_NS) == ()
    for number in range(100):
        losses.add(f"w-{number}", "aggregated", "m", 1)
    assert len(losses.recent(1)) == NAMES


def test_of_several_routers_the_one_that_saw_most_is_believed() -> None:
    one, two = (LostLeases("w", "aggregated", "m", count, 7) for count in (1, 3))
    assert lost_leases([Member("r-1", 1, lost=(one,)), Member("r-2", 1, lost=(two,)), Member("r-3", 1)]) == [two]


def test_a_name_without_losses_has_no_series() -> None:
    metrics = Metrics(scope := MetricScope())
    seen = "penstock_lease_losses"
    metrics.lost_leases([LostLeases("w", "aggregated", "m", 3, 7)])
    assert scope.registry.get_sample_value(seen, {"worker": "w"}) == 3
    metrics.lost_leases([])
    assert scope.registry.get_sample_value(seen, {"worker": "w"}) is None


async def test_a_router_reports_a_worker_whose_lease_ran_out_and_not_one_that_left_in_order(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "RENEW_S", 0.05)
    async with routing(broker, pipeline) as one, run_worker(broker, pipeline) as hung, run_worker(broker, pipeline):
        await eventually(lambda: one.router.cluster.tracker.size == 2)
        monkeypatch.setattr(hung.session._lease, "_renew", asyncio.Event().wait)  # it holds its key, and renews nothing
        await eventually(lambda: one.router.cluster.tracker.size == 1)
        (lost,) = one.router.cluster.losses.recent(0)
        assert (lost.count, lost.worker) == (1, hung.id.rpartition("-")[0])

        async def reported() -> list[LostLeases]:
            return lost_leases(await routers(log.bus))

        async with asyncio.timeout(20):
            while not await reported():  # noqa: ASYNC110 - the far end is another task
                await asyncio.sleep(0.05)
    assert [each.count for each in one.router.cluster.losses.recent(0)] == [1]
