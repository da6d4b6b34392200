"""Which waiting inputs form the next batch."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.runners.embedding_runner import InputQueue

LENGTHS = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=5), max_size=12)


@given(LENGTHS, st.integers(1, 200), st.integers(1, 8))
def test_every_input_is_taken_once_requests_in_turn_and_within_the_limits(
    requests: list[list[int]], max_tokens: int, max_inputs: int
) -> None:
    queue: InputQueue[int] = InputQueue(max_tokens, max_inputs)
    waiting: dict[tuple[int, int], int] = {}
    turns = list(range(len(requests)))
    for number, lengths in enumerate(requests):
        queue.add(number, [[number] * length for length in lengths])
        waiting |= {(number, place): length for place, length in enumerate(lengths)}
    while waiting:
        batch = queue.take()
        names = [(each.key, each.place) for each in batch]
        lengths = [len(each.tokens) for each in batch]
        turn = next(number for number in turns if any(key == number for key, _ in waiting))
        assert min(name for name in waiting if name[0] == turn) in names, "the oldest of the request whose turn it is"
        turns.remove(turn)
        turns.append(turn)
        assert len(batch) == 1 or max(lengths) * len(batch) <= max_tokens
        assert len(batch) <= max_inputs
        assert max(lengths) - min(lengths) <= 2 * max(16, 0.25 * max(lengths))
        for name, length in zip(names, lengths, strict=True):
            assert waiting.pop(name) == length
        assert len(queue) == len(waiting)
    assert queue.take() == []


def test_inputs_of_a_length_are_computed_together_across_requests() -> None:
    queue: InputQueue[str] = InputQueue(max_tokens=100)
    queue.add("a", [[1] * 10, [1] * 90])
    queue.add("b", [[2] * 10])
    queue.add("c", [[3] * 12])
    assert [each.key for each in queue.take()] == ["a", "b", "c"]
    assert [len(each.tokens) for each in queue.take()] == [90]


def test_a_short_request_waits_for_one_batch_of_a_large_one() -> None:
    queue: InputQueue[str] = InputQueue(max_tokens=100)
    queue.add("large", [[1] * 90] * 5000)
    queue.add("short", [[2] * 4])
    assert [each.key for each in queue.take()] == ["large"]
    assert [each.key for each in queue.take()] == ["short"]


def test_a_dropped_request_is_not_computed() -> None:
    queue: InputQueue[str] = InputQueue(max_tokens=100)
    queue.add("a", [[1], [2]])
    queue.add("b", [[3]])
    queue.drop("a")
    assert [each.key for each in queue.take()] == ["b"]
    queue.drop("b")
