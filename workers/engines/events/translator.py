"""Translates KV events of other packages' engines, and makes one ordered stream of those of several publishers. Pure.

There is one ``EventTranslator`` per publisher (data-parallel rank): block hashes become our block names, from tokens
and parents. ``PublishedFormat`` reads vLLM's and SGLang's events (TensorRT-LLM's: ``trtllm/kv_events``). Where a block
belongs to a tenant, vLLM names the salt among the ``extra_keys`` of a prompt's first block, SGLang as ``cache_salt`` of
every block. With a draft head, SGLang's blocks have pairs of a token and the next one, and the hashes of vLLM 0.33
cover the tokens and media after a block that the head reads; blocks with one name can then differ in what follows, and
the name is removed with the last of them. vLLM may keep two copies of a block and reports each; here the block is
removed with the first of them, so that a router sees fewer blocks than there are, never more. A block that
cannot be named for certain (unknown parent, another block size, media without a digest of ours) is left out.

Announced blocks are closed towards the front, as routers expect: a device block is visible while it and all its
ancestors are in device memory. A block that is stored below a missing parent stays hidden until the parent is stored
again. Blocks in other memory are announced with their ``tier``, without that condition.

``Consolidator`` announces a block of several publishers (ranks, an engine and its host cache) while at least one holds
it: stored with the first, removed with the last. After a loss, device blocks whose parent is unknown are left out.
"""

from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import msgspec
import structlog

from penstock.schemas import block_hashes
from penstock.schemas.block_hashes import split
from penstock.schemas.kv import Cleared, KvEvent, Removed, Stored


class Block(msgspec.Struct, eq=False):
    """``tiers``: the kinds of memory that hold it; empty: it is kept only as the parent of its children."""

    key: Hashable
    digest: bytes
    parent: "Block | None"
    tiers: set[int]
    children: "dict[Hashable, Block]"
    visible: bool = False


class BlockTree:
    """``take_events`` returns the events of all changes since the last call.

    Attributes:
        visible: number of blocks that are announced as in device memory.
    """

    def __init__(self) -> None:
        self._blocks: dict[Hashable, Block] = {}
        self._events: list[KvEvent] = []
        self._copies: dict[bytes, int] = {}  # visible blocks by digest
        self.visible = 0

    def find(self, key: Hashable) -> Block | None:
        return self._blocks.get(key)

    def store(self, key: Hashable, parent: Block | None, digest: bytes, tier: int = 0) -> Block:
        """Add a block to a tier of memory; no change if it is there already."""
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = Block(key, digest, parent, set(), {})
            if parent is not None:
                parent.children[key] = block
        if tier not in block.tiers:
            block.tiers.add(tier)
            if tier:
                self._events.append(Stored(block.digest, _digest_of(block.parent), tier=tier))
            else:
                self._show(block)
        return block

    def remove(self, key: Hashable, tier: int = 0) -> bool:
        """Remove a block from a tier of memory; False: it was not there."""
        block = self._blocks.get(key)
        if block is None or tier not in block.tiers:
            return False
        self._remove_from(block, tier)
        self._prune(block)
        return True

    def move(self, block: Block, tier: int) -> None:
        """Move a block from all other tiers to this one."""
        for before in sorted(block.tiers - {tier}):
            self._remove_from(block, before)
        self.store(block.key, block.parent, block.digest, tier)

    def _remove_from(self, block: Block, tier: int) -> None:
        block.tiers.remove(tier)
        if tier:
            self._events.append(Removed(block.digest, tier=tier))
        else:
            self._hide(block)

    def remove_subtree(self, key: Hashable) -> None:
        """Remove a block and all its descendants, which cannot be found without it."""
        root = self._blocks.get(key)
        subtree = [] if root is None else [root]
        for block in subtree:
            subtree += block.children.values()
        for block in reversed(subtree):
            for tier in sorted(block.tiers):
                self.remove(block.key, tier)

    def clear(self, tier: int | None = None) -> None:
        """Remove all blocks; with ``tier``, those of that memory."""
        if tier is None:
            if any(block.tiers for block in self._blocks.values()):
                self._events.append(Cleared())
            self._blocks.clear()
            self._copies.clear()
            self.visible = 0
            return
        for key in reversed([key for key, block in self._blocks.items() if tier in block.tiers]):
            self.remove(key, tier)

    def take_events(self) -> list[KvEvent]:
        events, self._events = self._events, []
        return merge_adjacent(events)

    def dump(self) -> list[KvEvent]:
        """All announced blocks, parents before children."""
        todo = [block for block in self._blocks.values() if block.parent is None]
        out: list[KvEvent] = []
        while todo:
            block = todo.pop()
            todo += block.children.values()
            out += (Stored(block.digest, _digest_of(block.parent), tier=tier) for tier in _announced_tiers(block))
        return merge_adjacent(out)

    def _show(self, block: Block) -> None:
        """Announce a block and its descendants, as far as they are in device memory."""
        todo = [block]
        while todo:
            each = todo.pop()
            if each.visible or 0 not in each.tiers or not (each.parent is None or each.parent.visible):
                continue
            each.visible = True
            self.visible += 1
            copies = self._copies[each.digest] = self._copies.get(each.digest, 0) + 1
            if copies == 1:
                self._events.append(Stored(each.digest, _digest_of(each.parent)))
            todo += each.children.values()

    def _hide(self, block: Block) -> None:
        """Withdraw a block and its descendants, children first: no prompt can reuse them now."""
        hidden, todo = [], [block]
        while todo:
            each = todo.pop()
            if each.visible:
                each.visible = False
                hidden.append(each)
                todo += each.children.values()
        self.visible -= len(hidden)
        for each in reversed(hidden):
            self._copies[each.digest] -= 1
            if not self._copies[each.digest]:
                del self._copies[each.digest]
                self._events.append(Removed(each.digest))

    def _prune(self, block: Block | None) -> None:
        while block is not None and not block.tiers and not block.children:
            del self._blocks[block.key]
            if block.parent is not None:
                del block.parent.children[block.key]
            block = block.parent


def _digest_of(block: Block | None) -> bytes | None:
    return None if block is None else block.digest


def _announced_tiers(block: Block) -> Iterator[int]:
    if block.visible:
        yield 0
    yield from (tier for tier in sorted(block.tiers) if tier)


def merge_adjacent(events: list[KvEvent]) -> list[KvEvent]:
    """Merge neighbouring events that continue one chain, or that both remove, into one."""
    runs: list[list[KvEvent]] = []
    for event in events:
        if runs and _continues(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    return [run[0] if len(run) == 1 else _merged(run) for run in runs]


def _continues(last: KvEvent, event: KvEvent) -> bool:
    if isinstance(last, Stored) and isinstance(event, Stored):
        same = (event.tier, event.group) == (last.tier, last.group)
        return same and event.parent == last.digests[-16:]
    if isinstance(last, Removed) and isinstance(event, Removed):
        return (event.tier, event.group) == (last.tier, last.group)
    return False


def _merged(run: list[KvEvent]) -> KvEvent:
    digests = b"".join(event.digests for event in run if not isinstance(event, Cleared))
    return msgspec.structs.replace(run[0], digests=digests)


log = structlog.get_logger("engine")

TIERS = {"": 0, "GPU": 0, "CPU": 1, "STORAGE": 2}  # of vLLM
TIERS |= {"CPU_PINNED": 1, "DISK": 2, "EXTERNAL": 2}  # of SGLang
_MEDIUM = 64  # characters of a digest
_ALL = float("inf")  # window of layers with full attention
_FULL = (None, "full_attention", "mla_attention", "sink_full_attention")  # kinds of layers that have it


class TranslatorCounts(msgspec.Struct):
    """Totals of blocks since the start, except ``malformed`` (events) and ``lost`` (batches)."""

    partial: int = 0
    filtered: int = 0  # of layers that are not followed
    unnamed: int = 0
    malformed: int = 0
    lost: int = 0


class EventFormat(Protocol):
    """One publisher's events in an engine's format."""

    def apply(self, event: Any, blocks: "EventTranslator") -> None:
        """Apply an event to the publisher's blocks; raises an error if the event is malformed."""

    def lost(self) -> None:
        """Some events before the next one were lost."""


class EventTranslator:
    """Feed it the engine's events in order; it returns ours.

    Attributes:
        tree: the blocks that have names.
    """

    def __init__(self, form: EventFormat) -> None:
        self.counts = TranslatorCounts()
        self.tree = BlockTree()
        self._form = form
        self._warned = False

    def feed(self, events: Iterable[Any]) -> list[KvEvent]:
        """Translate a batch. A malformed event never raises: it is counted and skipped."""
        for event in events:
            try:
                self._form.apply(event, self)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
                self.counts.malformed += 1
                if not self._warned:
                    self._warned = True
                    log.warning("kv_event_malformed", error=repr(error))
        return self.tree.take_events()

    def forget(self) -> list[KvEvent]:
        """Drop all blocks, since events were lost."""
        self.counts.lost += 1
        self._form.lost()
        self.clear()
        return self.tree.take_events()

    def emptied(self) -> list[KvEvent]:
        """Drop all blocks, since the cache was emptied."""
        self.clear()
        return self.tree.take_events()

    def clear(self) -> None:
        self.tree.clear()

    def dump(self) -> list[KvEvent]:
        """All announced blocks, parents before children."""
        return self.tree.dump()

    @property
    def names(self) -> int:
        """Number of named blocks in device memory."""
        return self.tree.visible


class PublishedFormat:
    """Implements ``EventFormat`` for what vLLM and SGLang publish.

    Args:
        block_size: tokens per block, ours and the engine's.
        root: parent of the first block's name for prompts without a salt; a salt is another root, in hex.
    """

    def __init__(self, block_size: int, root: bytes) -> None:
        self._block_size = block_size
        self._root = root
        self._windows: dict[int, float] = {}  # attention window by group of layers
        self._followed: int | None = None

    def lost(self) -> None: ...

    def apply(self, event: Mapping[str, Any], blocks: EventTranslator) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            blocks.tree.clear(0)  # caches in other memory are not cleared with it
        elif event.get("locality") not in (None, "LOCAL") or _medium_of(event) not in TIERS:  # not this worker's memory
            blocks.counts.filtered += len(event["block_hashes"])
        elif kind == "BlockStored":
            if self._follows(event, blocks):
                self._stored(event, blocks)
            else:
                blocks.counts.filtered += len(event["block_hashes"])
        elif kind == "BlockRemoved":
            if (event.get("group_idx") or 0) == (self._followed or 0):
                for key in event["block_hashes"]:
                    blocks.tree.remove(key_of(key), TIERS[_medium_of(event)])
        else:
            raise ValueError(f"event type {kind!r}")

    def _follows(self, event: Mapping[str, Any], blocks: EventTranslator) -> bool:
        """Whether it belongs to the layers with the largest window, whose blocks decide what can be reused.

        Layers with a state instead of attention have none.
        """
        group = event.get("group_idx") or 0
        if not event["token_ids"]:
            return group == (self._followed or 0)
        window = event.get("kv_cache_spec_sliding_window")
        full = _ALL if event.get("kv_cache_spec_kind") in _FULL else 0.0
        self._windows.setdefault(group, full if window is None else float(window))
        best = max(self._windows, key=lambda each: (self._windows[each], -each))
        if self._followed is not None and best != self._followed:
            blocks.clear()
        self._followed = best
        return group == best

    def _stored(self, event: Mapping[str, Any], blocks: EventTranslator) -> None:
        hashes, tokens, size = event["block_hashes"], event["token_ids"], event["block_size"]
        if not tokens:  # vLLM offloads a block, which has its name if it was stored before
            for copy in map(blocks.tree.find, map(key_of, hashes)):
                if copy is None:
                    blocks.counts.unnamed += 1
                else:
                    blocks.tree.store(copy.key, copy.parent, copy.digest, TIERS[_medium_of(event)])
            return
        if not isinstance(tokens[0], int):
            tokens = [first for first, _ in tokens]
        if size != self._block_size or len(tokens) != size * len(hashes):
            blocks.counts.partial += len(hashes)
            return
        above = event.get("parent_block_hash")
        parent = None if above is None else blocks.tree.find(key_of(above))
        adapter = event.get("lora_name")
        if above is not None and parent is None:
            blocks.counts.unnamed += len(hashes)
            return
        tier = TIERS[_medium_of(event)]
        extras = event.get("extra_keys") or [None] * len(hashes)
        salt = event.get("cache_salt")
        if salt is not None and parent is None:  # the names below it have it in their root
            extras = [(salt,), *extras[1:]]
        if adapter is not None:  # which the root of the names has in it; it comes as the salt of the first block
            extras = [tuple(each for each in extra or () if each != adapter) for extra in extras]
            if parent is None and not any(isinstance(each, str) for each in extras[0]):
                blocks.counts.unnamed += len(hashes)
                return
        for at, (value, extra) in enumerate(zip(hashes, extras, strict=True)):
            digest = self._name(parent, tokens[at * size : (at + 1) * size], extra)
            if digest is None:
                blocks.counts.unnamed += len(hashes) - at
                return
            parent = blocks.tree.store(key_of(value), parent, digest, tier)

    def _name(self, parent: Block | None, tokens: list[int], extra: Any) -> bytes | None:
        above = self._root if parent is None else parent.digest
        salts = [each for each in extra or () if isinstance(each, str)]
        media = [each for each in extra or () if not isinstance(each, str)]
        if len(salts) > (parent is None) or not all(_is_medium(each) for each in media):
            return None
        if salts:
            above = bytes.fromhex(salts[0])
        within = b"".join(bytes.fromhex(digest) for digest, start in media if start < self._block_size)
        return block_hashes.extend(above, array("I", tokens).tobytes(), within)


def _medium_of(event: Mapping[str, Any]) -> str:
    return (event.get("medium") or "").upper()


def _is_medium(key: Any) -> bool:
    """Whether it is (digest of a medium in hexadecimal, where it begins, in tokens from the block's first one)."""
    return isinstance(key, list | tuple) and len(key) == 2 and isinstance(key[0], str) and len(key[0]) == _MEDIUM


def key_of(value: Any) -> bytes | int:
    """A block hash: bytes, or a 64-bit integer that some publishers send as signed."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a block hash is {type(value).__name__}, not bytes or int")
    return value & ((1 << 64) - 1)


Key = tuple[bytes, int, int]  # digest, tier, group


class _Block(msgspec.Struct, eq=False):
    parent: bytes | None
    sources: set[Hashable]


class Consolidator:
    """``feed`` and ``drop`` return the changes of the stream."""

    def __init__(self) -> None:
        self._blocks: dict[Key, _Block] = {}  # in the order in which they were stored
        self._by_source: dict[Hashable, dict[Key, None]] = {}

    def feed(self, source: Hashable, events: Iterable[KvEvent]) -> list[KvEvent]:
        """Apply one publisher's events, in its order."""
        out: list[KvEvent] = []
        for event in events:
            if isinstance(event, Stored):
                self._store(source, event, out)
            elif isinstance(event, Removed):
                for digest in split(event.digests):
                    self._remove(source, (digest, event.tier, event.group), out)
            else:
                out += self.drop(source)
        return merge_adjacent(out)

    def drop(self, source: Hashable) -> list[KvEvent]:
        """Forget a publisher's blocks: they are gone, or no longer known."""
        own = self._by_source.pop(source, {})
        if own and len(own) == len(self._blocks) and all(len(self._blocks[key].sources) == 1 for key in own):
            self._blocks.clear()
            return [Cleared()]
        out: list[KvEvent] = []
        for key in reversed(own):
            self._release(source, key, out)
        return merge_adjacent(out)

    def dump(self) -> list[KvEvent]:
        """All blocks, parents before children."""
        return merge_adjacent(
            [Stored(key[0], block.parent, tier=key[1], group=key[2]) for key, block in self._blocks.items()]
        )

    def count(self, tier: int = 0) -> int:
        """Number of blocks in a tier of memory."""
        return sum(key[1] == tier for key in self._blocks)

    def _store(self, source: Hashable, event: Stored, out: list[KvEvent]) -> None:
        own = self._by_source.setdefault(source, {})
        parent = event.parent
        if parent is not None and not event.tier and (parent, 0, event.group) not in own:
            return
        for digest in split(event.digests):
            key = (digest, event.tier, event.group)
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = _Block(parent, set())
                out.append(Stored(digest, parent, event.group, event.tier))
            block.sources.add(source)
            own[key] = None
            parent = digest

    def _remove(self, source: Hashable, key: Key, out: list[KvEvent]) -> None:
        own = self._by_source.get(source, {})
        if key in own:
            del own[key]
            self._release(source, key, out)

    def _release(self, source: Hashable, key: Key, out: list[KvEvent]) -> None:
        block = self._blocks[key]
        block.sources.discard(source)
        if not block.sources:
            del self._blocks[key]
            out.append(Removed(key[0], key[2], key[1]))
