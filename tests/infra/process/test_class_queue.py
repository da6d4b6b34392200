"""Within a class: no request waits much longer than first come, first served, and tenants get their shares."""

from collections import Counter
from itertools import count, cycle, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.process.class_queue import (
    AGEING,
    ALONE_AFTER,
    LEAST,
    OVERDUE_AFTER,
    OVERDUE_NS,
    QUANTUM,
    StartQueue,
    StartShare,
    TenantShares,
)
from penstock.router.held.held_requests import SECOND_NS, RequestQueue, delay_ns

LATER = 1 << 62
LONG_AFTER_NS = 1000 * OVERDUE_NS


def push(waiting: RequestQueue[None], id: str, size: float, *, at: int = 0, tenant: str = "", rank: int = 0) -> None:
    assert waiting.push(
        id, None, rank=rank, arrived_ns=at, deadline_ns=LATER, delay_ns=delay_ns(size), tenant=tenant, size=size
    )


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5000), st.integers(0, 2)), min_size=1, max_size=120))
def test_every_request_is_taken_after_a_multiple_of_the_work_in_front_of_it(steps: list[tuple[int, int, int]]) -> None:
    """Arrivals and turns in any order, short requests first: what goes before a request is bounded."""
    waiting: RequestQueue[None] = RequestQueue()
    had, front, largest = 0.0, 0.0, 0.0
    bounds: dict[str, float] = {}
    came: dict[str, float] = {}
    most: dict[str, float] = {}  # held at once since it came
    sizes: dict[str, float] = {}
    for number, (kind, size, turns) in enumerate([*steps, (0, 1, 200)]):
        if kind:
            held = sum(sizes.values())
            front = max(front, had + OVERDUE_AFTER * held) if sizes else had + OVERDUE_AFTER * held
            push(waiting, str(number), size, at=number)
            sizes[str(number)], bounds[str(number)], came[str(number)] = size, front, had
            largest, most = max(largest, size), {id: max(most.get(id, 0), held + size) for id in sizes}
        for _ in range(turns):
            for entry in waiting.window(size=1, now_ns=LONG_AFTER_NS):
                assert had <= max(bounds.pop(entry.id), came[entry.id] + most[entry.id]) + largest
                had += sizes.pop(entry.id)
                waiting.take(entry.id)
    assert not len(waiting)


def test_short_requests_overtake_a_long_one_by_a_multiple_of_what_it_waits_for() -> None:
    waiting: RequestQueue[None] = RequestQueue()
    for number in range(20):
        push(waiting, f"before {number}", 100, at=number)
    push(waiting, "long", 10_000, at=50)
    taken: list[str] = []
    for number in range(300):
        push(waiting, f"short {number}", 100, at=100 + number)
        (entry,) = waiting.window(size=1, now_ns=LONG_AFTER_NS)
        taken.append(waiting.take(entry.id).id)
    assert taken.index("long") == 20 * OVERDUE_AFTER + 1


def test_who_had_little_in_front_of_it_does_not_stop_the_short_ones_while_more_is_held_now() -> None:
    """The long one came first. When 50 short ones are held behind it, it goes once as much was taken as is held."""
    waiting: RequestQueue[None] = RequestQueue()
    push(waiting, "long", 1000)
    for number in range(50):
        push(waiting, f"short {number}", 100, at=1)
    taken: list[str] = []
    while len(waiting):
        (entry,) = waiting.window(size=1, now_ns=LONG_AFTER_NS)
        taken.append(waiting.take(entry.id).id)
    assert taken.index("long") == 31  # 31 taken, 19 and the long one held: 3,100 of work and 2,900


def test_within_the_first_second_nothing_is_overdue() -> None:
    waiting: RequestQueue[None] = RequestQueue()
    push(waiting, "long", 1000)
    for number in range(100):
        push(waiting, f"short {number}", 100, at=1)
    for _ in range(60):
        (entry,) = waiting.window(size=1, now_ns=OVERDUE_NS - 1)
        assert waiting.take(entry.id).id != "long"
    assert [entry.id for entry in waiting.window(size=1, now_ns=OVERDUE_NS)] == ["long"]


@pytest.mark.parametrize(("waited_s", "times"), [(2, 2), (5, 2), (15, 6), (30, 12), (300, 12)])
def test_the_longer_a_request_waits_the_more_goes_before_it(waited_s: int, times: int) -> None:
    waiting: RequestQueue[None] = RequestQueue()
    for number in range(10):
        push(waiting, f"before {number}", 100)
    push(waiting, "long", 500)
    taken: list[str] = []
    while "long" not in taken:
        push(waiting, f"short {len(taken)}", 100)
        (entry,) = waiting.window(size=1, now_ns=waited_s * SECOND_NS)
        taken.append(waiting.take(entry.id).id)
    assert len(taken) - 1 == 10 * times + 1


def test_who_waited_longer_still_is_tried_alone() -> None:
    """No target has room for it until nothing else is placed."""
    waiting: RequestQueue[None] = RequestQueue()
    for number in range(10):
        push(waiting, f"before {number}", 100, at=number)
    push(waiting, "large", 5000, at=50)
    placed = 0
    for number in range(200):
        push(waiting, f"short {number}", 100, at=100 + number)
        window = waiting.window(now_ns=LONG_AFTER_NS)
        small = next((entry for entry in window if entry.id != "large"), None)
        if small is None:
            break
        waiting.take(small.id)
        placed += 1
    assert [entry.id for entry in window] == ["large"]
    assert placed == 10 * ALONE_AFTER + 1


@pytest.mark.parametrize(
    ("weights", "shares"), [({}, (1, 1, 1)), ({"b": 2.0}, (1, 2, 1)), ({"a": 0.5, "c": 3.0}, (1, 2, 6))]
)
def test_shares_of_tenants_converge_to_their_weights(weights: dict[str, float], shares: tuple[int, ...]) -> None:
    waiting: RequestQueue[None] = RequestQueue(weights)
    ids, had = count(), Counter[str]()
    sizes = {"a": 70, "b": 500, "c": 1900}
    for tenant, size in sizes.items():
        for _ in range(5):
            push(waiting, f"{next(ids)}", size, tenant=tenant)
    for _ in range(4000):
        (entry,) = waiting.window(size=1)
        waiting.take(entry.id)
        had[entry.tenant] += int(entry.size)
        push(waiting, f"{next(ids)}", entry.size, tenant=entry.tenant)
    total = sum(had.values())
    for tenant, share in zip("abc", shares, strict=True):
        assert had[tenant] / total == pytest.approx(share / sum(shares), rel=0.05)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(64, 4000)), min_size=1, max_size=60))
def test_a_flood_of_one_tenant_delays_another_by_its_share_only(steps: list[tuple[str, int]]) -> None:
    """Whoever comes and goes: "z", which always has something held, gets at least an equal share."""
    waiting: RequestQueue[None] = RequestQueue()
    ids, had = count(), Counter[str]()
    for tenant, size in steps:
        push(waiting, f"{next(ids)}", size, tenant=tenant)
        push(waiting, f"{next(ids)}", size, tenant=tenant)
        push(waiting, f"{next(ids)}", 1000, tenant="z")
        (entry,) = waiting.window(size=1)
        had[entry.tenant] += int(waiting.take(entry.id).size)
        for other in "abcd":
            assert had["z"] >= had[other] - 2 * 4000


def test_a_tenant_that_sends_one_at_a_time_gets_no_more_than_its_share() -> None:
    waiting: RequestQueue[None] = RequestQueue()
    for number in range(50):
        push(waiting, f"b{number}", 100, tenant="b")
    taken = ""
    for number in range(40):
        if not any(entry.tenant == "a" for entry in waiting):
            push(waiting, f"a{number}", 100, tenant="a")
        (entry,) = waiting.window(size=1)
        taken += waiting.take(entry.id).tenant
    assert taken == "ba" * 20


weights = st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.01, 0.5, 1.0, 3.0, 100.0]))
work = st.lists(st.integers(1, 5000), min_size=1, max_size=20)


@given(weights, st.fixed_dictionaries(dict.fromkeys("abcd", work)), st.integers(1, 300), st.integers(0, 299))
def test_tenants_that_always_wait_differ_by_one_request_of_each(
    weights: dict[str, float], sizes: dict[str, list[int]], end: int, begin: int
) -> None:
    """From any moment to any other: the work by weight that each has had."""
    shares = TenantShares(weights)
    taken, at_begin = dict.fromkeys("abcd", 0.0), dict.fromkeys("abcd", 0.0)
    turns = {name: cycle(sizes[name]) for name in "abcd"}
    for name in "abcd":
        shares.enter(name)
    for step in range(end):
        if step == begin:
            at_begin = dict(taken)
        name = next(iter(shares))
        size = next(turns[name])
        shares.charge(name, size)
        taken[name] += size / weights.get(name, 1.0)
    had = {name: taken[name] - at_begin[name] for name in "abcd"}
    largest = {name: max(sizes[name]) / weights.get(name, 1.0) for name in "abcd"}
    for one, other in permutations("abcd", 2):
        assert had[one] - had[other] <= largest[one] + largest[other] + 1e-6


@given(st.integers(1, 2_000), st.integers(1, 500), st.integers(1, 8), st.sampled_from([0.1, 1.0, 10.0]))
def test_no_stream_of_new_tenants_starves_one_that_waits(size: int, other: int, many: int, weight: float) -> None:
    """It has just had a large request. Each of the others comes once, when one of them has gone."""
    shares = TenantShares({"z": weight})
    shares.enter("z")
    for number in range(many):
        shares.enter(str(number))
    shares.charge("z", size)
    for taken in count():
        name = next(iter(shares))
        if name == "z":
            break
        assert AGEING * taken * other <= size / weight * (many + weight) + 2 * other * (many + 1)
        shares.charge(name, other)
        shares.leave(name)
        shares.enter(str(many + taken))


def test_a_changed_weight_counts_from_the_next_request_on() -> None:
    weights, had = {"a": 1.0, "b": 1.0}, Counter[str]()
    shares = TenantShares(weights)
    shares.enter("a")
    shares.enter("b")
    for turn in range(800):
        if turn == 400:
            assert had["a"] == had["b"]
            weights["a"] = 3.0
        name = next(iter(shares))
        shares.charge(name, 10)
        had[name] += 1
    assert had["a"] - 200 == pytest.approx(300, abs=2)


def test_several_tenants_are_tried_when_the_next_one_has_no_target() -> None:
    waiting: RequestQueue[None] = RequestQueue()
    for number in range(100):
        push(waiting, f"a{number}", 100, tenant="a")
    push(waiting, "b", 100, tenant="b", at=SECOND_NS)
    assert {entry.tenant for entry in waiting.window()} == {"a", "b"}


def test_looking_at_the_next_requests_costs_no_more_with_a_thousand_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: RequestQueue[None] = RequestQueue()
    for number in range(1000):
        push(waiting, str(number), 100, at=number, tenant=f"{number:04}")
    looked = list[object]()

    class Counted(dict[str, object]):
        def __getitem__(self, name: str) -> object:
            looked.append(name)
            return super().__getitem__(name)

    among = waiting._lanes[""][0]
    monkeypatch.setattr(among, "_tenants", Counted(among._tenants))
    assert [entry.id for entry in waiting.window(size=4)] == ["0", "1", "2", "3"]
    assert len(looked) == 4


@pytest.mark.parametrize(("tokens", "ahead"), [(4, QUANTUM // LEAST), (2 * LEAST, QUANTUM // (2 * LEAST))])
def test_a_tenant_is_ahead_at_a_worker_by_what_one_step_computes(tokens: int, ahead: int) -> None:
    """Routers have chosen the order; below that, turning it over would only make short requests wait for long ones."""
    queue: StartQueue[str] = StartQueue()
    for tenant, requests in (("a", 20), ("b", 3)):
        for number in range(requests):
            queue.push((tenant, number), f"{tenant}{number}", StartShare(1, tenant), tokens)
    order: list[str] = []
    while (first := queue.first()) is not None:
        assert queue.first() is first
        queue.take((first[0], int(first[1:])))
        order.append(first)
    assert order.index("b0") == ahead + 1
    assert [each[0] for each in order[ahead + 1 : ahead + 7]] == ["b", "a", "b", "a", "b", "a"]
    assert not len(queue)
