"""What FastStream costs a job on its way to a worker's handler, over the raw ``Puller``.

python -m tests.perf.jobs                  # half a minute
taskset -c 1 python -m tests.perf.jobs     # on one core, apart from the broker's

The jobs of a round lie in the stream before it begins, so that the loop is never idle. They are taken, decoded and
acknowledged as a worker does, the ways in turns, on a broker of its own. A figure is the CPU time of this process per
job: that of the least round, and the median of what its rounds took more than the raw ones beside them.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import uvloop
from faststream import AckPolicy, BaseMiddleware, Depends
from faststream.nats import NatsMessage, PullSub
from nats.js.api import AckPolicy as Acks
from nats.js.api import ConsumerConfig
from rich.table import Table

from penstock.cli.terminal import stdout
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.faststream_app import BusBroker, JobSubscriber
from penstock.infra.bus.puller import ACK, Puller
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas import wire
from penstock.schemas.jobs import Decision, Job, WorkMessage, load_header
from penstock.schemas.subjects import HEADER_LOAD, Subjects
from penstock.workers.session import session
from tests.infra.bus.support import opened
from tests.workers.support import request

WORKER = "worker-1"
ROLE = "aggregated"
ROOM = 64
WAIT_S = 60.0

Start = Callable[["Taken"], Awaitable[Callable[[], Awaitable[Any]]]]  # returns what ends it


class Nothing(BaseMiddleware):
    """A middleware that does nothing."""


class Taken:
    """The jobs of a round, taken and acknowledged."""

    def __init__(self, bus: Bus, count: int) -> None:
        self.bus = bus
        self._left = count
        self.over = asyncio.Event()

    @property
    def room(self) -> int:
        return min(ROOM, self._left)

    async def take(self, received: Any) -> None:
        await self.bus.nc.publish(received.delivery.reply, ACK)
        self._left -= 1
        if not self._left:
            self.over.set()


async def raw(taken: Taken) -> Callable[[], Awaitable[Any]]:
    async def handle(message: Any) -> None:
        await taken.take(session._decode(message))

    puller = Puller(taken.bus, taken.bus.subjects.stream("WORK"), WORKER, handle, lambda: taken.room)
    await puller.start()
    return puller.close


def subscriber(broker: BusBroker, taken: Taken) -> JobSubscriber:
    subjects = taken.bus.subjects
    return broker.jobs(
        subjects.work(ROLE, WORKER),
        stream=subjects.stream("WORK"),
        consumer=WORKER,
        room=lambda: taken.room,
        decode=session._decode,
        payload=WorkMessage,
        title="Jobs",
    )


async def started(broker: BusBroker, jobs: JobSubscriber) -> Callable[[], Awaitable[Any]]:
    await broker.connect()
    await jobs.start()
    return lambda: broker.remove(jobs)


async def plain(taken: Taken) -> Callable[[], Awaitable[Any]]:
    broker = BusBroker(taken.bus)
    jobs = subscriber(broker, taken)

    @jobs
    async def take(received: Any) -> None:
        await taken.take(received)

    return await started(broker, jobs)


async def with_middlewares(taken: Taken, count: int) -> Callable[[], Awaitable[Any]]:
    broker = BusBroker(taken.bus, middlewares=[Nothing] * count)
    jobs = subscriber(broker, taken)

    @jobs
    async def take(received: Any) -> None:
        await taken.take(received)

    return await started(broker, jobs)


async def with_a_dependency(taken: Taken) -> Callable[[], Awaitable[Any]]:
    broker = BusBroker(taken.bus)
    jobs = subscriber(broker, taken)

    async def nothing() -> None:
        pass

    @jobs
    async def take(received: Any, depends: Annotated[None, Depends(nothing)]) -> None:
        await taken.take(received)

    return await started(broker, jobs)


async def pull_sub(taken: Taken) -> Callable[[], Awaitable[Any]]:
    """FastStream's own subscriber."""
    broker, subjects = BusBroker(taken.bus), taken.bus.subjects

    async def decode(message: NatsMessage) -> Any:
        return session._decode(message.raw_message)

    subscriber = broker.subscriber(
        subjects.work(ROLE, WORKER),
        stream=subjects.stream("WORK"),
        durable=WORKER,
        pull_sub=PullSub(batch_size=ROOM),
        decoder=decode,
        ack_policy=AckPolicy.MANUAL,
        no_reply=True,
    )

    @subscriber
    async def take(received: Any) -> None:
        await taken.take(received)

    await broker.connect()
    subscriber.stream.declare = False
    await subscriber.start()
    return lambda: broker.remove(subscriber)


WAYS: dict[str, Start] = {
    "raw Puller": raw,
    "handler": plain,
    "handler, one middleware": lambda taken: with_middlewares(taken, 1),
    "handler, three middlewares": lambda taken: with_middlewares(taken, 3),
    "handler that depends on something": with_a_dependency,
    "FastStream's pull subscriber": pull_sub,
}


async def measure(bus: Bus, start: Start, jobs: int) -> float:
    """Seconds of CPU that this thread took per job."""
    subject, asked = bus.subjects.work(ROLE, WORKER), request(tuple(range(200)))
    body = wire.encode(Job(msgspec.Raw(wire.encode(asked)), 1, Decision("kv", WORKER, "router", time.time_ns())))
    headers = {HEADER_LOAD: load_header(200, 0, asked.gateway, asked.deadline_ns, "interactive")}
    await asyncio.gather(*(bus.js.publish(subject, body, headers=headers) for _ in range(jobs)))
    await bus.js.add_consumer(
        bus.subjects.stream("WORK"),
        ConsumerConfig(durable_name=WORKER, filter_subject=subject, ack_policy=Acks.EXPLICIT, max_ack_pending=4 * ROOM),
    )
    taken = Taken(bus, jobs)
    began = time.thread_time()
    end = await start(taken)
    async with asyncio.timeout(WAIT_S):
        await taken.over.wait()
    took = time.thread_time() - began
    await end()
    await bus.js.delete_consumer(bus.subjects.stream("WORK"), WORKER)
    await bus.js.purge_stream(bus.subjects.stream("WORK"))
    return took / jobs


async def compare(jobs: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of CPU per job in each round, by way."""
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedNats(Path(folder))
        await server.start()
        try:
            async with opened(server, Subjects()) as bus:
                for _ in range(rounds):
                    for way, start in WAYS.items():
                        took[way].append(await measure(bus, start, jobs))
        finally:
            await server.stop()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2000, help="in a round")
    parser.add_argument("--rounds", type=int, default=7)
    flags = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        took = runner.run(compare(flags.jobs, flags.rounds))
    raw_rounds = took["raw Puller"]
    table = Table("way", "µs of CPU per job", "more than raw", title=f"{os.cpu_count()} cores")
    for way, rounds in took.items():
        more = statistics.median(mine - other for mine, other in zip(rounds, raw_rounds, strict=True))
        table.add_row(way, f"{min(rounds) * 1e6:.1f}", f"{more * 1e6:+.1f}")
    stdout().print(table)


if __name__ == "__main__":
    main()
