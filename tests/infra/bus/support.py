"""Connections to a real broker for tests of what is built on them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

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

    Raises:
        AssertionError: it does not in time.
    """
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.005)
