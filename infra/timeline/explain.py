"""``penstock explain REQUEST_ID``: where a request went and why, from the log alone."""

import argparse
import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from infra.bus.connection import Bus, connect
from infra.bus.direct_get import Entry, get_last, read
from infra.terminal import stdout
from schemas import done, jobs, requests
from schemas.errors import ServingError
from schemas.ids import time_of
from schemas.jobs import Decision, Job, Revoke, WorkMessage
from schemas.requests import GenerateRequest
from schemas.streams import CLOCK_SKEW_NS
from schemas.subjects import HEADER_MSG_ID, KEPT
from schemas.transfer import Encoded, HandOff, Prefilled, decode_ledger

CONNECT_S = 3.0  # somebody is waiting at a terminal


class Given(NamedTuple):
    """One message in WORK: what a worker was told, and when the server stored it."""

    worker: str
    role: str
    at_ns: int
    message: WorkMessage


class Story:
    """Everything the log says of one request."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.work: list[Given] = []
        self.ledger: list[HandOff] = []
        self.ends: list[done.Done | done.Returned] = []
        self.ended_ns: list[int] = []  # when the server stored each

    @property
    def jobs(self) -> list[Job]:
        """As the routers published them."""
        return [given.message for given in self.work if isinstance(given.message, Job)]


async def story(bus: Bus, request_id: str) -> Story:
    """Read a request's events.

    Raises:
        ValueError: not a request id, or nothing is known of it.
    """
    since = time_of(request_id) - CLOCK_SKEW_NS
    subjects = bus.subjects
    last = await get_last(bus, subjects.stream("DONE"), subjects.done_of(request_id))
    request = await _request(bus, request_id, since, last)
    if request is None:
        raise ValueError(f"no request {request_id} in the log; it keeps a day, and its record a week")
    found = Story(request)
    if last is None:  # it runs, or ended under a release up to 0.1
        async for entry in read(bus, subjects.stream("DONE"), subjects.done_together(request.model), since_ns=since):
            if entry.headers.get(HEADER_MSG_ID) == request_id:
                last = entry
                break
    async for entry in read(bus, subjects.stream("DONE"), subjects.all("returned"), since_ns=since):
        if last is not None and entry.time_ns > last.time_ns:
            break
        if entry.headers.get(HEADER_MSG_ID, "").startswith(request_id):
            found.ends.append(done.decode(entry.data))
            found.ended_ns.append(entry.time_ns)
    if last is not None:
        found.ends.append(done.decode(last.data))
        found.ended_ns.append(last.time_ns)
    ended_ns = found.ends[-1].timings.ended_ns if found.ends and isinstance(found.ends[-1], done.Done) else 0
    until_ns = ended_ns + CLOCK_SKEW_NS if ended_ns else 0
    async for entry in read(bus, subjects.stream("WORK"), subjects.all("work"), since_ns=since):
        name = entry.headers.get(HEADER_MSG_ID, "")
        if name.startswith(request_id) and KEPT not in name.split(":"):
            role, worker = entry.subject.split(".")[-2:]
            found.work.append(Given(worker, role, entry.time_ns, jobs.decode(entry.data)))
        elif until_ns and entry.time_ns > until_ns:
            break
    if any(isinstance(given.message, Encoded | Prefilled) for given in found.work):
        found.ledger = await _ledger(bus, request_id, since, until_ns)
    return found


async def _request(bus: Bus, request_id: str, since: int, last: Entry | None) -> GenerateRequest | None:
    """From its record, if it is over, or its place in REQUESTS."""
    event = done.decode(last.data) if last is not None else None
    if isinstance(event, done.Done) and event.submitted and "prompt" not in event.left_out:
        return done.request_of(event)
    subjects = bus.subjects
    for subject in (subjects.shard_of(request_id), subjects.unsharded):
        async for entry in read(bus, subjects.stream("REQUESTS"), subject, since_ns=since):
            if entry.headers.get(HEADER_MSG_ID) == request_id:
                return requests.decode(entry.data)
    return done.request_of(event) if isinstance(event, done.Done) else None


async def _ledger(bus: Bus, request_id: str, since: int, until_ns: int) -> list[HandOff]:
    """What the workers say of this request's tickets; nothing if there is no such stream."""
    subjects, found = bus.subjects, []
    with contextlib.suppress(ServingError):
        async for entry in read(bus, subjects.stream("HANDOFF"), subjects.all("handoff"), since_ns=since):
            if until_ns and entry.time_ns > until_ns:
                break
            with contextlib.suppress(msgspec.MsgspecError):
                events = decode_ledger(entry.data).events
                found += [event for event in events if event.ticket.startswith(request_id)]
    return sorted(found, key=lambda event: event.at_ns)


def show(told: Story, console: Console) -> None:
    """Print the story: request, decisions with their score tables, ends."""
    request = told.request
    console.print(
        f"[bold]{request.id}[/]  model {request.model}  class {request.priority.value}  via {request.gateway}"
    )
    console.print(
        f"prompt {len(request.prompt) // 4} tokens ({len(request.digests) // 16} full blocks of {request.block_size}), "
        f"at most {request.stop.max_tokens} out, n={request.n}"
    )
    for given in told.work:
        message = given.message
        if isinstance(message, Job):
            _show_decision(message, message.decision, console)
        elif isinstance(message, Revoke):
            console.print(f"attempt {message.attempt}: {given.worker} was told to drop it")
        else:
            _show_hand_over(message, given, console)
            _show_ledger([event for event in told.ledger if event.ticket == message.ticket.id], message, console)
    if any(job.route for job in told.jobs):
        _show_stages(told, console)
    for end in told.ends:
        _show_end(end, request, console)
    if not told.jobs:
        console.print("no router has placed it yet")


def _show_hand_over(message: Encoded | Prefilled, given: Given, console: Console) -> None:
    """The ticket under which a worker offers what it has made to the next one."""
    ticket = message.ticket
    blocks = len(ticket.blocks) // 4
    pool = ticket.endpoint.pools.get(ticket.pool)
    size = f" ({blocks * pool.block_bytes / 2**20:.2f} MiB)" if pool is not None else ""
    what = "embeddings" if isinstance(message, Encoded) else "KV"
    left = (ticket.lease_ns - given.at_ns) / 1e9
    console.print(
        f"\nattempt {message.attempt}: {ticket.worker} hands {what} to {given.role} {given.worker}: "
        f"ticket {ticket.id}, {blocks} blocks{size} of pool {ticket.pool} over {ticket.endpoint.backend}, "
        f"lease of {left:.1f} s"
    )


def _show_ledger(events: Sequence[HandOff], message: Encoded | Prefilled, console: Console) -> None:
    start = events[0].at_ns if events else 0
    for event in events:
        amount = f", {event.blocks} blocks, {event.bytes / 2**20:.2f} MiB" if event.bytes or event.blocks else ""
        took = f" in {event.seconds * 1e3:.1f} ms" if event.seconds else ""
        why = f": {event.cause} {event.message}".rstrip() if event.cause else ""
        console.print(f"  +{(event.at_ns - start) / 1e6:.1f} ms {event.state}{amount}{took}{why}")


def _show_stages(told: Story, console: Console) -> None:
    """When each stage got the request, and how long it had it: from what is stored in WORK, and the end."""
    ended = next((end.timings.ended_ns for end in told.ends if isinstance(end, done.Done)), 0)
    table = Table("attempt", "stage", "worker", "given", "began", "first token", "handed on")
    given = [each for each in told.work if not isinstance(each.message, Revoke)]
    for position, each in enumerate(given):
        assert not isinstance(each.message, Revoke)
        attempt = each.message.attempt
        after = next((other for other in given[position + 1 :] if _attempt(other) == attempt), None)
        began = first = 0
        if after is not None and isinstance(after.message, Encoded | Prefilled):
            began = after.message.started_ns
            first = after.message.first_token_ns if isinstance(after.message, Prefilled) else 0
        until = after.at_ns if after is not None else ended if position == len(given) - 1 else 0
        marks = [_since(told.request, at) for at in (each.at_ns, began, first, until)]
        table.add_row(str(attempt), each.role, each.worker, *marks)
    console.print(table)


def _attempt(given: Given) -> int:
    return given.message.attempt


def _since(request: GenerateRequest, at_ns: int) -> str:
    return f"+{(at_ns - request.created_ns) / 1e6:.1f} ms" if at_ns else ""


def _show_decision(job: Job, decision: Decision, console: Console) -> None:
    resumed = sum(len(part) // 4 for part in job.resume)
    console.print(
        f"\nattempt {job.attempt} ({decision.reason or 'new'}): router {decision.router} in mode {decision.mode} chose "
        f"[bold green]{decision.chosen or '-'}[/] after waiting {decision.waited_ns / 1e6:.1f} ms"
        + (f", resuming behind {resumed} tokens" if resumed else "")
    )
    console.print(
        f"index at KV sequence {decision.kv_seq}, load at WORK {decision.work_seq} / DONE {decision.done_seq}"
    )
    route = decision.route or (jobs.Stage("", decision.chosen, decision.rank),)
    if decision.route:
        console.print("route: " + " → ".join(f"{stage.role} {_place(stage.worker, stage.rank)}" for stage in route))
    if decision.how:
        console.print(f"why: {decision.how}")
    table = Table("worker", "score", "overlap blocks", "active blocks", "prefill tokens", "running", "excluded")
    roles = any(candidate.role for candidate in decision.candidates)
    if roles:
        table.add_column("stage")
    places = {(stage.worker, stage.rank) for stage in route}
    for candidate in decision.candidates:
        chosen = (candidate.worker, candidate.rank) in places
        name = _place(candidate.worker, candidate.rank)
        table.add_row(
            f"[bold green]{name}[/]" if chosen else name,
            "" if candidate.excluded else f"{candidate.score:.2f}",
            f"{candidate.overlap_blocks}/{decision.prompt_blocks}",
            str(candidate.active_blocks),
            str(candidate.prefill_tokens),
            f"{candidate.running}/{candidate.slots}",
            candidate.excluded,
            *([candidate.role or "all"] if roles else ()),
        )
    console.print(table)


def _place(worker: str, rank: int) -> str:
    return f"{worker}/{rank}" if rank else worker


def _show_end(end: done.Done | done.Returned, request: GenerateRequest, console: Console) -> None:
    if isinstance(end, done.Returned):
        console.print(f"attempt {end.attempt}: {end.worker} gave it back ({end.reason})")
        return
    times = end.timings
    verdict = f"[red]{end.code}[/]: {end.message}" if end.code else "[green]ok[/]"
    console.print(f"\nended {verdict} on attempt {end.attempt} at {end.worker or 'the router'}")
    usage = end.usage
    if request.diffusion is not None:
        files = ", ".join(file.name for choice in end.choices for file in choice.files) or "no files"
        console.print(f"{request.diffusion.kind}: {usage.completion} denoising steps, {files}")
    else:
        console.print(f"prompt {usage.prompt} tokens ({usage.cached} from the cache), output {usage.completion} tokens")
    marks = [("routed", times.routed_ns), ("started", times.started_ns), ("first token", times.first_token_ns)]
    marks.append(("ended", times.ended_ns))
    console.print("  ".join(f"{name} +{(at - request.created_ns) / 1e6:.1f} ms" for name, at in marks if at))


def run(argv: Sequence[str]) -> int:
    """Print the story of one request; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock explain", description="what happened to a request, and why")
    parser.add_argument("request_id", help="as in the X-Request-Id header or the answer's id")
    parser.add_argument("--nats-url", default="", help="default: from state.json in the data directory")
    parser.add_argument("--namespace", default="")
    parser.add_argument("--data-dir", default=".penstock")
    args = parser.parse_args(argv)
    console = stdout()
    state = _state(Path(args.data_dir))
    url = args.nats_url or state.get("nats_url", "nats://127.0.0.1:4222")
    namespace = args.namespace or state.get("namespace", "ps")
    request_id = args.request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
    try:
        return asyncio.run(_explain(request_id, url, namespace, console))
    except (ValueError, ServingError) as error:
        console.print(f"[red]{error}[/]")
        return 1


async def _explain(request_id: str, url: str, namespace: str, console: Console) -> int:
    bus = await connect(url, role="client", name="explain", namespace=namespace, timeout=CONNECT_S)
    try:
        show(await story(bus, request_id), console)
    finally:
        await bus.close()
    return 0


def _state(data_dir: Path) -> dict[str, str]:
    try:
        state = msgspec.json.decode((data_dir / "state.json").read_bytes())
    except (OSError, msgspec.MsgspecError):
        return {}
    return {key: value for key, value in state.items() if isinstance(value, str)}
