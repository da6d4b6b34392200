"""Workers on a real nats-server, and a client that follows their streams."""

from collections.abc import AsyncIterator

import pytest

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.subjects import Subjects
from tests.workers.support import LogClient, log_client


@pytest.fixture
async def log(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[LogClient]:
    async with log_client(broker, pipeline) as log:
        yield log
