"""Images for TensorRT-LLM's language model, kept in slots of our embedding pool until a prompt refers to them.

A slot holds either embeddings (transferred from an encode worker, or sent by the client) or the image itself, which
TensorRT-LLM then embeds. It takes images and embeddings only with a *text* prompt that has one placeholder per image.
The prompt's tokens are therefore decoded to text, and that text must encode to the same tokens.
"""

from collections.abc import Sequence as Seq
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from penstock.infra.model.modeldir import Vision
from penstock.schemas.errors import Code
from penstock.schemas.transfer import Memory
from penstock.workers.engines.engine_protocol import MediaSpan, RequestError
from penstock.workers.engines.external.sequences import collapse
from penstock.workers.engines.native.model import embedding_slots
from penstock.workers.engines.native.model.embedding_slots import EmbeddingSlots

DEFAULT_SLOTS = 256


class ImageSlotStore:
    """Implements ``penstock.workers.engines.core.embeddings.VisionEncoder``; nothing is computed here.

    Args:
        slots: 0: ``DEFAULT_SLOTS``.
        dtype: of the model, hence of an encode worker's embeddings.
    """

    needs_grid = False

    def __init__(self, vision: Vision, slots: int, dtype: torch.dtype) -> None:
        self.slots = slots or DEFAULT_SLOTS
        self.slot_tokens = vision.image_tokens
        self.pool = EmbeddingSlots(
            self.slots, self.slot_tokens, vision.hidden, dtype, torch.device("cpu"), vision.tiles
        )
        self._images: dict[int, Image.Image] = {}  # by their first slot

    def prepare(self, raw: bytes, kind: str) -> object:
        """Decode one medium.

        Raises:
            RequestError: it is broken, too large, or of another kind or shape.
        """
        return self.pool.decode(raw, kind)

    def tokens(self, prepared: object) -> int:
        return self.pool.tokens(prepared)

    def fill(self, batch: Seq[tuple[list[int], object]]) -> None:
        """Keep each medium in its slots."""
        for slots, medium in batch:
            if isinstance(medium, embedding_slots.Rows):
                self.mark_embedded(slots)
                self.pool.write(slots, medium.data)
            else:
                assert isinstance(medium, Image.Image)
                self._images[slots[0]] = medium

    def mark_embedded(self, slots: Seq[int]) -> None:
        """Note that these slots hold embeddings now, instead of an image."""
        for slot in slots:
            self._images.pop(slot, None)

    def alike(self, media: Seq[Seq[int]]) -> bool:
        """Whether all of these slots hold images, or none of them does: a request has one kind."""
        return len({slots[0] in self._images for slots in media}) < 2

    def get(self, span: MediaSpan) -> Image.Image | Tensor:
        """An image, or a copy of its embeddings (tokens, hidden): its slots may be reused before they are read."""
        image = self._images.get(span.slots[0])
        return image if image is not None else self.pool.read(span.slots, span.tokens)

    def memory(self) -> Memory:
        return self.pool.memory()

    def close(self) -> None:
        self._images.clear()


def inputs(
    tokens: Seq[int], spans: Seq[MediaSpan], image_slots: ImageSlotStore, tokenizer: Tokenizer, placeholder: int
) -> dict[str, Any]:
    """The ``inputs`` of ``generate_async`` for a prompt with images.

    Args:
        tokens: with as many placeholders per image as it has embeddings.
        placeholder: token id of the placeholder.

    Raises:
        RequestError: the prompt cannot be written as text, or only some of its images are embedded.
    """
    short = collapse(tokens, spans, placeholder)
    text = tokenizer.decode(short, skip_special_tokens=False)
    if tokenizer.encode(text, add_special_tokens=False).ids != short:
        raise RequestError(
            Code.unsupported,
            "this prompt with images has no text that encodes to the same tokens, and TensorRT-LLM takes images with "
            "text only; send it to a worker with the native engine",
        )
    images = [image_slots.get(span) for span in spans]
    embedded = [isinstance(each, Tensor) for each in images]
    if all(embedded):
        return {"prompt": text, "multi_modal_embeddings": {"image": images}}
    if any(embedded):
        raise RequestError(
            Code.transfer_failed,
            "some images of this request are embedded and others are not, and TensorRT-LLM takes only one kind; send "
            "the request again",
        )
    return {"prompt": text, "multi_modal_data": {"image": images}, "mm_processor_kwargs": {}}
