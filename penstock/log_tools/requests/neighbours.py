"""What ran beside a request: at its workers while it was there, and in the router while it waited for one.

Jobs say who was sent to a worker and when, records when each was computed and how it ended. So the other requests of a
worker are those whose time there overlaps this one's. Between its first token and its end, a request's tokens count as
evenly spread, and so does its prompt between its start and its first token.
"""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console

from penstock.cli.figures import counted, span
from penstock.cli.terminal import Column, escape, fitting_table
from penstock.infra.bus.direct_get import Entry, LogFiles, Readable, read
from penstock.log_tools.requests.find_requests import job_in, records_of, unfinished
from penstock.log_tools.timeline.read import window
from penstock.log_tools.timeline.request_timeline import PromptPrefilled, RequestTimeline, StageRun, TokensStored
from penstock.schemas import done, jobs
from penstock.schemas.done import Done
from penstock.schemas.jobs import rank_of
from penstock.schemas.requests import GenerateRequest, decode_head
from penstock.schemas.subjects import HEADER_LOAD
from penstock.schemas.summary import QUEUED, Criteria
from penstock.schemas.transfer import Prefilled
from penstock.schemas.wire import TOKEN_BYTES

LOOK_BACK_S = (5.0, 20.0, 120.0, 600.0)  # in turn, until as many others are found as the router had counted
MOST = 2_000  # other requests of a worker, or of a router
LATER_S = 60.0  # after a request's end, in which the files of a stopped deployment are searched for others' records
WAITED_NS = 2_000_000  # a request that was placed sooner was not held
SHOWN = 12

AHEAD, RUNNING, LATER, UNFINISHED = "ahead", "running", "later", "unfinished"
PARTS = {
    AHEAD: "came before it, and its prompt was not computed yet",
    RUNNING: "was generating when it came",
    LATER: "came after it",
    UNFINISHED: "has no record yet, which has its times",
}


class Neighbour(msgspec.Struct, frozen=True, omit_defaults=True):
    """Another request. Unix time in ns; 0: unknown.

    Attributes:
        part: one of ``PARTS``.
        to_compute: prompt tokens that were not in the cache.
        tokens: of its answer.
        since_ns: when its job was stored for the worker; of one that a router held: when it was accepted.
        until_ns: when it left the worker, or the router.
    """

    id: str
    tenant: str
    model: str
    priority: str
    part: str
    prompt_tokens: int = 0
    to_compute: int = 0
    tokens: int = 0
    since_ns: int = 0
    started_ns: int = 0
    first_token_ns: int = 0
    until_ns: int = 0


class BesideAtWorker(msgspec.Struct, frozen=True, omit_defaults=True):
    """At one worker, while the request was there.

    Attributes:
        first_token_ns: of this request at this worker; 0: none, or unknown.
        parts: number of other requests by their part.
        ahead_tokens: prompt tokens to compute of those ahead.
        counted_tokens: what the router had counted of these when it chose the worker; -1: its decision does not say.
        computed_tokens: prompt tokens of others that were computed from then to its first token, or to its end.
        generated_tokens: that others got while it was there.
        most: others that ran at once.
        by_tenant: number of other requests.
        requests: those with the most to compute first.
        older_unread: there may be others that came earlier than was looked for.
    """

    worker: str
    role: str
    attempt: int
    since_ns: int
    first_token_ns: int
    until_ns: int
    parts: dict[str, int] = {}
    ahead_tokens: int = 0
    counted_tokens: int = -1
    computed_tokens: int = 0
    generated_tokens: int = 0
    most: int = 0
    by_tenant: dict[str, int] = {}
    requests: tuple[Neighbour, ...] = ()
    older_unread: bool = False


class HeldByRouter(msgspec.Struct, frozen=True, omit_defaults=True):
    """In the router, while the request waited for a worker.

    Attributes:
        router: "": it waits now, and no router has said that it holds it.
        until_ns: when it was placed; 0: it was not.
        held: how many requests it held in the end; -1: its decision does not say.
        found: others that waited at the same time, in any router of the cell.
    """

    router: str
    attempt: int
    since_ns: int
    until_ns: int
    held: int = -1
    found: int = 0
    prompt_tokens: int = 0
    by_tenant: dict[str, int] = {}
    requests: tuple[Neighbour, ...] = ()


class Neighbours(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of one request."""

    workers: tuple[BesideAtWorker, ...] = ()
    routers: tuple[HeldByRouter, ...] = ()


def counts_only(neighbours: Neighbours) -> Neighbours:
    """Without ids and tenants: what one tenant may know of others."""
    return Neighbours(
        tuple(msgspec.structs.replace(each, by_tenant={}, requests=()) for each in neighbours.workers),
        tuple(msgspec.structs.replace(each, by_tenant={}, requests=()) for each in neighbours.routers),
    )


class _Stay(NamedTuple):
    """A stage of the request, as a period at a worker."""

    worker: str
    role: str
    attempt: int
    rank: int
    since_ns: int
    first_token_ns: int
    until_ns: int
    running: int  # sequences that the router had counted there; -1: unknown
    counted_tokens: int


class OtherJob(NamedTuple):
    """A job of another request, or its acceptance. The first four fields are those of ``Neighbour``.

    Attributes:
        asked: the requested model, whose fallback ``model`` may be.
        to_compute: by what the router knew.
    """

    id: str
    tenant: str
    model: str
    priority: str
    asked: str
    attempt: int
    prompt_tokens: int
    to_compute: int
    stored_ns: int
    handed: bool = False  # another worker computed its prompt


# --- pure ---


def stays(timeline: RequestTimeline) -> Iterator[_Stay]:
    """The request's periods at workers."""
    streamed: dict[tuple[int, str], int] = {}
    last_ns = 0
    for event in timeline.events():
        last_ns = max(last_ns, event.at_ns)
        if isinstance(event, TokensStored) and event.count:
            streamed.setdefault((event.attempt, event.worker), event.at_ns)
    stages = [stage for stage in timeline.stages if stage.worker]
    end = timeline.done.timings.ended_ns if timeline.done is not None else 0
    for stage, following in zip(stages, [*stages[1:], None], strict=False):
        candidate = next(
            (
                each
                for routed in timeline.routed
                if routed.attempt == stage.attempt
                for each in routed.decision.candidates
                if each.worker == stage.worker and not each.excluded and each.rank == _rank(timeline, stage)
            ),
            None,
        )
        yield _Stay(
            stage.worker,
            stage.role,
            stage.attempt,
            _rank(timeline, stage),
            stage.assigned_ns,
            _first_token(timeline, stage, following is None) or streamed.get((stage.attempt, stage.worker), 0),
            following.assigned_ns if following is not None else max(end or last_ns, stage.assigned_ns),
            candidate.running if candidate is not None else -1,
            candidate.prefill_tokens if candidate is not None else -1,
        )


def _rank(timeline: RequestTimeline, stage: StageRun) -> int:
    decision = next((each.decision for each in timeline.routed if each.attempt == stage.attempt), None)
    if decision is None:
        return 0
    return next((each.rank for each in decision.route if each.worker == stage.worker), decision.rank)


def _first_token(timeline: RequestTimeline, stage: StageRun, last: bool) -> int:
    if isinstance(stage.result, PromptPrefilled):
        return stage.result.first_token_ns
    return timeline.done.timings.first_token_ns if last and timeline.done is not None else 0


def beside(
    stay: _Stay, sent: Sequence[OtherJob], ends: Mapping[str, Done], *, older_unread: bool = False
) -> BesideAtWorker:
    """
    Args:
        sent: the other jobs of this worker (and rank), as far as they may have been there at the same time.
        ends: records by request.
    """
    found = [each for job in sent if (each := _neighbour(stay, job, ends.get(job.id))) is not None]
    found.sort(key=lambda each: (each.part != AHEAD, -each.to_compute, each.since_ns))
    until, left = stay.first_token_ns or stay.until_ns, stay.until_ns
    begun = [each for each in found if each.first_token_ns]

    def began(each: Neighbour) -> int:
        return each.started_ns or each.since_ns

    return BesideAtWorker(
        stay.worker,
        stay.role,
        stay.attempt,
        stay.since_ns,
        stay.first_token_ns,
        stay.until_ns,
        dict(Counter(each.part for each in found)),
        sum(each.to_compute for each in found if each.part == AHEAD),
        stay.counted_tokens,
        round(sum(each.to_compute * _share(began(each), each.first_token_ns, stay.since_ns, until) for each in begun)),
        round(sum(each.tokens * _share(each.first_token_ns, each.until_ns, stay.since_ns, left) for each in begun)),
        _most_at_once([(max(began(each), stay.since_ns), each.until_ns) for each in found]),
        _by_tenant(found),
        tuple(found),
        older_unread,
    )


def _neighbour(stay: _Stay, job: OtherJob, end: Done | None) -> Neighbour | None:
    """None: it was not there at the same time."""
    started = first = until = 0
    tokens, to_compute = 0, job.to_compute
    if end is not None:
        times = end.timings
        until = times.ended_ns
        if end.attempt > job.attempt:  # it went elsewhere: of this attempt its record has little
            until = min(until, times.routed_ns or until)
            first = times.streamed_ns if job.attempt == 1 else 0
        else:
            started, first, tokens = times.started_ns, times.first_token_ns, end.usage.completion
            to_compute = 0 if job.handed else max(0, job.prompt_tokens - end.usage.cached)
            if stay.role == "prefill" and first:
                until, tokens = first, 0  # others generate them
    if job.stored_ns >= stay.until_ns or (until and until <= stay.since_ns):
        return None
    if job.stored_ns > stay.since_ns:
        part = LATER
    elif end is None:
        part = UNFINISHED
    else:
        part = AHEAD if not first or first > stay.since_ns else RUNNING
    if job.handed and part == AHEAD:
        part = RUNNING
    started = max(started, job.stored_ns) if started else 0
    return Neighbour(*job[:4], part, job.prompt_tokens, to_compute, tokens, job.stored_ns, started, first, until)


def _by_tenant(found: Sequence[Neighbour]) -> dict[str, int]:
    return dict(Counter(each.tenant for each in found).most_common())


def _held_with(held: HeldByRouter, others: Iterable[Neighbour]) -> HeldByRouter:
    """What was held with a request, the earliest first; each request once."""
    found = sorted({each.id: each for each in others}.values(), key=lambda each: each.since_ns)
    tokens = sum(each.prompt_tokens for each in found)
    changes = {"found": len(found), "prompt_tokens": tokens, "by_tenant": _by_tenant(found)}
    return msgspec.structs.replace(held, **changes, requests=tuple(found[:MOST]))


def _share(begin: int, end: int, since: int, until: int) -> float:
    """The part of ``begin`` .. ``end`` that lies in ``since`` .. ``until``."""
    if end <= begin:
        return float(since <= end <= until)
    return max(0, min(end, until) - max(begin, since)) / (end - begin)


def _most_at_once(periods: Sequence[tuple[int, int]]) -> int:
    changes = [change for begin, end in periods for change in ((begin, 1), (end or 1 << 62, -1))]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


# --- from the log ---


async def read_neighbours(bus: Readable, timeline: RequestTimeline, *, stopped: bool = False) -> Neighbours:
    """
    Args:
        stopped: the log is of a deployment that does not run.
    Raises:
        ServingError: a stream cannot be read.
    """
    workers = [await _at_worker(bus, timeline.request_id, stay) for stay in stays(timeline)]
    routers = []
    if not timeline.stages and timeline.done is None:
        routers.append(await _waiting_now(bus, timeline, stopped))
    for routed in timeline.routed:
        decision = routed.decision
        if decision.waited_ns >= WAITED_NS:
            since = max(decision.at_ns - decision.waited_ns, timeline.request.created_ns)
            held = timeline.held.get(routed.attempt, -1)
            routers.append(
                await _in_router(
                    bus, timeline.request_id, HeldByRouter(decision.router, routed.attempt, since, decision.at_ns, held)
                )
            )
    return Neighbours(tuple(workers), tuple(routers))


async def _waiting_now(bus: Readable, timeline: RequestTimeline, stopped: bool) -> HeldByRouter:
    """Those that wait for a worker as this request does."""
    own, found = timeline.request, []
    for each in await unfinished(bus, Criteria(states=frozenset({QUEUED})), stopped=stopped):
        summary = each.summary
        if summary.id != own.id:
            part = AHEAD if summary.created_ns < own.created_ns else LATER
            named = (summary.id, summary.tenant, summary.model, summary.priority, part)
            found.append(Neighbour(*named, summary.prompt_tokens, since_ns=summary.created_ns))
    return _held_with(HeldByRouter("", 1, own.created_ns, 0), found)


async def _at_worker(bus: Readable, request_id: str, stay: _Stay) -> BesideAtWorker:
    subject = bus.subjects.work(stay.role, stay.worker)
    sent: list[OtherJob] = []
    ends: dict[str, Done] = {}
    until, since, complete = stay.until_ns, stay.since_ns, False
    for back_s in (0.0, *LOOK_BACK_S):
        earlier = int(stay.since_ns - back_s * 1e9)
        part = await _sent(bus, subject, stay.rank, earlier, until if not back_s else since)
        part = [each for each in part if each.id != request_id and not (back_s and each.stored_ns >= since)]
        sent, since = [*part, *sent], earlier
        ends |= await _ends(bus, part, earlier, stay.until_ns)
        before = [each for each in sent if each.stored_ns <= stay.since_ns]
        there = sum(1 for each in before if _neighbour(stay, each, ends.get(each.id)) is not None)
        complete = bool(back_s) and 0 <= stay.running <= there
        if complete or len(sent) >= MOST:
            break
    return beside(stay, sent[-MOST:], ends, older_unread=not complete)


async def _sent(bus: Readable, subject: str, rank: int, since_ns: int, until_ns: int) -> list[OtherJob]:
    found = []
    async with contextlib.aclosing(window(bus, "WORK", subject, since_ns, until_ns)) as entries:
        async for entry in entries:
            if entry.subject == subject and (job := _job(entry, rank)) is not None:
                found.append(job)
                if len(found) > 2 * MOST:
                    del found[:MOST]
    return found


def _job(entry: Entry, rank: int) -> OtherJob | None:
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        if (sent := job_in(entry.subject, entry.data)) is None or rank_of(sent[1]) != rank:
            return None
        message, job = sent
        asked = decode_head(bytes(job.request))
        tokens = asked.prompt_tokens + sum(len(part) // TOKEN_BYTES for part in job.resume)
        load = entry.headers.get(HEADER_LOAD, "")
        cached = jobs.read_load_header(load).cached_tokens if load else 0
        handed = isinstance(message, Prefilled)
        to_compute = 0 if handed else max(0, tokens - cached)
        return OtherJob(*_named(asked), job.attempt, tokens, to_compute, entry.time_ns, handed)
    return None


def _named(asked: GenerateRequest) -> tuple[str, str, str, str, str]:
    return asked.id, asked.tenant, asked.model, asked.priority.value, asked.recorded_under


async def _ends(bus: Readable, sent: Sequence[OtherJob], since_ns: int, until_ns: int) -> dict[str, Done]:
    """The records of these requests, by request."""
    wanted = {(each.tenant, each.asked, each.id) for each in sent}
    if not isinstance(bus, LogFiles):
        return {event.request: event async for event in records_of(bus, wanted)}
    # Files have no index of subjects.
    names, ends = {each.id for each in sent}, dict[str, Done]()
    subject, until_ns = bus.subjects.all("done"), until_ns + int(LATER_S * 1e9)
    async with contextlib.aclosing(read(bus, bus.subjects.stream("DONE"), subject, since_ns=since_ns)) as entries:
        async for entry in entries:
            if entry.subject.rpartition(".")[2] in names:
                with contextlib.suppress(msgspec.MsgspecError):
                    if isinstance(event := done.decode(entry.data), Done):
                        ends[event.request] = event
            if entry.time_ns > until_ns or len(ends) == len(names):
                break
    return ends


async def _in_router(bus: Readable, request_id: str, held: HeldByRouter) -> HeldByRouter:
    waiting: list[Neighbour] = []
    until, since = held.until_ns, held.since_ns
    for back_s in (0.0, *LOOK_BACK_S):
        earlier = int(held.since_ns - back_s * 1e9)
        part = [each async for each in _accepted(bus, earlier, until if not back_s else since) if each.id != request_id]
        ends = await _ends(bus, part, earlier, held.until_ns)
        waiting += [each for job in part if (each := _waiting(held, job, ends.get(job.id))) is not None]
        since = earlier
        if len(waiting) >= MOST or (back_s and len(waiting) >= held.held >= 0):
            break
    return _held_with(held, waiting)


async def _accepted(bus: Readable, since_ns: int, until_ns: int) -> AsyncIterator[OtherJob]:
    async with contextlib.aclosing(window(bus, "REQUESTS", bus.subjects.all("request"), since_ns, until_ns)) as entries:
        async for entry in entries:
            with contextlib.suppress(msgspec.MsgspecError):
                asked = decode_head(entry.data)
                if not asked.origin:
                    tokens, since_ns = asked.prompt_tokens, asked.created_ns or entry.time_ns
                    yield OtherJob(*_named(asked), 1, tokens, tokens, since_ns)


def _waiting(held: HeldByRouter, job: OtherJob, end: Done | None) -> Neighbour | None:
    """None: it did not wait at the same time, or that cannot be known."""
    if end is None:
        return None
    routed = (end.timings.routed_ns if end.attempt == 1 else 0) or (end.timings.ended_ns if not end.worker else 0)
    if job.stored_ns >= held.until_ns or routed <= max(held.since_ns, job.stored_ns + WAITED_NS):
        return None
    part = AHEAD if job.stored_ns < held.since_ns else LATER
    to_compute = max(0, job.prompt_tokens - end.usage.cached)
    sizes = job.prompt_tokens, to_compute, end.usage.completion
    return Neighbour(*job[:4], part, *sizes, job.stored_ns, until_ns=routed)


# --- on a terminal ---


def sentences(neighbours: Neighbours, begin_ns: int) -> Iterator[tuple[str, tuple[Neighbour, ...]]]:
    """A paragraph for each worker and router, with the requests that it is about.

    Args:
        begin_ns: what times are relative to.
    """

    def after(at_ns: int) -> str:
        return f"+{span((at_ns - begin_ns) / 1e6)}"

    for router in neighbours.routers:
        text = f"{router.router} held it from {after(router.since_ns)} to {after(router.until_ns)}"
        text = text if router.until_ns else "It waits for a worker"
        text += f", attempt {router.attempt}" if router.attempt > 1 else ""
        text += f"; in the end it held {counted(router.held, 'request')}" if router.held >= 0 else ""
        text += (
            f". {counted(router.found, 'other request')} {'waited at the same time' if router.until_ns else 'as well'}"
        )
        text += f", with {counted(router.prompt_tokens, 'prompt token')}" if router.found else ""
        yield f"{text}{_tenants(router.by_tenant)}.", router.requests
    for each in neighbours.workers:
        first = f" (its first token: {after(each.first_token_ns)})" if each.first_token_ns else ""
        text = f"{each.worker} had it from {after(each.since_ns)} to {after(each.until_ns)}{first}"
        text += f", attempt {each.attempt}" if each.attempt > 1 else ""
        yield f"{text}. {'. '.join(_of_worker(each))}{_tenants(each.by_tenant)}.{_cut(each)}", each.requests


def _of_worker(each: BesideAtWorker) -> Iterator[str]:
    """Sentences, without full stops."""
    ahead, running, later, unfinished = (each.parts.get(part, 0) for part in (AHEAD, RUNNING, LATER, UNFINISHED))
    if each.role != "decode":  # where prompts are computed
        text = f"Ahead: {counted(ahead, 'request')} with {counted(each.ahead_tokens, 'prompt token')} to compute"
        text += f" ({each.counted_tokens:,} by the router's count)" if each.counted_tokens >= 0 else ""
        yield text
        before = " before its first token" if each.first_token_ns else ""
        yield f"Meanwhile it computed {counted(each.computed_tokens, 'prompt token')} of others{before}"
    text = f"{running:,} were generating, {later:,} came later"
    text += f", {unfinished:,} have not ended" if unfinished else ""
    if each.generated_tokens:
        text += f"; about {counted(each.generated_tokens, 'token')} were generated for others"
    yield f"{text}; at most {counted(each.most, 'other')} at once"


def _cut(each: BesideAtWorker) -> str:
    return " Earlier ones may be missing." if each.older_unread else ""


def _tenants(by_tenant: Mapping[str, int]) -> str:
    named = [f"{count:,} of {name}" for name, count in list(by_tenant.items())[:5]]
    more = len(by_tenant) - len(named)
    return (f" ({', '.join(named)}" + (f", {more} more tenants" if more > 0 else "") + ")") if named else ""


_COLUMNS = (
    Column("request"),
    Column("tenant", 3),
    Column("class", 6),
    Column("", 4),
    Column("prompt", 5, right=True),
    Column("to compute", 2, right=True),
    Column("out", 7, right=True),
    Column("from", 1, right=True),
    Column("first token", 8, right=True),
    Column("until", 9, right=True),
)


def rows(requests: Sequence[Neighbour], begin_ns: int) -> list[tuple[str, ...]]:
    """Cells of a table, of the first ``SHOWN``."""

    def after(at_ns: int) -> str:
        sign = "+" if at_ns >= begin_ns else "-"
        return f"{sign}{span(abs(at_ns - begin_ns) / 1e6)}" if at_ns else ""

    return [
        (
            each.id,
            each.tenant,
            each.priority,
            each.part,
            f"{each.prompt_tokens:,}",
            f"{each.to_compute:,}",
            f"{each.tokens:,}" if each.until_ns else "",
            after(each.since_ns),
            after(each.first_token_ns),
            after(each.until_ns),
        )
        for each in requests[:SHOWN]
    ]


HEADINGS = tuple(column.name for column in _COLUMNS)
FIRST_NUMBER = next(at for at, column in enumerate(_COLUMNS) if column.right)


def show(neighbours: Neighbours, console: Console, begin_ns: int) -> None:
    console.print("[bold]beside it[/]")
    if not neighbours.workers and not neighbours.routers:
        console.print("no worker has had it yet, and no router held it\n")
    for text, requests in sentences(neighbours, begin_ns):
        console.print(escape(text), highlight=False)
        if requests:
            cells = [tuple(map(escape, row)) for row in rows(requests, begin_ns)]
            console.print(fitting_table(_COLUMNS, cells, console.width))
        if len(requests) > SHOWN:
            console.print(f"and {len(requests) - SHOWN:,} more: --json has them", style="dim", highlight=False)
        console.print()
