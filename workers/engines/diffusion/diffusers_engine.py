"""Pipelines of the ``diffusers`` library as a diffusion engine: what one makes is read from its signature and parts."""

import gc
import inspect
import math
import re
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import structlog
import torch

from configs.settings import WorkerSettings
from infra.model.modeldir import ModelError
from schemas.errors import Code
from schemas.fleet import Diffuser
from schemas.requests import Diffusion
from workers.engines.base import RequestError
from workers.engines.diffusion.base import Picture, Progress, Stopped
from workers.engines.diffusion.encode import IMAGE_FORMATS, video_formats
from workers.engines.diffusion.model_index import INDEX, pipeline_name

log = structlog.get_logger("engine")

FRAMES = ("num_frames", "video_length", "frames")  # how pipelines call the number of frames
RATES = ("frame_rate", "fps")
FRAME_RATE = 16.0  # where neither the pipeline nor a flag says
STEPS = 50
_NEEDED = ("callback_on_step_end", "generator", "output_type", "num_inference_steps", "width", "height")
# Pipelines that start from a picture take it as an optional parameter, and fail without.
_FROM_PICTURES = re.compile(
    "Img2Img|Inpaint|ImageToVideo|VideoToVideo|Control|Upscale|2Img|2Pix|Edit|Fill|Refine|I2V|V2V|Prior|VideoToWorld"
)

Kind = Literal["image", "video"]


class Shape:
    """What a pipeline's ``__call__`` takes.

    Raises:
        ModelError: it is not one that makes images or videos of a text, step by step.
    """

    def __init__(self, pipeline: type) -> None:
        name = pipeline.__name__
        self.parameters = dict(inspect.signature(pipeline.__call__).parameters)
        self.parameters.pop("self", None)
        bare = {p.name for p in self.parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
        if bare - {"prompt"} or "prompt" not in self.parameters or _FROM_PICTURES.search(name):
            raise ModelError(f"pipeline {name} does not start from a text alone; only such pipelines are served")
        if lacking := [parameter for parameter in _NEEDED if parameter not in self.parameters]:
            raise ModelError(
                f"pipeline {name} has no parameter {lacking[0]}: a request could not be sized, repeated on another "
                "worker or stopped between steps; it is not served"
            )
        self.frames = self._first(FRAMES)
        self.rate = self._first(RATES)
        self.kind: Kind = "video" if self.frames else "image"

    def _first(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if name in self.parameters), "")

    def default(self, name: str) -> Any:
        """Of a parameter; None: there is none."""
        parameter = self.parameters.get(name)
        return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default


def pipeline_class(name: str) -> type:
    """The class in the installed diffusers.

    Raises:
        ModelError: it has none of this name, or one whose parts are not installed.
    """
    try:
        import diffusers
    except ImportError as error:
        raise ModelError(f"--role diffusion needs diffusers: pip install 'penstock[diffusion]' ({error})") from None
    found = getattr(diffusers, name, None)
    if not isinstance(found, type) or not issubclass(found, diffusers.DiffusionPipeline):
        raise ModelError(
            f"{INDEX} names {name!r}, which is no pipeline of diffusers {diffusers.__version__}; install a version "
            "that has it, or check the directory"
        )
    return found


class Pipeline:
    """A diffusion engine on one device."""

    name = "diffusers"
    stoppable = True

    def __init__(self, pipeline: Any, settings: WorkerSettings, load_seconds: float = 0.0) -> None:
        self._pipeline = pipeline
        self._shape = Shape(type(pipeline))
        self.diffuser = described(pipeline, self._shape, settings)
        self.load_seconds = load_seconds

    def generate(self, ask: Diffusion, progress: Progress) -> list[Picture]:
        """One after another: what one picture looks like does not depend on how many are asked for, memory neither."""
        made = []
        for index in range(ask.images):

            def advanced(done: int, total: int, before: int = index) -> None:
                progress(before * total + done, ask.images * total)

            made.append(self._one(ask, ask.seed + index, advanced))
        return made

    def _one(self, ask: Diffusion, seed: int, progress: Progress) -> Picture:
        def stepped(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            progress(step + 1, max(step + 1, getattr(pipeline, "num_timesteps", None) or ask.steps))
            return tensors

        shape = self._shape
        options: dict[str, Any] = {
            "prompt": ask.prompt,
            "num_inference_steps": ask.steps,
            # On the CPU, so that the noise is the same whatever the device.
            "generator": torch.Generator("cpu").manual_seed(seed & (1 << 63) - 1),
            "output_type": "np",
            "callback_on_step_end": stepped,
            "width": ask.width,
            "height": ask.height,
        }
        if shape.frames:
            options[shape.frames] = ask.frames
        if shape.rate:
            options[shape.rate] = ask.frame_rate
        if ask.negative:
            options["negative_prompt"] = ask.negative
        if ask.guidance is not None:
            options["guidance_scale"] = ask.guidance
        try:
            with torch.inference_mode():
                output = self._pipeline(**options)
        except Stopped:
            self._pipeline.maybe_free_model_hooks()
            raise
        except torch.OutOfMemoryError as error:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            what = f"{ask.frames} frames of " if shape.frames else ""
            raise RequestError(
                Code.engine_error, f"{what}{ask.width}x{ask.height} do not fit into the device's memory: {error}"[:500]
            ) from error
        except (ValueError, TypeError) as error:  # the pipeline's own checks
            raise RequestError(Code.invalid_request, f"the pipeline refuses this request: {error}"[:500]) from error
        frames = output.frames[0] if shape.frames else output.images[:1]
        return Picture(_pixels(np.asarray(frames)), ask.frame_rate)

    def close(self) -> None:
        self._pipeline = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _pixels(frames: Any) -> Any:
    """(frames, height, width, 3) in 0 .. 1 as uint8."""
    if frames.dtype == np.uint8:
        return frames
    return (np.nan_to_num(frames).clip(0.0, 1.0) * 255.0).round().astype(np.uint8)


def described(pipeline: Any, shape: Shape, settings: WorkerSettings) -> Diffuser:
    """What is registered: defaults from the pipeline's signature and configuration, limits from the settings."""
    video = shape.kind == "video"
    width, height = _size(pipeline, shape)
    step = _attribute(pipeline, "vae_scale_factor_temporal", "vae_temporal_compression_ratio") or 1
    frames = int(shape.default(shape.frames) or 16) if video else 1
    rate = settings.frame_rate or float(shape.default(shape.rate) or FRAME_RATE)
    return Diffuser(
        kind=shape.kind,
        pipeline=type(pipeline).__name__,
        width=width,
        height=height,
        steps=min(int(shape.default("num_inference_steps") or STEPS), settings.max_steps),
        formats=video_formats() if video else IMAGE_FORMATS,
        max_pixels=max(settings.max_pixels, width * height),
        max_steps=settings.max_steps,
        multiple=_multiple(pipeline),
        max_images=settings.max_pictures,
        frames=frames,
        max_frames=max(frames, settings.max_frames) if video else 1,
        frame_step=step if video else 1,
        frame_rate=rate if video else 0.0,
        negative="negative_prompt" in shape.parameters,
        guidance="guidance_scale" in shape.parameters,
    )


def _attribute(pipeline: Any, *names: str) -> int:
    return next((int(value) for name in names if isinstance(value := getattr(pipeline, name, None), int)), 0)


def _scale(pipeline: Any) -> int:
    """Pixels per latent, in each direction."""
    return _attribute(pipeline, "vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor") or 8


def _denoiser(pipeline: Any) -> Any:
    part = getattr(pipeline, "transformer", None) or getattr(pipeline, "unet", None)
    return part.config if part is not None else None


def _multiple(pipeline: Any) -> int:
    """Width and height have to be multiples of this: of the latents, of the patches of latents, and of 8."""
    patch = getattr(_denoiser(pipeline), "patch_size", None) or 1
    scale = _scale(pipeline) * (max(patch[-2:]) if isinstance(patch, list | tuple) else patch)
    processor = getattr(pipeline, "video_processor", None) or getattr(pipeline, "image_processor", None)
    own = getattr(getattr(processor, "config", None), "vae_scale_factor", None) or 1
    return math.lcm(8, scale, own)


def _size(pipeline: Any, shape: Shape) -> tuple[int, int]:
    """Width and height when nobody says."""
    width, height = shape.default("width"), shape.default("height")
    if not (width and height):
        config = _denoiser(pipeline)
        sample = getattr(pipeline, "default_sample_size", None) or getattr(config, "sample_size", None)
        rows, columns = getattr(config, "sample_height", None), getattr(config, "sample_width", None)
        if not (rows and columns):
            rows, columns = sample if isinstance(sample, list | tuple) else (sample or 64, sample or 64)
        width, height = columns * _scale(pipeline), rows * _scale(pipeline)
    multiple = _multiple(pipeline)
    return max(multiple, width // multiple * multiple), max(multiple, height // multiple * multiple)


def resolve(model: str) -> Path:
    """The directory of a pipeline; a Hugging Face id is fetched once its pipeline is known to be served.

    Raises:
        ModelError: there is none, or one that is not served.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        Shape(pipeline_class(pipeline_name(path)))
        return path
    if not model or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(f"model {model!r} is not a directory; name a directory or a Hugging Face id 'owner/name'")
    from huggingface_hub import hf_hub_download

    try:
        index = Path(hf_hub_download(model, INDEX))
        found = pipeline_class(pipeline_name(index.parent))
        Shape(found)
        return Path(found.download(model, use_safetensors=True))  # type: ignore[attr-defined]
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"model {model!r} is neither a directory nor could it be fetched from the Hugging Face hub: {error}"
        ) from error


def from_settings(settings: WorkerSettings, path: Path) -> Pipeline:
    """Load a pipeline onto its device.

    Raises:
        ModelError: the directory holds none, or parts of it cannot be read.
    """
    began = time.monotonic()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name = settings.dtype if settings.dtype != "auto" else ("float32" if device == "cpu" else "bfloat16")
    kind = pipeline_class(pipeline_name(path))
    _without_bars()
    try:
        pipeline = kind.from_pretrained(path, dtype=getattr(torch, name), local_files_only=True)  # type: ignore[attr-defined]
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"the pipeline in {path} cannot be loaded: {error}") from error
    pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    return Pipeline(pipeline, settings, time.monotonic() - began)


def _without_bars() -> None:
    """Progress bars are for terminals, not for logs."""
    from diffusers.utils import logging as ours
    from transformers.utils import logging as theirs

    ours.disable_progress_bar()
    theirs.disable_progress_bar()
