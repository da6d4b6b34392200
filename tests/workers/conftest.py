"""A record of what a worker says, on a real nats-server."""

from collections.abc import AsyncIterator

import pytest

from infra.broker.server import EmbeddedNats
from schemas.subjects import Subjects
from tests.workers.support import Record, recording


@pytest.fixture
async def record(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[Record]:
    async with recording(broker, pipeline) as record:
        yield record
