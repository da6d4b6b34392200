"""Which waiting inputs form the next batch."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.runners.embedding_runner import FEWEST_TOKENS, PATIENCE, STEP_S, InputQueue, next_budget

LENGTHS = st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=5), max_size=12)


@given(LENGTHS, st.integers(1, 200), st.integers(1, 8))
def test_every_input_is_taken_once_the_shortest_and_oldest_request_first_and_within_the_limits(
    requests: list[list[int]], max_tokens: int, max_inputs: int
) -> None:
    queue: InputQueue[int] = InputQueue(max_tokens, max_inputs)
    waiting: dict[tuple[int, int], int] = {}
    since, taken = dict.fromkeys(range(len(requests)), 0), 0
    for number, lengths in enumerate(requests):
        queue.add(number, [[number] * length for length in lengths])
        waiting |= {(number, place): length for place, length in enumerate(lengths)}
    while waiting:
        batch = queue.take()
        names = [(each.key, each.place) for each in batch]
        lengths = [len(each.tokens) for each in batch]
        left = {number: sum(each for (key, _), each in waiting.items() if key == number) for number, _ in waiting}
        due = {number: since[number] + PATIENCE * min(tokens, max_tokens) for number, tokens in left.items()}
        turn = min(due, key=lambda number: (due[number], number))
        assert min(name for name in waiting if name[0] == turn) in names, "the oldest of the request whose turn it is"
        taken += sum(lengths)
        since[turn] = taken
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
    assert sorted(each.key for each in queue.take()) == ["a", "b", "c"]
    assert [len(each.tokens) for each in queue.take()] == [90]


def test_a_short_request_is_in_the_next_batch_before_large_ones_that_came_earlier() -> None:
    queue: InputQueue[str] = InputQueue(max_tokens=100)
    for number in range(5):
        queue.add(f"large {number}", [[1] * 90] * 5000)
    taken = [queue.take()[0].key for _ in range(12)]
    assert taken == [f"large {number % 5}" for number in range(12)], "large ones take turns"
    queue.add("short", [[2] * 4])
    assert [each.key for each in queue.take()] == ["short"]
    assert [each.key for each in queue.take()] == ["large 2"]


def test_a_large_request_continues_while_short_ones_keep_coming() -> None:
    queue: InputQueue[str] = InputQueue(max_tokens=100)
    queue.add("large", [[1] * 90] * 3)
    keys: list[set[str]] = []
    for number in range(300):
        for one in range(25):
            queue.add(f"short {number} {one}", [[2] * 4])
        keys.append({each.key[:5] for each in queue.take()})
    slices = [0, *(at for at, found in enumerate(keys) if "large" in found)]
    assert len(slices) == 4
    assert all(PATIENCE // 2 < after - before <= PATIENCE for before, after in pairwise(slices))


@given(st.floats(100, 1e6), st.floats(0, 0.02), st.integers(FEWEST_TOKENS, 16_384))
def test_batches_take_a_tenth_of_a_second_however_fast_the_engine_is(rate: float, overhead: float, most: int) -> None:
    budget = 1024
    for _ in range(20):
        budget = next_budget(budget, budget, overhead + budget / rate, most)
    assert FEWEST_TOKENS <= budget <= max(most, 1024)
    seconds = overhead + budget / rate
    assert seconds < 1.05 * STEP_S or budget == FEWEST_TOKENS
    assert seconds > 0.7 * STEP_S or budget == most


def test_a_small_batch_says_nothing_of_what_a_large_one_would_take() -> None:
    assert next_budget(1000, 10, 0.001, 8192) == 1000
    assert next_budget(1000, 900, 0.001, 8192) == 2000
    assert next_budget(1000, 1000, 0.2, 8192) == 500
    assert next_budget(1000, 8000, 0.4, 8192) == 1000, "a single long input, at a good rate"


def test_a_dropped_request_is_not_computed() -> None:
    queue: InputQueue[str] = InputQueue(max_tokens=100)
    queue.add("a", [[1], [2]])
    queue.add("b", [[3]])
    queue.drop("a")
    assert [each.key for each in queue.take()] == ["b"]
    queue.drop("b")
