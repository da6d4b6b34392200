from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.gateway.base.request_bodies import PrepareContext
from penstock.infra.model.modeldir import ModelDir, load
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.subjects import Subjects
from tests.gateway.nats.support import Running, gateway_on
from tests.tiny_model import write


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    return load(write(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="session")
def context(model: ModelDir) -> PrepareContext:
    return PrepareContext(model, ("tiny", "alias"), "gw1")


@pytest.fixture(scope="session")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> PrepareContext:
    path: Path = write(tmp_path_factory.mktemp("model") / "long", max_len=200_000)
    return PrepareContext(load(path), ("tiny",), "gw1")


@pytest.fixture
async def running(broker: EmbeddedNats, subjects: Subjects, model: ModelDir) -> AsyncIterator[Running]:
    async with gateway_on(broker, subjects, model) as running:
        yield running
