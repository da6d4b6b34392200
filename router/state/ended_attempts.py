"""Which attempts have ended, so that a late message in WORK does not revive them. Pure."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

REMEMBERED = 65_536  # requests
EVERY = 1 << 62  # above every attempt: the request has ended


class EndedAttempts:
    """The highest ended attempt of each request; the requests that ended longest ago are forgotten."""

    def __init__(self) -> None:
        # Oldest first. The first key of a dict is found behind all that were deleted before it: 15 µs at this size.
        self._attempts: OrderedDict[str, int] = OrderedDict()

    def close(self, request: str, attempt: int) -> None:
        """An attempt, and all before it, have ended."""
        self._attempts[request] = attempt
        self._attempts.move_to_end(request)
        if len(self._attempts) > REMEMBERED:
            self._attempts.popitem(last=False)

    def last(self, request: str) -> int:
        """The highest attempt that has ended; -1: none."""
        return self._attempts.get(request, -1)

    def update(self, closed: Iterable[tuple[str, int]]) -> None:
        """Add what ``parts`` yielded."""
        self._attempts.update(closed)

    def parts(self, size: int) -> Iterator[tuple[tuple[str, int], ...]]:
        """All of them, ``size`` at a time. Attempts may end between two parts."""
        requests = list(self._attempts)
        for start in range(0, len(requests), size):
            attempts = ((request, self.last(request)) for request in requests[start : start + size])
            yield tuple((request, attempt) for request, attempt in attempts if attempt >= 0)
