"""vLLM's own metrics beside ours, and the statistics that we keep of its scheduler.

It registers with prometheus_client's default registry, in several processes if there are several; ours is another
registry, so this is a collector that hands the ``vllm:`` series of that one on, and no others.
"""

import os
from collections.abc import Iterator
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

PREFIX = "vllm:"
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # to be set before prometheus_client is imported


class NativeMetrics(Collector):
    """Register it with the worker's registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        source: CollectorRegistry = self._registry
        if os.environ.get(MULTIPROCESS):
            source = CollectorRegistry()
            MultiProcessCollector(source)  # type: ignore[no-untyped-call]
        yield from (metric for metric in source.collect() if metric.name.startswith(PREFIX))

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are known only when there are values."""
        return iter(())


class Scheduler:
    """What the scheduler of each rank last said. Written in the loop's thread, read in the engine's."""

    def __init__(self) -> None:
        self.usage: dict[int, float] = {}  # share of the pool that running requests hold, by rank
        self.preemptions = 0

    def factory(self, config: object, rank: int = 0) -> "StatLogger":
        """For ``stat_loggers`` of AsyncLLM."""
        return StatLogger(self, rank)

    @property
    def used(self) -> float:
        """Share of all pools."""
        return sum(self.usage.values()) / len(self.usage) if self.usage else 0.0


class StatLogger:
    """One rank's, with the methods of vLLM's ``StatLoggerBase``, whose arguments may grow."""

    def __init__(self, scheduler: Scheduler, rank: int) -> None:
        self._scheduler = scheduler
        self._rank = rank

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *more: Any, **others: Any) -> None:
        usage = getattr(scheduler_stats, "kv_cache_usage", None)
        if usage is not None:
            self._scheduler.usage[self._rank] = float(usage)
        self._scheduler.preemptions += int(getattr(iteration_stats, "num_preempted_reqs", 0) or 0)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def log(self) -> None:
        """Nothing to say."""

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:
        """It never sleeps here."""
