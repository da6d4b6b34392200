"""SGLang's own metrics, of this process and of its schedulers, next to the worker's.

SGLang's schedulers write their values to files of prometheus_client's multiprocess mode; its tokenizer manager runs in
this process. Unless that mode is on here too, its values are in the registry of this process alone.

What the ranks' schedulers say of their load (``get_loads``). Pure.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from penstock.workers.engines.external.engine_metrics import MULTIPROCESS

PREFIX = "sglang:"


class SglangSeries(Collector):
    """Register it with the worker's registry.

    Args:
        folder: of the schedulers' files; empty: they write none.
        registry: of this process; None: its values are in the folder, too.
    """

    def __init__(self, folder: str, registry: CollectorRegistry | None = REGISTRY) -> None:
        self._folder = folder
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        sources = [self._registry] if self._registry is not None else []
        if self._folder and os.path.isdir(self._folder):
            source = CollectorRegistry()
            MultiProcessCollector(source, path=self._folder)  # type: ignore[no-untyped-call]
            sources.append(source)
        for source in sources:
            for metric in source.collect():
                if not metric.name.startswith(PREFIX):
                    continue
                if metric.name in families:
                    families[metric.name].samples.extend(metric.samples)
                else:
                    families[metric.name] = metric
        yield from families.values()

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are known only when there are values."""
        return iter(())


def series(before: str | None) -> SglangSeries:
    """After an engine was constructed, which has named its folder in the variable; the variable is restored.

    Args:
        before: the variable's value when this process started.
    """
    folder = os.environ.get(MULTIPROCESS, "")
    if before:
        return SglangSeries(folder, None)
    os.environ.pop(MULTIPROCESS, None)
    return SglangSeries(folder)


class RankLoads:
    """The latest load of each rank. Written in the loop thread, read in the engine thread.

    Attributes:
        used_tokens: held by running requests, by rank.
        running: requests, by rank.
        slots: requests that run at once, by rank.
        preemptions: of ended requests, since start.
    """

    def __init__(self) -> None:
        self.used_tokens: dict[int, int] = {}
        self.running: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        self.preemptions = 0

    def take(self, loads: Iterable[Any]) -> None:
        """Take what ``get_loads`` has returned: an object for each rank."""
        for load in loads:
            rank = int(load.dp_rank)
            self.used_tokens[rank] = int(load.num_used_tokens)
            self.running[rank] = int(load.num_running_reqs)
            self.slots[rank] = int(load.max_running_requests)

    def used_blocks(self, block_size: int) -> int:
        """Blocks that running requests hold, on all ranks."""
        return sum(-(-tokens // block_size) for tokens in list(self.used_tokens.values()))
