import math

import pytest

from penstock.measure.simulation.fleet import SimulatedRequest, SimulationResult
from penstock.measure.simulation.policy import Placement, SimulatedFleet, WorkerSpec
from penstock.measure.simulation.trace import Request
from penstock.measure.sweep.compare import paired
from penstock.schemas.requests import Priority
from tests.perf.comparison import GroupFigures, figures

MS = 1_000_000


def served(
    index: int, at_ms: int, first_ms: int, last_ms: int, *, target: int = 0, cached: int = 0
) -> SimulatedRequest:
    request = Request(index, at_ms * MS, 100, 11, [])
    return SimulatedRequest(request, at_ms * MS, first_ms * MS, last_ms * MS, cached, Placement((target, 0)))


def test_figures_of_two_requests() -> None:
    fleet = SimulatedFleet((WorkerSpec(),) * 2)
    found = figures(fleet, SimulationResult([served(0, 0, 10, 110), served(1, 100, 130, 330, target=1, cached=64)], 3))
    assert (found.requests, found.unfinished, found.preemptions) == (2, 0, 3)
    assert (found.ttft_mean, found.ttft_max) == (20.0, 30.0)
    assert found.e2e_mean == pytest.approx((110 + 230) / 2)
    assert found.itl_mean == pytest.approx(300 / 20)
    assert found.hit_rate == pytest.approx(64 / 200)
    assert found.tokens_per_s == pytest.approx(22 / 0.33)
    assert found.imbalance == pytest.approx(111 / ((111 + 47) / 2))
    assert found.served == 1.0


def test_classes_and_tenants_have_figures_of_their_own_where_there_are_several() -> None:
    requests = [served(number, 0, 10 * (number + 1), 500) for number in range(3)]
    fleet = SimulatedFleet((WorkerSpec(),))
    assert figures(fleet, SimulationResult(requests, 0)).groups == {}
    requests[2].request.priority = Priority.batch
    classes = figures(fleet, SimulationResult(requests, 0)).groups
    assert {name: each.ttft_mean for name, each in classes.items()} == {"interactive": 15.0, "batch": 30.0}
    requests[0].request.tenant = "a"
    assert figures(fleet, SimulationResult(requests, 0)).groups["a"] == GroupFigures(10.0, 10.0)


def test_requests_that_were_not_completed_are_counted_apart() -> None:
    lost = SimulatedRequest(Request(1, 0, 100, 5, []))
    assert figures(SimulatedFleet((WorkerSpec(),)), SimulationResult([served(0, 0, 1, 2), lost], 0)).unfinished == 1


def test_the_interval_of_paired_runs_ignores_what_seeds_share() -> None:
    """Seeds differ a hundredfold, the policies always by about a tenth."""
    theirs = [1.0, 10.0, 100.0]
    interval = paired([1.10, 11.2, 109.0], theirs)
    assert interval.mean == pytest.approx(0.103, abs=0.005)
    assert 0.05 < interval.low < interval.high < 0.16


def test_one_seed_has_no_interval() -> None:
    interval = paired([2.0], [1.0])
    assert (interval.mean, interval.high) == (pytest.approx(1.0), math.inf)
