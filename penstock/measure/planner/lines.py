"""Decisions of planners as lines of text, and the list of those in the log."""

import time

import msgspec
from rich.console import Console

from penstock.cli.figures import clock, duration_ns
from penstock.cli.terminal import escape, print_hanging, stdout
from penstock.infra.bus.direct_get import read
from penstock.log.sources.open_log import Source, open_log
from penstock.schemas import plans
from penstock.schemas.plans import Change, Planned


def line(planned: Planned) -> str:
    """One decision, without its time."""
    decision = planned.decision
    seen = decision.observed
    waiting = f", {seen.backlog} waiting" if seen.backlog else ""
    latencies = [
        f"{name} p95 {times.p95:,.{digits}f} ms"
        for name, times, digits in (("TTFT", seen.ttft, 0), ("ITL", seen.itl, 1))
        if times is not None
    ]
    parts = [
        f"{seen.rate:.2f} requests/s (planned for {decision.demand.rate:.2f}){waiting}",
        *latencies,
        *(_change(role, change) for role, change in decision.changes.items()),
        *([f"failed: {planned.failure}"] if planned.failure else []),
    ]
    return ", ".join(parts)


def _change(role: str, change: Change) -> str:
    moved = f"{change.current} → {change.target}" if change.target != change.current else str(change.target)
    reasons = f" ({', '.join(change.reasons)})" if change.reasons else ""
    return f"{role} {moved}{reasons}"


async def show_history(source: Source, model: str, since: str, *, as_json: bool) -> None:
    """Print the decisions in the log.

    Args:
        model: "": of all models.
        since: "15m", "2h".

    Raises:
        ValueError: ``since`` is no time.
    """
    since_ns = time.time_ns() - duration_ns(since)
    console = stdout()
    async with open_log(source, name="plan", role="viewer", streams=("PLAN",), files=True) as log:
        subjects = log.reader.subjects
        subject = subjects.plan(model) if model else subjects.all("plan")
        count = 0
        async for entry in read(log.reader, subjects.stream("PLAN"), subject, since_ns=since_ns):
            planned = plans.decode(entry.data)
            _print(planned, console, as_json=as_json)
            count += 1
    if not count and not as_json:
        console.print(f"no decision in the last {since}")


def _print(planned: Planned, console: Console, *, as_json: bool) -> None:
    if as_json:
        console.file.write(msgspec.json.encode(planned).decode() + "\n")
        return
    print_hanging(console, f"{clock(planned.at_ns, time.time_ns())}  {escape(planned.model)}  ", escape(line(planned)))
