"""How long to wait before polling an empty queue again: twice as long each time, up to a cap."""


class Backoff:
    """Durations are in seconds. Pure: it does not wait itself."""

    def __init__(self, first: float = 0.001, cap: float = 0.1) -> None:
        if not 0 < first <= cap:
            raise ValueError(f"the first wait must be above 0 and at most the cap of {cap} s, not {first}")
        self._first = first
        self._cap = cap
        self._next = first

    def next(self) -> float:
        """The wait after one more empty poll."""
        wait, self._next = self._next, min(2 * self._next, self._cap)
        return wait

    def reset(self) -> None:
        """Start again with the first wait: the queue had items."""
        self._next = self._first
