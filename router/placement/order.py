"""The order in which held requests are tried. No clock, no tasks.

1. A request is due at its arrival, plus ``DELAY_S`` per token that no target caches, at most ``PATIENCE_S``: short
   prompts first, first come first served among long ones, and nobody waits behind a later arrival for ever.
2. It is due ``URGENT_S`` before its deadline if that comes first.
3. Its class adds a handicap, and its tenant the seconds by which it is ahead of its share.
4. The request that is due first is tried first, then the next, up to ``WINDOW`` requests of a lane.
5. It passes its turn while a better target is full, for at most the time that the better target saves.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

SECOND_NS = 1_000_000_000
HANDICAP_S = (0.0, 5.0, 60.0)  # by rank of the class
URGENT_S = 30.0
DELAY_S = 0.0125
PATIENCE_S = 400.0
SHORTEST_TOKENS = 64
WINDOW = 32


def due_ns(arrived_ns: int, deadline_ns: int, rank: int, uncached_tokens: float, ahead_of_share_s: float = 0.0) -> int:
    """When a request is due; see the module.

    Args:
        rank: of its class; 0 is served first.
        uncached_tokens: at the target that caches most of its prompt.
        ahead_of_share_s: seconds by which its tenant is ahead of its share.
    """
    delay = min(DELAY_S * max(SHORTEST_TOKENS, uncached_tokens), PATIENCE_S)
    due = min(arrived_ns + int(delay * SECOND_NS), deadline_ns - int(URGENT_S * SECOND_NS))
    return due + int((HANDICAP_S[min(rank, len(HANDICAP_S) - 1)] + ahead_of_share_s) * SECOND_NS)


class DueOrder(Generic[T]):
    """Held requests of one lane by due time, then by order of entry."""

    def __init__(self) -> None:
        self._sorted: list[tuple[int, int, str]] = []
        self._entries: dict[str, tuple[tuple[int, int, str], T]] = {}
        self._entered = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, id: str) -> bool:
        return id in self._entries

    def __iter__(self) -> Iterator[T]:
        """In order of entry."""
        return (item for _, item in list(self._entries.values()))

    def get(self, id: str) -> T | None:
        entry = self._entries.get(id)
        return entry[1] if entry is not None else None

    def first(self, count: int) -> list[T]:
        """The requests that are due first."""
        return [self._entries[id][1] for _, _, id in self._sorted[:count]]

    def push(self, id: str, item: T, due: int) -> None:
        """Add a request, which must not be there already."""
        self._entered += 1
        self._insert((due, self._entered, id), item)

    def move(self, id: str, due: int) -> None:
        """Change when a request is due."""
        (old, entered, _), item = self._entries[id]
        if old != due:
            self.remove(id)
            self._insert((due, entered, id), item)

    def remove(self, id: str) -> T | None:
        entry = self._entries.pop(id, None)
        if entry is None:
            return None
        key, item = entry
        del self._sorted[bisect_left(self._sorted, key)]
        return item

    def _insert(self, key: tuple[int, int, str], item: T) -> None:
        insort(self._sorted, key)
        self._entries[key[2]] = key, item
