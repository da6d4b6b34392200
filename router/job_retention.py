"""Jobs that still run are kept in WORK: the oldest are published anew before the stream's edge comes near them.

A router that takes over a request reads its job there. Copies go to subjects that no worker reads; whoever follows the
log notes where a request's newest copy is. When unfinished jobs alone fill the stream, routers take no more requests.
"""

from collections.abc import Iterable
from typing import Protocol

import structlog
from nats.errors import Error as NatsError

from infra.bus.connection import Bus
from infra.bus.direct_get import Entry, get
from infra.bus.publisher import Publisher
from infra.bus.stream_fill import WARN
from infra.bus.stream_watch import StreamWatch
from schemas.subjects import HEADER_LOAD, HEADER_MSG_ID, KEPT

log = structlog.get_logger("router")

AT_ONCE = 64  # copies per look
MOST = WARN / 2  # of the stream: more than that is not copied, for copies push others to the edge


class Unfinished(Protocol):
    @property
    def request(self) -> str: ...
    @property
    def seq(self) -> int: ...


class Keeping:
    """``look`` once a second; ``full`` tells whether new work has to wait."""

    def __init__(self, bus: Bus, publisher: Publisher) -> None:
        self._bus = bus
        self._publisher = publisher
        self._watch = StreamWatch(bus, bus.subjects.stream("WORK"))
        self._tried: dict[int, float] = {}  # sequence -> share at which it was copied; its echo may take a moment

    @property
    def full(self) -> bool:
        return self._watch.full

    async def look(self, unfinished: Iterable[Unfinished]) -> None:
        """
        Raises:
            ServingError: a job could not be read or stored; the next look tries again.
        """
        watch = self._watch
        try:
            await watch.look()
        except (NatsError, TimeoutError) as error:
            log.debug("room_unknown", error=repr(error))
            return
        seqs = sorted(entry.seq for entry in unfinished if entry.seq)
        watch.update(watch.share_from(seqs[0]) if seqs else 0.0)
        if watch.level < WARN:
            self._tried.clear()
            return
        if watch.share_of(len(seqs)) > MOST:
            return  # they fill the stream themselves
        old = [seq for seq in seqs if watch.share_from(seq) >= WARN and seq not in self._tried]
        for seq in old[:AT_ONCE]:
            entry = await get(self._bus, watch.stream, seq)
            if entry is not None:
                await self._copy(entry)
            self._tried[seq] = watch.level
        if old:
            log.info("jobs_kept", copies=len(old[:AT_ONCE]), stream=watch.stream)

    async def _copy(self, entry: Entry) -> None:
        role, worker = entry.subject.split(".")[-2:]
        name = entry.headers.get(HEADER_MSG_ID, "").partition(f":{KEPT}:")[0]
        await self._publisher.publish(
            self._bus.subjects.kept(role, worker),
            entry.data,
            f"{name}:{KEPT}:{entry.seq}",
            headers={HEADER_LOAD: entry.headers.get(HEADER_LOAD, "")},
            timeout=10.0,
        )


def stages(parts: list[str]) -> tuple[list[str], bool]:
    """What a message id says behind request and attempt, and whether the message is a copy."""
    if KEPT in parts:
        return parts[: parts.index(KEPT)], True
    return parts, False
