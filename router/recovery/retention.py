"""Keeps the jobs of active requests in WORK: the oldest are published again before the stream would discard them.

A router that takes over a request reads its job there. Copies have subjects that no worker reads; every router notes
where the newest copy of a job is. When active jobs alone fill the stream, routers read no more requests.

Keeps unplaced requests in REQUESTS: the oldest are published again before the stream would discard them.

Otherwise a request that waits for an absent worker would be discarded, or would block the others: gateways accept no
new requests while REQUESTS is full behind the oldest unplaced one. The copy is stored before the old message is
acknowledged. In between the request is stored twice, as after a lost acknowledgement: its job is stored once, and each
message is acknowledged.
"""

from collections.abc import Iterable
from typing import Protocol

import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get
from penstock.infra.bus.publisher import Publisher
from penstock.infra.bus.puller import sequence
from penstock.infra.bus.stream_fill import WARN, StreamWatch
from penstock.schemas.jobs import headers_of
from penstock.schemas.subjects import HEADER_LOAD, HEADER_MSG_ID, HEADER_NO_STORE, HEADER_PART, HEADER_SUSPECT, KEPT

log = structlog.get_logger("router")

COPIES_AT_ONCE = 64
MAX_SHARE = WARN / 2  # of the stream; if jobs fill more, copies would only push each other out


class RetainedJob(Protocol):
    @property
    def request(self) -> str: ...
    @property
    def seq(self) -> int: ...


class JobRetention:
    """``check`` it once a second. ``full``: active jobs fill the stream."""

    def __init__(self, bus: Bus, publisher: Publisher) -> None:
        self._bus = bus
        self._publisher = publisher
        self._watch = StreamWatch(bus, bus.subjects.stream("WORK"))
        self._copied: dict[int, float] = {}  # sequence -> fill level when it was copied; the copy is read a bit later

    @property
    def full(self) -> bool:
        return self._watch.full

    async def check(self, active: Iterable[RetainedJob]) -> None:
        """
        Raises:
            ServingError: a job could not be read or stored; the next check tries again.
        """
        watch = self._watch
        try:
            await watch.look()
        except (NatsError, TimeoutError) as error:
            log.debug("stream_info_failed", error=repr(error))
            return
        seqs = sorted(entry.seq for entry in active if entry.seq)
        watch.update(watch.share_from(seqs[0]) if seqs else 0.0)
        if watch.level < WARN:
            self._copied.clear()
            return
        if watch.share_of(len(seqs)) > MAX_SHARE:
            return
        old = [seq for seq in seqs if watch.share_from(seq) >= WARN and seq not in self._copied][:COPIES_AT_ONCE]
        for seq in old:
            entry = await get(self._bus, watch.stream, seq)
            if entry is not None:
                await self._copy(entry)
            self._copied[seq] = watch.level
        if old:
            log.info("jobs_republished", copies=len(old), stream=watch.stream)

    async def _copy(self, entry: Entry) -> None:
        role, worker = entry.subject.split(".")[-2:]
        name = entry.headers.get(HEADER_MSG_ID, "").partition(f":{KEPT}:")[0]
        await self._publisher.publish(
            self._bus.subjects.kept(role, worker),
            entry.data,
            f"{name}:{KEPT}:{entry.seq}",
            headers=headers_of(
                entry.headers.get(HEADER_LOAD, ""),
                no_store=HEADER_NO_STORE in entry.headers,
                suspect=entry.headers.get(HEADER_SUSPECT, ""),
                part=entry.headers.get(HEADER_PART, ""),
            ),
            timeout=10.0,
        )


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
