"""Array operations come to the results of the loops over targets."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.measure.simulation.placement import Arrival, SimulatedRouter
from penstock.router.held.held_requests import Held, HeldOrder
from penstock.router.placement import cost
from penstock.router.placement.cost import FEW, HeldRequest, is_ready
from penstock.router.placement.decide import decide
from penstock.router.placement.decision_inputs import Decisions, array_decisions
from penstock.router.placement.routing import RoutingContext, RoutingDecision, RoutingRequest, Weights
from penstock.router.state.holders import Depths, TargetBits, TargetId, TierDepths
from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas import wire
from penstock.schemas.fleet import LoraAdapter, Registration, WorkerState
from penstock.schemas.jobs import LoadHeader
from tests.properties import examples

POET, CLERK = LoraAdapter("poet", "0a"), LoraAdapter("clerk", "0b", loaded=True)
LOADED = LoraAdapter("poet", "0a", loaded=True)
WORKERS = st.lists(
    st.fixed_dictionaries(
        {
            "block_size": st.sampled_from([16, 32]),
            "total_blocks": st.integers(5, 60) | st.just(2000),
            "slots": st.integers(1, 4),
            "queue": st.integers(0, 1),
            "max_model_len": st.integers(200, 1200),
            "state": st.sampled_from([WorkerState.ready, WorkerState.ready, WorkerState.draining]),
            "dp_size": st.sampled_from([1, 1, 2]),
            "logits_processors": st.sampled_from([(), ("x",)]),
            "revision": st.sampled_from(["", "b"]),
            "tier_costs": st.sampled_from([(), (0.25,), (0.05, 0.75), (0.3, 1.5)]),
            "adapters": st.sampled_from([(POET,), (POET, CLERK), (LOADED, CLERK), ()]),
        }
    ),
    max_size=20,
)
JOBS = st.lists(st.tuples(st.integers(0, 19), st.integers(0, 3), st.integers(0, 20), st.integers(1, 3)), max_size=30)

LOWER = st.just(list[dict[int, int]]()) | st.lists(
    st.dictionaries(st.integers(0, 19), st.integers(1, 25)), min_size=2, max_size=2
)  # leading blocks in host memory and on disk, by worker

MOST_UNCOMPUTED = st.sampled_from([cost.MOST_UNCOMPUTED, 150])  # the latter is less than many of the workers below have
ASKED = st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 3))  # prompt, its blocks, sequences


def keys(family: int, blocks: int) -> list[int]:
    return [1000 * family + n for n in range(blocks)]


def fleet(workers: list[dict[str, Any]], jobs: list[tuple[int, int, int, int]]) -> LoadTracker:
    tracker = LoadTracker()
    for number, fields in enumerate(workers):
        tracker.put_worker(Registration(f"w{number:02}", "m", "aggregated", "mock", 1, **fields))
    for number, (at, family, blocks, n) in enumerate(jobs):
        load = LoadHeader(blocks * 16 + 5, 0, "", 1 << 62, "", n)
        prompt = keys(family, blocks) if number % 3 else []
        tracker.admit(str(number), 1, f"w{at:02}", load, now_ns=number, keys=prompt)
    return tracker


@examples(200)
@given(
    workers=WORKERS,
    jobs=JOBS,
    asked=ASKED,
    held=st.dictionaries(st.integers(0, 19), st.integers(1, 25)),
    more=st.fixed_dictionaries(
        {
            "processors": st.sampled_from([frozenset(), frozenset("x")]),
            "revision": st.sampled_from([None, "b"]),
            "session": st.sampled_from([(), (("w01", 0),), (("gone", 0), ("w03", 0))]),
            "resumed_tokens": st.sampled_from([0, 9000]),
            "adapter": st.sampled_from(["", "", POET.id]),
        }
    ),
    shared=st.integers(0, 20),
    waited_s=st.sampled_from([None, 0.0, 0.5, 100.0]),
    seed=st.integers(0, 9),
    most_uncomputed=MOST_UNCOMPUTED,
    lower=LOWER,
)
def test_a_decision_is_that_of_the_loop(
    workers: list[dict[str, Any]],
    jobs: list[tuple[int, int, int, int]],
    asked: tuple[int, int, int],
    held: dict[int, int],
    more: dict[str, Any],
    shared: int,
    waited_s: float | None,
    seed: int,
    most_uncomputed: int,
    lower: list[dict[int, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cost, "MOST_UNCOMPUTED", most_uncomputed)
        compare_decisions(workers, jobs, asked, held, more, shared, waited_s, seed, lower)


def compare_decisions(
    workers: list[dict[str, Any]],
    jobs: list[tuple[int, int, int, int]],
    asked: tuple[int, int, int],
    held: dict[int, int],
    more: dict[str, Any],
    shared: int,
    waited_s: float | None,
    seed: int,
    lower: list[dict[int, int]],
) -> None:
    tracker = fleet(workers, jobs)
    family, blocks, n = asked
    request = RoutingRequest(
        "m", blocks * 16 + 3, 50, prompt_blocks=blocks, n=n, shared_blocks=min(shared, blocks), **more
    )
    known = TargetBits()
    for at in held:
        known.put(1 << at, (f"w{at:02}", 0))
    overlaps: Mapping[TargetId, int] = Depths(([1 << at for at in held], [*held.values()]), known)
    if lower:
        overlaps = TierDepths(overlaps, [{(f"w{at:02}", 0): depth for at, depth in each.items()} for each in lower])
    prompt = keys(family, blocks)
    found = Decisions(tracker, array_decisions(tracker), "kv", Weights(), few=0).decide(
        request, prompt, overlaps, now_ns=50, seed=seed, number=1, waited_s=waited_s
    )
    context = RoutingContext(
        request,
        tracker.targets(50, "m"),
        overlaps,
        "kv",
        Weights(),
        seed,
        1,
        tracker.loads.prefixes(prompt),
        waited_s,
    )
    expected = decide(context)
    assert found == expected
    assert wire.encode(found.candidates) == wire.encode(expected.candidates), "no float where a reader expects a count"


@given(
    workers=WORKERS.filter(bool),
    jobs=JOBS,
    requests=st.lists(st.tuples(ASKED, st.integers(0, 20), st.sampled_from([0.0, 0.5, 100.0])), min_size=1, max_size=8),
    most_uncomputed=MOST_UNCOMPUTED,
    below=st.integers(0, 25),
)
def test_the_ready_requests_are_those_of_the_loop(
    workers: list[dict[str, Any]],
    jobs: list[tuple[int, int, int, int]],
    requests: list[tuple[tuple[int, int, int], int, float]],
    most_uncomputed: int,
    below: int,
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cost, "MOST_UNCOMPUTED", most_uncomputed)
        compare_ready(workers, jobs, requests, below)


def compare_ready(
    workers: list[dict[str, Any]],
    jobs: list[tuple[int, int, int, int]],
    requests: list[tuple[tuple[int, int, int], int, float]],
    below: int,
) -> None:
    tracker = fleet(workers, jobs)
    held = []
    for (family, blocks, n), cached, waited_s in requests:
        request = RoutingRequest("m", blocks * 16 + 3, 50, prompt_blocks=blocks, n=n)
        leading = tracker.loads.prefixes(keys(family, blocks))
        cached_at: Mapping[TargetId, int] = {("w01", 0): cached, ("w02", 0): blocks}
        if below:
            cached_at = TierDepths(cached_at, [{("w00", 0): below, ("w01", 0): cached + 1}, {("w01", 0): below}])
        held.append(HeldRequest(request, cached_at, leading, waited_s))
    arrays = array_decisions(tracker)
    assert arrays is not None
    targets = tracker.targets(50, "m")
    assert arrays.ready(held, 50) == [at for at, each in enumerate(held) if is_ready(each, targets)]


@examples(50)
@given(
    workers=WORKERS.filter(bool),
    jobs=JOBS,
    asked=st.lists(st.tuples(ASKED, st.integers(0, 20)), min_size=1, max_size=40),
    more=st.lists(st.tuples(st.integers(0, 19), ASKED), max_size=5),
)
def test_the_held_requests_to_place_are_those_of_the_loop(
    workers: list[dict[str, Any]],
    jobs: list[tuple[int, int, int, int]],
    asked: list[tuple[tuple[int, int, int], int]],
    more: list[tuple[int, tuple[int, int, int]]],
) -> None:
    """Those that cannot fit are left out before any is looked at, as long as nothing more begins as they do."""
    tracker = fleet(workers, jobs)
    arrays = array_decisions(tracker)
    assert arrays is not None
    orders: list[HeldOrder[int]] = [HeldOrder(tracker, each, lambda _: {}) for each in (arrays, None)]
    for order in orders:
        for number, ((family, blocks, n), own) in enumerate(asked):
            request = RoutingRequest("m", (blocks + own) * 16 + 3, 50, prompt_blocks=blocks + own, n=n)
            prompt = [*keys(family, blocks), *keys(1000 + number, own)]
            held = Held(number, request, prompt)
            assert order.push(str(number), held, rank=0, arrived_ns=number, deadline_ns=1 << 62, now_ns=0)

    def compare() -> None:
        ready, expected = ([entry.id for entry in order.candidates("", 50)] for order in orders)
        assert ready == expected

    compare()
    for number, (at, (family, blocks, n)) in enumerate(more):
        load = LoadHeader(blocks * 16, 0, "", 1 << 62, "", n)
        tracker.admit(f"more {number}", 1, f"w{at:02}", load, now_ns=50, keys=keys(family, blocks))
        compare()
    for number in range(len(jobs)):
        tracker.finish(str(number))
        compare()


@examples(30)
@given(
    slots=st.lists(st.integers(1, 3), min_size=1, max_size=16),
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=40),
    ends=st.lists(st.integers(0, 39), max_size=30),
)
def test_a_run_without_numpy_places_the_same_requests_in_the_same_order(
    slots: list[int], arrivals: list[tuple[int, int]], ends: list[int]
) -> None:
    def run() -> list[tuple[str, tuple[str, int]]]:
        core = SimulatedRouter(lambda keys: {})
        for number, count in enumerate(slots):
            core.join(Registration(f"w{number:02}", "m", "aggregated", "mock", 1, 16, 60, count, 1 << 20))
        placed = []
        for number, (family, blocks) in enumerate(arrivals):
            arrival = Arrival(str(number), keys(family, blocks), blocks * 16 + 1, number, seed=number)
            placed.append(core.arrive(arrival, number))
        for now_ns, number in enumerate(ends, 100):
            core.ended(str(number))
            placed += core.pump(now_ns * 10**7)
        return [(each.arrival.id, each.target) for each in placed if each is not None]

    with_arrays = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.measure.simulation.placement.array_decisions", lambda tracker: None)
        assert run() == with_arrays


def test_the_table_is_that_of_the_general_way_for_more_targets_than_it_has_lines() -> None:
    tracker = LoadTracker()
    for number in range(40):
        tracker.put_worker(Registration(f"w{number:02}", "m", "aggregated", "mock", 1, 32, 1000, 8, 4096))
        tracker.admit(str(number), 1, f"w{number:02}", LoadHeader(32 * number, 0, "", 1 << 62, ""), now_ns=0)
    request = RoutingRequest("m", 320, 10, prompt_blocks=10)
    found: RoutingDecision = Decisions(tracker, array_decisions(tracker), "kv", Weights(), few=0).decide(
        request, keys(0, 10), {("w30", 0): 10}, now_ns=0, seed=1
    )
    context = RoutingContext(request, tracker.targets(0, "m"), {("w30", 0): 10}, "kv", Weights(), 1)
    expected = decide(context)
    assert found == expected
    assert wire.encode(found.candidates) == wire.encode(expected.candidates), "no float where a reader expects a count"
    assert len(found.candidates) == 16


def test_a_loop_decides_for_few_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cheaper there; see ``FEW``."""
    for workers in (FEW, FEW + 1):
        tracker = LoadTracker()
        for number in range(workers):
            tracker.put_worker(Registration(f"w{number}", "m", "aggregated", "mock", 1, 16, 100, 4, 1200))
        arrays = array_decisions(tracker)
        assert arrays is not None
        asked: list[RoutingRequest] = []
        monkeypatch.setattr(arrays, "decide", lambda request, *_, asked=asked, **__: asked.append(request))
        decision = Decisions(tracker, arrays, "kv", Weights()).decide(
            RoutingRequest("m", 20, 50), (), {}, now_ns=1, seed=1
        )
        assert decision.route
        assert bool(asked) == (workers > FEW)
