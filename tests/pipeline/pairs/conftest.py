"""One deployment of prefill and decode workers for all modules of this folder, two of each stage at a GPU's pace.

Prompts above 64 tokens are worth a transfer. Traces of all requests are sent to ``collector``. Whoever kills a process
waits until its successor serves.
"""

from collections.abc import Iterator

import pytest

from tests.penstock.log_tools.traces.collector import Collector
from tests.pipeline.conftest import NewDeployment, deployments
from tests.pipeline.support import Deployment, bus_of, http_of

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


bus = bus_of("pairs")
http = http_of("pairs")
