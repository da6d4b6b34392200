"""Everything in the log about one request, as data: what ``penstock inspect`` prints, draws and writes. Pure.

The structs are the JSON of ``penstock inspect --json``: fields are added, but neither renamed nor removed.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.cli.figures import counted
from penstock.infra.bus.direct_get import format_time
from penstock.log_tools.timeline.request_timeline import (
    AttemptReturned,
    AttemptRevoked,
    BlocksHandedOff,
    MediaEncoded,
    PromptPrefilled,
    RequestAccepted,
    RequestContinued,
    RequestDone,
    RequestQueued,
    RequestRouted,
    RequestTimeline,
    StageAssigned,
    TimelineEvent,
    TokensStored,
    TransferReported,
)
from penstock.log_tools.traces.spans import in_order, spans
from penstock.schemas.done import Done, request_of
from penstock.schemas.jobs import Candidate, EarlierWorker, LowerTiers, Move
from penstock.schemas.requests import GenerateRequest, cell_in
from penstock.schemas.summary import QUEUED, RUNNING, UNKNOWN, RequestSummary, of_done, of_request
from penstock.schemas.tokens import ANOTHER_MODEL, PROMPT, WHOLE_REQUEST
from penstock.schemas.transfer import PREFIX

if TYPE_CHECKING:  # few inspections have some, and it loads slowly
    from penstock.log_tools.requests.neighbours import Neighbours

MOST_LINES = 12  # of one worker in one attempt, besides the first and the ends
_SPANS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800)


class TokenLine(NamedTuple):
    """``at_ns``: of its last batch, by the broker's clock."""

    at_ns: int
    attempt: int
    where: str
    text: str


def token_lines(batches: Sequence[TokensStored]) -> list[TokenLine]:
    """Lines for the batches of a request, in their order in the log."""
    groups: dict[tuple[int, str], list[TokensStored]] = {}
    lines = []
    late: dict[tuple[int, str], list[TokensStored]] = {}
    newest = 0
    for each in batches:
        newest = max(newest, each.attempt)
        if each.choice == WHOLE_REQUEST and not each.count:
            end = f"ends all choices: {each.finish}" if each.finish else f"attempt {each.attempt - 1} ends here"
            lines.append(TokenLine(each.at_ns, each.attempt, each.worker, end))
        elif each.choice == ANOTHER_MODEL:
            lines.append(TokenLine(each.at_ns, each.attempt, each.worker, f"fallback {each.first} runs it"))
        elif each.attempt < newest:
            late.setdefault((each.attempt, each.worker), []).append(each)
        else:
            groups.setdefault((each.attempt, each.worker), []).append(each)
    for group in groups.values():
        lines += _of_worker(group)
    for (attempt, worker), group in late.items():
        count = _tokens(sum(each.count for each in group))
        batches_of = f" in {len(group)} batches" if len(group) > 1 else ""
        lines.append(TokenLine(group[0].at_ns, attempt, worker, f"{count}{batches_of}, void: too late"))
    return sorted(lines, key=lambda line: line.at_ns)


def _of_worker(group: Sequence[TokensStored]) -> Iterator[TokenLine]:
    first, *others = group
    yield _line([first], 0)
    span_ns = _span_ns(group[-1].at_ns - first.at_ns)
    part: list[TokensStored] = []
    since = first.at_ns
    for each in others:
        if part and (each.at_ns - since > span_ns or each.choice == PROMPT):
            yield _line(part, since)
            since, part = part[-1].at_ns, []
        part.append(each)
    if part:
        yield _line(part, since)


def _span_ns(whole_ns: int) -> int:
    fitting = (span for span in _SPANS_S if whole_ns <= span * 1e9 * MOST_LINES)
    return int(next(fitting, whole_ns / 1e9 / MOST_LINES) * 1e9)


def _line(part: Sequence[TokensStored], since_ns: int) -> TokenLine:
    last, first = part[-1], part[0]
    count = sum(each.count for each in part if each.choice != PROMPT)
    took = (last.at_ns - since_ns) / 1e9 if since_ns else 0.0
    choices = sorted({each.choice for each in part})
    what = f"scores of {first.count} prompt tokens" if choices == [PROMPT] else _tokens(count)
    where = f"choice {choices[0]}: " if len(choices) == 1 and choices[0] >= 0 else ""
    text = f"{where}{what}" + (f" from {first.first}" if where and count else "")
    text += f" in {took * 1e3:.0f} ms ({count / took:.0f}/s)" if took and count else ""
    ends = [each for each in part if each.finish]
    text += "".join(f", choice {each.choice} {each.finish}" if not where else f", {each.finish}" for each in ends)
    return TokenLine(last.at_ns, last.attempt, last.worker, text)


def _tokens(count: int) -> str:
    return f"{count} token" + ("" if count == 1 else "s") if count else "no tokens"


class Phase(msgspec.Struct, frozen=True):
    """A part of the request's time. ``depth`` 0: all of it; deeper ones lie within the one above.

    ``service``: "gateway", "router" or "worker"; ``where``: which one. Unix time in ns.
    """

    name: str
    depth: int
    service: str
    where: str
    start_ns: int
    end_ns: int
    attempt: int = 0
    error: str = ""


def phases(timeline: RequestTimeline, events: Sequence[TimelineEvent]) -> Iterator[Phase]:
    """The request's phases, depth first: its spans, and the periods in which tokens were stored."""
    all_spans = spans(timeline)
    if timeline.done is None:  # a running request has come as far as its last token
        last = max(event.at_ns for event in events)
        worker = timeline.stages[-1].worker if timeline.stages else ""
        for span in all_spans:
            if span is all_spans[0] or span.instance == worker:
                span.end_ns = max(span.end_ns, last)
    made = [
        Phase(
            "request" if depth == 0 else span.name,
            depth,
            span.service,
            span.instance,
            span.start_ns,
            span.end_ns,
            attempt if isinstance(attempt := span.attributes.get("penstock.attempt", 0), int) else 0,
            span.error or "",
        )
        for depth, span in in_order(all_spans)
    ]
    streamed: dict[tuple[int, str], list[int]] = {}
    for event in events:
        if isinstance(event, TokensStored) and event.count:
            streamed.setdefault((event.attempt, event.worker), []).append(event.at_ns)
    for place, phase in enumerate(made):
        yield phase
        if not any(_of(each) == _of(phase) for each in made[place + 1 :]) and phase.depth:
            yield from _generated(made, phase, streamed.get(_of(phase), []))


def _of(phase: Phase) -> tuple[int, str]:
    return phase.attempt, phase.where


def _generated(made: Sequence[Phase], last: Phase, streamed: Sequence[int]) -> Iterator[Phase]:
    """The period after a worker's ``last`` phase in which it streamed tokens, if no message has its times."""
    own = [each for each in made if _of(each) == _of(last)]
    if len(streamed) > 1 and not any(each.name in ("generate", "first token") for each in own):
        first, until = streamed[0], min(streamed[-1], own[0].end_ns)
        yield Phase("generate", 2, last.service, last.where, first, max(first, until), last.attempt)


class InspectedEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event, as text. ``penstock.log_tools.timeline.request_timeline`` says whose clock ``at_ns`` is from.

    For a routing decision, ``candidates`` is its score table, and ``decided_at`` the stream sequences it was based on.
    """

    at_ns: int
    kind: str
    text: str
    attempt: int = 0
    where: str = ""
    candidates: tuple[Candidate, ...] = ()
    chosen: tuple[str, ...] = ()
    decided_at: dict[str, int] = {}
    lower_tiers: tuple[LowerTiers, ...] = ()
    move: Move | None = None

    def read(self, candidate: Candidate) -> str:
        """What a candidate was to read of the prompt from another worker: blocks that it lacks, and from whom."""
        if self.move is None or target(candidate.worker, candidate.rank) != self.chosen[0]:
            return ""
        return f"{self.move.blocks - candidate.overlap_blocks} from {self.move.source}"

    def brought_back(self, candidate: Candidate) -> str:
        """Which of its overlapping blocks a candidate would bring back from lower tiers, and at what cost each."""
        for each in self.lower_tiers:
            if (each.worker, each.rank) == (candidate.worker, candidate.rank):
                host = f"{each.host_blocks} host × {each.host_cost:.2g}" if each.host_blocks else ""
                disk = f"{each.disk_blocks} disk × {each.disk_cost:.2g}" if each.disk_blocks else ""
                return ", ".join(filter(None, (host, disk)))
        return ""


def line_of(entry: InspectedEvent) -> str:
    """An event as one line: with the process in front, unless the text names it."""
    named = entry.where in entry.text.replace(",", " ").split()
    return entry.text if named or not entry.where else f"{entry.where}: {entry.text}"


class Content(msgspec.Struct, frozen=True, omit_defaults=True):
    """Prompt and answers, as text or as token ids, if the caller wanted them."""

    prompt: str | None = None
    answers: tuple[str, ...] = ()
    prompt_tokens: tuple[int, ...] = ()
    answer_tokens: tuple[tuple[int, ...], ...] = ()


class Inspection(msgspec.Struct, frozen=True, omit_defaults=True):
    """``missing`` has one sentence for each part that the log does not have, with the reason."""

    request: RequestSummary
    gateway: str
    max_tokens: int
    choices: int
    phases: tuple[Phase, ...]
    events: tuple[InspectedEvent, ...]
    missing: tuple[str, ...] = ()
    content: Content = Content()
    neighbours: "Neighbours | None" = None  # None: they were not read


def inspect(timeline: RequestTimeline, *, with_tokens: bool = True) -> Inspection:
    """Inspect a request, which may still be running.

    Args:
        with_tokens: TOKENS was read, so that missing batches are reported.
    Raises:
        ValueError: the timeline has no request.
    """
    request, done = timeline.request, timeline.done
    summary = of_done(done) if done is not None else _unfinished(timeline)
    if not summary.priority:  # a record without its request
        summary = msgspec.structs.replace(
            summary,
            priority=request.priority.value,
            tenant=request.tenant,
            endpoint=request.endpoint,
            created_ns=summary.created_ns or request.created_ns,
        )
    if not summary.revision:  # an older build's record
        summary = msgspec.structs.replace(summary, revision=_revision(timeline))
    if summary.sampling is None:
        summary = msgspec.structs.replace(summary, sampling=request.sampling, adapter=request.lora)
    if done is not None and done.timings.made_with is not None:
        summary = msgspec.structs.replace(summary, before=done.timings.made_with.before)
    if done is not None and not summary.earlier_workers:  # an older release's record
        summary = msgspec.structs.replace(summary, earlier_workers=_earlier_workers(timeline))
    events = timeline.events()
    return Inspection(
        summary,
        request.gateway,
        request.stop.max_tokens,
        request.n,
        tuple(phases(timeline, events)),
        tuple(_entries(timeline, events)),
        tuple(_missing(timeline, with_tokens)),
    )


def _unfinished(timeline: RequestTimeline) -> RequestSummary:
    request = timeline.request
    if not timeline.stages:
        return of_request(request, state=UNKNOWN if timeline.lost_end else QUEUED)
    last = timeline.stages[-1]
    routed = timeline.routed[-1].at_ns if timeline.routed else 0
    return of_request(
        request,
        state=UNKNOWN if timeline.lost_end else RUNNING,
        attempt=last.attempt,
        worker=last.worker,
        routed_ns=routed,
        earlier_workers=_earlier_workers(timeline),
        revision=_revision(timeline),
        router=timeline.routed[-1].decision.router if timeline.routed else "",
    )


def _revision(timeline: RequestTimeline) -> str:
    """Of the last decision; "": the log has none."""
    return timeline.routed[-1].decision.revision if timeline.routed else ""


def _earlier_workers(timeline: RequestTimeline) -> tuple[EarlierWorker, ...]:
    """From the jobs, also of a request whose record does not name them."""
    reasons = {routed.attempt - 1: routed.decision.reason for routed in timeline.routed if routed.attempt > 1}
    stages = [stage for stage in timeline.stages if stage.worker]
    last = len(stages) if timeline.done is not None and not timeline.done.worker else len(stages) - 1
    return tuple(
        EarlierWorker(each.attempt, each.worker, "" if each.result else reasons.get(each.attempt, ""))
        for each in stages[: max(0, last)]
    )


# --- events ---


def _entries(timeline: RequestTimeline, events: Sequence[TimelineEvent]) -> Iterator[InspectedEvent]:
    lines = [entry for event in events if not isinstance(event, TokensStored) for entry in _entry(timeline, event)]
    for at_ns, attempt, where, text in token_lines([each for each in events if isinstance(each, TokensStored)]):
        lines.append(InspectedEvent(at_ns, "tokens", text, attempt, where))
    last = RequestDone.__struct_config__.tag
    yield from sorted(lines, key=lambda each: (each.kind == last, each.kind != "accepted" and each.at_ns))


def _entry(timeline: RequestTimeline, event: TimelineEvent) -> Iterator[InspectedEvent]:
    kind = str(event.__struct_config__.tag)
    match event:
        case RequestAccepted():
            yield InspectedEvent(event.at_ns, kind, _accepted(event), where=event.request.gateway)
        case RequestQueued():
            yield InspectedEvent(event.at_ns, kind, "looks for a worker", event.attempt, event.router)
        case RequestRouted():
            yield _routed(event, kind)
        case RequestContinued():
            same = event.previous_worker == event.worker
            before = " again" if same else f" instead of {event.previous_worker}" if event.previous_worker else ""
            after = f", after {counted(event.resumed_tokens, 'token')}" if event.resumed_tokens else ""
            text = f"{event.worker} continues{before}{after}: {event.reason}"
            yield InspectedEvent(event.at_ns, kind, text, event.attempt)
        case StageAssigned():
            yield InspectedEvent(
                event.at_ns, kind, f"{event.role} queued at {event.worker}", event.attempt, event.worker
            )
        case MediaEncoded():
            yield InspectedEvent(
                event.at_ns, kind, f"media encoded{_took(event.started_ns, event.at_ns)}", event.attempt, event.worker
            )
        case PromptPrefilled():
            took = _took(event.started_ns, event.first_token_ns)
            text = f"prompt computed{took}, {counted(event.cached_tokens, 'token')} cached"
            yield InspectedEvent(event.at_ns, kind, text, event.attempt, event.worker)
        case BlocksHandedOff():
            yield InspectedEvent(event.at_ns, kind, _handed_off(event), event.attempt, event.source)
        case TransferReported():
            line = event.line
            blocks = counted(line.blocks, "block")
            amount = f", {blocks}, {line.bytes / 2**20:.2f} MiB" if line.bytes or line.blocks else ""
            took = f" in {line.seconds * 1e3:.1f} ms" if line.seconds else ""
            why = f": {line.cause} {line.message}".rstrip() if line.cause else ""
            if line.state == "read" and line.ticket.endswith(f":{PREFIX}"):
                amount += f" of the cache of {line.source}"
                took += f", {line.message}" if line.message else ""
            by = line.target if line.state in ("leased", "read", "failed", "quarantined", "settled") else line.source
            yield InspectedEvent(event.at_ns, kind, f"{line.state}{amount}{took}{why}", _attempt(line.ticket), by)
        case AttemptReturned():
            text = f"{event.worker} {'ended while it ran it' if event.crashed else 'returned it'} ({event.reason})"
            yield InspectedEvent(event.at_ns, kind, text, event.attempt, event.worker)
        case AttemptRevoked():
            yield InspectedEvent(event.at_ns, kind, f"revoked at {event.worker}", event.attempt, event.worker)
        case RequestDone():
            yield InspectedEvent(
                event.at_ns, kind, _ended(event.done, timeline.request), event.done.attempt, event.done.worker
            )


def _accepted(event: RequestAccepted) -> str:
    request = event.request
    if request.no_store and not request.prompt:
        tokens = f" of {counted(request.prompt_tokens, 'token')}" if request.prompt_tokens else ""
        return (
            f"prompt{tokens} not kept (no_store), at most {request.stop.max_tokens} out, class {request.priority.value}"
        )
    blocks = counted(event.prompt_blocks, "full block")
    text = f"prompt {counted(event.prompt_tokens, 'token')} ({blocks} of {request.block_size}), "
    text += f"at most {request.stop.max_tokens} out, class {request.priority.value}"
    text += f", {request.n} choices" if request.n > 1 else ""
    return text + (f", {event.media} media" if event.media else "")


def _routed(event: RequestRouted, kind: str) -> InspectedEvent:
    decision = event.decision
    stages = [(stage.role, target(stage.worker, stage.rank)) for stage in decision.route]
    where = " → ".join(f"{role} {name}" for role, name in stages) or target(decision.chosen, decision.rank) or "-"
    text = f"in mode {decision.mode} to {where}, after waiting {decision.waited_ns / 1e6:.1f} ms"
    text += f", resuming after {counted(event.resumed_tokens, 'token')}" if event.resumed_tokens else ""
    text += f" ({decision.reason})" if decision.reason not in ("", "new") else ""
    text += f"; {decision.how}" if decision.how else ""
    move = decision.route[0].move if decision.route else None
    if move is not None:
        text += f"; of {counted(decision.prompt_blocks, 'block')} {move.blocks} are at {move.source} {move.path}"
    return InspectedEvent(
        event.at_ns,
        kind,
        text,
        event.attempt,
        decision.router,
        decision.candidates,
        tuple(name for _, name in stages) or (target(decision.chosen, decision.rank),),
        {
            "prompt_blocks": decision.prompt_blocks,
            "kv_seq": decision.kv_seq,
            "work_seq": decision.work_seq,
            "done_seq": decision.done_seq,
        },
        event.lower_tiers,
        move,
    )


def target(worker: str, rank: int) -> str:
    """A routing target as it is shown."""
    return f"{worker}/{rank}" if rank else worker


def _handed_off(event: BlocksHandedOff) -> str:
    what = "KV" if event.pool == "kv" else "embeddings"
    size = f" ({event.bytes / 2**20:.2f} MiB)" if event.bytes else ""
    return (
        f"handed {what} to {event.target_role} {event.target}: {counted(event.blocks, 'block')}{size} "
        f"of pool {event.pool} over {event.backend}, lease of {(event.lease_ns - event.at_ns) / 1e9:.1f} s, "
        f"ticket {event.ticket}"
    )


def _ended(done: Done, request: GenerateRequest) -> str:
    usage = done.usage
    verdict = f"with {done.code}" if done.code else "ok"
    recorded = request_of(done)
    where = f" in cell {cell_in(recorded.ran_as)} as {recorded.ran_as}" if recorded and recorded.ran_as else ""
    text = f"ended {verdict} on attempt {done.attempt} at {done.worker or 'the router'}{where}: "
    if request.diffusion is not None:
        files = ", ".join(file.name for choice in done.choices for file in choice.files) or "no files"
        text += f"{usage.completion} denoising steps, {files}"
    elif request.embedding is not None:
        floats = sum(len(choice.tokens) // 4 - 1 for choice in done.choices if choice.tokens)
        dimensions = request.embedding.dimensions
        vectors = f"{counted(floats // dimensions, 'vector')} of {dimensions}"
        made = counted(floats, "score") if request.embedding.scores else vectors
        text += f"input {counted(usage.prompt, 'token')}, {made}"
    else:
        reasons = ",".join(choice.reason for choice in done.choices)
        text += (
            f"prompt {counted(usage.prompt, 'token')} ({usage.cached} from the cache), output {usage.completion} tokens"
        )
        text += f" ({reasons})" if reasons else ""
    return text + (f"; {done.message}" if done.message else "")


def _took(start_ns: int, end_ns: int) -> str:
    return f" in {(end_ns - start_ns) / 1e6:.1f} ms" if start_ns and end_ns >= start_ns else ""


def _attempt(ticket: str) -> int:
    number = ticket.split(":")[1] if ticket.count(":") > 1 else ""
    return int(number) if number.isdigit() else 0


# --- what is not there ---


def _reach(timeline: RequestTimeline, stream: str, kept: str, *, recorded: bool = True) -> str:
    """How far back a stream reaches that lacks a request's messages, and what it keeps.

    Args:
        recorded: ``penstock up --record`` makes it keep more.
    """
    kept += " (7 days with `penstock up --record`)" if recorded else ""
    limit = f"it keeps them {kept}, or until it is full"
    begin_ns = timeline.begins.get(stream, 0)
    begin = f"reaches back to {format_time(begin_ns)[:-7]}Z only" if begin_ns else "is empty"
    return f"{stream} {begin}; {limit} (`penstock streams set {stream}`)"


def _missing(timeline: RequestTimeline, with_tokens: bool) -> Iterator[str]:
    done = timeline.done
    if timeline.damaged:
        yield f"messages about it that are damaged on the disk are left out: {', '.join(timeline.damaged)}"
    if timeline.lost_end:
        yield timeline.lost_end
    if done is not None and timeline.request.no_store:
        yield (
            "it was made with no_store: what was said was in memory only, and was deleted soon after its end; "
            f"the record lacks: {', '.join(done.left_out)}"
        )
        return
    if not timeline.routed:
        if done is None:
            waits = "no router has placed it yet: `penstock doctor` says whether a router or a worker is missing"
            yield waits if not timeline.lost_end else "its jobs, if a router has placed it"
        elif done.worker:
            yield f"its jobs are gone: {_reach(timeline, 'WORK', 'for a day')}"
        else:
            yield "no router placed it"
    stored = sum(event.count for event in timeline.events() if isinstance(event, TokensStored))
    if with_tokens and done is not None and 0 < stored < done.usage.completion:
        yield f"some of its token batches are missing: they have {stored} of {done.usage.completion} tokens"
    if with_tokens and done is not None and done.usage.completion and not stored:
        yield f"its token batches are gone: {_reach(timeline, 'TOKENS', 'for an hour')}"
    offers = {event.ticket for event in timeline.events() if isinstance(event, BlocksHandedOff)}
    if offers - {line.ticket for line in timeline.handoffs}:
        yield "the ledger has nothing about its handoffs: HANDOFF keeps an hour"
    if done is not None and timeline.request.prompt_length:
        yield f"its prompt is gone: {_reach(timeline, 'REQUESTS', 'for 7 days', recorded=False)}"
    if done is not None and (lacks := [name for name in done.left_out if name != "prompt"]):
        yield f"its record was too large for a message and lacks: {', '.join(lacks)}"
