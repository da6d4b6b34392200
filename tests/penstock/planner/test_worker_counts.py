"""Decisions: steps, ramps, backlogs, noise, budgets. Time is a number here."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.capacity import EngineTiming, latency
from penstock.planner.worker_counts import Planner, PlannerState
from penstock.schemas.plans import Bounds, Change, Observation, PlanDecision, Pool, Role, Rules, Times
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

    def interval(self, rate: float, *, starved: int = 0, starting: int = 0, **more: object) -> PlanDecision:
        self.now += 10.0
        pools = {role: Pool(count - starting, starting, starved=starved) for role, count in self.counts.items()}
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


def late(
    run: Run, times: float = 2.0, *, rate: float = 4.0, starved: int = 0, starting: int = 0, one_machine: bool = True
) -> Change:
    """The first role's change after an interval whose TTFT was so many times its limit. A request queues: nothing is
    learnt.
    """
    run.now += 10.0
    pools = {role: Pool(count - starting, starting, starved=starved) for role, count in run.counts.items()}
    found = seen(rate, pools, factor=0.0, queued=1, one_machine=one_machine)
    ttft, itl = times * RULES.ttft_ms, RULES.itl_ms / 2
    found = msgspec.structs.replace(found, ttft=Times(ttft, ttft, ttft), itl=Times(itl, itl, itl))
    run.state, decision = run.planner.step(run.state, found, run.now)
    assert decision is not None
    run.counts = dict(decision.targets)
    return next(iter(decision.changes.values()))


def test_a_limit_missed_for_three_decisions_is_answered_with_one_worker() -> None:
    run = Run(start=3)
    first, second, third = late(run), late(run), late(run)
    assert (first.reasons, first.missed, first.target) == (("watching",), 1, 3)
    assert (second.reasons, second.missed, second.target) == (("watching",), 2, 3)
    assert (third.reasons, third.missed, third.target) == (("limit_missed",), 3, 4)
    assert third.needed == 3, "by the model"


def test_workers_are_not_taken_away_while_a_limit_is_missed_that_more_might_keep() -> None:
    held, starved = Run(start=6), Run(start=6)
    assert [late(held).target for _ in range(2)] == [6, 6]
    less = late(starved, starved=6)
    assert (less.reasons, less.target) == (("cpu_starved", "less_load"), 5), "fewer leave each more of the cores"


def test_a_limit_kept_in_between_restarts_the_count() -> None:
    run = Run(start=3)
    reasons = [late(run, times).reasons for times in (2, 2, 0.5, 2, 2)]
    assert reasons == [("watching",), ("watching",), (), ("watching",), ("watching",)]


def test_an_interval_without_an_ended_request_says_nothing_of_limits() -> None:
    run = Run(start=3)
    late(run), late(run)
    assert run.interval(4.0, ended=0).changes["aggregated"].reasons == ()
    assert late(run).reasons == ("limit_missed",)


def test_workers_that_start_are_waited_for_and_the_count_starts_over_with_them() -> None:
    run = Run(start=3)
    for _ in range(3):
        late(run)
    assert run.counts == {"aggregated": 4}
    assert [late(run, starting=1).reasons for _ in range(3)] == [("starting",)] * 3
    assert [late(run, 1.5).reasons for _ in range(3)] == [("watching",), ("watching",), ("limit_missed",)]


def test_more_workers_are_no_cure_where_those_there_are_wait_for_the_machines_cores() -> None:
    run = Run(start=4)
    changes = [late(run, rate=6.0, starved=2) for _ in range(5)]
    assert {each.reasons for each in changes} == {("cpu_starved",)}
    assert [each.missed for each in changes] == [1, 2, 3, 4, 5]
    assert {each.target for each in changes} == {4}
    assert late(run, rate=6.0, starved=1).reasons == ("limit_missed",), "fewer than half of them"
    elsewhere = Run(start=4)
    assert [late(elsewhere, rate=6.0, starved=4, one_machine=False).target for _ in range(3)] == [4, 4, 5]


def test_nothing_is_learnt_from_workers_that_wait_for_cores() -> None:
    starved, slow = Run(start=4), Run(start=4)
    for _ in range(12):
        without = starved.interval(8.0, factor=2.0, starved=4, one_machine=True)
        learnt = slow.interval(8.0, factor=2.0)
    assert without.correction.itl == 1.0
    assert learnt.correction.itl > 1.5


def test_load_that_the_model_has_workers_for_gets_them_also_on_a_machine_without_free_cores() -> None:
    run = Run()
    assert run.interval(12.0, starved=1, one_machine=True).changes["aggregated"].reasons == ("more_load",)


def test_what_waits_for_cores_gets_no_workers_that_would_share_them() -> None:
    run = Run()
    settled = [run.interval(4.0).changes["aggregated"].target for _ in range(3)][-1]
    waiting = {"queued": 600, "starved": settled, "ttft": Times(900, 900, 900)}
    starved = run.interval(4.0, one_machine=True, **waiting).changes["aggregated"]
    assert (starved.reasons, starved.target) == (("cpu_starved",), settled)
    assert starved.needed > settled, "by the model, as a backlog counts as load"
    elsewhere = run.interval(4.0, one_machine=False, **waiting).changes["aggregated"]
    assert elsewhere.reasons == ("more_load",)


def test_a_missed_limit_at_the_maximum_says_so() -> None:
    run = Run(msgspec.structs.replace(RULES, bounds={"aggregated": Bounds(1, 3)}), start=3)
    assert [late(run).reasons for _ in range(4)] == [("maximum",)] * 4


def test_a_missed_limit_waits_for_the_cooldown_of_the_last_change() -> None:
    run = Run(msgspec.structs.replace(RULES, up_cooldown_s=60.0), start=3)
    for _ in range(3):
        late(run)
    assert [late(run, 1.5).reasons[0] for _ in range(6)] == [*["watching"] * 2, *["cooling_down"] * 3, "limit_missed"]


def test_a_missed_limit_beyond_the_budget_says_so() -> None:
    run = Run(msgspec.structs.replace(RULES, gpu_budget=3), start=3)
    change = [late(run) for _ in range(3)][-1]
    assert (change.target, change.reasons) == (3, ("limit_missed", "gpu_budget"))


def test_a_limit_that_one_prompt_alone_breaks_is_out_of_reach_however_often_it_is_missed() -> None:
    run = Run(msgspec.structs.replace(RULES, ttft_ms=150.0), start=5)  # a prompt takes 200 ms
    changes = [late(run, 8.0) for _ in range(5)]
    assert {each.reasons[0] for each in changes} == {"out_of_reach"}
    assert {each.target for each in changes} == {5}


def test_a_worker_that_brought_nothing_is_not_followed_by_another_and_leaves() -> None:
    run = Run(start=3)
    late(run, 0.5)
    targets = [late(run, 2.0).target for _ in range(7)]
    assert targets[:6] == [3, 3, 4, 4, 4, 4]
    again = late(run, 2.0)
    assert "no_gain" in again.reasons
    least = min(late(run, 2.0).target for _ in range(20))
    assert least == again.needed
    assert max(late(run, 2.0).target for _ in range(20)) == least


def test_a_worker_that_helped_is_followed_by_another_until_the_limit_is_kept_and_all_stay() -> None:
    run = Run(start=3)
    for times in (*[3.0] * 3, *[2.0] * 3):
        late(run, times)
    assert run.counts == {"aggregated": 5}
    assert {late(run, 0.8).target for _ in range(30)} == {5}, "five minutes in which the model needs fewer"
    for _ in range(30):
        fewer = late(run, 0.4, rate=0.5)
    assert fewer.target < 5, "with less load"


def test_each_limit_is_that_of_the_role_which_it_depends_on() -> None:
    run = Run(timings=SPLIT)
    run.counts = {"prefill": 2, "decode": 1}
    for _ in range(3):
        late(run)  # TTFT
    assert run.counts == {"prefill": 3, "decode": 1}


def test_a_decision_holds_all_that_it_depends_on() -> None:
    """It goes into the log: reading it back gives the same."""
    decision = Run().interval(5.0)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(decision), type=PlanDecision)
    assert again == decision


ZERO = msgspec.structs.replace(RULES, bounds={"aggregated": Bounds(0, 40)})


def idle(running: int = 0) -> Observation:
    return Observation(seconds=10.0, arrived=0, pools={"aggregated": Pool(1, running=running)})


@given(st.lists(st.sampled_from(["ended", "running", "idle"]), max_size=40))
def test_workers_sleep_once_nothing_ran_for_so_long_and_no_sooner(intervals: list[str]) -> None:
    planner, state = Planner(ZERO, AGGREGATED, 60.0), PlannerState()
    lasting = 0
    for number, what in enumerate(intervals, 1):
        observed = seen(0.1, {"aggregated": Pool(1)}) if what == "ended" else idle(running=int(what == "running"))
        lasting = lasting + 1 if what == "idle" else 0
        state, decision = planner.step(state, observed, 10.0 * number)
        assert (decision is not None and decision.sleep) == (lasting >= 6)
        if decision is not None:
            change = decision.changes["aggregated"]
            assert ("idle" in change.reasons) == decision.sleep
            assert change.target == 1, "it is listed"


@pytest.mark.parametrize(("rules", "after_s"), [(ZERO, 0.0), (RULES, 60.0)])
def test_workers_of_a_model_with_a_minimum_never_sleep(rules: Rules, after_s: float) -> None:
    planner, state = Planner(rules, AGGREGATED, after_s), PlannerState()
    for number in range(1, 100):
        state, decision = planner.step(state, idle(), 10.0 * number)
        assert decision is None or not decision.sleep
