"""Each class of requests has room of its own."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.admission.queues import QueueLevels, TenantLevels, check_tenant, class_of
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Priority
from tests.workers.support import request

INTERACTIVE, STANDARD, BATCH = Priority


LIMIT = 10


def counts(**waiting: int) -> dict[Priority, int]:
    return {priority: waiting.get(priority.value, 0) for priority in Priority}


def before(queues: QueueLevels) -> dict[Priority, int]:
    """What a poll that begins now remembers."""
    return {priority: queues.since(priority) for priority in Priority}


class Open:
    """A gateway's open requests."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.requests: list[InflightRequest] = []
        self.queues = QueueLevels(limit, lambda: self.requests)

    def accept(self, priority: Priority, *, begun: bool = False) -> InflightRequest:
        inflight = InflightRequest(request(priority=priority))
        inflight.fold.attempt = 0 if begun else -1
        self.requests.append(inflight)
        self.queues.accepted(inflight)
        return inflight

    def refused(self) -> list[Priority]:
        return [priority for priority in Priority if _refusal(self.queues, priority) is not None]


def _refusal(queues: QueueLevels, priority: Priority) -> ServingError | None:
    try:
        queues.check(priority)
    except ServingError as error:
        return error
    return None


def test_a_flood_of_one_class_refuses_no_other() -> None:
    own = Open()
    queues = own.queues
    for _ in range(LIMIT):
        assert own.refused() == []
        own.accept(BATCH)
    assert queues.near
    assert not queues.full
    assert own.refused() == [BATCH]
    refusal = _refusal(queues, BATCH)
    assert refusal is not None
    assert refusal.code is Code.queue_full
    assert "10 requests of class 'batch'" in refusal.message
    queues.polled(counts(batch=5000, standard=9), {}, before(queues))
    assert own.refused() == [BATCH]
    own.accept(STANDARD)
    assert own.refused() == [STANDARD, BATCH]
    queues.polled(counts(batch=10, standard=10, interactive=10), {}, before(queues))
    assert queues.full


@pytest.mark.parametrize("known", [True, False])
def test_what_was_accepted_during_a_poll_counts_once(known: bool) -> None:
    own = Open()
    earlier = before(own.queues)
    for seq in range(1, 7):
        own.accept(STANDARD).stored_seq = seq
    own.queues.polled(counts(standard=2), {STANDARD: 2} if known else {}, earlier)  # before the others were stored
    for _ in range(4 if known else 8):
        assert own.refused() == []
        own.accept(STANDARD)
    assert own.refused() == [STANDARD]


def test_requests_that_have_begun_do_not_wait_however_many_came_since_the_last_poll() -> None:
    own = Open()
    for number in range(500):
        own.accept(STANDARD, begun=number % 200 > 0)
    assert own.queues.near
    assert own.refused() == []


STEPS = st.tuples(
    st.sampled_from(
        ("arrive", "arrive", "arrive", "other", "store", "store", "ack", "read", "place", "begin", "look", "end")
    ),
    st.sampled_from(list(Priority)),
    st.integers(0, 9),
)


class Broker:
    """Requests of one gateway and of others, as the broker stores them and routers place them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.own = Open(limit)
        self.publishing: list[InflightRequest] = []
        self.unacknowledged: list[tuple[int, InflightRequest]] = []
        self.stored: list[tuple[int, Priority, InflightRequest | None]] = []  # and not placed
        self.last = 0
        self.delivered = dict.fromkeys(Priority, 0)
        self.counted: dict[Priority, set[InflightRequest]] = {each: set() for each in Priority}
        self.looked = counts()
        self.before: dict[Priority, int] | None = None  # of the poll under way
        self.looks: dict[Priority, tuple[int, int | None, set[InflightRequest]]] = {}
        self.overlapping: set[InflightRequest] = set()  # being stored during the last poll
        self.unsure: set[InflightRequest] = set()  # likewise, of the one under way

    def arrive(self, priority: Priority, _: int) -> None:
        added = [each for each in self.own.requests if each.fold.attempt < 0 and each.request.priority is priority]
        added = [each for each in added if each not in self.counted[priority]]
        waiting = self.looked[priority] + len(added)
        if self.own.queues.near and _refusal(self.own.queues, priority) is not None:
            assert waiting >= self.limit, "there is room"
            return
        assert waiting - len(self.overlapping.intersection(added)) < self.limit, "there is none"
        inflight = self.own.accept(priority)
        self.publishing.append(inflight)
        self.unsure.add(inflight)

    def other(self, priority: Priority, _: int) -> None:
        self.last += 1
        self.stored.append((self.last, priority, None))

    def store(self, _: Priority, which: int) -> None:
        if self.publishing:
            inflight = self.publishing.pop(which % len(self.publishing))
            self.last += 1
            self.stored.append((self.last, inflight.request.priority, inflight))
            self.unacknowledged.append((self.last, inflight))

    def ack(self, _: Priority, which: int) -> None:
        if self.unacknowledged:
            seq, inflight = self.unacknowledged.pop(which % len(self.unacknowledged))
            inflight.stored_seq = seq

    def read(self, priority: Priority, count: int) -> None:
        pending = [seq for seq, of, _ in self.stored if of is priority and seq > self.delivered[priority]]
        self.delivered[priority] = max([self.delivered[priority], *pending[: count + 1]])

    def place(self, priority: Priority, which: int) -> None:
        held = [each for each in self.stored if each[1] is priority and each[0] <= self.delivered[priority]]
        if held:
            placed = held[which % len(held)]
            self.stored.remove(placed)
            if placed[2] is not None:
                placed[2].fold.attempt = 0

    def begin(self, *_: object) -> None:
        if self.before is None:
            self.before, self.looks = before(self.own.queues), {}
            self.unsure = {*self.publishing, *(inflight for _, inflight in self.unacknowledged)}

    def look(self, priority: Priority, _: int) -> None:
        if self.before is not None and priority not in self.looks:
            there = [(seq, inflight) for seq, of, inflight in self.stored if of is priority]
            newest = None if any(seq > self.delivered[priority] for seq, _ in there) else self.delivered[priority]
            seen = {each for each in self.own.requests if each not in self.publishing}
            self.looks[priority] = len(there), newest, seen

    def end(self, *_: object) -> None:
        if self.before is None:
            return
        for priority in Priority:
            self.look(priority, 0)
        self.looked = {priority: look[0] for priority, look in self.looks.items()}
        self.counted = {priority: look[2] for priority, look in self.looks.items()}
        newest = {priority: look[1] for priority, look in self.looks.items() if look[1] is not None}
        self.own.queues.polled(self.looked, newest, self.before)
        self.before, self.overlapping = None, self.unsure


@given(st.integers(1, 6), st.lists(STEPS, max_size=120))
def test_no_request_counts_twice_and_only_what_is_stored_during_a_poll_may_not_count(
    limit: int, steps: list[tuple[str, Priority, int]]
) -> None:
    broker = Broker(limit)
    for name, priority, number in steps:
        getattr(broker, name)(priority, number)


@pytest.mark.parametrize(
    ("body", "priority"),
    [
        (b'{"model": "m", "priority": "batch", "messages": [{"role": "user"}]}', BATCH),
        (b'{"service_tier": "flex", "prompt": "x"}', BATCH),
        (rb'{"service_tier": "flex", "prompt": "half of a pair: \ud83d"}', BATCH),
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
