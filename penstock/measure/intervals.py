"""How much larger one measurement is than another, with 95 % confidence intervals over repeated runs. Pure."""

import math
import statistics
from collections.abc import Sequence

from msgspec import Struct

# Two-sided 95 % quantiles of Student's t by degrees of freedom; the last one holds beyond.
_T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12)
_T95_BEYOND = 1.96


class Interval(Struct, frozen=True):
    """A mean with the bounds of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """By what share ``ours`` is larger than ``theirs``, over runs with the same seeds.

    The interval is Student's over the paired differences of logarithms. With one seed it is unbounded.
    """
    if any(value <= 0 for value in (*ours, *theirs)):
        return Interval(math.nan, math.nan, math.nan)
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return Interval(math.expm1(mean), -1.0, math.inf)
    return _interval(mean, statistics.stdev(logs) / math.sqrt(len(logs)), len(logs) - 1)


def unpaired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """The same for independent runs: Welch's interval for the difference of the mean logarithms."""
    if any(value <= 0 for value in (*ours, *theirs)) or not ours or not theirs:
        return Interval(math.nan, math.nan, math.nan)
    a, b = [math.log(value) for value in ours], [math.log(value) for value in theirs]
    mean = statistics.fmean(a) - statistics.fmean(b)
    if len(a) < 2 or len(b) < 2:
        return Interval(math.expm1(mean), -1.0, math.inf)
    parts = [statistics.variance(each) / len(each) for each in (a, b)]
    if not sum(parts):
        return _interval(mean, 0.0, 1)
    freedom = sum(parts) ** 2 / sum(part**2 / (len(each) - 1) for part, each in zip(parts, (a, b), strict=True))
    return _interval(mean, math.sqrt(sum(parts)), int(freedom))


def _interval(mean: float, error: float, freedom: int) -> Interval:
    """Convert a mean of logarithms and its margin into shares."""
    at = max(1, freedom) - 1
    half = (_T95[at] if at < len(_T95) else _T95_BEYOND) * error
    return Interval(math.expm1(mean), math.expm1(mean - half), math.expm1(mean + half))
