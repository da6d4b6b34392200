"""The leaves of a radix tree in the order of their eviction: by age, those of one age by their first keys."""

from collections.abc import Sequence
from heapq import heappop, heappush

NOTHING = -1
_SLACK = 1 << 12  # ages without leaves that are kept beyond as many as have some


class LeafAges:
    def __init__(self) -> None:
        self.by_age: dict[int, dict[int, None]] = {}
        self._ages: list[int] = []  # a heap of those in ``by_age``, and of some that are not any more
        self._queued: set[int] = set()  # the same
        self._victims: list[int] = []  # leaves of this age, the next one last
        self._victims_age = NOTHING

    def add(self, node: int, age: int) -> None:
        leaves = self.by_age.get(age)
        if leaves is not None:
            leaves[node] = None
        else:
            self.by_age[age] = {node: None}
            if age not in self._queued:
                self._queued.add(age)
                heappush(self._ages, age)
                if len(self._ages) > 2 * len(self.by_age) + _SLACK:
                    self._ages = sorted(self.by_age)
                    self._queued = set(self._ages)
        if age <= self._victims_age:
            self._victims_age, self._victims = age, []

    def remove(self, node: int, age: int) -> None:
        leaves = self.by_age[age]
        del leaves[node]
        if not leaves:
            del self.by_age[age]

    def first_key_changed(self, age: int) -> None:
        """A node of this age has another first key now."""
        if age == self._victims_age:
            self._victims = []

    def oldest(self, chunks: Sequence[Sequence[int]]) -> int:
        """The next leaf to evict. NOTHING: there is none.

        Of several of the same age, the one with the largest first key: when a sweep or a snapshot came in between must
        not matter.

        Args:
            chunks: the keys of each node.
        """
        while self._victims and self._victims[-1] not in self.by_age.get(self._victims_age, ()):
            self._victims.pop()
        if not self._victims:
            while self._ages and self._ages[0] not in self.by_age:
                self._queued.remove(heappop(self._ages))
            self._victims_age = self._ages[0] if self._ages else NOTHING
            self._victims = sorted(self.by_age.get(self._victims_age, ()), key=lambda node: chunks[node][0])
        return self._victims[-1] if self._victims else NOTHING
