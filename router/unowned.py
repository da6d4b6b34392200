"""Unfinished requests of models that another router owns, as they were read from WORK. Pure.

A router that is not the owner of a model decides nothing for it, so it folds of its requests only what it needs to take
over: a message is kept as it came until the request ends. Most end before anybody asks. ``take`` gives what is left, in
the order in which it came, to be folded as if it were read now, with the time at which it was.
"""

from collections.abc import Iterator
from typing import NamedTuple

from infra.bus.direct_get import Entry

MOST = 20_000  # messages; one has about 1 kB


class Unfolded(NamedTuple):
    entry: Entry
    read_ns: int


class UnownedRequests:
    """``full``: fold a message instead of adding it."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._messages: dict[str, list[Unfolded]] = {}  # by request, oldest first
        self._count = 0

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, request: str) -> bool:
        return request in self._messages

    @property
    def full(self) -> bool:
        return self._count >= self._most

    def add(self, request: str, entry: Entry, read_ns: int) -> None:
        self._messages.setdefault(request, []).append(Unfolded(entry, read_ns))
        self._count += 1

    def end(self, request: str) -> bool:
        """The terminal event of a request was read; False: nothing of it was kept."""
        messages = self._messages.pop(request, None)
        if messages is None:
            return False
        self._count -= len(messages)
        return True

    def take(self) -> Iterator[Unfolded]:
        """Remove and yield all messages, oldest first; what comes meanwhile is left for the next time."""
        found = sorted((each for messages in self._messages.values() for each in messages), key=_sequence)
        self._messages, self._count = {}, 0
        yield from found


def _sequence(unfolded: Unfolded) -> int:
    return unfolded.entry.seq
