"""One deployment of prefill and decode workers for all modules of this folder, two of each stage at a GPU's pace.

Prompts above 64 tokens are worth a transfer. Traces of all requests are sent to ``collector``. Whoever kills a process
waits until its successor serves.
"""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from penstock.infra.bus.connection import Bus, connect
from tests.penstock.log_tools.traces.collector import Collector
from tests.pipeline.conftest import NewDeployment, deployments
from tests.pipeline.support import Deployment

shared_deployment = pytest.fixture(scope="package", name="shared_deployment")(deployments)


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    made = Collector()
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="package")
def pairs(shared_deployment: NewDeployment, collector: Collector) -> Deployment:
    return shared_deployment(
        *("--mock-speedup", "1", "--prefill", "2", "--decode", "2", "--local-prefill-tokens", "64"),
        *("--routers", "2", "--otlp-endpoint", collector.url),
    )


@pytest.fixture
async def bus(pairs: Deployment) -> AsyncIterator[Bus]:
    """An operator's connection to its broker."""
    made = await connect(pairs.state.nats_url, role="operator", name="test")
    yield made
    await made.close()


@pytest.fixture
async def http(pairs: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    """Plain HTTP to its gateway."""
    async with httpx.AsyncClient(base_url=pairs.urls[0], trust_env=False, timeout=30) as made:
        yield made
