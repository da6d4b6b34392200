"""A request's timeline, read from the broker by direct get: it needs neither a consumer nor any other process."""

import contextlib

import msgspec

from infra.bus.connection import Bus
from infra.bus.direct_get import Entry, get_last, read
from infra.timeline.request_timeline import RequestTimeline
from schemas import done, jobs, requests, tokens
from schemas.errors import ServingError
from schemas.ids import time_of
from schemas.requests import GenerateRequest
from schemas.streams import CLOCK_SKEW_NS
from schemas.subjects import HEADER_MSG_ID, KEPT
from schemas.transfer import Handoff, decode_ledger

NEAR_NS = 100_000_000  # a stage's clock and the broker's differ by less, or all of WORK is read
NEAR_BATCH = 50
LEDGER_BATCH = 200


async def read_timeline(bus: Bus, request_id: str, *, with_tokens: bool = False) -> RequestTimeline:
    """Read everything that the log holds about a request.

    Args:
        with_tokens: read TOKENS too: every batch that the request's gateway got while the request ran.
    Raises:
        ValueError: not a request id, or the log does not have this request.
        ServingError: a stream cannot be read.
    """
    since = time_of(request_id) - CLOCK_SKEW_NS
    timeline = RequestTimeline(request_id)
    last = await get_last(bus, bus.subjects.stream("DONE"), bus.subjects.done_of(request_id))
    request = await _request(bus, request_id, since, last)
    if request is None:
        raise ValueError(f"no request {request_id} in the log; requests are kept for a day, their records for a week")
    timeline.add_request(request)
    if last is None:
        last = await _end_up_to_0_1(bus, request, since)
    await _add_ends(bus, timeline, since, last)
    ended_ns = timeline.done.timings.ended_ns if timeline.done is not None else 0
    until_ns = ended_ns + CLOCK_SKEW_NS if ended_ns else 0
    await _add_work(bus, timeline, since, until_ns)
    if any(stage.handed_off for stage in timeline.stages):
        for line in await _ledger(bus, timeline, since, until_ns):
            timeline.add_handoff(line)
    if with_tokens:
        await _add_tokens(bus, timeline, since, until_ns)
    return timeline


async def _request(bus: Bus, request_id: str, since: int, last: Entry | None) -> GenerateRequest | None:
    """The request from its record, if it has ended, or from REQUESTS."""
    event = done.decode(last.data) if last is not None else None
    if isinstance(event, done.Done) and event.submitted and "prompt" not in event.left_out:
        return done.request_of(event)
    subjects = bus.subjects
    for subject in (subjects.shard_of(request_id), subjects.unsharded):
        async for entry in read(bus, subjects.stream("REQUESTS"), subject, since_ns=since):
            if entry.headers.get(HEADER_MSG_ID) == request_id:
                return requests.decode(entry.data)
    return done.request_of(event) if isinstance(event, done.Done) else None


async def _end_up_to_0_1(bus: Bus, request: GenerateRequest, since: int) -> Entry | None:
    """The terminal event as releases up to 0.1 stored it; None: there is none, the request still runs."""
    subjects = bus.subjects
    async for entry in read(bus, subjects.stream("DONE"), subjects.done_together(request.model), since_ns=since):
        if entry.headers.get(HEADER_MSG_ID) == request.id:
            return entry
    return None


async def _add_ends(bus: Bus, timeline: RequestTimeline, since: int, last: Entry | None) -> None:
    subjects = bus.subjects
    async for entry in read(bus, subjects.stream("DONE"), subjects.all("returned"), since_ns=since):
        if last is not None and entry.time_ns > last.time_ns:
            break
        if entry.headers.get(HEADER_MSG_ID, "").startswith(timeline.request_id):
            timeline.add_end(done.decode(entry.data), entry.time_ns)
    if last is not None:
        timeline.add_end(done.decode(last.data), last.time_ns)


async def _add_work(bus: Bus, timeline: RequestTimeline, since: int, until_ns: int) -> None:
    """The request's jobs, and what its workers handed to each other."""
    if await _add_only_attempt(bus, timeline):
        return
    async for entry in read(bus, bus.subjects.stream("WORK"), bus.subjects.all("work"), since_ns=since):
        if _is_work_of(timeline.request_id, entry):
            _add_job(timeline, entry)
        elif until_ns and entry.time_ns > until_ns:
            break


async def _add_only_attempt(bus: Bus, timeline: RequestTimeline) -> bool:
    """The messages of a request that ended in its first attempt, from its workers' subjects alone.

    Its record names the last worker, whose message names the others. False: look in all of WORK.
    """
    done = timeline.done
    if done is None or done.attempt != 1 or not done.worker or not done.timings.routed_ns:
        return False
    found: dict[str, Entry] = {}
    workers = [done.worker]
    for worker in workers:  # which grows
        entry = await _first_work(bus, timeline.request_id, worker, done.timings.routed_ns, done.timings.ended_ns)
        if entry is None:
            return False
        found[worker] = entry
        message = jobs.decode(entry.data)
        if isinstance(message, jobs.Revoke):
            return False
        job = message if isinstance(message, jobs.Job) else jobs.decode_job(message.job)
        workers += [stage.worker for stage in job.decision.route if stage.worker not in workers]
    for entry in sorted(found.values(), key=lambda each: each.seq):
        _add_job(timeline, entry)
    return True


async def _first_work(bus: Bus, request_id: str, worker: str, since_ns: int, until_ns: int) -> Entry | None:
    """The first message about a request to a worker; None: there is none near these times."""
    stream, subject = bus.subjects.stream("WORK"), bus.subjects.work("*", worker)
    entries = read(bus, stream, subject, since_ns=since_ns - NEAR_NS, batch=NEAR_BATCH)
    async with contextlib.aclosing(entries):
        async for entry in entries:
            if _is_work_of(request_id, entry):
                return entry
            if entry.time_ns > until_ns + NEAR_NS:
                break
    return None


def _is_work_of(request_id: str, entry: Entry) -> bool:
    name = entry.headers.get(HEADER_MSG_ID, "")
    return name.startswith(request_id) and KEPT not in name.split(":")


def _add_job(timeline: RequestTimeline, entry: Entry) -> None:
    role, worker = entry.subject.split(".")[-2:]
    timeline.add_work(role, worker, entry.time_ns, jobs.decode(entry.data))


async def _ledger(bus: Bus, timeline: RequestTimeline, since: int, until_ns: int) -> list[Handoff]:
    """What workers reported about this request's tickets; nothing if the deployment has no ledger."""
    done, request_id = timeline.done, timeline.request_id
    if done is not None and done.attempt == 1 and done.timings.routed_ns:
        since, until_ns = done.timings.routed_ns - NEAR_NS, done.timings.ended_ns + NEAR_NS
    found, name = [], request_id.encode()
    for worker in dict.fromkeys(stage.worker for stage in timeline.stages):  # only they write about it
        with contextlib.suppress(ServingError):
            subject = bus.subjects.handoff(worker)
            async for entry in read(bus, bus.subjects.stream("HANDOFF"), subject, since_ns=since, batch=LEDGER_BATCH):
                if until_ns and entry.time_ns > until_ns:
                    break
                if name not in entry.data:
                    continue
                with contextlib.suppress(msgspec.MsgspecError):
                    events = decode_ledger(entry.data).events
                    found += [(entry.seq, event) for event in events if event.ticket.startswith(request_id)]
    return [event for _, event in sorted(found, key=lambda pair: pair[0])]


async def _add_tokens(bus: Bus, timeline: RequestTimeline, since: int, until_ns: int) -> None:
    """All batches that the request's gateway got while the request ran: a worker's flush has those of many requests."""
    done, name = timeline.done, timeline.request_id.encode()
    if done is not None and done.attempt == 1 and done.timings.started_ns:
        since, until_ns = done.timings.started_ns - NEAR_NS, done.timings.ended_ns + NEAR_NS
    subject = bus.subjects.tokens(timeline.request.gateway)
    async for entry in read(bus, bus.subjects.stream("TOKENS"), subject, since_ns=since, batch=LEDGER_BATCH):
        if until_ns and entry.time_ns > until_ns:
            break
        if name not in entry.data:
            continue
        batch = tokens.decode(entry.data)
        for item in batch.items:
            if item.request == timeline.request_id:
                timeline.add_tokens(batch.worker, entry.time_ns, item)
