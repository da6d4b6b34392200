"""Image embeddings in a pool that prompts refer to: an encoder, and the cache of its results."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import msgspec

from penstock.schemas.errors import Code
from penstock.schemas.transfer import Memory
from penstock.workers.engines.base import MediaReservation, MediaSpan, RequestError
from penstock.workers.engines.core.embeddings import EmbeddingCache, VisionEncoder

TEXT_ONLY = "this model takes text only; send the request without images, or to a model that takes them"
MISSING_EMBEDDINGS = "the embeddings of an image are not on this worker"


class EmbeddingPool:
    """Implements ``penstock.workers.engines.base.VisionEngine``; owns ``encoder`` and closes it.

    Args:
        on_transfer: called with the slots that a transfer has filled.
    """

    def __init__(self, encoder: VisionEncoder, on_transfer: Callable[[list[int]], None] | None = None) -> None:
        self.encoder = encoder
        self.cache = EmbeddingCache(encoder.slots, encoder.slot_tokens)
        self.slot_tokens = encoder.slot_tokens
        self._on_transfer = on_transfer

    def prepare(self, raw: bytes, kind: str) -> object:
        """Decode one medium; from any thread.

        Raises:
            RequestError: it cannot be decoded, or the model does not take it.
        """
        return self.encoder.prepare(raw, kind)

    def reserve(self, media: Seq[tuple[bytes, int]]) -> MediaReservation | None:
        """Hold slots for (digest, tokens) each; None: too few are available now.

        Raises:
            RequestError: the pool is too small for them.
        """
        cache = self.cache
        if any(tokens < 1 for _, tokens in media):
            raise RequestError(Code.invalid_request, "a medium takes at least one token of the prompt")
        needed = cache.needed(media)
        if needed > cache.total_slots:
            raise RequestError(
                Code.out_of_blocks,
                f"the media take {needed} embedding slots of {cache.slot_tokens} tokens; this worker has "
                f"{cache.total_slots} (embed_slots)",
            )
        return cache.reserve(media)

    def encode(self, reservation: MediaReservation, prepared: Mapping[int, object]) -> None:
        """Compute media (by their number in the reservation) into their slots, and adopt them.

        Raises:
            RequestError: a medium has another number of tokens than was reserved; nothing was computed.
            EngineError: the device is lost.
        """
        for number, medium in prepared.items():
            given, reserved = self.encoder.tokens(medium), self.cache.tokens(reservation, number)
            if given != reserved:
                raise RequestError(
                    Code.invalid_request,
                    f"medium {number} has {given} tokens, the prompt has placeholders for {reserved}",
                )
        self.encoder.fill([(reservation.slots[number], medium) for number, medium in prepared.items()])
        self.cache.adopt(reservation, prepared)

    def adopt(self, reservation: MediaReservation) -> None:
        """All slots were filled by a transfer: enter their media into the cache."""
        if self._on_transfer is not None:
            self._on_transfer([slot for slots in reservation.slots for slot in slots])
        self.cache.adopt(reservation)

    def release(self, reservation: MediaReservation) -> None:
        """Release the slots; adopted media stay in the cache until their slots are needed."""
        self.cache.release(reservation)

    def generations(self, reservation: MediaReservation) -> list[int]:
        """Generations of all slots, flattened in order."""
        return self.cache.generations_of(reservation)

    def memory(self) -> dict[str, Memory]:
        """The pool by its name in ``Engine.memory``."""
        generations, _ = self.cache.generations.buffer_info()
        return {"embeds": msgspec.structs.replace(self.encoder.memory(), generations=generations)}

    def check(self, media: Seq[MediaSpan], prompt_len: int, *, adopted: bool) -> None:
        """Check that the media lie in the prompt in order, without overlap, and in slots that exist.

        Args:
            adopted: the prompt's KV came from elsewhere, so its embeddings need not be here.

        Raises:
            RequestError: they do not.
        """
        free = 0  # position of the first token after the media so far
        for position, tokens, _, slots in media:
            if position < free or tokens < 1 or position + tokens > prompt_len:
                raise RequestError(
                    Code.invalid_request,
                    f"a medium cannot take {tokens} tokens from position {position} on: {free} to {prompt_len} are "
                    "free",
                )
            free = position + tokens
            if not slots:
                if not adopted:
                    raise RequestError(Code.transfer_failed, MISSING_EMBEDDINGS)
                continue
            if len(slots) != -(-tokens // self.slot_tokens):
                raise RequestError(
                    Code.invalid_request, f"a medium of {tokens} tokens came with {len(slots)} embedding slots"
                )
            if not 0 <= min(slots) <= max(slots) < self.cache.total_slots:
                raise RequestError(Code.invalid_request, f"there are only {self.cache.total_slots} embedding slots")

    def close(self) -> None:
        self.encoder.close()
