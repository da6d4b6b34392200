"""The order in which held requests are tried."""

from random import Random
from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.process.class_queue import QueueEntry
from penstock.router.held.held_requests import HANDICAP_NS, PATIENCE_NS, SECOND_NS, URGENT_NS, RequestQueue, delay_ns
from tests.properties import examples

T = TypeVar("T")

LATER = 3600 * SECOND_NS


def room(*entries: tuple[str, int, float]) -> RequestQueue[str]:
    """Entries: id, rank, seconds of arrival."""
    made: RequestQueue[str] = RequestQueue()
    for id, rank, arrived in entries:
        assert made.push(id, id, rank=rank, arrived_ns=int(arrived * SECOND_NS), deadline_ns=LATER)
    return made


def peek(waiting: RequestQueue[T], lane: str = "") -> QueueEntry[T] | None:
    """The next request of a lane."""
    return next(iter(waiting.window(lane, 1)), None)


def pop(waiting: RequestQueue[T], lane: str = "") -> QueueEntry[T] | None:
    entry = peek(waiting, lane)
    return waiting.take(entry.id) if entry is not None else None


def drain(waiting: RequestQueue[str]) -> str:
    out = ""
    while entry := pop(waiting):
        out += entry.id
    return out


def test_classes_go_first_and_within_one_first_come_first_served() -> None:
    assert drain(room(("x", 2, 0), ("b", 1, 1), ("a", 1, 0), ("i", 0, 3))) == "iabx"


def test_a_higher_class_starves_no_request() -> None:
    assert drain(room(("x", 2, 0), ("i", 0, 59), ("j", 0, 61), ("s", 1, 56.5))) == "ixjs"


def test_a_near_deadline_overtakes_within_its_class_only() -> None:
    waiting = room(("i", 0, 104), ("b", 1, 100))
    near = 110 * SECOND_NS
    waiting.push("x", "x", rank=1, arrived_ns=101 * SECOND_NS, deadline_ns=near)
    waiting.push("y", "y", rank=2, arrived_ns=101 * SECOND_NS, deadline_ns=near)
    waiting.push("z", "z", rank=2, arrived_ns=100 * SECOND_NS, deadline_ns=LATER)
    assert drain(waiting) == "ixbyz"


def test_lanes_do_not_hold_each_other_up() -> None:
    waiting: RequestQueue[int] = RequestQueue()
    for i, lane in enumerate("mnm"):
        waiting.push(str(i), i, rank=0, arrived_ns=i, deadline_ns=LATER, lane=lane)
    assert sorted(waiting.lanes) == ["m", "n"]
    assert [e.item for e in iter(lambda: pop(waiting, "m"), None)] == [0, 2]
    assert waiting.lanes == ["n"]


def test_no_request_is_in_the_queue_twice() -> None:
    waiting: RequestQueue[None] = RequestQueue()
    took = [waiting.push(id, None, rank=0, arrived_ns=0, deadline_ns=LATER) for id in ("a", "a", "b")]
    assert took == [True, False, True]
    assert waiting.remove("a") is not None
    assert waiting.push("a", None, rank=0, arrived_ns=0, deadline_ns=LATER)


STEP = st.tuples(
    st.sampled_from(["push", "push", "push", "pop", "remove", "expired"]),
    st.integers(0, 12),
    st.integers(0, 2),
    st.integers(0, 200),
    st.integers(1, 200),
)


class Plain:
    """The room as its definition has it: sorted anew at each step."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, int, str, int, int, int]] = []  # due, order, id, deadline, arrived, rank
        self.turns: dict[int, list[int]] = {}

    def push(self, order: int, id: str, rank: int, arrived_ns: int, deadline_ns: int) -> None:
        due = min(arrived_ns, deadline_ns - URGENT_NS)
        self.waiting = sorted([*self.waiting, (due, order, id, deadline_ns, arrived_ns, rank)])
        self.turns[rank] = sorted([*self.turns.get(rank, []), arrived_ns])

    def first(self) -> str | None:
        ranks = [(turns[0] + HANDICAP_NS[rank], rank) for rank, turns in self.turns.items() if turns]
        return next(m[2] for m in self.waiting if m[5] == min(ranks)[1]) if ranks else None

    def take(self, id: str) -> None:
        rank = next(m[5] for m in self.waiting if m[2] == id)
        self.waiting = [m for m in self.waiting if m[2] != id]
        self.turns[rank].pop(0)

    def leave(self, id: str) -> None:
        arrived, rank = next((m[4], m[5]) for m in self.waiting if m[2] == id)
        self.waiting = [m for m in self.waiting if m[2] != id]
        self.turns[rank].remove(next((turn for turn in self.turns[rank] if turn >= arrived), self.turns[rank][-1]))


@examples(200)
@given(st.lists(STEP, max_size=120))
def test_the_queue_equals_a_plain_model_of_its_definition(steps: list[tuple[str, int, int, int, int]]) -> None:
    waiting: RequestQueue[int] = RequestQueue()
    plain = Plain()
    for order, (kind, who, rank, arrived, life) in enumerate(steps):
        id, arrived_ns, deadline_ns = str(who), arrived * SECOND_NS, (arrived + life) * SECOND_NS
        known = [m[2] for m in plain.waiting]
        if kind == "push":
            took = waiting.push(id, order, rank=rank, arrived_ns=arrived_ns, deadline_ns=deadline_ns)
            assert took == (id not in known)
            if took:
                plain.push(order, id, rank, arrived_ns, deadline_ns)
        elif kind == "pop":
            entry, first = pop(waiting), plain.first()
            assert (entry.id if entry else None) == first
            if first is not None:
                plain.take(first)
        elif kind == "remove":
            assert (waiting.remove(id) is not None) == (id in known)
            if id in known:
                plain.leave(id)
        else:
            late = sorted((m[3], m[1], m[2]) for m in plain.waiting if m[3] <= arrived_ns)
            assert [e.id for e in waiting.expired(arrived_ns)] == [each[2] for each in late]
            for each in late:
                plain.leave(each[2])
        assert len(waiting) == len(plain.waiting)
        assert {e.id for e in waiting} == {m[2] for m in plain.waiting}
        peeked = peek(waiting)
        assert (peeked.id if peeked else None) == plain.first()
        assert (waiting.turn() is None) == (not plain.waiting)


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 3), st.integers(1, 120)), min_size=1, max_size=60
)


@examples(200)
@given(ARRIVALS, st.integers(0, 10**6))
def test_deadlines_never_change_which_class_is_next(arrivals: list[tuple[int, int, int, int]], seed: int) -> None:
    """Whatever deadlines clients make up."""
    served = []
    rng = Random(seed)
    for honest in (True, False):
        waiting: RequestQueue[int] = RequestQueue()
        now, ranks = 0, []
        for number, (rank, pause, pops, life) in enumerate(arrivals):
            now += pause
            deadline = now + (life if honest else rng.randint(1, 3600))
            waiting.push(str(number), rank, rank=rank, arrived_ns=now * SECOND_NS, deadline_ns=deadline * SECOND_NS)
            ranks += [entry.item for _ in range(pops) if (entry := pop(waiting)) is not None]
        served.append(ranks)
    assert served[0] == served[1]


@examples(200)
@given(ARRIVALS)
def test_no_request_is_overtaken_for_longer_than_the_bound(arrivals: list[tuple[int, int, int, int]]) -> None:
    waiting: RequestQueue[int] = RequestQueue()
    now = 0
    for number, (rank, pause, pops, life) in enumerate(arrivals):
        now += pause
        waiting.push(str(number), rank, rank=rank, arrived_ns=now * SECOND_NS, deadline_ns=(now + life) * SECOND_NS)
        for _ in range(pops):
            taken = pop(waiting)
            for left in waiting if taken is not None else ():
                assert taken.arrived_ns <= left.arrived_ns + HANDICAP_NS[left.rank] + 2 * URGENT_NS


def test_removed_requests_leave_nothing_behind() -> None:
    waiting: RequestQueue[None] = RequestQueue()
    for i in range(10_000):
        waiting.push(str(i), None, rank=0, arrived_ns=i, deadline_ns=LATER)
        waiting.remove(str(i))
    assert len(waiting._deadlines) <= 100
    assert waiting.lanes == []
    waiting.push("kept", None, rank=0, arrived_ns=0, deadline_ns=LATER)
    for i in range(10_000):
        waiting.push(str(i), None, rank=0, arrived_ns=i, deadline_ns=LATER)
        waiting.remove(str(i))
    (tenant,) = waiting._lanes[""][0]._tenants.values()
    assert len(tenant.heap) <= 100
    assert len(tenant.limits) == 1, "overdue requests are looked for among these"
    assert pop(waiting) is not None
    assert pop(waiting) is None


def test_short_prompts_go_first_and_long_ones_first_come_first_served() -> None:
    waiting: RequestQueue[int] = RequestQueue()
    for number, tokens in enumerate((100_000, 90_000, 3000, 100, 3000)):
        waiting.push(
            str(number), number, rank=1, arrived_ns=number, deadline_ns=LATER, delay_ns=delay_ns(float(tokens))
        )
    assert [entry.item for entry in waiting.window()] == [3, 2, 4, 0, 1]
    waiting.delay("0", delay_ns(0))  # its prompt is cached by now
    assert [entry.item for entry in waiting.window(size=3)] == [0, 3, 2]
    assert waiting.take("3").item == 3
    assert [entry.item for entry in waiting.window()] == [0, 2, 4, 1]
    assert delay_ns(1e9) == PATIENCE_NS


DELAYS = st.lists(
    st.tuples(st.sampled_from(["push", "push", "delay", "take", "remove"]), st.integers(0, 9), st.integers(0, 40_000)),
    max_size=60,
)


@examples(150)
@given(DELAYS)
def test_the_window_is_the_queue_sorted_by_class_and_due_time(steps: list[tuple[str, int, int]]) -> None:
    waiting: RequestQueue[int] = RequestQueue()
    due: dict[str, tuple[int, int]] = {}  # due time, order of entry
    for order, (kind, who, tokens) in enumerate(steps):
        id, arrived_ns = str(who), order * SECOND_NS
        if kind == "push" and id not in due:
            waiting.push(id, who, rank=0, arrived_ns=arrived_ns, deadline_ns=LATER, delay_ns=delay_ns(tokens))
            due[id] = (min(arrived_ns + delay_ns(tokens), LATER - URGENT_NS), order)
        elif id in due and kind == "delay":
            entry = waiting.get(id)
            assert entry is not None
            waiting.delay(id, delay_ns(tokens))
            due[id] = (min(entry.arrived_ns + delay_ns(tokens), LATER - URGENT_NS), due[id][1])
        elif id in due and kind in ("take", "remove"):
            (waiting.take if kind == "take" else waiting.remove)(id)
            del due[id]
        found = [entry.id for entry in waiting.window(size=4)]
        assert found == sorted(due, key=due.__getitem__)[:4]
        assert len(waiting) == len(due)


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "push", "push", "take", "remove"]), st.integers(0, 30), st.integers(0, 2)),
        max_size=80,
    )
)
def test_the_first_of_a_window_are_those_of_the_whole_one(steps: list[tuple[str, int, int]]) -> None:
    """Of classes and tenants in any state, overdue requests included."""
    waiting: RequestQueue[None] = RequestQueue()
    for at, (kind, who, rank) in enumerate(steps):
        if kind == "push":
            waiting.push(
                str(who), None, rank=rank, arrived_ns=at, deadline_ns=LATER, tenant=str(who % 3), size=100 * who
            )
        elif str(who) in waiting:
            (waiting.take if kind == "take" else waiting.remove)(str(who))
        for now_ns in (at, at + 60 * SECOND_NS):
            window = waiting.window(now_ns=now_ns)
            for wanted in (1, 2, 4, 31):
                assert waiting.window(now_ns=now_ns, wanted=wanted) == window[:wanted]
