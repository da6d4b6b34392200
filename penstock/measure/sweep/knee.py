"""Finds where a server saturates: the level at which its throughput stops growing, or its tail latency grows sharply.

Two pure functions: which level to measure next, and what the measured levels show.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

_GROWS = 1.1  # from doubling the level; less is no growth
_FULL = 0.95  # share of the best throughput that counts as saturated
_BEYOND = 1.5  # times the knee, that must have been measured to call it one
_TAIL_LEAVES = 3.0  # times the lowest tail of lower levels
_CLOSE = 0.1  # share of a level: no further bisection


class Point(NamedTuple):
    """One measured level.

    Attributes:
        level: concurrency or rate.
        throughput: output tokens per second.
        tail: p99 of TTFT, or of the latency where nothing is streamed, ms.
    """

    level: float
    throughput: float
    tail: float


class Knee(Struct, frozen=True):
    """
    Attributes:
        level: the lowest one with 95 % of the best throughput.
        throughput: at that level; ``best`` is the highest at any level.
        tail_leaves: the lowest level whose tail is three times the lowest before it; None: there is none.
        saturated: half as much load again brought no more throughput; False: it may still grow.
    """

    level: float
    throughput: float
    best: float
    tail: float
    tail_leaves: float | None
    saturated: bool


def find(points: Iterable[Point]) -> Knee | None:
    """Find the knee. None: fewer than two levels have throughput."""
    ordered = [point for point in sorted(points) if point.throughput > 0]
    if len(ordered) < 2:
        return None
    best = max(point.throughput for point in ordered)
    at = _first_full(ordered)
    return Knee(
        ordered[at].level,
        ordered[at].throughput,
        best,
        ordered[at].tail,
        _tail_leaves(ordered),
        ordered[-1].level >= _BEYOND * ordered[at].level,
    )


def _first_full(ordered: Sequence[Point]) -> int:
    best = max(point.throughput for point in ordered)
    return next(at for at, point in enumerate(ordered) if point.throughput >= _FULL * best)


def _tail_leaves(ordered: Sequence[Point]) -> float | None:
    lowest = ordered[0].tail
    for point in ordered[1:]:
        if point.tail > _TAIL_LEAVES * lowest > 0:
            return point.level
        lowest = min(lowest, point.tail)
    return None


def next_level(points: Iterable[Point], highest: int) -> int | None:
    """The concurrency to measure next: doubling while throughput grows, then bisecting; None: the knee is known."""
    ordered = sorted(points)
    if not ordered:
        return 1
    last = ordered[-1]
    grows = len(ordered) < 2 or last.throughput >= _GROWS * ordered[-2].throughput
    if grows:
        return min(highest, int(last.level) * 2) if last.level < highest else None
    at = _first_full(ordered)
    below = int(ordered[at - 1].level) if at else 0
    above = int(ordered[at].level)
    if above - below <= max(1, round(_CLOSE * above)):
        return None
    return (below + above) // 2
