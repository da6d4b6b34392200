"""Whether new work is taken: polls how much waits, whether routers take requests, and how full the log is."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import msgspec
import structlog
from nats.js.errors import NotFoundError

from penstock.gateway.admission.log_capacity import LogCapacity
from penstock.gateway.admission.queues import QueueLimits, by_model, class_of
from penstock.gateway.base.metrics import Metrics
from penstock.gateway.log.inflight import InflightRequest
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import Priority
from penstock.schemas.routers import LEASE_S, decode

log = structlog.get_logger("gateway")

POLL_S = 0.5
HURRY_S = 0.1  # while work waits for the places that a poll shows
INFO_TIMEOUT_S = 2.0


class QueueMonitor:
    """
    Args:
        limit: waiting requests of each class.
        readers: this gateway's own open requests.
        name_in: canonical name of a body's model; "": it names none that is served.

    Attributes:
        has_routers: some router takes requests; as of the last poll.
        lacks_consumer: of this stream routers' consumers are missing; "": none is.
        hurried: poll more often, since work waits for the next place.
        sharded: routers read shards of REQUESTS; not so until ``penstock streams apply`` of this release.
    """

    def __init__(
        self,
        bus: Bus,
        metrics: Metrics,
        limit: int,
        readers: Callable[[], Iterable[InflightRequest]],
        name_in: Callable[[bytes], str],
    ) -> None:
        self.has_routers = False
        self.lacks_consumer = ""
        self.hurried = False
        self._bus = bus
        self._metrics = metrics
        self._readers = readers
        self._name_in = name_in
        self._log_capacity = LogCapacity(bus, metrics)
        self._queues = QueueLimits(limit, self._unstarted)
        self._delivered: dict[str, int] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(HURRY_S if self.hurried else POLL_S)
            try:
                await self.poll()
            except Exception as error:
                self.has_routers = False
                log.debug("queue_unknown", error=repr(error))

    async def poll(self) -> None:
        """How many requests no router has placed yet, and whether any router asks for more.

        Raises:
            nats.errors.Error, TimeoutError: the broker did not answer.
        """
        subjects = self._bus.subjects
        # Requests accepted from now on may count twice.
        before, queued = Counter({each: self._queues.since(each) for each in Priority}), dict.fromkeys(Priority, 0)
        names = [f"router-{priority.value}" for priority in Priority]
        stream, ask = subjects.stream("REQUESTS"), self._bus.js.consumer_info
        try:
            consumers = await asyncio.gather(*(ask(stream, name, timeout=INFO_TIMEOUT_S) for name in names))
        except NotFoundError:
            self.lacks_consumer, self.has_routers = stream, False
            raise
        self.lacks_consumer = ""
        has_routers = False
        for priority, name, info in zip(Priority, names, consumers, strict=True):
            pending, unacknowledged = info.num_pending or 0, info.num_ack_pending or 0
            self._metrics.consumers.observe(name, pending, unacknowledged, info.num_redelivered or 0)
            queued[priority] = pending + unacknowledged
            delivered = info.delivered.consumer_seq if info.delivered else 0
            # A router that is full has no pull request waiting at the moment, but makes progress.
            has_routers |= bool(info.num_waiting) or delivered > self._delivered.get(name, delivered)
            self._delivered[name] = delivered
        self._queues.polled(queued, before)
        self.has_routers = has_routers
        await self._count_models()
        unended = ((r.request.tenant, len(r.request.prompt)) for r in self._readers() if not r.ended)
        await self._log_capacity.refresh(consumers, unended)

    async def _count_models(self) -> None:
        metrics, total = self._metrics, self._queues.total
        if len(metrics.models) < 2:
            metrics.of("").queued.set(total)
            self._queues.polled_models({})
            return
        held: Mapping[str, int] = {}
        if total:
            with contextlib.suppress(ServingError):  # by this gateway's own requests, then
                held = await self._held_by_routers()
        own = Counter(each.request.model for each in self._readers() if each.fold.attempt < 0) if total else {}
        counts = by_model(total, held, own)
        self._queues.polled_models({model: counts.get(model, 0) for model in metrics.models})
        for model in {*metrics.models, *counts}:
            metrics.of(model).queued.set(counts.get(model, 0))

    async def _held_by_routers(self) -> Counter[str]:
        held = Counter[str]()
        bucket = self._bus.subjects.bucket("routers")
        oldest_ns = self._bus.clock.now_ns() - int((LEASE_S + POLL_S) * 1e9)
        async for entry in read(self._bus, f"KV_{bucket}", f"$KV.{bucket}.>"):
            if entry.data and "KV-Operation" not in entry.headers and entry.time_ns >= oldest_ns:
                with contextlib.suppress(msgspec.MsgspecError):
                    held.update(dict(decode(entry.data).queued.models))
        return held

    @property
    def has_room(self) -> bool:
        """Whether a request of some class would be taken."""
        try:
            self._log_capacity.check()
        except ServingError:
            return False
        return not (self._queues.near and self._queues.full)

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

    def accept(self, priority: Priority, model: str) -> None:
        """Count a request that is about to be published: since its body was checked, others have been.

        Raises:
            ServingError: queue_full.
        """
        if self._queues.near:
            self._queues.check(priority, model)
        self._queues.accepted(priority, model)

    def _unstarted(self, priority: Priority) -> int:
        """Open requests of a class that no worker has started."""
        return sum(each.fold.attempt < 0 and each.request.priority is priority for each in self._readers())
