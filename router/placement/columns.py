"""The columns of ``TargetLoads`` as arrays, so that a decision costs the same few operations for any fleet."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.router.placement.cost import Scalars, target_terms
from penstock.router.state.target_loads import BACKLOG, COLUMNS, TargetLoads

Rows = NDArray[np.intp]
Column = NDArray[np.float64]


class WholeTerms(NamedTuple):
    """What ``TargetTerms`` has for whole requests. ``slope``: all of a token to compute, up to ``PASS_TOKENS``."""

    fixed: Any
    slope: Any
    queued: Any
    read: Any
    room: Any


def whole_terms(at: Any, sequences: Any, ops: Any, prefill_weight: float = 1.0) -> WholeTerms:
    """As ``target_terms``."""
    own = target_terms(at, sequences, ops, prefill_weight)
    return WholeTerms(own.fixed, own.slope + own.held_up + own.queued, own.queued, own.read, own.room)


_TERMS = len(WholeTerms._fields)


class LoadColumns:
    """A copy of ``loads``, brought up to date when it is read. It has to be the only one: it empties ``changed``.

    The terms of requests of one sequence are kept too: few rows change between two decisions.

    Args:
        tokens_per_s: at which estimated backlogs drain.
    """

    def __init__(self, loads: TargetLoads, tokens_per_s: float) -> None:
        self._loads = loads
        self._rate = tokens_per_s
        self._columns: Column = np.zeros((8, COLUMNS))
        self._terms: Column = np.zeros((_TERMS, 8))
        self._estimates: Column = np.zeros((8, 3))  # tokens, when, at most

    def terms(self, rows: Rows, sequences: Any, now_ns: int, prefill_weight: float = 1.0) -> WholeTerms:
        """
        Args:
            rows: of the targets.
            sequences: of a request, or a column of them for several.
        """
        self._update()
        if isinstance(sequences, int) and sequences == 1 and prefill_weight == 1.0 and not self._loads.estimates:
            return WholeTerms(*self._terms.take(rows, axis=1))
        columns = self._columns.take(rows, axis=0).T
        if self._loads.estimates:
            columns[BACKLOG] += self._estimated(rows, now_ns)
        return whole_terms(columns, sequences, np, prefill_weight)

    def loads(self, rows: Rows, now_ns: int) -> Sequence[Sequence[Any]]:
        """All columns of some targets; BACKLOG with its estimate."""
        values: Sequence[Sequence[Any]] = self._loads.loads(rows.tolist())
        if self._loads.estimates:
            values = [list(each) for each in values]
            for each, estimated in zip(values, self._estimated(rows, now_ns).tolist(), strict=True):
                each[BACKLOG] += int(estimated)  # type: ignore[index]
        return values

    def _estimated(self, rows: Rows, now_ns: int) -> Column:
        """Prompt tokens that are estimated to be left, less what drained since then."""
        tokens, at_ns, most = self._estimates.take(rows, axis=0).T
        drained = np.maximum(0.0, now_ns - at_ns) * self._rate / 1e9
        left: Column = np.floor(np.minimum(np.maximum(0.0, tokens - drained), most))
        return left

    def _update(self) -> None:
        loads = self._loads
        for row in loads.changed:
            if row >= len(self._columns):
                self._grow(row)
            self._columns[row] = values = loads.load(row)
            self._terms[:, row] = whole_terms(values, 1, Scalars)
            if row in loads.estimates or self._estimates[row, -1]:
                self._estimates[row] = loads.estimates.get(row, (0.0, 0, 0))
        loads.changed.clear()

    def _grow(self, row: int) -> None:
        more = max(row + 1 - len(self._columns), len(self._columns))
        self._columns = np.pad(self._columns, ((0, more), (0, 0)))
        self._terms = np.pad(self._terms, ((0, 0), (0, more)))
        self._estimates = np.pad(self._estimates, ((0, more), (0, 0)))
