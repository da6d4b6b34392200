"""Puts what one publisher sends into its order: gaps are seen and asked for again, repeats are dropped.

Pure. A publisher numbers its messages 0, 1, 2, ... and keeps the latest of them for replay. Live messages come in
order; some may be missing (a subscriber that came late, a queue that overflowed).
"""

from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

WAITING = 10_000  # messages kept while a replay is awaited; beyond, what is missing is given up


class Ready(NamedTuple, Generic[T]):
    """What can be used now. ``lost``: something before the first of ``items`` will never come."""

    items: list[T]
    lost: bool = False


class Order(Generic[T]):
    """Of one publisher."""

    def __init__(self, waiting: int = WAITING) -> None:
        self.expected = 0  # the next that can be used
        self._latest = -1  # of the live ones
        self._waiting: dict[int, T] = {}
        self._most = waiting

    @property
    def missing(self) -> int | None:
        """The number from which a replay is needed; None: nothing is missing."""
        return self.expected if self._waiting else None

    def live(self, number: int, item: T) -> Ready[T]:
        """A message as it was published. A number that is not above the latest is of a publisher that began anew."""
        lost = False
        if number <= self._latest:
            self._waiting.clear()
            self.expected, lost = 0, True
        self._latest = number
        ready = self.replayed(number, item)
        if len(self._waiting) > self._most:
            ready = self.given_up()
        return Ready(ready.items, lost or ready.lost)

    def replayed(self, number: int, item: T) -> Ready[T]:
        """A message that was asked for; it may be one that was known."""
        if number >= self.expected:
            self._waiting[number] = item
        return Ready(self._take())

    def given_up(self) -> Ready[T]:
        """No more will be replayed: what is still missing is lost."""
        if not self._waiting:
            return Ready([])
        items: list[T] = []
        lost = False
        while self._waiting:  # of several gaps, what lies before the last is void as well
            self.expected = min(self._waiting)
            items, lost = self._take(), True
        return Ready(items, lost)

    def _take(self) -> list[T]:
        items = []
        while self.expected in self._waiting:
            items.append(self._waiting.pop(self.expected))
            self.expected += 1
        return items
