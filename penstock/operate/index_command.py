"""``penstock index``: rebuilds the routers' prefix index at a given time, from the KV stream alone."""

import argparse
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from penstock.cli.figures import clock, moment_ns
from penstock.cli.terminal import Column, fitting_table, stdout, write_json
from penstock.configs.flags import Parser
from penstock.configs.settings import RouterSettings
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Readable, read
from penstock.infra.bus.worker_leases import registrations
from penstock.launch.readiness import metrics
from penstock.launch.state import read_state
from penstock.log_tools.sources.open_log import CellSource, LogSource, add_flags, cells_of, open_log, run_command
from penstock.router.state.prefix_index import PrefixIndex
from penstock.schemas import kv


class TargetBlocks(msgspec.Struct, frozen=True):
    """The blocks of one rank of a worker. ``blocks`` None: its first events are no longer in the stream."""

    worker: str
    rank: int
    blocks: int | None


class RouterCheck(msgspec.Struct, frozen=True):
    """A running router's checksum at its last checked sequence, and the one computed from the stream."""

    router: str
    kv_seq: int
    checksum: int
    expected: int


class IndexReport(msgspec.Struct, frozen=True):
    """The index after ``kv_seq``. ``first_seq``: the oldest message that the stream still has."""

    kv_seq: int
    at_ns: int
    first_seq: int
    blocks: int
    checksum: int
    targets: tuple[TargetBlocks, ...]
    routers: tuple[RouterCheck, ...] = ()


def run(argv: Sequence[str]) -> int:
    """Show the index and return the exit status, which is also 1 if a router's checksum differs."""
    parser = Parser(
        prog="penstock index",
        description="show what each worker had in its cache at a given time, according to the KV stream, with the "
        "routers' checksum at that sequence",
    )
    parser.add_argument(
        "--at", default="", metavar="SEQ|TIME", help="a sequence of the KV stream, 15m ago, or a time; default: now"
    )
    parser.add_argument("--check", action="store_true", help="compare with the checksums of the running routers")
    parser.add_argument(
        "--max-blocks", type=int, default=RouterSettings().max_index_blocks, help="as the router's flag"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    add_flags(parser)
    args = parser.parse_args(argv)
    if args.check and args.nats_url:
        parser.error("--check finds the routers by the data folder; leave out --nats-url")
    return run_command("index", lambda: _run(args, Path(args.data_dir), stdout()))


async def _run(args: argparse.Namespace, data_dir: Path, console: Console) -> None:
    """One cell after the other: each has an index of its own."""
    cells = cells_of(LogSource.of(args))
    if len(cells) > 1 and args.at.isdecimal():
        raise ValueError(f"--at {args.at}: each cell counts the messages of its own KV stream: choose one, --namespace")
    wrong, empty = [], list[EmptyStream]()
    for cell in cells:
        try:
            result = await _index(args, cell, data_dir)
        except EmptyStream as error:
            empty.append(error)
            if len(cells) > 1:
                console.print(f"cell {cell.number}: {error}", highlight=False)
            continue
        if args.json:
            line = msgspec.to_builtins(result) | ({"cell": cell.number} if cell.cells > 1 else {})
            write_json(console, line)
        else:
            if len(cells) > 1:
                console.print(f"[bold]cell {cell.number}[/]", highlight=False)
            _print(result, console)
        wrong += [check.router for check in result.routers if check.checksum != check.expected]
    if wrong:
        raise ValueError(f"the index of {', '.join(wrong)} differs from the KV stream")
    if len(empty) == len(cells):
        raise empty[0]


class EmptyStream(ValueError):
    """There is nothing to make an index of."""


async def _index(args: argparse.Namespace, cell: CellSource, data_dir: Path) -> IndexReport:
    async with open_log(cell.source, name="index", role="reader", streams=("KV",), files=True) as log:
        if args.check and log.stopped:
            raise ValueError("the deployment is stopped: there is no router to compare with")
        entries = [each async for each in _entries(log.reader)]
        if not entries:
            raise EmptyStream("the KV stream is empty: it keeps an hour, or 7 days with --record")
        seq = _sequence(args.at, entries)
        result = report(seq, entries, args.max_blocks)
        if args.check:
            checks = [check async for check in _checks(log.bus, data_dir, cell, entries, args.max_blocks)]
            result = msgspec.structs.replace(result, routers=tuple(checks))
        return result


Entries = Sequence[tuple[int, int, bytes]]  # sequence, Unix time in ns, data


async def _entries(bus: Readable) -> AsyncGenerator[tuple[int, int, bytes], None]:
    async for entry in read(bus, bus.subjects.stream("KV"), bus.subjects.all("kv")):
        yield entry.seq, entry.time_ns, entry.data


def _sequence(at: str, entries: Entries) -> int:
    """The sequence that ``--at`` names."""
    first, last = entries[0], entries[-1]
    if not at:
        return last[0]
    seq = int(at) if at.isdecimal() else _last_before(moment_ns(at, time.time_ns()), entries)
    if not first[0] <= seq <= last[0]:
        now_ns = time.time_ns()
        raise ValueError(
            f"--at {at}: the KV stream has {first[0]} to {last[0]}, "
            f"from {clock(first[1], now_ns)} to {clock(last[1], now_ns)}"
        )
    return seq


def _last_before(at_ns: int, entries: Entries) -> int:
    return max((seq for seq, time_ns, _ in entries if time_ns <= at_ns), default=0)


def index_at(seq: int, entries: Entries, max_blocks: int) -> PrefixIndex:
    """The index after the message ``seq`` of the KV stream. Pure.

    It has the events that workers sent by then. Other inputs of a running router (dumps, workers that left) are not in
    the stream: a worker whose first messages are not in ``entries`` is ``awaiting_dump``.
    """
    index = PrefixIndex(max_blocks)
    for at, _, data in entries:
        if at <= seq:
            try:
                index.apply(kv.decode(data))
            except msgspec.MsgspecError:
                continue  # as routers do
    return index


def report(seq: int, entries: Entries, max_blocks: int) -> IndexReport:
    """The index after message ``seq``. Pure.

    Args:
        max_blocks: cap of the routers' index.
    """
    index = index_at(seq, entries, max_blocks)
    unknown = set(index.awaiting_dump())
    complete = {holding.target_id for holding, _, _ in index.feeds()}
    targets = tuple(
        TargetBlocks(*target_id, None if target_id in unknown else index.held(target_id))
        for target_id in sorted(complete | unknown)
    )
    at_ns = next(time_ns for at, time_ns, _ in reversed(entries) if at <= seq)
    return IndexReport(seq, at_ns, entries[0][0], index.blocks, index.checksum(), targets)


async def _checks(
    bus: Bus, data_dir: Path, cell: CellSource, entries: Entries, max_blocks: int
) -> AsyncGenerator[RouterCheck, None]:
    """Compare each router's last stored checksum with the stream's, for the workers that are registered now."""
    registered = {each.worker for each in await registrations(bus)}
    for process in read_state(data_dir / "state.json").processes:
        if process.role != "router" or (cell.cells > 1 and process.cell != cell.number):
            continue
        noted = await metrics(process)
        seq, checksum = (int(noted.get(f"penstock_router_index_{name}", 0)) for name in ("sequence", "checksum"))
        index = index_at(seq, entries, max_blocks)
        for worker in index.workers() - registered:  # routers forget them; the stream does not show that
            index.forget(worker)
        yield RouterCheck(process.name, seq, checksum, index.checksum())


def _print(index_report: IndexReport, console: Console) -> None:
    console.print(
        f"after message {index_report.kv_seq:,} of the KV stream, at {clock(index_report.at_ns, time.time_ns())}: "
        f"{index_report.blocks:,} distinct blocks, checksum {index_report.checksum:012x}",
        highlight=False,
    )
    rows = []
    for target in index_report.targets:
        blocks = (
            f"{target.blocks:,}"
            if target.blocks is not None
            else f"unknown: it began before {index_report.first_seq:,}"
        )
        rows.append((target.worker, str(target.rank), blocks))
    columns = (Column("worker"), Column("rank", right=True), Column("blocks", right=True))
    console.print(fitting_table(columns, rows, console.width))
    for check in index_report.routers:
        same = check.checksum == check.expected
        verdict = "[green]as the stream leads to[/]" if same else f"[red]the stream leads to {check.expected:012x}[/]"
        console.print(f"{check.router} at {check.kv_seq:,}: {check.checksum:012x}, {verdict}", highlight=False)
