"""Exposes an engine's own Prometheus metrics next to the worker's.

The engine registers with prometheus_client's default registry, possibly in several processes; the worker has another
registry. This collector passes on the series whose names start with the engine's prefix.
"""

import os
from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # to be set before prometheus_client is imported


class NativeSeries(Collector):
    """Register it with the worker's registry.

    Args:
        prefix: of the series.
        registry: of the engine's metrics in this process; not read if this process also writes files.
        folder: with files of the engine's other processes, if it is not that of ``MULTIPROCESS``.
    """

    def __init__(self, prefix: str, registry: CollectorRegistry = REGISTRY, folder: str = "") -> None:
        self._prefix = prefix
        self._registry = registry
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for source in self._sources():
            for metric in source.collect():
                if not metric.name.startswith(self._prefix):
                    continue
                if (family := families.setdefault(metric.name, metric)) is not metric:
                    family.samples.extend(metric.samples)
        yield from families.values()

    def _sources(self) -> Iterator[CollectorRegistry]:
        shared = os.environ.get(MULTIPROCESS)
        if not shared:
            yield self._registry
        if (folder := shared or self._folder) and os.path.isdir(folder):
            source = CollectorRegistry()
            MultiProcessCollector(source, path=folder)  # type: ignore[no-untyped-call]
            yield source

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are known only when there are values."""
        return iter(())
