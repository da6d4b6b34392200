"""diffusers pipelines: which are served, what they tell of themselves, and what they make. Tiny ones, on the CPU."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from penstock.configs.settings import WorkerSettings
from penstock.infra.model.modeldir import ModelError
from penstock.schemas.errors import Code
from penstock.schemas.requests import Diffusion
from penstock.workers.engines.diffusion.diffusers_engine import (
    DiffusersEngine,
    PipelineSignature,
    from_settings,
    pipeline_class,
    resolve,
)
from penstock.workers.engines.diffusion.diffusion_protocol import Interrupted, pipeline_name
from penstock.workers.engines.engine_protocol import RequestError

SETTINGS = WorkerSettings(role="diffusion", threads=1, dtype="float32", device="cpu", max_frames=9)
IMAGE = Diffusion("image", "a red cube on the sea", 32, 24, 3, "png", seed=5)
VIDEO = Diffusion("video", "a blue wave", 32, 16, 3, "webp", frames=5, frame_rate=8.0, seed=5)


@pytest.fixture(scope="module")
def painter(image_folder: Path) -> DiffusersEngine:
    return from_settings(SETTINGS, resolve(str(image_folder)))


@pytest.fixture(scope="module")
def filmer(video_folder: Path) -> DiffusersEngine:
    return from_settings(SETTINGS, resolve(str(video_folder)))


def made(engine: DiffusersEngine, ask: Diffusion) -> list[Any]:
    return [picture.frames for picture in engine.generate(ask, lambda done, total: None)]


# -- which pipelines are served ------------------------------------------------------------------------------------


def index(folder: Path, content: object) -> Path:
    (folder / "model_index.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_the_pipeline_is_named_by_model_index_json(image_folder: Path, video_folder: Path) -> None:
    assert pipeline_name(image_folder) == "StableDiffusionPipeline"
    assert PipelineSignature(pipeline_class(pipeline_name(image_folder))).kind == "image"
    assert pipeline_name(video_folder) == "WanPipeline"
    assert PipelineSignature(pipeline_class(pipeline_name(video_folder))).kind == "video"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ([], "names no pipeline"),
        ({}, "names no pipeline"),
        ({"_class_name": "not a name"}, "names no pipeline"),
        ({"_class_name": ["own_code", "OwnPipeline"]}, "custom code"),
        ({"_class_name": "NoSuchPipeline"}, "not a pipeline of diffusers"),
        ({"_class_name": "AutoencoderKL"}, "not a pipeline of diffusers"),
        ({"_class_name": "StableDiffusionImg2ImgPipeline"}, "does not start from text alone"),
        ({"_class_name": "WanImageToVideoPipeline"}, "does not start from text alone"),
        ({"_class_name": "StableVideoDiffusionPipeline"}, "does not start from text alone"),
        ({"_class_name": "DDPMPipeline"}, "does not start from text alone"),
        ({"_class_name": "TextToVideoSDPipeline"}, "callback_on_step_end"),
    ],
)
def test_what_is_not_served_is_refused_before_weights_are_read(tmp_path: Path, content: object, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        resolve(str(index(tmp_path, content)))


def test_a_directory_of_something_else_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model_index\.json.*other roles"):
        resolve(str(tmp_path))
    for nowhere in ("", "./nowhere"):
        with pytest.raises(ModelError, match="not a directory"):
            resolve(nowhere)


def test_missing_weights_are_named(tmp_path: Path, image_folder: Path) -> None:
    index(tmp_path, json.loads((image_folder / "model_index.json").read_text()))
    with pytest.raises(ModelError, match="cannot be loaded"):
        from_settings(SETTINGS, tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("StableDiffusionXLPipeline", "image"),
        ("StableDiffusion3Pipeline", "image"),
        ("FluxPipeline", "image"),
        ("QwenImagePipeline", "image"),
        ("CogVideoXPipeline", "video"),
        ("HunyuanVideoPipeline", "video"),
        ("LTXPipeline", "video"),
        ("MochiPipeline", "video"),
        ("AnimateDiffPipeline", "video"),
        ("SanaVideoPipeline", "video"),
    ],
)
def test_what_a_pipeline_makes_is_read_from_its_signature(name: str, kind: str) -> None:
    assert PipelineSignature(pipeline_class(name)).kind == kind


# -- what they tell of themselves ----------------------------------------------------------------------------------


def test_sizes_and_defaults_come_from_the_pipeline_and_limits_from_the_flags(
    painter: DiffusersEngine, filmer: DiffusersEngine
) -> None:
    image, video = painter.diffuser, filmer.diffuser
    assert (image.kind, image.width, image.height, image.multiple, image.steps) == ("image", 32, 32, 8, 50)
    assert (image.frames, image.max_frames, image.frame_rate) == (1, 1, 0.0)
    assert image.formats == ("png", "jpeg", "webp")
    assert (video.kind, video.width, video.height, video.multiple) == ("video", 832, 480, 16)
    assert (video.frames, video.max_frames, video.frame_step, video.frame_rate) == (81, 81, 4, 16.0)
    assert video.formats[-2:] == ("webp", "gif")
    few = msgspec.structs.replace(SETTINGS, max_steps=7, max_pictures=2, frame_rate=24.0)
    limited = DiffusersEngine(filmer.pipeline, few).diffuser
    assert (limited.steps, limited.max_steps, limited.max_images, limited.frame_rate) == (7, 7, 2, 24.0)


# -- what they make ------------------------------------------------------------------------------------------------


def test_an_image_has_the_size_and_follows_prompt_and_seed(painter: DiffusersEngine) -> None:
    (first,) = made(painter, IMAGE)
    assert (first.shape, first.dtype) == ((1, 24, 32, 3), np.uint8)
    assert first.std() > 5, "not one colour"
    change = msgspec.structs.replace
    assert np.array_equal(made(painter, IMAGE)[0], first)
    assert not np.array_equal(made(painter, change(IMAGE, seed=6))[0], first)
    assert not np.array_equal(made(painter, change(IMAGE, prompt="a blue boat"))[0], first)
    assert not np.array_equal(made(painter, change(IMAGE, guidance=1.0))[0], first)
    assert not np.array_equal(made(painter, change(IMAGE, negative="blur"))[0], first)


def test_several_images_are_the_ones_that_their_seeds_make_alone(painter: DiffusersEngine) -> None:
    two = made(painter, msgspec.structs.replace(IMAGE, images=2))
    assert np.array_equal(two[0], made(painter, IMAGE)[0])
    assert np.array_equal(two[1], made(painter, msgspec.structs.replace(IMAGE, seed=6))[0])


def test_a_video_has_its_frames_and_is_repeatable(filmer: DiffusersEngine) -> None:
    (film,) = made(filmer, VIDEO)
    assert (film.shape, film.dtype) == ((5, 16, 32, 3), np.uint8)
    assert np.array_equal(made(filmer, VIDEO)[0], film)
    assert made(filmer, msgspec.structs.replace(VIDEO, frames=9))[0].shape[0] == 9


def test_each_step_is_reported_once_in_order(painter: DiffusersEngine, filmer: DiffusersEngine) -> None:
    for engine, ask in ((painter, msgspec.structs.replace(IMAGE, images=2)), (filmer, VIDEO)):
        progress: list[tuple[int, int]] = []
        engine.generate(ask, lambda done, total, progress=progress: progress.append((done, total)))
        steps = ask.steps * ask.images
        assert progress == [(done, steps) for done in range(1, steps + 1)]


@pytest.mark.parametrize("at", [1, 2])
def test_a_request_can_be_interrupted_between_two_steps_and_the_next_one_is_whole(
    painter: DiffusersEngine, at: int
) -> None:
    progress = []

    def stop(done: int, total: int) -> None:
        progress.append(done)
        if done == at:
            raise Interrupted

    before = made(painter, IMAGE)[0]
    with pytest.raises(Interrupted):
        painter.generate(IMAGE, stop)
    assert progress == list(range(1, at + 1))
    assert np.array_equal(made(painter, IMAGE)[0], before)


def test_what_the_pipeline_refuses_is_the_requests_fault(painter: DiffusersEngine) -> None:
    with pytest.raises(RequestError, match="divisible by 8") as caught:
        made(painter, msgspec.structs.replace(IMAGE, width=33))
    assert caught.value.code == Code.invalid_request


def test_what_does_not_fit_into_memory_is_the_requests_fault(
    painter: DiffusersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(painter.pipeline.unet, "forward", full)
        with pytest.raises(RequestError, match="32x24 do not fit") as caught:
            made(painter, IMAGE)
    assert caught.value.code == Code.engine_error
    assert made(painter, IMAGE)


def test_any_other_failure_is_the_engines(painter: DiffusersEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any, **options: Any) -> None:
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr(painter.pipeline.unet, "forward", lost)
    with pytest.raises(RuntimeError, match="device-side"):
        made(painter, IMAGE)
