"""TensorRT-LLM's own metrics beside ours: its collector's series, and gauges from its iteration statistics."""

from collections.abc import Iterator, Mapping
from typing import Any

import structlog
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.workers.engines.external.metrics import NativeSeries
from penstock.workers.engines.trtllm import stats

log = structlog.get_logger("engine")

PREFIX = "trtllm"


class NativeMetrics(NativeSeries):
    """Register it with the worker's registry.

    Args:
        kind: TensorRT-LLM's MetricsCollector; None: this release has none.
        labels: of its series.
        registry: where the collector registers.
    """

    def __init__(
        self, kind: type[Any] | None, labels: Mapping[str, str], registry: CollectorRegistry = REGISTRY
    ) -> None:
        super().__init__(PREFIX, registry)
        self._latest: Mapping[str, Any] = {}
        self._baseline = (0.0, 0.0)
        self._sums: dict[str, float] = {}
        self._lost = 0
        self._log = self._logger(kind, labels)

    def _logger(self, kind: type[Any] | None, labels: Mapping[str, str]) -> Any:
        if kind is None:
            return None
        try:
            collector = kind(dict(labels))
        except Exception as error:  # for example: another engine of this process has registered the series
            log.warning("native_metrics_off", error=str(error))
            return None
        for name in ("log_request_metrics_dict", "log_metrics_dict"):  # renamed in 1.3
            class_ = getattr(collector, name, None)
            if callable(class_):
                return class_
        log.warning("native_metrics_off", error="its MetricsCollector has no known logging method")
        return None

    def finished(self, metrics: Mapping[str, Any] | None) -> None:
        """A request has ended. ``metrics``: its ``metrics_dict``, empty unless performance metrics were requested."""
        if self._log is None or not metrics:
            return
        try:
            self._log(metrics)
        except Exception as error:
            log.warning("native_metrics_off", error=repr(error))
            self._log = None

    def observe(self, stat: Mapping[str, Any]) -> None:
        """Take in the engine's latest statistic, of one iteration."""
        self._latest = stat
        for name, value in stats.sums(stat):
            self._sums[name] = self._sums.get(name, 0.0) + value

    def lost(self, batches: int) -> None:
        """How many batches of KV events were lost since the start."""
        self._lost = batches

    def warmed_up(self, stat: Mapping[str, Any]) -> None:
        """Mark the end of the warm-up, which does not count towards the hit rate, with its last statistic."""
        reused, missed = (stats.number(stat, "kvCacheStats", key) for key in ("reusedBlocks", "missedBlocks"))
        self._baseline = (reused or 0.0, missed or 0.0)

    def collect(self) -> Iterator[Metric]:
        stat, names = self._latest, set()
        for metric in super().collect():
            names.add(metric.name)
            yield metric
        for name, value in stats.gauges(stat).items():
            if name not in names:
                yield GaugeMetricFamily(name, stats.GAUGES[name][2], value)
        for name, value in self._sums.items():
            if name not in names:
                yield CounterMetricFamily(name, stats.COUNTERS[name][2], value)
        yield CounterMetricFamily(
            "trtllm_kv_event_batches_lost", "batches of KV events that were lost or unreadable", self._lost
        )
        rate = stats.hit_rate(stat, self._baseline)
        if rate is not None and "trtllm_kv_cache_hit_rate" not in names:
            yield GaugeMetricFamily("trtllm_kv_cache_hit_rate", "share of KV blocks found in the cache", rate)
