"""Requests that wait while the log fills behind them are published anew, before they reach its edge.

Else one that waits for an absent worker would stop the door (gateways take nothing new when REQUESTS is full behind the
oldest waiting request), or be discarded. The copy is stored before the old message is acknowledged. In between there
are two of one request, as after a lost acknowledgement: its job is stored once, and each message is acknowledged.
"""

from collections.abc import Iterable

import structlog
from nats.errors import Error as NatsError

from infra.bus.connection import Bus
from infra.bus.direct_get import get
from infra.bus.publisher import Publisher
from infra.bus.stream_fill import WARN
from infra.bus.stream_watch import StreamWatch
from schemas.subjects import KEPT

log = structlog.get_logger("router")

AT_ONCE = 64  # copies per look
MOST = WARN / 2  # of the stream: if more than that waits, copies would only push each other to the edge


def sequence(reply: str) -> int:
    """Of a message, from its acknowledgement subject (which has a domain and an account in front, or not)."""
    tokens = reply.split(".")
    return int(tokens[5 if len(tokens) < 11 else 7])


class Stragglers:
    """``look`` once a second."""

    def __init__(self, bus: Bus, publisher: Publisher) -> None:
        self._bus = bus
        self._publisher = publisher
        self._watch = StreamWatch(bus, bus.subjects.stream("REQUESTS"))

    async def look(self, waiting: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """
        Args:
            waiting: requests without a worker, each with its acknowledgement subject.
        Returns:
            Those of them that were published anew, to be acknowledged.
        Raises:
            ServingError: one could not be read or stored; the next look tries again.
        """
        watch = self._watch
        try:
            await watch.look()
        except (NatsError, TimeoutError) as error:
            log.debug("room_unknown", error=repr(error))
            return []
        found = sorted((sequence(reply), request, reply) for request, reply in waiting)
        if not found or watch.share_of(len(found)) > MOST:
            return []
        old = [one for one in found if watch.share_from(one[0]) >= WARN][:AT_ONCE]
        moved = []
        for seq, request, reply in old:
            entry = await get(self._bus, watch.stream, seq)
            if entry is None:
                continue  # too late: it lives on in the router's memory only
            await self._publisher.publish(entry.subject, entry.data, f"{request}:{KEPT}:{seq}", timeout=5.0)
            moved.append((request, reply))
        if moved:
            log.info("requests_kept", copies=len(moved), stream=watch.stream)
        return moved
