"""Three deployments for all modules of this folder, which run one after the other in one process.

``fast`` (two workers without step times, two gateways), ``slow`` (one worker at a part of a GPU's speed, two gateways),
``empty`` (no workers). Whoever changes one of them puts it back.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from penstock.infra.bus.connection import Bus, connect
from tests.pipeline.conftest import NewDeployment, deployments
from tests.pipeline.support import MODEL_NAME, Deployment

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


@pytest.fixture
async def bus(fast: Deployment) -> AsyncIterator[Bus]:
    """An operator's connection to the broker of ``fast``."""
    made = await connect(fast.state.nats_url, role="operator", name="test")
    yield made
    await made.close()


@pytest.fixture
async def slow_bus(slow: Deployment) -> AsyncIterator[Bus]:
    made = await connect(slow.state.nats_url, role="operator", name="test")
    yield made
    await made.close()


@pytest.fixture
async def empty_bus(empty: Deployment) -> AsyncIterator[Bus]:
    made = await connect(empty.state.nats_url, role="operator", name="test")
    yield made
    await made.close()


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


@pytest.fixture
async def http(fast: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    """Plain HTTP to the first gateway of ``fast``."""
    async with httpx.AsyncClient(base_url=fast.urls[0], trust_env=False, timeout=30) as made:
        yield made


@pytest.fixture
async def slow_http(slow: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=slow.urls[0], trust_env=False, timeout=30) as made:
        yield made


@pytest.fixture
async def empty_http(empty: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=empty.urls[0], trust_env=False, timeout=30) as made:
        yield made
