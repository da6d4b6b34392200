"""KV events of several publishers of one worker (ranks, an engine and its host cache) as one ordered stream.

Pure. A block is announced while at least one publisher holds it: stored with the first, removed with the last. If the
blocks of each publisher are closed towards the front (parents stored before children and removed after them), so is the
stream. After a loss, device blocks whose parent is unknown are left out.
"""

from collections.abc import Hashable, Iterable

import msgspec

from penstock.schemas.block_hashes import split
from penstock.schemas.kv import Cleared, KvEvent, Removed, Stored
from penstock.workers.engines.events.translator import merge_adjacent

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
