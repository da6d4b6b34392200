"""Queues by model: what routers say that they hold, and for the rest this gateway's own requests."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.queues import by_model

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
