from pathlib import Path

import pytest

from gateway.openai.prepare_context import Target
from infra.model.modeldir import ModelDir, load
from tests.tiny_model import write


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    return load(write(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="session")
def target(model: ModelDir) -> Target:
    return Target(model, ("tiny", "alias"), "gw1")


@pytest.fixture(scope="session")
def long_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path: Path = write(tmp_path_factory.mktemp("model") / "long", max_len=200_000)
    return Target(load(path), ("tiny",), "gw1")
