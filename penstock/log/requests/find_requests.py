"""Finds requests in the log by model, time, state and other criteria, newest first.

Ended requests are read from the records in DONE. The others are those that the consumers of REQUESTS and WORK have not
acknowledged. A stopped deployment has no consumers, so the last hour of both streams is read instead.
"""

import time
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path

import msgspec
import structlog

from penstock.infra.bus.direct_get import Entry, LogFiles, Readable, get_last, get_last_of, read, read_backwards
from penstock.log.requests.left_open import left_open
from penstock.log.sources.data_folder import StoredLog
from penstock.schemas import done, jobs, requests
from penstock.schemas.jobs import Job, Revoke
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.streams import LONGEST_DEADLINE_S
from penstock.schemas.subjects import KEPT
from penstock.schemas.summary import QUEUED, RUNNING, Criteria, RequestSummary, of_done, of_request

log = structlog.get_logger("timeline")

CHECKED = 200  # requests whose end is looked up at once
CONSUMERS = 256  # per page of the broker's list


class LoggedRequest(msgspec.Struct, frozen=True):
    """A request in the log. ``record``: None while it has not ended."""

    summary: RequestSummary
    request: GenerateRequest | None
    record: done.Done | None = None


async def ended(
    bus: Readable, criteria: Criteria, *, before: int = 0
) -> AsyncGenerator[tuple[int, LoggedRequest], None]:
    """Ended requests with the sequences of their records, latest end first.

    Args:
        before: begin before this sequence of DONE; 0: with the last.
    Raises:
        ServingError: the stream cannot be read.
    """
    stream, subjects = bus.subjects.stream("DONE"), bus.subjects.all("done")
    oldest = criteria.since_ns
    async for entry in read_backwards(bus, stream, subjects, before=before):
        if oldest and entry.time_ns < oldest:  # it was accepted even earlier
            return
        summary = of_entry(entry)
        if summary is not None and criteria.accepts(summary.summary):
            yield entry.seq, summary


def of_entry(entry: Entry) -> LoggedRequest | None:
    """The record in a message of DONE. None: another message, or one of a later release."""
    try:
        event = done.decode(entry.data)
        if not isinstance(event, done.Done):
            return None
        return LoggedRequest(of_done(event), done.request_of(event), event)
    except msgspec.MsgspecError as error:
        log.warning("record_unreadable", seq=entry.seq, error=str(error))
        return None


async def unfinished(
    bus: Readable, criteria: Criteria, *, stopped: bool = False, cache: Path | None = None
) -> list[LoggedRequest]:
    """Requests that have not ended, latest accepted first.

    Args:
        stopped: the deployment does not run; the last hour of its log is read.
        cache: folder of a note about where they are in the files of a stopped deployment; None: none is made.
    Raises:
        ServingError: a stream cannot be read.
    """
    by_id: dict[str, LoggedRequest] = {}
    if isinstance(bus, StoredLog):
        for name, subject, data in left_open(bus, await _hour_before_end(bus), cache):
            if name == "REQUESTS":
                request = requests.decode(data)
                by_id[request.id] = LoggedRequest(of_request(request, state=QUEUED), request)
            elif (running := _running(subject, data)) is not None:
                _keep_later(by_id, running)
        left = [each for each in by_id.values() if criteria.accepts(each.summary)]
        return sorted(left, key=lambda each: each.summary.created_ns, reverse=True)
    async for entry in _unacknowledged(bus, "REQUESTS", stopped):
        request = requests.decode(entry.data)
        by_id[request.id] = LoggedRequest(of_request(request, state=QUEUED), request)
    async for entry in _unacknowledged(bus, "WORK", stopped):
        running = _running(entry.subject, entry.data)
        if running is not None:
            _keep_later(by_id, running)
    over = {record.request async for record in _records(bus, [each.summary for each in by_id.values()])}
    left = [each for name, each in by_id.items() if name not in over and criteria.accepts(each.summary)]
    return sorted(left, key=lambda each: each.summary.created_ns, reverse=True)


async def _hour_before_end(bus: Readable) -> int:
    """Unix ns of the last accepted or routed request, minus the longest time that a request may take."""
    ends = [
        await get_last(bus, bus.subjects.stream(name), f"{bus.subjects.namespace}.>") for name in ("REQUESTS", "WORK")
    ]
    last = max((entry.time_ns for entry in ends if entry is not None), default=time.time_ns())
    return max(0, last - int(LONGEST_DEADLINE_S * 1e9))


def _keep_later(requests: dict[str, LoggedRequest], running: LoggedRequest) -> None:
    before = requests.get(running.summary.id)
    if before is None or before.summary.attempts <= running.summary.attempts:
        requests[running.summary.id] = running


def _running(subject: str, data: bytes) -> LoggedRequest | None:
    """The request of a message in WORK. None: a revocation, or a kept copy of a job, which no worker reads."""
    worker = subject.rpartition(".")[2]
    if KEPT in subject.split("."):
        return None
    message = jobs.decode(data)
    if isinstance(message, Revoke):
        return None
    job = message if isinstance(message, Job) else jobs.decode_job(message.job)
    request = requests.decode(job.request)
    state = of_request(request, state=RUNNING, attempt=job.attempt, worker=worker, routed_ns=job.decision.at_ns)
    return LoggedRequest(state, request)


async def _unacknowledged(bus: Readable, name: str, stopped: bool) -> AsyncGenerator[Entry, None]:
    stream = bus.subjects.stream(name)
    if stopped or isinstance(bus, LogFiles):
        last = await get_last(bus, stream, f"{bus.subjects.namespace}.>")
        ended_ns = last.time_ns if last is not None else time.time_ns()
        since = ended_ns - int(LONGEST_DEADLINE_S * 1e9)
        async for entry in read(bus, stream, ">", since_ns=since):
            yield entry
        return
    offset = 0
    while page := await bus.js.consumers_info(stream, offset=offset):
        for info in page:
            if not info.num_pending and not info.num_ack_pending:
                continue
            floor = info.ack_floor.stream_seq if info.ack_floor is not None else 0
            config = info.config
            for subject in config.filter_subjects or [config.filter_subject or ">"]:
                async for entry in read(bus, stream, subject, after=floor):
                    yield entry
        offset += len(page)
        if len(page) < CONSUMERS:
            return


async def _records(bus: Readable, wanted: Iterable[RequestSummary]) -> AsyncGenerator[done.Done, None]:
    subjects = [bus.subjects.done(each.tenant, each.model, each.id) for each in wanted]
    for start in range(0, len(subjects), CHECKED):
        for entry in await get_last_of(bus, bus.subjects.stream("DONE"), subjects[start : start + CHECKED]):
            event = done.decode(entry.data)
            if isinstance(event, done.Done):
                yield event
