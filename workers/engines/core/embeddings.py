"""Which slots of the embedding pool hold which medium. Pure: digests, not pixels. Every operation is O(1) per slot.

A medium owns whole slots. They are kept while it is held; afterwards it can still be found until its slots are needed,
least recently used first. The same medium may be filled twice at once, into different slots: the first to finish gets
the name, the other's slots are freed on release.
"""

import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Protocol

import msgspec

from penstock.schemas.errors import Code
from penstock.schemas.kv import KvEvent
from penstock.schemas.transfer import Memory
from penstock.workers.engines.engine_protocol import (
    AdapterEngine,
    EngineInfo,
    EngineStats,
    Grammars,
    KvTransfer,
    MediaReservation,
    MediaSpan,
    RequestError,
    SequenceRequest,
    StepResult,
    WeightsEngine,
)

Key = tuple[bytes, int]  # digest, tokens: what is in the slots depends on both


class VisionEncoder(Protocol):
    """The model side: computes embeddings and keeps them in slots 0 .. ``slots`` - 1."""

    slots: int
    slot_tokens: int
    needs_grid: bool  # the model takes positions from the grid of a medium

    def prepare(self, raw: bytes, kind: str) -> object:
        """As ``VisionEngine.prepare``."""

    def tokens(self, prepared: object) -> int:
        """Placeholder tokens that a prepared medium takes."""

    def fill(self, media: Seq[tuple[list[int], object]]) -> None:
        """Compute (slots, prepared medium) each. When it returns, other processes see the result.

        Raises:
            EngineError: the device is lost.
        """

    def memory(self) -> Memory | None:
        """The pool, without generations; None: other workers cannot write to it."""

    def close(self) -> None: ...


class _Entry(msgspec.Struct, eq=False):
    """One medium in its slots."""

    key: Key
    slots: list[int]
    holders: int = 0
    named: bool = False  # can be found; set once the slots are filled


class EmbeddingCache:
    """The pool: ``slots`` ids, each of a held medium, of a cached one (not held, can be found), or unused.

    Attributes:
        generations: one u32 per slot, increased whenever it is allocated. The array never moves.
    """

    def __init__(self, slots: int, slot_tokens: int) -> None:
        if slots < 1 or slot_tokens < 1:
            raise ValueError(f"a pool needs slots and tokens in them, not {slots} of {slot_tokens}")
        self.total_slots = slots
        self.slot_tokens = slot_tokens
        self.generations = array("I", bytes(4 * slots))
        self._unused = list(range(slots - 1, -1, -1))  # taken from the end
        self._named: dict[Key, _Entry] = {}
        self._idle: OrderedDict[Key, _Entry] = OrderedDict()  # named and not held, first to go first
        self._idle_slots = 0
        self._owner: list[_Entry | None] = [None] * slots

    @property
    def used_slots(self) -> int:
        """Slots of held media."""
        return self.total_slots - len(self._unused) - self._idle_slots

    @property
    def cached_slots(self) -> int:
        """Slots of media that are not held, but can be found."""
        return self._idle_slots

    @property
    def free_slots(self) -> int:
        return len(self._unused)

    def needed(self, media: Iterable[Key]) -> int:
        """Slots that these (digest, tokens) take in total; the same medium counts once."""
        return sum(self._slots_of(tokens) for _, tokens in set(media))

    def _slots_of(self, tokens: int) -> int:
        return -(-tokens // self.slot_tokens)

    def reserve(self, media: Seq[Key]) -> MediaReservation | None:
        """Hold slots for (digest, tokens) each; None: too few are free now.

        A medium that is named twice gets one set of slots; only the first of the two has to be filled.

        Raises:
            ValueError: a medium has no tokens.
        """
        if any(tokens < 1 for _, tokens in media):
            raise ValueError("a medium has at least one token")
        fresh = [key for key in dict.fromkeys(media) if key not in self._named]
        revived = sum(len(self._idle[key].slots) for key in set(media) if key in self._idle)
        if self.needed(fresh) > len(self._unused) + self._idle_slots - revived:
            return None
        for key in media:  # before anything is evicted
            if key in self._named:
                self._hold(self._named[key])
        entries = {key: self._take(key) for key in fresh}
        have, slots = [], []
        for key in media:
            entry = self._named.get(key) or entries[key]
            have.append(entry.named or entry.holders > 0)
            if not entry.named:
                entry.holders += 1
            slots.append(list(entry.slots))
        return MediaReservation([digest for digest, _ in media], slots, have)

    def _hold(self, entry: _Entry) -> None:
        if not entry.holders:
            del self._idle[entry.key]
            self._idle_slots -= len(entry.slots)
        entry.holders += 1

    def _take(self, key: Key) -> _Entry:
        count = self._slots_of(key[1])
        while len(self._unused) < count:
            _, oldest = self._idle.popitem(last=False)
            self._idle_slots -= len(oldest.slots)
            del self._named[oldest.key]
            self._free(oldest)
        entry = _Entry(key, [self._unused.pop() for _ in range(count)])
        for slot in entry.slots:
            self._owner[slot] = entry
            self.generations[slot] = (self.generations[slot] + 1) & 0xFFFFFFFF
        return entry

    def _free(self, entry: _Entry) -> None:
        for slot in reversed(entry.slots):
            self._owner[slot] = None
            self._unused.append(slot)

    def adopt(self, reservation: MediaReservation, numbers: Iterable[int] | None = None) -> None:
        """Mark these media (by their number in the reservation; None: all) as filled, so that they can be found."""
        for number in range(len(reservation.slots)) if numbers is None else numbers:
            entry = self._entry(reservation, number)
            if self._named.setdefault(entry.key, entry) is entry:
                entry.named = True

    def release(self, reservation: MediaReservation) -> None:
        """Release the slots; a second call does nothing."""
        for number in range(len(reservation.slots)):
            entry = self._entry(reservation, number)
            entry.holders -= 1
            if entry.holders:
                continue
            if entry.named:
                self._idle[entry.key] = entry
                self._idle_slots += len(entry.slots)
            else:
                self._free(entry)
        reservation.slots = []

    def tokens(self, reservation: MediaReservation, number: int) -> int:
        """The number of tokens that a medium was reserved with."""
        return self._entry(reservation, number).key[1]

    def generations_of(self, reservation: MediaReservation) -> list[int]:
        """Generations of all slots, flattened in order."""
        return [self.generations[slot] for slots in reservation.slots for slot in slots]

    def _entry(self, reservation: MediaReservation, number: int) -> _Entry:
        entry = self._owner[reservation.slots[number][0]]
        assert entry is not None and entry.holders, "a reservation that was released"  # noqa: PT018
        return entry


TEXT_ONLY = "this model takes text only; send the request without images, or to a model that takes them"
MISSING_EMBEDDINGS = "the embeddings of an image are not on this worker"


class EmbeddingPool:
    """Implements ``penstock.workers.engines.engine_protocol.VisionEngine``; owns ``encoder`` and closes it.

    Args:
        on_transfer: called with the slots that a transfer has filled.
        alike: whether what these media have in their slots can be in one request; None: whatever it is. If it cannot,
            or some are missing, all of them are filled again.
    """

    def __init__(
        self,
        encoder: VisionEncoder,
        on_transfer: Callable[[list[int]], None] | None = None,
        alike: Callable[[Seq[Seq[int]]], bool] | None = None,
    ) -> None:
        self.encoder = encoder
        self.cache = EmbeddingCache(encoder.slots, encoder.slot_tokens)
        self.slot_tokens = encoder.slot_tokens
        self._on_transfer = on_transfer
        self._alike = alike

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
        reservation = cache.reserve(media)
        if reservation is None or self._alike is None:
            return reservation
        if not all(reservation.have) or not self._alike(reservation.slots):
            reservation.have = [key in media[:at] for at, key in enumerate(media)]
        return reservation

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
        if (memory := self.encoder.memory()) is None:
            return {}
        generations, _ = self.cache.generations.buffer_info()
        return {"embeds": msgspec.structs.replace(memory, generations=generations)}

    def check(self, media: Seq[MediaSpan], prompt_len: int, *, adopted: bool) -> None:
        """Check that the media lie in the prompt in order, without overlap, and in slots that exist.

        Args:
            adopted: the prompt's KV came from elsewhere, so its embeddings need not be here.

        Raises:
            RequestError: they do not.
        """
        free = 0  # position of the first token after the media so far
        for position, tokens, _, slots, grid, _ in media:
            if position < free or tokens < 1 or position + tokens > prompt_len:
                raise RequestError(
                    Code.invalid_request,
                    f"a medium cannot take {tokens} tokens from position {position} on: {free} to {prompt_len} are "
                    "free",
                )
            free = position + tokens
            if self.encoder.needs_grid and (len(grid) != 3 or min(grid) < 1 or math.prod(grid) != tokens):
                raise RequestError(
                    Code.invalid_request,
                    f"a medium of {tokens} tokens came with grid {list(grid)}; this model needs time, height and "
                    "width. Update the gateway",
                )
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


class EncodeEngine:
    """Implements the part of ``engine_protocol.Engine`` that every worker needs; all work is in
    ``vision``.

    Its blocks, in ``info`` and ``stats``, are slots of the embedding pool. Owns ``encoder`` and closes it.
    """

    def __init__(self, info: EngineInfo, encoder: VisionEncoder) -> None:
        self.info = info
        self.kv_transfer: KvTransfer | None = None
        self.vision = EmbeddingPool(encoder)
        self.grammars: Grammars | None = None
        self.adapters: AdapterEngine | None = None
        self.weights: WeightsEngine | None = None

    def submit(self, request: SequenceRequest) -> None:
        """
        Raises:
            RequestError: always.
        """
        raise RequestError(Code.unsupported, "an encode worker generates nothing; submit to another worker")

    def cancel(self, key: object) -> bool:
        return False

    def has_work(self) -> bool:
        return False

    def step(self) -> StepResult:
        return StepResult([], [], [], [], 0)

    @property
    def blocked(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        cache = self.vision.cache
        return EngineStats(
            running=0,
            waiting=0,
            used_blocks=cache.used_slots,
            cached_blocks=cache.cached_slots,
            free_blocks=cache.free_slots,
        )

    def dump(self, rank: int = 0) -> list[KvEvent]:
        return []

    def memory(self) -> dict[str, Memory]:
        return self.vision.memory()

    def release_pinned(self, key: object) -> bool:
        return False

    def close(self) -> None:
        self.vision.close()
