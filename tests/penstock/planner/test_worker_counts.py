"""Decisions: steps, ramps, backlogs, noise, budgets. Time is a number here."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.capacity import EngineTiming, latency
from penstock.planner.worker_counts import Planner, PlannerState
from penstock.schemas.plans import Bounds, Observation, PlanDecision, Pool, Role, Rules, Times
from tests.penstock.planner.engines import engine

RULES = Rules(
    ttft_ms=600.0,
    itl_ms=20.0,
    percentile="mean",
    predictor="constant",
    interval_s=10.0,
    start_s=10.0,
    down_after_s=60.0,
    down_cooldown_s=20.0,
    bounds={"aggregated": Bounds(1, 40), "prefill": Bounds(1, 20), "decode": Bounds(1, 20)},
)
AGGREGATED: dict[Role, EngineTiming] = {"aggregated": engine()}
SPLIT: dict[Role, EngineTiming] = {"prefill": engine(), "decode": engine(gpus=2)}


def seen(rate: float, pools: dict[Role, Pool], *, ended: int = 50, factor: float = 1.0, **more: object) -> Observation:
    """An interval whose latencies are ``factor`` times what the model says."""
    found = Observation(
        seconds=10.0,
        arrived=round(rate * 10),
        ended=ended,
        isl=2000.0,
        osl=200.0,
        pools=pools,
        **more,  # type: ignore[arg-type]
    )
    if factor and ended:
        timings = AGGREGATED if "aggregated" in pools else SPLIT
        planner = Planner(RULES, timings)
        state = PlannerState(isl=2000.0, osl=200.0)
        model = planner._predicted(state, found)
        ttft, itl = (value * factor for value in (model.ttft_ms, model.itl_ms))
        found = msgspec.structs.replace(found, ttft=Times(ttft, ttft, ttft), itl=Times(itl, itl, itl))
    return found


class Run:
    """A planner whose decisions take effect at once."""

    def __init__(self, rules: Rules = RULES, timings: dict[Role, EngineTiming] = AGGREGATED, start: int = 1) -> None:
        self.planner = Planner(rules, timings)
        self.state = PlannerState()
        self.now = 0.0
        self.counts = dict.fromkeys(timings, start)

    def interval(self, rate: float, **more: object) -> PlanDecision:
        self.now += 10.0
        pools = {role: Pool(count) for role, count in self.counts.items()}
        self.state, decision = self.planner.step(self.state, seen(rate, pools, **more), self.now)  # type: ignore[arg-type]
        assert decision is not None
        self.counts = dict(decision.targets)
        return decision


def test_nothing_is_decided_before_a_request_has_ended() -> None:
    planner = Planner(RULES, AGGREGATED)
    state, decision = planner.step(PlannerState(), seen(0.0, {"aggregated": Pool(1)}, ended=0), 10.0)
    assert decision is None
    assert state.rates == (0.0,)


def test_a_step_of_load_is_answered_at_once_with_what_the_model_needs() -> None:
    run = Run()
    run.interval(1.0)
    decision = run.interval(12.0)
    change = decision.changes["aggregated"]
    assert change.reasons == ("more_load",)
    demand = decision.demand
    enough, fewer = (
        latency("aggregated", AGGREGATED["aggregated"], demand, n) for n in (change.target, change.target - 1)
    )
    assert enough.ttft_ms <= 600
    assert enough.itl_ms <= 20
    assert fewer.itl_ms > 20 or fewer.ttft_ms > 600 or fewer.busy > 0.95


def test_workers_are_taken_away_only_after_a_quiet_time_and_step_by_step() -> None:
    run = Run()
    run.interval(1.0)
    peak = run.interval(20.0).changes["aggregated"].target
    counts = [run.interval(2.0).changes["aggregated"].target for _ in range(30)]
    assert counts[:5] == [peak] * 5  # 60 s
    assert counts == sorted(counts, reverse=True)
    assert all(a - b <= max(1, int(a * 0.25)) for a, b in itertools.pairwise(counts))
    assert all(b == c for a, b, c in zip(counts[5:], counts[6:], counts[7:], strict=False) if a > b)  # cool-down
    assert counts[-1] == Run().interval(2.0).changes["aggregated"].kept


def test_noise_does_not_move_workers() -> None:
    run = Run()
    targets = [run.interval(10.0 + (0.3 if turn % 2 else -0.3)).changes["aggregated"].target for turn in range(60)]
    assert len(set(targets[10:])) == 1


def test_a_backlog_counts_as_load() -> None:
    calm, queued = Run(), Run()
    for run in (calm, queued):
        run.interval(4.0)
    without, with_it = calm.interval(4.0), queued.interval(4.0, queued=600)
    assert with_it.demand.rate == pytest.approx(without.demand.rate + 600 / 60)
    assert with_it.targets["aggregated"] > without.targets["aggregated"]


def test_engines_slower_than_their_profile_get_more_workers() -> None:
    exact, slow = Run(start=4), Run(start=4)
    for _ in range(18):
        as_profiled, slower = exact.interval(8.0), slow.interval(8.0, factor=1.5)
    assert as_profiled.correction.itl == pytest.approx(1.0, abs=0.01)
    assert slower.correction.itl == pytest.approx(1.5, abs=0.05)
    assert slower.targets["aggregated"] > as_profiled.targets["aggregated"]


def test_nothing_is_learnt_while_workers_start_or_requests_queue() -> None:
    planner = Planner(RULES, AGGREGATED)
    for pools, queued in (({"aggregated": Pool(4, starting=1)}, 0), ({"aggregated": Pool(4)}, 30)):
        found = seen(8.0, pools, factor=3.0, queued=queued)  # type: ignore[arg-type]
        state, _ = planner.step(
            PlannerState(rates=(8.0,) * 2, sizes=({"aggregated": 4},) * 2, isl=2000, osl=200), found, 10.0
        )
        assert state.correction == PlannerState().correction


def test_nothing_is_learnt_from_requests_of_another_rate() -> None:
    """What ends after a burst came in it."""
    run = Run(start=8, rules=msgspec.structs.replace(RULES, down_after_s=1e6))
    for _ in range(4):
        run.interval(20.0)
    before = run.state.correction
    assert run.interval(4.0, factor=4.0).correction == before
    assert run.interval(4.0, factor=4.0).correction != before


def test_nothing_is_learnt_from_requests_that_fewer_workers_served() -> None:
    run = Run(start=2)
    for _ in range(3):
        run.interval(1.0)
    before = run.state.correction
    run.counts = {"aggregated": 8}
    assert run.interval(1.0, factor=4.0).correction == before


def test_starting_workers_are_not_asked_for_twice() -> None:
    planner = Planner(RULES, AGGREGATED)
    state, first = planner.step(PlannerState(), seen(12.0, {"aggregated": Pool(1)}), 10.0)
    assert first is not None
    asked = first.targets["aggregated"]
    assert asked > 1
    _, second = planner.step(state, seen(12.0, {"aggregated": Pool(1, starting=asked - 1)}), 20.0)
    assert second is not None
    assert second.targets["aggregated"] == asked


def test_prefill_and_decode_are_sized_apart() -> None:
    long_prompts, long_answers = Run(timings=SPLIT), Run(timings=SPLIT)
    for _ in range(3):
        first = long_prompts.interval(6.0)
        second = long_answers.interval(6.0)
    planner = Planner(RULES, SPLIT)
    pools: dict[Role, Pool] = {"prefill": Pool(2), "decode": Pool(2)}
    demand = msgspec.structs.replace(seen(6.0, pools), isl=6000.0, osl=20.0)
    _, prompts = planner.step(PlannerState(), demand, 10.0)
    demand = msgspec.structs.replace(demand, isl=200.0, osl=1500.0)
    _, answers = planner.step(PlannerState(), demand, 10.0)
    assert first.targets == second.targets
    assert prompts is not None
    assert answers is not None
    assert prompts.targets["prefill"] > answers.targets["prefill"]
    assert prompts.targets["decode"] < answers.targets["decode"]


@given(st.lists(st.floats(0, 80), min_size=1, max_size=25), st.integers(3, 30))
def test_bounds_and_the_budget_hold_whatever_comes(rates: list[float], budget: int) -> None:
    rules = msgspec.structs.replace(RULES, gpu_budget=budget)
    run = Run(rules, SPLIT)
    for rate in rates:
        decision = run.interval(rate, factor=0.0)
        targets = decision.targets
        assert all(1 <= count <= 20 for count in targets.values())
        assert targets["prefill"] + 2 * targets["decode"] <= budget
        for change in decision.changes.values():
            assert change.target >= min(change.needed, change.current) or change.reasons


def test_a_budget_is_shared_by_what_each_role_lacks() -> None:
    run = Run(msgspec.structs.replace(RULES, gpu_budget=16), SPLIT)
    run.interval(1.0)
    changes = run.interval(40.0, factor=0.0).changes
    shares = [change.target / change.needed for change in changes.values()]
    assert "gpu_budget" in changes["prefill"].reasons + changes["decode"].reasons
    assert max(shares) - min(shares) < 0.35


def test_a_decision_holds_all_that_it_depends_on() -> None:
    """It goes into the log: reading it back gives the same."""
    decision = Run().interval(5.0)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(decision), type=PlanDecision)
    assert again == decision
