"""What a request costs in a deployment of many cells, from measured parts: the table of docs/results/fleet.md.

python -m tests.perf.fleet                # two minutes; --rate 5: requests/s of each worker

Measured on this machine, each in CPU time on one core: a router's decision by the workers of its cell, what it answers
gateways and publishes, how a gateway asks and compares cells, and what a broker takes to pass that on. The rest of a
request's work does not depend on the number of cells: ``--gateway-us``, ``--router-us`` and ``--broker-us`` are what
``tests.perf.scale`` measures under load. All else is a calculation.
"""

import argparse
import asyncio
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.gateway.service.cell_choice import CONSIDERED, CellChoice
from penstock.infra.bus.connection import connect
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.router.service.cell_costs import PUBLISH_S, SHARE, load_of
from penstock.schemas.cells import CellCost, CellLoads, ModelLoad, decode_cost, decode_loads
from penstock.schemas.wire import encode
from tests.perf.cpu import cpu_seconds
from tests.perf.index import HELD, microseconds
from tests.perf.index import Fleet as Workers

FLEETS = ((1000, 16), (1000, 32), (4000, 16), (4000, 32), (4000, 64))
CORE = 1e6  # µs a second
BUSY = 0.7  # of a core that a process may use, so that queues stay short


class Parts(NamedTuple):
    """In CPU-µs, of a cell with so many workers.

    Attributes:
        decision: from a request to its job.
        publish: to compute and publish the loads of the cell.
        observe: for a gateway, to take them.
        compare: for a gateway, to look at the workers of one cell: of each that it compares, for a prompt that is too
            short to ask, and of the chosen one, where it counts what it sends.
    """

    decision: float
    publish: float
    observe: float
    compare: float


def parts_of(workers: int) -> Parts:
    fleet = Workers(workers, HELD["no worker has it"])

    def publish() -> bytes:
        return encode(CellLoads("router", (ModelLoad("m", 0, tuple(map(load_of, fleet.tracker.targets(1, "m")))),)))

    choice, loads = CellChoice(1, 0), publish()
    choice.observe(0, decode_loads(loads))
    return Parts(
        microseconds(fleet.place),
        microseconds(publish),
        microseconds(lambda: choice.observe(0, decode_loads(loads))),
        microseconds(lambda: choice.choose("m", 300, [0])) / 2,
    )


class Asking(NamedTuple):
    """What it takes to ask one cell, in CPU-µs of each side, without the router's decision."""

    gateway: float
    router: float
    broker: float


async def _asking(folder: Path, seconds: float = 2.0) -> Asking:
    broker = EmbeddedNats(folder)
    await broker.start()
    answering = subprocess.Popen(  # noqa: ASYNC220 - a few ms
        [sys.executable, "-m", "tests.perf.fleet", "--answer", broker.url("operator")], stdout=subprocess.PIPE
    )
    try:
        assert answering.stdout is not None
        assert broker.pid is not None
        await asyncio.to_thread(answering.stdout.readline)
        bus = await connect(broker.url("operator"), role="operator", name="gateway")
        asked = b"r" * 1500  # as a request with the names of a few dozen blocks

        async def ask() -> None:
            decode_cost((await bus.nc.request(bus.subjects.cost, asked, timeout=5)).data)

        await asyncio.gather(*(ask() for _ in range(CONSIDERED)))
        before = (time.process_time(), cpu_seconds(answering.pid), cpu_seconds(broker.pid))
        count, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            await asyncio.gather(*(ask() for _ in range(CONSIDERED)))
            count += CONSIDERED
        after = (time.process_time(), cpu_seconds(answering.pid), cpu_seconds(broker.pid))
        await bus.close()
        return Asking(*((each - first) / count * 1e6 for each, first in zip(after, before, strict=True)))
    finally:
        answering.kill()
        answering.wait()
        await broker.stop()


async def _answer(url: str) -> None:
    """A router that answers at once, until it is killed."""
    bus = await connect(url, role="operator", name="router")
    reply = encode(CellCost(12345.0, False, 0.0))

    async def answer(message: Any) -> None:
        await bus.nc.publish(message.reply, reply)

    await bus.nc.subscribe(bus.subjects.cost, cb=answer)
    await bus.nc.flush()
    print("answering", flush=True)
    await asyncio.sleep(300)


class Fleet(NamedTuple):
    """What a fleet takes. Costs in CPU-µs per request.

    Attributes:
        short: of a gateway, for prompts that are too short to ask.
        gateways: processes, each of which uses ``BUSY`` of a core.
        loads: share of a core of each gateway, for what routers publish.
        router_cores: of each cell.
        most: requests/s of the whole fleet at which the routers are busy.
    """

    workers: int
    cells: int
    gateway: float
    short: float
    router: float
    broker: float
    gateways: int
    loads: float
    router_cores: float
    broker_cores: float
    most: float


def fleet(workers: int, cells: int, args: argparse.Namespace, small: Parts, parts: Parts, asking: Asking) -> Fleet:
    asked = min(cells, CONSIDERED)
    gateway = args.gateway_us + asked * asking.gateway + parts.compare
    short = args.gateway_us + (asked + 1) * parts.compare
    decisions = parts.decision - small.decision + asked * (parts.decision + asking.router)
    router = args.router_us + decisions
    broker = args.broker_us + asked * asking.broker
    published_s = 1 / max(PUBLISH_S, SHARE * parts.publish / CORE)
    loads = cells * published_s * (parts.observe + asking.router / 2) / CORE
    rate = workers * args.rate
    gateways = math.ceil(rate * gateway / CORE / max(0.01, BUSY - loads))
    own = 1 / SHARE
    most = cells * (BUSY - own) * CORE / router
    each = rate / cells / CORE
    return Fleet(
        workers, cells, gateway, short, router, broker, gateways, loads, own + each * router, each * broker, most
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=5.0, help="requests/s of each worker; default: 5")
    parser.add_argument("--gateway-us", type=float, default=500.0, help="of a request; default: 500")
    parser.add_argument("--router-us", type=float, default=300.0, help="the same; default: 300")
    parser.add_argument("--broker-us", type=float, default=165.0, help="the same; default: 165")
    parser.add_argument("--answer", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.answer:
        asyncio.run(_answer(args.answer))
        return 0
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        asking = asyncio.run(_asking(Path(folder)))
    print(f"asking a cell, CPU-µs: gateway {asking[0]:.0f}, router {asking[1]:.0f}, broker {asking[2]:.0f}\n")
    small = parts_of(2)
    sizes = {workers // cells: parts_of(workers // cells) for workers, cells in FLEETS}
    print("| workers of a cell | decision | publish loads | take them | compare a cell |\n|---|---|---|---|---|")
    for size, parts in sorted({2: small, **sizes}.items()):
        print(f"| {size} | " + " | ".join(f"{each:.0f} µs" for each in parts) + " |")
    heads = "workers|cells|gateway|for a short prompt|router|broker|gateways|loads, in each|router of a cell"
    print(f"\n| {' | '.join([*heads.split('|'), 'broker of a cell', 'most requests/s'])} |\n|{'---|' * 11}")
    for workers, cells in FLEETS:
        each = fleet(workers, cells, args, small, sizes[workers // cells], asking)
        costs = (each.gateway, each.short, each.router, each.broker)
        print(f"| {workers:,} | {cells} | " + " | ".join(f"{cost:.0f} µs" for cost in costs), end=" | ")
        print(f"{each.gateways} | {each.loads:.0%} | {each.router_cores:.0%} | {each.broker_cores:.0%}", end=" | ")
        print(f"{each.most:,.0f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
