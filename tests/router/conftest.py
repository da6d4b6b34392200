"""One router, stub workers, and a record of everything published, on a real nats-server."""

from collections.abc import AsyncIterator

import pytest

from infra.broker.server import EmbeddedNats
from schemas.subjects import Subjects
from tests.router.support import Clients, Routing, routing
from tests.workers.support import Record, recording


@pytest.fixture
async def record(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[Record]:
    async with recording(broker, pipeline) as record:
        yield record


@pytest.fixture
async def clients(record: Record) -> AsyncIterator[Clients]:
    clients = Clients(record)
    yield clients
    await clients.stop()


@pytest.fixture
async def one(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[Routing]:
    async with routing(broker, pipeline) as one:
        yield one
