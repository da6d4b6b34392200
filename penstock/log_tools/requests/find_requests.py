"""Finds requests in the log by model, time, state and other criteria, newest first.

Ended requests are read from their records in DONE, with their prompts from REQUESTS. Unfinished ones are those that the
consumers of REQUESTS and WORK have not acknowledged. In a stopped deployment, which has no consumers, they are the
requests without a record in the last hour of both streams. The state of a request is unknown if its record is damaged
or missing.
"""

import contextlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import structlog

from penstock.infra.bus.direct_get import (
    Entry,
    LogFiles,
    Readable,
    before_time,
    get_last,
    get_last_of,
    read,
    read_backwards,
    stream_end,
)
from penstock.log_tools.requests.text_search import ID_BYTES, RecordSearch
from penstock.log_tools.sources.data_folder import StoredLog, entry_of
from penstock.log_tools.sources.store_files import (
    Raw,
    StoredStream,
    body_of,
    find_message_ids,
    message,
    message_id,
    subject_of,
    subject_pattern,
)
from penstock.schemas import done, jobs, requests
from penstock.schemas.jobs import Job, Revoke
from penstock.schemas.requests import GenerateRequest, time_of
from penstock.schemas.streams import CLOCK_SKEW_NS, LONGEST_DEADLINE_S
from penstock.schemas.subjects import KEPT
from penstock.schemas.subjects import request_of as request_named
from penstock.schemas.summary import (
    QUEUED,
    RUNNING,
    UNKNOWN,
    Criteria,
    RequestSummary,
    of_done,
    of_encoded_done,
    of_request,
)
from penstock.schemas.transfer import Encoded, Prefilled

if TYPE_CHECKING:  # reading a stopped deployment needs no client, which loads slowly
    from penstock.infra.bus.connection import Bus

log = structlog.get_logger("timeline")

T = TypeVar("T")

_LEFT_OUT = b"\xa8left_out"  # the field of a record that names its omitted parts


class Left(NamedTuple):
    """A message about an unfinished request. ``stream``: without the namespace."""

    stream: str
    subject: str
    data: bytes


def left_open(stored: StoredLog, since_ns: int) -> list[Left]:
    """The messages about requests without a record in REQUESTS and WORK that were stored since a time (Unix, ns)."""
    return [_left(name, raw) for name, raw in _search(stored, since_ns)]


def _search(stored: StoredLog, since_ns: int) -> Iterator[tuple[str, Raw]]:
    over = _ended_ids(stored, since_ns)
    waiting: set[bytes] = set()
    for raw in _without(stored, "REQUESTS", since_ns, over):
        waiting.add(message_id(raw.block, raw.at)[:ID_BYTES])
        yield "REQUESTS", raw
    if _has_all(_stream(stored, "REQUESTS"), since_ns):
        if not waiting:
            return  # WORK is several times as large, and each of its requests is in REQUESTS
        since_ns = min(_made_ns(each) for each in waiting)
    for raw in _without(stored, "WORK", since_ns, over):
        yield "WORK", raw


DAMAGED = "its record is damaged on the disk"
_RECORD = re.compile(rb"\.done\.[^.]+\.[^.]+\.([0-9a-f-]{%d})" % ID_BYTES)


def _ended_ids(stored: StoredLog, since_ns: int) -> set[bytes]:
    """The ids of requests that have a record, complete for those stored since a time."""
    stream = _stream(stored, "DONE")
    if stream is None:
        return set()
    # The server's state file, written when it stops, has all subjects in a twentieth of the records' bytes.
    subjects = stream.noted_subjects()
    if subjects is not None:
        return set(_RECORD.findall(subjects))
    over: set[bytes] = set()
    for data, places in stream.by_block(since_ns=since_ns):
        over.update([subject_of(data, at)[-ID_BYTES:] for _, _, at in places])
    return over


def _without(stored: StoredLog, name: str, since_ns: int, over: set[bytes]) -> Iterator[Raw]:
    """The messages of a stream about requests other than these."""
    stream = _stream(stored, name)
    if stream is None:
        return
    for index, content in stream.contents(since_ns):
        if over.issuperset([each[:ID_BYTES] for each in find_message_ids(content)]):
            continue
        data, places = stream.places(index)
        for seq, time_ns, at in places:
            if time_ns >= since_ns and message_id(data, at)[:ID_BYTES] not in over:
                yield Raw(seq, time_ns, data, at)


def _left(name: str, raw: Raw) -> Left:
    stored = message(raw.block, raw.at)
    return Left(name, stored.subject, stored.data)


def _made_ns(request_id: bytes) -> int:
    """When a request was made; its jobs were stored later."""
    try:
        return max(0, time_of(request_id.decode()) - CLOCK_SKEW_NS)
    except ValueError:  # no request of ours
        return 0


def _has_all(stream: StoredStream | None, since_ns: int) -> bool:
    """Whether a stream still has all messages that were stored since a time (Unix, ns)."""
    if stream is None or stream.empty:
        return False
    return stream.first_seq <= 1 or next(stream.forward()).time_ns <= since_ns


def _stream(stored: StoredLog, name: str) -> StoredStream | None:
    return stored.stream(stored.subjects.stream(name))


def _unreadable(bus: Readable, logged: set[int]) -> list[RequestSummary]:
    """Ended requests whose records are damaged in the files that were read, as far as their subjects show them.

    Args:
        logged: the blocks whose damage was logged before; the function adds those that it logs.
    """
    stream = _stream(bus, "DONE") if isinstance(bus, StoredLog) else None
    found = []
    for number in sorted(stream.incomplete.keys() - logged, reverse=True) if stream is not None else ():
        assert stream is not None
        logged.add(number)
        for subject in map(bytes.decode, stream.lost_subjects(number)):
            tenant, model, request_id = subject.split(".")[-3:]
            with contextlib.suppress(ValueError):  # no request of ours
                accepted = time_of(request_id)
                found.append(RequestSummary(request_id, model, UNKNOWN, accepted, tenant, message=DAMAGED))
    return sorted(found, key=lambda each: each.created_ns, reverse=True)


MISSING_SEARCHED = 5_000  # requests before a gap in the records that are looked up, the latest first
ABOUT_THE_END_S = 5.0
CHECKED = 200  # requests whose end is looked up at once
SEARCHED = 512  # records that are searched for a text at once
CONSUMERS = 256  # per page of the broker's list


class LoggedRequest(msgspec.Struct, frozen=True):
    """A request in the log. ``record``: None while it has not ended."""

    summary: RequestSummary
    request: GenerateRequest | None
    record: done.Done | None = None


async def ended(
    bus: Readable,
    criteria: Criteria,
    *,
    before: int = 0,
    search: RecordSearch | None = None,
    prompts: bool = False,
) -> AsyncGenerator[tuple[int, LoggedRequest], None]:
    """Ended requests with the sequences of their records, latest end first.

    Args:
        before: begin before this sequence of DONE; 0: with the last record.
        search: yield only requests that may match; others are not decoded.
        prompts: read the prompts from REQUESTS, too; always done with ``search``.
    Raises:
        ServingError: the stream cannot be read.
        ValueError: as ``RecordSearch.matching``.
    """
    stream, subjects = bus.subjects.stream("DONE"), bus.subjects.all("done")
    oldest = criteria.ended_since_ns
    before = before or await _behind(bus, stream, criteria)
    parts = _with_requests(bus, _together(bus, stream, subjects, before), wanted=prompts or search is not None)
    async with contextlib.aclosing(parts):
        async for part, asked in parts:
            may_be = search.matching(list(map(_body, part)), asked) if search is not None else [True] * len(part)
            for each, stored, is_wanted in zip(part, asked, may_be, strict=True):
                if not is_wanted and not oldest:
                    continue
                entry = entry_of(each) if isinstance(each, Raw) else each
                if oldest and entry.time_ns < oldest:  # the request was accepted even earlier
                    return
                found = of_entry(entry, stored) if is_wanted else None
                if found is not None and criteria.accepts(found.summary):
                    yield entry.seq, found


Parts = AsyncGenerator[tuple[Sequence[Entry | Raw], Sequence[bytes]], None]


async def _with_requests(bus: Readable, records: AsyncGenerator[Sequence[Entry | Raw], None], *, wanted: bool) -> Parts:
    """Records with the message of REQUESTS that has the prompt; empty: it was deleted, or prompts are not needed."""
    async with contextlib.aclosing(records), contextlib.aclosing(_Accepted(bus)) as accepted:
        async for part in records:
            asked = [b""] * len(part)
            if wanted:
                lacking = [at for at, each in enumerate(part) if _LEFT_OUT in _body(each)]  # older ones have the prompt
                for at, message in zip(lacking, await accepted.of([part[at] for at in lacking]), strict=True):
                    asked[at] = message
            yield part, asked


async def _together(
    bus: Readable, stream: str, subject: str, before: int
) -> AsyncGenerator[Sequence[Entry | Raw], None]:
    """Like ``read_backwards``, in lists. The first are short, so that a caller that needs few messages reads few."""
    size = 8
    if isinstance(bus, StoredLog):
        stored = bus.stream(stream)
        raws = stored.backward(subject_pattern(subject), before=before) if stored is not None else iter(())
        while some := list(islice(raws, size)):
            yield some
            size = min(2 * size, SEARCHED)
        return
    part: list[Entry] = []
    async with contextlib.aclosing(read_backwards(bus, stream, subject, before=before)) as entries:
        async for entry in entries:
            part.append(entry)
            if len(part) == size:
                yield part
                size, part = min(2 * size, SEARCHED), []
    yield part


class _Accepted:
    """The messages of REQUESTS about ended requests, latest end first.

    REQUESTS is read backwards along with DONE. Messages stored after a request's end belong to requests that were
    already yielded, so memory holds about as many messages as requests ran at one time.
    """

    def __init__(self, bus: Readable) -> None:
        self._bus = bus
        self._parts: AsyncGenerator[Sequence[Entry | Raw], None] | None = None
        self._found: dict[bytes, Entry | Raw] = {}  # by the request's id
        self._reached_ns = 0  # the time at which the last message that was read had been stored

    async def aclose(self) -> None:
        if self._parts is not None:
            await self._parts.aclose()

    async def of(self, records: Sequence[Entry | Raw]) -> list[bytes]:
        """The message about each record's request; empty: it is gone."""
        if not records:
            return []
        names = list(map(_request_in, records))
        if self._parts is None:
            self._parts = await self._behind(records[0].time_ns + CLOCK_SKEW_NS)
        until_ns = _made_ns(min(names))  # ids ascend with the time
        wanted = set(names)
        while self._reached_ns > until_ns and not wanted <= self._found.keys():
            part = await anext(self._parts, None) or ()
            for each in part:
                self._found.setdefault(_request_asked(each), each)
            self._reached_ns = part[-1].time_ns if part else 0
        stored = [self._found.pop(name, None) for name in names]
        later_ns = records[-1].time_ns + CLOCK_SKEW_NS
        while self._found and next(iter(self._found.values())).time_ns > later_ns:  # the latest are the first
            del self._found[next(iter(self._found))]
        return [b"" if each is None else _body(each) for each in stored]

    async def _behind(self, ended_ns: int) -> AsyncGenerator[Sequence[Entry | Raw], None]:
        bus, stream = self._bus, self._bus.subjects.stream("REQUESTS")
        before = 0
        if not isinstance(bus, LogFiles) and ended_ns < time.time_ns():
            before = await before_time(bus, stream, ended_ns) + 1
        self._reached_ns = ended_ns
        # In files a subject costs as much as an id, and the stream has no others.
        return _together(bus, stream, ">" if isinstance(bus, LogFiles) else bus.subjects.all("request"), before)


def _request_in(record: Entry | Raw) -> bytes:
    subject = subject_of(record.block, record.at) if isinstance(record, Raw) else record.subject.encode()
    return subject.rpartition(b".")[2]


def _request_asked(message: Entry | Raw) -> bytes:
    """The id of the request of a message of REQUESTS. A copy made by a router has a longer message id."""
    if isinstance(message, Raw):
        return message_id(message.block, message.at)[:ID_BYTES]
    return request_named(message.headers).encode()


async def with_prompt(bus: Readable, entry: Entry) -> LoggedRequest | None:
    """The record in a message of DONE with its prompt, if REQUESTS still has it. None: as ``of_entry``."""
    async with contextlib.aclosing(_Accepted(bus)) as accepted:
        (stored,) = await accepted.of([entry])
    return of_entry(entry, stored)


def _body(stored: Entry | Raw) -> bytes:
    return body_of(stored.block, stored.at) if isinstance(stored, Raw) else stored.data


async def _behind(bus: Readable, stream: str, criteria: Criteria) -> int:
    """The first sequence of DONE whose record is too late; 0: there is none, or files are read."""
    if not criteria.at_ns or isinstance(bus, LogFiles):
        return 0
    latest = criteria.at_ns + int(LONGEST_DEADLINE_S * 1e9) + CLOCK_SKEW_NS
    return await before_time(bus, stream, latest) + 1 if latest < time.time_ns() else 0


async def summaries(bus: Readable, criteria: Criteria) -> AsyncGenerator[RequestSummary, None]:
    """As ``ended``, but only summaries: neither prompts nor tokens are decoded.

    Includes requests whose records are damaged: in a stopped deployment, those whose subjects the server noted when it
    stopped; in a running one, those that REQUESTS still has.
    """
    stream, subjects = bus.subjects.stream("DONE"), bus.subjects.all("done")
    oldest = criteria.ended_since_ns
    logged = set[int]()
    before = await _behind(bus, stream, criteria)
    wanted = not criteria.states or UNKNOWN in criteria.states
    missing: _Missing | None = None
    if wanted and not isinstance(bus, LogFiles):
        missing = _Missing(bus, before or (await stream_end(bus, stream))[0] + 1)
    if missing is not None:
        subjects = f"{bus.subjects.namespace}.>"  # all, so that a gap is a message that the broker cannot read
    async for entry in read_backwards(bus, stream, subjects, before=before):
        for lost in await missing.above(entry) if missing is not None else ():
            if criteria.accepts(lost):
                yield lost
        for lost in filter(criteria.accepts, _unreadable(bus, logged)):
            yield lost
        if oldest and entry.time_ns < oldest:
            return
        try:
            summary = of_encoded_done(entry.data, RequestSummary)
        except msgspec.MsgspecError as error:
            log.warning("record_unreadable", seq=entry.seq, error=str(error))
            continue
        if summary is not None and criteria.accepts(summary):
            yield summary
    for lost in filter(criteria.accepts, _unreadable(bus, logged)):
        yield lost


class _Missing:
    """Ended requests whose records a running broker has lost.

    nats-server (2.15) silently skips a message whose bytes were overwritten on its disk. If the bytes of its length
    were overwritten, the server drops the rest of the block and counts those messages as deleted.

    Args:
        before: first sequence of DONE that is not read.
    """

    def __init__(self, bus: "Bus", before: int) -> None:
        self._bus = bus
        self._before = before
        self._until_ns = time.time_ns()
        self._left = MISSING_SEARCHED
        self._looked = False
        self._unfinished: set[str] | None = None
        self._reported: set[str] = set()

    async def above(self, entry: Entry) -> list[RequestSummary]:
        """The lost requests between an entry and the next one in the stream; usually none."""
        count, before, until_ns = self._before - entry.seq - 1, self._before, self._until_ns
        first = not self._looked
        self._before, self._until_ns, self._looked = entry.seq, entry.time_ns, True
        if not self._left or not (count or first):
            return []
        bus, stream = self._bus, self._bus.subjects.stream("REQUESTS")
        candidates: dict[str, RequestSummary] = {}
        # A stream that lost its end has no gap: requests accepted around its last record or later must be unfinished.
        since_ns = entry.time_ns - int((LONGEST_DEADLINE_S if count else ABOUT_THE_END_S) * 1e9)
        most = min(self._left, MISSING_SEARCHED if count else CHECKED)
        end = await before_time(bus, stream, until_ns) + 1
        if end > 1:
            async with contextlib.aclosing(
                read_backwards(bus, stream, f"{bus.subjects.namespace}.>", before=end)
            ) as asked:
                async for each in asked:
                    if each.time_ns < since_ns or len(candidates) >= most:
                        break
                    with contextlib.suppress(msgspec.MsgspecError):
                        request = requests.decode(each.data)
                        candidates[request.id] = of_request(request, state=UNKNOWN)
        self._left -= len(candidates)
        if not candidates:
            return []
        if self._unfinished is None:
            self._unfinished = {each.summary.id for each in await unfinished(bus, Criteria())}
        ended = {record.request async for record in records_of(bus, map(_recorded, candidates.values()))}
        lost = [name for name in candidates if name not in ended | self._unfinished | self._reported]
        if lost:
            log.warning("records_missing", stream="DONE", after=entry.seq, before=before, requests=len(lost))
        self._reported.update(lost)
        return [msgspec.structs.replace(candidates[name], message=DAMAGED) for name in lost]


async def merged(parts: Sequence[AsyncIterator[T]], when: Callable[[T], int]) -> AsyncGenerator[T, None]:
    """Merge the items of several cells, each latest first. At most one item of each cell is read ahead.

    Args:
        when: the time of an item.
    """
    heads = [(part, item) for part in parts if (item := await anext(part, None)) is not None]
    while len(heads) > 1:
        at = max(range(len(heads)), key=lambda at: when(heads[at][1]))
        part, item = heads[at]
        yield item
        following = await anext(part, None)
        heads[at : at + 1] = [(part, following)] if following is not None else []
    for part, item in heads:  # all others are exhausted
        yield item
        async for following in part:
            yield following


def of_entry(entry: Entry, asked: bytes = b"") -> LoggedRequest | None:
    """The record in a message of DONE. None: it is not a record, or one of a later release.

    Args:
        asked: the message of REQUESTS with the prompt, if there is one.
    """
    try:
        event = done.decode(entry.data)
        if not isinstance(event, done.Done):
            return None
        request = done.request_of(event)
        if asked and request is not None and request.prompt_length and not request.no_store:
            request = requests.decode(asked)
        return LoggedRequest(of_done(event), request, event)
    except msgspec.MsgspecError as error:
        log.warning("record_unreadable", seq=entry.seq, error=str(error))
        return None


async def unfinished(bus: Readable, criteria: Criteria, *, stopped: bool = False) -> list[LoggedRequest]:
    """Requests that have not ended, latest accepted first.

    Args:
        stopped: the deployment is not running; the last hour of its log is read.
    Raises:
        ServingError: a stream cannot be read.
    """
    by_id: dict[str, LoggedRequest] = {}
    if isinstance(bus, StoredLog):
        for each in left_open(bus, await _hour_before_end(bus)):
            _note_unfinished(by_id, each)
        left = _unless_lost(bus, list(by_id.values()))
    else:
        for name in ("REQUESTS", "WORK"):
            async for entry in _unacknowledged(bus, name, stopped):
                _note_unfinished(by_id, Left(name, entry.subject, entry.data))
        over = {
            record.request async for record in records_of(bus, [_recorded(each.summary) for each in by_id.values()])
        }
        left = [each for name, each in by_id.items() if name not in over]
    left = [each for each in left if criteria.accepts(each.summary)]
    return sorted(left, key=lambda each: each.summary.created_ns, reverse=True)


def _unless_lost(stored: StoredLog, unended: Sequence[LoggedRequest]) -> list[LoggedRequest]:
    """Requests without a record; their state is "unknown" if the record may be a damaged one."""
    stream = _stream(stored, "DONE")
    until_ns = max(stream.incomplete.values(), default=0) if stream is not None else 0
    if stream is None or not until_ns or stream.noted_subjects() is not None:  # all requests with a record are known
        return list(unended)
    message = "it may have ended: records of its time are damaged on the disk"
    return [
        LoggedRequest(msgspec.structs.replace(each.summary, state=UNKNOWN, message=message), each.request)
        if each.summary.created_ns - CLOCK_SKEW_NS <= until_ns
        else each
        for each in unended
    ]


async def _hour_before_end(bus: Readable) -> int:
    """Time of the last accepted or routed request (Unix, ns), minus the longest duration of a request."""
    ends = [
        await get_last(bus, bus.subjects.stream(name), f"{bus.subjects.namespace}.>") for name in ("REQUESTS", "WORK")
    ]
    last = max((entry.time_ns for entry in ends if entry is not None), default=time.time_ns())
    return max(0, last - int(LONGEST_DEADLINE_S * 1e9))


def _note_unfinished(found: dict[str, LoggedRequest], left: Left) -> None:
    """Note the request of a message, by its id. Of its jobs, the latest attempt counts."""
    if left.stream == "REQUESTS":
        request = requests.decode(left.data)
        found[request.id] = LoggedRequest(of_request(request, state=QUEUED), request)
        return
    if (sent := job_in(left.subject, left.data)) is None:
        return
    job, worker = sent[1], left.subject.rpartition(".")[2]
    request = requests.decode(job.request)
    summary = of_request(
        request,
        state=RUNNING,
        attempt=job.attempt,
        worker=worker,
        routed_ns=job.decision.at_ns,
        earlier_workers=jobs.earlier_workers(job),
        revision=job.decision.revision,
        router=job.decision.router,
    )
    before = found.get(request.id)
    if before is None or before.summary.attempts <= summary.attempts:
        found[request.id] = LoggedRequest(summary, request)


def job_in(subject: str, data: bytes) -> tuple[Job | Encoded | Prefilled, Job] | None:
    """A message in WORK, and its job. None: a revocation, or a kept copy of a job that no worker reads.

    Raises:
        msgspec.MsgspecError: it cannot be decoded.
    """
    message = None if KEPT in subject.split(".") else jobs.decode(data)
    if message is None or isinstance(message, Revoke):
        return None
    return message, message if isinstance(message, Job) else jobs.decode_job(message.job)


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


def _recorded(each: RequestSummary) -> tuple[str, str, str]:
    return each.tenant, each.asked or each.model, each.id


async def records_of(bus: Readable, wanted: Iterable[tuple[str, str, str]]) -> AsyncGenerator[done.Done, None]:
    """
    Args:
        wanted: tenant, requested model and id of each request.
    Raises:
        ServingError: the stream cannot be read.
    """
    subjects = [bus.subjects.done(*each) for each in wanted]
    for start in range(0, len(subjects), CHECKED):
        for entry in await get_last_of(bus, bus.subjects.stream("DONE"), subjects[start : start + CHECKED]):
            with contextlib.suppress(msgspec.MsgspecError):
                if isinstance(event := done.decode(entry.data), done.Done):
                    yield event
