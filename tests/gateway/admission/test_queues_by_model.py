"""Queues by model: what routers say that they hold, and for the rest this gateway's own requests."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.admission.queues import QueueLevels, by_model
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Priority

COUNTS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 500))


@pytest.mark.parametrize(
    ("total", "held", "own", "expected"),
    [
        (0, {}, {"a": 3}, {}),
        (5, {"a": 5}, {"a": 1, "b": 9}, {"a": 5}),
        (5, {"a": 2, "b": 3}, {}, {"a": 2, "b": 3}),
        (12, {"a": 2}, {"a": 2, "b": 10}, {"a": 2, "b": 10}),
        (12, {"a": 2}, {"b": 5}, {"a": 2, "b": 10}),
        (12, {"a": 2, "b": 4}, {}, {"a": 4, "b": 8}),
        (7, {}, {}, {"": 7}),
        (3, {"a": 9}, {}, {"a": 9}),
    ],
)
def test_what_no_router_has_read_is_of_the_models_of_own_requests(
    total: int, held: Mapping[str, int], own: Mapping[str, int], expected: Mapping[str, int]
) -> None:
    assert by_model(total, held, own) == expected


@given(st.integers(0, 5_000), COUNTS, COUNTS)
def test_each_request_is_counted_once(total: int, held: Mapping[str, int], own: Mapping[str, int]) -> None:
    counts = by_model(total, held, own)
    assert sum(counts.values()) == max(total, sum(held.values()))
    assert all(counts.get(model, 0) >= count for model, count in held.items())
    assert all(counts.values())


def refused(queues: QueueLevels, model: str) -> bool:
    try:
        queues.check(Priority.standard, model)
    except ServingError as error:
        return error.code is Code.queue_full
    return False


def test_a_flood_of_one_model_leaves_the_others_their_share() -> None:
    queues = QueueLevels(10, lambda _: 1_000)
    waiting = dict.fromkeys(Priority, 0) | {Priority.standard: 10}
    queues.polled(waiting, dict.fromkeys(Priority, 0))
    queues.polled_models({"a": 9, "b": 1})
    assert refused(queues, "a")
    assert refused(queues, ""), "it may be anyone's"
    assert refused(queues, "unknown")
    for _ in range(4):
        assert not refused(queues, "b")
        queues.accepted(Priority.standard, "b")
    assert refused(queues, "b"), "it has 5 of 10, as it would alone beside one other"


def test_all_models_together_get_at_most_as_much_again() -> None:
    queues = QueueLevels(10, lambda _: 1_000)
    queues.polled(dict.fromkeys(Priority, 0) | {Priority.standard: 20}, dict.fromkeys(Priority, 0))
    queues.polled_models({"a": 20, "b": 0})
    assert refused(queues, "b")


def test_one_model_has_the_whole_queue_and_no_more() -> None:
    queues = QueueLevels(10, lambda _: 1_000)
    queues.polled(dict.fromkeys(Priority, 0) | {Priority.standard: 10}, dict.fromkeys(Priority, 0))
    queues.polled_models({})
    assert refused(queues, "a")
