"""Translates TensorRT-LLM's KV-cache events: its opaque hashes become our block names, from tokens and parents.

Pure: no engine, no clock, no thread. There is one ``TrtllmEventTranslator`` per attention-DP rank (see ``by_rank``);
fed with the events of several ranks, it announces a block while any of them holds it. A block that cannot be named for
certain (its parent was lost, two tenants have a copy of its tokens, or its media are unknown) is left out with all its
descendants: a router then knows of fewer blocks than there are, never of more.

Announced blocks are closed towards the front, as routers expect: a block is visible while it and all its ancestors are
in device memory. Blocks in host memory have ``tier`` 1.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import structlog

from penstock.schemas import block_hashes
from penstock.schemas.kv import KvEvent, Removed, Stored
from penstock.workers.engines.events.translator import Block, BlockTree, Consolidator, merge_adjacent

log = structlog.get_logger("engine")

MAX_REMEMBERED = 16_384  # first blocks of prompts, and media; about 8 MB


class TrtllmEventCounts(msgspec.Struct):
    """Totals since the start. They count blocks, except ``gaps``, ``malformed`` and ``lost``."""

    stored: int = 0
    removed: int = 0
    partial: int = 0
    filtered: int = 0  # events of other attention windows
    orphans: int = 0  # unknown parent
    ambiguous: int = 0  # no prompt, or prompts of several roots, begin with these tokens
    gaps: int = 0  # losses of events
    malformed: int = 0  # events
    lost: int = 0  # batches that never came, or could not be read


class _Rank(msgspec.Struct, eq=False):
    number: int
    tree: BlockTree
    partial: set[int]
    created: set[int]  # attention windows with a cache
    expected: int | None = None  # the next event_id


def unsigned(value: int) -> int:
    return value & ((1 << 64) - 1)


class Roots:
    """The root of the block names of recent prompts, by their first block: events do not contain it.

    Least recently used prompts are forgotten first.
    """

    def __init__(self, block_size: int, default: bytes, remembered: int = MAX_REMEMBERED) -> None:
        self._block_size = block_size
        self._default = default
        self._remembered = remembered
        self._first: OrderedDict[bytes, set[bytes]] = OrderedDict()
        self._others = False  # a prompt with another root than the default was seen
        self._media: OrderedDict[bytes, None] = OrderedDict()

    def learn(self, prompt: Seq[int], root: bytes, media: Iterable[bytes] = ()) -> None:
        """Note a prompt whose blocks may enter the cache."""
        self._others = self._others or root != self._default
        for digest in media:
            self._media[digest] = None
            self._media.move_to_end(digest)
        while len(self._media) > self._remembered:
            self._media.popitem(last=False)
        if len(prompt) < self._block_size:
            return
        tokens = pack(prompt[: self._block_size])
        roots = self._first.setdefault(tokens, set())
        if len(roots) < 2:  # of which there may be any number, and two are as ambiguous
            roots.add(root)
        self._first.move_to_end(tokens)
        while len(self._first) > self._remembered:
            self._first.popitem(last=False)

    def of(self, tokens: bytes) -> bytes | None:
        """The root of a first block; None: unknown or ambiguous."""
        if not self._others:
            return self._default
        roots = self._first.get(tokens, ())
        return next(iter(roots)) if len(roots) == 1 else None

    def knows(self, media: bytes) -> bool:
        return media in self._media


class TrtllmEventTranslator:
    """Feed it the engine's events in order; it returns ours.

    Args:
        block_size: tokens per block, ours and the engine's.
        roots: updated with each submitted sequence.

    Attributes:
        window: the largest attention window known, in tokens; only its events are followed.
    """

    def __init__(self, block_size: int, roots: Roots) -> None:
        self.counts = TrtllmEventCounts()
        self.window: int | None = None
        self._block_size = block_size
        self._roots = roots
        self._ranks: dict[int, _Rank] = {}
        self._names = Consolidator()
        self._warned: set[str] = set()

    # --- events ---

    def feed(self, events: Iterable[Mapping[str, Any]]) -> list[KvEvent]:
        """Translate a batch. A malformed event never raises: it is counted and skipped."""
        out: list[KvEvent] = []
        for event in events:
            try:
                self._event(event)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                self.counts.malformed += 1
                self._warn_once("kv_event_malformed", error=repr(error))
            for rank in self._ranks.values():
                out += self._names.feed(rank.number, rank.tree.take_events())
        for translated in out:
            if isinstance(translated, Stored) and not translated.tier:
                self.counts.stored += len(translated.digests) // block_hashes.DIGEST_BYTES
            elif isinstance(translated, Removed) and not translated.tier:
                self.counts.removed += len(translated.digests) // block_hashes.DIGEST_BYTES
        return merge_adjacent(out)

    def forget(self) -> list[KvEvent]:
        """Drop all blocks: a batch of events was lost, and nobody can say which."""
        self.counts.lost += 1
        out: list[KvEvent] = []
        for rank in self._ranks.values():
            self._forget(rank)
            rank.expected = None
            out += self._names.feed(rank.number, rank.tree.take_events())
        return merge_adjacent(out)

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
            rank = self._ranks[number] = _Rank(number, BlockTree(), set(), set())
        return rank

    def _check_sequence(self, rank: _Rank, event_id: int) -> None:
        """Detect lost events. Ids count all events of a rank, of all windows, so check before any filter."""
        if rank.expected is not None and event_id != rank.expected:
            self.counts.gaps += 1
            self.counts.lost += 1
            log.warning(
                "kv_events_lost",
                expected=rank.expected,
                got=event_id,
                action="forgetting this worker's blocks; raise kv_cache_config.event_buffer_max_size",
            )
            self._forget(rank)
        rank.expected = event_id + 1

    def _created(self, rank: _Rank, window: Any) -> None:
        """A cache was created: at the start, one event per attention window. The largest window is followed."""
        size = int(window) if window is not None else 0
        if size in rank.created:  # it was created again
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
            parent = rank.tree.find(unsigned(int(above)))
            if parent is None:
                self.counts.orphans += len(data["blocks"])
                return
        for block in data["blocks"]:
            value = unsigned(int(block["block_hash"]))
            tokens = block["tokens"]
            if len(tokens) < self._block_size:
                rank.partial.add(value)
                self.counts.partial += 1
                return  # blocks after it could not be named either
            if len(tokens) > self._block_size:
                raise ValueError(f"a block has {len(tokens)} tokens, expected {self._block_size}")
            node = rank.tree.find(value)
            if node is None:
                digest = self._name(parent, tokens, block.get("mm_keys") or ())
                if digest is None:
                    self.counts.ambiguous += 1
                    return
                node = rank.tree.store(value, parent, digest, int(block.get("cache_level") or 0))
            parent = node

    def _name(self, parent: Block | None, tokens: Seq[Any], media: Seq[Any]) -> bytes | None:
        ids = [token["token_id"] if isinstance(token, Mapping) else token for token in tokens]
        has_extra_ids = any(isinstance(token, Mapping) and token.get("token_extra_id") for token in tokens)
        packed = pack(ids)
        above = self._roots.of(packed) if parent is None else parent.digest
        if above is None or (has_extra_ids and not media):
            return None
        extra = b""
        for key in media:
            digest = bytes.fromhex(key["hash"])
            if not self._roots.knows(digest):
                return None
            extra += digest
        return block_hashes.extend(above, packed, extra)

    def _removed(self, rank: _Rank, value: int) -> None:
        if value in rank.partial:
            rank.partial.discard(value)
            return
        rank.tree.remove_subtree(value)

    def _updated(self, rank: _Rank, data: Mapping[str, Any]) -> None:
        """A block moved to another memory, or its priority changed (ignored)."""
        change = data.get("cache_level")
        block = rank.tree.find(unsigned(int(data["block_hash"])))
        if block is None or not isinstance(change, Mapping) or change.get("new_value") is None:
            return
        rank.tree.move(block, int(change["new_value"]))

    def _forget(self, rank: _Rank) -> None:
        """Drop all that is known of a rank."""
        rank.tree.clear()
        rank.partial.clear()

    # --- state ---

    @property
    def names(self) -> int:
        """Number of named blocks in device memory, each counted once."""
        return self._names.count()

    def dump(self) -> list[KvEvent]:
        """All announced blocks, parents before children."""
        return self._names.dump()

    def _warn_once(self, event: str, **fields: object) -> None:
        if event not in self._warned:
            self._warned.add(event)
            log.warning(event, **fields)


def by_rank(events: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """Events by rank, in order; those without a valid rank are rank 0's."""
    events_of: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        rank = event.get("attention_dp_rank") if isinstance(event, Mapping) else None
        events_of.setdefault(rank if isinstance(rank, int) and rank > 0 else 0, []).append(event)
    return events_of


def pack(tokens: Seq[int]) -> bytes:
    """
    Raises:
        OverflowError: a token id does not fit 32 bits.
    """
    return array("I", tokens).tobytes()
