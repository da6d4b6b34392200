"""One router, stub workers, and a client that follows all streams, on a real nats-server."""

from collections.abc import AsyncIterator

import pytest

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.subjects import Subjects
from tests.router.support import Clients, Routing, routing
from tests.workers.support import LogClient, log_client


@pytest.fixture
async def log(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[LogClient]:
    async with log_client(broker, pipeline) as log:
        yield log


@pytest.fixture
async def clients(log: LogClient) -> AsyncIterator[Clients]:
    clients = Clients(log)
    yield clients
    await clients.stop()


@pytest.fixture
async def one(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[Routing]:
    async with routing(broker, pipeline) as one:
        yield one
