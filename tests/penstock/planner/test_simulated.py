"""The planner on the router's own policy and simulated engines."""

import pytest

from penstock.measure.simulation.trace import RequestTrace
from penstock.planner.simulate_command import PlanSimulationSettings, run
from penstock.planner.simulated import Engines, Simulated, generate, simulate
from penstock.schemas.plans import Bounds, Role, Rules

RULES = Rules(
    ttft_ms=2500.0,
    itl_ms=60.0,
    interval_s=15.0,
    start_s=15.0,
    down_after_s=60.0,
    down_cooldown_s=30.0,
    bounds=dict.fromkeys(("aggregated", "prefill", "decode"), Bounds(1, 12)),
)
ENGINES = Engines(slowness=5.0, transfer_ns_per_token=500)


@pytest.fixture(scope="module")
def trace() -> RequestTrace:
    return generate("diurnal", seed=3, seconds=600, low=0.2, high=4.0, isl=3000, osl=100)


@pytest.fixture(scope="module")
def aggregated(trace: RequestTrace) -> Simulated:
    return served(trace, {"aggregated": 1}, planned=True)


def served(trace: RequestTrace, counts: dict[Role, int], *, planned: bool) -> Simulated:
    return simulate("run", trace, 1.0, ENGINES, counts, RULES, planned=planned)


def test_a_planned_fleet_takes_fewer_gpu_hours_than_its_peak_all_day(
    trace: RequestTrace, aggregated: Simulated
) -> None:
    planned = aggregated
    peak = served(trace, {"aggregated": planned.outcome.peak_gpus}, planned=False)
    least = served(trace, {"aggregated": 1}, planned=False)
    assert planned.outcome.unserved == 0
    assert planned.outcome.peak_gpus > 1
    assert planned.outcome.gpu_hours < 0.8 * peak.outcome.gpu_hours
    assert planned.outcome.attained > 0.9
    assert least.outcome.attained < planned.outcome.attained


def test_prefill_and_decode_come_and_go_without_a_lost_request(trace: RequestTrace) -> None:
    planned = served(trace, {"prefill": 1, "decode": 1}, planned=True)
    assert planned.outcome.unserved == 0
    assert {role for role, begin, _ in planned.runs if begin > 0} <= {"prefill", "decode"}
    assert planned.outcome.starts > 0
    assert any(end < planned.steps[-1].at_s - 30 for _, _, end in planned.runs)  # some ended early


def test_the_lifetimes_of_workers_are_those_of_the_decisions(aggregated: Simulated) -> None:
    planned = aggregated
    for step in planned.steps:
        if step.decision is not None:
            change = step.decision.changes["aggregated"]
            assert change.current == step.observed.pools["aggregated"].count
            begun = sum(begin == step.at_s for _, begin, _ in planned.runs)
            assert begun == max(0, change.target - change.current)


def test_the_shapes_have_their_rates() -> None:
    bursts = generate("bursts", seed=1, seconds=1200, low=1.0, high=10.0, isl=500, osl=50)
    inside = sum(300 <= row.timestamp / 1e3 < 420 for row in bursts.rows)
    outside = sum(row.timestamp / 1e3 < 300 for row in bursts.rows)
    assert inside == pytest.approx(1200, rel=0.1)
    assert outside == pytest.approx(300, rel=0.2)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"prefill": 1}, "go together"),
        ({"fixed": ("2+2",)}, "a number of workers"),
        ({"min_workers": 9, "max_workers": 3}, "above --max-workers"),
        ({"low": 9.0, "high": 3.0}, "above --high"),
    ],
)
def test_flags_that_do_not_fit_are_said(
    flags: dict[str, object], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(PlanSimulationSettings(**flags)) == 2  # type: ignore[arg-type]
    assert text in capsys.readouterr().err
