"""A pool of embeddings in one tensor, cut into slots, and the decoding of media that may fill it."""

import contextlib
import io
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image, ImageOps
from safetensors.torch import load
from torch import Tensor

from penstock.infra.model.patch_grid import MediaGrid, PatchGrid, Tiles
from penstock.schemas.errors import Code
from penstock.schemas.transfer import Memory
from penstock.workers.engines.engine_protocol import RequestError
from penstock.workers.engines.native.model.pool import dtype_name, location, zeros

DEFAULT_SLOTS = 256
GRID_SLOT_TOKENS = 256  # of models whose images take any number of tokens
MEMORY_SHARE = 0.1  # of what is free
IMAGES = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif"})
EMBEDDING = "embedding"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")  # Pillow's other decoders are never reached
MAX_PIXELS = 50_000_000  # width x height; decoded, three bytes each
MAX_ASPECT = 100  # an image of one row would be resized to an enormous width


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image as input of the vision tower.

    Attributes:
        data: (channels, height, width) float32; for a model that cuts images into tiles (tiles, channels, ...), into
            patches (patches, values). Of a video: (steps, frames of a step, height, width, 3) uint8.
        size: height and width of the image itself, for a model with tiles.
        grid: of an image or video, for a model with patches.
    """

    data: Tensor
    size: tuple[int, int] | None = None
    grid: MediaGrid | None = None


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
    if "image_grid_thw" in made:
        steps, *sides = (int(size) for size in made["image_grid_thw"][0])
        rows, columns = (size // processor.merge_size for size in sides)
        return Pixels(made["pixel_values"], None, MediaGrid(steps, rows, columns))
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


def dtype_of(name: str, config: dict[str, Any]) -> torch.dtype:
    """The model's dtype: ``name``; with "auto" its configuration's, else bfloat16."""
    text = config.get("text_config")
    configured = (
        config.get("dtype") or config.get("torch_dtype") or (text.get("dtype") if isinstance(text, dict) else None)
    )
    dtype = getattr(torch, name if name != "auto" else str(configured or "bfloat16"), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.bfloat16


def _refused(message: str) -> RequestError:
    return RequestError(Code.invalid_request, message)


class EmbeddingSlots:
    """
    Args:
        slot_tokens: rows of a slot.
        hidden: size of a row.
        tiles, patches: of a model whose images take different numbers of tokens; None: all take ``slot_tokens``.

    Attributes:
        data: (slots, slot_tokens, hidden).

    Raises:
        EngineError: there is no memory for the pool.
    """

    def __init__(
        self,
        slots: int,
        slot_tokens: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        tiles: Tiles | None = None,
        patches: PatchGrid | None = None,
    ) -> None:
        self.slot_tokens = slot_tokens
        self._tiles = tiles
        self._patches = patches
        self.data = zeros((slots, slot_tokens, hidden), dtype, device)

    def decode(self, raw: bytes, kind: str) -> Image.Image | Rows:
        """Decode one medium.

        Args:
            kind: "image/png" and the like, or "embedding": safetensors with one tensor (tokens, hidden).

        Raises:
            RequestError: it is broken, too large, or of another kind or shape.
        """
        if kind in IMAGES:
            # Gateways count the tokens of an image by its upright size, and read the orientation of JPEGs only.
            any_size = self._tiles is not None or self._patches is not None
            return first_frame(raw, ("JPEG",)) if any_size else first_frame(raw)
        if kind == EMBEDDING and self._patches is None:
            return rows(raw, self.data.shape[2], self.data.dtype)
        kinds = ", ".join(sorted(IMAGES))
        raise RequestError(Code.invalid_request, f"media of kind {kind!r} are not supported, only {kinds}")

    def tokens(self, prepared: object) -> int:
        """Placeholder tokens that a decoded medium takes."""
        if isinstance(prepared, Rows):
            return len(prepared.data)
        if self._patches is not None:
            assert isinstance(prepared, Pixels)
            assert prepared.grid is not None
            return prepared.grid.tokens
        if self._tiles is None:
            return self.slot_tokens
        if isinstance(prepared, Image.Image):
            return self._tiles.tokens(prepared.height, prepared.width)
        assert isinstance(prepared, Pixels)
        assert prepared.size is not None
        return self._tiles.tokens(*prepared.size)

    def write(self, slots: Seq[int], rows: Tensor, first: int = 0) -> None:
        """Copy (tokens, hidden) into the slots, in order, from row ``first`` of them on."""
        at = 0
        while at < len(rows):
            slot, start = divmod(first + at, self.slot_tokens)
            part = rows[at : at + self.slot_tokens - start]
            self.data[slots[slot], start : start + len(part)] = part
            at += len(part)

    def read(self, slots: Seq[int], tokens: int) -> Tensor:
        """A copy of the first ``tokens`` rows of the slots: (tokens, hidden)."""
        return self.data[list(slots)].reshape(-1, self.data.shape[2])[:tokens]

    def memory(self) -> Memory:
        """The pool, without generations."""
        slots, slot_tokens, hidden = self.data.shape
        kind, device = location(self.data.device)
        return Memory(
            base=self.data.data_ptr(),
            block_bytes=slot_tokens * hidden * self.data.dtype.itemsize,
            blocks=slots,
            kind=kind,
            device=device,
            layout=f"{dtype_name(self.data.dtype)}({slot_tokens},{hidden})",
        )

    def close(self) -> None:
        """Free the memory."""
        self.data = torch.empty(0)
