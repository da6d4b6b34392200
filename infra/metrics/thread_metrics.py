"""Counters and histograms that one thread writes: a sixth of the cost of those that all may write."""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class _Count:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add to the count."""
        self.value += amount


class ThreadCounter(Collector):
    """For what happens with every request. Only one thread may count; any may read.

    Args:
        name: the full name, without "_total".
        about: one line for the metrics page.
        labels: names, whose values are given with each count.
    """

    def __init__(self, name: str, about: str, labels: Sequence[str] = ()) -> None:
        self._name = name.removesuffix("_total")
        self._about = about
        self._labelnames = tuple(labels)  # as the library calls them
        self._counts: dict[tuple[str, ...], _Count] = {}
        if not labels:
            self.inc = self.labels().inc

    def labels(self, *values: str) -> _Count:
        """The count of these values, in the order of the names."""
        count = self._counts.get(values)
        if count is None:
            if len(values) != len(self._labelnames):
                raise ValueError(f"{self._name} has the labels {self._labelnames}, not {values}")
            count = self._counts[values] = _Count()
        return count

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._about, labels=self._labelnames)
        for values, count in list(self._counts.items()):
            family.add_metric(values, count.value)
        yield family

    def describe(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self._name, self._about)]


class ThreadHistogram(Collector):
    """For what happens with every token or request. Only one thread may observe; any may read.

    Args:
        name: the full name.
        about: one line for the metrics page.
        buckets: upper bounds, ascending, without infinity.
    """

    def __init__(self, name: str, about: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._about = about
        self._bounds = tuple(map(float, buckets))
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, amount: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._about)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        family.add_metric([], list(zip(names, itertools.accumulate(self._counts), strict=True)), self._sum)
        yield family

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._about)]
