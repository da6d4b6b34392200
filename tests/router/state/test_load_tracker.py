"""The load is a fold of two logs that have no common order and repeat messages."""

import copy
import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.state.attempts import ENDED_REMEMBERED
from penstock.router.state.load_tracker import LoadState, LoadTracker, merge
from penstock.router.state.snapshots import only_logged
from penstock.router.state.target_loads import ExpectedLoad
from penstock.schemas.fleet import Registration, WorkerState
from penstock.schemas.jobs import LoadHeader, Stage
from tests.properties import examples

SECOND = 1_000_000_000
WORKERS = ("a", "b")


def registered(worker: str, role: str = "aggregated", **more: object) -> Registration:
    fields: dict[str, object] = {"slots": 4, "queue": 2, "total_blocks": 100, "max_model_len": 4096, "block_size": 32}
    return Registration(worker, "m", role, "mock", 1, **(fields | more))  # type: ignore[arg-type]


def fleet(rate: float = 1000.0) -> LoadTracker:
    made = LoadTracker(rate)
    for worker in WORKERS:
        made.put_worker(registered(worker))
    return made


def restored(state: LoadState, registrations: Iterable[Registration] = (), rate: float = 1000.0) -> LoadTracker:
    made = LoadTracker(rate)
    for registration in registrations:
        made.put_worker(registration)
    made.restore(state)
    return made


def load_of(f: LoadTracker, target: tuple[str, int], now_ns: int) -> ExpectedLoad:
    """Without what was served, which has no end."""
    return msgspec.structs.replace(f.load(target, now_ns), served_tokens=0)


def admit(
    f: LoadTracker,
    request: str,
    attempt: int = 1,
    worker: str = "a",
    *,
    prompt_tokens: int = 100,
    cached_tokens: int = 0,
    deadline_ns: int = 600 * SECOND,
    n: int = 1,
    route: tuple[Stage, ...] = (),
    **more: Any,
) -> bool:
    load = LoadHeader(prompt_tokens, cached_tokens, "", deadline_ns, "", n, route)
    return f.admit(request, attempt, worker, load, **{"now_ns": 0} | more)


WORK = st.tuples(st.just("work"), st.sampled_from("rst"), st.integers(1, 3))
END = st.tuples(st.sampled_from(["done", "returned"]), st.sampled_from("rst"), st.integers(1, 3))


@examples(200)
@given(st.lists(WORK | END, max_size=14), st.randoms(use_true_random=False))
def test_order_and_repetition_of_the_log_do_not_matter(events: list[tuple[str, str, int]], rng: random.Random) -> None:
    def fold(log: list[tuple[str, str, int]]) -> LoadTracker:
        f = fleet()
        for kind, request, attempt in log:
            if kind == "work":  # the worker is a function of the attempt: message ids see to that
                admit(f, request, attempt, WORKERS[attempt % 2], n=attempt, echoed=True)
            elif kind == "done":
                f.finish(request)
            else:
                f.end_attempt(request, attempt)
        return f

    shuffled = events + rng.choices(events, k=3) if events else []
    rng.shuffle(shuffled)
    one, two = fold(events), fold(shuffled)
    assert {e.request: e for e in one.active()} == {e.request: e for e in two.active()}
    for f in (one, two):
        done = {request for kind, request, _ in events if kind == "done"}
        assert done.isdisjoint(e.request for e in f.active())
        for worker in WORKERS:
            mine = [e for e in f.active() if e.worker == worker]
            load = load_of(f, (worker, 0), 0)
            assert (load.requests, load.sequences) == (len(mine), sum(e.n for e in mine))
            assert load.active_blocks == sum(e.blocks for e in mine)
            assert f.capacity(worker) == max(0, 6 - load.sequences)
            assert f.active_at(worker) == sorted(mine, key=lambda e: f.active_at(worker).index(e))
        assert f.has_capacity() == any(f.capacity(worker) for worker in WORKERS)
    for entry in one.active():
        one.finish(entry.request)
    assert load_of(one, ("a", 0), 0) == load_of(one, ("b", 0), 0) == ExpectedLoad(), "nothing leaks"


def test_an_own_decision_and_its_echo_count_once() -> None:
    f = fleet()
    assert admit(f, "r", cached_tokens=64)
    assert not admit(f, "r", cached_tokens=64, echoed=True)
    assert load_of(f, ("a", 0), 0) == ExpectedLoad(1, 1, 2, 36.0, context_blocks=4)


def test_the_log_overrules_a_decision_that_lost_the_race() -> None:
    f = fleet()
    admit(f, "r", worker="a")
    assert admit(f, "r", worker="b", echoed=True)
    assert not admit(f, "r", worker="a"), "too late"
    assert load_of(f, ("a", 0), 0) == ExpectedLoad()
    assert [e.request for e in f.active_at("b")] == ["r"]


def test_a_later_attempt_leaves_the_earlier_worker_and_an_earlier_one_changes_nothing() -> None:
    f = fleet()
    admit(f, "r", 1, "a")
    admit(f, "r", 2, "b")
    assert not admit(f, "r", 1, "a", echoed=True)
    f.end_attempt("r", 1)
    assert f.active_at("a") == []
    assert [e.attempt for e in f.active_at("b")] == [2]


def restarted(f: LoadTracker) -> LoadTracker:
    """What the next process makes of a snapshot."""
    found = fleet()
    found.restore(merge(f.parts()))
    return found


def test_a_request_that_waits_for_its_next_attempt_is_found_again_after_a_restart() -> None:
    """It was in no router's memory once both had been killed, and never ended."""
    f = fleet()
    admit(f, "r", 1, "dead", echoed=True)
    f.requeue("r", 1)
    assert f.active() == []
    assert [(e.request, e.attempt, e.worker) for e in restarted(f).orphans()] == [("r", 1, "dead")]
    assert [e.request for e in restarted(restarted(f)).orphans()] == ["r"], "also if it waits for long"
    admit(f, "r", 2, "b")
    f.release("r", 2)
    assert [e.request for e in restarted(f).orphans()] == ["r"], "its job was not stored"


def test_a_request_that_a_live_worker_returned_is_an_orphan_after_a_restart() -> None:
    f = fleet()
    admit(f, "r", 1, "a", echoed=True)
    f.requeue("r", 1)
    assert [(e.request, e.worker) for e in restarted(f).orphans()] == [("r", "")]


@pytest.mark.parametrize(("worker", "found_at"), [("a", ""), ("dead", "dead")])
def test_an_attempt_whose_next_one_was_not_placed_is_an_orphan_when_it_is_reopened(worker: str, found_at: str) -> None:
    f = fleet()
    admit(f, "r", 1, worker, echoed=True, seq=5)
    f.requeue("r", 1)
    f.reopen("r")
    assert [(e.request, e.attempt, e.worker, e.seq) for e in f.orphans()] == [("r", 1, found_at, 5)]
    f.requeue("r", 1)
    admit(f, "r", 2, "b", echoed=True)
    f.reopen("r")
    assert [(e.request, e.attempt) for e in f.active()] == [("r", 2)]


def test_a_request_that_comes_to_wait_while_a_snapshot_is_made_counts_once_after_it() -> None:
    f = fleet()
    admit(f, "r", 1, "a", echoed=True)
    parts = f.parts()
    before = [next(parts)]
    f.requeue("r", 1)
    found = fleet()
    found.restore(merge([*before, *parts]))
    assert [(e.request, e.worker) for e in found.orphans()] == [("r", "")]
    assert found.load(("a", 0), 0).sequences == 0


def test_the_job_of_a_request_that_waits_is_kept_until_the_log_has_the_next_one() -> None:
    f = fleet()
    admit(f, "r", 1, "dead", echoed=True, seq=5)
    f.requeue("r", 1)
    assert [(e.request, e.seq) for e in f.waiting()] == [("r", 5)]
    assert f.set_seq("r", 1, 9), "it was published again"
    admit(f, "r", 2, "b")
    assert [(e.request, e.seq) for e in f.waiting()] == [("r", 9)], "its next job may never be stored"
    admit(f, "r", 2, "b", echoed=True, seq=10)
    assert f.waiting() == []


@pytest.mark.parametrize("what", ["placed", "ended", "too old"])
def test_a_request_that_does_not_wait_any_more_is_left_out_of_snapshots(what: str) -> None:
    f = fleet()
    admit(f, "r", 1, "dead", echoed=True)
    f.requeue("r", 1)
    if what == "placed":
        admit(f, "r", 2, "b", echoed=True)
        f.finish("r")
    elif what == "ended":
        f.finish("r")
    else:
        f.expire(1 << 62, 10)
    assert merge(f.parts()).unfinished == ()


def test_a_request_that_ended_before_its_job_was_read_never_counts() -> None:
    f = fleet()
    f.finish("r")
    f.end_attempt("s", 1)
    assert not admit(f, "r", 1, echoed=True)
    assert not admit(f, "s", 1, echoed=True)
    assert f.ended("r")
    assert not f.ended("s")
    assert admit(f, "s", 2)
    for i in range(ENDED_REMEMBERED):
        f.finish(f"x{i}")
    assert len(merge(f.parts()).closed) == ENDED_REMEMBERED


def test_the_requests_of_a_lost_worker_stay_active_until_they_are_requeued() -> None:
    f = fleet()
    admit(f, "r", worker="a", deadline_ns=10 * SECOND)
    admit(f, "s", worker="a", deadline_ns=20 * SECOND)
    assert [e.request for e in f.remove_worker("a")] == ["r", "s"]
    assert f.capacity("a") == 0
    assert [m.id for m in f.targets(0, "m")] == [("b", 0)]
    admit(f, "r", 2, "b")
    assert [e.request for e in f.orphans()] == ["s"]
    f.expire(19 * SECOND, 10)
    assert f.orphans()
    f.expire(20 * SECOND, 10)
    assert f.orphans() == []
    assert not admit(f, "s", 1, echoed=True), "a late echo does not bring it back"


def test_a_request_counts_once_whenever_its_worker_registers() -> None:
    f = LoadTracker()
    for name, echoed in (("of another router", True), ("own", False)):
        admit(f, name, echoed=echoed, keys=() if echoed else (1, 2, 3))
    f.put_worker(registered("a"))
    counted = copy.copy(f.loads.load(0))
    assert counted.sequences == 2
    assert counted.active_blocks == counted.context_blocks == 8
    f.remove_worker("a")
    admit(f, "while it was away", echoed=True)
    f.finish("while it was away")
    f.put_worker(registered("a"))
    assert f.loads.load(0) == counted
    f.finish("of another router")
    f.finish("own")
    left = f.loads.load(0)
    assert (left.sequences, left.active_blocks, left.context_blocks) == (0, 0, 0)


def test_who_joins_or_leaves_costs_no_look_at_the_requests_of_all_workers() -> None:
    class Unscanned(dict[str, Any]):
        def values(self) -> Any:
            raise AssertionError("a router may have 20,000 active requests")

        __iter__ = items = values

    f = fleet()
    for number, worker in enumerate("abca"):
        admit(f, f"r{number}", worker=worker, echoed=True)
    f.requests = Unscanned(f.requests)
    assert [e.request for e in f.orphans()] == ["r2"]
    f.put_worker(registered("c"))
    assert f.load(("c", 0), 0).sequences == 1
    assert [e.request for e in f.remove_worker("a")] == ["r0", "r3"]


NAMES = st.sampled_from("rst")
TARGETS = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
PROMPTS = {"r": (1, 2, 3), "s": (1, 2, 4, 5), "t": (1, 2, 3)}
SENT = st.tuples(
    st.sampled_from(["own", "echo", "echo with keys"]), NAMES, st.integers(1, 3), st.sampled_from(TARGETS),
    st.integers(1, 2), st.sampled_from([0, 32, 128]),
)  # fmt: skip
CHANGES = st.one_of(
    SENT,
    st.tuples(st.sampled_from(["done", "returned", "released"]), NAMES, st.integers(1, 3)),
    st.tuples(st.sampled_from(["left", "joined", "joined with one rank"]), st.sampled_from(WORKERS)),
    st.tuples(st.just("stored"), st.sampled_from(TARGETS), st.sampled_from([(1, 2, 3), (4, 5)])),
    st.tuples(st.just("restored")),
)


def change(f: LoadTracker, step: tuple[Any, ...], workers: dict[str, Registration]) -> LoadTracker:
    match step:
        case ("own" | "echo" | "echo with keys" as kind, name, attempt, (worker, rank), n, cached):
            route, keys = (Stage("aggregated", worker, rank),), () if kind == "echo" else PROMPTS[name]
            more = {"n": n, "echoed": kind != "own", "keys": keys, "prompt_tokens": 128, "cached_tokens": cached}
            admit(f, name, attempt, worker, route=route, **more)
        case ("done", name, _):
            f.finish(name, SECOND)
        case ("returned", name, attempt):
            f.end_attempt(name, attempt)
        case ("released", name, attempt):
            f.release(name, attempt)
        case ("left", worker):
            workers.pop(worker, None)
            f.remove_worker(worker)
        case ("stored", target, keys):
            f.stored(target, keys, SECOND)
        case ("restored",):  # workers register afterwards
            f = restored(merge(map(only_logged, f.parts(2))))
            for registration in workers.values():
                f.put_worker(registration)
        case (kind, worker):
            workers[worker] = registered(worker, dp_size=1 if kind == "joined with one rank" else 2)
            f.put_worker(workers[worker])
    return f


@examples(100)
@given(st.lists(CHANGES, max_size=20))
def test_the_sums_are_those_of_the_active_requests_whatever_happened(steps: list[tuple[Any, ...]]) -> None:
    f, workers = LoadTracker(), dict[str, Registration]()
    for step in [("joined", "a"), ("joined", "b"), *steps, *(("done", name, 1) for name in PROMPTS)]:
        f = change(f, step, workers)
        assert f.active_at("a") == [e for target in TARGETS[:2] for e in f.active() if e.target_id == target]
        for target in TARGETS:
            at = [e for e in f.active() if e.target_id == target]
            if (row := f.loads.row(target)) is None:
                assert load_of(f, target, SECOND) == ExpectedLoad()
                continue
            load = load_of(f, target, SECOND)
            assert (load.requests, load.sequences) == (len(at), sum(e.n for e in at))
            column, uncomputed = f.loads.load(row), f.loads.uncomputed(target)
            tasks = {e.request: f.loads.tasks.get((e.request, target)) for e in at}
            shared = {key for task in tasks.values() if task is not None for key in task.keys}
            alone = [e.blocks for e in at if (task := tasks[e.request]) is None or not task.keys]
            assert column.sequences == load.sequences
            assert column.context_blocks == sum(e.prompt_blocks * e.n for e in at)
            assert column.active_blocks == len(shared) + sum(alone)
            assert column.prefill_tokens == sum(task.uncached_tokens for task in uncomputed)
            assert column.computing == sum(task.sequences for task in uncomputed)
            assert {task.request for task in uncomputed} <= {e.request for e in at}
    for kept in (f.loads.tasks, f.keys, f.stage_loads, f.loads.estimates):
        assert not kept, "nothing leaks"


def test_prefill_drains_with_time_and_never_exceeds_what_is_unfinished() -> None:
    f = fleet(rate=100.0)
    admit(f, "r", prompt_tokens=300)
    admit(f, "s", prompt_tokens=500, cached_tokens=400, now_ns=SECOND)
    assert load_of(f, ("a", 0), SECOND).prefill_tokens == 300
    assert load_of(f, ("a", 0), 2 * SECOND).prefill_tokens == 200
    f.finish("r")
    assert load_of(f, ("a", 0), 2 * SECOND).prefill_tokens == 100
    assert load_of(f, ("a", 0), 9 * SECOND).prefill_tokens == 0
    assert load_of(f, ("a", 0), 0).prefill_tokens >= 0, "a clock that goes back does no harm"


def test_another_router_continues_from_a_snapshot() -> None:
    f = fleet()
    admit(f, "r", cached_tokens=32, now_ns=SECOND, n=2)
    admit(f, "s", worker="b", route=(Stage("aggregated", "b", 1),))
    f.finish("gone")
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(merge(f.parts(1))), type=LoadState)
    g = restored(stored, f.workers())
    assert merge(g.parts()) == merge(f.parts())
    for place in (("a", 0), ("b", 0), ("b", 1)):
        assert load_of(g, place, SECOND + 10_000_000) == load_of(f, place, SECOND + 10_000_000)
    assert not admit(g, "gone")
    g.finish("r")
    assert load_of(g, ("a", 0), 0) == ExpectedLoad()


def test_a_worker_is_found_by_alias_with_one_target_per_rank() -> None:
    f = LoadTracker()
    for _ in range(2):
        f.put_worker(registered("w", aliases=("other",), dp_size=2))
    assert [m.id for m in f.targets(0, "other")] == [("w", 0), ("w", 1)]
    assert f.targets(0, "unknown") == []
    assert f.has_capacity()
    f.put_worker(registered("w", state=WorkerState.draining))
    assert f.capacity("w") == 0
    assert not f.has_capacity()


# -- routes -------------------------------------------------------------------------------------------------------

E = Stage("encode", "e")
P, Q = Stage("prefill", "p"), Stage("prefill", "q")
D, C = Stage("decode", "d"), Stage("decode", "c")
ROUTES = {1: (E, P, D), 2: (Q, D), 3: (P, C), 4: (D,), 5: (E, Stage("aggregated", "a", 3))}  # by attempt
PLACES = [(worker, rank) for worker in "epqdca" for rank in (0, 3)]
STAGED = st.integers(1, 5).flatmap(
    lambda attempt: st.tuples(st.just("work"), st.just("rs"), st.just(attempt), st.integers(1, len(ROUTES[attempt])))
)
STAGED_END = st.tuples(st.sampled_from(["done", "returned"]), st.just("rs"), st.integers(1, 5), st.just(0))
Step = tuple[str, str, int, int]


def apply_step(f: LoadTracker, step: Step) -> None:
    """One message of the log: to the stage that has so many stages left, itself included."""
    kind, names, attempt, left = step
    for request in names:
        if kind == "done" and request == "r":
            f.finish(request)
        elif kind == "returned":
            f.end_attempt(request, attempt)
        elif kind == "work":
            route = ROUTES[attempt][len(ROUTES[attempt]) - left :]
            handed = route[0].role == "decode" and len(ROUTES[attempt]) > 1
            seq = 10 * attempt - left
            admit(f, request, attempt, route[0].worker, route=route, handed=handed, echoed=True, seq=seq)


@examples(200)
@given(st.lists(STAGED | STAGED_END, max_size=16), st.randoms(use_true_random=False))
def test_order_and_repetition_do_not_matter_for_requests_with_stages(events: list[Step], rng: random.Random) -> None:
    shuffled = events + (rng.choices(events, k=4) if events else [])
    rng.shuffle(shuffled)
    one, two = fleet(), fleet()
    for f, log in ((one, events), (two, shuffled)):
        for worker in "epqdca":
            f.put_worker(registered(worker, dp_size=4))
        for step in log:
            apply_step(f, step)
    assert {e.request: e for e in one.active()} == {e.request: e for e in two.active()}
    for place in PLACES:
        first, second = load_of(one, place, 0), load_of(two, place, 0)
        assert (first.requests, first.sequences, first.active_blocks) == (
            second.requests,
            second.sequences,
            second.active_blocks,
        )
        owed = [share for e in one.active() for share in e.stage_loads() if share.target_id == place]
        assert first.sequences == sum(share.sequences for share in owed)
        assert first.active_blocks == sum(share.blocks for share in owed)
        assert first.prefill_tokens <= sum(share.uncached_tokens for share in owed)
    again = restored(msgspec.msgpack.decode(msgspec.msgpack.encode(merge(one.parts(2))), type=LoadState))
    assert merge(again.parts()) == merge(one.parts())
    for entry in one.active():
        assert entry.seq == 10 * entry.attempt - 1 - len(entry.later)
        assert all(entry in one.active_at(stage.worker) for stage in entry.stages)
        one.finish(entry.request)
    assert all(load_of(one, place, 0) == ExpectedLoad() for place in PLACES), "nothing leaks"
    assert merge(one.parts()).backlogs == ()


def test_a_request_counts_at_every_stage_that_is_left() -> None:
    f = fleet()
    for worker, role in (("e", "encode"), ("p", "prefill"), ("d", "decode")):
        f.put_worker(registered(worker, role=role))
    admit(f, "r", worker="e", route=(E, P, D), n=2, cached_tokens=32)
    assert load_of(f, ("e", 0), 0) == ExpectedLoad(1, 1, 0, 0.0)
    assert load_of(f, ("p", 0), 0) == ExpectedLoad(1, 2, 3, 68.0, context_blocks=8)
    assert load_of(f, ("d", 0), 0) == ExpectedLoad(1, 2, 4, context_blocks=8), (
        "all of its blocks, and none of its prefill"
    )
    assert f.capacity("d") == 4
    assert not admit(f, "r", worker="e", route=(E, P, D), n=2, cached_tokens=32, echoed=True, seq=5)
    assert admit(f, "r", worker="p", route=(P, D), n=2, cached_tokens=32, echoed=True, seq=6)
    assert load_of(f, ("e", 0), 0) == ExpectedLoad()
    assert load_of(f, ("p", 0), 0) == ExpectedLoad(1, 2, 3, 68.0, context_blocks=8)
    assert admit(f, "r", worker="d", route=(D,), n=2, handed=True, echoed=True, seq=9)
    assert load_of(f, ("p", 0), 0) == ExpectedLoad()
    assert load_of(f, ("d", 0), 0) == ExpectedLoad(1, 2, 4, context_blocks=8)
    assert not admit(f, "r", worker="p", route=(P, D), n=2, echoed=True, seq=6), "an echo that is late"
    entry = f.request("r")
    assert entry is not None
    assert (entry.worker, entry.seq, entry.later, entry.role) == ("d", 9, (), "decode")


def test_whoever_loses_a_later_worker_loses_the_attempt_and_an_earlier_one_does_not_matter() -> None:
    f = fleet()
    for worker, role in (("p", "prefill"), ("d", "decode"), ("c", "decode")):
        f.put_worker(registered(worker, role=role))
    admit(f, "r", worker="p", route=(P, D), echoed=True)
    admit(f, "s", worker="p", route=(P, C), echoed=True)
    assert [e.request for e in f.remove_worker("d")] == ["r"]
    assert [e.request for e in f.orphans()] == ["r"]
    admit(f, "s", worker="c", route=(C,), handed=True, echoed=True)
    assert [e.request for e in f.remove_worker("p")] == ["r"]
    assert [e.request for e in f.orphans()] == ["r"], "once, though both its workers are gone"
    admit(f, "r", 2, worker="c", route=(C,))
    assert f.orphans() == []


def test_the_log_overrules_another_route_however_long() -> None:
    f = fleet()
    admit(f, "r", worker="d", route=(D,))
    assert admit(f, "r", worker="p", route=(P, C), echoed=True)
    assert load_of(f, ("d", 0), 0) == ExpectedLoad()
    assert [e.request for e in f.active_at("c")] == ["r"]


def test_another_rank_of_the_same_worker_is_another_target() -> None:
    f = LoadTracker()
    f.put_worker(registered("w", dp_size=4))
    admit(f, "r", worker="w", route=(Stage("aggregated", "w", 1),))
    assert admit(f, "r", worker="w", route=(Stage("aggregated", "w", 3),), echoed=True)
    assert [load_of(f, ("w", rank), 0).requests for rank in range(4)] == [0, 0, 0, 1]
