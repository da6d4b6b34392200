"""Each class of requests has room of its own."""

from collections.abc import Callable

import pytest

from penstock.gateway.admission.queues import QueueLevels, class_of
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Priority

INTERACTIVE, STANDARD, BATCH = Priority


def counts(**waiting: int) -> dict[Priority, int]:
    return {priority: waiting.get(priority.value, 0) for priority in Priority}


def before(queues: QueueLevels) -> dict[Priority, int]:
    """What a poll that begins now remembers."""
    return {priority: queues.since(priority) for priority in Priority}


@pytest.fixture
def queues() -> QueueLevels:
    return made(lambda _: 1000)


def made(unstarted: Callable[[Priority], int]) -> QueueLevels:
    return QueueLevels(10, unstarted)


def refused(queues: QueueLevels) -> list[Priority]:
    return [priority for priority in Priority if _refusal(queues, priority) is not None]


def _refusal(queues: QueueLevels, priority: Priority) -> ServingError | None:
    try:
        queues.check(priority)
    except ServingError as error:
        return error
    return None


def test_a_flood_of_one_class_refuses_no_other(queues: QueueLevels) -> None:
    for _ in range(10):
        assert refused(queues) == []
        queues.accepted(BATCH)
    assert queues.near
    assert not queues.full
    assert refused(queues) == [BATCH]
    refusal = _refusal(queues, BATCH)
    assert refusal is not None
    assert refusal.code is Code.queue_full
    assert "10 requests of class 'batch'" in refusal.message
    queues.polled(counts(batch=5000, standard=9), before(queues))
    assert refused(queues) == [BATCH]
    queues.accepted(STANDARD)
    assert refused(queues) == [STANDARD, BATCH]
    queues.polled(counts(batch=10, standard=10, interactive=10), before(queues))
    assert queues.full


def test_what_was_accepted_during_a_look_still_counts_after_it(queues: QueueLevels) -> None:
    earlier = before(queues)
    for _ in range(10):
        queues.accepted(STANDARD)
    queues.polled(counts(), earlier)
    assert refused(queues) == [STANDARD]
    queues.polled(counts(), before(queues))
    assert refused(queues) == []
    assert not queues.near


def test_requests_that_have_begun_do_not_wait_however_many_came_since_the_last_look() -> None:
    queues = made(lambda priority: 3 if priority is STANDARD else 0)
    for _ in range(500):
        queues.accepted(STANDARD)
    assert queues.near
    assert refused(queues) == []


@pytest.mark.parametrize(
    ("body", "priority"),
    [
        (b'{"model": "m", "priority": "batch", "messages": [{"role": "user"}]}', BATCH),
        (b'{"service_tier": "flex", "prompt": "x"}', BATCH),
        (b'{"service_tier": "priority", "n": 3}', INTERACTIVE),
        (b'{"service_tier": "auto"}', STANDARD),
        (b'{"priority": "interactive", "service_tier": "flex"}', INTERACTIVE),
        (b"{}", STANDARD),
        (b'{"priority": "none such"}', STANDARD),
        (b"{", STANDARD),
        (b"\xff", STANDARD),
        (b"[" * 100_000, STANDARD),
    ],
)
def test_a_bodys_class_is_known_before_it_is_prepared(body: bytes, priority: Priority) -> None:
    assert class_of(body) is priority
