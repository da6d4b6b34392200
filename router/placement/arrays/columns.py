"""The columns of ``TargetLoads`` as arrays, so that a decision costs the same few operations for any fleet."""

import numpy as np
from numpy.typing import NDArray

from router.placement.target_loads import BACKLOG, COLUMNS, TargetLoads

_MOST = 2  # of the estimates: tokens, time, most tokens
Rows = NDArray[np.intp]
Column = NDArray[np.float64]


class LoadColumns:
    """A copy of ``loads``, brought up to date when it is read. It has to be the only one: it empties ``changed``.

    Args:
        tokens_per_s: at which estimated backlogs drain.
    """

    def __init__(self, loads: TargetLoads, tokens_per_s: float) -> None:
        self._loads = loads
        self._rate = tokens_per_s
        self._columns: Column = np.zeros((COLUMNS, 8))
        self._estimates: Column = np.zeros((3, 8))

    def read(self, rows: Rows, now_ns: int) -> Column:
        """(COLUMNS, len(rows)), a copy; BACKLOG with the estimates, less what drained since then."""
        loads = self._loads
        for row in loads.changed:
            if row >= self._columns.shape[1]:
                self._grow(row)
            self._columns[:, row] = loads.load(row)
            if row in loads.estimates or self._estimates[_MOST, row]:
                self._estimates[:, row] = loads.estimates.get(row, (0.0, 0, 0))
        loads.changed.clear()
        columns = self._columns.take(rows, axis=1)
        if loads.estimates:
            tokens, at_ns, most = self._estimates[:, rows]
            drained = np.maximum(0.0, now_ns - at_ns) * (self._rate / 1e9)
            columns[BACKLOG] += np.floor(np.minimum(np.maximum(0.0, tokens - drained), most))
        return columns

    def _grow(self, row: int) -> None:
        more = max(row + 1 - self._columns.shape[1], self._columns.shape[1])
        self._columns = np.pad(self._columns, ((0, 0), (0, more)))
        self._estimates = np.pad(self._estimates, ((0, 0), (0, more)))
