from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.workers.engines.native import models

TINY = Path(__file__).parents[4] / "configs" / "models" / "tiny"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a named small model, made when first asked for."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = models.save(name, root)
        return made[name]

    return directory
