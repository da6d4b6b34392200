"""Replays requests on a Penstock deployment: publishes them as a gateway does, and waits for their ends in the log."""

import argparse
import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last_of
from penstock.infra.bus.jetstream import Message
from penstock.infra.bus.publisher import Publisher
from penstock.log_tools.export.export import copy_messages, limits_of, places_of, workers
from penstock.log_tools.export.recording import RecordedRun, Recording, move_media
from penstock.log_tools.replay.comparison import Changes, Comparison, NamingInputs, as_new, compare
from penstock.log_tools.replay.report import Replayed
from penstock.log_tools.sources.log_line import LogLine, Selection
from penstock.log_tools.sources.open_log import CellSource, Log, LogSource, cells_of, open_log, running
from penstock.schemas import control, requests, wire
from penstock.schemas.errors import ServingError
from penstock.schemas.fleet import Registration
from penstock.schemas.requests import GenerateRequest, new_request_id
from penstock.schemas.subjects import HEADER_MSG_ID

CHECK_S = 1.0  # an end that was missed live is looked up
CHECKED = 200
REPLAYS = "replay-"  # how the gateway of a replayed request begins
MAX_OPEN = 20_000  # at the recorded pace


class PlannedReplay(NamedTuple):
    """A request to send, ``at_s`` seconds after the first one. All 0: each as soon as there is room."""

    recorded: str
    at_s: float
    make: Callable[[str, int], GenerateRequest]  # of its id and the time, Unix ns


def plan_replay(
    runs: Sequence[RecordedRun],
    changes: Changes,
    speed: float,
    *,
    gateway: str = "",
    inputs_of: Callable[[GenerateRequest], NamingInputs],
) -> list[PlannedReplay]:
    """The requests of the runs, as new ones.

    Args:
        speed: times the recorded pace; 0: as fast as possible.
        gateway: that they are said to come from.
        inputs_of: what the new id of a recorded request depends on at the target.
    """
    requests = [(run.id, run.request) for run in runs if run.request is not None]

    def planned(recorded: str, request: GenerateRequest) -> PlannedReplay:
        def make(name: str, now_ns: int) -> GenerateRequest:
            return as_new(request, name, gateway, now_ns, inputs_of(request), changes)

        at_s = (request.created_ns - requests[0][1].created_ns) / 1e9 / speed if speed else 0.0
        return PlannedReplay(recorded, at_s, make)

    return [planned(recorded, request) for recorded, request in requests]


class SentReplays(NamedTuple):
    """What was sent.

    Attributes:
        ids: the new request's id, by the recorded one.
        refused: why it could not be published, by the recorded id.
        seconds: from the first to the last end.
    """

    ids: dict[str, str]
    refused: dict[str, str]
    seconds: float


class NatsSender:
    """
    Args:
        concurrency: requests at a time.
        timeout_s: a request without an end so long after it was sent is cancelled.
        cell: for the ids of the requests; -1: the deployment has only one.
    """

    def __init__(self, bus: Bus, publisher: Publisher, *, concurrency: int, timeout_s: float, cell: int = -1) -> None:
        self._cell = cell
        self._bus = bus
        self._publisher = publisher
        self._timeout_s = timeout_s
        self._room = asyncio.Semaphore(concurrency)
        self._open: dict[str, tuple[str, float]] = {}  # by new id: the subject of its end, when it was sent
        self._idle = asyncio.Event()

    async def send(self, planned: Sequence[PlannedReplay]) -> SentReplays:
        """Send all requests and wait for their ends. If this is cancelled, the open requests are cancelled, too.

        Raises:
            ServingError: the broker is unreachable for too long.
        """
        subjects = self._bus.subjects
        live = await self._bus.nc.subscribe(subjects.live(subjects.all("done")), cb=self._ended)
        check = asyncio.create_task(self._check(), name="replay-check")
        ids: dict[str, str] = {}
        refused: dict[str, str] = {}
        began = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for each in planned:
                    if each.at_s:
                        await asyncio.sleep(max(0.0, began + each.at_s - time.perf_counter()))
                    await self._room.acquire()
                    group.create_task(self._publish(each, ids, refused))
            while self._open:
                self._idle.clear()
                await self._idle.wait()
            return SentReplays(ids, refused, time.perf_counter() - began)
        finally:
            check.cancel()
            await asyncio.wait([check])
            with contextlib.suppress(ServingError):
                for name in list(self._open):
                    await self._cancel(name)
            if not self._bus.nc.is_closed:
                await live.unsubscribe()

    async def _publish(self, each: PlannedReplay, ids: dict[str, str], refused: dict[str, str]) -> None:
        now_ns = time.time_ns()
        request = each.make(new_request_id(now_ns, cell=self._cell), now_ns)
        subjects = self._bus.subjects
        self._open[request.id] = subjects.done(request.tenant, request.recorded_under, request.id), time.monotonic()
        try:
            subject = subjects.request(request.model, request.priority.value, request.id)
            await self._publisher.publish(
                subject, wire.encode(request), request.id, headers=requests.HEADERS, timeout=self._timeout_s
            )
            ids[each.recorded] = request.id
        except ServingError as error:
            refused[each.recorded] = str(error)
            self._over(request.id)

    async def _ended(self, message: Message) -> None:
        self._over((message.headers or {}).get(HEADER_MSG_ID, ""))

    def _over(self, name: str) -> None:
        if self._open.pop(name, None) is not None:
            self._room.release()
            if not self._open:
                self._idle.set()

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            now = time.monotonic()
            old = [(name, subject) for name, (subject, sent) in self._open.items() if now - sent > CHECK_S]
            stream = self._bus.subjects.stream("DONE")
            for start in range(0, len(old), CHECKED):
                with contextlib.suppress(ServingError):  # asked again a second later
                    part = [subject for _, subject in old[start : start + CHECKED]]
                    for entry in await get_last_of(self._bus, stream, part):
                        self._over(entry.headers.get(HEADER_MSG_ID, ""))
            for name, _ in old:
                if name in self._open and now - self._open[name][1] > self._timeout_s:
                    with contextlib.suppress(ServingError):
                        await self._cancel(name)
                    self._over(name)

    async def _cancel(self, name: str) -> None:
        if self._bus.connected:
            await self._bus.nc.publish(self._bus.subjects.cancel, wire.encode(control.Cancel(name, "replay ended")))


READ = ("REQUESTS", "WORK", "TOKENS", "DONE")


async def collect(log: Log, chosen: Selection) -> Recording:
    """The selected requests of a log.

    Raises:
        ServingError: the log cannot be read.
    """
    recording = Recording()

    def add(record: LogLine) -> None:
        part = record if chosen.everything else chosen.part(record)
        if part is not None:
            recording.add(part)

    spans = (await places_of(log.reader, chosen)).spans
    for stream in READ:
        limits = await limits_of(log.bus, stream)
        if limits is not None and limits.messages:
            await copy_messages(log, stream, limits.last_seq, spans, add)
    return recording


async def replay_over_nats(
    args: argparse.Namespace,
    cell: CellSource,
    log: Log,
    runs: Sequence[RecordedRun],
    skipped: Counter[str],
    changes: Changes,
    speed: float,
) -> Replayed:
    """Run recorded requests on the target that the flags name.

    Args:
        cell: of the deployment that recorded them.
        log: where they were recorded.
        skipped: receives the requests whose images no longer exist.
        speed: times the recorded pace; 0: as fast as possible.
    Raises:
        ValueError: there is no target, or it does not serve the model.
        ServingError: its broker does not answer.
    """
    async with _target(args, cell, log) as (there, number):
        missing = await move_media(log.bus, there.bus, runs, _keep_s(runs, speed, args.timeout_s))
        if missing:
            skipped["with images that are gone: deployments keep them for 2 h, exports forever"] += len(missing)
            runs = [run for run in runs if run.id not in missing]
            if not runs:
                raise ValueError("no recorded request can run again: the images of all are gone")
        sent = await _send(there.bus, runs, await workers(there.bus), changes, speed, args, number)
        again = await collect(there, Selection(frozenset(sent.ids.values()), kv=False))
        where = f"namespace {there.bus.subjects.namespace}" + (f" of {args.target}" if args.target else "")
    pairs = [_pair(run, sent, again) for run in runs]
    comparisons = [_refused(compare(old, new), sent.refused.get(old.id, "")) for old, new in pairs]
    return Replayed(where, pairs, comparisons, sent.seconds)


def _keep_s(runs: Sequence[RecordedRun], speed: float, timeout_s: float) -> float:
    """Seconds for which the images are needed."""
    times = [run.request.created_ns for run in runs if run.request is not None]
    return timeout_s + ((max(times) - min(times)) / 1e9 / speed if speed and times else 0.0)


@contextlib.asynccontextmanager
async def _target(args: argparse.Namespace, cell: CellSource, log: Log) -> AsyncIterator[tuple[Log, int]]:
    """The cell that runs the requests, and its number for their ids; -1: its deployment has only one."""
    source = cell.source
    where, namespace = args.target, args.target_namespace
    if not where and not log.stopped and namespace in ("", log.bus.subjects.namespace):
        yield log, cell.number if cell.cells > 1 else -1
        return
    number = -1
    if not where and log.stopped and not source.file:
        raise ValueError("the recorded deployment is stopped: name one that runs with --target")
    if where.startswith(("nats://", "tls://")):
        url = where
    elif not where and not log.stopped:
        url = log.url
    else:
        folder = Path(where) if where else source.data_dir
        try:
            cells = cells_of(LogSource(folder))
            there_is = next((each for each in cells if each.number == cell.number), cells[0])
            url, options = running(there_is.source, there_is.source.data_dir.resolve())
            number = there_is.number if len(cells) > 1 else -1
        except ValueError:
            raise ValueError(f"no deployment runs in {folder}: name one with --target") from None
        namespace = namespace or options
    async with open_log(LogSource(source.data_dir, url, namespace), name="replay", role="operator") as there:
        yield there, number


async def _send(
    bus: Bus,
    runs: Sequence[RecordedRun],
    fleet: Sequence[Registration],
    changes: Changes,
    speed: float,
    args: argparse.Namespace,
    cell: int,
) -> SentReplays:
    targets = {name: naming_inputs(name, fleet, changes) for name in {run.request.model for run in runs if run.request}}
    gateway = f"{REPLAYS}{secrets.token_hex(4)}"
    planned = plan_replay(runs, changes, speed, gateway=gateway, inputs_of=lambda request: targets[request.model])
    concurrency = MAX_OPEN if speed else max(1, args.concurrency)
    async with Publisher(bus) as publisher:
        sender = NatsSender(bus, publisher, concurrency=concurrency, timeout_s=args.timeout_s, cell=cell)
        return await sender.send(planned)


def naming_inputs(recorded: str, fleet: Sequence[Registration], changes: Changes) -> NamingInputs:
    """What the new ids of a model's requests depend on at a deployment.

    Raises:
        ValueError: no worker serves the model.
    """
    model = changes.model or recorded
    for worker in fleet:
        if model in (worker.model, *worker.aliases) and worker.role != "encode":
            return NamingInputs(worker.model, worker.revision, worker.block_size, worker.tokenizer)
    served = ", ".join(sorted({worker.model for worker in fleet})) or "no model"
    raise ValueError(f"no worker of the target serves {model}; it has {served}: choose one with --model")


def _pair(run: RecordedRun, sent: SentReplays, again: Recording) -> tuple[RecordedRun, RecordedRun]:
    name = sent.ids.get(run.id, "")
    return run, again.runs.get(name, RecordedRun(name, run.request, stored={}))


def _refused(comparison: Comparison, why: str) -> Comparison:
    return msgspec.structs.replace(comparison, message=why) if why else comparison
