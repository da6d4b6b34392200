"""Images of prompts, kept in slots of our embedding pool until a prompt refers to them (vLLM, TensorRT-LLM).

A slot holds either embeddings (transferred from an encode worker, or sent by the client) or an image, which the engine
embeds itself.
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
from penstock.workers.engines.native.model.embedding_slots import (
    DEFAULT_SLOTS,
    EMBEDDING,
    IMAGES,
    MEMORY_SHARE,
    EmbeddingSlots,
    Rows,
    first_frame,
)
from penstock.workers.engines.native.model.pool import free_bytes


class KeptImage(NamedTuple):
    """``content``: the image, or its file. ``tokens``: placeholder tokens that it takes."""

    content: Any
    tokens: int


class ImageStore:
    """Implements ``penstock.workers.engines.core.embeddings.VisionEncoder``; nothing is computed here.

    Args:
        title: of the engine.
        slots: 0: as many as the native engine's encode workers have, or fewer if memory is short.
        slot_tokens: rows of a slot.
        dtype: of the model, hence of an encode worker's embeddings; None: it takes none.
        files: keep files instead of decoded images, which can take 160 MB each.
        equal: take only embeddings that fill a slot.

    Attributes:
        pool: the embeddings; None: it takes images only.
    """

    def __init__(
        self,
        title: str,
        vision: Vision,
        slots: int,
        slot_tokens: int,
        dtype: torch.dtype | None,
        *,
        files: bool = False,
        equal: bool = False,
    ) -> None:
        self._title = title
        self._vision = vision
        self._files = files
        self._equal = equal
        self.needs_grid = vision.patches is not None
        self.slot_tokens = slot_tokens
        self.slots = slots or DEFAULT_SLOTS
        self.pool: EmbeddingSlots | None = None
        if dtype is not None and vision.hidden:  # 0: its configuration does not say how wide they are
            device = torch.device("cpu")
            room = int(free_bytes(device) * MEMORY_SHARE) // (slot_tokens * vision.hidden * dtype.itemsize)
            self.slots = slots or max(1, min(DEFAULT_SLOTS, room))
            shape = (self.slots, slot_tokens, vision.hidden)
            self.pool = EmbeddingSlots(*shape, dtype, device, vision.tiles, vision.patches)
        self._kept: dict[int, Any] = {}  # image or file by its first slot

    def prepare(self, raw: bytes, kind: str) -> object:
        """Check one medium, in a thread.

        Raises:
            RequestError: it is broken, too large, or of another kind or shape.
        """
        if kind == EMBEDDING and self.pool is not None:
            rows = self.pool.decode(raw, kind)
            if self._equal and (found := self.pool.tokens(rows)) != self.slot_tokens:
                raise RequestError(
                    Code.invalid_request, f"an embedding of this model has {self.slot_tokens} tokens, not {found}"
                )
            return rows
        if kind not in IMAGES:
            raise RequestError(
                Code.unsupported,
                f"this worker's engine ({self._title}) takes images, not {kind}; use a worker with --engine native",
            )
        image = self.decode(raw)
        try:
            return KeptImage(raw if self._files else image, self._vision.tokens_of(image.height, image.width))
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
        assert isinstance(prepared, KeptImage)
        return prepared.tokens

    def fill(self, batch: Seq[tuple[list[int], object]]) -> None:
        """Keep each medium in its slots."""
        for slots, prepared in batch:
            self.mark_embedded(slots)
            if isinstance(prepared, Rows):
                assert self.pool is not None
                self.pool.write(slots, prepared.data)
            else:
                assert isinstance(prepared, KeptImage)
                self._kept[slots[0]] = prepared.content

    def mark_embedded(self, slots: Seq[int]) -> None:
        """Mark these slots as holding embeddings instead of an image."""
        for slot in slots:
            self._kept.pop(slot, None)

    def alike(self, media: Seq[Seq[int]]) -> bool:
        """Whether either all of these slots hold images, or none does: a request must not mix both kinds."""
        return len({slots[0] in self._kept for slots in media}) < 2

    def images(self, spans: Seq[MediaSpan]) -> tuple[Any, ...]:
        """A request's images, or their files; empty if they are embedded.

        Raises:
            RequestError: some are embedded and others are not.
        """
        if not self.alike([span.slots for span in spans]):
            raise RequestError(
                Code.transfer_failed,
                f"some images of this request are embedded and others are not, and {self._title} takes only one kind; "
                "send it again",
            )
        return tuple(self._kept[span.slots[0]] for span in spans if span.slots[0] in self._kept)

    def embeddings(self, spans: Seq[MediaSpan]) -> list[Tensor]:
        """Embeddings of each image, (tokens, hidden). They are copies: slots may be reused before they are read."""
        assert self.pool is not None
        return [self.pool.read(span.slots, span.tokens) for span in spans]

    def memory(self) -> Memory | None:
        return None if self.pool is None else self.pool.memory()

    def close(self) -> None:
        self._kept.clear()
        if self.pool is not None:
            self.pool.close()
