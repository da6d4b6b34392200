"""Decodes one medium into the input of a vision tower. The bytes are untrusted: every size is bounded."""

import contextlib
import io
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image, ImageOps
from safetensors.torch import load
from torch import Tensor

from penstock.schemas.errors import Code
from penstock.workers.engines.base import RequestError

IMAGES = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif"})
EMBEDDING = "embedding"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # Pillow's other decoders are never reached
MAX_PIXELS = 50_000_000  # width x height; decoded, three bytes each
MAX_ASPECT = 100  # an image of one row would be resized to an enormous width


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image as input of the vision tower.

    Attributes:
        data: (channels, height, width) float32; for a model that cuts images into tiles (tiles, channels, ...).
        size: height and width of the image itself, for such a model.
    """

    data: Tensor
    size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """Precomputed embeddings."""

    data: Tensor  # (tokens, hidden) in the model's dtype


def first_frame(raw: bytes, turned: Collection[str] = FORMATS) -> Image.Image:
    """The first frame of an image file, upright, as RGB.

    Args:
        turned: formats whose orientation is read.

    Raises:
        RequestError: it is not an image, is truncated, or is too large.
    """
    try:
        file = Image.open(io.BytesIO(raw), formats=FORMATS)
        _check_size(*file.size)
        file.load()
    except RequestError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _refused(f"an image has more than {MAX_PIXELS:,} pixels; send a smaller one") from error
    except Exception as error:  # decoders raise many types on broken files
        reason = str(error) if isinstance(error, OSError) and "truncated" in str(error) else "it cannot be decoded"
        raise _refused(f"an image is not a readable PNG, JPEG, WebP or GIF file: {reason}") from error
    image: Image.Image = file
    if file.format in turned:
        with contextlib.suppress(Exception):  # the image may be fine although its EXIF block is broken
            image = ImageOps.exif_transpose(file)
    try:
        if "transparency" in image.info:  # straight to RGB, some palettes cause a warning
            image = image.convert("RGBA")
        return image.convert("RGB")
    except Exception as error:
        raise _refused("an image has colours that cannot be converted to RGB") from error


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise _refused(f"an image has {width} x {height} pixels; the limit is {MAX_PIXELS:,}")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise _refused(f"an image has {width} x {height} pixels; one side may be at most {MAX_ASPECT} times the other")


def pixels(image: Image.Image, processor: Any) -> Pixels:
    """The output of the model's image processor."""
    made = processor(images=image, return_tensors="pt")
    if "image_sizes" not in made:
        return Pixels(made["pixel_values"][0])
    height, width = (int(size) for size in made["image_sizes"][0])
    return Pixels(made["pixel_values"][0], (height, width))


def rows(raw: bytes, hidden: int, dtype: torch.dtype) -> Rows:
    """Embeddings from a safetensors file with one tensor of (tokens, hidden).

    Raises:
        RequestError: it is something else, or has values that are not finite.
    """
    try:
        tensors = list(load(raw).values())
    except Exception as error:  # of the file format's own type, or of json, utf-8, shapes
        raise _refused("an embedding is not a readable safetensors file") from error
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(tensors) != 1 or tensors[0].dim() != 2 or not tensors[0].is_floating_point():
        raise _refused(f"an embedding is one tensor of floats of shape (tokens, {hidden}), not {shapes}")
    (data,) = tensors
    if not len(data) or data.shape[1] != hidden:
        raise _refused(f"an embedding for this model has the shape (tokens, {hidden}), not {shapes[0]}")
    data = data.to(dtype)
    if not bool(torch.isfinite(data).all()):
        raise _refused(f"an embedding holds values that are not finite as {str(dtype).removeprefix('torch.')}")
    return Rows(data)


def _refused(message: str) -> RequestError:
    return RequestError(Code.invalid_request, message)
