"""What a deployment keeps of requests that have ended: compared after few and after many of them.

``python -m tests.chaos.growth --requests 30000 --compared-with 3000``. Nothing is disturbed. Each time all is quiet,
the processes' memory, descriptors and tasks are noted, and what each stream holds. ``compare`` is pure.
"""

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.configs.logs import setup
from penstock.infra.bus.connection import Bus, connect
from penstock.launch.readiness import get_url
from tests.chaos import log, recipes
from tests.chaos.audit import Footprint
from tests.chaos.brokers import SETTLE_S, heap_problems
from tests.chaos.plan import BROKER
from tests.chaos.run import Options, Run
from tests.chaos.system import System
from tests.chaos.topology import TOPOLOGIES, Topology
from tests.pipeline.support import samples

MEMORY = 0.2  # by which a process may be larger after many requests than after few
MEMORY_SLACK = 8 << 20  # bytes, of a process: its allocator's arenas
STREAM = 0.05  # by which the bytes that a request takes in a stream may differ
STREAM_SLACK = 64.0  # bytes a request, of streams that hardly grow with requests
BY_TIME = "_snapshots"  # the end of what is written now and then, and replaced
FILES_SLACK = 4  # more than at first
TASKS_SLACK = 4
QUIET_S = 60.0
GRACE_S = 5.0  # of requests with no_store
CLIENTS = 24
PATIENT = ("limited", "denied")  # kinds without an answer, which are left out
# Gauges of what requests that have ended no longer have; by name, over all processes.
ZERO = (
    "penstock_gateway_open_requests",
    "penstock_gateway_queued_requests",
    "penstock_router_waiting_requests",
    "penstock_worker_running",
    "penstock_worker_waiting",
    "penstock_worker_unsent_bytes",
    "penstock_worker_kv_used_blocks",
    "penstock_handoff_open_leases",
    "penstock_handoff_pinned_blocks",
    "penstock_handoff_quarantined_blocks",
)


class Stored(NamedTuple):
    """One stream. ``memory``: what it holds is on no disk."""

    messages: int
    bytes: int
    memory: bool = False


class Sample(msgspec.Struct, frozen=True):
    """Everything at one quiet moment, after so many requests.

    Attributes:
        open: gauges of ``ZERO`` that are not zero, by process and name.
        tasks: by process.
        heaps: bytes in use of each broker (``brokers.live_heap``).
    """

    requests: int
    processes: Mapping[str, Footprint] = {}
    tasks: Mapping[str, float] = {}
    open: Mapping[str, float] = {}
    streams: Mapping[str, Stored] = {}
    heaps: Mapping[str, int] = {}


def compare(idle: Sample, few: Sample, many: Sample) -> list[str]:
    """What has grown that must not. ``idle``: nothing had been asked yet but each question once."""
    asked = many.requests - few.requests
    return [
        *_memory(few, many, asked),
        *_left(idle, many),
        *(f"{name} is {value:g}, though all requests have ended" for name, value in sorted(many.open.items())),
        *_streams(idle, few, many),
    ]


def _memory(few: Sample, many: Sample, asked: int) -> Iterable[str]:
    for name, was in sorted(few.processes.items()):
        now = many.processes.get(name)
        if now is None or now.pid != was.pid:
            yield f"{name} is not the process that it was"
            continue
        most = max(MEMORY * was.rss, MEMORY_SLACK)
        if not name.startswith(BROKER) and now.rss - was.rss > most:
            yield f"{name} has {now.rss >> 20} MiB after {many.requests} requests, {was.rss >> 20} before"
    yield from heap_problems(few.heaps, many.heaps, asked)


def _left(idle: Sample, many: Sample) -> Iterable[str]:
    for name, was in sorted(idle.processes.items()):
        now = many.processes.get(name, was)
        if now.files - was.files > FILES_SLACK:
            yield f"{name} has {now.files} open descriptors, {was.files} at first"
    for name, tasks in sorted(idle.tasks.items()):
        if many.tasks.get(name, 0) - tasks > TASKS_SLACK:
            yield f"{name} has {many.tasks[name]:g} tasks, {tasks:g} at first"


def _streams(idle: Sample, few: Sample, many: Sample) -> Iterable[str]:
    for name, now in sorted(many.streams.items()):
        zero = Stored(0, 0)
        if now.memory:
            if now.messages:
                yield f"{name} still has {now.messages} messages ({now.bytes} bytes) in memory"
            continue
        was, began = few.streams.get(name, zero), idle.streams.get(name, zero)
        if name.endswith(BY_TIME):
            continue
        before = (was.bytes - began.bytes) / max(1, few.requests - idle.requests)
        after = (now.bytes - was.bytes) / max(1, many.requests - few.requests)
        if after - before > max(STREAM * before, STREAM_SLACK):  # less is what larger batches take
            yield f"{name} grew by {before:.0f} bytes a request at first, and by {after:.0f} later"


# -- the shell ------------------------------------------------------------------------------------------------------


class Growth:
    """Asks, waits until all is quiet, and looks."""

    def __init__(self, system: System, bus: Bus, run: Run, say: Callable[[str], None], limit_s: float) -> None:
        self._system, self._bus, self._run, self._say = system, bus, run, say
        self._until = time.monotonic() + limit_s
        self._asked = 0
        self.wrong: list[str] = []

    async def ask(self, total: int, clients: int = CLIENTS) -> None:
        """Until so many were asked in all, or time is up: every recipe in turn, so that any part is like another."""
        said = time.monotonic()

        async def client() -> None:
            nonlocal said
            while self._asked < total and time.monotonic() < self._until:
                number = self._asked
                self._asked += 1
                recipe = self._mix[number % len(self._mix)]
                for seen in await self._run.ask(recipe, f"c-{number}-{recipe.name}", random.Random(number)):
                    self.wrong += [f"{seen.tag}: {problem.what}: {problem.text}" for problem in self._run.wrong(seen)]
                if time.monotonic() - said > 10:
                    said = time.monotonic()
                    self._say(f"{self._asked} requests")

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        late = "" if self._asked >= total else f", since time was up before {total}"
        self._say(f"{self._asked} requests{late}; waiting until all is quiet")

    @property
    def _mix(self) -> Sequence[recipes.Recipe]:
        """By the weights of the kinds, in an order of its own that is always the same."""
        mix = [
            recipe
            for recipe in self._run.recipes
            if recipe.kind not in PATIENT
            for _ in range(round(2 * recipes.WEIGHTS[recipe.kind]))
        ]
        random.Random(1).shuffle(mix)
        return mix

    async def look(self, idle: Sample | None = None) -> Sample:
        """Once nothing is under way any more, and no more is open than at ``idle``; or after ``QUIET_S``."""
        deadline = time.monotonic() + QUIET_S
        while True:
            found = await self._sample()
            busy = [*found.open, *(name for name, one in found.streams.items() if one.memory and one.messages)]
            busy += [] if idle is None else _left(idle, found)
            busy += [] if busy else await log.held(self._bus)
            if not busy or time.monotonic() > deadline:
                if busy:
                    self._say(f"not quiet after {QUIET_S:g} s: {'; '.join(busy)}")
                await asyncio.sleep(SETTLE_S)
                return msgspec.structs.replace(found, heaps=await self._system.heaps())
            await asyncio.sleep(1)

    async def _sample(self) -> Sample:
        tasks, open_ = {}, {}
        for name, url in self._pages():
            status, page = await get_url(url, "/metrics")
            if status != 200:
                open_[f"{name}: no metrics, status"] = float(status)
                continue
            for metric, value in samples(page.decode()).items():
                if metric.endswith("_tasks"):
                    tasks[name] = value
                elif value and metric.startswith(ZERO):
                    open_[f"{name}: {metric}"] = value
        return Sample(self._asked, self._system.footprints(), tasks, open_, await stored(self._bus))

    def _pages(self) -> list[tuple[str, str]]:
        """Every process that serves metrics, and where."""
        state = self._system.deployment.state
        gateways = [process.name for process in state.processes if process.role == "gateway"]
        found = list(zip(gateways, self._system.urls, strict=True))
        return found + [
            (each.name, each.metrics_url.removesuffix("/metrics")) for each in state.processes if each.metrics_url
        ]


async def stored(bus: Bus) -> dict[str, Stored]:
    """Every stream, those of buckets included."""
    found: dict[str, Stored] = {}
    offset = 0
    while True:
        reply = await bus.nc.request("$JS.API.STREAM.LIST", json.dumps({"offset": offset}).encode(), timeout=10)
        page: dict[str, Any] = json.loads(reply.data)
        for each in page["streams"] or ():
            state, config = each["state"], each["config"]
            found[config["name"]] = Stored(state["messages"], state["bytes"], config["storage"] == "memory")
        offset += len(page["streams"] or ())
        if not page["streams"] or offset >= page["total"]:
            return found


class Result(NamedTuple):
    idle: Sample
    few: Sample
    many: Sample
    problems: list[str]


async def measure(
    home: Path,
    topology: Topology,
    few: int,
    many: int,
    say: Callable[[str], None],
    *,
    clients: int = CLIENTS,
    each: int = 4,
    limit_s: float = math.inf,
) -> Result:
    """On a deployment of its own below ``home``. After ``limit_s`` nothing more is asked."""
    flags = (*topology.flags, "--no-store-grace-s", f"{GRACE_S:g}")
    system = await System.started(home, topology._replace(flags=flags, clock_s=0.0), say, small_disk=False)
    try:
        bus = await connect(system.deployment.state.nats_url, role="client", name="chaos")
        try:
            async with Run(system, [bus], Options(0.0, each=each), say) as run:
                growth = Growth(system, bus, run, say, limit_s)
                await run.learn()
                idle = await growth.look()
                samples_ = []
                for total in (few, many):
                    await growth.ask(total, clients)
                    samples_.append(await growth.look(idle))
                problems = growth.wrong[:20] + compare(idle, *samples_)
                return Result(idle, samples_[0], samples_[1], problems)
        finally:
            await bus.close()
    finally:
        await system.stop()


def table(result: Result) -> str:
    """For people."""
    idle, few, many = result.idle, result.few, result.many
    lines = [f"{'requests':<24} {idle.requests:>12} {few.requests:>12} {many.requests:>12}"]
    for name in sorted(many.processes):
        rows = [sample.processes.get(name, Footprint(0, 0)) for sample in (idle, few, many)]
        lines.append(f"{name:<24} " + " ".join(f"{one.rss / 2**20:>8.1f} MiB" for one in rows))
        if name in many.heaps:
            heaps = [sample.heaps.get(name, 0) for sample in (idle, few, many)]
            lines.append(f"{'  in use':<24} " + " ".join(f"{one / 2**20:>8.1f} MiB" for one in heaps))
        lines.append(f"{'  descriptors':<24} " + " ".join(f"{one.files:>12}" for one in rows))
        tasks = [sample.tasks.get(name) for sample in (idle, few, many)]
        if None not in tasks:
            lines.append(f"{'  tasks':<24} " + " ".join(f"{one:>12g}" for one in tasks))
    for name in sorted(many.streams):
        rows_ = [sample.streams.get(name, Stored(0, 0)).bytes for sample in (idle, few, many)]
        before = (rows_[1] - rows_[0]) / max(1, few.requests - idle.requests)
        after = (rows_[2] - rows_[1]) / max(1, many.requests - few.requests)
        lines.append(
            f"{name:<24} " + " ".join(f"{one:>12}" for one in rows_) + f"  {before:.1f}, then {after:.1f} a request"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.growth", description=__doc__)
    parser.add_argument("--requests", type=int, default=30_000)
    parser.add_argument("--compared-with", type=int, default=3_000)
    parser.add_argument("--topology", choices=sorted(TOPOLOGIES), default="pd")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument(
        "--limit-s", type=float, default=math.inf, help="of load: then what was asked until then is compared"
    )
    args = parser.parse_args()
    began = time.monotonic()
    setup("text", "error", name="chaos")

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f}  {line}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="penstock-growth-") as home:
        result = asyncio.run(
            measure(
                Path(home),
                TOPOLOGIES[args.topology],
                args.compared_with,
                args.requests,
                say,
                clients=args.clients,
                limit_s=args.limit_s,
            )
        )
    print(table(result))
    print("\n".join(["", *result.problems]) if result.problems else "\nnothing is kept that must not be")
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
