"""Puts the numbered messages of one publisher in order: gaps are detected for a replay, repeats are dropped.

Pure. A publisher numbers its messages 0, 1, 2, ... and keeps the latest of them for replay. Live messages arrive in
order; some may be missing (the subscriber connected late, or a queue overflowed).
"""

from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

MAX_WAITING = 10_000  # messages kept while a replay is awaited; beyond that, the missing ones are given up


class Ready(NamedTuple, Generic[T]):
    """Messages that are in order now. ``lost``: messages before the first of ``items`` will never arrive."""

    items: list[T]
    lost: bool = False


class ReorderBuffer(Generic[T]):
    """The messages of one publisher.

    Attributes:
        expected: number of the next message in order.
    """

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.expected = 0
        self._latest = -1  # number of the latest live message
        self._waiting: dict[int, T] = {}
        self._max_waiting = max_waiting

    @property
    def missing(self) -> int | None:
        """The number from which a replay is needed; None: nothing is missing."""
        return self.expected if self._waiting else None

    def push_live(self, number: int, item: T) -> Ready[T]:
        """Add a message as it was published. A number not above the latest means that the publisher has restarted."""
        lost = False
        if number <= self._latest:
            self._waiting.clear()
            self.expected, lost = 0, True
        self._latest = number
        ready = self.push_replayed(number, item)
        if len(self._waiting) > self._max_waiting:
            ready = self.give_up()
        return Ready(ready.items, lost or ready.lost)

    def push_replayed(self, number: int, item: T) -> Ready[T]:
        """Add a message of a replay; one that was received before is dropped."""
        if number >= self.expected:
            self._waiting[number] = item
        return Ready(self._take())

    def give_up(self) -> Ready[T]:
        """Stop waiting for a replay: the messages that are still missing are lost."""
        if not self._waiting:
            return Ready([])
        items: list[T] = []
        lost = False
        while self._waiting:  # with several gaps, the messages before the last one are useless too
            self.expected = min(self._waiting)
            items, lost = self._take(), True
        return Ready(items, lost)

    def _take(self) -> list[T]:
        items = []
        while self.expected in self._waiting:
            items.append(self._waiting.pop(self.expected))
            self.expected += 1
        return items
