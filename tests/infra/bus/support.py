"""Connections to a real broker for tests of what is built on them."""

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from nats.js.api import AckPolicy, ConsumerConfig

from penstock.infra.bus.connection import Bus, connect
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects


@contextlib.asynccontextmanager
async def opened(server: EmbeddedNats, subjects: Subjects, **options: Any) -> AsyncIterator[Bus]:
    """An operator's bus in a namespace; its streams are made if they are missing."""
    ended: list[int] = []
    bus = await connect(
        server.url("operator"),
        role="operator",
        name="test",
        namespace=subjects.namespace,
        end_process=ended.append,  # type: ignore[arg-type]  # os._exit would end the test run
        **options,
    )
    try:
        await apply(bus.nc, topology(subjects))
        yield bus
    finally:
        await bus.close()
    assert not ended


async def eventually(condition: Callable[[], Any], within_s: float = 30.0) -> None:
    """Wait until something holds.

    Args:
        condition: may be a coroutine function.
    Raises:
        AssertionError: it does not in time.
    """
    deadline = time.monotonic() + within_s
    while not (await holds if inspect.isawaitable(holds := condition()) else holds):
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.005)


CONSUMER = "worker-1"


async def make_consumer(bus: Bus, **options: Any) -> None:
    await bus.js.add_consumer(
        bus.subjects.stream("WORK"),
        ConsumerConfig(
            durable_name=CONSUMER,
            filter_subject=bus.subjects.work("aggregated", CONSUMER),
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=30,
            max_ack_pending=1000,
            **options,
        ),
    )


async def publish_jobs(bus: Bus, *jobs: int) -> None:
    for job in jobs:
        await bus.js.publish(bus.subjects.work("aggregated", CONSUMER), b"%d" % job)


async def delivered(bus: Bus) -> int:
    """Messages that the server has sent."""
    info = await bus.js.consumer_info(bus.subjects.stream("WORK"), CONSUMER)
    assert info.delivered is not None
    return int(info.delivered.consumer_seq)


async def unacked(bus: Bus) -> int:
    info = await bus.js.consumer_info(bus.subjects.stream("WORK"), CONSUMER)
    return int(info.num_ack_pending or 0)
