"""Lost leases are counted by the names that workers keep, for ten minutes, and by whoever saw them."""

import asyncio

import msgspec
import pytest

from penstock.infra.bus.worker_leases import routers
from penstock.infra.metrics.scope import MetricScope
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.operate.observe import lost_leases
from penstock.router.state.lost_workers import NAMES, WINDOW_NS, LeaseLosses
from penstock.router.state.router_metrics import Metrics
from penstock.schemas import fleet
from penstock.schemas.routers import LostLeases, Member
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import eventually
from tests.router.support import routing
from tests.workers.support import LogClient, run_worker

MINUTE = 60_000_000_000


def test_losses_are_counted_by_name_for_ten_minutes() -> None:
    losses = LeaseLosses()
    for minute, name in enumerate(["a", "b", "b"], 1):
        losses.add(name, "aggregated", "m", minute * MINUTE, worker=f"{name}-{minute}", workers=("a", "b"))
    assert losses.recent(3 * MINUTE) == (
        LostLeases("b", "aggregated", "m", 2, 3 * MINUTE),
        LostLeases("a", "aggregated", "m", 1, MINUTE),
    )
    again = LeaseLosses()
    again.add("b", "aggregated", "m", 3 * MINUTE, worker="b-3", workers=("a", "b"))
    again.update(*losses.part())
    assert again.recent(3 * MINUTE) == losses.recent(3 * MINUTE)
    assert [each.worker for each in losses.recent(2 * MINUTE + WINDOW_NS)] == ["b"]
    assert losses.recent(4 * MINUTE + WINDOW_NS) == ()
    for number in range(100):
        losses.add(f"w-{number}", "aggregated", "m", 1, worker=f"w-{number}", workers=("others", f"w-{number}"))
    assert len(losses.recent(1)) == NAMES


def counts(losses: LeaseLosses, now_ns: int = 0) -> dict[str, tuple[int, int]]:
    return {each.worker: (each.count, each.together) for each in losses.recent(now_ns)}


def test_what_all_workers_lose_at_once_is_not_their_own_loss() -> None:
    losses = LeaseLosses()
    losses.add("a", "aggregated", "m", MINUTE, worker="a-0", workers=("a-0", "b-1", "c-1"))
    for worker, ms in (("a-1", 0), ("b-1", 100), ("a-2", 200), ("c-1", 2_900)):  # one is back already
        there = ("a-1", "b-1", "c-1")  # when the first one lost its lease
        losses.add(worker[0], "aggregated", "m", 5 * MINUTE + ms * 1_000_000, worker=worker, workers=there)
    assert counts(losses) == {"a": (1, 2), "b": (0, 1), "c": (0, 1)}
    assert losses.recent(0)[0].last_ns == MINUTE, "of its own"
    again = LeaseLosses()
    again.update(*losses.part())
    assert counts(again) == counts(losses)
    assert counts(losses, 2 * MINUTE + WINDOW_NS) == {"a": (0, 2), "b": (0, 1), "c": (0, 1)}


def test_workers_that_are_stopped_in_turn_or_some_of_which_are_well_lose_their_own() -> None:
    losses = LeaseLosses()
    for turn in range(4):
        losses.add("ab"[turn % 2], "aggregated", "m", turn * 4_000_000_000, worker="ab"[turn % 2], workers="ab")
    for name in "cd":
        losses.add(name, "aggregated", "m", MINUTE, worker=name, workers="cde")
    losses.add("only", "aggregated", "m", 2 * MINUTE, worker="only", workers=("only",))
    assert counts(losses) == {"a": (2, 0), "b": (2, 0), "c": (1, 0), "d": (1, 0), "only": (1, 0)}


def test_workers_of_one_name_are_told_apart_by_their_ids() -> None:
    """Three workers of three hosts, all named `worker`: each outage of the broker was a crash of that worker."""
    losses = LeaseLosses()
    there = [f"worker-{number}" for number in range(3)]
    for worker in there:
        losses.add("worker", "aggregated", "m", MINUTE, worker=worker, workers=there)
    assert counts(losses) == {"worker": (0, 3)}
    # One that ends again and again is its own.
    for life in range(3):
        losses.add("worker", "aggregated", "m", 2 * MINUTE + life, worker=f"again-{life}", workers=["again-0", "other"])
    assert counts(losses) == {"worker": (3, 3)}


def test_a_loss_while_the_router_had_lost_the_broker_is_the_brokers() -> None:
    losses = LeaseLosses()
    losses.add("only", "aggregated", "m", MINUTE, worker="only", workers=("only",), link_broke=True)
    assert counts(losses) == {"only": (0, 1)}


def test_of_several_routers_the_one_that_saw_most_is_believed() -> None:
    one, two = (LostLeases("w", "aggregated", "m", count, 7) for count in (1, 3))
    assert lost_leases([Member("r-1", 1, lost=(one,)), Member("r-2", 1, lost=(two,)), Member("r-3", 1)]) == [two]
    one = msgspec.structs.replace(one, together=2)
    assert lost_leases([Member("r-1", 1, lost=(one,)), Member("r-2", 1, lost=(two,))]) == [
        msgspec.structs.replace(two, together=2)
    ]


def test_a_name_without_losses_has_no_series() -> None:
    metrics = Metrics(scope := MetricScope())
    seen = "penstock_lease_losses"
    metrics.lost_leases([LostLeases("w", "aggregated", "m", 3, 7), LostLeases("v", "aggregated", "m", 0, 7, 2)])
    assert scope.registry.get_sample_value(seen, {"worker": "w"}) == 3
    assert scope.registry.get_sample_value(seen, {"worker": "v"}) is None
    assert scope.registry.get_sample_value("penstock_lease_losses_together") == 2
    metrics.lost_leases([])
    assert scope.registry.get_sample_value(seen, {"worker": "w"}) is None


async def test_a_router_reports_a_worker_whose_lease_ran_out_and_not_one_that_left_in_order(
    broker: EmbeddedNats, pipeline: Subjects, log: LogClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "RENEW_S", 0.05)
    async with routing(broker, pipeline) as one, run_worker(broker, pipeline) as hung, run_worker(broker, pipeline):
        await eventually(lambda: one.router.cluster.tracker.size == 2)
        monkeypatch.setattr(hung.session.lease, "_renew", asyncio.Event().wait)  # it holds its key, and renews nothing
        await eventually(lambda: one.router.cluster.tracker.size == 1)
        (lost,) = one.router.cluster.losses.recent(0)
        assert (lost.count, lost.worker) == (1, hung.id.rpartition("-")[0])

        async def reported() -> list[LostLeases]:
            return lost_leases(await routers(log.bus))

        async with asyncio.timeout(20):
            while not await reported():  # noqa: ASYNC110 - the far end is another task
                await asyncio.sleep(0.05)
    assert [each.count for each in one.router.cluster.losses.recent(0)] == [1]
