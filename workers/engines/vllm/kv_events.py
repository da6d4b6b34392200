"""From vLLM's KV events to ours: its block hashes become our names, from tokens, parents and cache salts.

Pure. One ``Translator`` per publisher (data-parallel rank). vLLM may keep two copies of a block and tells of each; here
a name goes with the first of them, so that a router knows less than there is, never more. What cannot be named for
certain (a parent that was not told, media, adapters, blocks of another size) is left out.
"""

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import structlog

from schemas import blocks
from schemas.kv import KvEvent
from workers.engines.events.block_tree import Block, Forest

log = structlog.get_logger("engine")

TIERS = {None: 0, "GPU": 0, "CPU": 1, "STORAGE": 2}
_ALL = float("inf")  # window of layers that see everything


class Counts(msgspec.Struct):
    """Since the start. Blocks, except ``malformed`` (events)."""

    stored: int = 0
    removed: int = 0
    partial: int = 0
    filtered: int = 0  # of layers that are not followed
    unnamed: int = 0
    malformed: int = 0


class Translator:
    """Feed it events in their order; it answers with ours.

    Args:
        block_size: tokens per block, ours and the engine's.
        root: of the names of blocks without salt; a salt is the root of its tenant's, in hex.
    """

    def __init__(self, block_size: int, root: bytes) -> None:
        self.counts = Counts()
        self._block_size = block_size
        self._root = root
        self._forest = Forest()
        self._windows: dict[int, float] = {}  # attention window by group of layers
        self._followed: int | None = None
        self._partial: set[Any] = set()
        self._warned = False

    def feed(self, events: Iterable[Any]) -> list[KvEvent]:
        """Translate a batch. Nothing in an event can raise: what is malformed is counted and skipped."""
        for event in events:
            try:
                self._event(event)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
                self.counts.malformed += 1
                if not self._warned:
                    self._warned = True
                    log.warning("kv_event_malformed", error=repr(error))
        return self._forest.take()

    def forget(self) -> list[KvEvent]:
        """KvPayloads were lost: what is known is void."""
        self._partial.clear()
        self._forest.clear()
        return self._forest.take()

    def dump(self) -> list[KvEvent]:
        return self._forest.dump()

    @property
    def names(self) -> int:
        """Blocks on the device that have a name."""
        return self._forest.shown

    def _event(self, event: Mapping[str, Any]) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self._partial.clear()
            self._forest.clear(0)  # the caches of other memory are others'
        elif kind == "BlockStored":
            if self._follows(event):
                self._stored(event)
            else:
                self.counts.filtered += len(event["block_hashes"])
        elif kind == "BlockRemoved":
            if (event.get("group_idx") or 0) == (self._followed or 0):
                self._removed(event)
        else:
            raise ValueError(f"event type {kind!r}")

    def _follows(self, event: Mapping[str, Any]) -> bool:
        """Whether it is of the layers with the largest window, whose blocks decide what can be reused."""
        group = event.get("group_idx") or 0
        window = event.get("kv_cache_spec_sliding_window")
        self._windows.setdefault(group, _ALL if window is None else float(window))
        best = max(self._windows, key=lambda each: (self._windows[each], -each))
        if self._followed is not None and best != self._followed:
            self._partial.clear()
            self._forest.clear()
        self._followed = best
        return group == best

    def _stored(self, event: Mapping[str, Any]) -> None:
        hashes, tokens, size = event["block_hashes"], event["token_ids"], event["block_size"]
        if size != self._block_size or len(tokens) != size * len(hashes):
            self._partial.update(_key(each) for each in hashes)
            self.counts.partial += len(hashes)
            return
        above = event.get("parent_block_hash")
        parent = None if above is None else self._forest.find(_key(above))
        if (above is not None and parent is None) or event.get("lora_name") is not None:
            self.counts.unnamed += len(hashes)
            return
        tier = TIERS[event.get("medium")]
        extras = event.get("extra_keys") or [None] * len(hashes)
        for at, (value, extra) in enumerate(zip(hashes, extras, strict=True)):
            digest = self._name(parent, tokens[at * size : (at + 1) * size], extra)
            if digest is None:
                self.counts.unnamed += len(hashes) - at
                return
            parent = self._forest.store(_key(value), parent, digest, tier)
            self.counts.stored += 1

    def _name(self, parent: Block | None, tokens: list[int], extra: Any) -> bytes | None:
        above = self._root if parent is None else parent.digest
        if extra:
            if parent is not None or len(extra) != 1 or not isinstance(extra[0], str):
                return None
            above = bytes.fromhex(extra[0])
        return blocks.extend(above, array("I", tokens).tobytes())

    def _removed(self, event: Mapping[str, Any]) -> None:
        tier = TIERS[event.get("medium")]
        for value in event["block_hashes"]:
            key = _key(value)
            if key in self._partial:
                self._partial.discard(key)
            else:
                self.counts.removed += self._forest.remove(key, tier)


def _key(value: Any) -> bytes | int:
    """A hash as vLLM tells it: bytes, or 64 bits, which some publishers take for signed."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a block hash is {type(value).__name__}")
    return value & ((1 << 64) - 1)
