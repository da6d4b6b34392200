"""A running deployment at a glance, from the broker alone: workers, queues, rates and streams.

Rates come from the sequences of streams. Times, hit rates and failures come from the headers of requests that end
between two looks, at most ``SAMPLED_PER_LOOK`` at a time. Bodies are not read: they hold prompts and answers, and those
who may see how a deployment does need not be trusted with them.
"""

import asyncio
import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from nats.errors import Error as NatsError

from penstock.cli.figures import quantile, show_duration
from penstock.infra.bus.client import Frame, Headers
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.worker_leases import by_name, registrations, routers
from penstock.infra.nats_server import retention
from penstock.infra.nats_server.jetstream_api import BrokerProblem
from penstock.infra.nats_server.retention import StreamUse
from penstock.launch.state import read_state
from penstock.log_tools.sources.open_log import CellSource, Log, LogSource, open_cells
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import GpuUse, Registration, WorkerState
from penstock.schemas.pace import SLOW, compare
from penstock.schemas.routers import TENANTS, HeldByTenant, LostLeases, Member, held_by_tenant
from penstock.schemas.streams import topology
from penstock.schemas.summary import FAILED, RequestSummary, of_headers


class EndsFollower:
    """Follows the ends from ``open`` on.

    Args:
        most: ends that are kept until they are taken; of more, the newest.
    """

    def __init__(self, bus: Bus, most: int) -> None:
        self._bus = bus
        self._frames: deque[Frame] = deque(maxlen=most)
        self._opened = False

    async def open(self) -> None:
        """Follow, until the connection is closed; may be repeated."""
        if not self._opened:
            self._opened = True
            await self._bus.nc.subscribe_direct(self._bus.subjects.ended, self._frames.append)
            await self._bus.nc.flush()

    def take(self) -> list[RequestSummary]:
        """What has ended since the last call, in the order of the log."""
        frames = list(self._frames)
        self._frames.clear()
        found = (of_headers(frame.subject.decode(), Headers(frame.headers)) for frame in frames)
        return [summary for summary in found if summary is not None]


SAMPLED_PER_LOOK = 50  # records
SAMPLED = 200  # records of the window that are kept
STREAMS_AGAIN = 5  # looks until all streams are asked again, not only those that are counted
LOOK_S = 5.0  # a user is waiting for the result
STALLED_MS = 10_000  # without a step, from which on a worker is shown as stalled
WINDOW_S = 10.0  # the window of rates, times and shares
CLASSES = ("interactive", "standard", "batch")


class WorkerView(msgspec.Struct, frozen=True):
    """A worker. Its load is as of its last lease renewal; blocks are KV blocks of all its ranks.

    Attributes:
        hit_rate: share of the prompt tokens that came from its cache, of requests that ended within the window; None:
            none ended.
        tokens_per_s: its part of the deployment's output tokens per second.
        state: "ready", "draining", "paused", "asleep"; "stalled": its lease is renewed, but its engine does nothing;
            "lost": it is not registered, and lost its lease within ten minutes.
        lost: how often the worker of this name lost its lease within ten minutes.
        slowest_step_ms: of its engine, within a minute; 0: unknown.
        quiet_ms: since its engine did something, while it has something to do.
        latency_ms: from one token of a sequence to the next, at prefill workers the time of a prompt; None: unknown.
        slowness: how many times slower than its peers it is, as ``penstock.schemas.pace`` has it; None: unknown.
        cell: None: the deployment has only one.
        gpus: that it sees, with the use of all processes on them; empty: none, or it cannot say.
    """

    name: str
    id: str
    role: str
    model: str
    engine: str
    state: str
    running: int
    waiting: int
    slots: int
    used_blocks: int
    cached_blocks: int
    total_blocks: int
    hit_rate: float | None
    tokens_per_s: float
    lost: int = 0
    slowest_step_ms: int = 0
    quiet_ms: int = 0
    latency_ms: float | None = None
    slowness: float | None = None
    cell: int | None = None
    gpus: tuple[GpuUse, ...] = ()

    @property
    def is_slow(self) -> bool:
        return self.slowness is not None and self.slowness >= SLOW


class QueueView(msgspec.Struct, frozen=True):
    """Requests of one priority class that no worker has: ``unread`` by any router, ``held`` by one.

    Attributes:
        tenants: names and held requests of the tenants that have most, as routers reported them with their last
            lease; what is unread has no tenant, since only its body names one.
        others: held requests of all other tenants.
    """

    priority: str
    unread: int
    held: int
    tenants: tuple[tuple[str, int], ...] = ()
    others: int = 0


class Rates(msgspec.Struct, frozen=True):
    """Within the window. Times in ms, of requests that ended; None: none did."""

    accepted_per_s: float
    ended_per_s: float
    failed_share: float | None
    output_tokens_per_s: float
    hit_rate: float | None
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    duration_p50_ms: float | None
    duration_p95_ms: float | None


class CellView(msgspec.Struct, frozen=True):
    """One of several cells.

    Attributes:
        problem: why nothing else is known of it; "": it is.
        held, unread: as of queues, of all classes.
        fullest: the stream that has least room left, by its name without the namespace, and the share that is full.
    """

    number: int
    namespace: str
    problem: str = ""
    ready: int = 0
    workers: int = 0
    routers: int = 0
    accepted_per_s: float = 0.0
    ended_per_s: float = 0.0
    held: int = 0
    unread: int = 0
    fullest: str = ""
    full: float = 0.0


class GatewaysView(msgspec.Struct, frozen=True):
    """The gateways of a ``penstock up`` on this machine.

    Attributes:
        leaving: of those that accept nothing more, and end with their last connection.
        fewest, most: between which they come and go; 0: an earlier release runs them.
        change: the last one and its reason; "": there was none.
        changed_ns: Unix time.
    """

    serving: int
    leaving: int
    fewest: int
    most: int
    change: str
    changed_ns: int


class DeploymentSnapshot(msgspec.Struct, frozen=True):
    """What ``look`` saw, of all cells together.

    Attributes:
        at_ns: Unix time.
        cells: empty where there is only one.
        gateways: None: they are not those of a ``penstock up`` on this machine.
    """

    at_ns: int
    namespace: str
    workers: tuple[WorkerView, ...]
    queues: tuple[QueueView, ...]
    rates: Rates
    streams: tuple[StreamUse, ...]
    recent: tuple[RequestSummary, ...]  # ended within the window, the newest first
    cells: tuple[CellView, ...] = ()
    gateways: GatewaysView | None = None


class Count(msgspec.Struct, frozen=True):
    """Last sequences at one moment."""

    at_s: float
    accepted: int
    ended: int


class CellLook(NamedTuple):
    """What one look saw of a cell. ``unread``, ``held``: requests by class."""

    registered: list[Registration]
    members: list[Member]
    unread: dict[str, int]
    held: dict[str, int]
    streams: tuple[StreamUse, ...]


class Observer:
    """Looks at a deployment as often as ``look`` is called.

    Args:
        buses: of its cells.
        numbers: of these cells, if there are several.
        away: further cells, which are not looked at.
        state: the file in which ``penstock up`` says what runs; None: it does not run here.
    """

    def __init__(
        self, *buses: Bus, numbers: Sequence[int] = (), away: Sequence[CellView] = (), state: Path | None = None
    ) -> None:
        self._away = away
        self._state = state
        self._cells = [CellObserver(bus) for bus in buses]
        self._numbers = numbers or range(len(buses))
        self._recent: list[RequestSummary] = []

    async def look(self) -> DeploymentSnapshot:
        """The deployment now. Of several cells, those whose broker does not answer are named, and left out.

        Raises:
            ServingError: no broker answers within ``LOOK_S``.
            BrokerProblem: it refuses.
        """
        seen = await asyncio.gather(*map(_look, self._cells))
        found = [(cell, look) for cell, look in zip(self._cells, seen, strict=True) if isinstance(look, CellLook)]
        if not found:
            raise next(each for each in seen if isinstance(each, Exception))
        since_ns = time.time_ns() - int(WINDOW_S * 1e9)
        recent = [*self._recent, *(each for cell in self._cells for each in cell.ended.take())]
        recent.sort(key=lambda each: each.ended_ns)
        self._recent = [each for each in recent if each.ended_ns >= since_ns][-SAMPLED:]
        now = rates(found[0][0].counts, self._recent, *(cell.counts for cell, _ in found[1:]))
        members = [member for _, look in found for member in look.members]
        registered = [each for _, look in found for each in look.registered]
        views = workers(registered, self._recent, now.output_tokens_per_s, lost_leases(members))
        several = len(self._cells) + len(self._away) > 1
        cells = [*map(_cell_view, self._numbers, self._cells, seen), *self._away] if several else []
        streams = found[0][1].streams
        if several:
            views = _with_cells(views, zip(self._numbers, seen, strict=True))
            streams = summed([(cell.namespace, look.streams) for cell, look in found])
        return DeploymentSnapshot(
            time.time_ns(),
            self._cells[0].namespace,
            tuple(views),
            tuple(_queues([look for _, look in found])),
            now,
            streams,
            tuple(reversed(self._recent)),
            tuple(sorted(cells, key=lambda cell: cell.number)),
            None if self._state is None else _gateways(self._state),
        )


@contextlib.asynccontextmanager
async def observed(
    source: LogSource, *, name: str, role: str, streams: Sequence[str] = (), patient: bool = False
) -> AsyncIterator[tuple[list[Log], Observer | None]]:
    """The logs of a deployment's cells, and who looks at those that run; None: the deployment is stopped.

    Raises:
        as ``open_cells``, if no cell can be opened.
    """
    away: list[CellView] = []

    def note(cell: CellSource, error: Exception) -> None:
        away.append(CellView(cell.number, cell.source.namespace, problem=str(error)))

    async with open_cells(source, name=name, role=role, streams=streams, patient=patient, left_out=note) as logs:
        running = [log for log in logs if not log.stopped]
        numbers = [log.cell for log in running]
        state = None if source.nats_url else source.data_dir / "state.json"
        buses = [log.bus for log in running]
        yield logs, Observer(*buses, numbers=numbers, away=away, state=state) if running else None


def _gateways(path: Path) -> GatewaysView | None:
    try:
        state = read_state(path)
    except (OSError, msgspec.DecodeError):
        return None
    limits, serving = state.gateways, len(state.gateway_urls)
    leaving = sum(each.leaving for each in state.processes)
    return GatewaysView(serving, leaving, limits.fewest, limits.most, limits.change, limits.changed_ns)


def gateways_line(view: GatewaysView, at_ns: int) -> str:
    """Such as "gateways 3 (2 to 6), 1 leaving; gateway-2 added 40 s ago: ..."."""
    line = f"gateways {view.serving}" + (f" ({view.fewest} to {view.most})" if view.most > view.fewest else "")
    if view.leaving:
        line += f", {view.leaving} leaving"
    what, _, why = view.change.partition(": ")
    return line + (f"; {what} {show_duration((at_ns - view.changed_ns) / 1e9)} ago: {why}" if view.change else "")


async def _look(cell: "CellObserver") -> CellLook | ServingError | BrokerProblem:
    try:
        return await cell.look()
    except (ServingError, BrokerProblem) as error:
        return error


def _with_cells(views: Iterable[WorkerView], seen: Iterable[tuple[int, object]]) -> list[WorkerView]:
    cells = {each.worker: number for number, look in seen if isinstance(look, CellLook) for each in look.registered}
    return [msgspec.structs.replace(view, cell=cells.get(view.id)) for view in views]


def _cell_view(number: int, cell: "CellObserver", look: CellLook | Exception) -> CellView:
    if not isinstance(look, CellLook):
        return CellView(number, cell.namespace, problem=str(look))
    speed = rates(cell.counts, ())
    shares = {use.name: use.bytes / use.max_bytes for use in look.streams if use.max_bytes and use.description}
    fullest = max(shares, key=shares.__getitem__, default="")
    return CellView(
        number,
        cell.namespace,
        ready=sum(each.state is WorkerState.ready for each in look.registered),
        workers=len(look.registered),
        routers=len(look.members),
        accepted_per_s=speed.accepted_per_s,
        ended_per_s=speed.ended_per_s,
        held=sum(look.held.values()),
        unread=sum(look.unread.values()),
        fullest=_kind(fullest, cell.namespace),
        full=shares.get(fullest, 0.0),
    )


def _kind(stream: str, namespace: str) -> str:
    """The name of a stream, or of that behind a bucket, without the namespace."""
    return stream.replace(f"{namespace}_", "", 1)


def summed(parts: Sequence[tuple[str, Sequence[StreamUse]]]) -> tuple[StreamUse, ...]:
    """The streams of several cells as if they were one's, under the names of the first.

    Args:
        parts: namespaces and the streams of these.
    """
    found: dict[str, StreamUse] = {}
    for namespace, uses in parts:
        for use in uses:
            kind = _kind(use.name, namespace)
            one = found.get(kind)
            found[kind] = use if one is None else _sum(one, use)
    return tuple(found.values())


def _sum(one: StreamUse, other: StreamUse) -> StreamUse:
    return msgspec.structs.replace(
        one,
        messages=one.messages + other.messages,
        bytes=one.bytes + other.bytes,
        max_bytes=one.max_bytes + other.max_bytes,
        oldest_s=max(one.oldest_s, other.oldest_s),
        consumers=one.consumers + other.consumers,
        last_seq=one.last_seq + other.last_seq,
        operator_set=tuple(sorted({*one.operator_set, *other.operator_set})),
        incomplete=tuple(sorted({*one.incomplete, *other.incomplete})),
    )


def _queues(looks: Sequence[CellLook]) -> list[QueueView]:
    held = held_by_class(member for look in looks for member in look.members)
    return [
        QueueView(
            name,
            sum(look.unread[name] for look in looks),
            sum(look.held[name] for look in looks),
            held[name].tenants,
            held[name].others,
        )
        for name in CLASSES
    ]


class CellObserver:
    """Looks at one cell.

    Attributes:
        counts: last sequences, of the window.
        ended: what has ended since the last look.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._topology = topology(bus.subjects)
        self.namespace = bus.subjects.namespace
        self.counts: list[Count] = []
        self.ended = EndsFollower(bus, SAMPLED_PER_LOOK)
        self._streams: tuple[StreamUse, ...] = ()
        self._looks = 0  # since all streams were asked

    async def look(self) -> CellLook:
        """
        Raises:
            ServingError: the broker does not answer within ``LOOK_S``.
            BrokerProblem: it refuses.
        """
        try:
            async with asyncio.timeout(LOOK_S):
                return await self._look()
        except TimeoutError:
            raise ServingError(
                Code.broker_unavailable, f"the broker does not answer within {LOOK_S:g} s; check that it runs"
            ) from None

    async def _look(self) -> CellLook:
        await self.ended.open()
        streams = await self._uses()
        self._count(streams)
        members = await routers(self._bus)
        registered = await registrations(self._bus)
        unread, held = await queued(self._bus)
        return CellLook(registered, members, unread, held, streams)

    async def _uses(self) -> tuple[StreamUse, ...]:
        counted = [self._bus.subjects.stream(name) for name in ("REQUESTS", "DONE")] if self._looks else None
        now = await retention.uses(self._bus, self._topology, counted)
        if counted is not None:
            by_name = {use.name: use for use in now}
            now = [by_name.get(use.name, use) for use in self._streams]
        self._streams = tuple(now)
        self._looks = (self._looks + 1) % STREAMS_AGAIN
        return self._streams

    def _count(self, streams: Sequence[StreamUse]) -> None:
        # Asking for the last message of a wildcard would make the broker look through the subjects of all records.
        now, last = time.monotonic(), {use.name: use.last_seq for use in streams}
        stream = self._bus.subjects.stream
        if self.counts and now - self.counts[-1].at_s > WINDOW_S:
            self.counts.clear()  # rates over hours without a reader would say nothing about now
        self.counts.append(Count(now, last.get(stream("REQUESTS"), 0), last.get(stream("DONE"), 0)))
        # One count from before the window stays, for its beginning.
        while len(self.counts) > 2 and self.counts[1].at_s < now - WINDOW_S:
            self.counts.pop(0)


async def queued(bus: Bus) -> tuple[dict[str, int], dict[str, int]]:
    """Requests of a cell that no router has read, and those that routers hold, by class.

    Raises:
        ServingError: the broker does not say.
    """
    unread, held = {}, {}
    stream = bus.subjects.stream("REQUESTS")
    for priority in CLASSES:
        try:
            info = await bus.js.consumer_info(stream, f"router-{priority}")
        except (NatsError, TimeoutError) as error:
            raise ServingError(
                Code.broker_unavailable, f"the queue of class {priority} cannot be read ({error!r})"
            ) from error
        unread[priority], held[priority] = info.num_pending or 0, info.num_ack_pending or 0
    return unread, held


def held_by_class(members: Iterable[Member]) -> dict[str, HeldByTenant]:
    """What all routers hold, by class."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in CLASSES}
    others: Counter[str] = Counter()
    for held in (held for member in members for held in member.held if held.priority in counts):
        counts[held.priority].update(dict(held.tenants))
        others[held.priority] += held.others
    return {name: held_by_tenant(name, counts[name], others[name]) for name in CLASSES}


def tenant_rows(queues: Sequence[QueueView]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and held requests by class of at most ``TENANTS`` tenants, those that have most of all classes first; the
    last row, "", is of all others. 0: none, or too few to be named in this class."""
    rows: dict[str, list[int]] = {}
    for at, queue in enumerate(queues):
        for tenant, held in queue.tenants:
            rows.setdefault(tenant, [0] * len(queues))[at] = held
    named = sorted(rows, key=lambda tenant: (-sum(rows[tenant]), tenant))[:TENANTS]
    shown = [(tenant, tuple(rows[tenant])) for tenant in named]
    others = tuple(
        queue.others + sum(held for tenant, held in queue.tenants if tenant not in named) for queue in queues
    )
    return [*shown, ("", others)] if any(others) else shown


def workers(
    registered: Iterable[Registration],
    recent: Sequence[RequestSummary],
    tokens_per_s: float,
    lost: Sequence[LostLeases] = (),
) -> list[WorkerView]:
    """Registered workers, each with what ``recent`` requests say of it, and those that lost their lease.

    Args:
        tokens_per_s: of the deployment.
        lost: as ``lost_leases`` has it.
    """
    losses = {each.worker: each.count for each in lost if each.count}
    by_worker: dict[str, list[RequestSummary]] = defaultdict(list)
    for summary in recent:
        by_worker[summary.worker].append(summary)
    sampled = sum(summary.completion_tokens for summary in recent) or 1
    registered = list(registered)
    paces = compare(registered)
    views = [
        WorkerView(
            each.name,
            each.worker,
            each.role,
            each.model,
            each.engine,
            "stalled" if each.load.quiet_ms >= STALLED_MS else each.rests or each.state.value,
            each.load.running,
            each.load.waiting,
            each.slots * each.dp_size,
            each.load.used_blocks,
            each.load.cached_blocks,
            each.total_blocks * each.dp_size,
            hit_rate(by_worker[each.worker]),
            tokens_per_s * sum(summary.completion_tokens for summary in by_worker[each.worker]) / sampled,
            losses.get(each.lasting_name, 0),
            each.load.slowest_step_ms,
            each.load.quiet_ms,
            each.load.latency_us / 1e3 or None,
            paces[each.worker].slowness if each.worker in paces else None,
            gpus=each.load.gpus,
        )
        for each in registered
    ]
    there = {each.lasting_name for each in registered}
    gone = [
        WorkerView(each.worker, "", each.role, each.model, "", "lost", 0, 0, 0, 0, 0, 0, None, 0.0, each.count)
        for each in lost
        if each.worker not in there
    ]
    return sorted([*views, *gone], key=lambda view: by_name(view.name, view.id)) if gone else views


def lost_leases(members: Iterable[Member]) -> list[LostLeases]:
    """What routers have counted, by worker, most first. Each counts all workers; one that began later has seen less."""
    found: dict[str, LostLeases] = {}
    for each in (each for member in members for each in member.lost):
        before = found.get(each.worker, each)
        most = each if each.count > before.count else before
        found[each.worker] = msgspec.structs.replace(most, together=max(each.together, before.together))
    return sorted(found.values(), key=lambda each: (-each.count, each.worker))


def away(cells: Iterable[CellView]) -> list[str]:
    """A line for each cell of which nothing is known."""
    return [f"cell {each.number}: {each.problem}" for each in cells if each.problem]


def unsteady(workers: Sequence[WorkerView]) -> list[str]:
    """A line for each worker that lost its lease within ten minutes, holds it without progress, or is much slower than
    its peers."""
    lines = []
    for worker in workers:
        name = worker.name or worker.id
        if worker.lost:
            times = "once" if worker.lost == 1 else f"{worker.lost} times"
            now = "; it is not there now" if worker.state == "lost" else ""
            lines.append(f"{name} lost its lease {times} in ten minutes{now}")
        if worker.state == "stalled":
            lines.append(f"{name} holds its lease, but its engine did nothing for {worker.quiet_ms / 1000:.0f} s")
        elif worker.is_slow:
            lines.append(f"{name} is {worker.slowness:.0f} times slower than its peers")
    return lines


def rates(counts: Sequence[Count], recent: Sequence[RequestSummary], *others: Sequence[Count]) -> Rates:
    """Rates between the first and the last count, and what ``recent`` requests say.

    Args:
        others: counts of further cells.
    """
    accepted_per_s = ended_per_s = 0.0
    for first, last in ((each[0], each[-1]) for each in (counts, *others)):
        if seconds := last.at_s - first.at_s:
            accepted_per_s += (last.accepted - first.accepted) / seconds
            ended_per_s += (last.ended - first.ended) / seconds
    ttfts = sorted(each.ttft_ms for each in recent if each.ttft_ms is not None)
    durations = sorted(each.duration_ms for each in recent if each.duration_ms is not None)
    tokens = sum(each.completion_tokens for each in recent) / len(recent) if recent else 0.0
    return Rates(
        accepted_per_s,
        ended_per_s,
        sum(each.state == FAILED for each in recent) / len(recent) if recent else None,
        ended_per_s * tokens,
        hit_rate(recent),
        quantile(ttfts, 0.5, None),
        quantile(ttfts, 0.95, None),
        quantile(durations, 0.5, None),
        quantile(durations, 0.95, None),
    )


def hit_rate(recent: Iterable[RequestSummary]) -> float | None:
    """Share of the prompt tokens that came from a cache; None: there are no prompt tokens."""
    prompt = cached = 0
    for each in recent:
        prompt += each.prompt_tokens
        cached += each.cached_tokens
    return cached / prompt if prompt else None
