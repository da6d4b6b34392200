"""``penstock replay``: runs recorded requests again, on this or another deployment, and compares the answers."""

import argparse
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from penstock.cli.figures import counted, show_duration
from penstock.cli.terminal import fail, stdout
from penstock.configs.flags import Parser
from penstock.log_tools.export.export import add_selection_flags, parts_of, selection
from penstock.log_tools.export.recording import RecordedRun, Recording
from penstock.log_tools.replay.comparison import parse_changes
from penstock.log_tools.replay.http import replay_over_http, unsupported
from penstock.log_tools.replay.nats import REPLAYS, collect, replay_over_nats
from penstock.log_tools.replay.report import ReplayReport, make_report, show, with_texts
from penstock.log_tools.sources.data_folder import MEDIA
from penstock.log_tools.sources.export_file import write_json
from penstock.log_tools.sources.log_line import STREAMS
from penstock.log_tools.sources.open_log import CellSource, LogSource, add_flags, open_log, run_command
from penstock.log_tools.timeline.read import whole_ids

FAIL_ON = ("tokens", "errors", "never")
MAX_SPEED = "max"
LONG_S = 10.0
INTERRUPTED = 130


def run(argv: Sequence[str]) -> int:
    """Replay and return the exit status, 1 if answers differ (see ``--fail-on``)."""
    parser = Parser(
        prog="penstock replay",
        description="run recorded requests again, token for token, and compare answers, times and routes",
    )
    _add_flags(parser)
    args = parser.parse_args(argv)
    console = stdout()
    reports: list[ReplayReport] = []

    async def work() -> None:
        reports.extend(await _replay_cells(args))

    status = run_command("replay", work)
    if status:
        return status
    if not reports:
        print("penstock replay: interrupted; requests that were sent still run", file=sys.stderr)
        return INTERRUPTED
    for report in reports if args.json != "-" else ():
        if len(reports) > 1:
            console.rule(f"cell {report.settings['cell']}")
        show(report, console)
    try:
        if args.json:
            write_json(args.json, reports[0] if len(reports) == 1 else reports)
    except ValueError as error:
        return fail("replay", error)
    wrong = {"tokens": "differences", "errors": "errors", "never": ""}[args.fail_on]
    return int(bool(wrong) and any(getattr(report, wrong) for report in reports))


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_selection_flags(parser)
    parser.add_argument("--all", action="store_true", help="every request that the log keeps; --file: the default")
    parser.add_argument("--replays", action="store_true", help="also requests that a replay made; not needed with ids")
    parser.add_argument(
        "--target",
        default="",
        metavar="WHERE",
        help="data folder of the deployment that runs them, its broker's nats:// URL, or an OpenAI-compatible server's "
        "http:// URL; default: the deployment of --data-dir",
    )
    parser.add_argument("--target-namespace", default="", metavar="TEXT", help="default: the target's own")
    parser.add_argument(
        "--speed", default="1", metavar="X", help="1: recorded pace, 10: ten times as fast, max: no pause"
    )
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="of --speed max: requests at a time")
    parser.add_argument("--api-key", default="", metavar="TEXT", help="of an http:// target: bearer token")
    parser.add_argument("--model", default="", help="model to ask; default: the recorded one")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="another setting, such as temperature=0"
    )
    parser.add_argument("--seed", type=int, help="another sampling seed, for all requests")
    parser.add_argument(
        "--logprobs", type=int, default=0, metavar="N", help="ask for N log-probabilities per token: 2 to know margins"
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.01, metavar="X", help="of log-probabilities (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=300.0, metavar="SECONDS", help="a request without an end has failed"
    )
    parser.add_argument(
        "--limit", type=int, default=0, metavar="N", help="the first N requests of each cell only; 0: all"
    )
    parser.add_argument(
        "--model-path", default="", metavar="FOLDER", help="tokenizer of the texts in the report; default: by name"
    )
    parser.add_argument("--json", default="", metavar="FILE", help="the report as JSON; '-': to standard output")
    parser.add_argument(
        "--fail-on", choices=FAIL_ON, default="tokens", help="exit with 1 if an answer differs, or for errors only"
    )
    add_flags(parser)


class _Plan(NamedTuple):
    runs: list[RecordedRun]
    skipped: Counter[str]


async def _replay_cells(args: argparse.Namespace) -> list[ReplayReport]:
    """One cell after the other: a request runs again where it ran."""
    args.ids = await whole_ids(LogSource.of(args), args.ids)
    parts = parts_of(args, LogSource.of(args))
    reports: list[ReplayReport] = []
    nothing: list[NothingToReplay] = []
    for cell, part in parts:
        if len(parts) > 1:
            print(f"cell {cell.number}:", file=sys.stderr)
        try:
            reports.append(await _replay(part, cell))
        except NothingToReplay as error:
            nothing.append(error)
            if len(parts) > 1:
                print(f"cell {cell.number}: {error}", file=sys.stderr)
    if not reports:
        raise nothing[0]
    return reports


class NothingToReplay(ValueError):
    """A log has no request that was chosen and can run again."""


async def _replay(args: argparse.Namespace, cell: CellSource) -> ReplayReport:
    speed = _speed(args.speed)
    changes = parse_changes(args.set, model=args.model, seed=args.seed, logprobs=args.logprobs)
    source = cell.source
    async with open_log(source, name="replay", streams=(*STREAMS, MEDIA), role="operator") as log:
        anything = args.ids or args.since or args.until or args.from_seq
        chosen = await selection(args, log.bus, everything=args.all or (bool(source.file) and not anything))
        recorded = await collect(log, chosen._replace(kv=False))
        plan = _plan(
            recorded, args.limit, over_http=args.target.startswith("http"), replays=args.replays or bool(args.ids)
        )
        began_ns = time.time_ns()
        print(f"replaying {counted(len(plan.runs), 'request')}{_pauses(plan.runs, speed)}", file=sys.stderr)
        if args.target.startswith(("http://", "https://")):
            replayed = await replay_over_http(args, plan.runs, changes, speed)
        else:
            replayed = await replay_over_nats(args, cell, log, plan.runs, plan.skipped, changes, speed)
    report = make_report(
        replayed,
        source=source.file or source.nats_url or str(source.data_dir),
        settings=_settings(args, began_ns) | ({"cell": str(cell.number)} if cell.cells > 1 else {}),
        skipped=plan.skipped,
        tolerance=args.tolerance,
    )
    return with_texts(report, args.model_path or changes.model or _first_model(plan.runs))


def _speed(text: str) -> float:
    """0: as fast as possible."""
    if text == MAX_SPEED:
        return 0.0
    with contextlib.suppress(ValueError):
        if (speed := float(text)) > 0:
            return speed
    raise ValueError(f"--speed {text}: write 1 for the recorded pace, 10 for ten times as fast, or max")


def _pauses(runs: Sequence[RecordedRun], speed: float) -> str:
    """How long sending takes at the recorded pace, if that is long."""
    made = [run.request.created_ns for run in runs if run.request is not None]
    seconds = (max(made) - min(made)) / 1e9 / speed if speed else 0.0
    return f" in {show_duration(seconds)}, at their recorded pace (--speed max: no pauses)" if seconds > LONG_S else ""


def _plan(recorded: Recording, limit: int, *, over_http: bool, replays: bool = False) -> _Plan:
    """The requests that can be replayed, oldest first."""
    skipped: Counter[str] = Counter()
    runs = []
    for run in recorded.runs.values():
        reason = _not_replayable(run, over_http, replays)
        if reason:
            skipped[reason] += 1
        else:
            runs.append(run)
    if not runs:
        if not skipped:
            raise NothingToReplay("the log has none of these requests: it keeps them for a week")
        why = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        raise NothingToReplay(f"no recorded request can run again: {why}")
    runs.sort(key=lambda run: run.request.created_ns if run.request is not None else 0)
    return _Plan(runs[: limit or None], skipped)


def _not_replayable(run: RecordedRun, over_http: bool, replays: bool) -> str:
    if run.request is None:
        return "of which the log has parts only (forgotten, or older than it keeps requests)"
    if run.request.gateway.startswith(REPLAYS) and not replays:
        return "replays of others (--replays: run them, too)"
    if run.done is None:
        return "unfinished"
    if run.request.diffusion is not None:
        return "images or videos"
    if run.request.embedding is not None:
        return "embeddings or scores"
    if run.request.no_store and not run.request.prompt:
        return "whose content was not kept (no_store)"
    if not run.request.prompt:
        return "without a recorded prompt"
    return unsupported(run.request) if over_http else ""


def _first_model(runs: Sequence[RecordedRun]) -> str:
    return runs[0].request.model if runs[0].request is not None else ""


def _settings(args: argparse.Namespace, began_ns: int) -> dict[str, str]:
    settings = {"speed": args.speed, "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began_ns / 1e9))}
    if args.speed == MAX_SPEED:
        settings["concurrency"] = str(args.concurrency)
    for name in ("model", "seed", "logprobs"):
        if getattr(args, name):
            settings[name] = str(getattr(args, name))
    return settings | dict(text.split("=", 1) for text in args.set)
