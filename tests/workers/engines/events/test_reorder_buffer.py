"""Message numbers of one publisher: lost, repeated or late, the output is in order or reported as lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.engines.events.subscriber import EventReorderBuffer, Ready


def test_messages_in_order_are_ready_at_once() -> None:
    buffer: EventReorderBuffer[str] = EventReorderBuffer()
    assert [buffer.push_live(number, str(number)) for number in range(3)] == [Ready([str(n)]) for n in range(3)]
    assert (buffer.missing, buffer.expected) == (None, 3)


def test_a_gap_waits_for_its_replay() -> None:
    buffer: EventReorderBuffer[str] = EventReorderBuffer()
    assert buffer.push_live(2, "c") == Ready([])
    assert buffer.missing == 0
    assert buffer.push_replayed(0, "a") == Ready(["a"])
    assert buffer.missing == 1
    assert buffer.push_replayed(1, "b") == Ready(["b", "c"])
    assert buffer.push_replayed(2, "c") == Ready([])
    assert buffer.missing is None


def test_messages_that_cannot_be_replayed_are_lost_and_later_ones_are_used() -> None:
    buffer: EventReorderBuffer[str] = EventReorderBuffer()
    assert buffer.push_live(0, "a") == Ready(["a"])
    buffer.push_live(5, "f")
    buffer.push_replayed(4, "e")
    assert buffer.give_up() == Ready(["e", "f"], lost=True)
    assert buffer.push_live(6, "g") == Ready(["g"])
    assert buffer.give_up() == Ready([])


def test_of_several_gaps_only_messages_after_the_last_are_used() -> None:
    buffer: EventReorderBuffer[str] = EventReorderBuffer()
    buffer.push_live(1, "b")
    buffer.push_live(3, "d")
    assert buffer.give_up() == Ready(["d"], lost=True)


def test_a_restarted_publisher_voids_its_earlier_messages() -> None:
    buffer: EventReorderBuffer[str] = EventReorderBuffer()
    for number in range(4):
        buffer.push_live(number, "old")
    assert buffer.push_live(0, "new") == Ready(["new"], lost=True)
    assert buffer.push_live(1, "new") == Ready(["new"])
    buffer.push_live(5, "new")
    assert buffer.push_live(2, "newer") == Ready([], lost=True)
    assert buffer.missing == 0


def test_a_replay_that_overtakes_live_messages_is_no_restart() -> None:
    buffer: EventReorderBuffer[str] = EventReorderBuffer()
    buffer.push_live(1, "b")
    assert [buffer.push_replayed(n, "abcd"[n]) for n in range(4)][-1] == Ready(["d"])
    live = [buffer.push_live(number, item) for number, item in enumerate("cde", 2)]
    assert live == [Ready([]), Ready([]), Ready(["e"])]


def test_waiting_messages_are_bounded() -> None:
    buffer: EventReorderBuffer[int] = EventReorderBuffer(max_waiting=10)
    ready = [buffer.push_live(number, number) for number in range(1, 12)]
    assert ready[:-1] == [Ready([])] * 10
    assert ready[-1] == Ready(list(range(1, 12)), lost=True)


@given(st.data())
def test_each_message_is_ready_once_in_order_or_reported_as_lost(data: st.DataObject) -> None:
    """A publisher keeps the last few; live messages are dropped; replays come when they are requested."""
    kept = data.draw(st.integers(1, 12))
    buffer: EventReorderBuffer[int] = EventReorderBuffer()
    received: list[int] = []

    def use(ready: Ready[int]) -> None:
        if ready.lost:
            received.clear()
            if ready.items:
                received.append(ready.items[0])
                ready = Ready(ready.items[1:])
        for item in ready.items:
            assert not received or item == received[-1] + 1
            received.append(item)

    sent = -1
    for _ in range(data.draw(st.integers(1, 40))):
        sent += 1
        if data.draw(st.booleans()):
            use(buffer.push_live(sent, sent))
        if buffer.missing is not None and data.draw(st.booleans()):
            for number in range(max(buffer.missing, sent + 1 - kept), sent + 1):
                use(buffer.push_replayed(number, number))
            use(buffer.give_up())
    use(buffer.push_live(sent + 1, sent + 1))
    if buffer.missing is not None:
        use(buffer.give_up())
    assert received[-1] == sent + 1
    assert received == list(range(received[0], sent + 2))


@pytest.mark.parametrize("number", [0, 3])
def test_repeats_are_dropped(number: int) -> None:
    buffer: EventReorderBuffer[int] = EventReorderBuffer()
    for each in range(5):
        buffer.push_live(each, each)
    assert buffer.push_replayed(number, number) == Ready([])
