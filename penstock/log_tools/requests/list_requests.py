"""``penstock requests``: lists the requests of a deployment, which may be running or stopped.

Lines are as wide as the terminal; formatting 100,000 takes a second.
"""

import argparse
import asyncio
import contextlib
import re
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import msgspec
from rich.console import Console

from penstock.cli.figures import clock, counted, duration_ns, moment_ns, span
from penstock.cli.terminal import stdout
from penstock.configs.flags import Parser
from penstock.infra.bus.direct_get import Readable, get_last, read
from penstock.log_tools.requests.describe import Texts
from penstock.log_tools.requests.find_requests import (
    LoggedRequest,
    ended,
    merged,
    of_entry,
    summaries,
    unfinished,
    with_prompt,
)
from penstock.log_tools.requests.slow import PROPERTIES, GroupComparison, Samples, comparison_lines, itl_ms, report
from penstock.log_tools.requests.text_search import RecordSearch
from penstock.log_tools.sources.open_log import Log, LogSource, add_flags, add_verify_flag, open_cells, run_command
from penstock.schemas.keys import PREFIX, check_id
from penstock.schemas.summary import NOT_SAMPLED, QUEUED, RUNNING, STATES, UNKNOWN, Criteria, RequestSummary, as_dict

_COLOURS = {"done": "32", "failed": "31", "cancelled": "33", "running": "36", "queued": "35", "unknown": "31"}  # ANSI
_GAP = "  "
_NONE, _ERROR, _MATCH = -len(_GAP), 16, 24  # columns for nothing, for an error, for what --grep found
_LEAST = 8


class RequestLine(NamedTuple):
    """``match``: what --grep found, with its surroundings. ``cell``: None: the deployment has only one."""

    summary: RequestSummary
    match: str = ""
    cell: int | None = None


class _Column(NamedTuple):
    """A column of the list. Least ``width``: rows that --follow adds later stand below the first ones."""

    name: str
    width: int
    cell: Callable[[RequestSummary, int], str]
    leaves: int = 0  # the highest is left out first where there is no room; 0: it stays
    number: bool = False


def lines(
    requests: Sequence[RequestLine],
    *,
    width: int,
    now_ns: int,
    header: str = "",
    colours: bool = False,
    at_ns: int = 0,
) -> Iterator[str]:
    """
    Args:
        at_ns: show what each did at this time; 0: not.
        width: of the terminal, in columns.
        header: name of the last column, above the list; "": no line of names.
        colours: as ANSI escape sequences.
    """
    table = {column: [column.cell(each.summary, now_ns) for each in requests] for column in _COLUMNS}
    if any(each.cell is not None for each in requests):
        table = {_CELL: ["" if each.cell is None else str(each.cell) for each in requests]} | table
    if at_ns:
        table |= {_THEN: [_phase(each.summary, at_ns) for each in requests]}
    sizes = {column: max(column.width, *map(len, cells)) for column, cells in table.items()}
    if not any(table[_CODE]):
        del sizes[_CODE]
    for column in _MADE_WITH:
        # "" is no adapter, and of the others that a record of an earlier release does not say it.
        if len({cell for cell in table[column] if cell or column is _ADAPTER}) < 2:
            del sizes[column]
    left = _drop(sizes, width, _wanted(requests))
    cut = _CODE if _CODE in sizes else _STATE
    sizes[cut] += min(0, left - _NONE)  # what stays is wider than the terminal
    columns, widths = list(sizes), list(sizes.values())
    rows = zip(*(table[column] for column in columns), strict=True)
    forms = [f"{{:{'>' if column.number else '<'}{size}}}" for column, size in zip(columns, widths, strict=True)]
    form = _GAP.join(forms).format
    if header:
        name = f"{_GAP}{header}" if left >= _LEAST else ""
        yield _bold(f"{form(*(column.name for column in columns))}{name}", colours)
    state, place = columns.index(_STATE), columns.index(cut)
    for (summary, match, _), row in zip(requests, rows, strict=True):
        cells = list(row)
        cells[place] = _cut(cells[place], widths[place])
        if colours:
            cells[state] = f"\x1b[{_COLOURS[summary.state]}m{cells[state]:<{widths[state]}}\x1b[0m"
        text = match or summary.message if left >= _LEAST else ""
        if text:
            text = _cut(_one_line(" ".join(text.split())), left)
        yield f"{form(*cells)}{_GAP}{text}".rstrip()


def _wanted(requests: Sequence[RequestLine]) -> int:
    if any(each.match for each in requests):
        return _MATCH
    return _ERROR if any(each.summary.message for each in requests) else _NONE


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _drop(sizes: dict[_Column, int], width: int, text: int) -> int:
    """Remove columns until the others and ``text`` characters of text fit. Returns the width left for text."""
    for column in sorted(sizes, key=lambda column: column.leaves, reverse=True):
        left = width - sum(sizes.values()) - len(_GAP) * len(sizes)
        if column.leaves <= _OVER_ERRORS and text == _ERROR:
            text = _NONE
        if left >= text or not column.leaves:
            break
        del sizes[column]
    return left


def _bold(text: str, colours: bool) -> str:
    return f"\x1b[1m{text}\x1b[0m" if colours else text


@lru_cache(maxsize=4096)
def _second(seconds: int, now_ns: int) -> str:
    return clock(seconds * 1_000_000_000, now_ns)[:-4]


def _clock(at_ns: int, now_ns: int) -> str:
    seconds, nanoseconds = divmod(at_ns, 1_000_000_000)
    return f"{_second(seconds, now_ns)}.{nanoseconds // 1_000_000:03d}"


def _one_line(text: str) -> str:
    """A client's text, without control characters that would move the cursor."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "�" for each in text)


def _temperature(request: RequestSummary) -> str:
    sampled = request.sampling is not None and request.endpoint not in NOT_SAMPLED
    return f"{request.sampling.temperature:g}" if sampled and request.sampling is not None else ""


_REVISION = 12  # characters of it


def _phase(request: RequestSummary, at_ns: int) -> str:
    """What became of a request at a time at which it was under way."""
    if not request.routed_ns or at_ns < request.routed_ns:
        return "held" if request.state != RUNNING else RUNNING
    return "prompt" if at_ns < request.first_token_ns or not request.first_token_ns else "generating"


def _count(request: RequestSummary, tokens: int) -> str:
    """Nothing where it is not known: only the record of an ended request says how many tokens there are."""
    return str(tokens) if tokens or request.state not in (QUEUED, RUNNING) else ""


_OVER_ERRORS = 4  # columns up to here matter more than the text of errors, whose code has a column
_CELL = _Column("cell", 4, lambda request, _: "", 2, number=True)  # of a deployment with several
_THEN = _Column("then", 10, lambda request, _: "", 3)  # of --at
_STATE = _Column("state", 9, lambda request, _: request.state)
_CODE = _Column("code", 4, lambda request, _: request.code if request.code != request.state else "", 1)
_ADAPTER = _Column("adapter", 7, lambda request, _: _one_line(request.adapter), 6)
_MADE_WITH = (  # what tokens depend on besides the prompt: shown where the listed requests differ in it
    _Column("revision", 8, lambda request, _: _one_line(request.revision[:_REVISION]), 6),
    _Column("engine", 6, lambda request, _: _one_line(request.engine), 6),
    _Column("build", 5, lambda request, _: _one_line(request.build), 8),
    _ADAPTER,
    _Column("temperature", 11, lambda request, _: _temperature(request), 6, number=True),
)
_COLUMNS = (
    _Column("accepted", 12, lambda request, now_ns: _clock(request.created_ns, now_ns), 3),
    _Column("id", 36, lambda request, _: request.id),
    _STATE,
    _CODE,
    _Column("model", 6, lambda request, _: _one_line(request.model), 7),
    _Column("worker", 17, lambda request, _: _one_line(" → ".join(request.workers)), 5),
    _Column("prompt", 6, lambda request, _: str(request.prompt_tokens), 6, number=True),
    _Column("cached", 6, lambda request, _: _count(request, request.cached_tokens), 9, number=True),
    _Column("out", 5, lambda request, _: _count(request, request.completion_tokens), 4, number=True),
    _Column("ttft", 9, lambda request, _: span(request.ttft_ms), 8, number=True),
    _Column("duration", 9, lambda request, _: span(request.duration_ms), 2, number=True),
    *_MADE_WITH,
)


POLL_S = 0.5
WRITTEN_TOGETHER = 500  # lines
_encode = msgspec.json.Encoder().encode
SNIPPET = 60  # characters of what --grep found
BEFORE = 10  # of them in front of it, so that a narrow terminal shows the match


SLOWEST_PERCENT = 5.0
WHY = {"slow": "duration", "ttft": "ttft", "itl": "itl"}
SORTS: dict[str, Callable[[RequestSummary], float]] = {
    "ttft": lambda request: request.ttft_ms or 0.0,
    "itl": lambda request: itl_ms(request) or 0.0,
    "tokens": lambda request: request.prompt_tokens + request.completion_tokens,
    "wait": lambda request: max(0, request.routed_ns - request.created_ns) if request.routed_ns else 0,
}


def largest(found: Iterable[RequestLine], sort: str, limit: int) -> list[RequestLine]:
    """The lines with the largest values first, at most ``limit``; 0: all."""
    return sorted(found, key=lambda line: SORTS[sort](line.summary), reverse=True)[: limit or None]


class ListOptions(NamedTuple):
    """What to list and how. ``limit``: most requests to list; 0: all."""

    criteria: Criteria
    limit: int
    follow: bool
    as_json: bool
    grep: re.Pattern[str] | None
    texts: Texts
    sort: str = ""
    why: str = ""
    slowest_percent: float = SLOWEST_PERCENT
    by: str = ""


def run(argv: Sequence[str]) -> int:
    """List requests; returns the exit status."""
    parser = Parser(
        prog="penstock requests", description="list requests: unfinished ones first, then ended ones, latest first"
    )
    _add_flags(parser)
    args = parser.parse_args(argv)
    console = stdout()
    return run_command("requests", lambda: _run(LogSource.of(args), _options(args), console))


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--since", default="", help="accepted since: 15m, 2h, 7d ago, or 2026-11-22T09:30")
    parser.add_argument("--until", default="", help="accepted before; written like --since")
    parser.add_argument("--at", default="", help="unfinished at this time: 14:03:10, or written like --since")
    parser.add_argument("--model", default="", help="as the client named it")
    parser.add_argument("--tenant", default="", help="whose requests")
    parser.add_argument("--key", default="", help="API key, as `penstock keys list` shows it: pst-0a1b2c3d4e5f")
    parser.add_argument(
        "--worker", default="", help="id of one of its workers, also of an earlier attempt, or the beginning of it"
    )
    parser.add_argument("--lost", action="store_true", help="only requests that lost a worker")
    parser.add_argument("--user", default="", help="the client's `user` field")
    parser.add_argument("--state", action="append", choices=STATES, default=[], help="may be given several times")
    parser.add_argument("--code", default="", help="error code, such as deadline_exceeded; `any`: every failure")
    parser.add_argument("--min-duration", default="0s", help="took at least this long in all: 300ms, 20s")
    parser.add_argument("--min-ttft", default="0s", help="took at least this long to its first token")
    parser.add_argument("--grep", default="", help="regular expression that its prompt or its answer contains")
    parser.add_argument("--ignore-case", "-i", action="store_true", help="of --grep")
    parser.add_argument(
        "--model-path", default="", help="directory of the tokenizer for --grep; default: by the model's name"
    )
    parser.add_argument(
        "--sort", choices=sorted(SORTS), default="", help="sort all by this, largest first; wait: for a worker"
    )
    parser.add_argument(
        "--why",
        choices=tuple(WHY),
        default="",
        help="instead of a list: how the slowest differ from the others, by duration (slow), time to the first token "
        "or between tokens",
    )
    parser.add_argument(
        "--slowest", type=float, default=SLOWEST_PERCENT, metavar="PERCENT", help="of --why (default: %(default)g)"
    )
    parser.add_argument(
        "--by",
        choices=PROPERTIES,
        default="",
        metavar="PROPERTY",
        help="instead of a list: number and times of ended requests by a property: " + ", ".join(PROPERTIES),
    )
    parser.add_argument("--limit", "-n", type=int, default=50, help="most requests to list; 0: all")
    parser.add_argument("--follow", "-f", action="store_true", help="then print requests as they end, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    add_flags(parser)
    add_verify_flag(parser)


def _options(args: argparse.Namespace) -> ListOptions:
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
        api_key=f"{PREFIX}{check_id(args.key)}" if args.key else "",
        lost=args.lost,
        at_ns=moment_ns(args.at, now_ns) if args.at else 0,
    )
    if args.limit < 0:
        raise ValueError(f"--limit {args.limit}: give a number of requests, or 0 for all")
    try:
        grep = re.compile(args.grep, re.IGNORECASE if args.ignore_case else 0) if args.grep else None
    except re.error as error:
        raise ValueError(f"--grep {args.grep!r} is not a regular expression: {error}") from error
    if not 0 < args.slowest < 100:
        raise ValueError(f"--slowest {args.slowest:g}: give a number of percent between 0 and 100")
    if (args.why or args.by) and args.follow:
        raise ValueError("--why and --by look at requests that have ended: leave out --follow")
    if args.why and args.by:
        raise ValueError("--why compares by every property, and --by by one: leave one of them out")
    texts = Texts(args.model_path)
    return ListOptions(
        criteria,
        args.limit,
        args.follow,
        args.json,
        grep,
        texts,
        args.sort,
        WHY.get(args.why, ""),
        args.slowest,
        args.by,
    )


async def _run(source: LogSource, options: ListOptions, console: Console) -> None:
    async with open_cells(source, name="requests", streams=("REQUESTS", "WORK", "DONE"), files=True) as logs:
        if options.follow and any(log.stopped for log in logs):
            raise ValueError("the deployment is stopped: there is nothing to follow")
        cells = [(log, log.cell if len(logs) > 1 else None) for log in logs]
        if options.by:
            await _compare(cells, options, console)
            return
        if options.why:
            await _explain(cells, options, console)
            return
        ends = [
            await get_last(log.reader, log.reader.subjects.stream("DONE"), log.reader.subjects.all("done"))
            for log in logs
        ]
        async with contextlib.aclosing(_list(cells, options._replace(limit=0) if options.sort else options)) as found:
            lines = [line async for line in found]
        if options.sort:
            lines = largest(lines, options.sort, options.limit)
        _print(lines, options, console, header=True)
        if not lines and not options.as_json and not options.follow:
            console.print("no request matches")
        if options.follow:
            await _follow(cells, [last.seq if last is not None else 0 for last in ends], options, console)


Cells = Sequence[tuple[Log, int | None]]  # with the number that lines show


async def _list(cells: Cells, options: ListOptions) -> AsyncGenerator[RequestLine, None]:
    count = 0
    criteria = options.criteria
    states = criteria.states
    requests: list[RequestLine] = []
    if _may_be_unfinished(criteria):
        for log, cell in cells:
            found = await unfinished(log.reader, criteria, stopped=log.stopped)
            requests += [line for each in found if (line := _line(each, options, cell)) is not None]
    for line in sorted(requests, key=lambda line: line.summary.created_ns, reverse=True):
        yield line
        count += 1
        if count == options.limit:
            return
    if states and not states - {QUEUED, RUNNING}:
        return
    async with contextlib.AsyncExitStack() as stack:
        parts = [_ended(log.reader, options, cell) for log, cell in cells]
        for part in parts:
            await stack.enter_async_context(contextlib.aclosing(part))
        async for line in merged(parts, lambda line: line.summary.ended_ns):
            yield line
            count += 1
            if count == options.limit:
                return


async def _compare(cells: Cells, options: ListOptions, console: Console) -> None:
    comparison = GroupComparison(options.by)
    for log, cell in cells:
        async with contextlib.aclosing(_ended(log.reader, options, cell)) as found:
            async for line in found:
                comparison.add(line.summary)
    groups = comparison.groups()
    if options.as_json:
        for each in groups:
            console.file.write(_encode(each).decode() + "\n")
        return
    for text in comparison_lines(options.by, groups) if groups else ("no request matches",):
        console.print(text, markup=False, highlight=False, soft_wrap=True)


async def _explain(cells: Cells, options: ListOptions, console: Console) -> None:
    samples = Samples(options.why)
    for log, cell in cells:
        async with contextlib.aclosing(_ended(log.reader, options, cell)) as found:
            async for line in found:
                samples.add(line.summary, cell)
    try:
        slow = samples.slowest(options.slowest_percent)
    except ModuleNotFoundError as error:
        raise ValueError("--why needs numpy: pip install 'penstock[router]'") from error
    if options.as_json:
        console.file.write(_encode(slow).decode() + "\n")
        return
    for line_of_report in report(slow, console.width):
        console.print(line_of_report, markup=False, highlight=False, soft_wrap=True)


async def _ended(bus: Readable, options: ListOptions, cell: int | None) -> AsyncGenerator[RequestLine, None]:
    if options.grep is None:
        async for summary in summaries(bus, options.criteria):
            yield RequestLine(summary, cell=cell)
        return
    search = RecordSearch(options.grep, options.texts)
    try:
        async for _, each in ended(bus, options.criteria, search=search):
            if (line := _line(each, options, cell)) is not None:
                yield line
    finally:
        if search.without_prompt:
            print(
                f"penstock requests: of {counted(search.without_prompt, 'request')}, only the answer was searched: "
                f"{bus.subjects.stream('REQUESTS')} no longer has the prompt. It keeps prompts for 7 days, or until it "
                "is full (`penstock streams set REQUESTS`)",
                file=sys.stderr,
            )


def _may_be_unfinished(criteria: Criteria) -> bool:
    if criteria.code or criteria.min_ms:
        return False
    return not criteria.states or bool(criteria.states & {QUEUED, RUNNING, UNKNOWN})


async def _follow(cells: Cells, after: Sequence[int], options: ListOptions, console: Console) -> None:
    ends = list(after)
    while True:
        new: list[RequestLine] = []
        for at, (log, cell) in enumerate(cells):
            bus = log.reader
            async for entry in read(bus, bus.subjects.stream("DONE"), bus.subjects.all("done"), after=ends[at]):
                ends[at] = entry.seq
                request = await with_prompt(bus, entry) if options.grep is not None else of_entry(entry)
                if request is not None and options.criteria.accepts(request.summary):
                    line = _line(request, options, cell)
                    new += [line] if line is not None else []
        new.sort(key=lambda line: line.summary.ended_ns)
        _print(new, options, console, header=False)
        await asyncio.sleep(POLL_S)


def _line(request: LoggedRequest, options: ListOptions, cell: int | None) -> RequestLine | None:
    if options.grep is None:
        return RequestLine(request.summary, cell=cell)
    match = match_in(options.grep, options.texts, request)
    return RequestLine(request.summary, match, cell) if match is not None else None


def match_in(wanted: re.Pattern[str], texts: Texts, request: LoggedRequest) -> str | None:
    """What a request's prompt or answer has of a pattern, with its surroundings; None: neither has it.

    Raises:
        ValueError: the model's tokenizer is not to be found.
    """
    searched = [texts.prompt(request.request)] if request.request is not None else []
    searched += texts.outputs(request.record) if request.record is not None else []
    for text in searched:
        if match := wanted.search(text):
            start = max(0, match.start() - BEFORE)
            end = max(match.end(), start + SNIPPET)
            return " ".join(text[start:end].split())
    return None


def _print(request_lines: Sequence[RequestLine], options: ListOptions, console: Console, *, header: bool) -> None:
    written: Iterable[str]
    if options.as_json:
        written = (_encode(_as_dict(line)).decode() for line in request_lines)
    elif request_lines:
        width, colours = console.width, console.color_system is not None and not console.no_color
        name = ("text" if options.grep is not None else "error") if header else ""
        at_ns = options.criteria.at_ns
        written = lines(request_lines, width=width, now_ns=time.time_ns(), header=name, colours=colours, at_ns=at_ns)
    else:
        return
    for part in _batched(written, WRITTEN_TOGETHER):  # standard output is flushed at each line's end
        console.file.write("\n".join(part) + "\n")
    console.file.flush()


def _batched(items: Iterable[str], size: int) -> Iterator[list[str]]:
    """The items in lists of ``size``."""
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part


def _as_dict(line: RequestLine) -> dict[str, object]:
    cell = {"cell": line.cell} if line.cell is not None else {}
    return as_dict(line.summary) | cell | ({"match": line.match} if line.match else {})
