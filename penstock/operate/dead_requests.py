"""``penstock dead``: requests that lost their worker in every attempt, and what to do with them.

Such a request may be the cause. One that crashes every worker is ended with ``poisoned_request``, after three of them;
one whose workers were lost in other ways, or did not say how, with ``worker_lost`` after ``--max-attempts``.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import msgspec
from rich.console import Console

from penstock.cli.figures import clock, counted, moment_ns
from penstock.cli.terminal import confirmed, escape, print_hanging, stdout, write_json
from penstock.configs.flags import Parser
from penstock.infra.bus.direct_get import get_last
from penstock.log_tools.replay import replay
from penstock.log_tools.requests import inspect
from penstock.log_tools.requests.find_requests import ended, of_entry
from penstock.log_tools.sources.open_log import (
    REQUEST_STREAMS,
    Log,
    LogSource,
    add_flags,
    in_order,
    open_cells,
    run_command,
)
from penstock.log_tools.timeline.read import read_timeline
from penstock.log_tools.timeline.request_timeline import RequestTimeline
from penstock.schemas.errors import Code
from penstock.schemas.requests import request_of_answer, time_of
from penstock.schemas.summary import Criteria, RequestSummary

DEAD = (Code.worker_lost, Code.poisoned_request)
VERBS = ("list", "show", "retry")
USAGE = f"usage: penstock dead {{{','.join(VERBS)}}} [FLAGS]"


class Attempt(msgspec.Struct, frozen=True):
    """One attempt and how it ended. ``engine_failed``: the worker reported that its engine failed on this request."""

    attempt: int
    worker: str
    reason: str
    engine_failed: bool


class DeadRequest(msgspec.Struct, frozen=True):
    """``attempts`` is empty when the jobs are no longer in the log; they are kept for a day."""

    summary: RequestSummary
    attempts: tuple[Attempt, ...]


def run(argv: Sequence[str]) -> int:
    """List, show or retry; the exit status."""
    verb, arguments = (argv[0], argv[1:]) if argv else ("", argv)
    match verb:
        case "list":
            return _list(arguments)
        case "show":
            return inspect.run(arguments, "dead show")
        case "retry":
            return _retry(arguments)
    asked = verb in ("-h", "--help")
    print(f"{USAGE}\n\n`penstock dead VERB --help` lists the flags.", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2


# --- list ---


def _list(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock dead list", description="requests that lost their worker in every attempt, the last one first"
    )
    _selection(parser)
    parser.add_argument("--limit", "-n", type=int, default=50, help="most requests to list; 0: all")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    add_flags(parser)
    args = parser.parse_args(argv)
    return run_command("dead list", lambda: _print_list(args, stdout()))


def _selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--since", default="", help="accepted since: 15m, 2h, 7d ago, or 2026-11-22T09:30")
    parser.add_argument("--model", default="", help="as the client named it")


async def _print_list(args: argparse.Namespace, console: Console) -> None:
    requests = await _of_all_cells(args, args.limit)
    if args.json:
        for each in requests:
            write_json(console, each)
        return
    if not requests:
        console.print("no request has lost its worker in every attempt")
        return
    now_ns = time.time_ns()
    for each in requests:
        summary = each.summary
        prompt = counted(summary.prompt_tokens, "token")
        head = f"{clock(summary.created_ns, now_ns)}  [bold]{summary.id}[/]  "
        print_hanging(console, head, f"{escape(summary.model)}, prompt of {prompt}")
        for one in each.attempts:
            print_hanging(console, f"    attempt {one.attempt}  ", escape(f"{one.worker}: {one.reason}"))
        if not each.attempts:
            lost = counted(summary.attempts, "attempt")
            print_hanging(console, "    ", f"{lost}; the log no longer has the jobs, which it keeps for a day")


async def _of_all_cells(args: argparse.Namespace, limit: int) -> list[DeadRequest]:
    async with open_cells(LogSource.of(args), name="dead", streams=REQUEST_STREAMS, files=True) as logs:
        found = [each for log in logs for each in await dead_requests(log, args.since, args.model, limit)]
    found.sort(key=lambda each: each.summary.ended_ns, reverse=True)
    return found[: limit or None]


async def dead_requests(log: Log, since: str, model: str, limit: int) -> list[DeadRequest]:
    """The requests of a cell, the last to end first.

    Raises:
        ServingError: the log cannot be read.
        ValueError: ``since`` is not a time.
    """
    since_ns = moment_ns(since, time.time_ns()) if since else 0
    criteria = Criteria(since_ns=since_ns, model=model, code="any")
    requests = []
    async for _, each in ended(log.reader, criteria):
        if each.summary.code not in DEAD:
            continue
        attempts = _attempts(await read_timeline(log.reader, each.summary.id))
        requests.append(DeadRequest(each.summary, attempts))
        if len(requests) == limit:
            break
    return requests


def _attempts(timeline: RequestTimeline) -> tuple[Attempt, ...]:
    last = {stage.attempt: stage.worker for stage in timeline.stages}  # the stage that it had come to
    attempts = []
    for number, worker in sorted(last.items()):
        returned = timeline.returned.get(number)
        reason = returned.reason if returned is not None else "the worker was lost"
        attempts.append(Attempt(number, worker, reason, returned is not None and returned.poison))
    return tuple(attempts)


# --- retry ---


def _retry(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock dead retry",
        description="run them again as new requests, one after the other; the answers are in the log, under the ids "
        "that `penstock requests` shows",
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="requests")
    parser.add_argument("--all", action="store_true", help="all that `penstock dead list` shows")
    parser.add_argument("--worker", default="", help="run them on this worker only, which they may crash")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    _selection(parser)
    add_flags(parser)
    args = parser.parse_args(argv)
    if bool(args.ids) == args.all:
        parser.error("give ids of requests, or --all")
    ids: list[str] = [request_of_answer(each) for each in args.ids]

    async def find() -> None:
        ids.extend(each.summary.id for each in await _of_all_cells(args, 0))

    if args.all and (status := run_command("dead retry", find)):
        return status
    if not ids:
        print("no request has lost its worker in every attempt")
        return 0
    if args.ids and (status := run_command("dead retry", lambda: _check(args, ids))):
        return status
    where = f"worker {args.worker}" if args.worker else "any worker"
    if not args.yes and not confirmed(f"Run {counted(len(ids), 'request')} again on {where}? They may crash it."):
        print("penstock dead retry: nothing was run; --yes runs them without asking", file=sys.stderr)
        return 1
    flags = ["--speed", "max", "--concurrency", "1", "--fail-on", "errors", "--data-dir", args.data_dir]
    for name in ("nats_url", "namespace", "cells", "cell_nats_urls"):
        if value := getattr(args, name):
            flags += [f"--{name.replace('_', '-')}", str(value)]
    if args.worker:
        flags += ["--set", f"worker={args.worker}"]
    return replay.run([*ids, *flags])


async def _check(args: argparse.Namespace, ids: Sequence[str]) -> None:
    async with open_cells(LogSource.of(args), name="dead", streams=REQUEST_STREAMS, files=True) as logs:
        for request_id in ids:
            time_of(request_id)
            summary = None
            for bus in (log.reader for log in in_order(logs, request_id)):
                entry = await get_last(bus, bus.subjects.stream("DONE"), bus.subjects.done_of(request_id))
                summary = summary or (of_entry(entry) if entry is not None else None)
            if summary is None:
                raise ValueError(
                    f"the log has no record of request {request_id}: it has not ended, was forgotten, or is older than "
                    "a week"
                )
            if summary.summary.code not in DEAD:
                outcome = summary.summary.code or summary.summary.state
                raise ValueError(
                    f"request {request_id} did not lose its workers ({outcome}): "
                    f"`penstock replay {request_id}` runs it again"
                )
