from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.workers.engines.diffusion import pipelines  # late: it imports diffusers

    return pipelines.image(tmp_path_factory.mktemp("pipelines") / "image")


@pytest.fixture(scope="session")
def video_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.workers.engines.diffusion import pipelines

    return pipelines.video(tmp_path_factory.mktemp("pipelines") / "video")
