"""Compares two sweeps level by level, and decides whether differences are more than noise. Pure."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from msgspec import Struct

from penstock.measure.intervals import Interval, paired, unpaired
from penstock.measure.sweep.results import Result, values_of

Verdict = Literal["faster", "slower", "within noise", "unknown"]


class Metric(NamedTuple):
    """A metric to compare. ``better``: 1 if more of it is better, -1 if less is."""

    title: str
    figure: str
    part: str
    better: int


METRICS = (
    Metric("requests/s", "requests_per_s", "", 1),
    Metric("output tokens/s", "output_tokens_per_s", "", 1),
    Metric("tokens/s per user", "tokens_per_s_per_user", "", 1),
    Metric("TTFT mean", "ttft_ms", "mean", -1),
    Metric("TTFT p50", "ttft_ms", "p50", -1),
    Metric("TTFT p99", "ttft_ms", "p99", -1),
    Metric("ITL mean", "itl_ms", "mean", -1),
    Metric("ITL p99", "itl_ms", "p99", -1),
    Metric("latency mean", "latency_ms", "mean", -1),
    Metric("latency p99", "latency_ms", "p99", -1),
)


class Difference(Struct, frozen=True):
    """The difference between B and A in one metric at one level.

    Attributes:
        change: of B against A, as a share; 0.1 is 10 % more.
        pairs: runs of the same number were compared with each other; otherwise all runs of each side.
    """

    level: str
    metric: str
    a: float
    b: float
    runs_a: int
    runs_b: int
    change: Interval
    pairs: bool
    verdict: Verdict


def compare(a: Sequence[Result], b: Sequence[Result], least: float = 0.0) -> list[Difference]:
    """The differences at the common levels, by level and metric.

    Args:
        least: smallest change that counts, as a share, however sure it is.
    """
    others = {result.level.folder: result for result in b}
    return [
        difference
        for result in a
        if (other := others.get(result.level.folder)) is not None
        for metric in METRICS
        if (difference := _difference(result, other, metric, least)) is not None
    ]


def _difference(a: Result, b: Result, metric: Metric, least: float) -> Difference | None:
    ours, theirs = values_of(b, metric.figure, metric.part), values_of(a, metric.figure, metric.part)
    if not ours or not theirs:
        return None
    pairs = can_pair(a, b)
    change = paired(ours, theirs) if pairs else unpaired(ours, theirs)
    return Difference(
        a.level.title,
        metric.title,
        sum(theirs) / len(theirs),
        sum(ours) / len(ours),
        len(theirs),
        len(ours),
        change,
        pairs,
        verdict(change, metric.better, least),
    )


def can_pair(a: Result, b: Result) -> bool:
    """Whether runs with the same number sent the same requests to both."""
    numbers = [[run.number for run in result.complete] for result in (a, b)]
    return numbers[0] == numbers[1] and all(
        getattr(a, name) == getattr(b, name) for name in ("workload", "level", "seed", "trace", "generator")
    )


def verdict(change: Interval, better: int, least: float) -> Verdict:
    """ "unknown" of a single run, which shows no noise, and of a metric that was 0."""
    if not (change.low == change.low and change.low > -1.0):
        return "unknown"
    if change.low <= 0.0 <= change.high or abs(change.mean) < least:
        return "within noise"
    return "faster" if (change.mean > 0) == (better > 0) else "slower"
