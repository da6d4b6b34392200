"""Images for TensorRT-LLM's language model, kept in slots of our embedding pool until a prompt refers to them.

A slot holds either embeddings (an encode worker's, transferred, or the client's own) or the image itself, which
TensorRT-LLM then embeds. It takes images and embeddings only with a *text* prompt that has one placeholder per image,
so the prompt's tokens are decoded to text, and checked to be encoded as the same tokens again.
"""

from collections.abc import Sequence as Seq
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from infra.model.modeldir import Vision
from schemas.errors import Code
from schemas.transfer import Memory
from workers.engines.base import MediaReservation, MediaSpan, RequestError
from workers.engines.native import media
from workers.engines.native.pool import dtype_name, zeros

DEFAULT_SLOTS = 256


class ImageSlotStore:
    """Implements ``workers.engines.core.embeddings.VisionEncoder``; nothing is computed here.

    Args:
        slots: 0: ``DEFAULT_SLOTS``.
        dtype: of the model, hence of an encode worker's embeddings.
    """

    def __init__(self, vision: Vision, slots: int, dtype: torch.dtype) -> None:
        self.slots = slots or DEFAULT_SLOTS
        self.slot_tokens = vision.image_tokens
        self._hidden = vision.hidden
        self.data = zeros((self.slots, self.slot_tokens, self._hidden), dtype, torch.device("cpu"))
        self._pictures: dict[int, Image.Image] = {}  # by their first slot

    def prepare(self, raw: bytes, kind: str) -> object:
        """Decode one medium.

        Raises:
            RequestError: it is broken, too large, or of another kind or shape.
        """
        if kind in media.IMAGES:
            return media.picture(raw)
        if kind == media.EMBEDDING:
            return media.rows(raw, self._hidden, self.data.dtype)
        kinds = ", ".join(sorted(media.IMAGES))
        raise RequestError(Code.invalid_request, f"media of kind {kind!r} are not taken, only {kinds}")

    def tokens(self, prepared: object) -> int:
        return len(prepared.data) if isinstance(prepared, media.Rows) else self.slot_tokens

    def fill(self, batch: Seq[tuple[list[int], object]]) -> None:
        """Keep each medium in its slots."""
        for slots, medium in batch:
            if isinstance(medium, media.Rows):
                self.mark_embedded(slots)
                for number, slot in enumerate(slots):
                    part = medium.data[number * self.slot_tokens : (number + 1) * self.slot_tokens]
                    self.data[slot, : len(part)] = part
            else:
                assert isinstance(medium, Image.Image)
                self._pictures[slots[0]] = medium

    def mark_embedded(self, slots: Seq[int]) -> None:
        """These slots hold embeddings now."""
        for slot in slots:
            self._pictures.pop(slot, None)

    def get(self, span: MediaSpan) -> Image.Image | Tensor:
        """A picture, or a copy of its embeddings (tokens, hidden): its slots may go before they are read."""
        picture = self._pictures.get(span.slots[0])
        if picture is not None:
            return picture
        return self.data[list(span.slots)].reshape(-1, self._hidden)[: span.tokens]

    def memory(self) -> Memory:
        return Memory(
            base=self.data.data_ptr(),
            block_bytes=self.slot_tokens * self._hidden * self.data.dtype.itemsize,
            blocks=self.slots,
            layout=f"{dtype_name(self.data.dtype)}({self.slot_tokens},{self._hidden})",
        )

    def close(self) -> None:
        self._pictures.clear()


def inputs(
    tokens: Seq[int], spans: Seq[MediaSpan], image_slots: ImageSlotStore, tokenizer: Tokenizer, placeholder: int
) -> dict[str, Any]:
    """What ``generate_async`` takes for a prompt with pictures.

    Args:
        tokens: with as many placeholders per picture as it has embeddings.

    Raises:
        RequestError: the prompt cannot be written as text, or some of its pictures are embedded and others are not.
    """
    short = collapsed(tokens, spans, placeholder)
    text = tokenizer.decode(short, skip_special_tokens=False)
    if tokenizer.encode(text, add_special_tokens=False).ids != short:
        raise RequestError(
            Code.unsupported,
            "this prompt with images cannot be written as text that is read as the same tokens, and TensorRT-LLM takes "
            "images with text only; send it to a worker with the native engine",
        )
    found = [image_slots.get(span) for span in spans]
    embedded = [isinstance(each, Tensor) for each in found]
    if all(embedded):
        return {"prompt": text, "multi_modal_embeddings": {"image": found}}
    if any(embedded):
        raise RequestError(
            Code.transfer_failed,
            "some images of this request came embedded and others did not, and TensorRT-LLM takes one kind; send it "
            "again",
        )
    return {"prompt": text, "multi_modal_data": {"image": found}, "mm_processor_kwargs": {}}


def collapsed(tokens: Seq[int], spans: Seq[MediaSpan], placeholder: int) -> list[int]:
    """The tokens with one placeholder for each medium."""
    out: list[int] = []
    at = 0
    for span in spans:
        out += [*tokens[at : span.position], placeholder]
        at = span.position + span.tokens
    return [*out, *tokens[at:]]


def dtype_of(name: str, config: dict[str, Any]) -> torch.dtype:
    """The model's: asked for, else its configuration's, else bfloat16."""
    text = config.get("text_config")
    said = config.get("dtype") or config.get("torch_dtype") or (text.get("dtype") if isinstance(text, dict) else None)
    found = getattr(torch, name if name != "auto" else str(said or "bfloat16"), None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def slots_of(reservation: MediaReservation) -> list[int]:
    return [slot for slots in reservation.slots for slot in slots]
