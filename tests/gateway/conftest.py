from pathlib import Path

import pytest

from gateway.openai.prepare_context import PrepareContext
from infra.model.modeldir import ModelDir, load
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
