"""However messages come, what is given out is the answer: each number once, in order, up to the final one."""

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.client.reader import MAX_AHEAD, ReorderBuffer, ReplyMessage, message_of


def answer(count: int) -> list[ReplyMessage]:
    return [ReplyMessage(seq, b"%d" % seq, final=seq == count - 1) for seq in range(count)]


@given(st.integers(1, 40), st.integers(0, 39), st.integers(1, 4), st.randoms(use_true_random=False))
def test_any_order_and_any_repeats_give_each_message_once_in_order(
    count: int, first: int, copies: int, rng: random.Random
) -> None:
    first = min(first, count - 1)
    buffer, sent = ReorderBuffer(first), answer(count) * copies
    rng.shuffle(sent)
    given_out = [message for each in sent for message in buffer.take(each)]
    assert given_out == answer(count)[first:]
    assert buffer.ended
    assert buffer.hole is None


@given(st.integers(2, 40), st.sets(st.integers(0, 39), min_size=1), st.randoms(use_true_random=False))
def test_what_is_lost_shows_as_a_hole_and_reading_again_from_there_closes_it(
    count: int, lost: set[int], rng: random.Random
) -> None:
    buffer = ReorderBuffer()
    came = [message for message in answer(count) if message.seq not in lost]
    rng.shuffle(came)
    given_out = [message for each in came for message in buffer.take(each)]
    missing = sorted(number for number in lost if number < count)
    if missing and came and max(message.seq for message in came) > missing[0]:
        assert buffer.hole is not None
        assert buffer.hole[0] == buffer.next == missing[0]
        assert set(range(buffer.hole[0], buffer.hole[1] + 1)) <= lost
    given_out += [message for each in answer(count)[buffer.next :] for message in buffer.take(each)]
    assert given_out == answer(count)
    assert buffer.ended


@given(st.integers(0, 30), st.integers(1, 40))
def test_a_record_takes_the_place_of_everything_and_ends_the_answer(had: int, count: int) -> None:
    buffer = ReorderBuffer(min(had, count - 1))
    record = ReplyMessage(0, b"all", final=True, record=True)
    assert buffer.take(record) == [record]
    assert buffer.ended
    assert [buffer.take(message) for message in answer(count)] == [[]] * count


def test_what_is_kept_ahead_of_a_hole_is_bounded() -> None:
    buffer = ReorderBuffer()
    for seq in range(1, 3 * MAX_AHEAD):
        buffer.take(ReplyMessage(seq, b""))
    assert len(buffer._ahead) == MAX_AHEAD
    given_out = buffer.take(ReplyMessage(0, b""))
    assert [message.seq for message in given_out] == list(range(MAX_AHEAD + 1))


def test_nothing_comes_behind_the_final_message() -> None:
    buffer = ReorderBuffer()
    buffer.take(ReplyMessage(0, b"", final=True))
    assert buffer.take(ReplyMessage(1, b"")) == []


def test_a_message_is_read_from_its_headers_and_one_without_a_number_is_none() -> None:
    headers = {"Penstock-Seq": "7", "Penstock-Final": "1", "Penstock-Error": "cancelled", "Penstock-Request-Id": "x"}
    assert message_of(headers, b"b") == ReplyMessage(7, b"b", final=True, error="cancelled", request="x")
    for wrong in ({}, {"Penstock-Seq": ""}, {"Penstock-Seq": "-1"}, {"Penstock-Seq": "1x"}, {"Status": "503"}):
        assert message_of(wrong, b"") is None
