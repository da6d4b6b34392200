"""Counters that follow a total kept elsewhere."""

from prometheus_client import Counter


class Total:
    """A counter that is set to a total of an engine instead of being increased.

    Prometheus takes a counter that falls for a restart, so a smaller total (the engine began anew) counts from zero.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last = 0.0

    def set(self, total: float) -> None:
        """The total since the engine's start, as it is now."""
        grown = total - self._last if total >= self._last else total
        self._last = total
        if grown:
            self._counter.inc(grown)
