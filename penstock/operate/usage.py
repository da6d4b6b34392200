"""``penstock usage``: what tenants, API keys, models and adapters used, from the ledgers of all cells."""

import argparse
import csv
import datetime
import io
import sys
import time
from collections.abc import Iterator, Sequence

from rich.console import Console

from penstock.cli.figures import moment_ns
from penstock.cli.terminal import Column, escape, fitting_table, stdout, write_json
from penstock.configs.flags import Parser
from penstock.infra.bus.direct_get import read
from penstock.log_tools.sources.open_log import LogSource, add_flags, open_cells, run_command
from penstock.schemas import usage
from penstock.schemas.usage import BY, EVERY, UsageGap, UsageTable, month_of

COUNTS = ("requests", "prompt", "cached", "completion", "reasoning", "images")
FIELDS = (*COUNTS, "reasoning_unknown")  # of JSON and CSV; in the table, "reasoning" says whether all of it is known
_FORMS = {"hour": "%Y-%m-%d %H:00", "day": "%Y-%m-%d", "month": "%Y-%m"}


def run(argv: Sequence[str]) -> int:
    """Print what was used; the exit status."""
    parser = Parser(
        prog="penstock usage",
        description="show the usage of ended requests, by the hour of their end. Prompt tokens include cached ones, "
        "completion tokens reasoning (≥: unknown for some models). Requests that failed before the first token do not "
        "count. Hours, days and months are in UTC. Counts are kept for 13 months, also for requests that were deleted "
        "or not stored.",
    )
    parser.add_argument(
        "--by",
        type=_groups,
        default=("tenant",),
        metavar="A,B",
        help=f"of {', '.join(BY)}; '' for the sum of all (default: tenant)",
    )
    parser.add_argument("--every", choices=EVERY, default="", help="a row for each; default: one for the whole time")
    parser.add_argument(
        "--since", default="", metavar="TIME", help="15m, 2h, 7d ago, or a date in UTC (default: this month)"
    )
    parser.add_argument("--until", default="", metavar="TIME", help="likewise (default: now)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="comma-separated values, with a header")
    form.add_argument("--json", action="store_true", help="one JSON object per line")
    add_flags(parser)
    args = parser.parse_args(argv)
    return run_command("usage", lambda: _run(args, stdout()))


def _groups(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(filter(None, text.split(","))))
    if unknown := [name for name in names if name not in BY]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(BY)}")
    return names


async def _run(args: argparse.Namespace, console: Console) -> None:
    now_ns = time.time_ns()
    utc = datetime.UTC
    since_ns = max(0, moment_ns(args.since, now_ns, utc)) if args.since else month_of(now_ns)[0] * 1_000_000_000
    until_ns = moment_ns(args.until, now_ns, utc) if args.until else now_ns + 1
    if until_ns <= since_ns:
        raise ValueError("--until is not after --since")
    table = UsageTable(args.by, args.every, since_ns=since_ns, until_ns=until_ns)
    async with open_cells(LogSource.of(args), name="usage", role="viewer", streams=("USAGE",), files=True) as logs:
        for opened in logs:
            subjects = opened.reader.subjects
            parts = read(opened.reader, subjects.stream("USAGE"), subjects.all("usage"), since_ns=table.begin_ns)
            async for entry in parts:
                table.add(usage.decode(entry.data))
    rows = list(_rows(table, args.by, args.every))
    if args.json:
        for row in rows:
            write_json(console, row)
    elif args.csv:
        console.file.write(_csv(rows, args.by, args.every))
    else:
        _print(rows, args.by, args.every, console)
    for gap in table.gaps:
        print(f"penstock usage: {_described(gap)}", file=sys.stderr)


def _rows(table: UsageTable, by: Sequence[str], every: str) -> Iterator[dict[str, object]]:
    for each in table.sums():
        at = {"time": _time(each.begin_s, every)} if every else {}
        counts = {name: getattr(each.total, name) for name in FIELDS}
        yield {**at, **dict(zip(by, each.of, strict=True)), **counts}


def _time(at_s: int, every: str) -> str:
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).strftime(_FORMS[every])


def _csv(rows: Sequence[dict[str, object]], by: Sequence[str], every: str) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [*(["time"] if every else []), *by, *FIELDS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _print(rows: Sequence[dict[str, object]], by: Sequence[str], every: str, console: Console) -> None:
    if not rows:
        console.print("nothing was used in this time")
        return
    names = [*(["time"] if every else []), *by]
    columns = [Column("time (UTC)" if name == "time" else name) for name in names]
    columns += [Column(name, right=True) for name in COUNTS]
    cells = []
    for row in rows:
        unknown = {"reasoning"} if row["reasoning_unknown"] else set()
        counts = (f"{'≥ ' if name in unknown else ''}{row[name]:,}" for name in COUNTS)
        cells.append([*(escape(str(row[name])) or "–" for name in names), *counts])
    console.print(fitting_table(columns, cells, console.width))


def _described(gap: UsageGap) -> str:
    """What is not counted, as a sentence."""
    until = f"{_moment(gap.until_ns)}" if gap.until_ns else "now"
    between = f"between {_moment(gap.since_ns)} and {until}" if gap.since_ns else f"before {until}"
    missing = f"at most {gap.messages:,} requests {between} are missing"
    return f"{missing}: the log had discarded them before they were counted"


def _moment(at_ns: int) -> str:
    return f"{datetime.datetime.fromtimestamp(at_ns / 1e9, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
