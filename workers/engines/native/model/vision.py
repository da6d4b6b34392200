"""The vision encoder of a model: image processor, vision tower, projector, and the pool of their embeddings.

How many tokens an image takes is not read from the configuration: the model is run on blank images. Where the number
depends on an image's size (LLaVA-NeXT), these check the formula.
"""

from collections.abc import Sequence as Seq
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
)

from penstock.infra.model.image_tiles import Tiles, tiles_of
from penstock.schemas.errors import Code
from penstock.schemas.transfer import Memory
from penstock.workers.engines.engine_protocol import EngineError, RequestError
from penstock.workers.engines.native.model import embedding_slots
from penstock.workers.engines.native.model.embedding_slots import EmbeddingSlots
from penstock.workers.engines.native.model.pool import free_bytes, out_of_memory

KINDS = frozenset({"llava", "llava_next"})  # model types whose images we embed
TOWERS = frozenset({"clip_vision_model", "siglip_vision_model"})  # fixed image size, so a fixed number of tokens
DEFAULT_SLOTS = 256
MEMORY_SHARE = 0.1  # of what is free
BATCH = 16  # images, or tiles of them, in one pass through the tower
BLANKS = ((64, 64), (90, 40))  # width, height


class VisionUnsupported(Exception):
    """This model's images cannot be embedded; the text says why."""


class TorchVisionEncoder:
    """Implements ``penstock.workers.engines.core.embeddings.VisionEncoder``.

    Args:
        model: has ``get_image_features``.
        slots: of the pool; 0: ``DEFAULT_SLOTS``, or fewer where memory is short.

    Attributes:
        pool: the embeddings.

    Raises:
        VisionUnsupported: the model does not embed an image in the expected shape.
        EngineError: there is no memory for the pool.
    """

    def __init__(self, model: Any, processor: Any, slots: int = 0) -> None:
        self._model = model
        self._processor = processor
        self._dtype: torch.dtype = model.dtype
        self._device: torch.device = model.device
        self._tiles: Tiles | None = None
        self._shape, self.slot_tokens, hidden = self._blank()
        slot_bytes = self.slot_tokens * hidden * self._dtype.itemsize
        free = free_bytes(self._device)
        self.slots = slots or max(1, min(DEFAULT_SLOTS, int(free * MEMORY_SHARE) // slot_bytes))
        if self.slots * slot_bytes > free:
            raise EngineError(
                f"no memory is left for {self.slots} embedding slots of {slot_bytes} bytes on {self._device}; "
                "lower embed_slots"
            )
        self.pool = EmbeddingSlots(self.slots, self.slot_tokens, hidden, self._dtype, self._device, self._tiles)

    def _blank(self) -> tuple[torch.Size, int, int]:
        """The tower's input shape, which must be the same for all images; tokens of a slot; size of an embedding."""
        try:
            blanks = [embedding_slots.pixels(Image.new("RGB", size), self._processor) for size in BLANKS]
            with torch.inference_mode():
                features = self._features(blanks)
            if blanks[0].size is not None:
                self._tiles = self._cut([len(rows) for rows in features])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise VisionUnsupported(f"its image processor or vision tower fails on a blank image: {error}") from error
        if features[0].dim() != 2:
            raise VisionUnsupported(f"it embeds an image as a {tuple(features[0].shape)} tensor, not (tokens, hidden)")
        tokens, hidden = (int(size) for size in features[0].shape)
        if self._tiles is None:
            return blanks[0].data.shape, tokens, hidden
        return blanks[0].data.shape[1:], self._tiles.base, hidden

    def _cut(self, found: list[int]) -> Tiles:
        """How the model cuts images, given the tokens of the blank ones."""
        config = self._model.config.to_dict()
        (width, height), *_ = BLANKS
        tiles = tiles_of(config, found[0] - tiles_of(config, 0).tokens(height, width))
        if any(tiles.tokens(height, width) != tokens for (width, height), tokens in zip(BLANKS, found, strict=True)):
            raise VisionUnsupported(f"its blank images have {found} embeddings, by its configuration others")
        return tiles

    def _features(self, images: list[embedding_slots.Pixels]) -> list[Tensor]:
        """One (tokens, hidden) each."""
        if images[0].size is None:
            pixels = torch.stack([image.data for image in images]).to(self._device, self._dtype)
            return list(self._model.get_image_features(pixel_values=pixels).pooler_output)
        pixels = torch.cat([image.data for image in images]).to(self._device, self._dtype)
        sizes = torch.tensor([image.size for image in images])
        return list(self._model.get_image_features(pixel_values=pixels, image_sizes=sizes).pooler_output)

    def prepare(self, raw: bytes, kind: str) -> object:
        """Decode one medium.

        Args:
            kind: "image/png" and the like, or "embedding": safetensors with one tensor (tokens, hidden).

        Raises:
            RequestError: it is broken, too large, or of another kind or shape.
        """
        medium = self.pool.decode(raw, kind)
        if isinstance(medium, embedding_slots.Rows):
            return medium
        pixels = embedding_slots.pixels(medium, self._processor)
        if pixels.data.shape[-3:] != self._shape:  # in the tower it would fail the whole batch
            raise RequestError(
                Code.invalid_request,
                f"an image became a tensor of {tuple(pixels.data.shape)}, this model takes {tuple(self._shape)}",
            )
        return pixels

    def tokens(self, prepared: object) -> int:
        return self.pool.tokens(prepared)

    def fill(self, batch: Seq[tuple[list[int], object]]) -> None:
        """Embed each medium into its slots.

        Raises:
            EngineError: the device is lost.
        """
        images = [(slots, medium) for slots, medium in batch if isinstance(medium, embedding_slots.Pixels)]
        try:
            with torch.inference_mode():
                for slots, medium in batch:
                    if isinstance(medium, embedding_slots.Rows):
                        self.pool.write(slots, medium.data)
                each = 1 if self._tiles is None else 1 + max((len(medium.data) for _, medium in images), default=1)
                step = max(1, BATCH // each)
                for at in range(0, len(images), step):
                    part = images[at : at + step]
                    features = self._features([medium for _, medium in part])
                    for (slots, _), one in zip(part, features, strict=True):
                        self.pool.write(slots, one)
                if self._device.type == "cuda":  # other processes read the pool
                    torch.cuda.synchronize(self._device)
        except torch.OutOfMemoryError as error:
            raise EngineError(out_of_memory(error)) from error
        except RuntimeError as error:  # torch has no narrower type for a lost device
            raise EngineError(f"encoding images failed on {self._device}: {error}") from error

    def take(self, places: Tensor) -> Tensor:
        """Read embeddings from the pool.

        Args:
            places: (n,) int64, slot x slot_tokens + row.
        Returns: (n, hidden)
        """
        return self.pool.data.flatten(0, 1).index_select(0, places)

    def memory(self) -> Memory:
        return self.pool.memory()

    def close(self) -> None:
        """Free tower and pool."""
        self._model = None
        self.pool.close()


def refusal(config: Any) -> str:
    """Why images of this model cannot be embedded; "": they can."""
    if config.model_type not in KINDS:
        return f"images of {config.model_type} models are not supported, only those of {', '.join(sorted(KINDS))}"
    tower = config.vision_config.model_type
    if tower not in TOWERS:
        return f"a {tower} vision tower is not supported, only {', '.join(sorted(TOWERS))}"
    return ""


def processor(model: str) -> Any:
    """The model's image processor, on Pillow.

    Raises:
        VisionUnsupported: preprocessor_config.json is missing or malformed.
    """
    try:
        return AutoImageProcessor.from_pretrained(model, backend="pil", trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise VisionUnsupported(f"no usable preprocessor_config.json: {error}") from error


def tower_of(config: Any) -> type:
    """The class of the model's vision part."""
    return LlavaNextTower if config.model_type == "llava_next" else LlavaTower


class _TowerAlone:
    """Leaves the language model of a checkpoint out."""

    _tied_weights_keys: dict[str, str] = {}
    _keys_to_ignore_on_load_unexpected = [r"language_model", r"lm_head"]

    def __init__(self, config: AutoConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # without memory: from_pretrained does it on the "meta" device
        self.model: Any
        self.model.language_model = nn.Identity()
        self.lm_head = nn.Identity()


class LlavaTower(_TowerAlone, LlavaForConditionalGeneration):  # type: ignore[misc]  # mypy does not follow transformers
    """Vision tower and projector of a LLaVA checkpoint."""


class LlavaNextTower(_TowerAlone, LlavaNextForConditionalGeneration):  # type: ignore[misc]
    """The same of a LLaVA-NeXT checkpoint."""
