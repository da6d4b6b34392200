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
        registry: where the engine registers.
    """

    def __init__(self, prefix: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._prefix = prefix
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        source: CollectorRegistry = self._registry
        if os.environ.get(MULTIPROCESS):
            source = CollectorRegistry()
            MultiProcessCollector(source)  # type: ignore[no-untyped-call]
        yield from (metric for metric in source.collect() if metric.name.startswith(self._prefix))

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are known only when there are values."""
        return iter(())
