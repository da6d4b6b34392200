"""The order in which waiting requests are tried."""

from hypothesis import given, settings
from hypothesis import strategies as st

from router.waiting import HANDICAP_NS, SECOND_NS, URGENT_NS, WaitingRoom

LATER = 3600 * SECOND_NS


def room(*entries: tuple[str, int, float]) -> WaitingRoom[str]:
    """Entries: id, rank, seconds of arrival."""
    made: WaitingRoom[str] = WaitingRoom(100)
    for id, rank, arrived in entries:
        assert made.push(id, id, rank=rank, arrived_ns=int(arrived * SECOND_NS), deadline_ns=LATER)
    return made


def drain(waiting: WaitingRoom[str]) -> str:
    out = ""
    while entry := waiting.pop_best():
        out += entry.id
    return out


def test_classes_go_first_and_within_one_first_come_first_served() -> None:
    assert drain(room(("x", 2, 0), ("b", 1, 1), ("a", 1, 0), ("i", 0, 3))) == "iabx"


def test_nobody_is_starved_by_a_higher_class() -> None:
    assert drain(room(("x", 2, 0), ("i", 0, 59), ("j", 0, 61), ("s", 1, 56.5))) == "ixjs"


def test_a_near_deadline_overtakes_every_class() -> None:
    waiting = room(("i", 0, 100))
    waiting.push("x", "x", rank=2, arrived_ns=100 * SECOND_NS, deadline_ns=120 * SECOND_NS)
    assert drain(waiting) == "xi"


def test_lanes_do_not_hold_each_other_up() -> None:
    waiting: WaitingRoom[int] = WaitingRoom(10)
    for i, lane in enumerate("mnm"):
        waiting.push(str(i), i, rank=0, arrived_ns=i, deadline_ns=LATER, lane=lane)
    assert sorted(waiting.lanes) == ["m", "n"]
    assert [e.item for e in iter(lambda: waiting.pop_best("m"), None)] == [0, 2]
    assert waiting.lanes == ["n"]


def test_the_room_is_bounded_and_lets_nobody_in_twice() -> None:
    waiting: WaitingRoom[None] = WaitingRoom(2)
    took = [waiting.push(id, None, rank=0, arrived_ns=0, deadline_ns=LATER) for id in ("a", "a", "b", "c")]
    assert took == [True, False, True, False]
    assert waiting.remove("a") is not None
    assert waiting.push("c", None, rank=0, arrived_ns=0, deadline_ns=LATER)


STEP = st.tuples(
    st.sampled_from(["push", "push", "push", "pop", "remove", "expired"]),
    st.integers(0, 12),
    st.integers(0, 2),
    st.integers(0, 200),
    st.integers(1, 200),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEP, max_size=120))
def test_the_room_is_a_sorted_list(steps: list[tuple[str, int, int, int, int]]) -> None:
    waiting: WaitingRoom[int] = WaitingRoom(8)
    model: list[tuple[int, int, str, int]] = []  # due, order, id, deadline
    for order, (kind, who, rank, arrived, life) in enumerate(steps):
        id, arrived_ns, deadline_ns = str(who), arrived * SECOND_NS, (arrived + life) * SECOND_NS
        if kind == "push":
            took = waiting.push(id, order, rank=rank, arrived_ns=arrived_ns, deadline_ns=deadline_ns)
            assert took == (len(model) < 8 and all(id != m[2] for m in model))
            if took:
                due = min(arrived_ns + HANDICAP_NS[rank], deadline_ns - URGENT_NS)
                model = sorted([*model, (due, order, id, deadline_ns)])
        elif kind == "pop":
            entry = waiting.pop_best()
            assert (entry.id if entry else None) == (model.pop(0)[2] if model else None)
        elif kind == "remove":
            assert (waiting.remove(id) is not None) == any(id == m[2] for m in model)
            model = [m for m in model if m[2] != id]
        else:
            late = sorted((m[3], m[1], m[2]) for m in model if m[3] <= arrived_ns)
            assert [e.id for e in waiting.expired(arrived_ns)] == [id for _, _, id in late]
            model = [m for m in model if m[3] > arrived_ns]
        assert len(waiting) == len(model)
        assert {e.id for e in waiting} == {m[2] for m in model}
        first = waiting.peek()
        assert (first.id if first else None) == (model[0][2] if model else None)


def test_what_left_early_leaves_nothing_behind() -> None:
    waiting: WaitingRoom[None] = WaitingRoom(10)
    for i in range(10_000):
        waiting.push(str(i), None, rank=0, arrived_ns=i, deadline_ns=LATER)
        waiting.remove(str(i))
    assert len(waiting._deadlines) <= 100
    assert sum(map(len, waiting._lanes.values())) <= 100
    assert waiting.pop_best() is None
