"""Images of prompts for vLLM, kept in slots of our embedding pool until a prompt refers to them.

A slot holds either embeddings (transferred from an encode worker, or sent by the client) or the file of an image, which
vLLM embeds itself. Its processor takes a prompt with one placeholder for each image, and writes as many as the image
has embeddings, which must be those that the gateway counted: blocks are named by them.
"""

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from penstock.infra.model.modeldir import Vision
from penstock.infra.model.patch_grid import BadGrid
from penstock.schemas.errors import Code
from penstock.schemas.transfer import Memory
from penstock.workers.engines.engine_protocol import MediaSpan, RequestError
from penstock.workers.engines.native.model.embedding_slots import EMBEDDING, IMAGES, EmbeddingSlots, Rows, first_frame
from penstock.workers.engines.native.model.pool import free_bytes
from penstock.workers.engines.native.model.vision import DEFAULT_SLOTS, GRID_SLOT_TOKENS, MEMORY_SHARE

MIXED = "some images of this request are embedded and others are not, and vLLM takes only one kind; send it again"


class ImageFile(NamedTuple):
    """``tokens``: placeholder tokens that it takes."""

    raw: bytes
    tokens: int


class ImageStore:
    """Implements ``penstock.workers.engines.core.embeddings.VisionEncoder``; nothing is computed here.

    Of images that vLLM embeds, files are kept, not pixels, which can take 160 MB an image.

    Args:
        slots: 0: as many as the native engine's encode workers have, or fewer if memory is short.
        dtype: of the model, hence of an encode worker's embeddings; None: it takes none.

    Attributes:
        pool: the embeddings; None: it takes files only.
    """

    def __init__(self, vision: Vision, slots: int, dtype: torch.dtype | None) -> None:
        self._vision = vision
        self.needs_grid = vision.patches is not None
        base = vision.image_tokens if vision.tiles is None else vision.tiles.base
        self.slot_tokens = base if vision.patches is None else GRID_SLOT_TOKENS
        self.slots = slots or DEFAULT_SLOTS
        self.pool: EmbeddingSlots | None = None
        if dtype is not None and vision.hidden:  # 0: its configuration does not say how wide they are
            device = torch.device("cpu")
            room = int(free_bytes(device) * MEMORY_SHARE) // (self.slot_tokens * vision.hidden * dtype.itemsize)
            self.slots = slots or max(1, min(DEFAULT_SLOTS, room))
            shape = (self.slots, self.slot_tokens, vision.hidden)
            self.pool = EmbeddingSlots(*shape, dtype, device, vision.tiles, vision.patches)
        self._files: dict[int, bytes] = {}  # by their first slot

    def prepare(self, raw: bytes, kind: str) -> object:
        """Check one medium, in a thread.

        Raises:
            RequestError: it is broken, too large, or of another kind or shape.
        """
        if kind == EMBEDDING and self.pool is not None:
            rows = self.pool.decode(raw, kind)
            if (found := self.pool.tokens(rows)) != self.slot_tokens:  # its engine ends where sizes differ in a step
                raise RequestError(
                    Code.invalid_request, f"an embedding of this model has {self.slot_tokens} tokens, not {found}"
                )
            return rows
        if kind not in IMAGES:
            raise RequestError(
                Code.unsupported,
                f"this worker's engine (vLLM) takes images, not {kind}; use a worker with --engine native",
            )
        image = self.decode(raw)
        try:
            return ImageFile(raw, self._vision.tokens_of(image.height, image.width))
        except BadGrid as error:
            raise RequestError(Code.invalid_request, str(error)) from None

    def decode(self, raw: bytes) -> Image.Image:
        """The image as the gateway measured it: it reads the orientation where the size counts, of JPEGs only.

        Raises:
            RequestError: it is broken or too large.
        """
        any_size = self._vision.tiles is not None or self._vision.patches is not None
        return first_frame(raw, ("JPEG",)) if any_size else first_frame(raw)

    def tokens(self, prepared: object) -> int:
        if isinstance(prepared, Rows):
            return len(prepared.data)
        assert isinstance(prepared, ImageFile)
        return prepared.tokens

    def fill(self, batch: Seq[tuple[list[int], object]]) -> None:
        """Keep each medium in its slots."""
        for slots, prepared in batch:
            self.mark_embedded(slots)
            if isinstance(prepared, Rows):
                assert self.pool is not None
                self.pool.write(slots, prepared.data)
            else:
                assert isinstance(prepared, ImageFile)
                self._files[slots[0]] = prepared.raw

    def mark_embedded(self, slots: Seq[int]) -> None:
        """Note that these slots hold embeddings now, instead of a file."""
        for slot in slots:
            self._files.pop(slot, None)

    def alike(self, media: Seq[Seq[int]]) -> bool:
        """Whether all of these slots hold files, or none of them does: a request has one kind."""
        return len({slots[0] in self._files for slots in media}) < 2

    def files(self, spans: Seq[MediaSpan]) -> tuple[bytes, ...]:
        """The files of a request's images; none: they are embedded.

        Raises:
            RequestError: some are, others are not.
        """
        if not self.alike([span.slots for span in spans]):
            raise RequestError(Code.transfer_failed, MIXED)
        return tuple(self._files[span.slots[0]] for span in spans if span.slots[0] in self._files)

    def embeddings(self, spans: Seq[MediaSpan]) -> Any:
        """Of images, as vLLM takes them. A copy: their slots may be reused before they are read."""
        assert self.pool is not None
        rows: list[Tensor] = [self.pool.read(span.slots, span.tokens) for span in spans]
        if self._vision.patches is None:
            return rows
        merge = self._vision.patches.merge
        grids = [(steps, rows * merge, columns * merge) for steps, rows, columns in (span.grid for span in spans)]
        return {"image_embeds": torch.cat(rows), "image_grid_thw": torch.tensor(grids)}

    def memory(self) -> Memory | None:
        return None if self.pool is None else self.pool.memory()

    def close(self) -> None:
        self._files.clear()
        if self.pool is not None:
            self.pool.close()
