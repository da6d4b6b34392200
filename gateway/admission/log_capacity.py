"""Whether the log has room for new work: requests that wait must not be discarded by those that come after them.

REQUESTS discards its oldest messages when it is full. From ``FULL`` of it behind its oldest unplaced request on, new
requests are refused; from ``FAIR`` on, those of tenants that use more than their share.
"""

from collections.abc import Iterable
from typing import Any

import structlog
from nats.errors import Error as NatsError

from penstock.gateway.base.metrics import Metrics
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_next
from penstock.infra.bus.stream_fill import FAIR, FULL, WARN, beyond_share
from penstock.infra.bus.stream_watch import StreamWatch
from penstock.schemas.errors import Code, ServingError

log = structlog.get_logger("gateway")

MESSAGE_BYTES = 1_000  # of a request beside its prompt, about


class LogCapacity:
    """Call ``refresh`` periodically; ``check`` uses the figures of the last call."""

    def __init__(self, bus: Bus, metrics: Metrics) -> None:
        self._bus = bus
        self._metrics = metrics
        self._requests = StreamWatch(bus, bus.subjects.stream("REQUESTS"))
        self._firsts: dict[str, tuple[int, int]] = {}  # consumer -> its floor, and the first message behind it
        self._over_share: frozenset[str] = frozenset()

    def check(self, tenant: str | None = None) -> None:
        """
        Args:
            tenant: None: not known yet.
        Raises:
            ServingError: queue_full.
        """
        watch = self._requests
        if watch.full or (tenant is not None and tenant in self._over_share):
            raise ServingError(Code.queue_full, self._refusal(None if watch.full else tenant), retry_after=5.0)

    def _refusal(self, tenant: str | None) -> str:
        watch = self._requests
        size = f"{watch.level:.0%} of its {watch.max_bytes >> 20} MiB"
        if tenant is not None:
            return (
                f"stream {watch.stream} holds {size} of waiting requests, and tenant {tenant!r} has more than its "
                "share of them; try again later"
            )
        return (
            f"stream {watch.stream} holds {size} of waiting requests, and the limit is {FULL:.0%}; try again later, "
            f"add workers, or {watch.enlarge}"
        )

    async def refresh(self, consumers: Iterable[Any], unended: Iterable[tuple[str, int]]) -> None:
        """
        Args:
            consumers: the routers' consumers of REQUESTS, as the server described them just now.
            unended: this gateway's open requests: tenant and bytes of the prompt. Read only when room is scarce.
        """
        watch = self._requests
        try:
            await watch.look()
            level = 0.0
            for consumer in consumers:
                level = max(level, await self._share(consumer))
        except (NatsError, TimeoutError, ServingError) as error:
            log.debug("log_capacity_unknown", error=repr(error))
            return
        watch.update(level)
        self._metrics.unfinished.labels(watch.stream).set(level)
        if level < FAIR:
            self._over_share = frozenset()
            return
        used: dict[str, int] = {}
        for tenant, size in unended:
            used[tenant] = used.get(tenant, 0) + size + MESSAGE_BYTES
        self._over_share = beyond_share(used, round(FAIR * watch.max_bytes))

    async def _share(self, consumer: Any) -> float:
        """Of REQUESTS, from a consumer's oldest unplaced request on."""
        if not (consumer.num_pending or consumer.num_ack_pending):
            return 0.0
        watch, floor = self._requests, consumer.ack_floor.stream_seq if consumer.ack_floor else 0
        share = watch.share_from(floor + 1)
        if share < WARN:
            return share
        # Most of these may be of other classes: find the first one of its own class.
        floor_seq, first = self._firsts.get(consumer.name, (-1, 0))
        if floor_seq != floor:
            config = consumer.config
            subjects = config.filter_subjects or [config.filter_subject]
            oldest = [await get_next(self._bus, watch.stream, subject, floor) for subject in subjects]
            first = min((entry.seq for entry in oldest if entry is not None), default=watch.last + 1)
            self._firsts[consumer.name] = (floor, first)
        return watch.share_from(first)
