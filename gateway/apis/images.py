"""Image and video generation: from a body to a GenerateRequest, and from denoising steps to a body or events.

Pure but for random numbers. Options that the client leaves open take the pipeline's defaults, so that nothing is left
open and any worker makes the same.

A "token" is a denoising step. As with text, everything shown is a function of the items, and the id of an event is the
number of steps done, so any gateway can continue from ``Last-Event-ID``.
"""

import base64
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.apis.chat.prepare_chat import PreparedRequest
from penstock.gateway.base.chat_objects import PromptTokensDetails, UsageBody, serving_error
from penstock.gateway.base.event_stream import DONE, error_event, parse_position
from penstock.gateway.base.request_bodies import (
    CommonOptions,
    decode_body,
    invalid,
    random_seed,
    resolve_deadline_s,
    resolve_priority,
    resolve_seed,
    unsupported,
)
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import Diffuser
from penstock.schemas.requests import Diffusion, GenerateRequest, Stop
from penstock.schemas.tokens import FAILURES, File, TokenItem

MAX_PROMPT_CHARS = 32_000  # as in OpenAI's API

Text = Annotated[str, Meta(min_length=1, max_length=MAX_PROMPT_CHARS)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]


class DiffusionOptions(CommonOptions, frozen=True, kw_only=True):
    """Options that images and videos share. null means: not given."""

    prompt: Text
    negative_prompt: Annotated[str, Meta(max_length=MAX_PROMPT_CHARS, description="what to avoid")] | None = None
    n: Annotated[int, Meta(ge=1, le=128, description="how many; each has its own seed")] | None = None
    size: Annotated[str, Meta(max_length=16, description="WIDTHxHEIGHT in pixels, or auto")] | None = None
    num_inference_steps: Annotated[Count, Meta(description="denoising steps")] | None = None
    guidance_scale: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    response_format: Annotated[Literal["url", "b64_json"], Meta(description="default: url")] | None = None
    output_format: Annotated[str, Meta(max_length=16, description="png, jpeg, webp, gif or mp4")] | None = None
    output_compression: Annotated[int, Meta(ge=0, le=100, description="quality of jpeg, webp and mp4")] | None = None


class ImageGenerationRequest(DiffusionOptions, frozen=True, kw_only=True):
    """POST /v1/images/generations."""

    quality: str | None = None
    style: str | None = None
    background: Literal["auto", "opaque", "transparent"] | None = None
    partial_images: int | None = None
    image: Any = None
    mask: Any = None


class VideoGenerationRequest(DiffusionOptions, frozen=True, kw_only=True):
    """POST /v1/videos/generations. Frames: num_frames, else seconds x fps, else the pipeline's default."""

    seconds: Annotated[float, Meta(gt=0.0, le=3600.0)] | str | None = None
    fps: Annotated[float, Meta(ge=0.1, le=240.0, description="frames per second")] | None = None
    num_frames: Count | None = None
    input_reference: Any = None
    image: Any = None


_decode_image = msgspec.json.Decoder(ImageGenerationRequest).decode
_decode_video = msgspec.json.Decoder(VideoGenerationRequest).decode


def parse_image(data: bytes) -> ImageGenerationRequest:
    """
    Raises:
        ServingError: invalid_request or unsupported, with the field.
    """
    body: ImageGenerationRequest = decode_body(_decode_image, data)
    if body.quality not in (None, "auto", "standard"):
        raise unsupported("quality", "quality is not supported; set num_inference_steps and size")
    if body.style is not None:
        raise unsupported("style", "style is not supported; describe it in the prompt")
    if body.background == "transparent":
        raise unsupported("background", "transparent backgrounds are not supported")
    if body.partial_images:
        raise unsupported("partial_images", "partial images are not supported; stream: true reports the progress")
    _check_text_only(body, "image", "mask")
    return body


def parse_video(data: bytes) -> VideoGenerationRequest:
    """
    Raises:
        ServingError: invalid_request or unsupported, with the field.
    """
    body: VideoGenerationRequest = decode_body(_decode_video, data)
    _check_text_only(body, "input_reference", "image")
    return body


def _check_text_only(body: Struct, *fields: str) -> None:
    for field in fields:
        if getattr(body, field) is not None:
            raise unsupported(field, f"{field} is not supported; generation starts from a text only")


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


IMAGE = "image"  # values of GenerateRequest.endpoint
VIDEO = "video"
IMAGE_PATHS = {IMAGE: "/v1/images/generations", VIDEO: "/v1/videos/generations"}


def prepare_images(
    endpoint: str,
    data: bytes,
    models: Mapping[str, Diffuser],
    *,
    gateway: str,
    default_deadline_s: float,
    now_ns: int,
    request_id: str,
    no_store: bool = False,
    seed: Callable[[], int] = random_seed,
) -> PreparedRequest:
    """
    Args:
        no_store: as if the body asked for it.
        endpoint: "image" or "video".
        models: diffusion models of the workers, by name.
    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    body = parse_image(data) if endpoint == IMAGE else parse_video(data)
    name, model = _find_model(body.model, endpoint, models)
    diffusion = resolve_parameters(body, model, resolve_seed(body, seed))
    request = GenerateRequest(
        id=request_id,
        model=name,
        gateway=gateway,
        prompt=b"",
        stop=Stop(max_tokens=diffusion.steps * diffusion.images),
        created_ns=now_ns,
        deadline_ns=now_ns + int(resolve_deadline_s(body, default_deadline_s) * 1e9),
        priority=resolve_priority(body.priority, body.service_tier),
        user=body.user or "",
        worker=body.worker or "",
        endpoint=endpoint,
        diffusion=diffusion,
        no_store=no_store or bool(body.no_store),
    )
    return PreparedRequest(request, 0, bool(body.stream), False)


def _find_model(name: str | None, kind: str, models: Mapping[str, Diffuser]) -> tuple[str, Diffuser]:
    """The model and its name. ``name``: None or "": the only one of this kind that there is."""
    of_kind = [(other, each) for other, each in models.items() if each.kind == kind]
    if not name and of_kind and all(each == of_kind[0][1] for _, each in of_kind):
        name = of_kind[0][0]
    name = name or ""
    model = models.get(name)
    if model is None:
        served = ", ".join(repr(other) for other, each in models.items() if each.kind == kind) or "none"
        raise ServingError(
            Code.model_not_found,
            f"no model {name[:200]!r} generates {kind}s here; models that do: {served}",
            param="model",
        )
    if model.kind != kind:
        raise invalid("model", f"model {name[:200]!r} generates {model.kind}s; use POST {IMAGE_PATHS[model.kind]}")
    return name, model


_json = msgspec.json.encode


class ImageData(Struct, frozen=True, omit_defaults=True):
    """One image or video, by its URL or as base64. ``frames`` and ``frame_rate``: of videos."""

    media_type: str
    width: int
    height: int
    bytes: int
    url: str | None = None
    b64_json: str | None = None
    frames: int | None = None
    frame_rate: float | None = None


class ImagesResponse(Struct, frozen=True):
    """Response of POST /v1/images/generations and /v1/videos/generations. Times in seconds."""

    id: str
    object: Literal["image", "video"]
    created: int
    model: str
    data: list[ImageData]
    inference_time_s: float
    size: str
    output_format: str
    seed: int
    steps: int
    status: Literal["completed"] = "completed"


class ImageProgressEvent(Struct, frozen=True):
    """One server-sent event during generation; the last before [DONE] has the type "...completed"."""

    type: Literal["image_generation.progress", "video_generation.progress"]
    id: str
    step: int
    steps: int


class ImageAggregator:
    """State of one request.

    Attributes:
        step: denoising steps done, of ``steps``.
        files: None until they are stored.
    """

    def __init__(self, request: GenerateRequest) -> None:
        assert request.diffusion is not None
        self.request = request
        self.diffusion: Diffusion = request.diffusion
        self.steps = self.diffusion.steps * self.diffusion.images
        self.step = 0
        self.files: tuple[File, ...] | None = None
        self.error: ServingError | None = None

    @property
    def done(self) -> bool:
        return self.files is not None or self.error is not None

    @property
    def usage(self) -> UsageBody:
        return UsageBody(0, self.step, self.step, PromptTokensDetails())

    def push(self, items: Iterable[TokenItem]) -> bool:
        """Take in items; True once the files are stored or the request has failed."""
        for item in items:
            if self.done:
                break
            self.step += len(item.tokens) // 4
            if (finish := item.finish) is not None:
                if finish.reason in FAILURES:
                    self.error = serving_error(finish.code or finish.reason, finish.message)
                else:
                    self.files = finish.files
        return self.done

    def response(self, base_url: str, contents: Sequence[bytes] | None = None) -> ImagesResponse:
        """
        Args:
            base_url: goes in front of "/v1/media/...".
            contents: of the files, if the client wants them in the response; None: it gets URLs.
        Raises:
            ServingError: the request failed.
        """
        if self.error is not None:
            raise self.error
        assert self.files is not None
        video = self.diffusion.kind == "video"
        data = [
            ImageData(
                media_type=file.type,
                width=file.width,
                height=file.height,
                bytes=file.bytes,
                url=f"{base_url}/v1/media/{file.name}" if contents is None else None,
                b64_json=base64.b64encode(contents[i]).decode() if contents is not None else None,
                frames=file.frames if video else None,
                frame_rate=file.frame_rate if video else None,
            )
            for i, file in enumerate(self.files)
        ]
        return ImagesResponse(
            id=self.request.id,
            object="video" if video else "image",
            created=self.request.created_ns // 1_000_000_000,
            model=self.request.model,
            data=data,
            inference_time_s=max((file.seconds for file in self.files), default=0.0),
            size=f"{self.diffusion.width}x{self.diffusion.height}",
            output_format=self.diffusion.format,
            seed=self.diffusion.seed,
            steps=self.diffusion.steps,
        )


class ImageStreamRenderer:
    """Progress as server-sent events. Each has all steps so far, so only the last of several that arrived is sent."""

    def __init__(self, request: GenerateRequest) -> None:
        self.aggregator = ImageAggregator(request)
        self._kind = f"{self.aggregator.diffusion.kind}_generation"
        self._sent = 0

    def resume(self, last_event_id: str) -> None:
        """Skip what the client has seen; then push all items from the first on.

        Raises:
            ServingError: not the id of an event of this answer.
        """
        self._sent = parse_position(last_event_id.strip(), last_event_id)

    def push(self, items: Iterable[TokenItem]) -> bytes:
        """An event if these items bring progress; the last event comes from ``end`` or ``fail``."""
        aggregator = self.aggregator
        aggregator.push(items)
        if aggregator.step <= self._sent:
            return b""
        self._sent = aggregator.step
        event = ImageProgressEvent(f"{self._kind}.progress", aggregator.request.id, self._sent, aggregator.steps)  # type: ignore[arg-type]
        return b"id: %d\ndata: %b\n\n" % (self._sent, _json(event))

    def end(self, response: ImagesResponse) -> bytes:
        """The last event, with the images, and the end of the stream."""
        return b"data: %b\n\n" % _json({"type": f"{self._kind}.completed"} | msgspec.to_builtins(response)) + DONE

    def fail(self, error: ServingError, *, finished: bool = True) -> bytes:
        """The end of the stream, with an error. ``finished``: the request has ended too."""
        return error_event(error, finished=finished)
