"""Request bodies of image and video generation: their fields and limits. Knows no model."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.base.common import CommonOptions
from penstock.gateway.base.errors import decode_body, unsupported

MAX_PROMPT_CHARS = 32_000  # as in OpenAI's API

Text = Annotated[str, Meta(min_length=1, max_length=MAX_PROMPT_CHARS)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]


class DiffusionOptions(CommonOptions, frozen=True, kw_only=True):
    """Options that images and videos share. null means: not given."""

    prompt: Text
    negative_prompt: Annotated[str, Meta(max_length=MAX_PROMPT_CHARS, description="what to avoid")] | None = None
    n: Annotated[int, Meta(ge=1, le=128, description="how many; each has a seed of its own")] | None = None
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
