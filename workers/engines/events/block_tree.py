"""The blocks of one engine by its own hashes, and the KV events that announce them under our names.

Pure. Announced blocks are closed towards the front, as routers expect: a device block is visible while it and all its
ancestors are in device memory. A block that is stored below a missing parent stays hidden until the parent is stored
again. Blocks in other memory are announced with their ``tier``, without that condition.
"""

from collections.abc import Hashable, Iterator

import msgspec

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
        self._events += (Removed(each.digest) for each in reversed(hidden))

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
