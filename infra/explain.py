"""``penstock explain REQUEST_ID``: where a request went and why, from the log alone."""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from configs.bus.connection import Bus, connect
from configs.bus.read import read
from schemas import done, jobs, requests
from schemas.errors import ServingError
from schemas.ids import time_of
from schemas.jobs import Decision, Job
from schemas.requests import GenerateRequest
from schemas.subjects import HEADER_MSG_ID

SKEW_NS = 2_000_000_000
CONNECT_S = 3.0  # somebody is waiting at a terminal


class Story:
    """Everything the log says of one request."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.jobs: list[Job] = []
        self.ends: list[done.Done | done.Returned] = []


async def story(bus: Bus, request_id: str) -> Story:
    """Read a request's events.

    Raises:
        ValueError: not a request id, or nothing is known of it.
    """
    since = time_of(request_id) - SKEW_NS
    subjects = bus.subjects
    found = None
    async for entry in read(bus, subjects.stream("REQUESTS"), subjects.all("request"), since_ns=since):
        if entry.headers.get(HEADER_MSG_ID) == request_id:
            found = Story(requests.decode(entry.data))
            break
    if found is None:
        raise ValueError(f"no request {request_id} in the log; it keeps a day")
    async for entry in read(bus, subjects.stream("DONE"), f"{subjects.namespace}.>", since_ns=since):
        if entry.headers.get(HEADER_MSG_ID, "").startswith(request_id):
            found.ends.append(done.decode(entry.data))
            if isinstance(found.ends[-1], done.Done):
                break
    until_ns = found.ends[-1].timings.ended_ns + SKEW_NS if found.ends and isinstance(found.ends[-1], done.Done) else 0
    async for entry in read(bus, subjects.stream("WORK"), subjects.all("work"), since_ns=since):
        if entry.headers.get(HEADER_MSG_ID, "").startswith(request_id):
            work = jobs.decode(entry.data)
            if isinstance(work, Job):
                found.jobs.append(work)
        elif until_ns and entry.time_ns > until_ns:
            break
    return found


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
    for job in told.jobs:
        _show_decision(job, job.decision, console)
    for end in told.ends:
        _show_end(end, request, console)
    if not told.jobs:
        console.print("no router has placed it yet")


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
    table = Table("worker", "score", "overlap blocks", "active blocks", "prefill tokens", "running", "excluded")
    for candidate in decision.candidates:
        chosen = candidate.worker == decision.chosen
        table.add_row(
            f"[bold green]{candidate.worker}[/]" if chosen else candidate.worker,
            "" if candidate.excluded else f"{candidate.score:.2f}",
            f"{candidate.overlap_blocks}/{decision.prompt_blocks}",
            str(candidate.active_blocks),
            str(candidate.prefill_tokens),
            f"{candidate.running}/{candidate.slots}",
            candidate.excluded,
        )
    console.print(table)


def _show_end(end: done.Done | done.Returned, request: GenerateRequest, console: Console) -> None:
    if isinstance(end, done.Returned):
        console.print(f"attempt {end.attempt}: {end.worker} gave it back ({end.reason})")
        return
    times = end.timings
    verdict = f"[red]{end.code}[/]: {end.message}" if end.code else "[green]ok[/]"
    console.print(f"\nended {verdict} on attempt {end.attempt} at {end.worker or 'the router'}")
    usage = end.usage
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
    console = Console()
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
