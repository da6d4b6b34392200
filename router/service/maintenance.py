"""A router's periodic work: deadlines, claims on held requests, retention in the streams, snapshots.

What is unfinished must stay in its stream, so the oldest messages are published again before the stream would discard
them. Of the jobs of active requests in WORK: a router that takes over a request reads its job there. Copies have
subjects that no worker reads; every router notes where the newest copy of a job is. When active jobs alone fill the
stream, routers read no more requests.

Of unplaced requests in REQUESTS: otherwise a request that waits for an absent worker would be discarded, or would block
the others: gateways accept no new requests while REQUESTS is full after the oldest unplaced one. The copy is stored
before the old message is acknowledged. In between the request is stored twice, as after a lost acknowledgement: its job
is stored once, and each message is acknowledged.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

import structlog
from nats.errors import Error as NatsError

from penstock.configs.settings import RouterSettings
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get
from penstock.infra.bus.publisher import Publisher
from penstock.infra.bus.puller import ACK, IN_PROGRESS, sequence
from penstock.infra.bus.stream_fill import WARN, StreamWatch
from penstock.infra.bus.tasks import Tasks
from penstock.infra.process.turns import TimeSlice
from penstock.router.held.held_requests import HeldRequests
from penstock.router.ownership.intake import BackgroundTasks
from penstock.router.placement.pending import PendingRequest
from penstock.router.recovery.terminal_events import TerminalPublisher
from penstock.router.state.cluster_state import ClusterState
from penstock.router.state.router_metrics import Metrics
from penstock.schemas import requests
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import NO_TOKENS
from penstock.schemas.jobs import headers_of
from penstock.schemas.subjects import (
    HEADER_CONTENT_TYPE,
    HEADER_LOAD,
    HEADER_MSG_ID,
    HEADER_NO_STORE,
    HEADER_PART,
    HEADER_SUSPECT,
    KEPT,
)

log = structlog.get_logger("router")

REVISIONS_S = 0.5  # between two looks for held requests whose revision has gone, or that may fall back
SWEEP_S = 0.1
RETENTION_S = 1.0
SNAPSHOT_S = 10.0
PACE_S = 5.0


class Maintenance:
    """
    Args:
        place: ends a request whose deadline has passed, unless another router has placed it.
        place_held: places held requests, soon.
        fall_back: runs a held request as a fallback if it has waited for long enough, by the time; False: it has not.
    """

    def __init__(
        self,
        bus: Bus,
        publisher: Publisher,
        settings: RouterSettings,
        *,
        cluster: ClusterState,
        held: HeldRequests,
        terminal: TerminalPublisher,
        background: BackgroundTasks,
        metrics: Metrics,
        place: Callable[[PendingRequest], Awaitable[bool]],
        place_held: Callable[[], None],
        fall_back: Callable[[PendingRequest, int], Awaitable[bool]],
    ) -> None:
        self._bus = bus
        self._revision_wait_s = settings.revision_wait_s
        self._cluster = cluster
        self._held = held
        self._terminal = terminal
        self._background = background
        self._metrics = metrics
        self._place = place
        self._place_held = place_held
        self._fall_back = fall_back
        self._looked = 0.0  # monotonic time of the last look for held requests whose revision has gone
        self._jobs = JobRetention(bus, publisher)
        self._requests = RequestRetention(bus, publisher)
        self._time_slice = TimeSlice()

    def start(self, tasks: Tasks) -> None:
        tasks.spawn(self._sweep_forever(), name="sweep")
        tasks.spawn(self._retain_forever(), name="retention")
        tasks.spawn(self._save_forever(), name="snapshots")
        tasks.spawn(self._compare_forever(), name="paces")

    @property
    def work_is_full(self) -> bool:
        """Unfinished jobs fill WORK: no new requests may be read."""
        return self._jobs.full

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self.sweep(self._bus.clock.now_ns(), time.monotonic())

    async def sweep(self, now_ns: int, now: float) -> None:
        await self._cluster.maintain(now_ns)
        for pending in self._held.expired(now_ns):
            await self._place(pending)
        if self._bus.connected:
            for reply in self._held.claims(now_ns):
                await self._claim(reply)
                await self._time_slice.yield_if_spent()
        if now - self._looked >= REVISIONS_S:
            self._looked = now
            await self._move_or_end(now_ns, now)
        self._metrics.waiting.set(len(self._held))
        caches = self._cluster.caches
        if caches.index is not None:
            self._metrics.blocks.set(caches.index.blocks)
            self._metrics.index_sequence.set(caches.check.kv_seq)
            self._metrics.index_checksum.set(caches.check.checksum)
        self._metrics.workers.set(self._cluster.tracker.size)
        self._metrics.lost_leases(self._cluster.losses.recent(now_ns))
        self._place_held()

    async def _move_or_end(self, now_ns: int, now: float) -> None:
        """Held requests that need not, or cannot, wait for a worker of their model."""
        for pending in self._held:
            if pending.request.fallbacks and await self._fall_back(pending, now_ns):
                continue
            if self._revision_is_gone(pending, now) and self._held.remove(pending.request.id) is not None:
                self._end_without_revision(pending)
            await self._time_slice.yield_if_spent()

    def _revision_is_gone(self, pending: PendingRequest, now: float) -> bool:
        """Whether a request has waited long enough for a worker of its adapter; or, if it is streaming, of its
        revision."""
        request, pinned = pending.request, pending.pinned_revision
        if request.lora and self._lacks_adapter(pending):
            pending.missing_since = pending.missing_since or now
            return now - pending.missing_since >= self._revision_wait_s
        if pending.streaming and pinned:
            known = self._cluster.tracker.revisions(request.model, request.tokenizer)
            if pinned not in known.present and pinned not in known.continued:
                pending.missing_since = pending.missing_since or now
                return now - pending.missing_since >= self._revision_wait_s
        pending.missing_since = 0.0
        return False

    def _lacks_adapter(self, pending: PendingRequest) -> bool:
        """Whether the model has workers, and none has the adapter."""
        serving = self._cluster.tracker.serving(pending.request.model)
        computing = [each for each in serving if each.role not in NO_TOKENS]
        return bool(computing) and not any(
            adapter.id == pending.request.lora for each in computing for adapter in each.adapters
        )

    def _end_without_revision(self, pending: PendingRequest) -> None:
        if pending.request.lora and self._lacks_adapter(pending):
            self._terminal.end(
                pending,
                Code.revision_unavailable,
                f"no worker of {pending.request.model!r} has had LoRA adapter {pending.request.lora} for "
                f"{self._revision_wait_s:g} s (--revision-wait-s): it was replaced or unloaded after the request was "
                "accepted; send the request again",
            )
            return
        self._terminal.end(
            pending,
            Code.revision_unavailable,
            f"the first {pending.resumed_tokens} tokens came from revision {pending.pinned_revision} of "
            f"{pending.request.model!r}, whose last worker left; no worker of that revision came back within "
            f"{self._revision_wait_s:g} s (--revision-wait-s), and another revision cannot continue the answer: send "
            "the request again",
        )

    async def _claim(self, reply: str) -> None:
        """Keep the broker from delivering a held request to another router."""
        try:
            await self._bus.nc.publish(reply, IN_PROGRESS)
        except (NatsError, OSError) as error:  # the connection has just failed
            log.debug("claim_failed", error=repr(error))

    async def _retain_forever(self) -> None:
        while True:
            await asyncio.sleep(RETENTION_S)
            try:
                tracker = self._cluster.tracker
                await self._jobs.check([*tracker.active(), *tracker.waiting()])
            except ServingError as error:
                log.warning("job_retention_failed", error=error.message)
            try:
                await self._retain_requests()
            except ServingError as error:
                log.warning("request_retention_failed", error=error.message)

    async def _retain_requests(self) -> None:
        unacknowledged = self._held.unacknowledged(reading=not self.work_is_full)
        for request_id, reply in await self._requests.check(unacknowledged):
            self._held.release(request_id, reply)
            self._background.acknowledge(reply, ACK)

    async def _save_forever(self) -> None:
        while True:
            await asyncio.sleep(SNAPSHOT_S)
            await self._cluster.save()

    async def _compare_forever(self) -> None:
        while True:
            self._metrics.paces(self._cluster.registrations())
            await asyncio.sleep(PACE_S)


COPIES_AT_ONCE = 64
MAX_SHARE = WARN / 2  # of the stream; if jobs fill more, copies would only push each other out


async def _seen(watch: StreamWatch) -> bool:
    """Whether the state of its stream could be read; if not, the next check tries again."""
    try:
        await watch.look()
    except (NatsError, TimeoutError) as error:
        log.debug("stream_info_failed", error=repr(error))
        return False
    return True


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
        if not await _seen(watch):
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
                entry.headers.get(HEADER_CONTENT_TYPE, ""),
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
        if not await _seen(watch) or watch.share_from(0) < WARN:
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
            name = f"{request}:{KEPT}:{seq}"
            headers = requests.headers_of(entry.data)
            await self._publisher.publish(entry.subject, entry.data, name, headers=headers, timeout=5.0)
            copied.append((request, reply))
        if copied:
            log.info("requests_republished", copies=len(copied), stream=watch.stream)
        return copied
