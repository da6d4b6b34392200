"""Pipelines of the ``diffusers`` library as diffusion engines: limits come from their signature and components."""

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

from penstock.configs.settings import WorkerSettings
from penstock.infra.model.modeldir import ModelError
from penstock.infra.process.gc_policy import loading
from penstock.schemas.errors import Code
from penstock.schemas.fleet import Diffuser
from penstock.schemas.requests import Diffusion
from penstock.workers.engines.diffusion.diffusion_protocol import (
    IMAGE_FORMATS,
    INDEX,
    GeneratedMedia,
    Interrupted,
    Progress,
    pipeline_name,
    video_formats,
)
from penstock.workers.engines.engine_protocol import RequestError

FRAMES = ("num_frames", "video_length", "frames")  # names of the parameter for the number of frames
RATES = ("frame_rate", "fps")
_REQUIRED = ("callback_on_step_end", "generator", "output_type", "num_inference_steps", "width", "height")
# Pipelines that start from an image take it as an optional parameter, but fail without it.
_FROM_IMAGES = re.compile(
    "Img2Img|Inpaint|ImageToVideo|VideoToVideo|Control|Upscale|2Img|2Pix|Edit|Fill|Refine|I2V|V2V|Prior|VideoToWorld"
)

Kind = Literal["image", "video"]


class PipelineSignature:
    """The parameters of a pipeline's ``__call__``.

    Attributes:
        frames, rate: names of the parameters for the number of frames and the frame rate; empty: none.

    Raises:
        ModelError: the pipeline does not make images or videos from a text, step by step.
    """

    def __init__(self, pipeline: type) -> None:
        name = pipeline.__name__
        self.parameters = dict(inspect.signature(pipeline.__call__).parameters)
        self.parameters.pop("self", None)
        bare = {p.name for p in self.parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
        if bare - {"prompt"} or "prompt" not in self.parameters or _FROM_IMAGES.search(name):
            raise ModelError(f"pipeline {name} does not start from text alone; only such pipelines are supported")
        if lacking := [parameter for parameter in _REQUIRED if parameter not in self.parameters]:
            raise ModelError(
                f"pipeline {name} has no parameter {lacking[0]}, so its requests could not be sized, repeated on "
                "another worker or interrupted; it is not supported"
            )
        self.frames = self._first(FRAMES)
        self.rate = self._first(RATES)
        self.kind: Kind = "video" if self.frames else "image"

    def _first(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if name in self.parameters), "")

    def default(self, name: str) -> Any:
        """The default of a parameter; None: it has none."""
        parameter = self.parameters.get(name)
        return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default


def pipeline_class(name: str) -> type:
    """The class in the installed diffusers.

    Raises:
        ModelError: diffusers is not installed, or has no such pipeline.
    """
    try:
        import diffusers
    except ImportError as error:
        raise ModelError(f"--role diffusion needs diffusers: pip install 'penstock[diffusion]' ({error})") from None
    class_ = getattr(diffusers, name, None)
    if not isinstance(class_, type) or not issubclass(class_, diffusers.DiffusionPipeline):
        raise ModelError(
            f"{INDEX} names {name!r}, which is not a pipeline of diffusers {diffusers.__version__}; install a version "
            "that has it, or check the directory"
        )
    return class_


log = structlog.get_logger("engine")

FRAME_RATE = 16.0  # if neither the pipeline nor a flag sets it
STEPS = 50


class DiffusersEngine:
    """Implements ``penstock.workers.engines.diffusion.diffusion_protocol.DiffusionEngine`` on one device.

    Attributes:
        pipeline: of diffusers, with its model.
    """

    name = "diffusers"
    interruptible = True

    def __init__(self, pipeline: Any, settings: WorkerSettings, load_seconds: float = 0.0) -> None:
        self.pipeline = pipeline
        self._signature = PipelineSignature(type(pipeline))
        self.diffuser = describe(pipeline, self._signature, settings)
        self.load_seconds = load_seconds

    def generate(self, request: Diffusion, progress: Progress) -> list[GeneratedMedia]:
        """Generate one after another, so that neither the result nor the memory depends on how many are requested."""
        outputs = []
        for index in range(request.images):

            def on_step(done: int, total: int, before: int = index) -> None:
                progress(before * total + done, request.images * total)

            outputs.append(self._generate_one(request, request.seed + index, on_step))
        return outputs

    def _generate_one(self, request: Diffusion, seed: int, progress: Progress) -> GeneratedMedia:
        def on_step_end(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            progress(step + 1, max(step + 1, getattr(pipeline, "num_timesteps", None) or request.steps))
            return tensors

        signature = self._signature
        options: dict[str, Any] = {
            "prompt": request.prompt,
            "num_inference_steps": request.steps,
            # On the CPU, so that the noise is the same on every device.
            "generator": torch.Generator("cpu").manual_seed(seed & (1 << 63) - 1),
            "output_type": "np",
            "callback_on_step_end": on_step_end,
            "width": request.width,
            "height": request.height,
        }
        if signature.frames:
            options[signature.frames] = request.frames
        if signature.rate:
            options[signature.rate] = request.frame_rate
        if request.negative:
            options["negative_prompt"] = request.negative
        if request.guidance is not None:
            options["guidance_scale"] = request.guidance
        try:
            with torch.inference_mode():
                output = self.pipeline(**options)
        except Interrupted:
            self.pipeline.maybe_free_model_hooks()
            raise
        except torch.OutOfMemoryError as error:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            prefix = f"{request.frames} frames of " if signature.frames else ""
            raise RequestError(
                Code.engine_error,
                f"{prefix}{request.width}x{request.height} do not fit into the device's memory: {error}"[:500],
            ) from error
        except (ValueError, TypeError) as error:  # the pipeline's own checks
            raise RequestError(Code.invalid_request, f"the pipeline refuses this request: {error}"[:500]) from error
        frames = output.frames[0] if signature.frames else output.images[:1]
        return GeneratedMedia(_pixels(np.asarray(frames)), request.frame_rate)

    def close(self) -> None:
        self.pipeline = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _pixels(frames: Any) -> Any:
    """(frames, height, width, 3) in 0 .. 1 as uint8."""
    if frames.dtype == np.uint8:
        return frames
    return (np.nan_to_num(frames).clip(0.0, 1.0) * 255.0).round().astype(np.uint8)


def describe(pipeline: Any, signature: PipelineSignature, settings: WorkerSettings) -> Diffuser:
    """What the worker registers: defaults from the pipeline's signature and configuration, limits from the settings."""
    video = signature.kind == "video"
    width, height = _size(pipeline, signature)
    step = _attribute(pipeline, "vae_scale_factor_temporal", "vae_temporal_compression_ratio") or 1
    frames = int(signature.default(signature.frames) or 16) if video else 1
    rate = settings.frame_rate or float(signature.default(signature.rate) or FRAME_RATE)
    return Diffuser(
        kind=signature.kind,
        pipeline=type(pipeline).__name__,
        width=width,
        height=height,
        steps=min(int(signature.default("num_inference_steps") or STEPS), settings.max_steps),
        formats=video_formats() if video else IMAGE_FORMATS,
        max_pixels=max(settings.max_pixels, width * height),
        max_steps=settings.max_steps,
        multiple=_multiple(pipeline),
        max_images=settings.max_pictures,
        frames=frames,
        max_frames=max(frames, settings.max_frames) if video else 1,
        frame_step=step if video else 1,
        frame_rate=rate if video else 0.0,
        negative="negative_prompt" in signature.parameters,
        guidance="guidance_scale" in signature.parameters,
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
    """Width and height must be multiples of this: of a latent's pixels, of a patch of latents, and of 8."""
    patch = getattr(_denoiser(pipeline), "patch_size", None) or 1
    scale = _scale(pipeline) * (max(patch[-2:]) if isinstance(patch, list | tuple) else patch)
    processor = getattr(pipeline, "video_processor", None) or getattr(pipeline, "image_processor", None)
    own = getattr(getattr(processor, "config", None), "vae_scale_factor", None) or 1
    return math.lcm(8, scale, own)


def _size(pipeline: Any, signature: PipelineSignature) -> tuple[int, int]:
    """The default width and height."""
    width, height = signature.default("width"), signature.default("height")
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
    """The directory of a pipeline. A Hugging Face id is downloaded, after a check that its pipeline is supported.

    Raises:
        ModelError: it has no pipeline, or an unsupported one.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        PipelineSignature(pipeline_class(pipeline_name(path)))
        return path
    if not model or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(f"model {model!r} is not a directory; give a directory or a Hugging Face id 'owner/name'")
    from huggingface_hub import hf_hub_download

    try:
        index = Path(hf_hub_download(model, INDEX))
        class_ = pipeline_class(pipeline_name(index.parent))
        PipelineSignature(class_)
        return Path(class_.download(model, use_safetensors=True))  # type: ignore[attr-defined]
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"model {model!r} is not a directory, and its download from the Hugging Face Hub failed: {error}"
        ) from error


def from_settings(settings: WorkerSettings, path: Path) -> DiffusersEngine:
    """Load a pipeline onto its device.

    Raises:
        ModelError: the directory has no pipeline, or it cannot be loaded.
    """
    began = time.monotonic()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name = settings.dtype if settings.dtype != "auto" else ("float32" if device == "cpu" else "bfloat16")
    with loading("diffusers"):
        kind = pipeline_class(pipeline_name(path))
    _disable_progress_bars()
    try:
        pipeline = kind.from_pretrained(path, dtype=getattr(torch, name), local_files_only=True)  # type: ignore[attr-defined]
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"the pipeline in {path} cannot be loaded: {error}") from error
    pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    return DiffusersEngine(pipeline, settings, time.monotonic() - began)


def _disable_progress_bars() -> None:
    """Keep progress bars out of the log."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
