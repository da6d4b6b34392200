"""The KV blocks of a simulated engine: a prefix cache with LRU eviction of blocks that no sequence uses.

A block is named by a key, an integer that stands for its whole prefix. Two sequences that compute the same block at the
same time hold two copies of it; a hit uses the older one. A copy is its key where it is the first one, and a negative
number otherwise.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

StoredRun = tuple[list[int], int | None]  # keys, each the child of the one before; parent of the first, None: the root


class BlockCache:
    """
    Attributes:
        active: blocks in use by sequences, partly filled ones included.
        free: blocks that hold nothing.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = self.free = capacity
        self.active = 0
        self._uses: dict[int, int] = {}  # copy -> sequences that use it
        self._idle: OrderedDict[int, None] = OrderedDict()  # copies that are not in use, least recently used first
        self._copies: dict[int, list[int]] = {}  # of keys that have, or had, more than one
        self._key_of: dict[int, int] = {}  # of negative copies
        self._stored: list[StoredRun] = []
        self._removed: list[int] = []

    def __contains__(self, key: int) -> bool:
        return key in self._uses or key in self._idle or key in self._copies

    def match(self, keys: Iterable[int]) -> tuple[int, int]:
        """The number of leading keys held, and how many of these blocks are in use."""
        uses, idle, copies = self._uses, self._idle, self._copies
        held = active = 0
        for key in keys:
            if key in uses:
                active += 1
            elif key not in idle:
                if key not in copies:
                    break
                active += copies[key][0] in uses
            held += 1
        return held, active

    def take(self, prefix: Sequence[int], fresh: int) -> list[int] | None:
        """Use the blocks of ``prefix``, which are held, and ``fresh`` empty ones.

        Returns: the copies of ``prefix``; None: there is no room, and nothing has changed.
        """
        uses, idle = self._uses, self._idle
        copies = [self._copies[key][0] if key in self._copies else key for key in prefix]
        evict = fresh - self.free
        if evict > 0 and evict > len(idle) - sum(1 for copy in copies if copy in idle):
            return None
        for copy in copies:
            if copy in uses:
                uses[copy] += 1
            else:
                del idle[copy]
                uses[copy] = 1
                self.active += 1
        if evict > 0:
            self._evict(evict)
        self.free -= fresh
        self.active += fresh
        return copies

    def publish(self, keys: Iterable[int], after: Sequence[int] = ()) -> list[int]:
        """Give keys to blocks of ``take`` that are full now, and return their copies.

        Args:
            after: copies of the blocks in front of them.
        """
        uses = self._uses
        parent = self._key_of.get(after[-1], after[-1]) if after else None
        run: list[int] = []
        published = []
        for key in keys:
            copy = key
            if key in self:
                copy = self._duplicate(key)
                if run:
                    self._stored.append((run, parent))
                    run = []
                parent = key
            else:
                run.append(key)
            uses[copy] = 1
            published.append(copy)
        if run:
            self._stored.append((run, parent))
        return published

    def release(self, copies: list[int], private: int) -> None:
        """Release the blocks of a sequence. ``private`` blocks, which have no key, are free at once.

        The last blocks come first in the order of eviction, so leaves go before their parents.
        """
        uses, idle = self._uses, self._idle
        freed = private
        for copy in reversed(copies):
            left = uses[copy] - 1
            if left:
                uses[copy] = left
            else:
                del uses[copy]
                idle[copy] = None
                freed += 1
        self.active -= freed
        self.free += private

    def drain(self) -> tuple[list[StoredRun], list[int]]:
        """The keys stored and removed since the last call. A key that was both counts by its present state."""
        stored, removed = self._stored, self._removed
        if stored:
            self._stored = []
        if removed:
            self._removed = []
        if stored and removed:
            again = {key for key in removed if key in self}
            lost = set(removed) - again
            if not all(lost.isdisjoint(keys) for keys, _ in stored):
                stored = [(kept, parent) for keys, parent in stored if (kept := [k for k in keys if k not in lost])]
            if again:
                removed = [key for key in removed if key not in again]
        return stored, removed

    def _duplicate(self, key: int) -> int:
        copy = -1 - len(self._key_of)
        while copy in self._key_of:
            copy -= 1
        self._key_of[copy] = key
        self._copies.setdefault(key, [key]).append(copy)
        return copy

    def _evict(self, count: int) -> None:
        idle, copies, removed = self._idle, self._copies, self._removed
        for _ in range(count):
            copy, _none = idle.popitem(last=False)
            key = self._key_of.pop(copy) if copy < 0 else copy
            if key not in copies:
                removed.append(key)
                continue
            left = copies[key]
            left.remove(copy)
            if not left:
                del copies[key]
                removed.append(key)
            elif left == [key]:
                del copies[key]
        self.free += count
