"""From TensorRT-LLM's KV-cache events to ours: its opaque hashes become our block names, from tokens and parents.

Pure: no engine, no clock, no thread. One ``Translator`` per attention-DP rank (see ``by_rank``), whose names are the
rank's own; fed with several, a name is ours while any of them holds it. What cannot be named for certain (a parent that
was lost, tokens of which two tenants have a copy, media of unknown content) is left out together with what hangs below
it: a router then knows less than there is, never more.

Names that we publish are closed towards the front, as routers expect: a block is shown while it and all before it are
in device memory. Blocks in host memory are shown with ``tier`` 1.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import structlog

from schemas import blocks
from schemas.kv import KvEvent, Removed, Stored
from workers.engines.events.block_tree import Block, Forest, joined
from workers.engines.events.consolidator import Consolidator

log = structlog.get_logger("engine")

REMEMBERED = 16_384  # first blocks of prompts, and media; about 8 MB


class Counts(msgspec.Struct):
    """Since the start. Blocks, except ``gaps`` (times that events were lost) and ``malformed`` (events)."""

    stored: int = 0
    removed: int = 0
    partial: int = 0
    filtered: int = 0  # events of other attention windows
    orphans: int = 0  # unknown parent
    ambiguous: int = 0  # no or several prompts begin so
    gaps: int = 0
    malformed: int = 0


class _Rank(msgspec.Struct, eq=False):
    number: int
    forest: Forest
    partial: set[int]
    created: set[int]  # windows
    expected: int | None = None  # the next event_id


def signed(value: int) -> int:
    """An unsigned 64-bit hash as a signed one, as consumers of int64 want it."""
    return value - (1 << 64) if value >= 1 << 63 else value


def unsigned(value: int) -> int:
    return value & ((1 << 64) - 1)


class Roots:
    """Which root of names a prompt's first block belongs to; events do not say. Least recently used go first."""

    def __init__(self, block_size: int, default: bytes, remembered: int = REMEMBERED) -> None:
        self._block_size = block_size
        self._default = default
        self._remembered = remembered
        self._first: OrderedDict[bytes, set[bytes]] = OrderedDict()
        self._others = False  # some root that is not the default was seen
        self._media: OrderedDict[bytes, None] = OrderedDict()

    def learn(self, prompt: Seq[int], root: bytes, media: Iterable[bytes] = ()) -> None:
        """A sequence with this prompt may leave blocks in the cache."""
        self._others = self._others or root != self._default
        for digest in media:
            self._media[digest] = None
            self._media.move_to_end(digest)
        while len(self._media) > self._remembered:
            self._media.popitem(last=False)
        if len(prompt) < self._block_size:
            return
        tokens = pack(prompt[: self._block_size])
        self._first.setdefault(tokens, set()).add(root)
        self._first.move_to_end(tokens)
        while len(self._first) > self._remembered:
            self._first.popitem(last=False)

    def of(self, tokens: bytes) -> bytes | None:
        """The root of a first block; None: there is none for certain."""
        if not self._others:
            return self._default
        found = self._first.get(tokens, ())
        return next(iter(found)) if len(found) == 1 else None

    def knows(self, media: bytes) -> bool:
        return media in self._media


class Translator:
    """Feed it events in their order; it answers with ours.

    Args:
        block_size: tokens per block, ours and the engine's.
        roots: shared with whoever submits sequences.
    """

    def __init__(self, block_size: int, roots: Roots) -> None:
        self.counts = Counts()
        self.window: int | None = None  # the largest known
        self._block_size = block_size
        self._roots = roots
        self._ranks: dict[int, _Rank] = {}
        self._names = Consolidator()
        self._warned: set[str] = set()

    # --- in ---

    def feed(self, events: Iterable[Mapping[str, Any]]) -> list[KvEvent]:
        """Translate a batch. Nothing in an event can raise: what is malformed is counted and skipped."""
        out: list[KvEvent] = []
        for event in events:
            try:
                self._event(event)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                self.counts.malformed += 1
                self._once("kv_event_malformed", error=repr(error))
            for rank in self._ranks.values():
                out += self._names.feed(rank.number, rank.forest.take())
        for told in out:
            if isinstance(told, Stored) and not told.tier:
                self.counts.stored += len(told.digests) // blocks.DIGEST_BYTES
            elif isinstance(told, Removed) and not told.tier:
                self.counts.removed += len(told.digests) // blocks.DIGEST_BYTES
        return joined(out)

    def _event(self, event: Mapping[str, Any]) -> None:
        rank = self._rank(int(event.get("attention_dp_rank") or 0))
        self._check_sequence(rank, int(event["event_id"]))
        data, window = event["data"], event.get("window_size")
        kind = data["type"]
        if kind == "created":
            self._created(rank, window)
            return
        if window is not None and self.window is not None and window != self.window:
            self.counts.filtered += 1
            return
        if kind == "stored":
            self._stored(rank, data)
        elif kind == "removed":
            for value in data["block_hashes"]:
                self._removed(rank, unsigned(int(value)))
        elif kind == "updated":
            self._updated(rank, data)
        else:
            raise ValueError(f"event type {kind!r}")

    def _rank(self, number: int) -> _Rank:
        rank = self._ranks.get(number)
        if rank is None:
            rank = self._ranks[number] = _Rank(number, Forest(), set(), set())
        return rank

    def _check_sequence(self, rank: _Rank, event_id: int) -> None:
        """Ids count every event of a rank, also of windows that are not ours: so this comes before any filter."""
        if rank.expected is not None and event_id != rank.expected:
            self.counts.gaps += 1
            log.warning(
                "kv_events_lost",
                expected=rank.expected,
                got=event_id,
                action="forgetting this worker's blocks; raise kv_cache_config.event_buffer_max_size",
            )
            self._forget(rank)
        rank.expected = event_id + 1

    def _created(self, rank: _Rank, window: Any) -> None:
        """A cache was made: at the start, one event per attention window. The largest window is the one to follow."""
        size = int(window) if window is not None else 0
        if size in rank.created:  # made anew
            self._forget(rank)
            rank.created.clear()
        rank.created.add(size)
        if size and (self.window is None or size > self.window):
            if self.window is not None:
                for other in self._ranks.values():
                    self._forget(other)
            self.window = size

    # --- blocks ---

    def _stored(self, rank: _Rank, data: Mapping[str, Any]) -> None:
        above = data.get("parent_hash")
        parent: Block | None = None
        if above is not None:
            parent = rank.forest.find(unsigned(int(above)))
            if parent is None:
                self.counts.orphans += len(data["blocks"])
                return
        for block in data["blocks"]:
            value = unsigned(int(block["block_hash"]))
            tokens = block["tokens"]
            if len(tokens) < self._block_size:
                rank.partial.add(value)
                self.counts.partial += 1
                return  # whatever followed it would have no name either
            if len(tokens) > self._block_size:
                raise ValueError(f"a block of {len(tokens)} tokens where blocks have {self._block_size}")
            known = rank.forest.find(value)
            if known is None:
                digest = self._name(parent, tokens, block.get("mm_keys") or ())
                if digest is None:
                    self.counts.ambiguous += 1
                    return
                known = rank.forest.store(value, parent, digest, int(block.get("cache_level") or 0))
            parent = known

    def _name(self, parent: Block | None, tokens: Seq[Any], media: Seq[Any]) -> bytes | None:
        ids = [token["token_id"] if isinstance(token, Mapping) else token for token in tokens]
        strange = any(isinstance(token, Mapping) and token.get("token_extra_id") for token in tokens)
        packed = pack(ids)
        above = self._roots.of(packed) if parent is None else parent.digest
        if above is None or (strange and not media):
            return None
        extra = b""
        for key in media:
            digest = bytes.fromhex(key["hash"])
            if not self._roots.knows(digest):
                return None
            extra += digest
        return blocks.extend(above, packed, extra)

    def _removed(self, rank: _Rank, value: int) -> None:
        if value in rank.partial:
            rank.partial.discard(value)
            return
        rank.forest.fell(value)

    def _updated(self, rank: _Rank, data: Mapping[str, Any]) -> None:
        """A block went to another memory, or its priority changed (which is nobody's business)."""
        change = data.get("cache_level")
        block = rank.forest.find(unsigned(int(data["block_hash"])))
        if block is None or not isinstance(change, Mapping) or change.get("new_value") is None:
            return
        rank.forest.move(block, int(change["new_value"]))

    def _forget(self, rank: _Rank) -> None:
        """All that is known of a rank is void."""
        rank.forest.clear()
        rank.partial.clear()

    # --- out ---

    @property
    def names(self) -> int:
        """Blocks on the device that have a name, each counted once."""
        return self._names.count()

    def dump(self) -> list[KvEvent]:
        """All names, parents before children."""
        return self._names.dump()

    def _once(self, event: str, **fields: object) -> None:
        if event not in self._warned:
            self._warned.add(event)
            log.warning(event, **fields)


def by_rank(events: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """Events apart, in their order; those that name no rank, or none that is a number, are rank 0's."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        rank = event.get("attention_dp_rank") if isinstance(event, Mapping) else None
        found.setdefault(rank if isinstance(rank, int) and rank > 0 else 0, []).append(event)
    return found


def pack(tokens: Seq[int]) -> bytes:
    """
    Raises:
        OverflowError: a token id does not fit 32 bits.
    """
    return array("I", tokens).tobytes()
