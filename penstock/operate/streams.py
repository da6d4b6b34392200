"""``penstock streams``: makes the streams of a broker, shows what they hold, and sets for how long."""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.cli.commands import StreamsSettings
from penstock.cli.figures import counted, duration_ns, parse_size, show_duration, show_size
from penstock.cli.terminal import Column, confirmed, fitting_table, stdout, write_json
from penstock.configs.flags import Parser
from penstock.infra.bus.audit import recorded
from penstock.infra.bus.worker_leases import registrations, routers
from penstock.infra.nats_server import retention
from penstock.infra.nats_server.jetstream_api import BrokerProblem
from penstock.infra.nats_server.retention import Loss, StreamUse
from penstock.launch.nats import CLIENTS_PORT, apply_at, copy_tenants
from penstock.log_tools.sources.data_folder import recorded_max_age_s
from penstock.log_tools.sources.open_log import Log, LogSource, add_flags, cells_of, open_cells, run_command, running
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects

NONE = "none"
FULL = 0.8  # shown in yellow from here on
SHOWN = 5  # names of processes in an error


def run_apply(settings: StreamsSettings) -> int:
    """Create the streams of each cell on its broker and print the changes."""
    home: tuple[str, Subjects] | None = None
    try:
        for cell, (url, subjects, cells) in enumerate(_applied_at(settings)):
            if settings.placement_tags and len(settings.placement_tags) != cells:
                raise ValueError(
                    f"--placement-tags names {len(settings.placement_tags)} cells, the deployment has {cells}: name "
                    "the tags of each"
                )
            tags = settings.placement_tags[cell].split(";") if settings.placement_tags else ()
            work = apply_at(
                url,
                subjects,
                settings.replicas,
                record=settings.record,
                store_size=settings.store_size,
                cells=cells,
                tags=tags,
            )
            for line in asyncio.run(work) or [
                f"nothing to do: all streams of namespace {subjects.namespace!r} are there"
            ]:
                print(line)
            if home is None:
                home = url, subjects
            elif copied := asyncio.run(copy_tenants(*home, url, subjects)):
                print(f"limits of tenants for {subjects.namespace}: {', '.join(copied)}")
    except (BrokerProblem, ValueError) as error:
        print(f"penstock streams apply: {error}", file=sys.stderr)
        return 1
    return 0


def _applied_at(settings: StreamsSettings) -> Iterator[tuple[str, Subjects, int]]:
    """URL and subjects of each cell, and how many cells there are."""
    source = LogSource(
        Path(settings.data_dir),
        settings.nats_url,
        settings.namespace,
        cells=settings.cells,
        cell_nats_urls=settings.cell_nats_urls,
    )
    for cell in cells_of(source):
        try:
            url, namespace = running(cell.source, cell.source.data_dir)
        except ValueError:
            if settings.data_dir != StreamsSettings().data_dir:
                raise
            url, namespace = f"nats://127.0.0.1:{CLIENTS_PORT}", cell.source.namespace or "ps"
        yield url, Subjects(namespace), cell.cells


def run_list(argv: Sequence[str]) -> int:
    """Show all streams; the exit status."""
    parser = Parser(prog="penstock streams list", description="what each stream holds, and for how long")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    add_flags(parser)
    args = parser.parse_args(argv)
    return run_command("streams list", lambda: _list(LogSource.of(args), stdout(), as_json=args.json))


def run_set(argv: Sequence[str]) -> int:
    """Set the limits of one stream; the exit status."""
    parser = Parser(
        prog="penstock streams set",
        description="set how long a stream keeps its messages and how large it may become. Its oldest messages beyond "
        "the new limits are deleted at once. Limits that are set here are not changed by later starts. In a deployment "
        "with cells, each cell's stream gets an equal part; a name with its namespace is of one cell alone.",
    )
    parser.add_argument("stream", metavar="STREAM", help=f"one of {', '.join(retention.SETTABLE)}")
    parser.add_argument("--max-age", default="", metavar="TIME", help="such as 12h or 14d")
    parser.add_argument("--max-bytes", default="", metavar="SIZE", help="such as 512MiB or 16GiB")
    parser.add_argument(
        "--pack-prompts",
        action="store_true",
        help="REQUESTS: store prompts in as few bits as they need, which earlier builds cannot read. Streams that "
        "this build created do so already",
    )
    parser.add_argument(
        "--yes", "-y", action="store_true", help="delete without asking, and without a check for earlier builds"
    )
    add_flags(parser)
    args = parser.parse_args(argv)
    return run_command("streams set", lambda: _set(args, stdout()))


async def _list(source: LogSource, console: Console, *, as_json: bool) -> None:
    cells = cells_of(source)
    uses: list[StreamUse] = []
    async with open_cells(source, name="streams", role="viewer", streams=retention.SETTABLE) as logs:
        for log in logs:
            found = await _uses(log)
            if log.stopped and not source.file:  # the copy that is read keeps its messages for good
                folder = next(cell.source.data_dir for cell in cells if cell.number == log.cell).resolve()
                ages = [recorded_max_age_s(folder, use.name) for use in found]
                found = [msgspec.structs.replace(use, max_age_s=age) for use, age in zip(found, ages, strict=True)]
            uses += found
    if as_json:
        for use in uses:
            write_json(console, use)
        return
    console.print(_table(uses, console.width))


async def _uses(log: Log) -> list[StreamUse]:
    try:
        return await retention.uses(log.bus, topology(log.bus.subjects))
    except BrokerProblem as error:
        raise ValueError(str(error)) from error


_COLUMNS = (
    Column("stream"),
    Column("messages", right=True),
    Column("size", right=True),
    Column("of", 3, right=True),
    Column("full", 1, right=True),
    Column("oldest", 2, right=True),
    Column("kept for", right=True),
    Column("reaches", 2, right=True),
    Column("consumers", 4, right=True),
    Column("", 5),
)


def _table(uses: Sequence[StreamUse], width: int) -> Table:
    rows = []
    for use in uses:
        full = use.bytes / use.max_bytes if use.max_bytes else 0.0
        row = (
            use.name,
            f"{use.messages:,}",
            show_size(use.bytes),
            show_size(use.max_bytes) + ("*" if "max_bytes" in use.operator_set else "") if use.max_bytes else "-",
            f"[{'yellow' if full >= FULL else 'default'}]{full:.0%}[/]" if use.max_bytes else "-",
            show_duration(use.oldest_s) if use.messages else "-",
            show_duration(use.max_age_s) + ("*" if "max_age" in use.operator_set else "") if use.max_age_s else "-",
            reach(use),
            str(use.consumers),
            use.description,
        )
        rows.append(row)
    table = fitting_table(_COLUMNS, rows, width)
    if any(use.operator_set for use in uses):
        table.caption = "* set by the operator"
        table.caption_justify = "left"
    return table


def reach(use: StreamUse) -> str:
    """How old messages become at the present rate; yellow if the stream is full before they are as old as allowed."""
    if not use.reach_s:
        return "-"
    early = use.max_age_s and use.reach_s < use.max_age_s
    return f"[yellow]{show_duration(use.reach_s)}[/]" if early else show_duration(use.reach_s)


async def _set(args: argparse.Namespace, console: Console) -> None:
    max_age_s = duration_ns(args.max_age) / 1e9 if args.max_age else None
    max_bytes = parse_size(args.max_bytes) if args.max_bytes else None
    stream = args.stream.rpartition("_")[2]  # `streams list` shows names with the namespace
    source = LogSource.of(args)
    share = len(cells_of(source)) if args.stream == stream else 1  # else it is a cell's own
    if max_bytes is not None:
        max_bytes //= share
        if share > 1 and max_bytes < retention.MIN_BYTES:
            raise ValueError(
                f"--max-bytes {args.max_bytes} is for {share} cells together, and each needs at least "
                f"{show_size(retention.MIN_BYTES)}"
            )
    retention.check(stream, max_age_s, max_bytes, packs=args.pack_prompts)
    async with open_cells(source, name="streams", role="operator", streams=(), whole=True) as logs:
        if any(log.stopped for log in logs):
            raise ValueError("the deployment is stopped: start it, then set the limits of its streams")
        names = [log.bus.subjects.stream(stream) for log in logs]
        if args.stream != stream:  # of one cell
            logs = [log for log, name in zip(logs, names, strict=True) if name == args.stream]
            if not logs:
                raise ValueError(f"{args.stream} is of another namespace: choose it with --namespace")
        limits = [await _limits(log, stream, max_age_s, max_bytes) for log in logs]
        if args.pack_prompts and not args.yes:
            await _check_readers(logs)
        lost = [_what(each, use) for use, each in limits if each]
        if lost and not args.yes and not confirmed(f"{' '.join(lost)} Continue?"):
            raise ValueError("nothing was changed; --yes deletes without asking")
        for log, (use, _) in zip(logs, limits, strict=True):
            change = _changes(use, max_age_s, max_bytes, packs=args.pack_prompts)
            try:
                async with recorded(log.bus.nc, log.bus.subjects, "streams set", use.name, change):
                    await retention.set_limits(log.bus.nc, use.name, max_age_s, max_bytes, packs=args.pack_prompts)
            except BrokerProblem as error:
                raise ValueError(str(error)) from error
    for use, _ in limits:
        if max_bytes is not None and 0 < use.max_bytes < max_bytes:
            print(
                f"warning: this raises the limit of {use.name} from {show_size(use.max_bytes)} to "
                f"{show_size(max_bytes)}: the broker's disk needs the room",
                file=sys.stderr,
            )
        age = show_duration(max_age_s if max_age_s is not None else use.max_age_s)
        size = show_size(max_bytes or use.max_bytes)
        console.print(f"{use.name} keeps messages for {age}, at most {size}", highlight=False)


async def _check_readers(logs: Sequence[Log]) -> None:
    earlier = []
    for log in logs:
        earlier += [each.name or each.worker for each in await registrations(log.bus) if not each.reads_packed]
        earlier += [each.router for each in await routers(log.bus) if not each.reads_packed]
    if earlier:
        names = ", ".join(sorted(earlier)[:SHOWN]) + (", …" if len(earlier) > SHOWN else "")
        raise ValueError(
            f"nothing was changed: {names} may be of builds that cannot read packed prompts. Upgrade them, and all "
            "gateways, which this cannot see; --yes does not look"
        )


async def _limits(log: Log, stream: str, max_age_s: float | None, max_bytes: int | None) -> tuple[StreamUse, Loss]:
    """A cell's stream as it is, and what new limits delete of it."""
    name = log.bus.subjects.stream(stream)
    use = next((use for use in await _uses(log) if use.name == name), None)
    if use is None:
        raise ValueError(f"there is no stream {name}: run `penstock streams apply`")
    return use, await retention.loss(log.bus, use, max_age_s, max_bytes)


def _changes(use: StreamUse, max_age_s: float | None, max_bytes: int | None, *, packs: bool) -> str:
    """As in "max-age: 1h → 2h", for the audit log."""
    parts = []
    if max_age_s is not None:
        parts.append(f"max-age: {show_duration(use.max_age_s) if use.max_age_s else NONE} → {show_duration(max_age_s)}")
    if max_bytes is not None:
        parts.append(f"max-bytes: {show_size(use.max_bytes) if use.max_bytes else NONE} → {show_size(max_bytes)}")
    return ", ".join([*parts, *(["prompts packed"] if packs else [])])


def _what(lost: Loss, use: StreamUse) -> str:
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() - use.oldest_s))
    parts = [f"{counted(lost.messages, 'message')} older than that"] if lost.messages else []
    parts += [f"its oldest {show_size(lost.bytes)}"] if lost.bytes else []
    return f"This deletes {' and '.join(parts)} from {use.name} (messages since {since})."
