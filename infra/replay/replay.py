"""``penstock replay``: recorded requests once more, on this or another deployment, and what came out differently."""

import argparse
import contextlib
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from configs.flags import Parser
from infra.bus.connection import Bus
from infra.bus.publisher import Publisher
from infra.replay.changes import Changes, Target, as_new, parse_changes
from infra.replay.comparison import Comparison, compare
from infra.replay.export import add_selection_flags, copy_messages, limits_of, selection, workers
from infra.replay.files import write_json
from infra.replay.html_report import write_html
from infra.replay.nats_sender import MAX_OPEN, NatsSender, Planned, Sent
from infra.replay.record_line import STREAMS
from infra.replay.recording import Recording, Run
from infra.replay.report import Report, make_report
from infra.replay.selection import Selection
from infra.replay.show_report import show
from infra.replay.texts import with_texts
from infra.terminal import stdout
from infra.timeline.open_log import Log, Source, add_flags, open_log, run_command, running
from schemas.fleet import Registration
from schemas.requests import GenerateRequest

READ = ("REQUESTS", "WORK", "TOKENS", "DONE")
FAIL_ON = ("tokens", "errors", "never")
MAX_SPEED = "max"


def run(argv: Sequence[str]) -> int:
    """Replay; the exit status: 1 if answers differ (see ``--fail-on``)."""
    parser = Parser(
        prog="penstock replay",
        description="run recorded requests again, token for token, and compare answers, times and routes",
    )
    _add_flags(parser)
    args = parser.parse_args(argv)
    console = stdout()
    reports: list[Report] = []

    async def work() -> None:
        reports.append(await _replay(args))

    status = run_command("replay", work)
    if status or not reports:
        return status
    report = reports[0]
    if args.json != "-":
        show(report, console)
    try:
        if args.json:
            write_json(args.json, report)
        if args.html:
            write_html(args.html, report)
    except ValueError as error:
        print(f"penstock replay: {error}", file=sys.stderr)
        return 1
    wrong = {"tokens": report.differences, "errors": report.errors, "never": 0}[args.fail_on]
    return 1 if wrong else 0


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_selection_flags(parser)
    parser.add_argument("--all", action="store_true", help="every request that the log keeps; --file: the default")
    parser.add_argument(
        "--target",
        default="",
        metavar="WHERE",
        help="deployment to run them on: its data folder, or its broker's nats:// URL; default: the one of --data-dir",
    )
    parser.add_argument("--target-namespace", default="", metavar="TEXT", help="default: the target's own")
    parser.add_argument(
        "--speed", default="1", metavar="X", help="1: recorded pace, 10: ten times as fast, max: no pause"
    )
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="of --speed max: requests at a time")
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
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="the first N requests only; 0: all")
    parser.add_argument(
        "--model-path", default="", metavar="FOLDER", help="tokenizer of the texts in the report; default: by name"
    )
    parser.add_argument("--json", default="", metavar="FILE", help="the report as JSON; '-': to standard output")
    parser.add_argument("--html", default="", metavar="FILE", help="the report as one HTML file with plots")
    parser.add_argument(
        "--fail-on", choices=FAIL_ON, default="tokens", help="exit with 1 if an answer differs, or for errors only"
    )
    add_flags(parser)


class _Plan(NamedTuple):
    runs: list[Run]
    skipped: Counter[str]


async def _replay(args: argparse.Namespace) -> Report:
    speed = _speed(args.speed)
    changes = parse_changes(args.set, model=args.model, seed=args.seed, logprobs=args.logprobs)
    source = Source.of(args)
    async with open_log(source, name="replay", streams=STREAMS, role="operator") as log:
        anything = args.ids or args.since or args.until or args.from_seq
        chosen = await selection(args, log.bus, everything=args.all or (bool(source.file) and not anything))
        recorded = await collect(log, chosen._replace(kv=False))
        plan = _plan(recorded, chosen, args.limit)
        async with _target(args, source, log) as there:
            fleet = await workers(there.bus)
            began_ns = time.time_ns()
            sent = await _send(there.bus, plan.runs, fleet, changes, speed, args)
            again = await collect(there, Selection(frozenset(sent.ids.values()), kv=False))
            where = f"namespace {there.bus.subjects.namespace}" + (f" of {args.target}" if args.target else "")
    pairs = [_pair(run, sent, again) for run in plan.runs]
    comparisons = [compare(old, new) for old, new in pairs]
    comparisons = [_refused(each, sent.refused.get(each.id, "")) for each in comparisons]
    report = make_report(
        comparisons,
        pairs,
        source=source.file or source.nats_url or str(source.data_dir),
        target=where,
        settings=_settings(args, began_ns),
        skipped=plan.skipped,
        seconds=sent.seconds,
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


async def collect(log: Log, chosen: Selection) -> Recording:
    """The selected requests of a log.

    Raises:
        ServingError: the log cannot be read.
    """
    found = Recording()

    def add(record: Any) -> None:
        part = record if chosen.everything else chosen.part(record)
        if part is not None:
            found.add(part)

    for stream in READ:
        limits = await limits_of(log.bus, stream)
        if limits is not None and limits.messages:
            await copy_messages(log, stream, limits.last_seq, chosen, add)
    return found


def _plan(recorded: Recording, chosen: Selection, limit: int) -> _Plan:
    """What can run again, oldest first.

    Raises:
        ValueError: nothing.
    """
    skipped: Counter[str] = Counter()
    runs = []
    for run in recorded.runs.values():
        reason = _not_replayable(run)
        if reason:
            skipped[reason] += 1
        else:
            runs.append(run)
    if not runs:
        why = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        raise ValueError(f"no recorded request can run again ({why or 'none was found'})")
    runs.sort(key=lambda run: run.request.created_ns if run.request is not None else 0)
    return _Plan(runs[: limit or None], skipped)


def _not_replayable(run: Run) -> str:
    if run.done is None:
        return "unfinished"
    if run.request is None:
        return "without a recorded request"
    if run.request.diffusion is not None:
        return "images or videos"
    return "" if run.request.prompt else "without a recorded prompt"


@contextlib.asynccontextmanager
async def _target(args: argparse.Namespace, source: Source, log: Log) -> AsyncIterator[Log]:
    """The deployment that runs the requests."""
    where, namespace = args.target, args.target_namespace
    if not where and not log.stopped and namespace in ("", log.bus.subjects.namespace):
        yield log
        return
    if not where and log.stopped and not source.file:
        raise ValueError("the recorded deployment is stopped: name one that runs with --target")
    if where.startswith(("nats://", "tls://")):
        url = where
    elif not where and not log.stopped:
        url = log.url
    else:
        folder = Path(where) if where else source.data_dir
        try:
            url, found = running(Source(folder), folder.resolve())
        except ValueError:
            raise ValueError(f"no deployment runs in {folder}: name one with --target") from None
        namespace = namespace or found
    async with open_log(Source(source.data_dir, url, namespace), name="replay", role="operator") as there:
        yield there


async def _send(
    bus: Bus,
    runs: Sequence[Run],
    fleet: Sequence[Registration],
    changes: Changes,
    speed: float,
    args: argparse.Namespace,
) -> Sent:
    gateway = f"replay-{secrets.token_hex(4)}"
    targets = {name: _model(name, fleet, changes) for name in {run.request.model for run in runs if run.request}}
    first = runs[0].request
    assert first is not None

    def planned(run: Run) -> Planned:
        request = run.request
        assert request is not None

        def make(name: str, now_ns: int) -> GenerateRequest:
            return as_new(request, name, gateway, now_ns, targets[request.model], changes)

        at_s = (request.created_ns - first.created_ns) / 1e9 / speed if speed else 0.0
        return Planned(run.id, at_s, make)

    concurrency = MAX_OPEN if speed else max(1, args.concurrency)
    print(f"replaying {len(runs)} requests", file=sys.stderr)
    async with Publisher(bus) as publisher:
        sender = NatsSender(bus, publisher, concurrency=concurrency, timeout_s=args.timeout_s)
        return await sender.send([planned(run) for run in runs])


def _model(recorded: str, fleet: Sequence[Registration], changes: Changes) -> Target:
    """
    Raises:
        ValueError: no worker of the target serves the model.
    """
    wanted = changes.model or recorded
    for worker in fleet:
        if wanted in (worker.model, *worker.aliases) and worker.role != "encode":
            return Target(worker.model, worker.revision, worker.block_size, worker.tokenizer)
    served = ", ".join(sorted({worker.model for worker in fleet})) or "no model"
    raise ValueError(f"no worker of the target serves {wanted}; it has {served}: choose one with --model")


def _pair(run: Run, sent: Sent, again: Recording) -> tuple[Run, Run]:
    name = sent.ids.get(run.id, "")
    return run, again.runs.get(name, Run(name, run.request, stored={}))


def _refused(found: Comparison, why: str) -> Comparison:
    return msgspec.structs.replace(found, message=why) if why else found


def _first_model(runs: Sequence[Run]) -> str:
    return runs[0].request.model if runs[0].request is not None else ""


def _settings(args: argparse.Namespace, began_ns: int) -> dict[str, str]:
    found = {"speed": args.speed, "began": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began_ns / 1e9))}
    if args.speed == MAX_SPEED:
        found["concurrency"] = str(args.concurrency)
    for name in ("model", "seed", "logprobs"):
        if getattr(args, name):
            found[name] = str(getattr(args, name))
    return found | dict(text.split("=", 1) for text in args.set)
