"""The broker alone, filled with what requests store."""

from tests.perf.broker import MESSAGES, measure


def test_a_real_broker_stores_the_messages_of_many_requests() -> None:
    found = measure(1, 1.0)
    assert found.requests_per_s > 100
    assert found.messages_per_s == found.requests_per_s * len(MESSAGES)
    assert found.cores > 0
