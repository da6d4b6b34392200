"""A request's timeline on a terminal: decisions with their score tables, handoffs, stages, the end."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from infra.timeline.events import (
    AttemptReturned,
    AttemptRevoked,
    BlocksHandedOff,
    PromptPrefilled,
    RequestRouted,
    TokensStored,
)
from infra.timeline.request_timeline import RequestTimeline
from schemas import jobs
from schemas.done import Done
from schemas.requests import GenerateRequest
from schemas.tokens import PROMPT, WHOLE_REQUEST
from schemas.transfer import Handoff


def show(timeline: RequestTimeline, console: Console) -> None:
    """Print a timeline whose request is known, as ``read_timeline`` returns it."""
    _show_request(timeline, console)
    for event in timeline.events():
        match event:
            case RequestRouted():
                _show_decision(event, console)
            case AttemptRevoked():
                console.print(f"attempt {event.attempt}: revoked at {event.worker}")
            case AttemptReturned():
                console.print(f"attempt {event.attempt}: {event.worker} returned it ({event.reason})")
            case BlocksHandedOff():
                _show_handoff(event, console)
                _show_transfers(timeline.transfers(event.ticket), console)
            case TokensStored():
                _show_tokens(event, timeline.request, console)
            case _:  # printed with the events above, or below
                pass
    if any(routed.decision.route for routed in timeline.routed):
        _show_stages(timeline, console)
    if timeline.done is not None:
        _show_end(timeline.done, timeline.request, console)
    if not timeline.routed:
        console.print("no router has placed it" if timeline.done is not None else "no router has placed it yet")


def _show_request(timeline: RequestTimeline, console: Console) -> None:
    request, accepted = timeline.request, timeline.accepted
    assert accepted is not None
    console.print(
        f"[bold]{request.id}[/]  model {request.model}  class {request.priority.value}  via {request.gateway}"
    )
    console.print(
        f"prompt {accepted.prompt_tokens} tokens ({accepted.prompt_blocks} full blocks of {request.block_size}), "
        f"at most {request.stop.max_tokens} out, n={request.n}"
    )


def _show_decision(routed: RequestRouted, console: Console) -> None:
    decision = routed.decision
    console.print(
        f"\nattempt {routed.attempt} ({decision.reason or 'new'}): router {decision.router} in mode {decision.mode} "
        f"chose [bold green]{decision.chosen or '-'}[/] after waiting {decision.waited_ns / 1e6:.1f} ms"
        + (f", resuming behind {routed.resumed_tokens} tokens" if routed.resumed_tokens else "")
    )
    console.print(
        f"index at KV sequence {decision.kv_seq}, load at WORK {decision.work_seq} / DONE {decision.done_seq}"
    )
    route = decision.route or (jobs.Stage("", decision.chosen, decision.rank),)
    if decision.route:
        console.print("route: " + " → ".join(f"{stage.role} {_target(stage.worker, stage.rank)}" for stage in route))
    if decision.how:
        console.print(f"why: {decision.how}")
    console.print(_score_table(decision, {(stage.worker, stage.rank) for stage in route}))


def _score_table(decision: jobs.Decision, chosen: set[tuple[str, int]]) -> Table:
    table = Table("worker", "score", "overlap blocks", "active blocks", "prefill tokens", "running", "excluded")
    roles = any(candidate.role for candidate in decision.candidates)
    if roles:
        table.add_column("stage")
    for candidate in decision.candidates:
        name = _target(candidate.worker, candidate.rank)
        table.add_row(
            f"[bold green]{name}[/]" if (candidate.worker, candidate.rank) in chosen else name,
            "" if candidate.excluded else f"{candidate.score:.2f}",
            f"{candidate.overlap_blocks}/{decision.prompt_blocks}",
            str(candidate.active_blocks),
            str(candidate.prefill_tokens),
            f"{candidate.running}/{candidate.slots}",
            candidate.excluded,
            *([candidate.role or "all"] if roles else ()),
        )
    return table


def _target(worker: str, rank: int) -> str:
    return f"{worker}/{rank}" if rank else worker


def _show_handoff(event: BlocksHandedOff, console: Console) -> None:
    what = "KV" if event.pool == "kv" else "embeddings"
    size = f" ({event.bytes / 2**20:.2f} MiB)" if event.bytes else ""
    console.print(
        f"\nattempt {event.attempt}: {event.source} handed {what} to {event.target_role} {event.target}: "
        f"ticket {event.ticket}, {event.blocks} blocks{size} of pool {event.pool} over {event.backend}, "
        f"lease of {(event.lease_ns - event.at_ns) / 1e9:.1f} s"
    )


def _show_transfers(lines: Sequence[Handoff], console: Console) -> None:
    start = lines[0].at_ns if lines else 0
    for line in lines:
        amount = f", {line.blocks} blocks, {line.bytes / 2**20:.2f} MiB" if line.bytes or line.blocks else ""
        took = f" in {line.seconds * 1e3:.1f} ms" if line.seconds else ""
        why = f": {line.cause} {line.message}".rstrip() if line.cause else ""
        console.print(f"  +{(line.at_ns - start) / 1e6:.1f} ms {line.state}{amount}{took}{why}")


def _show_tokens(event: TokensStored, request: GenerateRequest, console: Console) -> None:
    noun = "token" if event.count == 1 else "tokens"
    what = f"{event.count} {noun} from {event.first}" if event.count else "no tokens"
    choice = {PROMPT: "prompt scores", WHOLE_REQUEST: "all choices"}.get(event.choice, f"choice {event.choice}")
    end = f", {event.finish}" if event.finish else ""
    console.print(f"  {_offset(request, event.at_ns)} attempt {event.attempt}: {event.worker} {choice}: {what}{end}")


def _show_stages(timeline: RequestTimeline, console: Console) -> None:
    """When each stage got the request, and how long it had it: from the times stored in WORK, and the end."""
    ended = timeline.done.timings.ended_ns if timeline.done is not None else 0
    table = Table("attempt", "stage", "worker", "assigned", "began", "first token", "handed off")
    for stage in timeline.stages:
        result = stage.result
        began = result.started_ns if result is not None else 0
        first = result.first_token_ns if isinstance(result, PromptPrefilled) else 0
        until = result.at_ns if result is not None else ended if stage is timeline.stages[-1] else 0
        marks = [_offset(timeline.request, at) for at in (stage.assigned_ns, began, first, until)]
        table.add_row(str(stage.attempt), stage.role, stage.worker, *marks)
    console.print(table)


def _offset(request: GenerateRequest, at_ns: int) -> str:
    return f"+{(at_ns - request.created_ns) / 1e6:.1f} ms" if at_ns else ""


def _show_end(end: Done, request: GenerateRequest, console: Console) -> None:
    times, usage = end.timings, end.usage
    verdict = f"[red]{end.code}[/]: {end.message}" if end.code else "[green]ok[/]"
    console.print(f"\nended {verdict} on attempt {end.attempt} at {end.worker or 'the router'}")
    if request.diffusion is not None:
        files = ", ".join(file.name for choice in end.choices for file in choice.files) or "no files"
        console.print(f"{request.diffusion.kind}: {usage.completion} denoising steps, {files}")
    else:
        console.print(f"prompt {usage.prompt} tokens ({usage.cached} from the cache), output {usage.completion} tokens")
    marks = [("routed", times.routed_ns), ("started", times.started_ns), ("first token", times.first_token_ns)]
    marks.append(("ended", times.ended_ns))
    console.print("  ".join(f"{name} {_offset(request, at)}" for name, at in marks if at))
