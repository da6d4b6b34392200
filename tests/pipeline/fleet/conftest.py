"""One deployment whose processes the modules of this folder kill: two of each role, at half a GPU's pace.

Whoever kills a process waits until its successor serves.
"""

import pytest

from tests.pipeline.conftest import NewDeployment, deployments
from tests.pipeline.support import Deployment, bus_of, http_of

shared_deployment = pytest.fixture(scope="package", name="shared_deployment")(deployments)


@pytest.fixture(scope="package")
def fleet(shared_deployment: NewDeployment) -> Deployment:
    """About 12 ms per token."""
    flags = ("--mock-speedup", "0.5", "--workers", "2", "--gateways", "2", "--routers", "2", "--list-requests")
    return shared_deployment(*flags, "--no-store-grace-s", "1", "--drain-s", "20")


fleet_bus = bus_of("fleet")
http = http_of("fleet")
