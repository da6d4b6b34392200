"""Numbers of one publisher: whatever is lost, repeated or late, what comes out is in order, or said to be lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.events.reorder_buffer import Order, Ready


def test_what_comes_in_order_goes_on_at_once() -> None:
    order: Order[str] = Order()
    assert [order.live(number, str(number)) for number in range(3)] == [Ready([str(n)]) for n in range(3)]
    assert (order.missing, order.expected) == (None, 3)


def test_a_gap_waits_for_its_replay() -> None:
    order: Order[str] = Order()
    assert order.live(2, "c") == Ready([])
    assert order.missing == 0
    assert order.replayed(0, "a") == Ready(["a"])
    assert order.missing == 1
    assert order.replayed(1, "b") == Ready(["b", "c"])
    assert order.replayed(2, "c") == Ready([])
    assert order.missing is None


def test_what_cannot_be_replayed_is_lost_and_what_follows_is_used() -> None:
    order: Order[str] = Order()
    assert order.live(0, "a") == Ready(["a"])
    order.live(5, "f")
    order.replayed(4, "e")
    assert order.given_up() == Ready(["e", "f"], lost=True)
    assert order.live(6, "g") == Ready(["g"])
    assert order.given_up() == Ready([])


def test_of_several_gaps_only_what_follows_the_last_is_used() -> None:
    order: Order[str] = Order()
    order.live(1, "b")
    order.live(3, "d")
    assert order.given_up() == Ready(["d"], lost=True)


def test_a_publisher_that_begins_anew_voids_what_was_before() -> None:
    order: Order[str] = Order()
    for number in range(4):
        order.live(number, "old")
    assert order.live(0, "new") == Ready(["new"], lost=True)
    assert order.live(1, "new") == Ready(["new"])
    order.live(5, "new")
    assert order.live(2, "newer") == Ready([], lost=True)
    assert order.missing == 0


def test_a_replay_that_overtakes_the_live_messages_is_no_new_beginning() -> None:
    order: Order[str] = Order()
    order.live(1, "b")
    assert [order.replayed(n, "abcd"[n]) for n in range(4)][-1] == Ready(["d"])
    assert [order.live(2, "c"), order.live(3, "d"), order.live(4, "e")] == [Ready([]), Ready([]), Ready(["e"])]


def test_what_waits_is_bounded() -> None:
    order: Order[int] = Order(waiting=10)
    ready = [order.live(number, number) for number in range(1, 12)]
    assert ready[:-1] == [Ready([])] * 10
    assert ready[-1] == Ready(list(range(1, 12)), lost=True)


@given(st.data())
def test_all_is_told_once_in_order_or_said_to_be_lost(data: st.DataObject) -> None:
    """A publisher keeps the last few; live messages drop out; replays come whenever they are asked for."""
    kept = data.draw(st.integers(1, 12))
    order: Order[int] = Order()
    told: list[int] = []

    def use(ready: Ready[int]) -> None:
        if ready.lost:
            told.clear()
            if ready.items:
                told.append(ready.items[0])
                ready = Ready(ready.items[1:])
        for item in ready.items:
            assert not told or item == told[-1] + 1
            told.append(item)

    sent = -1
    for _ in range(data.draw(st.integers(1, 40))):
        sent += 1
        if data.draw(st.booleans()):
            use(order.live(sent, sent))
        if order.missing is not None and data.draw(st.booleans()):
            for number in range(max(order.missing, sent + 1 - kept), sent + 1):
                use(order.replayed(number, number))
            use(order.given_up())
    use(order.live(sent + 1, sent + 1))
    if order.missing is not None:
        use(order.given_up())
    assert told[-1] == sent + 1
    assert told == list(range(told[0], sent + 2))


@pytest.mark.parametrize("number", [0, 3])
def test_repeats_are_dropped(number: int) -> None:
    order: Order[int] = Order()
    for each in range(5):
        order.live(each, each)
    assert order.replayed(number, number) == Ready([])
