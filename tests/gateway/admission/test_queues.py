"""Each class of requests has room of its own."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.admission.queues import QueueLevels, TenantLevels, check_tenant, class_of
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


class Waiting:
    """A tenant's requests at one gateway, of which so many begin per second."""

    def __init__(self, per_second: float) -> None:
        self.per_second = per_second
        self.unstarted = 0.0
        self.now = 100.0
        self.levels = TenantLevels(lambda: Counter({"acme": int(self.unstarted)} if self.unstarted >= 1 else {}))
        self.levels.polled({}, self.now)

    def pass_by(self, seconds: float, arriving: int = 0, held: int = 0) -> None:
        for _ in range(int(2 * seconds)):
            for _ in range(arriving):
                self.unstarted += 1
                self.levels.accepted("acme")
            self.now += 0.5
            self.unstarted = max(0.0, self.unstarted - 0.5 * self.per_second)
            self.levels.polled({"acme": held}, self.now)

    def refusal(self, limit: int) -> ServingError | None:
        try:
            check_tenant("acme", limit, [self.levels])
        except ServingError as error:
            return error
        return None


@given(st.integers(1, 40), st.integers(1, 60), st.floats(0.25, 20))
def test_a_refused_tenant_has_room_when_it_was_told_so_and_not_long_before(
    limit: int, beyond: int, per_second: float
) -> None:
    acme = Waiting(per_second)
    while acme.unstarted < limit + beyond or acme.now < 110:
        acme.pass_by(0.5, arriving=max(1, int(per_second)))
    refusal = acme.refusal(limit)
    assert refusal is not None
    assert refusal.code is Code.queue_full
    after = refusal.retry_after
    assert after is not None
    begins_in = (acme.unstarted - limit + 1) / per_second
    assert begins_in / 1.5 - 1 <= after <= 1.5 * begins_in + 2 / per_second + 2
    acme.pass_by(1.5 * after + 4 / per_second + 1)
    assert acme.refusal(limit) is None


def test_what_other_gateways_have_waiting_counts_for_a_tenants_bound_and_its_pace() -> None:
    acme = Waiting(2.0)
    acme.pass_by(10, arriving=2)
    own = int(acme.unstarted)
    assert acme.refusal(own + 1) is None
    acme.pass_by(0.5, arriving=2, held=3 * own)
    refusal = acme.refusal(own + 1)
    assert refusal is not None
    assert "begin per second" in refusal.message
    assert acme.levels.per_second("acme") == pytest.approx(2 * 3, rel=0.2)
    assert check_tenant("zenith", 1, [acme.levels]) is None


def test_requests_of_a_tenant_that_have_begun_since_the_last_look_do_not_count() -> None:
    acme = Waiting(1.0)
    for _ in range(50):
        acme.levels.accepted("acme")
    assert acme.refusal(10) is None
    acme.unstarted = 10
    assert acme.refusal(10) is not None


def test_requests_that_have_begun_do_not_count_in_any_cell() -> None:
    one, other = Waiting(1.0), Waiting(1.0)
    for _ in range(9):  # too few for the bound in each cell, and enough in both
        one.levels.accepted("acme")
        other.levels.accepted("acme")
    check_tenant("acme", 10, [one.levels, other.levels])
    one.unstarted = other.unstarted = 5
    with pytest.raises(ServingError, match="10 requests of tenant 'acme' wait"):
        check_tenant("acme", 10, [one.levels, other.levels])
