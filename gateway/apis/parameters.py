"""A body's options over a diffusion model's defaults and limits. Nothing is left open, so any worker makes the same."""

import math
import re

from penstock.gateway.apis.images_requests import DiffusionOptions, VideoGenerationRequest
from penstock.gateway.base.errors import invalid, unsupported
from penstock.schemas.fleet import Diffuser
from penstock.schemas.requests import Diffusion

# format -> longest side in pixels that its files can hold
MAX_SIDES = {"jpeg": 65_500, "webp": 16_383, "gif": 65_535, "mp4": 16_384}
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")


def resolve_parameters(body: DiffusionOptions, model: Diffuser, seed: int) -> Diffusion:
    """
    Raises:
        ServingError: the model does not support what is asked for; names the field and the limit.
    """
    if body.negative_prompt and not model.negative:
        raise unsupported("negative_prompt", f"negative_prompt is not supported by pipeline {model.pipeline}")
    if body.guidance_scale is not None and not model.guidance:
        raise unsupported("guidance_scale", f"guidance_scale is not supported by pipeline {model.pipeline}")
    width, height = _size(body, model)
    file_format = _output_format(body, model, max(width, height))
    frames, frame_rate = 1, model.frame_rate
    if isinstance(body, VideoGenerationRequest):
        frame_rate = model.frame_rate if body.fps is None else body.fps
        frames = frame_count(body, model, frame_rate)
    return Diffusion(
        kind=model.kind,
        prompt=body.prompt,
        width=width,
        height=height,
        steps=_limited(body.num_inference_steps or model.steps, model.max_steps, "num_inference_steps"),
        format=file_format,
        negative=body.negative_prompt or "",
        frames=frames,
        frame_rate=frame_rate,
        images=_limited(body.n or 1, model.max_images, "n"),
        guidance=body.guidance_scale,
        seed=seed,
        quality=0 if body.output_compression is None else max(1, body.output_compression),
        inline=body.response_format == "b64_json",
    )


def frame_count(body: VideoGenerationRequest, model: Diffuser, frame_rate: float) -> int:
    """``num_frames`` as given; else ``seconds`` in frames, rounded up to a number that the model can make.

    Models make 1 + k * frame_step frames.

    Raises:
        ServingError: not a number that the model can make, or too many.
    """
    step = model.frame_step
    if body.num_frames is not None:
        count = body.num_frames
        if (count - 1) % step:
            below = count - (count - 1) % step
            raise invalid(
                "num_frames",
                f"num_frames is {count}; this model makes 1 + {step}·k frames, the nearest are {below} and "
                f"{below + step}",
            )
        return _limited(count, model.max_frames, "num_frames")
    if body.seconds is None:
        return model.frames
    try:
        seconds = float(body.seconds)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 3600:
        raise invalid("seconds", f"seconds {str(body.seconds)[:40]!r} is not a number above 0 and up to 3600")
    frames = max(1, round(seconds * frame_rate))
    count = 1 + -(-(frames - 1) // step) * step
    if count > model.max_frames:
        longest = model.max_frames / frame_rate
        raise invalid(
            "seconds",
            f"{seconds:g} seconds at {frame_rate:g} frames per second are {count} frames; the limit is "
            f"{model.max_frames} ({longest:.2f} s)",
        )
    return count


def _size(body: DiffusionOptions, model: Diffuser) -> tuple[int, int]:
    if body.size in (None, "auto"):
        return model.width, model.height
    match = _SIZE.fullmatch(body.size or "")
    if match is None:
        raise invalid("size", f"size {body.size!r} is not WIDTHxHEIGHT, such as {model.width}x{model.height}")
    width, height = int(match[1]), int(match[2])
    multiple = model.multiple
    if width % multiple or height % multiple:
        near = "x".join(str(max(multiple, round(side / multiple) * multiple)) for side in (width, height))
        raise invalid("size", f"size is {body.size}; width and height must be multiples of {multiple}, such as {near}")
    if width * height > model.max_pixels:
        raise invalid("size", f"size {body.size} has {width * height} pixels; the limit is {model.max_pixels}")
    return width, height


def _output_format(body: DiffusionOptions, model: Diffuser, side: int) -> str:
    """
    Args:
        side: the longer one, in pixels.
    """
    name = "jpeg" if body.output_format == "jpg" else body.output_format or model.formats[0]
    if name not in model.formats:
        raise unsupported(
            "output_format", f"output_format {name!r} is not supported; use one of {', '.join(model.formats)}"
        )
    if side > MAX_SIDES.get(name, side):
        raise invalid("size", f"size has a side of {side} pixels; a {name} file has at most {MAX_SIDES[name]} pixels")
    return name


def _limited(value: int, limit: int, field: str) -> int:
    if value > limit:
        raise invalid(field, f"{field} is {value}; the limit is {limit}")
    return value
