"""A request's timeline, read from the broker by direct get: it needs neither a consumer nor any other process.

A batch that is filtered by subject costs the broker a count of what is left: up to seconds with a million messages
whose blocks are not in memory (nats-server 2.15.1), where one without a filter takes a few milliseconds. So short
windows of time are read whole, and searched here.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec

from penstock.infra.bus.direct_get import Entry, Readable, format_time, get_last, read
from penstock.log_tools.sources.data_folder import StoredLog, entry_of
from penstock.log_tools.sources.open_log import Log, LogSource, open_cells
from penstock.log_tools.timeline.request_timeline import RequestTimeline, TokensStored
from penstock.schemas import done, jobs, requests, tokens
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest, request_of_answer, time_of
from penstock.schemas.streams import CLOCK_SKEW_NS, LONGEST_DEADLINE_S
from penstock.schemas.subjects import HEADER_MSG_ID, KEPT, request_of
from penstock.schemas.summary import record_is_lost
from penstock.schemas.transfer import Handoff, decode_ledger

NEAR_NS = 100_000_000  # the clocks of a process and of the broker differ by less, or more is read
LONG_NS = 20_000_000_000  # a window above which the broker filters
LATE_NS = 60_000_000_000  # after the end, workers that were lost, or are cancelling, may still send output
NEAR_BATCH, TOKENS_BATCH = 100, 300
EVERYTHING = ">"


class UnknownRequest(ValueError):
    """The log does not have this request."""


ID = 36  # characters
LEAST = 8  # of the beginning of an id: requests of a minute
OTHERS = 4  # ids that begin alike are named


def times_of(beginning: str) -> tuple[int, int]:
    """The Unix times, in ns, between which an id that begins so was made.

    Raises:
        ValueError: it is too short, or no beginning of an id.
    """
    digits = beginning.replace("-", "")
    if not set(digits) <= set("0123456789abcdef") or any(at not in (8, 13, 18, 23) for at in _hyphens(beginning)):
        raise ValueError(f"{beginning!r} is not a request id, which is a UUIDv7 as in the X-Request-Id header")
    if len(beginning) < LEAST:
        raise ValueError(f"{beginning!r} is too short: give at least {LEAST} characters of the request's id")
    return int(digits[:12].ljust(12, "0"), 16) * 1_000_000, (int(digits[:12].ljust(12, "f"), 16) + 1) * 1_000_000


def _hyphens(text: str) -> list[int]:
    return [at for at, letter in enumerate(text) if letter == "-"]


async def ids_of(bus: Readable, beginning: str) -> list[str]:
    """The ids of requests that begin so, a few at most: in REQUESTS, or if there is none, in DONE.

    Raises:
        ValueError: as ``times_of``.
        ServingError: a stream cannot be read.
    """
    since, until = times_of(beginning)
    for name, subject, later_ns in (
        ("REQUESTS", EVERYTHING, CLOCK_SKEW_NS),
        ("DONE", bus.subjects.all("done"), LONG_NS + CLOCK_SKEW_NS),
    ):
        found: dict[str, None] = {}
        entries = window(bus, name, subject, since - CLOCK_SKEW_NS, until + later_ns)
        async with contextlib.aclosing(entries):
            async for entry in entries:
                message_id = entry.headers.get(HEADER_MSG_ID, "")
                if message_id.startswith(beginning) and len(message_id) == ID:
                    found[message_id] = None
                    if len(found) > OTHERS:
                        break
        if found:
            return list(found)
    return []


def only(found: Sequence[str], beginning: str) -> str:
    """
    Raises:
        ValueError: none or several.
    """
    if len(found) == 1:
        return found[0]
    if not found:
        raise UnknownRequest(f"no request whose id begins with {beginning} in the log")
    more = ", …" if len(found) > OTHERS else ""
    raise ValueError(f"{beginning} is the beginning of several ids: {', '.join(found[:OTHERS])}{more}")


async def whole_ids(source: LogSource, ids: Sequence[str]) -> list[str]:
    """The ids of requests, where some are only the beginning of one: all cells are searched for these.

    Raises:
        ValueError: one is not an id, or the beginning of none, or of several.
        ServingError: a log cannot be read.
    """
    given = list(map(request_of_answer, ids))
    if all(len(each) >= ID for each in given):
        return given
    async with open_cells(source, name="ids", streams=("REQUESTS", "DONE"), files=True) as logs:
        return [await whole_id(logs, each) for each in given]


async def whole_id(logs: Sequence[Log], request_id: str) -> str:
    """As ``whole_ids``, of one in logs that are open."""
    if len(request_id) >= ID:
        return request_id
    return only([found for log in logs for found in await ids_of(log.reader, request_id)], request_id)


async def read_timeline(bus: Readable, request_id: str, *, with_tokens: bool = False) -> RequestTimeline:
    """Read everything that the log holds about a request.

    Args:
        with_tokens: read TOKENS too: every batch that the request's gateway got while the request ran.
    Raises:
        UnknownRequest: the log does not have this request.
        ValueError: not a request id, or what the log has is damaged.
        ServingError: a stream cannot be read.
    """
    since = time_of(request_id) - CLOCK_SKEW_NS
    timeline = RequestTimeline(request_id)
    last = await _record(bus, timeline, since)
    request = await _request(bus, timeline, since, last)
    if request is None and timeline.damaged:
        raise ValueError(
            f"what the log has about request {request_id} is damaged on the disk: {', '.join(timeline.damaged)}"
        )
    if request is None:
        raise UnknownRequest(f"no request {request_id} in the log; requests and their records are kept for a week")
    timeline.add_request(request)
    if last is not None:
        timeline.add_end(done.decode(last.data), last.time_ns)
    else:
        timeline.lost_end = _lost_end(bus, timeline, time.time_ns())
    # By the broker's clock, not by the worker's, as is what lies between.
    until_ns = last.time_ns + CLOCK_SKEW_NS if last is not None else 0
    await _add_returns(bus, timeline, since, until_ns)
    await _add_work(bus, timeline, since, until_ns)
    moved = any(stage.move for routed in timeline.routed for stage in routed.decision.route)
    if moved or any(stage.handed_off for stage in timeline.stages):
        for line in await _ledger(bus, timeline, since, until_ns):
            timeline.add_handoff(line)
    if with_tokens:
        await _add_tokens(bus, timeline, since, until_ns)
    if timeline.done is not None and timeline.done.worker and not timeline.routed:
        timeline.begins["WORK"] = await _begin(bus, "WORK")
    if timeline.request.prompt_length and not timeline.request.no_store:
        timeline.begins["REQUESTS"] = await _begin(bus, "REQUESTS")
    if with_tokens and not any(isinstance(event, TokensStored) for event in timeline.events()):
        timeline.begins["TOKENS"] = await _begin(bus, "TOKENS")
    return timeline


async def _begin(bus: Readable, name: str) -> int:
    """When the oldest message of a stream was stored (Unix, ns); 0: it is empty."""
    async for entry in read(bus, bus.subjects.stream(name), EVERYTHING, batch=1):
        return entry.time_ns
    return 0


def _lost_end(bus: Readable, timeline: RequestTimeline, now_ns: int) -> str:
    """Why a request without a record has ended nevertheless, or may have; "": nothing says so."""
    request = timeline.request
    if isinstance(bus, StoredLog):
        stream = bus.stream(bus.subjects.stream("DONE"))
        noted = stream.noted_subjects() if stream is not None else None
        subject = bus.subjects.done(request.tenant, request.recorded_under, request.id)
        if any(each.startswith("DONE ") for each in timeline.damaged) or (noted and subject.encode() in noted):
            return "its end: it has ended, and its record is damaged on the disk"
        if stream is not None and noted is None and stream.incomplete:
            return "its end, if it has ended: records of its time are damaged on the disk"
        return ""
    if record_is_lost(request, now_ns):
        return (
            f"its end: it had to end by {format_time(request.deadline_ns)[:-7]}Z, and there is no record of it: the "
            "broker has lost it, or no router runs"
        )
    return ""


class StoredAt(NamedTuple):
    """When the messages about a request were stored, by the broker's clock: at the earliest and latest (Unix, ns).

    ``request``: None: the log does not have it.
    """

    since_ns: int
    until_ns: int
    request: GenerateRequest | None


async def stored_at(bus: Readable, request_id: str) -> StoredAt:
    """Where the log has a request.

    Raises:
        ValueError: not a request id.
        ServingError: a stream cannot be read.
    """
    made_ns, timeline = time_of(request_id), RequestTimeline(request_id)
    since, until = made_ns - CLOCK_SKEW_NS, made_ns + int(LONGEST_DEADLINE_S * 1e9) + CLOCK_SKEW_NS
    last = await _record(bus, timeline, since)
    request: GenerateRequest | None = None
    if last is not None:
        event = done.decode(last.data)
        request = done.request_of(event) if isinstance(event, done.Done) else None
        plain = isinstance(event, done.Done) and event.attempt == 1 and not event.code
        until = last.time_ns + (5 * NEAR_NS if plain else LATE_NS)
    near = made_ns - NEAR_NS
    async for entry in window(bus, "REQUESTS", EVERYTHING, near, near + 3 * NEAR_NS, about=request_id):
        if request_of(entry.headers) == request_id:
            return StoredAt(max(0, entry.time_ns - NEAR_NS), until, requests.decode(entry.data))
    return StoredAt(max(0, since), until, request)


async def _record(bus: Readable, timeline: RequestTimeline, since: int) -> Entry | None:
    """The request's record, of which there is at most one; None: it has not ended."""
    stream, subject = bus.subjects.stream("DONE"), bus.subjects.done_of(timeline.request_id)
    if not isinstance(bus, StoredLog):
        return await get_last(bus, stream, subject)
    # Files have no index of subjects. It is soon after the request, unless clocks differ, or the request took long.
    near = since + CLOCK_SKEW_NS - NEAR_NS
    stored, name = bus.stream(stream), timeline.request_id
    parts = ((near, near + LONG_NS), (since, near), (near + LONG_NS, 0)) if stored is not None else ()
    found = (stored.naming(name.encode(), since_ns=begin, until_ns=end) for begin, end in parts if stored is not None)
    for entry in map(entry_of, chain.from_iterable(found)):
        # Its subject may be damaged, or its headers.
        if entry.headers.get(HEADER_MSG_ID) == name or entry.subject.endswith(f".{name}"):
            return entry if _is_intact(bus, timeline, "DONE", entry) else None
    return None


def _is_intact(bus: Readable, timeline: RequestTimeline, name: str, entry: Entry) -> bool:
    """Whether a message is as it was stored; if it is not, the timeline notes it. A broker verifies what it reads."""
    if not isinstance(bus, StoredLog) or bus.is_intact(entry, bus.subjects.stream(name)):
        return True
    message = f"{name} {entry.seq}"
    if message not in timeline.damaged:
        timeline.damaged.append(message)
    return False


async def window(
    bus: Readable,
    name: str,
    subject: str,
    since_ns: int,
    until_ns: int,
    batch: int = NEAR_BATCH,
    *,
    about: str = "",
) -> AsyncGenerator[Entry, None]:
    """Messages stored from ``since_ns`` to ``until_ns`` (0: to the end). Short windows are read with all subjects.

    Args:
        about: the id of a request; messages without it may be left out, of any subject.
    """
    stored_log = bus.stream(bus.subjects.stream(name)) if about and isinstance(bus, StoredLog) else None
    if stored_log is not None:
        for entry in map(entry_of, stored_log.naming(about.encode(), since_ns=since_ns, until_ns=until_ns)):
            if not until_ns or entry.time_ns <= until_ns:
                yield entry
        return
    short = until_ns and until_ns - since_ns < LONG_NS
    wanted = EVERYTHING if short else subject
    stored = read(bus, bus.subjects.stream(name), wanted, since_ns=since_ns, batch=batch)
    async with contextlib.aclosing(stored) as entries:
        async for entry in entries:
            if until_ns and entry.time_ns > until_ns:
                return
            yield entry


async def _request(bus: Readable, timeline: RequestTimeline, since: int, last: Entry | None) -> GenerateRequest | None:
    """The request from its record, if it has ended, or from REQUESTS."""
    request_id = timeline.request_id
    event = done.decode(last.data) if last is not None else None
    if isinstance(event, done.Done) and event.submitted and "prompt" not in event.left_out:
        return done.request_of(event)
    subjects = bus.subjects
    near = since + CLOCK_SKEW_NS - NEAR_NS
    async for entry in window(bus, "REQUESTS", EVERYTHING, near, near + 3 * NEAR_NS, about=request_id):
        if request_of(entry.headers) == request_id and _is_intact(bus, timeline, "REQUESTS", entry):
            return requests.decode(entry.data)
    async for entry in read(bus, subjects.stream("REQUESTS"), subjects.shard_of(request_id), since_ns=since):
        if request_of(entry.headers) == request_id and _is_intact(bus, timeline, "REQUESTS", entry):
            return requests.decode(entry.data)
    return done.request_of(event) if isinstance(event, done.Done) else None


async def _add_returns(bus: Readable, timeline: RequestTimeline, since: int, until_ns: int) -> None:
    """Add the attempts that workers returned. A request that ended in its first attempt has none."""
    if timeline.done is not None and timeline.done.attempt == 1:
        return
    about = timeline.request_id
    async for entry in window(bus, "DONE", bus.subjects.all("returned"), since, until_ns, about=about):
        of_it = entry.headers.get(HEADER_MSG_ID, "").startswith(f"{timeline.request_id}:")
        if of_it and _is_intact(bus, timeline, "DONE", entry):
            timeline.add_end(done.decode(entry.data), entry.time_ns)


async def _add_work(bus: Readable, timeline: RequestTimeline, since: int, until_ns: int) -> None:
    """Add the request's jobs and handoffs."""
    if await _add_only_attempt(bus, timeline):
        return
    about = timeline.request_id
    async for entry in window(bus, "WORK", bus.subjects.all("work"), since, until_ns, about=about):
        if _is_work_of(timeline.request_id, entry) and _is_intact(bus, timeline, "WORK", entry):
            _add_job(timeline, entry)


async def _add_only_attempt(bus: Readable, timeline: RequestTimeline) -> bool:
    """The messages of a request that ended in its first attempt, from the moments in which they were stored.

    The first message says how many there are. False: not all were found, so search further.
    """
    event = timeline.done
    if event is None or event.attempt != 1 or not event.worker or not event.timings.routed_ns:
        return False
    times, entries = event.timings, dict[str, Entry]()
    first = await _first_work(bus, timeline, entries, times.routed_ns, times.ended_ns)
    if first is None:
        return False
    message = jobs.decode(first.data)
    route = message.decision.route if isinstance(message, jobs.Job) else ()
    for number in range(1, len(route)):  # the last stage's begins with the first token, those between before it
        since = times.first_token_ns if number == len(route) - 1 and times.first_token_ns else first.time_ns
        if await _first_work(bus, timeline, entries, since, times.ended_ns) is None:
            return False
    for entry in sorted(entries.values(), key=lambda each: each.seq):
        _add_job(timeline, entry)
    return True


async def _first_work(
    bus: Readable, timeline: RequestTimeline, jobs: dict[str, Entry], since_ns: int, until_ns: int
) -> Entry | None:
    """Find the first message about the request that is not in ``jobs``, and add it there. None: there is none."""
    since, until = since_ns - NEAR_NS, until_ns + NEAR_NS
    about, subject = timeline.request_id, bus.subjects.all("work")
    async with contextlib.aclosing(window(bus, "WORK", subject, since, until, about=about)) as entries:
        async for entry in entries:
            name = entry.headers.get(HEADER_MSG_ID, "")
            wanted = _is_work_of(timeline.request_id, entry) and name not in jobs
            if wanted and _is_intact(bus, timeline, "WORK", entry):
                jobs[name] = entry
                return entry
    return None


def _is_work_of(request_id: str, entry: Entry) -> bool:
    name = entry.headers.get(HEADER_MSG_ID, "")
    return name.startswith(request_id) and KEPT not in name.split(":")


def _add_job(timeline: RequestTimeline, entry: Entry) -> None:
    role, worker = entry.subject.split(".")[-2:]
    timeline.add_work(role, worker, entry.time_ns, jobs.decode(entry.data))


async def _ledger(bus: Readable, timeline: RequestTimeline, since: int, until_ns: int) -> list[Handoff]:
    """The ledger lines of this request's tickets; none if the deployment has no ledger."""
    event, handoffs, name = timeline.done, list[Handoff](), timeline.request_id.encode()
    if event is not None and event.attempt == 1 and event.timings.routed_ns:
        since, until_ns = event.timings.routed_ns - NEAR_NS, event.timings.ended_ns + NEAR_NS
    with contextlib.suppress(ServingError):
        subject = bus.subjects.all("handoff")
        async for entry in window(bus, "HANDOFF", subject, since, until_ns, about=timeline.request_id):
            if name not in entry.data or not _is_intact(bus, timeline, "HANDOFF", entry):
                continue
            with contextlib.suppress(msgspec.MsgspecError):
                events = decode_ledger(entry.data).events
                handoffs += [each for each in events if each.ticket.startswith(timeline.request_id)]
    return handoffs


async def _add_tokens(bus: Readable, timeline: RequestTimeline, since: int, until_ns: int) -> None:
    """Read all batches for the request's gateway while the request ran. A batch has tokens of many requests."""
    event, name = timeline.done, timeline.request_id.encode()
    if event is not None and event.attempt == 1 and event.timings.started_ns:
        since, until_ns = event.timings.started_ns - NEAR_NS, event.timings.ended_ns + NEAR_NS
    subject = bus.subjects.tokens(timeline.request.token_address)
    async for entry in window(bus, "TOKENS", subject, since, until_ns, TOKENS_BATCH, about=timeline.request_id):
        if name not in entry.data or not _is_intact(bus, timeline, "TOKENS", entry):
            continue
        batch = tokens.decode(entry.data)
        for item in batch.items:
            if item.request == timeline.request_id:
                timeline.add_tokens(batch.worker, entry.time_ns, item)
