from pathlib import Path

import pytest

from tests.workers.engines.diffusion import pipelines


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipelines.image(tmp_path_factory.mktemp("pipelines") / "image")


@pytest.fixture(scope="session")
def video_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipelines.video(tmp_path_factory.mktemp("pipelines") / "video")
