"""Pareto fronts of points, and how far one front lies above another. Pure."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Line = Sequence[tuple[float, float]]  # x ascending, y descending


class Gain(NamedTuple):
    """The heights of two fronts at ``x``."""

    x: float
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def front(points: Iterable[T], goals: Callable[[T], tuple[float, float]]) -> list[T]:
    """The points that no other one dominates, the first goal ascending (and so the second descending).

    A point dominates another if it is at least as good in both goals and better in one. Of equal points the first
    is kept.

    Args:
        goals: both to be maximised; negate what should be small.
    """
    kept: list[T] = []
    best: float | None = None
    for point in sorted(points, key=goals, reverse=True):
        second = goals(point)[1]
        if best is None or second > best:
            kept.append(point)
            best = second
    return kept[::-1]


def at(line: Line, x: float) -> float | None:
    """The height of a front at ``x``, linear between its points; None: ``x`` is beyond its last point.

    Left of the first point the front is as high as there: reaching a larger ``x`` implies reaching a smaller one.
    """
    if not line or x > line[-1][0]:
        return None
    if x <= line[0][0]:
        return line[0][1]
    for (left, high), (right, low) in pairwise(line):
        if x <= right:
            share = (x - left) / (right - left)
            return high + share * (low - high)
    raise AssertionError("x lies between the first and the last point")


def gain_at(ours: Line, theirs: Line, x: float) -> Gain | None:
    """The gain at ``x``; None: one of the fronts does not reach so far."""
    mine, other = at(ours, x), at(theirs, x)
    return Gain(x, mine, other) if mine is not None and other else None


def largest_gain(ours: Line, theirs: Line) -> Gain | None:
    """Where the first front is highest in proportion to the second, in the range that both reach; None: one is empty.

    Between two corners of the lines their ratio is monotonic, so that its maximum is at a corner of either.
    """
    gains = (gain_at(ours, theirs, x) for x in sorted({x for x, _ in (*ours, *theirs)}))
    return max((gain for gain in gains if gain), key=lambda gain: gain.ratio, default=None)
