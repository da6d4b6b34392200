"""``penstock top``: a running deployment in the terminal."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.cli.figures import clock, duration_ns, show_duration, show_size, span
from penstock.cli.terminal import Column, escape, fitting_table, stdout, write_json
from penstock.configs.flags import Parser
from penstock.infra.nats_server.jetstream_api import BrokerProblem
from penstock.log_tools.sources.open_log import LogSource, add_flags, run_command
from penstock.operate import observe
from penstock.operate.streams import reach
from penstock.schemas.fleet import GpuUse

BAR = 10  # characters
FULL = 0.8  # shown in yellow from here on
ENDED_SHOWN = 8
_STATES = {
    "ready": "green",
    "draining": "yellow",
    "paused": "yellow",
    "asleep": "cyan",
    "stalled": "red",
    "lost": "red",
}
_ENDS = {"done": "green", "failed": "red", "cancelled": "yellow"}


def run(argv: Sequence[str]) -> int:
    """Show the deployment until Ctrl-C or the key q; the exit status."""
    parser = Parser(
        prog="penstock top",
        description="watch a running deployment: workers, queues, rates, streams and the last requests; "
        "q or Ctrl-C ends it",
    )
    parser.add_argument("--interval", default="1s", metavar="TIME", help="between two looks (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument("--json", action="store_true", help="print one JSON object per update instead")
    add_flags(parser)
    args = parser.parse_args(argv)
    interval_s = max(0.2, duration_ns(args.interval) / 1e9)
    return run_command("top", lambda: _run(LogSource.of(args), stdout(), interval_s, once=args.once, as_json=args.json))


async def _run(source: LogSource, console: Console, interval_s: float, *, once: bool, as_json: bool) -> None:
    async with observe.observed(source, name="top", role="viewer") as (_, observer):
        if observer is None:
            raise ValueError("the deployment is stopped: `penstock requests` shows what it did")
        try:
            if as_json or not console.is_terminal or once:
                await _print(observer, console, interval_s, once=once, as_json=as_json)
            else:
                await _live(observer, console, interval_s)
        except BrokerProblem as error:
            raise ValueError(str(error)) from error


async def _print(observer: observe.Observer, console: Console, interval_s: float, *, once: bool, as_json: bool) -> None:
    await observer.look()  # rates need two
    while True:
        await asyncio.sleep(interval_s)
        snapshot = await observer.look()
        if as_json:
            write_json(console, snapshot)
            console.file.flush()
        else:
            console.print(picture(snapshot, console.width))
        if once:
            return


async def _live(observer: observe.Observer, console: Console, interval_s: float) -> None:
    with Live(console=console, auto_refresh=False, screen=True) as live, _ended_by_key() as ended:
        while not ended.is_set():
            began = time.monotonic()
            live.update(picture(await observer.look(), console.width), refresh=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), max(0.0, interval_s - (time.monotonic() - began)))


@contextlib.contextmanager
def _ended_by_key() -> Iterator[asyncio.Event]:
    """An event that q sets, read key by key; nothing sets it where the standard input is not a terminal."""
    ended = asyncio.Event()
    if not sys.stdin.isatty():
        yield ended
        return
    import termios
    import tty

    terminal, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(terminal)

    def read() -> None:
        keys = os.read(terminal, 64)
        if not keys:
            loop.remove_reader(terminal)
        if b"q" in keys:
            ended.set()

    try:
        tty.setcbreak(terminal)
        loop.add_reader(terminal, read)
        yield ended
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def picture(snapshot: observe.DeploymentSnapshot, width: int) -> Group:
    """A snapshot as it is printed on this many columns."""
    ready = sum(worker.state == "ready" for worker in snapshot.workers)
    head = Text.assemble(
        (f"penstock {snapshot.namespace}", "bold"),
        f"   {ready} of {len(snapshot.workers)} workers ready   {clock(snapshot.at_ns, snapshot.at_ns)[:8]}",
    )
    lines = [Text(line, style="red") for line in [*observe.away(snapshot.cells), *observe.unsteady(snapshot.workers)]]
    tables = (
        *([_cells(snapshot.cells, width)] if snapshot.cells else []),
        _workers(snapshot.workers, width),
        _queues(snapshot.queues, width),
        _streams(snapshot, width),
        *([_ended(snapshot, width)] if snapshot.recent else []),
    )
    if snapshot.gateways is not None:
        lines.append(Text(observe.gateways_line(snapshot.gateways, snapshot.at_ns)))
    return Group(head, *lines, _rates(snapshot.rates), *(part for table in tables for part in (Text(), table)))


def _rates(rates: observe.Rates) -> Text:
    def ms(value: float | None) -> str:
        return span(value) or "-"

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    return Text(
        f"accepted {rates.accepted_per_s:,.1f}/s   ended {rates.ended_per_s:,.1f}/s   "
        f"failed {share(rates.failed_share)}   output {rates.output_tokens_per_s:,.0f} tokens/s   "
        f"cached {share(rates.hit_rate)}\n"
        f"first token p50 {ms(rates.ttft_p50_ms)}, p95 {ms(rates.ttft_p95_ms)}   "
        f"whole answer p50 {ms(rates.duration_p50_ms)}, p95 {ms(rates.duration_p95_ms)}"
    )


_CELLS = (
    Column("cell", right=True),
    Column("workers", right=True),
    Column("routers", 2, right=True),
    Column("accepted/s", 3, right=True),
    Column("ended/s", right=True),
    Column("held", right=True),
    Column("unread", 1, right=True),
    Column("fullest stream", 4),
)
_WORKERS = (
    Column("cell", 11, right=True),
    Column("worker"),
    Column("role", 3),
    Column("model", 7),
    Column("state"),
    Column("running", 1, right=True),
    Column("waiting", 5, right=True),
    Column("slots", 2),
    Column("KV in use"),
    Column("GPUs", 6),
    Column("tokens/s", 4, right=True),
    Column("cached", 6, right=True),
    Column("latency", 8, right=True),
    Column("slowest step", 9, right=True),
    Column("lost", 10, right=True),
)
_STREAMS = (
    Column("stream"),
    Column("messages", right=True),
    Column("size", right=True),
    Column("full"),
    Column("oldest", 1, right=True),
    Column("reaches", 2, right=True),
)
_ENDED = (
    Column("ended last"),
    Column("state"),
    Column("worker", 4),
    Column("out", 2, right=True),
    Column("first token", 3, right=True),
    Column("duration", 1, right=True),
)


def _cells(cells: Sequence[observe.CellView], width: int) -> Table:
    rows = [
        (
            str(cell.number),
            f"{cell.ready} of {cell.workers}",
            str(cell.routers),
            f"{cell.accepted_per_s:,.1f}",
            f"{cell.ended_per_s:,.1f}",
            str(cell.held),
            str(cell.unread),
            f"[{'yellow' if cell.full >= FULL else 'default'}]{cell.fullest} {cell.full:.0%}[/]",
        )
        if not cell.problem
        else (str(cell.number), *["-"] * (len(_CELLS) - 1))
        for cell in cells
    ]
    return fitting_table(_CELLS, rows, width)


def _workers(workers: Sequence[observe.WorkerView], width: int) -> Table:
    rows = [
        (
            "" if worker.cell is None else str(worker.cell),
            escape(worker.name or worker.id),
            worker.role,
            escape(worker.model),
            f"[{_STATES.get(worker.state, 'default')}]{worker.state}[/]",
            str(worker.running),
            str(worker.waiting),
            bar(worker.running, worker.slots),
            bar(worker.used_blocks, worker.total_blocks),
            gpus(worker.gpus),
            f"{worker.tokens_per_s:,.0f}",
            "-" if worker.hit_rate is None else f"{worker.hit_rate:.0%}",
            latency(worker),
            span(worker.slowest_step_ms) or "-" if worker.slowest_step_ms else "-",
            str(worker.lost or "-"),
        )
        for worker in workers
    ]
    absent = {
        *(() if any(worker.cell is not None for worker in workers) else ("cell",)),
        *(() if any(worker.gpus for worker in workers) else ("GPUs",)),
    }
    shown = [at for at, column in enumerate(_WORKERS) if column.name not in absent]
    return fitting_table([_WORKERS[at] for at in shown], [[row[at] for at in shown] for row in rows], width)


def gpus(read: Sequence[GpuUse]) -> str:
    """The mean use of a worker's GPUs, and the memory that is in use on all of them."""
    if any(gpu.error for gpu in read):
        return "[red]unreadable[/]"
    known = [gpu.busy_percent for gpu in read if gpu.busy_percent >= 0]
    busy = f"{sum(known) / len(known):.0f}% busy, " if known else ""
    return f"{busy}{show_size(sum(gpu.used_bytes for gpu in read))}" if read else "-"


def latency(worker: observe.WorkerView) -> str:
    """The time between two tokens of a worker, or of a prompt, and how many times that of its peers if that is many."""
    if worker.latency_ms is None:
        return "-"
    text = span(worker.latency_ms) or "-"
    return f"[red]{text} x{worker.slowness:.0f}[/]" if worker.is_slow else text


def _queues(queues: Sequence[observe.QueueView], width: int) -> Table:
    """A column for each class."""
    columns = (Column("queue"), *(Column(queue.priority, right=True) for queue in queues))
    rows = [("held", *(str(queue.held) for queue in queues))]
    for tenant, held in observe.tenant_rows(queues):
        rows.append((f"  {escape(tenant) or 'others'}", *(str(count or "-") for count in held)))
    rows.append(("unread", *(str(queue.unread) for queue in queues)))
    return fitting_table(columns, rows, width)


def _streams(snapshot: observe.DeploymentSnapshot, width: int) -> Table:
    rows = [
        (
            use.name,
            f"{use.messages:,}",
            show_size(use.bytes),
            bar(use.bytes, use.max_bytes),
            show_duration(use.oldest_s) if use.messages else "-",
            reach(use),
        )
        for use in snapshot.streams
        if use.description  # the buckets behind the registry and the object stores are `penstock streams list`'s
    ]
    return fitting_table(_STREAMS, rows, width)


def _ended(snapshot: observe.DeploymentSnapshot, width: int) -> Table:
    rows = [
        (
            each.id,
            f"[{_ENDS[each.state]}]{each.code or each.state}[/]",
            escape(each.worker),
            str(each.completion_tokens),
            span(each.ttft_ms),
            span(each.duration_ms),
        )
        for each in snapshot.recent[:ENDED_SHOWN]
    ]
    return fitting_table(_ENDED, rows, width)


def bar(part: float, whole: float) -> str:
    """A share as a bar and a percentage; "-" if there is nothing to have a share of."""
    if not whole:
        return "-"
    share = min(1.0, part / whole)
    filled = round(share * BAR)
    colour = "yellow" if share >= FULL else "cyan"
    return f"[{colour}]{'█' * filled}[/][dim]{'░' * (BAR - filled)}[/] {share:.0%}"
