"""A body that asks for pictures becomes a GenerateRequest: checked against what the fleet's diffusion workers make.

Pure but for random numbers. Nothing is left open in the request, so that any worker makes the same of it. What a
client names and cannot have is refused with the field and its limit; the rest is the pipeline's own default.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from gateway.openai.options import SEED_MASK
from gateway.openai.prepare import TIERS, PreparedRequest, random_seed
from gateway.openai.requests import Duration, Name, invalid, parse, unsupported
from schemas.errors import Code, ServingError
from schemas.fleet import Diffuser
from schemas.ids import new_request_id
from schemas.requests import Diffusion, GenerateRequest, Priority, Stop

IMAGE = "image"
VIDEO = "video"
PATHS = {IMAGE: "/v1/images/generations", VIDEO: "/v1/videos/generations"}

MAX_PROMPT_CHARS = 32_000  # as OpenAI's API
SIDES = {
    "jpeg": 65_500,
    "webp": 16_383,
    "gif": 65_535,
    "mp4": 16_384,
}  # pixels
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
# one token of a subject; not "$", which in Python also matches before a last line break
_WORKER = r"^[A-Za-z0-9_-]{1,128}(?![\s\S])"

B = TypeVar("B", bound="DiffusionOptions")

Text = Annotated[str, Meta(min_length=1, max_length=MAX_PROMPT_CHARS)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]


class DiffusionOptions(Struct, frozen=True, kw_only=True):
    """What images and videos share. null means: not given."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    prompt: Text
    negative_prompt: Annotated[str, Meta(max_length=MAX_PROMPT_CHARS, description="what should not be seen")] | None = (
        None
    )
    n: Annotated[int, Meta(ge=1, le=128, description="how many; each has a seed of its own")] | None = None
    size: Annotated[str, Meta(max_length=16, description="WIDTHxHEIGHT in pixels, or auto")] | None = None
    num_inference_steps: Annotated[Count, Meta(description="denoising steps")] | None = None
    guidance_scale: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    response_format: Annotated[Literal["url", "b64_json"], Meta(description="default: url")] | None = None
    output_format: Annotated[str, Meta(max_length=16, description="png, jpeg, webp, gif or mp4")] | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100, description="quality of jpeg, webp and mp4")] | None = None
    stream: Annotated[bool, Meta(description="progress as server-sent events")] | None = None
    user: Name | None = None
    priority: Priority | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    timeout_s: Annotated[Duration, Meta(description="seconds until the request ends unanswered")] | None = None
    deadline_s: Annotated[Duration, Meta(description="another name of timeout_s; the shorter one holds")] | None = None
    worker: Annotated[str, Meta(pattern=_WORKER, description="run here only")] | None = None


class ImageGenerationRequest(DiffusionOptions, frozen=True, kw_only=True):
    """POST /v1/images/generations."""

    quality: str | None = None
    style: str | None = None
    background: Literal["auto", "opaque", "transparent"] | None = None
    partial_images: int | None = None
    image: Any = None
    mask: Any = None


class VideoGenerationRequest(DiffusionOptions, frozen=True, kw_only=True):
    """POST /v1/videos/generations. The number of frames: num_frames, else seconds x fps, else the pipeline's own."""

    seconds: Annotated[float, Meta(gt=0.0, le=3600.0)] | str | None = None
    fps: Annotated[float, Meta(ge=0.1, le=240.0, description="frames per second")] | None = None
    num_frames: Count | None = None
    input_reference: Any = None
    image: Any = None


_image = msgspec.json.Decoder(ImageGenerationRequest).decode
_video = msgspec.json.Decoder(VideoGenerationRequest).decode


def parse_image(data: bytes) -> ImageGenerationRequest:
    """
    Raises:
        ServingError: invalid_request or unsupported, with the field.
    """
    body: ImageGenerationRequest = parse(_image, data)
    if body.quality not in (None, "auto", "standard"):
        raise unsupported("quality", "quality; num_inference_steps and size decide it")
    if body.style is not None:
        raise unsupported("style", "style; describe it in the prompt")
    if body.background == "transparent":
        raise unsupported("background", "transparent backgrounds")
    if body.partial_images:
        raise unsupported("partial_images", "unfinished images; stream: true tells the progress")
    _only_text(body, "image", "mask")
    return body


def parse_video(data: bytes) -> VideoGenerationRequest:
    """
    Raises:
        ServingError: invalid_request or unsupported, with the field.
    """
    body: VideoGenerationRequest = parse(_video, data)
    _only_text(body, "input_reference", "image")
    return body


def _only_text(body: DiffusionOptions, *fields: str) -> None:
    for field in fields:
        if getattr(body, field) is not None:
            raise unsupported(field, f"{field}: only a text can be started from")


def prepare_images(
    kind: str,
    data: bytes,
    known: Mapping[str, Diffuser],
    *,
    gateway: str,
    default_deadline_s: float,
    now_ns: int,
    request_id: str | None = None,
    seed: Callable[[], int] = random_seed,
) -> PreparedRequest:
    """A request that can be published.

    Args:
        kind: "image" or "video".
        known: what the diffusion workers of each model make.
    Raises:
        ServingError: it cannot be served; names the field and the limit.
    """
    body = parse_image(data) if kind == IMAGE else parse_video(data)
    made = known.get(body.model)
    if made is None:
        served = ", ".join(repr(name) for name, each in known.items() if each.kind == kind) or "none"
        what = f"model {body.model[:200]!r} makes no {kind}s here; models that do: {served}"
        raise ServingError(Code.model_not_found, what, param="model")
    if made.kind != kind:
        raise invalid("model", f"model {body.model[:200]!r} makes {made.kind}s: POST {PATHS[made.kind]}")
    diffusion = decided(body, made, (seed() if body.seed is None else body.seed) & SEED_MASK)
    asked = [seconds for seconds in (body.timeout_s, body.deadline_s) if seconds is not None]
    deadline_s = min(asked, default=default_deadline_s)
    request = GenerateRequest(
        id=request_id or new_request_id(now_ns),
        model=body.model,
        gateway=gateway,
        prompt=b"",
        stop=Stop(max_tokens=diffusion.steps * diffusion.images),
        created_ns=now_ns,
        deadline_ns=now_ns + int(deadline_s * 1e9),
        priority=body.priority or TIERS.get(body.service_tier or "", Priority.standard),
        user=body.user or "",
        worker=body.worker or "",
        endpoint=kind,
        diffusion=diffusion,
    )
    return PreparedRequest(request, 0, bool(body.stream), False)


def decided(body: DiffusionOptions, made: Diffuser, seed: int) -> Diffusion:
    """All that the client left open is the model's own.

    Raises:
        ServingError: the model does not make what is asked for.
    """
    width, height = _size(body, made)
    steps = _within(body.num_inference_steps or made.steps, made.max_steps, "num_inference_steps", "steps")
    images = _within(body.n or 1, made.max_images, "n", "pictures")
    if body.negative_prompt and not made.negative:
        raise unsupported("negative_prompt", f"negative prompts by pipeline {made.pipeline}")
    if body.guidance_scale is not None and not made.guidance:
        raise unsupported("guidance_scale", f"a guidance scale by pipeline {made.pipeline}")
    name = {"jpg": "jpeg"}.get(body.output_format or "", body.output_format) or made.formats[0]
    if name not in made.formats:
        raise unsupported("output_format", f"output_format {name!r}; served: {', '.join(made.formats)}")
    if max(width, height) > SIDES.get(name, max(width, height)):
        raise invalid("size", f"size {width}x{height}: a side of a {name} file has at most {SIDES[name]} pixels")
    frame_rate = made.frame_rate
    if isinstance(body, VideoGenerationRequest) and body.fps is not None:
        frame_rate = body.fps
    return Diffusion(
        kind=made.kind,
        prompt=body.prompt,
        width=width,
        height=height,
        steps=steps,
        format=name,
        negative=body.negative_prompt or "",
        frames=frame_count(body, made, frame_rate) if isinstance(body, VideoGenerationRequest) else 1,
        frame_rate=frame_rate,
        images=images,
        guidance=body.guidance_scale,
        seed=seed,
        quality=0 if body.output_compression is None else max(1, body.output_compression),
        inline=body.response_format == "b64_json",
    )


def frame_count(body: VideoGenerationRequest, made: Diffuser, frame_rate: float) -> int:
    """``num_frames`` as it is; ``seconds`` in frames, at least as many, and as the model makes them.

    Raises:
        ServingError: not a number that the model makes, or too many.
    """
    step = made.frame_step
    if body.num_frames is not None:
        count = body.num_frames
        if (count - 1) % step:
            below = count - (count - 1) % step
            raise invalid(
                "num_frames",
                f"num_frames {count}: this model makes 1 + {step}·k frames, the nearest are {below} and {below + step}",
            )
        return _within(count, made.max_frames, "num_frames", "frames")
    if body.seconds is None:
        return made.frames
    try:
        seconds = float(body.seconds)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 3600:
        raise invalid("seconds", f"seconds: {str(body.seconds)[:40]!r} is not a number above 0 and up to 3600")
    wanted = max(1, round(seconds * frame_rate))
    count = 1 + -(-(wanted - 1) // step) * step
    if count > made.max_frames:
        longest = made.max_frames / frame_rate
        raise invalid(
            "seconds",
            f"seconds: {seconds:g} s at {frame_rate:g} frames per second are {count} frames; the limit is "
            f"{made.max_frames} ({longest:.2f} s)",
        )
    return count


def _size(body: DiffusionOptions, made: Diffuser) -> tuple[int, int]:
    if body.size in (None, "auto"):
        return made.width, made.height
    found = _SIZE.fullmatch(body.size or "")
    if found is None:
        raise invalid("size", f"size {body.size!r} is not WIDTHxHEIGHT, such as {made.width}x{made.height}")
    width, height = int(found[1]), int(found[2])
    multiple = made.multiple
    if width % multiple or height % multiple:
        near = "x".join(str(max(multiple, round(side / multiple) * multiple)) for side in (width, height))
        raise invalid("size", f"size {body.size}: width and height must be multiples of {multiple}, such as {near}")
    if width * height > made.max_pixels:
        raise invalid("size", f"size {body.size} has {width * height} pixels; the limit is {made.max_pixels}")
    return width, height


def _within(value: int, limit: int, field: str, what: str) -> int:
    if value > limit:
        raise invalid(field, f"{field}: {value} {what} are asked for; the limit is {limit}")
    return value
