"""Queues by model: what routers say that they hold, and for the rest this gateway's own requests."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.admission.queues import QueueLevels, by_model
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Priority
from tests.workers.support import request

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


WAITING = dict.fromkeys(Priority, 0)


class Served:
    """Two models behind a gateway, of which so many requests wait."""

    def __init__(self, models: Mapping[str, int]) -> None:
        self.requests: list[InflightRequest] = []
        self.queues = QueueLevels(10, lambda: self.requests)
        self.queues.polled(WAITING | {Priority.standard: max(10, sum(models.values()))}, {}, WAITING)
        self.queues.polled_models(models)

    def accept(self, model: str) -> InflightRequest:
        inflight = InflightRequest(request(model=model))
        self.requests.append(inflight)
        self.queues.accepted(inflight)
        return inflight

    def refused(self, model: str) -> bool:
        try:
            self.queues.check(Priority.standard, model)
        except ServingError as error:
            return error.code is Code.queue_full
        return False


def test_a_flood_of_one_model_leaves_the_others_their_share() -> None:
    served = Served({"a": 9, "b": 1})
    assert served.refused("a")
    assert served.refused(""), "it may be anyone's"
    assert served.refused("unknown")
    for _ in range(4):
        assert not served.refused("b")
        served.accept("b")
    assert served.refused("b"), "it has 5 of 10, as it would alone beside one other"


def test_requests_of_a_model_that_have_begun_since_the_last_poll_take_nothing_of_its_share() -> None:
    served = Served({"a": 10, "b": 0})
    for _ in range(20):
        assert not served.refused("b")
        served.accept("b").fold.attempt = 0


def test_all_models_together_get_at_most_as_much_again() -> None:
    assert Served({"a": 20, "b": 0}).refused("b")


def test_one_model_has_the_whole_queue_and_no_more() -> None:
    assert Served({}).refused("a")
