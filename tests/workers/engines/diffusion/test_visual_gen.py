"""TensorRT-LLM's visual generation, against a stand-in of what is known of it: strict in what it takes."""

import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.configs.settings import WorkerSettings
from penstock.infra.model.modeldir import ModelError
from penstock.schemas.errors import Code
from penstock.schemas.requests import Diffusion
from penstock.workers.engines.diffusion.diffusion_protocol import GeneratedMedia, Interrupted
from penstock.workers.engines.engine_protocol import EngineError, RequestError
from penstock.workers.engines.trtllm import visual_gen

SETTINGS = WorkerSettings(role="diffusion", engine="trtllm")
VIDEO = Diffusion("video", "a wave", 32, 16, 4, "webp", frames=5, frame_rate=8.0, seed=3, guidance=2.0, negative="blur")
IMAGE = Diffusion("image", "a boat", 32, 16, 4, "png", seed=3, images=2)


@dataclass(frozen=True)
class VisualGenParams:
    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    seed: int | None = None
    num_frames: int | None = None
    frame_rate: float | None = None
    negative_prompt: str | None = None
    num_images_per_prompt: int = 1


@dataclass(frozen=True)
class VisualGenOutput:
    image: Any = None
    video: Any = None
    error: str | None = None


class VisualGen:
    """``batched``: videos have a batch axis, as since 1.3.0rc9."""

    made: list["VisualGen"] = []
    batched = True
    error: str | None = None

    def __init__(self, model: str, args: object = None) -> None:
        name = json.loads((Path(model) / "model_index.json").read_text())["_class_name"]
        if name == "BrokenPipeline":
            raise RuntimeError("no kernel")
        self.video = name == "WanPipeline"
        self.asked: list[tuple[str, VisualGenParams]] = []
        self.down = False
        self.made.append(self)

    def generate(self, inputs: str, params: VisualGenParams) -> VisualGenOutput:
        if not self.video and params.num_frames is not None:
            raise ValueError("num_frames is not supported by this pipeline")
        if params.width == 48:
            raise ValueError("width must be a multiple of 32")
        self.asked.append((inputs, params))
        if self.error:
            return VisualGenOutput(error=self.error)
        size = (params.height or 0, params.width or 0, 3)
        if self.video:
            pixels = np.zeros(((1,) if self.batched else ()) + (params.num_frames or 0, *size), np.uint8)
            return VisualGenOutput(video=pixels)
        return VisualGenOutput(image=np.zeros((1, *size), np.uint8))

    def shutdown(self) -> None:
        self.down = True


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """tensorrt_llm 1.3 with visual generation, and nothing else."""
    package, module = types.ModuleType("tensorrt_llm"), types.ModuleType("tensorrt_llm.visual_gen")
    package.__version__ = "1.3.0"  # type: ignore[attr-defined]
    package.__path__ = []
    module.VisualGen, module.VisualGenParams = VisualGen, VisualGenParams  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt_llm", package)
    monkeypatch.setitem(sys.modules, "tensorrt_llm.visual_gen", module)
    monkeypatch.setattr(VisualGen, "made", [])
    return module


def loaded(tmp_path: Path, pipeline: str) -> visual_gen.VisualGen:
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    return visual_gen.from_settings(WorkerSettings(role="diffusion", engine="trtllm", model=str(tmp_path)))


def generate(engine: visual_gen.VisualGen, ask: Diffusion) -> tuple[list[GeneratedMedia], list[tuple[int, int]]]:
    progress: list[tuple[int, int]] = []
    return engine.generate(ask, lambda done, total: progress.append((done, total))), progress


def test_a_release_without_visual_generation_is_refused_with_the_way_out(
    package: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm.visual_gen", None)
    with pytest.raises(EngineError, match=r"tensorrt_llm 1\.3\.0 has no visual generation.*--engine native"):
        visual_gen.from_settings(SETTINGS)
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(EngineError, match="cannot be imported"):
        visual_gen.from_settings(SETTINGS)


def test_another_interface_is_refused_by_the_name_of_what_lacks(
    package: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class Fewer:
        height: int = 0
        width: int = 0

    monkeypatch.setattr(package, "VisualGenParams", Fewer)
    with pytest.raises(EngineError, match="has no num_inference_steps, guidance_scale, seed, num_frames, frame_rate"):
        visual_gen.load()
    monkeypatch.delattr(package, "VisualGen")
    with pytest.raises(EngineError, match="without VisualGen"):
        visual_gen.load()


@pytest.mark.parametrize("batched", [True, False])
def test_a_video_with_or_without_a_batch_axis(
    package: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batched: bool
) -> None:
    monkeypatch.setattr(VisualGen, "batched", batched)
    engine = loaded(tmp_path, "WanPipeline")
    assert (engine.diffuser.kind, engine.diffuser.width, engine.diffuser.frames) == ("video", 832, 81)
    (film,), progress = generate(engine, VIDEO)
    assert (film.frames.shape, film.frame_rate) == ((5, 16, 32, 3), 8.0)
    assert progress == [(0, 1), (1, 1)]
    ((prompt, params),) = VisualGen.made[0].asked
    assert prompt == "a wave"
    assert params == VisualGenParams(16, 32, 4, 2.0, 3, 5, 8.0, "blur")
    engine.close()
    assert VisualGen.made[0].down


def test_images_are_made_one_by_one_without_what_they_do_not_support(package: types.ModuleType, tmp_path: Path) -> None:
    engine = loaded(tmp_path, "FluxPipeline")
    pictures, progress = generate(engine, IMAGE)
    assert [picture.frames.shape for picture in pictures] == [(1, 16, 32, 3)] * 2
    assert [params.seed for _, params in VisualGen.made[0].asked] == [3, 4]
    assert progress == [(0, 2), (1, 2), (2, 2)]


def test_a_request_is_not_begun_once_it_was_stopped(package: types.ModuleType, tmp_path: Path) -> None:
    engine = loaded(tmp_path, "FluxPipeline")

    def stop(done: int, total: int) -> None:
        if done:
            raise Interrupted

    with pytest.raises(Interrupted):
        engine.generate(IMAGE, stop)
    assert len(VisualGen.made[0].asked) == 1
    assert not engine.interruptible


def test_errors_are_the_requests(package: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = loaded(tmp_path, "WanPipeline")
    wrong = Diffusion("video", "a wave", 48, 16, 4, "webp", frames=5, frame_rate=8.0)
    with pytest.raises(RequestError, match="multiple of 32") as caught:
        generate(engine, wrong)
    assert caught.value.code == Code.invalid_request
    monkeypatch.setattr(VisualGen, "error", "worker died")
    with pytest.raises(RequestError, match="worker died") as caught:
        generate(engine, VIDEO)
    assert caught.value.code == Code.engine_error


def test_what_cannot_be_loaded_says_so(package: types.ModuleType, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no kernel"):
        loaded(tmp_path, "BrokenPipeline")
    with pytest.raises(ModelError, match="not a directory"):
        visual_gen.from_settings(SETTINGS)
