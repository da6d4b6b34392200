"""The blocks of one engine by the engine's own hashes, and what of them may be told under our names.

Pure. Names that are told are closed towards the front, as routers expect: a block is shown while it and all before it
are in device memory. A block that comes back below a parent that left is hidden until the parent comes back as well.
Blocks in other memory are told with their ``tier``, without that condition.
"""

from collections.abc import Hashable, Iterator

import msgspec

from schemas.kv import Cleared, KvEvent, Removed, Stored


class Block(msgspec.Struct, eq=False):
    """``tiers``: the kinds of memory that it lies in; none: it is here only for its children's sake."""

    key: Hashable
    digest: bytes
    parent: "Block | None"
    tiers: set[int]
    children: "dict[Hashable, Block]"
    shown: bool = False


class Forest:
    """``take`` returns the events of all changes since the last call."""

    def __init__(self) -> None:
        self._blocks: dict[Hashable, Block] = {}
        self._out: list[KvEvent] = []
        self.shown = 0

    def find(self, key: Hashable) -> Block | None:
        return self._blocks.get(key)

    def store(self, key: Hashable, parent: Block | None, digest: bytes, tier: int = 0) -> Block:
        """A block is in this memory, now or already."""
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = Block(key, digest, parent, set(), {})
            if parent is not None:
                parent.children[key] = block
        if tier not in block.tiers:
            block.tiers.add(tier)
            if tier:
                self._out.append(Stored(block.digest, name_of(block.parent), tier=tier))
            else:
                self._show(block)
        return block

    def remove(self, key: Hashable, tier: int = 0) -> bool:
        """It left this memory; False: it was not there."""
        block = self._blocks.get(key)
        if block is None or tier not in block.tiers:
            return False
        self._leave(block, tier)
        self._prune(block)
        return True

    def move(self, block: Block, tier: int) -> None:
        """From wherever it lies to this memory."""
        for before in sorted(block.tiers - {tier}):
            self._leave(block, before)
        self.store(block.key, block.parent, block.digest, tier)

    def _leave(self, block: Block, tier: int) -> None:
        block.tiers.remove(tier)
        if tier:
            self._out.append(Removed(block.digest, tier=tier))
        else:
            self._hide(block)

    def fell(self, key: Hashable) -> None:
        """It is gone, and with it whatever hangs below it: their names can be found no more."""
        first = self._blocks.get(key)
        below = [] if first is None else [first]
        for block in below:
            below += block.children.values()
        for block in reversed(below):
            for tier in sorted(block.tiers):
                self.remove(block.key, tier)

    def clear(self, tier: int | None = None) -> None:
        """Everything is void; with ``tier``, what lies in that memory."""
        if tier is None:
            if any(block.tiers for block in self._blocks.values()):
                self._out.append(Cleared())
            self._blocks.clear()
            self.shown = 0
            return
        for key in reversed([key for key, block in self._blocks.items() if tier in block.tiers]):
            self.remove(key, tier)

    def take(self) -> list[KvEvent]:
        out, self._out = self._out, []
        return joined(out)

    def dump(self) -> list[KvEvent]:
        """All that is told, parents before children."""
        todo = [block for block in self._blocks.values() if block.parent is None]
        out: list[KvEvent] = []
        while todo:
            block = todo.pop()
            todo += block.children.values()
            out += (Stored(block.digest, name_of(block.parent), tier=tier) for tier in _told(block))
        return joined(out)

    def _show(self, block: Block) -> None:
        """Show it and what hangs below it, as far as it is on the device."""
        todo = [block]
        while todo:
            each = todo.pop()
            if each.shown or 0 not in each.tiers or not (each.parent is None or each.parent.shown):
                continue
            each.shown = True
            self.shown += 1
            self._out.append(Stored(each.digest, name_of(each.parent)))
            todo += each.children.values()

    def _hide(self, block: Block) -> None:
        """Neither it nor what hangs below it is of use to a prompt now; children go first."""
        gone, todo = [], [block]
        while todo:
            each = todo.pop()
            if each.shown:
                each.shown = False
                gone.append(each)
                todo += each.children.values()
        self.shown -= len(gone)
        self._out += (Removed(each.digest) for each in reversed(gone))

    def _prune(self, block: Block | None) -> None:
        while block is not None and not block.tiers and not block.children:
            del self._blocks[block.key]
            if block.parent is not None:
                del block.parent.children[block.key]
            block = block.parent


def name_of(block: Block | None) -> bytes | None:
    return None if block is None else block.digest


def _told(block: Block) -> Iterator[int]:
    if block.shown:
        yield 0
    yield from (tier for tier in sorted(block.tiers) if tier)


def joined(events: list[KvEvent]) -> list[KvEvent]:
    """Neighbours that tell of one chain, or that remove, as one event."""
    runs: list[list[KvEvent]] = []
    for event in events:
        if runs and _continues(runs[-1][-1], event):
            runs[-1].append(event)
        else:
            runs.append([event])
    return [run[0] if len(run) == 1 else _as_one(run) for run in runs]


def _continues(last: KvEvent, event: KvEvent) -> bool:
    if isinstance(last, Stored) and isinstance(event, Stored):
        same = (event.tier, event.group) == (last.tier, last.group)
        return same and event.parent == last.digests[-16:]
    if isinstance(last, Removed) and isinstance(event, Removed):
        return (event.tier, event.group) == (last.tier, last.group)
    return False


def _as_one(run: list[KvEvent]) -> KvEvent:
    digests = b"".join(event.digests for event in run if not isinstance(event, Cleared))
    return msgspec.structs.replace(run[0], digests=digests)
