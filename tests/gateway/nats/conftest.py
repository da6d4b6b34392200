"""A gateway with an engine that the test drives, on a real broker."""

from collections.abc import AsyncIterator

import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.model.modeldir import ModelDir
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.subjects import Subjects
from tests.gateway.nats.support import Engine, Running, gateway_on


@pytest.fixture
async def engine(bus: Bus) -> Engine:
    engine = Engine(bus)
    await engine.start()
    return engine


@pytest.fixture
async def running(broker: EmbeddedNats, subjects: Subjects, model: ModelDir, engine: Engine) -> AsyncIterator[Running]:
    async with gateway_on(broker, subjects, model) as running:
        yield running
