"""Keeps unplaced requests in REQUESTS: the oldest are published again before the stream would discard them.

Otherwise a request that waits for an absent worker would be discarded, or would block the others: gateways accept no
new requests while REQUESTS is full behind the oldest unplaced one. The copy is stored before the old message is
acknowledged. In between the request is stored twice, as after a lost acknowledgement: its job is stored once, and each
message is acknowledged.
"""

from collections.abc import Iterable

import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get
from penstock.infra.bus.publisher import Publisher
from penstock.infra.bus.puller import sequence
from penstock.infra.bus.stream_fill import WARN
from penstock.infra.bus.stream_watch import StreamWatch
from penstock.schemas.subjects import KEPT

log = structlog.get_logger("router")

COPIES_AT_ONCE = 64
MAX_SHARE = WARN / 2  # of the stream; if unplaced requests fill more, copies would only push each other out


class RequestRetention:
    """``check`` it once a second."""

    def __init__(self, bus: Bus, publisher: Publisher) -> None:
        self._bus = bus
        self._publisher = publisher
        self._watch = StreamWatch(bus, bus.subjects.stream("REQUESTS"))

    async def check(self, unplaced: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """
        Args:
            unplaced: requests without a worker, each with its acknowledgement subject.
        Returns: those that were published again and must be acknowledged.
        Raises:
            ServingError: a request could not be read or stored; the next check tries again.
        """
        watch = self._watch
        try:
            await watch.look()
        except (NatsError, TimeoutError) as error:
            log.debug("stream_info_failed", error=repr(error))
            return []
        expiring = sorted((sequence(reply), request, reply) for request, reply in unplaced)
        if not expiring or watch.share_of(len(expiring)) > MAX_SHARE:
            return []
        old = [one for one in expiring if watch.share_from(one[0]) >= WARN][:COPIES_AT_ONCE]
        copied = []
        for seq, request, reply in old:
            entry = await get(self._bus, watch.stream, seq)
            if entry is None:
                continue  # discarded already: only this router still holds it
            await self._publisher.publish(entry.subject, entry.data, f"{request}:{KEPT}:{seq}", timeout=5.0)
            copied.append((request, reply))
        if copied:
            log.info("requests_republished", copies=len(copied), stream=watch.stream)
        return copied
