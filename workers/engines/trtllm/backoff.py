"""How long to wait before looking again at something that was empty: twice as long each time, up to a cap."""


class Backoff:
    """Durations in seconds. No clock."""

    def __init__(self, first: float = 0.001, cap: float = 0.1) -> None:
        if not 0 < first <= cap:
            raise ValueError(f"a back-off starts above 0 and at most at its cap of {cap} s, not at {first}")
        self._first = first
        self._cap = cap
        self._next = first

    def next(self) -> float:
        """The wait after one more empty look."""
        wait, self._next = self._next, min(2 * self._next, self._cap)
        return wait

    def reset(self) -> None:
        """Something was there."""
        self._next = self._first
