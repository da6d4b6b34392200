"""Where an engine's time goes: the shares of attention and dense layers in a trace of torch's profiler.

Such a trace comes from ``export_chrome_trace``, or from a server's own profiling request. Kernels of a GPU count where
it has any, else operators of the CPU, each without the time of those that it calls.
"""

import argparse
import gzip
import json
import re
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from nats.errors import Error as NatsError

from penstock.cli.terminal import fail
from penstock.configs.flags import Parser
from penstock.infra.bus.worker_leases import registrations
from penstock.log_tools.sources.open_log import LogSource, add_flags, open_cells, run_command
from penstock.operate.drain import chosen
from penstock.schemas import control, wire

WRITE_S = 120.0  # for a worker to write its trace

# In this order: an attention kernel may be named after the matrix products that it fuses.
KINDS = {
    "attention, context": re.compile(
        r"context.*(attention|fmha)|(attention|fmha).*(context|prefill)|flash_fwd(?!.*splitkv)"
    ),
    "attention, generation": re.compile(
        r"xqa|mmha|masked_multihead|splitkv|(attention|fmha).*(decode|generation)|paged_attention"
    ),
    "attention": re.compile(r"attention|fmha|flash|sdpa"),
    "dense": re.compile(r"gemm|gemv|matmul|nvjet|cutlass|cublas|\b(aten::)?(addmm|mm|bmm|linear)\b"),
    "communication": re.compile(r"nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"),
}
OTHER = "other"


class BadTrace(ValueError):
    """A file that is not a trace, or one without kernels and operators."""


class Share(Struct, frozen=True):
    """One kind of kernel. ``share`` is its part of the time of all kernels, 0 to 1."""

    kind: str
    seconds: float
    share: float
    calls: int


def kind_of(name: str) -> str:
    """The kind of a kernel or operator by its name."""
    lower = name.lower()
    return next((kind for kind, pattern in KINDS.items() if pattern.search(lower)), OTHER)


def shares(events: Iterable[dict[str, Any]]) -> list[Share]:
    """The share of each kind, the largest first.

    Raises:
        BadTrace: it has neither kernels nor operators.
    """
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = [event for event in timed if event.get("cat") == "kernel"]
    spent = (
        [(event["name"], float(event["dur"])) for event in kernels]
        if kernels
        else own_times([event for event in timed if event.get("cat") == "cpu_op"])
    )
    total = sum(duration for _, duration in spent)
    if not total:
        raise BadTrace("it has neither GPU kernels nor CPU operators; profile with activities CUDA or CPU")
    totals: dict[str, tuple[float, int]] = {}
    for name, duration in spent:
        seconds, calls = totals.get(kind_of(name), (0.0, 0))
        totals[kind_of(name)] = seconds + duration / 1e6, calls + 1
    rows = [Share(kind, seconds, seconds * 1e6 / total, calls) for kind, (seconds, calls) in totals.items()]
    return sorted(rows, key=lambda each: -each.seconds)


def own_times(events: Sequence[dict[str, Any]]) -> list[tuple[str, float]]:
    """Name and own time in µs of each operator, without the operators that it calls on its thread."""
    own = [float(event["dur"]) for event in events]
    order = sorted(range(len(events)), key=lambda at: (events[at]["ts"], -events[at]["dur"]))
    open_: dict[Any, list[int]] = {}  # of each thread, the calls under way
    for at in order:
        event = events[at]
        callers = open_.setdefault((event.get("pid"), event.get("tid")), [])
        while callers and events[callers[-1]]["ts"] + events[callers[-1]]["dur"] <= event["ts"]:
            callers.pop()
        if callers:
            own[callers[-1]] -= float(event["dur"])
        callers.append(at)
    return [(str(event["name"]), max(0.0, time)) for event, time in zip(events, own, strict=True)]


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, gzipped or not.

    Raises:
        BadTrace: it cannot be read, or is none.
    """
    try:
        data = path.read_bytes()
        trace = json.loads(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data)
        events = trace["traceEvents"] if isinstance(trace, dict) else trace
        return [event for event in events if isinstance(event, dict)]
    except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
        raise BadTrace(f"{path}: {str(error) or type(error).__name__}") from None


async def recorded_by(source: LogSource, name: str, seconds: float) -> control.RecordedTrace:
    """Have a worker record a trace of its steps.

    Args:
        name: of the worker, or its id.
    Raises:
        ValueError: there is no such worker, or it does not answer.
    """
    async with open_cells(source, name="profile", role="operator", streams=()) as logs:
        found = [(log.bus, each) for log in logs if not log.stopped for each in await registrations(log.bus)]
        worker = chosen([each for _, each in found], name)
        bus = next(bus for bus, each in found if each is worker)
        order = wire.encode(control.RecordTrace(seconds))
        try:
            answer = await bus.nc.request(bus.subjects.drain(worker.worker), order, timeout=seconds + WRITE_S)
        except (NatsError, TimeoutError) as error:
            raise ValueError(f"worker {name} does not answer within {seconds + WRITE_S:g} s ({error!r})") from error
        return control.decode_recorded_trace(answer.data)


async def _record(args: argparse.Namespace) -> Path | None:
    """The trace; None: it is on another machine."""
    done = await recorded_by(LogSource.of(args), args.worker, args.seconds)
    if done.error:
        raise ValueError(f"worker {args.worker}: {done.error}")
    print(f"{done.path} on {done.host}", flush=True)
    path = Path(done.path)
    return path if done.host == socket.gethostname() else None


def run(argv: Sequence[str]) -> int:
    """Print one line per kind. Returns 1 if the file is not a trace, or the worker recorded none."""
    parser = Parser(
        prog="penstock profile kernels",
        description="shares of attention and dense layers in a trace of torch's profiler: of a file, or of a worker "
        "with the native engine, which records one while it serves",
    )
    parser.add_argument("trace", nargs="?", metavar="FILE", help="Chrome trace: .json or .json.gz")
    parser.add_argument("--worker", metavar="WORKER", help="record a trace there: name or id, as in `penstock top`")
    parser.add_argument("--seconds", type=float, default=2.0, help="of steps to record, at most 60 (default: 2)")
    add_flags(parser)
    args = parser.parse_args(argv)
    if (args.trace is None) == (args.worker is None):
        parser.error("name a FILE, or a worker with --worker")
    if args.worker is None:
        return _print(Path(args.trace))
    found: list[Path | None] = []

    async def record() -> None:
        found.append(await _record(args))

    status = run_command("profile kernels", record)
    return _print(found[0]) if status == 0 and found and found[0] is not None else status


def _print(path: Path) -> int:
    try:
        table = shares(read_trace(path))
    except BadTrace as error:
        return fail("profile kernels", error)
    for each in table:
        print(f"{each.share:6.1%}  {each.kind:<22} {each.seconds * 1e3:10.2f} ms  {each.calls:>8,} calls")
    return 0
