"""The estimate of what lies behind a message, against a stream that is known message by message."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.bus.stream_fill import MOST_SAMPLES, Alarm, StreamFill, StreamSample, beyond_share
from tests.properties import examples


class Stream:
    """Limits and ``discard: old``, as the server has them."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.kept: deque[tuple[int, int]] = deque()
        self.last = 0
        self.bytes = 0

    def store(self, size: int) -> None:
        self.last += 1
        self.kept.append((self.last, size))
        self.bytes += size
        while self.bytes > self.max_bytes:
            self.bytes -= self.kept.popleft()[1]

    @property
    def first(self) -> int:
        return self.kept[0][0] if self.kept else self.last + 1

    def look(self) -> StreamSample:
        return StreamSample(self.first, self.last, self.bytes)

    def bytes_from(self, seq: int) -> int:
        return sum(size for at, size in self.kept if at >= seq)


bursts = st.lists(st.lists(st.integers(1, 400), max_size=30), min_size=1, max_size=40)


@given(bursts, st.integers(1000, 20_000))
@examples(200)
def test_the_estimate_is_wrong_by_at_most_two_intervals_wherever_one_asks(sizes: list[list[int]], limit: int) -> None:
    stream, fill = Stream(limit), StreamFill()
    largest = 0
    for burst in sizes:
        for size in burst:
            stream.store(size)
        largest = max(largest, sum(burst))
        fill.add(stream.look())
        for seq in range(stream.first, stream.last + 2):
            assert abs(fill.bytes_from(seq) - stream.bytes_from(seq)) <= 2 * largest + 1
        assert abs(fill.bytes_from(stream.first) - stream.bytes) <= 1
        assert abs(fill.bytes_from(0) - stream.bytes) <= 1
        assert fill.bytes_from(stream.last + 1) == 0


@given(st.lists(st.integers(1, 400), min_size=1, max_size=200))
def test_where_a_look_ended_the_estimate_is_exact(sizes: list[int]) -> None:
    stream, fill = Stream(1 << 40), StreamFill()
    for size in sizes:
        stream.store(size)
        fill.add(stream.look())
    for seq in range(1, len(sizes) + 1):
        assert fill.bytes_from(seq) == sum(sizes[seq - 1 :])


def test_a_stream_that_was_emptied_or_recreated_is_sampled_again() -> None:
    fill = StreamFill()
    fill.add(StreamSample(1, 100, 10_000))
    fill.add(StreamSample(501, 500, 0))
    assert fill.bytes_from(1) == 0
    fill.add(StreamSample(501, 510, 1000))
    assert fill.bytes_from(501) == 1000
    fill.add(StreamSample(1, 5, 50))
    assert fill.bytes_from(0) == 50


def test_memory_is_bounded_and_the_newest_looks_stay_exact() -> None:
    stream, fill = Stream(1 << 40), StreamFill()
    for number in range(20 * MOST_SAMPLES):
        stream.store(number % 97 + 1)
        fill.add(stream.look())
    assert len(fill._seqs) <= MOST_SAMPLES
    assert fill.bytes_from(stream.last) == stream.bytes_from(stream.last)
    assert fill.bytes_from(1) == stream.bytes


def test_an_alarm_goes_off_once_until_the_level_has_clearly_fallen() -> None:
    alarm = Alarm(0.5)
    assert [alarm.update(level) for level in (0.4, 0.5, 0.49, 0.51, 0.44, 0.5)] == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]


def test_whoever_has_more_than_an_equal_part_is_named_and_one_alone_may_have_all() -> None:
    assert beyond_share({"a": 900}, 1000) == frozenset()
    assert beyond_share({"a": 900, "b": 10}, 1000) == {"a"}
    assert beyond_share({"a": 300, "b": 10}, 1000) == frozenset()
