"""The vision encoder of a model: image processor, vision tower, projector, and the pool of their embeddings.

How many tokens an image takes is not read from the configuration: the model is run on blank images. Where the number
depends on an image's size (LLaVA-NeXT, Qwen2.5-VL), these check the formula.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    LlavaForConditionalGeneration,
    LlavaNextForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLForConditionalGeneration,
)

from penstock.infra.model import modeldir, patch_grid, video
from penstock.infra.model.patch_grid import BadGrid, MediaGrid, PatchGrid, Tiles, tiles_of
from penstock.schemas.errors import Code
from penstock.schemas.transfer import Memory
from penstock.workers.engines.engine_protocol import EngineError, RequestError
from penstock.workers.engines.native.model import embedding_slots
from penstock.workers.engines.native.model.embedding_slots import (
    DEFAULT_SLOTS,
    GRID_SLOT_TOKENS,
    MEMORY_SHARE,
    EmbeddingSlots,
)
from penstock.workers.engines.native.model.pool import free_bytes, out_of_memory

KINDS = frozenset({"llava", "llava_next", *patch_grid.MODEL_TYPES})  # model types whose images we embed
TOWERS = frozenset({"clip_vision_model", "siglip_vision_model"})  # fixed image size, so a fixed number of tokens
MAX_FRAMES = 1_000_000  # of a video; gateways have a lower limit
PATCHES = 16_384  # in one pass through a tower that takes any resolution; a larger image goes alone
BATCH = 16  # images, or tiles of them, in one pass through the tower
BLANKS = ((64, 64), (90, 40))  # width, height


class VisionUnsupported(Exception):
    """This model's images cannot be embedded; the text says why."""


class TorchVisionEncoder:
    """Implements ``penstock.workers.engines.core.embeddings.VisionEncoder``.

    Args:
        model: has ``get_image_features``.
        processor: of ``processor``.
        slots: of the pool; 0: ``DEFAULT_SLOTS``, or fewer where memory is short.

    Attributes:
        pool: the embeddings.

    Raises:
        VisionUnsupported: the model does not embed an image in the expected shape.
        EngineError: there is no memory for the pool.
    """

    def __init__(self, model: Any, processor: Any, slots: int = 0, patches: PatchGrid | None = None) -> None:
        self._model = model
        self._processor = processor
        self._dtype: torch.dtype = model.dtype
        self._device: torch.device = model.device
        self._tiles: Tiles | None = None
        self._patches = patches
        self.needs_grid = patches is not None
        self._shape, self.slot_tokens, hidden = self._blank()
        slot_bytes = self.slot_tokens * hidden * self._dtype.itemsize
        free = free_bytes(self._device)
        self.slots = slots or max(1, min(DEFAULT_SLOTS, int(free * MEMORY_SHARE) // slot_bytes))
        if self.slots * slot_bytes > free:
            raise EngineError(
                f"no memory is left for {self.slots} embedding slots of {slot_bytes} bytes on {self._device}; "
                "lower embed_slots"
            )
        self.pool = EmbeddingSlots(
            self.slots, self.slot_tokens, hidden, self._dtype, self._device, self._tiles, patches
        )

    def _blank(self) -> tuple[torch.Size, int, int]:
        """The tower's input shape, which must be the same for all images; tokens of a slot; size of an embedding."""
        try:
            blanks = [embedding_slots.pixels(Image.new("RGB", size), self._processor) for size in BLANKS]
            with torch.inference_mode():
                features = self._features(blanks)
            if self._patches is not None:
                self._check_grids([each.grid for each in blanks], [len(rows) for rows in features])
            elif blanks[0].size is not None:
                self._tiles = self._cut([len(rows) for rows in features])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise VisionUnsupported(f"its image processor or vision tower fails on a blank image: {error}") from error
        if features[0].dim() != 2:
            raise VisionUnsupported(f"it embeds an image as a {tuple(features[0].shape)} tensor, not (tokens, hidden)")
        tokens, hidden = (int(size) for size in features[0].shape)
        if self._patches is not None:
            return blanks[0].data.shape[1:], GRID_SLOT_TOKENS, hidden
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

    def _check_grids(self, grids: list[MediaGrid | None], found: list[int]) -> None:
        assert self._patches is not None
        wanted = [self._patches.image(height, width) for width, height in BLANKS]
        if grids != wanted or found != [grid.tokens for grid in wanted]:
            raise VisionUnsupported(
                f"its blank images have grids {grids} and {found} embeddings, by its configuration {wanted}"
            )

    def _features(self, images: list[embedding_slots.Pixels]) -> list[Tensor]:
        """One (tokens, hidden) each."""
        if self._patches is not None:
            pixels = torch.cat([image.data for image in images]).to(self._device, self._dtype)
            merge = self._patches.merge
            grids = [image.grid for image in images if image.grid is not None]
            sides = torch.tensor([(grid.steps, grid.rows * merge, grid.columns * merge) for grid in grids])
            return list(self._model.get_image_features(pixels, sides.to(self._device)).pooler_output)
        if images[0].size is None:
            pixels = torch.stack([image.data for image in images]).to(self._device, self._dtype)
            return list(self._model.get_image_features(pixel_values=pixels).pooler_output)
        pixels = torch.cat([image.data for image in images]).to(self._device, self._dtype)
        sizes = torch.tensor([image.size for image in images])
        return list(self._model.get_image_features(pixel_values=pixels, image_sizes=sizes).pooler_output)

    def prepare(self, raw: bytes, kind: str) -> object:
        """Decode one medium.

        Args:
            kind: "image/png" and the like, "video/mp4" and the like, or "embedding": safetensors with one tensor
                (tokens, hidden).

        Raises:
            RequestError: it is broken, too large, or of another kind or shape.
        """
        if self._patches is not None and kind in video.FORMATS:
            return frames(raw, self._patches, self._processor)
        medium = self.pool.decode(raw, kind)
        if isinstance(medium, embedding_slots.Rows):
            return medium
        try:
            pixels = embedding_slots.pixels(medium, self._processor)
        except ValueError as error:  # of a shape that the processor does not take
            raise RequestError(Code.invalid_request, f"an image cannot be prepared for this model: {error}") from error
        if pixels.grid is None and pixels.data.shape[-3:] != self._shape:  # in the tower it would fail the whole batch
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
                for part in self._batches(images):
                    features = self._features([medium for _, _, medium in part])
                    for (slots, first, _), one in zip(part, features, strict=True):
                        self.pool.write(slots, one, first)
                if self._device.type == "cuda":  # other processes read the pool
                    torch.cuda.synchronize(self._device)
        except torch.OutOfMemoryError as error:
            raise EngineError(out_of_memory(error)) from error
        except RuntimeError as error:  # torch has no narrower type for a lost device
            raise EngineError(f"encoding images failed on {self._device}: {error}") from error

    def _batches(
        self, images: list[tuple[list[int], embedding_slots.Pixels]]
    ) -> Iterator[list[tuple[list[int], int, embedding_slots.Pixels]]]:
        """What goes through the tower together: slots, the number of the first embedding, pixels.

        Steps in time of a video do not see each other in the tower, so that a long one goes in parts.
        """
        if self._patches is None:
            each = 1 if self._tiles is None else 1 + max((len(medium.data) for _, medium in images), default=1)
            size = max(1, BATCH // each)
            for at in range(0, len(images), size):
                yield [(slots, 0, medium) for slots, medium in images[at : at + size]]
            return
        batch: list[tuple[list[int], int, embedding_slots.Pixels]] = []
        size = 0
        for slots, medium in images:
            assert medium.grid is not None
            grid = medium.grid._replace(steps=1)
            for step in range(medium.grid.steps):
                if batch and size + grid.tokens * self._patches.merge**2 > PATCHES:
                    yield batch
                    batch, size = [], 0
                film = medium.data.dtype == torch.uint8
                rows = cut(medium.data[step], self._patches, self._processor) if film else medium.data
                batch.append((slots, step * grid.tokens, embedding_slots.Pixels(rows, None, grid)))
                size += len(rows)
        if batch:
            yield batch

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
    if config.model_type not in patch_grid.MODEL_TYPES and tower not in TOWERS:
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


def patches_of(model: str, config: Any) -> PatchGrid | None:
    """How the model cuts images of any size, and videos; None: all its images have the same size, or tiles.

    Raises:
        VisionUnsupported: a file of its processors is malformed.
    """
    if config.model_type not in patch_grid.MODEL_TYPES:
        return None
    try:
        return patch_grid.patch_grid(config.to_dict(), *modeldir.processor_settings(Path(model)))
    except (BadGrid, modeldir.ModelError) as error:
        raise VisionUnsupported(str(error)) from error


def frames(raw: bytes, patches: PatchGrid, processor: Any) -> embedding_slots.Pixels:
    """The frames of a video that the model samples. They are cut only when they are computed, into four times as much.

    Raises:
        RequestError: it cannot be decoded.
    """
    try:
        facts = video.probe(raw, MAX_FRAMES)
        sample = patches.video(*facts)
        data = video.decode(raw, facts, sample.frames, sample.height, sample.width)
    except (BadGrid, video.BadVideo) as error:
        raise RequestError(Code.invalid_request, f"a video {error}") from error
    rgb = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, sample.height, sample.width, 3)
    if extra := -len(rgb) % patches.temporal:
        rgb = torch.cat([rgb, rgb[-1:].expand(extra, -1, -1, -1)])
    return embedding_slots.Pixels(rgb.view(-1, patches.temporal, *rgb.shape[1:]), None, sample.grid)


def cut(frames: Tensor, patches: PatchGrid, processor: Any) -> Tensor:
    """The frames of one step in time as input of the tower.

    Args:
        frames: (frames, height, width, 3) uint8.
    Returns: (patches, values) float32
    """
    mean, deviation = (torch.tensor(each) for each in (processor.image_mean, processor.image_std))
    pixels = (frames * processor.rescale_factor - mean) / deviation
    # Frame; rows: of squares, of patches in them, of pixels; columns likewise; colour.
    across = [(size // patches.square, patches.merge, patches.patch) for size in frames.shape[1:3]]
    ordered = pixels.view(patches.temporal, *across[0], *across[1], 3).permute(1, 4, 2, 5, 7, 0, 3, 6)
    made: Tensor = ordered.flatten(4).flatten(0, 3)
    return made


def tower_of(config: Any) -> type:
    """The class of the model's vision part."""
    towers = {"llava_next": LlavaNextTower, "qwen2_vl": Qwen2Tower, "qwen2_5_vl": Qwen25Tower}
    return towers.get(config.model_type, LlavaTower)


class _TowerAlone:
    """Leaves the language model of a checkpoint out."""

    _tied_weights_keys: dict[str, str] = {}
    # Checkpoints have the language model under one of two names.
    _keys_to_ignore_on_load_unexpected = [r"language_model", r"lm_head", r"^model\.(layers|embed_tokens|norm)\."]

    def __init__(self, config: AutoConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # without memory: from_pretrained does it on the "meta" device
        self.model: Any
        self.model.language_model = nn.Identity()
        self.lm_head = nn.Identity()


class LlavaTower(_TowerAlone, LlavaForConditionalGeneration):  # type: ignore[misc]  # mypy does not follow transformers
    """Vision tower and projector of a LLaVA checkpoint."""


class LlavaNextTower(_TowerAlone, LlavaNextForConditionalGeneration):  # type: ignore[misc]
    """The same of a LLaVA-NeXT checkpoint."""


class Qwen2Tower(_TowerAlone, Qwen2VLForConditionalGeneration):  # type: ignore[misc]
    """The same of a Qwen2-VL checkpoint."""


class Qwen25Tower(_TowerAlone, Qwen2_5_VLForConditionalGeneration):  # type: ignore[misc]
    """The same of a Qwen2.5-VL checkpoint."""
