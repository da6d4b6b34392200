"""Whether new work is taken: polls how much waits, whether routers take requests, how full the log is, and whether
the broker stores.

Accepted requests wait for a router to place them; each class has its own room. Where there are several models, those
of one do not take all of it: while fewer requests of a model wait than an equal share, it gets further room, up to as
much again for all models together. A tenant may have its own bound, of all classes and models (``TenantLevels``).

A broker with a full disk keeps its connections, and answers nothing. The tokens of a running answer are stored without
an acknowledgement that a gateway would see, so a request whose tokens cannot be stored looks like one that is slow.
While some open request is quiet, a small entry is written to a bucket of this gateway's, over the one before: if that
is not confirmed, neither is anything else (``StoreCheck``).
"""

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec
import structlog
from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError

from penstock.gateway.admission.storage import LogCapacity
from penstock.gateway.base.gateway_metrics import GatewayMetrics
from penstock.gateway.base.request_bodies import decode_json, resolve_priority
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.infra.bus.forget import stores
from penstock.infra.bus.tasks import Tasks
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest, Priority
from penstock.schemas.routers import LEASE_S, decode


class _Class(msgspec.Struct):
    """What a body says of its class."""

    priority: Priority | Literal[0] | None = None
    service_tier: str | None = None


_decode = msgspec.json.Decoder(_Class).decode


def class_of(body: bytes) -> Priority:
    """The class that an unchecked body names. Of an unreadable one the default: preparing it reports the error."""
    try:
        named: _Class = decode_json(_decode, body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Priority.standard
    return resolve_priority(named.priority, named.service_tier)


def by_model(total: int, held: Mapping[str, int], own: Mapping[str, int]) -> dict[str, int]:
    """How many of the requests that wait are of each model.

    Routers say of which models the requests are that they hold, which are nearly all. What no router has read yet is
    taken to be of the models of this gateway's own requests that have not begun, in their proportions.

    Args:
        total: accepted and not placed, by the broker's count.
        held: of these by routers, by model; their counts may be a moment old.
        own: this gateway's open requests that no worker has started.
    Returns: counts by model, "" for what is not known; they sum up to ``total`` unless ``held`` alone is more.
    """
    counts = Counter({model: count for model, count in held.items() if count > 0})
    rest = total - counts.total()
    if rest <= 0:
        return dict(counts)
    unread = {model: more for model, count in own.items() if (more := count - counts[model]) > 0}
    weights = unread or dict(counts) or {"": 1}
    whole, given = sum(weights.values()), 0
    for seen, (model, weight) in enumerate(sorted(weights.items()), 1):
        share = rest - given if seen == len(weights) else rest * weight // whole
        counts[model] += share
        given += share
    return {model: count for model, count in counts.items() if count}


class QueueLevels:
    """The broker's counts at the last poll, and this gateway's requests that are not among them.

    A request that is stored while the broker is asked may be among the counts or not. Its sequence often says which;
    else it is taken to be among them. So none counts twice, and what is accepted beyond the limit until the next poll
    is at most what was being stored during one.

    Args:
        limit: of each class.
        own: this gateway's open requests. Called only near the limit.
    """

    def __init__(self, limit: int, own: Callable[[], Iterable[InflightRequest]]) -> None:
        self._limit = limit
        self._own = own
        self._looked: Mapping[Priority, int] = dict.fromkeys(Priority, 0)
        self._newest: Mapping[Priority, int] = {}  # sequence of the newest request that was counted, if that is known
        self._polls = 0
        self._since: Counter[Priority] = Counter()  # accepted since the last poll began
        self._most = 0  # of any class, as if all of these waited and were of the fullest
        self._models: Mapping[str, int] = {}  # what waits of each, at the last poll

    def accepted(self, inflight: InflightRequest) -> None:
        inflight.polls = self._polls
        self._since[inflight.request.priority] += 1
        self._most += 1

    def since(self, priority: Priority) -> int:
        """How many of a class were accepted since the last poll began."""
        return self._since[priority]

    def polled(
        self, counts: Mapping[Priority, int], newest: Mapping[Priority, int], before: Mapping[Priority, int]
    ) -> None:
        """
        Args:
            counts: that the broker gave, by class.
            newest: sequence of the newest request of a class that was counted; a class is left out if that is unknown.
            before: ``since`` of each class, just before the broker was asked about it.
        """
        self._looked, self._newest = counts, newest
        self._polls += 1
        self._since.subtract(before)
        self._most = max(counts.values()) + self._since.total()

    def polled_models(self, counts: Mapping[str, int]) -> None:
        """
        Args:
            counts: what waits of each model that is served, of all classes; empty: there is only one.
        """
        self._models = counts

    @property
    def total(self) -> int:
        return sum(self._looked.values())

    @property
    def near(self) -> bool:
        """Whether any class may be full, so that the class of a body has to be read."""
        return self._most >= self._limit

    @property
    def full(self) -> bool:
        """Whether no class has room."""
        return all(self._waiting(priority) >= self._limit for priority in Priority)

    def check(self, priority: Priority, model: str = "") -> None:
        """
        Args:
            model: canonical name; "": not known.
        Raises:
            ServingError: queue_full.
        """
        waiting = self._waiting(priority)
        if waiting >= self._limit and not (waiting < 2 * self._limit and self._has_share(model)):
            raise ServingError(
                Code.queue_full,
                f"{waiting} requests of class {priority.value!r} wait for a worker and the limit of each class is "
                f"{self._limit} (--max-queue); try again later or add workers",
                retry_after=1.0,
            )

    def _has_share(self, model: str) -> bool:
        waiting = self._models.get(model)
        if waiting is None or len(self._models) < 2:
            return False
        added = sum(each.request.model == model for each in self._own() if self.adds(each))
        return waiting + added < max(1, self._limit // len(self._models))

    def room(self, priority: Priority) -> int:
        """How many more of a class would be taken."""
        return max(0, self._limit - self._waiting(priority))

    def _waiting(self, priority: Priority) -> int:
        looked, since = self._looked[priority], self._since[priority]
        if looked + since < self._limit:
            return looked + since
        # Some of those accepted since the last poll have begun; counting them is deferred until it matters.
        return looked + sum(each.request.priority is priority for each in self._own() if self.adds(each))

    def adds(self, inflight: InflightRequest) -> bool:
        """Whether a request waits and the last poll has certainly not counted it."""
        if inflight.ended or inflight.fold.attempt >= 0:
            return False
        newest = self._newest.get(inflight.request.priority)
        return inflight.polls == self._polls or (newest is not None and inflight.stored_seq > newest)


RATE_S = 30.0  # over which it is measured how fast a tenant's requests begin


class TenantLevels:
    """Requests of tenants that wait for a worker: this gateway's own, and those of others that routers hold.

    Args:
        unstarted: this gateway's open requests that no worker has started, by tenant.
    """

    def __init__(self, unstarted: Callable[[], Counter[str]]) -> None:
        self._unstarted = unstarted
        self._own = Counter[str]()  # at the last poll
        self._others: Mapping[str, int] = {}
        self._since = Counter[str]()  # accepted since then
        self._polled_at = 0.0
        self._begun: deque[tuple[float, Mapping[str, int]]] = deque()  # by poll: seconds, and how many began meanwhile

    def accepted(self, tenant: str) -> None:
        self._since[tenant] += 1

    def polled(self, held: Mapping[str, int], now: float) -> None:
        """
        Args:
            held: by routers, of all gateways; may be a moment old.
            now: monotonic.
        """
        own, since = self._unstarted(), self._since
        passed, self._polled_at = now - self._polled_at, now
        # Only of tenants of which something waited: how fast the others' would begin is not known.
        self._begun.append((passed, {name: self._own[name] + since[name] - own[name] for name in self._own}))
        while len(self._begun) > 1 and sum(seconds for seconds, _ in self._begun) > RATE_S:
            self._begun.popleft()
        self._others = {name: more for name, count in held.items() if (more := count - own[name]) > 0}
        self._own, self._since = own, Counter()

    def most(self, tenant: str) -> int:
        """How many wait, as if none had begun since the last poll."""
        return self._others.get(tenant, 0) + self._own[tenant] + self._since[tenant]

    def waiting(self, tenant: str) -> int:
        """How many wait: this gateway's own are counted, which takes longer."""
        return self._others.get(tenant, 0) + self._unstarted()[tenant]

    def per_second(self, tenant: str) -> float:
        """How many of a tenant begin per second, at all gateways; 0.0: none did lately, or it is not known."""
        seconds = begun = 0.0
        for passed, counts in self._begun:
            if tenant in counts:
                seconds, begun = seconds + passed, begun + counts[tenant]
        own = max(1, self._own[tenant])
        return (begun / seconds) * (own + self._others.get(tenant, 0)) / own if begun > 0 else 0.0


def waiting_of(tenant: str, limit: int, levels: Sequence[TenantLevels]) -> int:
    """How many of a tenant's requests wait in all cells; exactly only from ``limit`` on."""
    most = sum(each.most(tenant) for each in levels)
    return most if most < limit else sum(each.waiting(tenant) for each in levels)


def check_tenant(tenant: str, limit: int, levels: Sequence[TenantLevels]) -> None:
    """
    Args:
        levels: of all cells.
    Raises:
        ServingError: queue_full, with the time in which there will be room.
    """
    waiting = waiting_of(tenant, limit, levels)
    if waiting < limit:
        return
    rate = sum(each.per_second(tenant) for each in levels)
    after_s = max(1, math.ceil((waiting - limit + 1) / rate)) if rate else int(RATE_S)
    pace = f"{rate:.2g} of them begin per second" if rate else "it is not known yet how fast they begin"
    raise ServingError(
        Code.queue_full,
        f"{waiting} requests of tenant {tenant!r} wait for a worker and its limit is {limit} (`penstock tenants set "
        f"{tenant} --max-waiting`); {pace}: try again in {after_s} s",
        retry_after=float(after_s),
    )


log = structlog.get_logger("gateway")

POLL_S = 0.5
HURRY_S = 0.1  # while work waits for the places that a poll shows
INFO_TIMEOUT_S = 2.0
MORE_S = 2.0  # for what is asked beyond whether routers are there


class QueueMonitor:
    """
    Args:
        limit: waiting requests of each class.
        readers: this gateway's own open requests.
        name_in: canonical name of a body's model; "": it names none that is served.
        cell: its number.
        counted: called after a poll, when ``queued`` is new.

    Attributes:
        queued: accepted requests that no router has placed, by model; "": of whichever.
        has_routers: some router takes requests; as of the last poll.
        answered: the broker answered the last poll.
        lacks_consumer: of this stream routers' consumers are missing; "": none is.
        hurried: poll more often, since work waits for the next place.
        tenants: what waits of each, once ``follows_tenants`` is set: some tenant has a bound.
    """

    def __init__(
        self,
        bus: Bus,
        metrics: GatewayMetrics,
        limit: int,
        readers: Callable[[], Iterable[InflightRequest]],
        name_in: Callable[[bytes], str],
        counted: Callable[[], None] = lambda: None,
        *,
        cell: int = 0,
    ) -> None:
        self.queued: Mapping[str, int] = {}
        self._counted = counted
        self._shown = f"{bus.subjects.namespace}:" if cell else ""  # before the names of its consumers
        self.has_routers = self.answered = False
        self.lacks_consumer = ""
        self.hurried = False
        self.tenants = TenantLevels(self._unstarted_by_tenant)
        self.follows_tenants = False
        self._bus = bus
        self._metrics = metrics
        self._readers = readers
        self._name_in = name_in
        self._log_capacity = LogCapacity(bus, metrics)
        self._queues = QueueLevels(limit, readers)
        self._delivered: dict[str, int] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(HURRY_S if self.hurried else POLL_S)
            try:
                await self.poll()
            except NotFoundError:  # ``lacks_consumer`` names the stream
                pass
            except Exception as error:
                self.has_routers = self.answered = False
                log.debug("queue_unknown", error=repr(error))

    async def poll(self) -> None:
        """How many requests no router has placed yet, and whether any router asks for more.

        Raises:
            nats.errors.Error, TimeoutError: the broker did not answer.
        """
        subjects = self._bus.subjects
        before, queued = Counter({each: self._queues.since(each) for each in Priority}), dict.fromkeys(Priority, 0)
        newest: dict[Priority, int] = {}
        names = [f"router-{priority.value}" for priority in Priority]
        stream, ask = subjects.stream("REQUESTS"), self._bus.js.consumer_info
        try:
            consumers = await asyncio.gather(*(ask(stream, name, timeout=INFO_TIMEOUT_S) for name in names))
        except NotFoundError:
            self.lacks_consumer, self.has_routers, self.answered = stream, False, True
            raise
        self.lacks_consumer = ""
        has_routers = False
        for priority, name, info in zip(Priority, names, consumers, strict=True):
            pending, unacknowledged = info.num_pending or 0, info.num_ack_pending or 0
            self._metrics.consumers.observe(self._shown + name, pending, unacknowledged, info.num_redelivered or 0)
            queued[priority] = pending + unacknowledged
            if info.delivered and not pending:
                newest[priority] = info.delivered.stream_seq
            delivered = info.delivered.consumer_seq if info.delivered else 0
            # A router that is full has no pull request waiting at the moment, but makes progress.
            has_routers |= bool(info.num_waiting) or delivered > self._delivered.get(name, delivered)
            self._delivered[name] = delivered
        self._queues.polled(queued, newest, before)
        self.has_routers, self.answered = has_routers, True
        with contextlib.suppress(TimeoutError):  # the next poll says whether the broker is there
            async with asyncio.timeout(MORE_S):
                await self._count_waiting()
                unended = ((r.request.tenant, len(r.request.prompt)) for r in self._readers() if not r.ended)
                await self._log_capacity.refresh(consumers, unended)

    async def _count_waiting(self) -> None:
        """By model and by tenant, where these matter."""
        total, several = self._queues.total, len(self._metrics.models) > 1
        held, of_tenants = Counter[str](), Counter[str]()
        if total and (several or self.follows_tenants):
            with contextlib.suppress(ServingError):  # by this gateway's own requests, then
                held, of_tenants = await self._held_by_routers()
        if self.follows_tenants:
            self.tenants.polled(of_tenants, time.monotonic())
        self._count_models(held)

    def _count_models(self, held: Mapping[str, int]) -> None:
        metrics, total = self._metrics, self._queues.total
        if len(metrics.models) < 2:
            self.queued = {"": total}
            self._queues.polled_models({})
            self._counted()
            return
        unread = (each for each in self._readers() if each.fold.attempt < 0 and not self._queues.adds(each))
        own = Counter(each.request.model for each in unread) if total else {}
        counts = by_model(total, held, own)
        self._queues.polled_models({model: counts.get(model, 0) for model in metrics.models})
        self.queued = counts
        self._counted()

    async def _held_by_routers(self) -> tuple[Counter[str], Counter[str]]:
        """By model, and by tenant: of each class, of the tenants that have most."""
        models, tenants = Counter[str](), Counter[str]()
        bucket = self._bus.subjects.bucket("routers")
        oldest_ns = self._bus.clock.now_ns() - int((LEASE_S + POLL_S) * 1e9)
        async for entry in read(self._bus, f"KV_{bucket}", f"$KV.{bucket}.>"):
            if entry.data and "KV-Operation" not in entry.headers and entry.time_ns >= oldest_ns:
                with contextlib.suppress(msgspec.MsgspecError):
                    member = decode(entry.data)
                    models.update(dict(member.queued.models))
                    for held in member.held:
                        tenants.update(dict(held.tenants))
        return models, tenants

    @property
    def has_room(self) -> bool:
        """Whether a request of some class would be taken."""
        try:
            self._log_capacity.check()
        except ServingError:
            return False
        return not (self._queues.near and self._queues.full)

    def has_room_for(self, request: GenerateRequest) -> bool:
        """Whether this request would be taken."""
        try:
            self._log_capacity.check(request.tenant)
            if self._queues.near:
                self._queues.check(request.priority, request.model)
        except ServingError:
            return False
        return True

    @property
    def packs(self) -> bool:
        """Whether the stream of requests takes packed prompts; as of the last poll."""
        return self._log_capacity.packs

    @property
    def class_matters(self) -> bool:
        """Whether some class may be full, so that a body's class decides."""
        return self._queues.near

    def check_log(self, tenant: str | None = None) -> None:
        """
        Args:
            tenant: None: not known yet.
        Raises:
            ServingError: queue_full: the log is nearly full, or the tenant has more than its share of it.
        """
        self._log_capacity.check(tenant)

    def check_class(self, body: bytes) -> None:
        """
        Args:
            body: not validated; it names its class and its model.
        Raises:
            ServingError: queue_full: too many requests of its class wait.
        """
        self._queues.check(class_of(body), self._name_in(body))

    def room(self, priority: Priority) -> int:
        """How many more requests of a class would be taken."""
        return self._queues.room(priority)

    def accept(self, inflight: InflightRequest) -> None:
        """Count a request that is about to be published: since its body was checked, others have been.

        Raises:
            ServingError: queue_full.
        """
        request = inflight.request
        if self._queues.near:
            self._queues.check(request.priority, request.model)
        self._queues.accepted(inflight)
        if self.follows_tenants:
            self.tenants.accepted(request.tenant)

    def _unstarted_by_tenant(self) -> Counter[str]:
        return Counter(each.request.tenant for each in self._readers() if each.fold.attempt < 0 and not each.ended)


QUIET_S = 2.5  # without a new item of a request, before it is asked whether items can be stored
EVERY_S = 1.0  # between two entries
FAILING_S = 11.0  # an entry is not confirmed: longer than an election in a cluster (4 to 9 s)
CONFIRM_S = 2.0  # then it is sent again
AGAIN_S = 0.5  # after a refusal


class StoreCheck:
    """Call ``look`` several times a second.

    Args:
        gateway: its id.
    """

    def __init__(self, bus: Bus, gateway: str, tasks: Tasks) -> None:
        self._bus = bus
        self._gateway = gateway
        self._tasks = tasks
        self._writing: asyncio.Task[None] | None = None  # ends with the confirmation
        self._began = 0.0  # monotonic
        self._confirmed = 0.0
        self._position = -1
        self.failing = False

    def look(self, now: float, *, quiet: bool, position: int) -> None:
        """
        Args:
            now: monotonic.
            quiet: some open request has had no item for ``QUIET_S``.
            position: of this gateway's tokens in the log: when it grows, they are stored.
        """
        moved, self._position = position != self._position, position
        writing = self._writing
        if moved or not self._bus.connected or (writing is not None and writing.done()):
            if writing is not None:  # while the broker is away nothing is known, and everyone waits for it
                writing.cancel()
            self._writing, self._confirmed, self.failing = None, now, False
        elif writing is not None:
            self.failing = now - self._began >= FAILING_S
        elif quiet and now - self._confirmed >= EVERY_S:
            self._began = now
            self._writing = self._tasks.spawn(self._write(), name="store-check")

    def check(self) -> None:
        """
        Raises:
            ServingError: broker_unavailable: nothing is stored.
        """
        if self.failing:
            raise ServingError(
                Code.broker_unavailable, f"{_WHY}; the request was not accepted, try again later", retry_after=5.0
            )

    async def _write(self) -> None:
        """Return when the entry is stored, or refused for another reason."""
        while True:
            try:
                if await stores(self._bus, self._gateway, CONFIRM_S):
                    return
            except (NatsError, TimeoutError, OSError, msgspec.MsgspecError):
                pass
            await asyncio.sleep(AGAIN_S)


_WHY = "the broker stores nothing at the moment (is its disk full?)"


def unstored(request_id: str) -> ServingError:
    """The end of the wait for an accepted request's answer; whether it has ended is not known yet."""
    return ServingError(
        Code.broker_unavailable,
        f"{_WHY}, so no more of this answer comes; request {request_id} was accepted and may have an end: ask for it "
        f"later (GET /v1/requests/{request_id}, or ps.read)",
        retry_after=5.0,
    )
