"""Which prefix the worker that computes a prompt reads from another one, and when none."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.placement.decide import MEDIUM, MOVE_TOKENS, NEAR, distance, transfer_kind
from penstock.router.placement.decision_inputs import Decisions, array_decisions
from penstock.router.placement.routing import RoutingDecision, RoutingRequest, Weights
from penstock.router.state.holders import TierDepths
from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas.fleet import Registration, WeightsState, WorkerState
from penstock.schemas.jobs import LoadHeader, Move
from penstock.schemas.transfer import MIXED, Endpoint
from tests.properties import examples
from tests.router.support import endpoint

SIZE = 16
LEAST = MOVE_TOKENS // SIZE  # blocks
PROMPT = 200  # blocks
HERE, THERE = endpoint("h1"), endpoint("h2")


def worker(name: str, role: str = "aggregated", transfer: Endpoint | None = HERE, **more: Any) -> Registration:
    fields: dict[str, Any] = {"moves_prefixes": True, "transfer": transfer}
    return Registration(name, "m", role, "mock", 1, SIZE, 2000, 8, 100_000, **(fields | more))


def request(**more: Any) -> RoutingRequest:
    return RoutingRequest("m", PROMPT * SIZE + 3, 50, prompt_blocks=PROMPT, **more)


def decided(
    workers: list[Registration],
    overlaps: dict[str, int] | TierDepths,
    *,
    busy: dict[str, int] | None = None,
    few: int = 100,
    seed: int = 0,
    **more: Any,
) -> RoutingDecision:
    """
    Args:
        busy: requests of 100 blocks that workers have.
    """
    tracker = LoadTracker()
    for each in workers:
        tracker.put_worker(each)
    for name, count in (busy or {}).items():
        for number in range(count):
            load = LoadHeader(100 * SIZE, 0, "", 1 << 62, "")
            keys = [1_000_000 * (number + 1) + at for at in range(100)]
            tracker.admit(f"{name} {number}", 1, name, load, now_ns=1, keys=keys)
    found: Any = overlaps if isinstance(overlaps, TierDepths) else {(name, 0): n for name, n in overlaps.items()}
    decisions = Decisions(tracker, array_decisions(tracker), "kv", Weights(), few=few)
    return decisions.decide(request(**more), range(PROMPT), found, now_ns=50, seed=seed, waited_s=None)


def move_of(decision: RoutingDecision) -> Move | None:
    return decision.route[0].move


@pytest.mark.parametrize(
    ("source", "reader", "moves"),
    [("fp8", "fp8", True), ("fp8", "", False), ("fp8", "awq", False), (MIXED, MIXED, True), (MIXED, "fp8", False)],
)
def test_kv_of_weights_that_are_quantized_in_another_way_is_not_read(source: str, reader: str, moves: bool) -> None:
    there, here = (msgspec.structs.replace(HERE, quantization=each) for each in (source, reader))
    workers = [worker("a", transfer=there), worker("b", transfer=here)]
    decision = decided(workers, {"a": 150}, busy={"a": 6})
    assert decision.route[0].worker == "b"
    assert (move_of(decision) is not None) == moves


@pytest.mark.parametrize("few", [100, 0], ids=["loop", "arrays"])
def test_an_idle_worker_reads_what_a_busy_one_has(few: int) -> None:
    decision = decided([worker("a"), worker("b")], {"a": 150}, busy={"a": 6}, few=few)
    assert decision.route[0].worker == "b"
    assert move_of(decision) == Move("a", 150, "on the same host")
    assert (decision.overlap_blocks, decision.present_blocks) == (0, 150)


def test_whoever_has_the_prefix_reads_nothing() -> None:
    decision = decided([worker("a"), worker("b")], {"a": 150})
    assert (decision.route[0].worker, move_of(decision), decision.present_blocks) == ("a", None, 150)


@pytest.mark.parametrize(
    ("source", "path"),
    [
        (worker("a"), "on the same host"),
        (worker("a", transfer=endpoint("h2", rdma=True)), "over RDMA"),
        (worker("a", transfer=THERE), None),
        (worker("a", transfer=None), None),
        (worker("a", moves_prefixes=False), None),
        (worker("a", transfer=endpoint("h1", layout="other")), None),
        (worker("a", state=WorkerState.draining), None),
        (worker("a", weights=WeightsState(asleep=True)), None),
        (worker("a", dp_size=2), None),
    ],
    ids=["host", "rdma", "network", "no endpoint", "it moves none", "layout", "draining", "asleep", "ranks"],
)
def test_a_source_can_be_read_at_once_or_is_none(source: Registration, path: str | None) -> None:
    reader = worker("b", transfer=endpoint("h1", rdma=True))
    decision = decided([source, reader], {"a": 150}, busy={"a": 6})
    assert decision.route[0].worker == "b"
    assert move_of(decision) == (None if path is None else Move("a", 150, path))


@pytest.mark.parametrize("more", [{"medium": b"x"}, {"avoid": frozenset("a")}], ids=["media", "avoided"])
def test_some_requests_read_nothing(more: dict[str, Any]) -> None:
    workers = [worker("a", vision=True), worker("b", vision=True)]
    assert move_of(decided(workers, {"a": 150}, busy={"a": 6}, **more)) is None


def test_only_what_is_on_the_source_s_device_is_read() -> None:
    tiers = TierDepths({("a", 0): 60}, [{("a", 0): 150}, {}])
    decision = decided([worker("a"), worker("b")], tiers, busy={"a": 6})
    assert move_of(decision) == Move("a", 60, "on the same host")


def test_the_worker_of_a_pair_that_computes_the_prompt_reads_what_the_other_has() -> None:
    """A conversation goes on: only the decode worker has what it has answered."""
    workers = [worker("p", "prefill"), worker("d", "decode")]
    decision = decided(workers, {"p": 40, "d": 150})
    assert [(stage.worker, stage.move) for stage in decision.route] == [
        ("p", Move("d", 150, "on the same host")),
        ("d", None),
    ]


def test_of_several_sources_with_the_same_blocks_each_is_read_at_times() -> None:
    workers = [worker(name) for name in "abcd"]
    busy = dict.fromkeys("abc", 6)
    found = {move_of(decided(workers, dict.fromkeys("abc", 150), busy=busy, seed=seed)) for seed in range(40)}
    assert {each.source for each in found if each is not None} == {"a", "b", "c"}


@examples(200)
@given(
    fleet=st.lists(
        st.tuples(
            st.sampled_from(["aggregated", "aggregated", "prefill", "decode"]),
            st.sampled_from([HERE, THERE, endpoint("h1", rdma=True), endpoint("h2", rdma=True), None]),
            st.booleans(),
            st.integers(0, PROMPT + 20),
            st.integers(0, 8),
        ),
        min_size=1,
        max_size=8,
    ),
    seed=st.integers(0, 9),
)
def test_a_move_is_the_cheapest_way_and_changes_nothing_else(
    fleet: list[tuple[str, Endpoint | None, bool, int, int]], seed: int
) -> None:
    """Against all sources in turn, and against the same fleet where nothing moves."""
    names = [f"w{number}" for number in range(len(fleet))]
    workers = [
        worker(name, role, transfer, moves_prefixes=moves)
        for name, (role, transfer, moves, _, _) in zip(names, fleet, strict=True)
    ]
    held = {name: each[3] for name, each in zip(names, fleet, strict=True) if each[3]}
    busy = {name: each[4] for name, each in zip(names, fleet, strict=True)}
    decision = decided(workers, held, busy=busy, few=100, seed=seed)
    assert decided(workers, held, busy=busy, few=0, seed=seed) == decision
    still = [msgspec.structs.replace(each, moves_prefixes=False) for each in workers]
    without = decided(still, held, busy=busy, seed=seed)
    assert without.candidates == decision.candidates
    if not decision.route:
        return
    first = decision.route[0]
    stays = msgspec.structs.replace(first, move=None)
    assert msgspec.structs.replace(decision, route=(stays, *decision.route[1:])) == without
    by_name = {each.worker: each for each in workers}
    costs = [
        (share * further + LEAST, each.worker, further)
        for each in workers
        if each.worker != first.worker
        and (share := read_share(each, by_name[first.worker])) is not None
        and (further := min(held.get(each.worker, 0), PROMPT) - decision.overlap_blocks) > 0
    ]
    saved = {source: further - cost for cost, source, further in costs}
    best = max(saved.values(), default=0.0)
    if first.move is None:
        assert best < LEAST
    else:
        assert saved[first.move.source] == pytest.approx(best)
        assert best >= LEAST
        assert first.move.blocks == min(held[first.move.source], PROMPT)


def read_share(source: Registration, reader: Registration) -> float | None:
    """What reading a block costs, of computing it; None: it cannot be read."""
    if not (source.moves_prefixes and reader.moves_prefixes and source.transfer and reader.transfer):
        return None
    share = distance(source, reader)
    return share if transfer_kind(source) == transfer_kind(reader) and share in (NEAR, MEDIUM) else None
