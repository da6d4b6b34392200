"""``penstock tail``: prints stored messages as lines, and follows new ones."""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console

from penstock.cli.figures import clock, moment_ns
from penstock.cli.terminal import escape, print_hanging, stdout, write_json
from penstock.configs.flags import Parser, closest
from penstock.infra.bus.direct_get import Entry, Readable, format_time, get_last, read, read_backwards
from penstock.log_tools.requests.describe import Described, describe, plain
from penstock.log_tools.sources.open_log import Log, LogSource, add_flags, open_cells, run_command
from penstock.log_tools.timeline.read import whole_id
from penstock.schemas.requests import request_of_answer, time_of
from penstock.schemas.streams import CLOCK_SKEW_NS

POLL_S = 0.25
STREAMS = {
    "requests": ("REQUESTS", "request"),
    "work": ("WORK", "work"),
    "tokens": ("TOKENS", "tokens"),
    "kv": ("KV", "kv"),
    "handoff": ("HANDOFF", "handoff"),
    "done": ("DONE", "done"),
    "returned": ("DONE", "returned"),
    "plan": ("PLAN", "plan"),
}
_STYLES = {
    "job": "cyan",
    "done": "green",
    "returned": "red",
    "revoke": "red",
    "tokens": "dim",
    "kv": "dim",
    "plan": "yellow",
}


class TailPlace(NamedTuple):
    """Where messages are. ``stream``: without the namespace."""

    log: Log
    stream: str
    subject: str


class StoredEntry(NamedTuple):
    """``cell``: whose log has it."""

    cell: int
    entry: Entry


class TailOptions(NamedTuple):
    """Which messages. ``with_cells``: lines name the cell."""

    places: tuple[TailPlace, ...]
    with_cells: bool
    lines: int
    from_seq: int
    since_ns: int
    until_ns: int
    worker: str
    request: str
    follow: bool
    as_json: bool

    @property
    def ranged(self) -> bool:
        """Whether a start is given; without one, the last ``lines`` messages are shown."""
        return bool(self.from_seq or self.since_ns)


def run(argv: Sequence[str]) -> int:
    """Print messages; returns the exit status."""
    parser = Parser(prog="penstock tail", description="print the last messages of the log, decoded, one line each")
    _add_flags(parser)
    args = parser.parse_args(argv)
    console = stdout()
    return run_command("tail", lambda: _run(LogSource.of(args), args, console))


def _add_flags(parser: argparse.ArgumentParser) -> None:
    kinds = ", ".join(STREAMS)
    parser.add_argument("what", nargs="*", help=f"{kinds}, or a subject such as ps.work.decode.>; default: everything")
    parser.add_argument("--worker", default="", help="only messages to, from or about it: its id or a part of it")
    parser.add_argument("--request", default="", help="only messages about this request")
    parser.add_argument("--from-seq", type=int, default=0, help="begin at this sequence; of one stream only")
    parser.add_argument("--since", default="", help="begin 15m, 2h, 7d ago, or at 2026-11-22T09:30")
    parser.add_argument("--until", default="", help="end there; written like --since")
    parser.add_argument("--lines", "-n", type=int, default=10, help="most messages without --since or --from-seq")
    parser.add_argument(
        "--follow", "-f", action="store_true", help="then print messages as they are stored, until Ctrl-C"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line, with the whole message")
    add_flags(parser)


async def _run(source: LogSource, args: argparse.Namespace, console: Console) -> None:
    names = sorted({stream for stream, _ in STREAMS.values()})
    async with open_cells(source, name="tail", streams=names, files=True) as logs:
        args.request = await whole_id(logs, request_of_answer(args.request)) if args.request else ""
        options = _options(args, logs)
        if options.follow and any(log.stopped for log in logs):
            raise ValueError("the deployment is stopped: there is nothing to follow")
        ends = {place: await _end(place) for place in options.places}
        shown: list[StoredEntry] = []
        for place in options.places:
            shown += await _stored(place, ends[place], options)
        shown.sort(key=lambda stored: stored.entry.time_ns)
        kept = [(each, about) for each in shown if (about := _wanted(each.entry, options)) is not None]
        _print(kept if options.ranged else kept[len(kept) - min(options.lines, len(kept)) :], options, console)
        if not kept and not options.follow:
            print("no message matches", file=sys.stderr)
        if options.follow:
            await _follow(ends, options, console)


def _options(args: argparse.Namespace, logs: Sequence[Log]) -> TailOptions:
    now_ns = time.time_ns()
    places = tuple(_places(args.what, logs))
    if args.from_seq and len(places) != 1:
        cells = "; choose a cell with --namespace" if len(logs) > 1 else ""
        raise ValueError(
            f"--from-seq counts the messages of one stream: name it, as in `penstock tail work --from-seq 100`{cells}"
        )
    if args.lines < 0:
        raise ValueError(f"--lines {args.lines}: give a number of messages")
    request = request_of_answer(args.request)
    if request:
        time_of(request)  # raises before anything is read
    return TailOptions(
        places,
        len(logs) > 1,
        args.lines,
        args.from_seq,
        moment_ns(args.since, now_ns) if args.since else 0,
        moment_ns(args.until, now_ns) if args.until else 0,
        args.worker,
        request,
        args.follow,
        args.json,
    )


def _places(wanted: Sequence[str], logs: Sequence[Log]) -> Iterator[TailPlace]:
    """A kind of message is of all cells, and so is a subject of the first one's namespace; others are of one cell."""
    for what in wanted or ("",):
        namespace, _, rest = what.partition(".")
        kind = rest.partition(".")[0]
        stream = next((stream for stream, its in STREAMS.values() if its == kind), "") if rest else ""
        chosen = [log for log in logs if log.reader.subjects.namespace == namespace] if stream else []
        if chosen and chosen[0] is logs[0]:
            yield from (TailPlace(log, stream, f"{log.reader.subjects.namespace}.{rest}") for log in logs)
        elif chosen:
            yield TailPlace(chosen[0], stream, what)
        elif what and what not in STREAMS:
            raise ValueError(f"{what!r} is not a kind of message: {_hint(what, logs[0].reader)}")
        else:
            for log in logs:
                for stream, its in [STREAMS[what]] if what else STREAMS.values():
                    yield TailPlace(log, stream, log.reader.subjects.all(its))


def _hint(what: str, bus: Readable) -> str:
    if near := closest(what, STREAMS):
        return f"did you mean {near}?"
    return f"name one of {', '.join(STREAMS)}, or a subject below {bus.subjects.namespace}."


async def _end(place: TailPlace) -> int:
    bus = place.log.reader
    last = await get_last(bus, bus.subjects.stream(place.stream), place.subject, newest=True)
    return last.seq if last is not None else 0


async def _stored(place: TailPlace, end: int, options: TailOptions) -> list[StoredEntry]:
    return [StoredEntry(place.log.cell, entry) for entry in await _entries(place, end, options)] if end else []


async def _entries(place: TailPlace, end: int, options: TailOptions) -> list[Entry]:
    bus, subject = place.log.reader, place.subject
    stream = bus.subjects.stream(place.stream)
    entries: list[Entry] = []
    if options.ranged:
        start = max(0, options.from_seq - 1)
        async for entry in read(bus, stream, subject, after=start, since_ns=options.since_ns, until_seq=end):
            if options.until_ns and entry.time_ns >= options.until_ns:
                break
            entries.append(entry)
        return entries
    oldest = time_of(options.request) - CLOCK_SKEW_NS if options.request else 0
    async for entry in read_backwards(bus, stream, subject, before=end + 1):
        if len(entries) == options.lines or entry.time_ns < oldest:
            break
        if (not options.until_ns or entry.time_ns < options.until_ns) and _wanted(entry, options) is not None:
            entries.append(entry)
    return entries


async def _follow(ends: dict[TailPlace, int], options: TailOptions, console: Console) -> None:
    while True:
        new: list[StoredEntry] = []
        for place, end in ends.items():
            bus = place.log.reader
            async for entry in read(bus, bus.subjects.stream(place.stream), place.subject, after=end):
                new.append(StoredEntry(place.log.cell, entry))
                ends[place] = entry.seq
        new.sort(key=lambda stored: stored.entry.time_ns)
        _print([(each, about) for each in new if (about := _wanted(each.entry, options)) is not None], options, console)
        await asyncio.sleep(POLL_S)


def _wanted(entry: Entry, options: TailOptions) -> Described | None:
    described = describe(entry.subject, entry.headers, entry.data)
    if options.request and options.request not in described.requests:
        return None
    if options.worker and options.worker not in entry.subject and options.worker not in described.text:
        return None
    return described


def _print(described: Iterable[tuple[StoredEntry, Described]], options: TailOptions, console: Console) -> None:
    now_ns = time.time_ns()
    for (cell, entry), about in described:
        if options.as_json:
            line = ({"cell": cell} if options.with_cells else {}) | {
                "subject": entry.subject,
                "seq": entry.seq,
                "time": format_time(entry.time_ns),
                "headers": {name: value for name, value in entry.headers.items() if not name.startswith("Nats-")},
                "kind": about.kind,
                "message": plain(about.content),
            }
            write_json(console, line)
            continue
        where = f"{entry.subject.split('.')[1]}#{entry.seq}"
        where = f"{cell}:{where}" if options.with_cells else where
        print_hanging(console, *markup(clock(entry.time_ns, now_ns), where, about))
    console.file.flush()


def markup(at: str, where: str, about: Described) -> tuple[str, str]:
    """A message in rich's markup: time, place, kind and text. ``at``, ``where``: as shown."""
    style = _STYLES.get(about.kind, "")
    kind = f"[{style}]{about.kind:<9}[/]" if style else f"{about.kind:<9}"
    name = next(iter(about.requests)) if len(about.requests) == 1 else ""
    return f"{at} {where:<14} {kind} ".lstrip(), f"{name} {escape(about.text)}".lstrip()
