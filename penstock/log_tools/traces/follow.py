"""From the streams to an exporter: reads requests that have ended, makes spans, sends them, stores its position.

The log is the queue. While the collector is away nothing is read ahead, so memory is bounded and no request waits; a
batch that could not be sent for ``export_timeout_s`` is dropped and counted. The position in the log is kept in a
bucket. Spans that are sent twice, after a restart, have the same ids.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import msgspec
import structlog
from blake3 import blake3
from nats.errors import Error as NatsError
from nats.js.errors import Error as JetStreamError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get_last, is_replaced, lifetime, read
from penstock.log_tools.timeline.request_timeline import RequestTimeline
from penstock.log_tools.traces.export import Sink
from penstock.log_tools.traces.spans import Span, spans
from penstock.schemas import done, jobs, requests, wire
from penstock.schemas.done import Done, Returned
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.jobs import Job
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.streams import CLOCK_SKEW_NS, LONGEST_DEADLINE_S
from penstock.schemas.subjects import HEADER_MSG_ID, KEPT, token
from penstock.schemas.trace import trace_id, wanted
from penstock.schemas.transfer import decode_ledger

log = structlog.get_logger("trace")

KEPT_S = 5.0  # to load or save the position
BEFORE_NS = 600_000_000_000  # how long before its end a request may have begun; the stages of older ones are unknown

_FAILED = (NatsError, JetStreamError, TimeoutError)


class TracePosition(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where an export stopped: it has sent all ends up to ``done_seq``; unfinished requests begin at ``since_ns``."""

    done_seq: int
    since_ns: int


async def begin(bus: Bus, kept: TracePosition | None) -> TracePosition:
    """Where to begin: where an earlier export stopped, or at the present end.

    Raises:
        ServingError: there is no such stream.
    """
    last = await last_seq(bus)
    if kept is not None and kept.done_seq <= last:
        return kept
    return TracePosition(last, time.time_ns() - BEFORE_NS)


async def last_seq(bus: Bus) -> int:
    """The sequence of the newest terminal event.

    Raises:
        ServingError: there is no such stream.
    """
    stream = bus.subjects.stream("DONE")
    try:
        return int((await bus.js.stream_info(stream)).state.last_seq)
    except _FAILED as error:
        raise ServingError(
            Code.broker_unavailable, f"stream {stream} does not answer ({error!r}); run 'penstock streams apply'"
        ) from error


class PositionStore:
    """The position of the exporter of one name, in a bucket. Losing it loses traces of the time in between."""

    def __init__(self, bus: Bus, name: str) -> None:
        self._bus = bus
        self._stream = f"KV_{bus.subjects.bucket('exporters')}"
        key = token(f"trace-{name or 'trace'}")
        self._subject = f"$KV.{bus.subjects.bucket('exporters')}.{key}"

    async def load(self) -> TracePosition | None:
        try:
            entry = await get_last(self._bus, self._stream, self._subject, newest=True, within_s=KEPT_S)
            return _decode(entry.data) if entry is not None else None
        except (ServingError, msgspec.MsgspecError) as error:
            log.info("no_position", reason=repr(error)[:200])
            return None

    async def save(self, position: TracePosition) -> None:
        try:
            await self._bus.js.publish(self._subject, wire.encode(position), timeout=KEPT_S, stream=self._stream)
        except _FAILED as error:
            log.warning("position_not_saved", error=repr(error)[:200])


_decode = wire.decoder(TracePosition)


POLL_S = 0.5
ENDS = 1_000  # terminal events taken at once
BATCH_SPANS = 512
MAX_OPEN = 50_000  # unfinished requests kept; about 3 kB each
SAVE_S = 5.0
LOST_NS = int((LONGEST_DEADLINE_S + 600) * 1e9)  # an older unfinished request will not end any more
RETRY_S, RETRY_MOST_S = 0.5, 15.0
WARN_S = 30.0
CHECK_S = 5.0  # between two looks whether a stream is still the same


class TraceCounts(msgspec.Struct):
    """Counts of requests since the start."""

    sent: int = 0
    unsampled: int = 0
    dropped: int = 0  # the collector did not accept them
    forgotten: int = 0  # more were unfinished than are kept, or the log no longer had them


class StreamReader:
    """Reads one stream; each call continues where the last one stopped."""

    def __init__(self, bus: Bus, stream: str, subject: str, *, after: int = 0, since_ns: int = 0) -> None:
        self._bus = bus
        self._stream = bus.subjects.stream(stream)
        self._subject = subject
        self.after = after
        self._since_ns = since_ns
        self._created_ns = 0  # as of the last look; 0: not known
        self._newest: Entry | None = None  # the newest entry read
        self._looked = -CHECK_S

    async def _look(self) -> None:
        """Start over if the stream lost its end or was recreated, since the position would skip messages."""
        now = time.monotonic()
        if now - self._looked < CHECK_S:
            return
        stream = await lifetime(self._bus, self._stream)
        recreated = self._created_ns not in (0, stream.created_ns)
        cut = recreated or stream.end < self.after
        if cut or (self._newest is not None and await is_replaced(self._bus, self._stream, self._newest)):
            log.error("stream_truncated", stream=self._stream, position=self.after, end=stream.end, recreated=recreated)
            self.after, self._newest = 0, None
        self._looked, self._created_ns = now, stream.created_ns

    async def entries(self, until_ns: int = 0) -> AsyncIterator[Entry]:
        """Entries up to the present end, or to the first one that was stored after ``until_ns``.

        Raises:
            ServingError: the stream cannot be read.
        """
        await self._look()
        async for entry in read(
            self._bus, self._stream, self._subject, after=self.after, since_ns=0 if self.after else self._since_ns
        ):
            if until_ns and entry.time_ns > until_ns:
                return
            self.after, self._newest = entry.seq, entry
            yield entry


class Open(NamedTuple):
    """A request that has begun. ``timeline`` is None if it is not sampled."""

    created_ns: int
    timeline: RequestTimeline | None


class TerminalEntry(NamedTuple):
    """A terminal event, with the time and sequence at which it was stored."""

    event: Done
    at_ns: int
    seq: int


class Following:
    """Exports traces: ``run`` until it is cancelled, or ``once`` to the end of the log.

    Args:
        start: where to begin.
        not_before_ns: leave out requests that ended earlier; Unix time.
        sample: share of the requests without a caller's trace to send, 0 to 1; the same requests every time.
    """

    def __init__(
        self,
        bus: Bus,
        exporter: Sink,
        start: TracePosition,
        *,
        not_before_ns: int = 0,
        sample: float = 1.0,
        export_timeout_s: float = 300.0,
    ) -> None:
        subjects, since = bus.subjects, start.since_ns
        self.counts = TraceCounts()
        self._bus = bus
        self._exporter = exporter
        self._not_before_ns = not_before_ns
        self._sample = sample
        self._export_timeout_s = export_timeout_s
        self._done = StreamReader(bus, "DONE", ">", after=start.done_seq, since_ns=since)
        self.work = StreamReader(bus, "WORK", subjects.all("work"), since_ns=since)
        self._ledger = StreamReader(bus, "HANDOFF", subjects.all("handoff"), since_ns=since)
        self.open_requests: dict[str, Open] = {}
        self._fresh: list[TerminalEntry] = []  # read in this round
        self._returned: list[tuple[Returned, int]] = []  # attempts, and when: read before their jobs
        self.due: list[TerminalEntry] = []  # read in the last round, and not yet sent
        self._sent_seq = start.done_seq
        self._due_seq = start.done_seq
        self._warned_at = -WARN_S

    # --- to the end of the log, and on ---

    async def run(self, keep: Callable[[TracePosition], Awaitable[None]]) -> None:
        """Never returns. Reads that fail are repeated.

        Args:
            keep: called every few seconds with the position from which another export could continue.
        """
        kept_at, kept = time.monotonic(), self._sent_seq
        while True:
            more = False
            try:
                more = await self.look()
            except ServingError as error:
                log.warning("log_unreadable", error=error.message)
            if self._sent_seq != kept and time.monotonic() - kept_at > SAVE_S:
                kept_at, kept = time.monotonic(), self._sent_seq
                await keep(self.position)
            if not more:
                await asyncio.sleep(POLL_S)

    async def once(self) -> None:
        """Export everything that has ended by now, not what ends meanwhile.

        Raises:
            ServingError: a stream cannot be read.
        """
        end = await last_seq(self._bus)
        while (await self.look() or self.due) and self._sent_seq < end:
            pass

    async def look(self) -> bool:
        """One round: send what the last one read, since by now its last ledger lines are stored; True: there is more.

        Raises:
            ServingError: a stream cannot be read; the next round continues there.
        """
        async for entry in self._done.entries():
            self._on_end(entry)
            if len(self._fresh) >= ENDS:
                break
        full = len(self._fresh) >= ENDS
        # Far behind, read the other streams only as far as these ends need, to bound memory.
        until_ns = self._fresh[-1].at_ns + CLOCK_SKEW_NS if full else 0
        async for entry in self.work.entries(until_ns):
            self._on_work(entry)
        returned, self._returned = self._returned, []
        for event, at_ns in returned:  # now that their jobs were read, which may be of this round, too
            open_request = self.open_requests.get(event.request)
            if open_request is not None and open_request.timeline is not None:
                open_request.timeline.add_end(event, at_ns)
        async for entry in self._ledger.entries(until_ns):
            self._on_ledger(entry)
        await self._send()
        self._sent_seq, self._due_seq = self._due_seq, self._done.after
        self.due, self._fresh = self._fresh, []
        self._forget()
        return full

    @property
    def position(self) -> TracePosition:
        """The position from which another export could continue."""
        begun = [ended.event.timings.created_ns for ended in self.due]
        if self.open_requests:
            begun.append(
                next(iter(self.open_requests.values())).created_ns
            )  # in the order of their jobs: about the oldest
        return TracePosition(self._sent_seq, min([time.time_ns(), *begun]) - BEFORE_NS)

    # --- reading ---

    def _on_end(self, entry: Entry) -> None:
        event = _end(entry)
        if isinstance(event, Returned):
            self._returned.append((event, entry.time_ns))
        elif event is not None and event.timings.ended_ns >= self._not_before_ns:
            self._fresh.append(TerminalEntry(event, entry.time_ns, entry.seq))

    def _on_work(self, entry: Entry) -> None:
        request_id, *numbers = entry.headers.get(HEADER_MSG_ID, "").split(":")
        if KEPT in numbers:
            return
        open_request = self.open_requests.get(request_id)
        if open_request is not None and open_request.timeline is None:
            return
        try:
            message = jobs.decode(entry.data)
            if open_request is None:
                if not isinstance(message, Job):
                    return  # the request has ended, or its job is no longer in the log
                open_request = self._begin(requests.decode(message.request))
        except msgspec.MsgspecError as error:
            log.warning("message_unreadable", stream="WORK", seq=entry.seq, error=str(error))
            return
        if open_request.timeline is not None:
            role, worker = entry.subject.split(".")[-2:]
            open_request.timeline.add_work(role, worker, entry.time_ns, message)

    def _begin(self, request: GenerateRequest) -> Open:
        timeline = None
        if self._wanted(request):
            timeline = RequestTimeline(request.id, compact=True)
            timeline.add_request(request)
        opened = self.open_requests[request.id] = Open(request.created_ns, timeline)
        return opened

    def _wanted(self, request: GenerateRequest) -> bool:
        """A caller's trace context decides; without a caller, the sample."""
        if request.trace is not None and (request.trace.parent or not wanted(request.trace)):
            return wanted(request.trace)
        return share(trace_id(request.id)) < self._sample

    def _on_ledger(self, entry: Entry) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            for line in decode_ledger(entry.data).events:
                open_request = self.open_requests.get(line.ticket.partition(":")[0])
                if open_request is not None and open_request.timeline is not None:
                    open_request.timeline.add_handoff(line)

    # --- sending ---

    async def _send(self) -> None:
        """Send due traces, batch by batch. Batches already sent stay sent if a later one is interrupted."""
        unplaced = [ended.event for ended in self.due if ended.event.request not in self.open_requests]
        if unplaced:
            await self._look_up(unplaced)
        while self.due:
            batch: list[Span] = []
            ended: list[str] = []
            count = 0
            for event, at_ns, _ in self.due:
                count += 1
                open_request = self.open_requests.get(event.request)
                if open_request is None:
                    continue
                ended.append(event.request)
                if open_request.timeline is not None:
                    open_request.timeline.add_end(event, at_ns)
                    batch += spans(open_request.timeline)
                if len(batch) >= BATCH_SPANS:
                    break
            await self._deliver(batch, ended)
            self._sent_seq = self.due[count - 1].seq
            del self.due[:count]

    async def _look_up(self, ends: list[Done]) -> None:
        """Find requests that ended without a job, in one pass over REQUESTS."""
        missing = {event.request for event in ends}
        since = min(event.timings.created_ns for event in ends) - CLOCK_SKEW_NS
        until = max(event.timings.created_ns for event in ends) + 5 * CLOCK_SKEW_NS
        reader = StreamReader(self._bus, "REQUESTS", self._bus.subjects.all("request"), since_ns=max(since, 1))
        async for entry in reader.entries(until):
            request_id = entry.headers.get(HEADER_MSG_ID, "")
            if request_id in missing:
                missing.remove(request_id)
                with contextlib.suppress(msgspec.MsgspecError):
                    self._begin(requests.decode(entry.data))
            if not missing:
                return
        self.counts.forgotten += len(missing)

    async def _deliver(self, batch: list[Span], ended: list[str]) -> None:
        """Send until the batch has arrived or ``export_timeout_s`` is over. A cancelled delivery counts as not sent."""
        arrived = not batch or await self._arrive(batch)
        timelines = [self.open_requests.pop(request_id).timeline for request_id in ended]
        requests = sum(timeline is not None for timeline in timelines)
        self.counts.unsampled += len(timelines) - requests
        if arrived:
            self.counts.sent += requests
        else:
            self.counts.dropped += requests
            log.error(
                "traces_dropped",
                requests=requests,
                spans=len(batch),
                dropped=self.counts.dropped,
                why=self._exporter.why,
            )

    async def _arrive(self, batch: list[Span]) -> bool:
        pause, until = RETRY_S, time.monotonic() + self._export_timeout_s
        while not await self._exporter.send(batch):
            if time.monotonic() + pause > until:
                return False
            self._warn_unreachable()
            await asyncio.sleep(pause)
            pause = min(RETRY_MOST_S, 2 * pause)
        return True

    def _warn_unreachable(self) -> None:
        if time.monotonic() - self._warned_at > WARN_S:
            self._warned_at = time.monotonic()
            log.warning(
                "span_export_failed",
                why=self._exporter.why,
                action="retrying; the log keeps what has ended",
                sent=self.counts.sent,
            )

    def _forget(self) -> None:
        """Drop requests that will not end any more."""
        old = time.time_ns() - LOST_NS
        while self.open_requests:
            request_id, open_request = next(iter(self.open_requests.items()))
            if open_request.created_ns >= old and len(self.open_requests) <= MAX_OPEN:
                return
            del self.open_requests[request_id]
            self.counts.forgotten += open_request.timeline is not None


def _end(entry: Entry) -> Done | Returned | None:
    try:
        return done.decode(entry.data)
    except msgspec.MsgspecError as error:
        log.warning("message_unreadable", stream="DONE", seq=entry.seq, error=str(error))
        return None


def share(trace: str) -> float:
    """A number from 0 to 1, derived from the trace id. The id itself is not random enough: it begins with a time."""
    return int.from_bytes(blake3(trace.encode()).digest(8), "big") / 2**64
