"""The KV blocks of a simulated engine: a prefix cache with LRU eviction of blocks that no sequence uses.

A block is named by a key, an integer that stands for its whole prefix. Two sequences that compute the same block at the
same time hold two copies of it; a hit uses the older one. A copy is its key where it is the first one, and a negative
number otherwise.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

StoredRun = tuple[list[int], int | None]  # keys, each the child of the one before; parent of the first, None: the root
LowerChanges = tuple[list[StoredRun], list[int]]  # what a tier, with those before it, stored and removed


class BlockCache:
    """
    Args:
        lower: blocks of the tiers behind it, host memory first. What is evicted goes there, and from there to the next.
            It stays when it comes back.

    Attributes:
        active: blocks in use by sequences, partly filled ones included.
        free: blocks that hold nothing.
    """

    def __init__(self, capacity: int, lower: Sequence[int] = ()) -> None:
        self.capacity = self.free = capacity
        self.active = 0
        self._uses: dict[int, int] = {}  # copy -> sequences that use it
        self._idle: OrderedDict[int, None] = OrderedDict()  # copies that are not in use, least recently used first
        self._copies: dict[int, list[int]] = {}  # of keys that have, or had, more than one
        self._key_of: dict[int, int] = {}  # of negative copies
        self._stored: list[StoredRun] = []
        self._removed: list[int] = []
        self._lower = [(size, OrderedDict[int, None]()) for size in lower if size]
        self._lower_removed: list[list[int]] = [[] for _ in self._lower]  # that may have left a tier and those before

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

    def match_lower(self, keys: Sequence[int]) -> list[int]:
        """How many of these keys, after those that ``match`` found, are to be brought back from each lower tier."""
        found = [0] * len(self._lower)
        for key in keys:
            at = next((number for number, (_, held) in enumerate(self._lower) if key in held), None)
            if at is None:
                break
            found[at] += 1
        return found

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

    def drain_lower(self, stored: Sequence[StoredRun]) -> list[LowerChanges]:
        """As ``drain``, for each lower tier with all before it.

        Args:
            stored: of ``drain``: blocks come to lower tiers from there only.
        """
        drained = []
        for number, removed in enumerate(self._lower_removed):
            tiers = [held for _, held in self._lower[: number + 1]]
            gone = [key for key in dict.fromkeys(removed) if key not in self and all(key not in held for held in tiers)]
            drained.append((list(stored), gone))
            removed.clear()
        return drained

    def _demote(self, key: int) -> None:
        """A block left the device."""
        for number, (size, held) in enumerate(self._lower):
            held[key] = None
            held.move_to_end(key)
            if len(held) <= size:
                return
            key, _none = held.popitem(last=False)
            for tier in range(number, len(self._lower)):
                self._lower_removed[tier].append(key)

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
                self._demote(key)
                continue
            left = copies[key]
            left.remove(copy)
            if not left:
                del copies[key]
                removed.append(key)
                self._demote(key)
            elif left == [key]:
                del copies[key]
        self.free += count
