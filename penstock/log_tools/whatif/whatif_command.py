"""``penstock whatif``: how recorded requests would have been routed with other weights, modes or workers."""

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.cli.figures import clock, counted, moment_ns, span
from penstock.cli.terminal import Column, escape, fitting_table, stdout, write_json
from penstock.configs.flags import Parser
from penstock.infra.bus.direct_get import Readable, read
from penstock.log_tools.requests.find_requests import of_entry
from penstock.log_tools.sources.open_log import LogSource, add_flags, add_verify_flag, cells_of, open_log, run_command
from penstock.log_tools.whatif.change import (
    PlacementChange,
    Redecided,
    RequestDistribution,
    WhatIfReport,
    insufficient,
    ms_per_token,
    redecide,
    report,
)
from penstock.log_tools.whatif.reasons import UNLISTED, DecisionReasons, Sample, reasons
from penstock.router.placement.routing import Weights
from penstock.schemas import jobs
from penstock.schemas.jobs import Job
from penstock.schemas.requests import decode_head
from penstock.schemas.streams import LONGEST_DEADLINE_S
from penstock.schemas.subjects import KEPT

DEFAULTS = Weights()


def run(argv: Sequence[str]) -> int:
    """Repeat recorded decisions, and return the exit status."""
    parser = Parser(
        prog="penstock whatif",
        description="repeat the routing decisions of the log, unchanged and with a change. Each decision uses the "
        "recorded loads and caches: effects of the change on later decisions are not simulated (`penstock bench "
        "router` does that).",
    )
    parser.add_argument("--since", default="", help="decided since: 15m, 2h ago, or 2026-11-22T09:30")
    parser.add_argument("--until", default="", help="decided before; written like --since")
    parser.add_argument("--model", default="", help="as the client named it")
    parser.add_argument("--overlap-weight", type=float, default=DEFAULTS.overlap, help="as the router's flag")
    parser.add_argument("--prefill-weight", type=float, default=DEFAULTS.prefill, help="as the router's flag")
    parser.add_argument("--transfer-weight", type=float, default=DEFAULTS.transfer, help="as the router's flag")
    parser.add_argument(
        "--local-prefill-tokens", type=int, default=DEFAULTS.local_prefill_tokens, help="as the router's flag"
    )
    parser.add_argument(
        "--prefill-queue-tokens", type=int, default=DEFAULTS.prefill_queue_tokens, help="as the router's flag"
    )
    parser.add_argument("--mode", default="kv", choices=("kv", "round_robin", "random", "least_loaded"))
    parser.add_argument("--without", action="append", default=[], metavar="WORKER", help="not there; may be repeated")
    parser.add_argument("--kill", action="append", default=[], metavar="WORKER", help="not there from --at on")
    parser.add_argument("--at", default="", metavar="TIME", help="of --kill, written like --since")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_flags(parser)
    add_verify_flag(parser)
    args = parser.parse_args(argv)
    if bool(args.kill) != bool(args.at):
        parser.error("--kill and --at go together")
    weights = ("overlap_weight", "prefill_weight", "transfer_weight")
    for flag in (*weights, "local_prefill_tokens", "prefill_queue_tokens"):
        least = -1 if flag == "local_prefill_tokens" else 0
        if not least <= getattr(args, flag) < math.inf:
            parser.error(f"--{flag.replace('_', '-')}: give a number from {least} on")
    return run_command("whatif", lambda: _run(args, stdout()))


async def _run(args: argparse.Namespace, console: Console) -> None:
    now_ns = time.time_ns()
    since_ns, until_ns, at_ns = (moment_ns(text, now_ns) if text else 0 for text in (args.since, args.until, args.at))
    change = PlacementChange(
        Weights(
            args.overlap_weight,
            args.prefill_weight,
            transfer=args.transfer_weight,
            local_prefill_tokens=args.local_prefill_tokens,
            prefill_queue_tokens=args.prefill_queue_tokens,
        ),
        args.mode,
        frozenset(args.without),
        frozenset(args.kill),
        at_ns,
    )
    cells = cells_of(LogSource.of(args))
    problems: list[ValueError] = []
    for cell in cells:  # one by one: each cell has its own routers, which chose among its workers
        several = len(cells) > 1
        try:
            async with open_log(cell.source, name="whatif", role="reader", streams=("WORK", "DONE"), files=True) as log:
                decided = await decide_all(log.reader, change, since_ns=since_ns, until_ns=until_ns, model=args.model)
        except ValueError as error:
            problems.append(error)
            if several:
                print(f"cell {cell.number}: {error}", file=sys.stderr)
            continue
        if args.json:
            line = msgspec.to_builtins(decided.report) | {"reasons": msgspec.to_builtins(decided.reasons)}
            line |= {"cell": cell.number} if several else {}
            write_json(console, line)
            continue
        if several:
            console.print(f"[bold]cell {cell.number}[/]", highlight=False)
        _print(decided.report, console)
        _print_reasons(decided.reasons, console)
    if len(problems) == len(cells):
        raise problems[0]


class Decided(msgspec.Struct, frozen=True):
    """``report``: with the change. ``reasons``: as recorded."""

    report: WhatIfReport
    reasons: DecisionReasons


async def decide_all(
    bus: Readable, change: PlacementChange, *, since_ns: int = 0, until_ns: int = 0, model: str = ""
) -> Decided:
    """Repeat all decisions recorded between two times (Unix ns; 0: no limit).

    Raises:
        ServingError: a stream cannot be read.
        ValueError: no decision can be repeated, or none has a worker that the change removes.
    """
    total = 0
    left_out: Counter[str] = Counter()
    workers: set[str] = set()
    decisions: list[Redecided] = []
    sample = Sample()
    ahead: dict[str, tuple[int, float]] = {}  # request -> time of its last decision, and the work ahead at that time
    async for request_id, job in _jobs(bus, since_ns, until_ns):
        if model and decode_head(job.request).model != model:
            continue
        total += 1
        workers.update(each.worker for each in job.decision.candidates)
        again = redecide(job, change, total - 1)
        if again is None:
            left_out[insufficient(job) or "without a candidate"] += 1
        else:
            decisions.append(again)
            sample.add(job)
            ahead[request_id] = (again.at_ns, again.recorded.ahead)
    if not total:
        raise ValueError("no routing decision was recorded in this time")
    if unknown := change.unknown(workers):
        raise ValueError(f"no worker {unknown[0]!r} in these decisions; there are {', '.join(sorted(workers))}")
    if not decisions:
        why = ", ".join(f"{count:,} {reason}" for reason, count in left_out.most_common())
        raise ValueError(f"no recorded decision can be decided again: {why}")
    found = report(total, decisions, await _measured(bus, ahead, since_ns), left_out)
    return Decided(found, reasons(sample.jobs, len(decisions)))


async def _jobs(bus: Readable, since_ns: int, until_ns: int) -> AsyncGenerator[tuple[str, Job], None]:
    """The jobs that routers have published, each with the id of its request."""
    subjects = bus.subjects
    async for entry in read(bus, subjects.stream("WORK"), subjects.all("work"), since_ns=since_ns):
        if until_ns and entry.time_ns >= until_ns:
            return
        if KEPT in entry.subject.split("."):
            continue
        try:
            job = jobs.decode(entry.data)
        except msgspec.MsgspecError:
            continue  # of a later release
        if isinstance(job, Job):
            yield entry.headers.get("Nats-Msg-Id", "").partition(":")[0], jobs.with_candidates(job)


async def _measured(bus: Readable, ahead: dict[str, tuple[int, float]], since_ns: int) -> float | None:
    """Milliseconds to the first token per token of work ahead, from the records of these requests."""
    measured = []
    last_ns = max((at_ns for at_ns, _ in ahead.values()), default=0) + int(LONGEST_DEADLINE_S * 1e9)
    async for entry in read(bus, bus.subjects.stream("DONE"), bus.subjects.all("done"), since_ns=since_ns):
        if entry.time_ns > last_ns:
            break
        name = entry.subject.rpartition(".")[2]
        if name in ahead and (record := of_entry(entry)) is not None and record.summary.first_token_ns > ahead[name][0]:
            at_ns, tokens = ahead[name]
            measured.append(((record.summary.first_token_ns - at_ns) / 1e6, tokens))
    return ms_per_token(measured)


def _print(decided: WhatIfReport, console: Console) -> None:
    now_ns = time.time_ns()
    console.print(
        f"{counted(decided.decisions, 'decision')} from {clock(decided.first_ns, now_ns)} "
        f"to {clock(decided.last_ns, now_ns)}; the record of {decided.usable:,} suffices\n"
        f"this build decides {decided.reproduced:,} of them as recorded ({decided.reproduced / decided.usable:.1%})",
        highlight=False,
    )
    for reason, count in decided.left_out.items():
        console.print(f"left out: {count:,} {reason}", highlight=False)
    if decided.reproduced < decided.usable:
        console.print("[yellow]the others were made with other weights, or by a build that decides differently[/]")
    moved = f"{decided.moved:,} go elsewhere ({decided.moved / decided.usable:.0%})"
    waiting = f", {decided.waiting:,} have no worker left and wait" if decided.waiting else ""
    console.print(f"with the change {moved}{waiting}\n", highlight=False)
    was, then = decided.recorded, decided.then
    points = f"{100 * (then.cached_share - was.cached_share):+.1f} points"
    rows = [("prompt tokens from cache", f"{was.cached_share:.1%}", f"{then.cached_share:.1%}", points)]
    for name in ("p50", "p95"):
        ahead = (getattr(each, f"ahead_{name}") for each in (was, then))
        rows.append(_row(f"tokens ahead of the first one, {name}", *ahead))
    if decided.ms_per_token is not None:
        for name in ("p50", "p95"):
            before, after = (_ms(each, name, decided.ms_per_token) for each in (was, then))
            rows.append((f"predicted time to first token, {name}", before, after, ""))
    change = f"{then.balance - was.balance:+.2f}"
    rows.append(("busiest worker / mean", f"{was.balance:.2f}", f"{then.balance:.2f}", change))
    for does, ours, theirs in (
        ("requests to", was.by_worker, then.by_worker),
        ("decoded by", was.decoded_by, then.decoded_by),
    ):
        for worker in sorted(ours | theirs):
            count, other = ours.get(worker, 0), theirs.get(worker, 0)
            rows.append((f"{does} {worker}", f"{count:,}", f"{other:,}", f"{other - count:+,}"))
    columns = (Column(""), *(Column(name, right=True) for name in ("recorded", "what if", "change")))
    console.print(fitting_table(columns, rows, console.width))


def _print_reasons(why: DecisionReasons, console: Console) -> None:
    some = f", {why.decisions:,} of them evenly chosen" if why.decisions < why.of else ""
    console.print(f"\n[bold]why, as recorded[/] ({counted(why.of, 'decision')}{some})", highlight=False)
    decided_by = ", ".join(f"{term} {count / max(1, why.decisions):.0%}" for term, count in why.decided_by.items())
    console.print(f"what decided between the two cheapest: {decided_by}", highlight=False)
    rows = [
        (
            escape(each.worker),
            f"{each.chosen:,}",
            _sums(each.behind),
            _sums(each.excluded | ({UNLISTED: each.unlisted} if each.unlisted else {})),
        )
        for each in why.workers
    ]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("worker", "chosen", "lost by", "excluded"):
        table.add_column(name, justify="right" if name == "chosen" else "left", no_wrap=name in ("worker", "chosen"))
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print("\n[bold]requests with another weight[/]")
    changes = [name for name in why.moved if why.moved[name] or not name.startswith("transfer")]
    columns = (Column("worker"), Column("now", right=True), *(Column(name, 1, right=True) for name in changes))
    cells = [
        (escape(each.worker), f"{each.chosen:,}", *(f"{each.then[name]:,}" for name in changes)) for each in why.workers
    ]
    cells.append(("go elsewhere", "", *(f"{why.moved[name]:,}" for name in changes)))
    console.print(fitting_table(columns, cells, console.width))


def _sums(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _row(name: str, was: float | None, then: float | None) -> tuple[str, str, str, str]:
    change = f"{(then / was - 1):+.0%}" if was and then is not None else ""
    before, after = ("-" if value is None else f"{value:,.0f}" for value in (was, then))
    return name, before, after, change


def _ms(placement: RequestDistribution, name: str, ms_per_token: float) -> str:
    ahead: float | None = getattr(placement, f"ahead_{name}")
    return "-" if ahead is None else span(ahead * ms_per_token)
