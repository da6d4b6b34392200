"""Three deployments for all modules of this folder, which run one after the other in one process.

``fast`` (two workers without step times, two gateways), ``slow`` (one worker at a part of a GPU's speed, two gateways),
``empty`` (no workers). Whoever changes one of them puts it back.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest

from tests.pipeline.conftest import NewDeployment, deployments
from tests.pipeline.support import MODEL_NAME, Deployment, bus_of, http_of

shared_deployment = pytest.fixture(scope="package", name="shared_deployment")(deployments)


@pytest.fixture(scope="package")
def fast(shared_deployment: NewDeployment) -> Deployment:
    flags = ("--mock-speedup", "0", "--workers", "2", "--gateways", "2", "--served-model-name", f"{MODEL_NAME},other")
    return shared_deployment(*flags, "--list-requests")


@pytest.fixture(scope="package")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat template that is not the model's own."""
    path: Path = tmp_path_factory.mktemp("template") / "own.jinja"
    path.write_text("{% for message in messages %}[{{ message.role }}] {{ message.content }} {% endfor %}=>")
    return path


@pytest.fixture(scope="package")
def slow(shared_deployment: NewDeployment, template: Path) -> Deployment:
    """About 25 ms per token, 4 sequences at once."""
    return shared_deployment(
        *("--mock-speedup", "0.25", "--workers", "1", "--gateways", "2", "--max-running", "4"),
        *("--router-mode", "least_loaded", "--chat-template", str(template)),
    )


@pytest.fixture(scope="package")
def empty(shared_deployment: NewDeployment) -> Deployment:
    return shared_deployment("--workers", "0", "--max-queue", "4")


bus = bus_of("fast")
slow_bus = bus_of("slow")
empty_bus = bus_of("empty")


@pytest.fixture
def client(fast: Deployment) -> Iterator[openai.OpenAI]:
    """The stock client, against ``fast``."""
    transport = openai.DefaultHttpxClient(trust_env=False, verify=False)
    with openai.OpenAI(base_url=fast.urls[0] + "/v1", api_key="none", max_retries=0, http_client=transport) as made:
        yield made


@pytest.fixture
async def aclient(fast: Deployment) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = openai.DefaultAsyncHttpxClient(trust_env=False, verify=False)
    async with openai.AsyncOpenAI(
        base_url=fast.urls[0] + "/v1", api_key="none", max_retries=0, http_client=transport
    ) as made:
        yield made


http = http_of("fast")
slow_http = http_of("slow")
empty_http = http_of("empty")
