"""``penstock requests``: the requests of a deployment, running or stopped, without knowing their ids."""

import argparse
import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Literal, NamedTuple

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from configs.flags import Parser
from infra.bus.connection import Bus
from infra.bus.direct_get import get_last, read
from infra.terminal import stdout
from infra.timeline.find_requests import Found, ended, of_entry, unfinished
from infra.timeline.moments import clock, duration_ns, moment_ns, span
from infra.timeline.open_log import Log, Source, add_flags, open_log, run_command
from infra.timeline.texts import Texts
from schemas.summary import STATES, WAITING, Criteria, RequestSummary, as_dict

POLL_S = 0.5
SNIPPET = 60  # characters around what --grep found
_STYLES = {"finished": "green", "failed": "red", "cancelled": "yellow", "running": "cyan", "waiting": "magenta"}


class Options(NamedTuple):
    """What to list and how. ``limit``: at most so many; 0: all."""

    criteria: Criteria
    limit: int
    follow: bool
    as_json: bool
    grep: re.Pattern[str] | None
    texts: Texts


class _Line(NamedTuple):
    summary: RequestSummary
    match: str  # what --grep found, with its surroundings


def run(argv: Sequence[str]) -> int:
    """List requests; returns the exit status."""
    parser = Parser(
        prog="penstock requests",
        description="list requests: unfinished ones first, then those that have ended, the last to end first",
    )
    _add_flags(parser)
    args = parser.parse_args(argv)
    console = stdout()
    return run_command("requests", lambda: _run(Source.of(args), _options(args), console))


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--since", default="", help="accepted since: 15m, 2h, 7d ago, or 2026-11-22T09:30")
    parser.add_argument("--until", default="", help="accepted before; written like --since")
    parser.add_argument("--model", default="", help="as the client named it")
    parser.add_argument("--tenant", default="", help="whose requests")
    parser.add_argument("--worker", default="", help="id of its last worker, or the beginning of it")
    parser.add_argument("--user", default="", help="the client's `user` field")
    parser.add_argument("--state", action="append", choices=STATES, default=[], help="may be given several times")
    parser.add_argument("--code", default="", help="error code, such as deadline_exceeded; `any`: every failure")
    parser.add_argument("--min-duration", default="0s", help="took at least, from acceptance to the end: 300ms, 20s")
    parser.add_argument("--min-ttft", default="0s", help="took at least so long to its first token")
    parser.add_argument("--grep", default="", help="regular expression that its prompt or its answer contains")
    parser.add_argument("--ignore-case", "-i", action="store_true", help="of --grep")
    parser.add_argument(
        "--model-path", default="", help="directory of the tokenizer for --grep; default: by the model's name"
    )
    parser.add_argument("--limit", "-n", type=int, default=50, help="at most so many; 0: all")
    parser.add_argument("--follow", "-f", action="store_true", help="then print requests as they end, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    add_flags(parser)


def _options(args: argparse.Namespace) -> Options:
    now_ns = time.time_ns()
    criteria = Criteria(
        moment_ns(args.since, now_ns) if args.since else 0,
        moment_ns(args.until, now_ns) if args.until else 0,
        args.model,
        args.tenant,
        args.worker,
        args.user,
        frozenset(args.state),
        args.code,
        duration_ns(args.min_duration) / 1e6,
        duration_ns(args.min_ttft) / 1e6,
    )
    if args.limit < 0:
        raise ValueError(f"--limit {args.limit}: give a number of requests, or 0 for all")
    try:
        grep = re.compile(args.grep, re.IGNORECASE if args.ignore_case else 0) if args.grep else None
    except re.error as error:
        raise ValueError(f"--grep {args.grep!r} is not a regular expression: {error}") from error
    return Options(criteria, args.limit, args.follow, args.json, grep, Texts(args.model_path))


async def _run(source: Source, options: Options, console: Console) -> None:
    async with open_log(source, name="requests", streams=("REQUESTS", "WORK", "DONE")) as log:
        if options.follow and log.stopped:
            raise ValueError("the deployment is stopped: there is nothing to follow")
        last = await get_last(log.bus, log.bus.subjects.stream("DONE"), log.bus.subjects.all("done"))
        lines = [line async for line in _list(log, options)]
        _print(lines, options, console, header=True)
        if not lines and not options.as_json and not options.follow:
            console.print("no request matches")
        if options.follow:
            await _follow(log.bus, last.seq if last is not None else 0, options, console)


async def _list(log: Log, options: Options) -> AsyncGenerator[_Line, None]:
    count = 0
    criteria = options.criteria
    states = criteria.states
    found = await unfinished(log.bus, criteria, stopped=log.stopped) if _may_be_unfinished(criteria) else []
    for each in found:
        if (line := _line(each, options)) is not None:
            yield line
            count += 1
            if count == options.limit:
                return
    if states and not states - {"waiting", "running"}:
        return
    async for _, each in ended(log.bus, criteria):
        if (line := _line(each, options)) is not None:
            yield line
            count += 1
            if count == options.limit:
                return


def _may_be_unfinished(criteria: Criteria) -> bool:
    if criteria.code or criteria.min_ms:
        return False
    return not criteria.states or bool(criteria.states & {WAITING, "running"})


async def _follow(bus: Bus, after: int, options: Options, console: Console) -> None:
    stream, subject = bus.subjects.stream("DONE"), bus.subjects.all("done")
    while True:
        lines = []
        async for entry in read(bus, stream, subject, after=after):
            after = entry.seq
            found = of_entry(entry)
            if found is not None and options.criteria.accepts(found.summary):
                line = _line(found, options)
                lines += [line] if line is not None else []
        _print(lines, options, console, header=False)
        await asyncio.sleep(POLL_S)


def _line(found: Found, options: Options) -> _Line | None:
    if options.grep is None:
        return _Line(found.summary, "")
    texts = [options.texts.prompt(found.request)] if found.request is not None else []
    texts += options.texts.outputs(found.record) if found.record is not None else []
    for text in texts:
        if match := options.grep.search(text):
            start, end = max(0, match.start() - SNIPPET // 2), match.end() + SNIPPET // 2
            return _Line(found.summary, " ".join(text[start:end].split()))
    return None


def _print(lines: Sequence[_Line], options: Options, console: Console, *, header: bool) -> None:
    if options.as_json:
        for line in lines:
            console.file.write(msgspec.json.encode(_as_dict(line)).decode() + "\n")
        console.file.flush()
    elif lines:
        console.print(_table(lines, options, width=console.width, header=header))


def _as_dict(line: _Line) -> dict[str, object]:
    return as_dict(line.summary) | ({"match": line.match} if line.match else {})


def _table(lines: Sequence[_Line], options: Options, *, width: int, header: bool) -> Table:
    now_ns = time.time_ns()
    table = Table(box=None, show_header=header, pad_edge=False, header_style="bold")
    columns = [column for column in _COLUMNS if width >= column.from_width]
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.number else "left"
        table.add_column(column.name, justify=justify, no_wrap=True, min_width=column.width)
    table.add_column("text" if options.grep is not None else "error", overflow="ellipsis", no_wrap=True)
    for summary, match in lines:
        cells = [column.cell(summary, now_ns) for column in columns]
        table.add_row(*cells, escape(match or summary.message))
    return table


class _Column(NamedTuple):
    """A column of the list. Fixed ``width``: rows that --follow adds later stand below the first ones."""

    name: str
    width: int
    cell: Callable[[RequestSummary, int], str]
    from_width: int = 0  # of the terminal: a narrower one does not show it
    number: bool = False


_COLUMNS = (
    _Column("accepted", 12, lambda found, now_ns: clock(found.created_ns, now_ns)),
    _Column("id", 36, lambda found, _: found.id),
    _Column("state", 9, lambda found, _: f"[{_STYLES[found.state]}]{found.code or found.state}[/]"),
    _Column("model", 6, lambda found, _: escape(found.model), 130),
    _Column("worker", 17, lambda found, _: escape(found.worker), 105),
    _Column("prompt", 6, lambda found, _: str(found.prompt_tokens), 90, number=True),
    _Column("cached", 6, lambda found, _: str(found.cached_tokens), 130, number=True),
    _Column("out", 5, lambda found, _: str(found.completion_tokens), number=True),
    _Column("ttft", 9, lambda found, _: span(found.ttft_ms), 120, number=True),
    _Column("duration", 9, lambda found, _: span(found.duration_ms), number=True),
)
