"""A pool of embeddings in one tensor, cut into slots, and the decoding of media that may fill it."""

from collections.abc import Sequence as Seq

import torch
from PIL import Image
from torch import Tensor

from penstock.infra.model.image_tiles import Tiles
from penstock.schemas.errors import Code
from penstock.schemas.transfer import Memory
from penstock.workers.engines.base import RequestError
from penstock.workers.engines.native.model import media
from penstock.workers.engines.native.model.pool import dtype_name, location, zeros


class EmbeddingSlots:
    """
    Args:
        slot_tokens: rows of a slot.
        hidden: size of a row.
        tiles: of a model whose images take different numbers of tokens; None: all take ``slot_tokens``.

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
    ) -> None:
        self.slot_tokens = slot_tokens
        self._tiles = tiles
        self.data = zeros((slots, slot_tokens, hidden), dtype, device)

    def decode(self, raw: bytes, kind: str) -> Image.Image | media.Rows:
        """Decode one medium.

        Args:
            kind: "image/png" and the like, or "embedding": safetensors with one tensor (tokens, hidden).

        Raises:
            RequestError: it is broken, too large, or of another kind or shape.
        """
        if kind in media.IMAGES:
            # Gateways count the tokens of an image by its upright size, and read the orientation of JPEGs only.
            return media.first_frame(raw) if self._tiles is None else media.first_frame(raw, ("JPEG",))
        if kind == media.EMBEDDING:
            return media.rows(raw, self.data.shape[2], self.data.dtype)
        kinds = ", ".join(sorted(media.IMAGES))
        raise RequestError(Code.invalid_request, f"media of kind {kind!r} are not supported, only {kinds}")

    def tokens(self, prepared: object) -> int:
        """Placeholder tokens that a decoded medium takes."""
        if isinstance(prepared, media.Rows):
            return len(prepared.data)
        if self._tiles is None:
            return self.slot_tokens
        if isinstance(prepared, Image.Image):
            return self._tiles.tokens(prepared.height, prepared.width)
        assert isinstance(prepared, media.Pixels)
        assert prepared.size is not None
        return self._tiles.tokens(*prepared.size)

    def write(self, slots: Seq[int], rows: Tensor) -> None:
        """Copy (tokens, hidden) into the slots, in order."""
        for number, slot in enumerate(slots):
            part = rows[number * self.slot_tokens : (number + 1) * self.slot_tokens]
            self.data[slot, : len(part)] = part

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
