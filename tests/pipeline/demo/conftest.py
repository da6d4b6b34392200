"""One deployment of the native engine and the demo model for all modules of this folder."""

import pytest

from tests.pipeline.conftest import NewDeployment, deployments
from tests.pipeline.support import Deployment

shared_deployment = pytest.fixture(scope="package", name="shared_deployment")(deployments)


@pytest.fixture(scope="package")
def demo(shared_deployment: NewDeployment) -> Deployment:
    return shared_deployment("--engine", "native", "--workers", "2", "--threads", "1", "--gateways", "2")
