"""Several publishers of KV events of one worker (ranks, an engine and its host cache) as one ordered stream.

Pure. A name is told while any of them holds it, once: stored with the first, removed with the last. Where what each of
them says is closed towards the front (parents before children, children gone before parents), so is the stream; after
a loss, what hangs below a parent on the device that is not known any more is left out.
"""

from collections.abc import Hashable, Iterable

import msgspec

from schemas.blocks import split
from schemas.kv import Cleared, KvEvent, Removed, Stored
from workers.engines.events.block_tree import joined

Key = tuple[bytes, int, int]  # digest, tier, group


class _Held(msgspec.Struct, eq=False):
    parent: bytes | None
    sources: set[Hashable]


class Consolidator:
    """``feed`` returns what is new for readers of the stream."""

    def __init__(self) -> None:
        self._names: dict[Key, _Held] = {}  # in the order of their coming
        self._of: dict[Hashable, dict[Key, None]] = {}

    def feed(self, source: Hashable, events: Iterable[KvEvent]) -> list[KvEvent]:
        """Take what one publisher says, in its order."""
        out: list[KvEvent] = []
        for event in events:
            if isinstance(event, Stored):
                self._stored(source, event, out)
            elif isinstance(event, Removed):
                for digest in split(event.digests):
                    self._removed(source, (digest, event.tier, event.group), out)
            else:
                out += self.drop(source)
        return joined(out)

    def drop(self, source: Hashable) -> list[KvEvent]:
        """A publisher's blocks are all gone, or nothing is known of them any more."""
        mine = self._of.pop(source, {})
        if mine and len(mine) == len(self._names) and all(len(self._names[key].sources) == 1 for key in mine):
            self._names.clear()
            return [Cleared()]
        out: list[KvEvent] = []
        for key in reversed(mine):
            self._release(source, key, out)
        return joined(out)

    def dump(self) -> list[KvEvent]:
        """All names, parents before children."""
        return joined([Stored(key[0], held.parent, tier=key[1], group=key[2]) for key, held in self._names.items()])

    def count(self, tier: int = 0) -> int:
        """Names in this memory."""
        return sum(key[1] == tier for key in self._names)

    def _stored(self, source: Hashable, event: Stored, out: list[KvEvent]) -> None:
        mine = self._of.setdefault(source, {})
        parent = event.parent
        if parent is not None and not event.tier and (parent, 0, event.group) not in mine:
            return
        for digest in split(event.digests):
            key = (digest, event.tier, event.group)
            held = self._names.get(key)
            if held is None:
                held = self._names[key] = _Held(parent, set())
                out.append(Stored(digest, parent, event.group, event.tier))
            held.sources.add(source)
            mine[key] = None
            parent = digest

    def _removed(self, source: Hashable, key: Key, out: list[KvEvent]) -> None:
        mine = self._of.get(source, {})
        if key in mine:
            del mine[key]
            self._release(source, key, out)

    def _release(self, source: Hashable, key: Key, out: list[KvEvent]) -> None:
        held = self._names[key]
        held.sources.discard(source)
        if not held.sources:
            del self._names[key]
            out.append(Removed(key[0], key[2], key[1]))
