"""Which attempts have ended, so that a late message in WORK does not revive them. Pure."""

from collections.abc import Iterable, Iterator

REMEMBERED = 65_536  # requests
EVERY = 1 << 62  # above every attempt: the request has ended


class EndedAttempts:
    """The highest ended attempt of each request; the requests that ended longest ago are forgotten."""

    def __init__(self) -> None:
        self._attempts: dict[str, int] = {}  # oldest first

    def close(self, request: str, attempt: int) -> None:
        """An attempt, and all before it, have ended."""
        self._attempts.pop(request, None)
        self._attempts[request] = attempt
        if len(self._attempts) > REMEMBERED:
            del self._attempts[next(iter(self._attempts))]

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
