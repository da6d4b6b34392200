"""Counters, gauges and histograms that carry the labels of their place in a deployment, and the port of their page.

A process has one scope with labels such as its namespace and component, and scopes below it for parts with labels of
their own, such as a data-parallel rank. A metric carries the labels of its scope and of those above it. They are added
when the metrics are read, so that counting costs nothing more. Counters and histograms that one thread writes cost a
sixth of those that all may write.
"""

import itertools
import re
import socket
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from penstock.infra.process.sockets import of_this_machine
from penstock.infra.process.turns import LATE_S, LoopLag
from penstock.schemas.streams import LONGEST_DEADLINE_S

# Buckets that gateways and workers share, so that what they measure can be compared.
FIRST_TOKEN_SECONDS = (
    0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 30, 60, 300, 600, LONGEST_DEADLINE_S,
)  # fmt: skip
TOKEN_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 1.5, 3, 10, 60, 600,
    LONGEST_DEADLINE_S,
)  # fmt: skip
REQUEST_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 1.5, 2.5, 3, 5, 10, 30, 60, 120, 300, 600, 1800, LONGEST_DEADLINE_S)

_METRIC = re.compile(r"[^a-zA-Z0-9_:]")
_LABEL = re.compile(r"[^a-zA-Z0-9_]")
RESERVED = ("le", "quantile")  # Prometheus sets them on buckets and summaries


def metric_name(text: str) -> str:
    """A metric name (``[a-zA-Z_:][a-zA-Z0-9_:]*``): other characters become underscores.

    Raises:
        ValueError: the text is empty.
    """
    return _begun(_METRIC.sub("_", text), text)


def label_name(text: str) -> str:
    """A label name (``[a-zA-Z_][a-zA-Z0-9_]*``): other characters become underscores, leading ones are merged.

    Raises:
        ValueError: the text is empty, or Prometheus sets this label itself.
    """
    name = re.sub(r"^__+", "_", _begun(_LABEL.sub("_", text), text))  # two leading ones are Prometheus' own
    if name in RESERVED:
        raise ValueError(f"the label name {name!r} is set by Prometheus; choose another")
    return name


def _begun(name: str, text: str) -> str:
    if not name:
        raise ValueError(f"{text!r} is not a name: it is empty")
    return f"_{name}" if name[0].isdigit() else name


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


_Made = TypeVar("_Made", bound=Collector)

PREFIX = "penstock"


class MetricConflict(ValueError):
    """A metric or label of this name exists already; the message says where."""


class MetricScope(Collector):
    """Metrics that share labels. ``registry`` has the whole page of the process, whichever scope it is taken from.

    Args:
        labels: automatic ones, of every metric of this scope and of those below it; empty values are left out.
        prefix: of the metrics' names.
    Raises:
        ValueError: a label has no valid name.
    """

    def __init__(self, labels: Mapping[str, str] | None = None, prefix: str = PREFIX) -> None:
        self.prefix = metric_name(prefix)
        self._labels = _valid(labels or {})
        self._inherited: dict[str, str] = {}
        self._own = CollectorRegistry()
        self._constant: dict[str, dict[str, str]] = {}  # by family
        self._metrics: list[Collector] = []
        self._children: list[MetricScope] = []
        self._taken: dict[str, str] = {}  # by family: its definition; shared by all scopes of a process
        self.registry = CollectorRegistry()  # shared as well
        self.registry.register(self)

    @property
    def labels(self) -> dict[str, str]:
        """The automatic labels of this scope's metrics."""
        return {name: value for name, value in (self._inherited | self._labels).items() if value}

    def child(self, prefix: str = "", labels: Mapping[str, str] | None = None) -> "MetricScope":
        """A scope below this one, with a registry of its own.

        Args:
            prefix: added to this scope's prefix.
            labels: added to this scope's labels.
        Raises:
            MetricConflict: this scope or one above it sets such a label.
        """
        child = MetricScope(labels, f"{self.prefix}_{prefix}" if prefix else self.prefix)
        child._inherited = self._inherited | self._labels
        child._taken, child.registry = self._taken, self.registry
        if both := child._labels.keys() & child._inherited.keys():
            raise MetricConflict(f"the label {min(both)!r} is set by the scope above; choose another name")
        self._children.append(child)
        return child

    def remove(self, child: "MetricScope") -> None:
        """Show nothing more of a scope below this one."""
        self._children.remove(child)

    def set_label(self, name: str, value: str) -> None:
        """Set an automatic label that was not known when the scope was made, such as the model.

        Raises:
            ValueError: the scope was not made with this label.
        """
        if name not in self._labels:
            raise ValueError(f"this scope has no label {name!r}; name it when the scope is made")
        self._labels[name] = value
        for child in self._children:
            child._inherit(name, value)

    def _inherit(self, name: str, value: str) -> None:
        self._inherited[name] = value
        for child in self._children:
            child._inherit(name, value)

    def counter(
        self, name: str, about: str, labels: Sequence[str] = (), constant: Mapping[str, str] | None = None
    ) -> Counter:
        """A count that only grows. Its exported name ends in ``_total``.

        Args:
            name: without prefix; characters that Prometheus does not admit become underscores.
            about: one line for the metrics page.
            labels: names, whose values are given with each count.
            constant: labels with one value.
        Raises:
            MetricConflict: the name is taken, or a label is already an automatic or constant one.
        """
        return self._made(
            Counter, name, labels, constant, lambda full, names: Counter(full, about, names, registry=None)
        )

    def gauge(
        self, name: str, about: str, labels: Sequence[str] = (), constant: Mapping[str, str] | None = None
    ) -> Gauge:
        """A value that goes up and down. For arguments and errors see ``counter``."""

        def make(full: str, names: Sequence[str]) -> Gauge:
            return Gauge(full, about, names, registry=None)

        return self._made(Gauge, name, labels, constant, make)

    def histogram(
        self,
        name: str,
        about: str,
        labels: Sequence[str] = (),
        constant: Mapping[str, str] | None = None,
        *,
        buckets: Sequence[float] = Histogram.DEFAULT_BUCKETS,
    ) -> Histogram:
        """A distribution. ``buckets``: upper bounds, ascending. For other arguments and errors see ``counter``."""

        def make(full: str, names: Sequence[str]) -> Histogram:
            return Histogram(full, about, names, buckets=buckets, registry=None)

        return self._made(Histogram, name, labels, constant, make)

    def thread_counter(self, name: str, about: str, labels: Sequence[str] = ()) -> ThreadCounter:
        """As ``counter``, of what only one thread counts, such as the event loop's."""
        return self._made(ThreadCounter, name, labels, None, lambda full, names: ThreadCounter(full, about, names))

    def thread_histogram(self, name: str, about: str, *, buckets: Sequence[float]) -> ThreadHistogram:
        """A distribution that only one thread observes, such as the event loop's. It has no labels of its own.

        Raises:
            MetricConflict: the name is taken.
        """
        return self._made(ThreadHistogram, name, (), None, lambda full, _: ThreadHistogram(full, about, buckets))

    def register(self, collector: Collector) -> None:
        """Add series that others make, such as an engine's own. They get the automatic labels of this scope.

        A label of theirs with the same name is kept as ``exported_NAME``, as Prometheus itself does.
        """
        self._own.register(collector)

    def _made(
        self,
        kind: type[_Made],
        name: str,
        labels: Sequence[str],
        constant: Mapping[str, str] | None,
        make: Callable[[str, Sequence[str]], _Made],
    ) -> _Made:
        full = metric_name(f"{self.prefix}_{name}")
        names = [label_name(each) for each in labels]
        fixed = _valid(constant or {})
        for each in (*names, *fixed):
            if each in self._labels or each in self._inherited:
                raise MetricConflict(f"{full}: the label {each!r} is set automatically; choose another name")
            if (*names, *fixed).count(each) > 1:
                raise MetricConflict(f"{full}: the label {each!r} is named twice")
        metric = make(full, names)
        family = next(iter(metric.collect())).name
        if self._taken.get(family, kind.__name__) != kind.__name__:
            raise MetricConflict(f"{full} exists already as a {self._taken[family].lower()}; choose another name")
        try:
            self._own.register(metric)
        except ValueError:
            raise MetricConflict(f"{full} exists already in this scope; keep one and use it in both places") from None
        self._taken[family] = kind.__name__
        self._constant[family] = fixed
        self._metrics.append(metric)
        return metric

    def metrics(self) -> Iterator[Collector]:
        """The metrics that were made here and below, in their order; not those that others make."""
        yield from self._metrics
        for child in self._children:
            yield from child.metrics()

    def collect(self) -> Iterator[Metric]:
        """Everything of this scope and of those below it, one family a name."""
        families: dict[str, Metric] = {}
        for family in self._families():
            first = families.setdefault(family.name, family)
            if first is not family:
                first.samples.extend(family.samples)
        yield from families.values()

    def _families(self) -> Iterator[Metric]:
        automatic = self.labels
        for family in self._own.collect():
            yield _labelled(family, automatic | self._constant.get(family.name, {}))
        for child in self._children:
            yield from child._families()

    def describe(self) -> Iterable[Metric]:
        """Nothing: more metrics may be added later."""
        return ()


def process_scope(component: str, labels: Mapping[str, str]) -> MetricScope:
    """The topmost scope of a process: a gateway, a router or a worker. It has CPU time, memory and open files too.

    Args:
        labels: of its place, such as ``namespace``, ``process``, ``model`` and ``role``; see ``MetricScope``.
    """
    scope = MetricScope({"component": component, **labels})
    scope.register(ProcessCollector(registry=None))
    return scope


def loop_lag(scope: MetricScope) -> LoopLag:
    """Add a process's measurements to its metrics. Run ``watch`` of the result."""
    about = "longest delay of a due callback by the event loop, in the last 30 to 60 s"
    worst = scope.gauge("loop_lag_seconds", about)
    about = "the same without the time for which the loop's thread waited for a core (Linux)"
    worst_cpu = scope.gauge("loop_lag_cpu_seconds", about)
    about = f"measurements of that delay (ten a second) above {LATE_S * 1e3:g} ms"
    lag = LoopLag(scope.counter("loop_late", about).inc)
    worst.set_function(lambda: lag.worst.value)
    worst_cpu.set_function(lambda: lag.worst_cpu.value)
    return lag


def _valid(labels: Mapping[str, str]) -> dict[str, str]:
    return {label_name(name): value for name, value in labels.items()}


def _labelled(family: Metric, labels: Mapping[str, str]) -> Metric:
    """The family with these labels in each sample; never changes the collector's own samples."""
    metric = Metric(family.name, family.documentation, family.type, family.unit)
    for sample in family.samples:
        own = {(f"exported_{name}" if name in labels else name): value for name, value in sample.labels.items()}
        metric.samples.append(Sample(sample.name, {**labels, **own}, *sample[2:]))
    return metric


class PortTaken(Exception):
    """The page cannot be served; the text says why and what to do."""


def check_port(host: str, port: int) -> None:
    """
    Args:
        port: 0: there is no page.
    Raises:
        PortTaken: another process listens there, or the address is not this machine's.
    """
    if not port:
        return
    host = of_this_machine(host)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the page itself does
        try:
            probe.bind((host, port))
        except OSError as error:
            raise _taken(host, port, error) from None


def serve_page(host: str, port: int, registry: CollectorRegistry) -> None:
    """Serve the page in a thread of its own until the process ends; nothing happens with port 0.

    Raises:
        PortTaken: as ``check_port``.
    """
    if port:
        try:
            start_http_server(port, of_this_machine(host), registry=registry)
        except OSError as error:
            raise _taken(host, port, error) from None


def _taken(host: str, port: int, error: OSError) -> PortTaken:
    return PortTaken(f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another --metrics-port")
