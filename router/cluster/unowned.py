"""Unfinished requests of models that another router owns, as they were read from WORK. Pure.

A router that is not the owner of a model decides nothing for it, so it folds of its requests only what it needs to take
over: a message is kept as it came until the request ends. Most end before anybody asks. ``take`` gives what is left, in
the order in which requests came, to be folded as if it were read now, with the time at which it was.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from infra.bus.direct_get import Entry

MOST = 10_000  # messages; one has about 1 kB, and all are folded in 0.3 s, within the lease of who takes over


class Unfolded(NamedTuple):
    entry: Entry
    read_ns: int


class UnownedRequests:
    """``full``: fold a message instead of adding it."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._messages: OrderedDict[str, list[Unfolded]] = OrderedDict()  # by request, oldest first
        self._count = 0

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, request: str) -> bool:
        return request in self._messages

    @property
    def full(self) -> bool:
        return self._count >= self._most

    def add(self, request: str, entry: Entry, read_ns: int) -> None:
        headers_only = msgspec.structs.replace(entry, data=b"")  # messages read from the stream have the whole job
        self._messages.setdefault(request, []).append(Unfolded(headers_only, read_ns))
        self._count += 1

    def end(self, request: str) -> bool:
        """The terminal event of a request was read; False: nothing of it was kept."""
        messages = self._messages.pop(request, None)
        if messages is None:
            return False
        self._count -= len(messages)
        return True

    def take(self) -> Iterator[Unfolded]:
        """Remove and yield all messages, those of one request together, the oldest request first.

        Messages that were not yielded yet stay, so another caller gets them. Those added meanwhile are left for later.
        """
        for _ in range(len(self._messages)):
            if not self._messages:
                return
            _, messages = self._messages.popitem(last=False)
            self._count -= len(messages)
            yield from messages
