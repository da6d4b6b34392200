"""TensorRT-LLM's visual generation as a diffusion engine: a prototype of release 1.3, probed at start.

It selects its pipeline by ``model_index.json``, runs one ``generate`` at a time and returns errors in a field of the
result. It reports no denoising steps and cannot be interrupted: a request's progress jumps from 0 to 100 %, and a
cancelled request is answered at once while the device completes it. Missing parts of the interface are named at start.
"""

import importlib
import inspect
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import structlog

from penstock.configs.settings import WorkerSettings
from penstock.infra.model.modeldir import ModelError
from penstock.schemas.errors import Code
from penstock.schemas.fleet import Diffuser
from penstock.schemas.requests import Diffusion
from penstock.workers.engines.diffusion.diffusion_protocol import (
    IMAGE_FORMATS,
    GeneratedMedia,
    Progress,
    pipeline_name,
    video_formats,
)
from penstock.workers.engines.engine_protocol import EngineError, RequestError

log = structlog.get_logger("engine")

MODULE = "tensorrt_llm.visual_gen"
INSTALL = (
    "visual generation came with TensorRT-LLM 1.3 (release candidates in NVIDIA's index and containers); until then "
    "use --engine native, which runs the same directory with diffusers"
)
# Defaults of its pipelines.
VIDEO_SIZE, IMAGE_SIZE = (832, 480), (1024, 1024)
FRAMES, FRAME_RATE, STEPS = 81, 16.0, 50
MULTIPLE, FRAME_STEP = 16, 4
_VIDEO = re.compile("Video|^Wan|^LTX|^Mochi|^Cosmos.*World|T2V")
_PARAMETERS = ("height", "width", "num_inference_steps", "guidance_scale", "seed", "num_frames", "frame_rate")


class VisualGenApi(NamedTuple):
    """The parts of the installed release that are used."""

    version: str
    engine: Callable[..., Any]
    parameters: Callable[..., Any]


def load() -> VisualGenApi:
    """Import it and check its interface.

    Raises:
        EngineError: TensorRT-LLM or its visual generation is missing, or has an unknown interface.
    """
    try:
        package = importlib.import_module("tensorrt_llm")
    except (ImportError, OSError) as error:  # OSError: a CUDA library is missing
        raise EngineError(f"TensorRT-LLM cannot be imported ({error}); {INSTALL}") from error
    version = str(getattr(package, "__version__", "of an unknown version"))
    try:
        module = importlib.import_module(MODULE)
    except ImportError as error:
        raise EngineError(f"tensorrt_llm {version} has no visual generation ({error}); {INSTALL}") from error
    engine, parameters = (getattr(module, name, None) for name in ("VisualGen", "VisualGenParams"))
    if engine is None or parameters is None:
        raise EngineError(f"tensorrt_llm {version} has a {MODULE} without VisualGen or VisualGenParams; {INSTALL}")
    api = VisualGenApi(version, engine, parameters)
    lacking = [name for name in _PARAMETERS if name not in _names(api.parameters)]
    if lacking:
        raise EngineError(f"VisualGenParams of tensorrt_llm {version} has no {', '.join(lacking)}; {INSTALL}")
    log.info("visual_gen", version=version, parameters=sorted(_names(api.parameters)))
    return api


def _names(kind: Callable[..., Any]) -> set[str]:
    fields = getattr(kind, "model_fields", None) or getattr(kind, "__dataclass_fields__", None)
    return set(fields) if fields else set(inspect.signature(kind).parameters)


class VisualGen:
    """Implements ``penstock.workers.engines.diffusion.diffusion_protocol.DiffusionEngine``."""

    name = "trtllm"
    interruptible = False

    def __init__(self, api: VisualGenApi, engine: Any, diffuser: Diffuser, load_seconds: float) -> None:
        self._api = api
        self._engine = engine
        self.diffuser = diffuser
        self.load_seconds = load_seconds

    def generate(self, request: Diffusion, progress: Progress) -> list[GeneratedMedia]:
        outputs = []
        for index in range(request.images):
            progress(index, request.images)
            outputs.append(self._generate_one(request, index))
        progress(request.images, request.images)
        return outputs

    def _generate_one(self, request: Diffusion, index: int) -> GeneratedMedia:
        video = request.kind == "video"
        parameters: dict[str, Any] = {
            "width": request.width,
            "height": request.height,
            "num_inference_steps": request.steps,
            "seed": (request.seed + index) & (1 << 63) - 1,
        }
        if video:  # the engine refuses unsupported options
            parameters |= {"num_frames": request.frames, "frame_rate": request.frame_rate}
        if request.guidance is not None:
            parameters["guidance_scale"] = request.guidance
        if request.negative:
            parameters["negative_prompt"] = request.negative
        try:
            output = self._engine.generate(request.prompt, self._api.parameters(**parameters))
        except (ValueError, TypeError) as error:
            raise RequestError(Code.invalid_request, f"TensorRT-LLM refuses this request: {error}"[:500]) from error
        output = output[0] if isinstance(output, list) else output
        if output.error:
            raise RequestError(Code.engine_error, f"TensorRT-LLM failed: {output.error}"[:500])
        frames = _array(output.video if video else output.image)
        if frames.ndim == (5 if video else 4):
            frames = frames[0]  # the batch dimension, which videos have since 1.3.0rc9
        rate = request.frame_rate if video else 0.0
        return GeneratedMedia(frames if video else frames[None], rate)

    def close(self) -> None:
        self._engine.shutdown()


def _array(value: Any) -> Any:
    """A tensor or an array as a uint8 array."""
    if value is None:
        raise RequestError(Code.engine_error, "TensorRT-LLM returned no image")
    array = np.asarray(value.cpu() if hasattr(value, "cpu") else value)
    if array.dtype != np.uint8:
        raise RequestError(Code.engine_error, f"TensorRT-LLM returned images of {array.dtype}; only uint8 is supported")
    return array


def from_settings(settings: WorkerSettings) -> VisualGen:
    """Load a pipeline.

    Raises:
        EngineError: this TensorRT-LLM has no visual generation, or it cannot run the pipeline.
        ModelError: the model is not a directory with a pipeline.
    """
    api = load()
    path = Path(settings.model).expanduser()
    if not settings.model or not path.is_dir():
        raise ModelError(f"model {settings.model!r} is not a directory; download it first, or use --engine native")
    diffuser = describe(pipeline_name(path), settings)
    began = time.monotonic()
    try:
        engine = api.engine(str(path))
    except Exception as error:
        raise EngineError(f"TensorRT-LLM {api.version} cannot run the pipeline in {path}: {error}") from error
    return VisualGen(api, engine, diffuser, time.monotonic() - began)


def describe(pipeline: str, settings: WorkerSettings) -> Diffuser:
    """What the worker registers for a pipeline class; the engine itself does not say."""
    video = _VIDEO.search(pipeline) is not None
    width, height = VIDEO_SIZE if video else IMAGE_SIZE
    return Diffuser(
        kind="video" if video else "image",
        pipeline=pipeline,
        width=width,
        height=height,
        steps=min(STEPS, settings.max_steps),
        formats=video_formats() if video else IMAGE_FORMATS,
        max_pixels=max(settings.max_pixels, width * height),
        max_steps=settings.max_steps,
        multiple=MULTIPLE,
        max_images=settings.max_pictures,
        frames=FRAMES if video else 1,
        max_frames=max(FRAMES, settings.max_frames) if video else 1,
        frame_step=FRAME_STEP if video else 1,
        frame_rate=(settings.frame_rate or FRAME_RATE) if video else 0.0,
    )
