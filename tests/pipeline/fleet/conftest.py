"""One deployment whose processes the modules of this folder kill: two of each role, at half a GPU's pace.

Whoever kills a process waits until its successor serves.
"""

from collections.abc import AsyncIterator

import httpx
import pytest

from penstock.infra.bus.connection import Bus, connect
from tests.pipeline.conftest import NewDeployment, deployments
from tests.pipeline.support import Deployment

shared_deployment = pytest.fixture(scope="package", name="shared_deployment")(deployments)


@pytest.fixture(scope="package")
def fleet(shared_deployment: NewDeployment) -> Deployment:
    """About 12 ms per token."""
    flags = ("--mock-speedup", "0.5", "--workers", "2", "--gateways", "2", "--routers", "2", "--list-requests")
    return shared_deployment(*flags, "--no-store-grace-s", "1", "--drain-s", "20")


@pytest.fixture
async def fleet_bus(fleet: Deployment) -> AsyncIterator[Bus]:
    """An operator's connection to its broker."""
    bus = await connect(fleet.state.nats_url, role="operator", name="test")
    yield bus
    await bus.close()


@pytest.fixture
async def http(fleet: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    """Plain HTTP to its first gateway."""
    async with httpx.AsyncClient(base_url=fleet.urls[0], trust_env=False, timeout=30) as made:
        yield made
