"""TensorRT-LLM's own metrics beside ours: its collector's series, and gauges from its iteration statistics.

Its times count from an epoch of its own, so only differences are meaningful; 0 means that something did not happen.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import structlog
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.workers.engines.external.engine_metrics import NativeSeries

# Gauges for Prometheus: name -> (section of the statistics, key, what it is).
GAUGES: Mapping[str, tuple[str, str, str]] = {
    "trtllm_num_active_requests": ("", "numActiveRequests", "requests in the engine"),
    "trtllm_num_queued_requests": ("", "numQueuedRequests", "requests that wait in the engine"),
    "trtllm_iteration_latency_ms": ("", "iterLatencyMS", "time of the last iteration"),
    "trtllm_gpu_memory_used_bytes": ("", "gpuMemUsage", "GPU memory that the engine uses"),
    "trtllm_kv_cache_max_blocks": ("kvCacheStats", "maxNumBlocks", "KV blocks in the pool"),
    "trtllm_kv_cache_used_blocks": ("kvCacheStats", "usedNumBlocks", "KV blocks of running requests"),
    "trtllm_kv_cache_free_blocks": ("kvCacheStats", "freeNumBlocks", "KV blocks that are free or reusable"),
    "trtllm_kv_cache_reused_blocks": ("kvCacheStats", "reusedBlocks", "KV blocks found in the cache, since start"),
    "trtllm_kv_cache_missed_blocks": ("kvCacheStats", "missedBlocks", "KV blocks not found, since start"),
    "trtllm_context_requests": (
        "inflightBatchingStats",
        "numContextRequests",
        "requests in the prefill phase",
    ),
    "trtllm_generation_requests": (
        "inflightBatchingStats",
        "numGenRequests",
        "requests in the decode phase",
    ),
    "trtllm_paused_requests": ("inflightBatchingStats", "numPausedRequests", "paused requests, without KV blocks"),
    "trtllm_context_tokens": ("inflightBatchingStats", "numCtxTokens", "prompt tokens in the last iteration"),
    "trtllm_draft_tokens": ("specDecodingStats", "numDraftTokens", "draft tokens proposed in the last iteration"),
    "trtllm_accepted_tokens": ("specDecodingStats", "numAcceptedTokens", "draft tokens accepted in the last iteration"),
    "trtllm_acceptance_length": ("specDecodingStats", "acceptanceLength", "tokens per request and iteration"),
}


# Counters: the sums of the values of all statistics.
COUNTERS: Mapping[str, tuple[str, str, str]] = {
    "trtllm_spec_draft_tokens": ("specDecodingStats", "numDraftTokens", "draft tokens proposed, since start"),
    "trtllm_spec_accepted_tokens": ("specDecodingStats", "numAcceptedTokens", "draft tokens accepted, since start"),
}


class PoolCounts(NamedTuple):
    """Numbers of blocks in the KV pool."""

    total: int
    used: int  # by running requests
    free: int  # empty, or with reusable content


def number(stat: Mapping[str, Any], section: str, key: str) -> float | None:
    """One value of a statistic; None: it is missing."""
    inner: Any = stat.get(section) if section else stat
    value = inner.get(key) if isinstance(inner, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def pool_counts(stat: Mapping[str, Any]) -> PoolCounts | None:
    """The pool according to a statistic; None: it does not say."""
    total = number(stat, "kvCacheStats", "maxNumBlocks")
    if total is None:
        return None
    used = number(stat, "kvCacheStats", "usedNumBlocks")
    free = number(stat, "kvCacheStats", "freeNumBlocks")
    if used is None:
        used = total - free if free is not None else 0.0
    return PoolCounts(int(total), int(used), int(total - used if free is None else free))


def gauges(stat: Mapping[str, Any]) -> dict[str, float]:
    """The values of ``GAUGES`` in a statistic."""
    values = {name: number(stat, section, key) for name, (section, key, _) in GAUGES.items()}
    return {name: value for name, value in values.items() if value is not None}


def sums(stat: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The increments of ``COUNTERS`` in a statistic."""
    for name, (section, key, _) in COUNTERS.items():
        value = number(stat, section, key)
        if value is not None and value > 0:  # a counter never falls; NaN is not above 0
            yield name, value


def hit_rate(stat: Mapping[str, Any], baseline: tuple[float, float]) -> float | None:
    """Share of blocks found in the cache since ``baseline``; 1.2.1 counts its own warm-up requests as misses.

    Args:
        baseline: (reused, missed) blocks at the end of the warm-up.
    """
    reused, missed = (number(stat, "kvCacheStats", key) for key in ("reusedBlocks", "missedBlocks"))
    if reused is None or missed is None:
        return None
    hits, lost = max(0.0, reused - baseline[0]), max(0.0, missed - baseline[1])
    return hits / (hits + lost) if hits + lost else None


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
        for name, value in sums(stat):
            self._sums[name] = self._sums.get(name, 0.0) + value

    def lost(self, batches: int) -> None:
        """How many batches of KV events were lost since the start."""
        self._lost = batches

    def warmed_up(self, stat: Mapping[str, Any]) -> None:
        """Mark the end of the warm-up, which does not count towards the hit rate, with its last statistic."""
        reused, missed = (number(stat, "kvCacheStats", key) for key in ("reusedBlocks", "missedBlocks"))
        self._baseline = (reused or 0.0, missed or 0.0)

    def collect(self) -> Iterator[Metric]:
        stat, names = self._latest, set()
        for metric in super().collect():
            names.add(metric.name)
            yield metric
        for name, value in gauges(stat).items():
            if name not in names:
                yield GaugeMetricFamily(name, GAUGES[name][2], value)
        for name, value in self._sums.items():
            if name not in names:
                yield CounterMetricFamily(name, COUNTERS[name][2], value)
        yield CounterMetricFamily(
            "trtllm_kv_event_batches_lost", "batches of KV events that were lost or unreadable", self._lost
        )
        rate = hit_rate(stat, self._baseline)
        if rate is not None and "trtllm_kv_cache_hit_rate" not in names:
            yield GaugeMetricFamily("trtllm_kv_cache_hit_rate", "share of KV blocks found in the cache", rate)


# our name: its start and end in ``timing_metrics``
_SPANS = {
    "queue_s": ("arrival_time", "first_scheduled_time"),
    "prefill_s": ("first_scheduled_time", "first_token_time"),
    "decode_s": ("first_token_time", "last_token_time"),
    "ttft_s": ("arrival_time", "first_token_time"),
    "e2e_s": ("arrival_time", "last_token_time"),
    "kv_transfer_s": ("kv_cache_transfer_start", "kv_cache_transfer_end"),
}
# our name: section and field
_COUNTS = {
    "kv_transfer_bytes": ("timing_metrics", "kv_cache_size"),
    "blocks_new": ("kv_cache_metrics", "num_new_allocated_blocks"),
    "blocks_reused": ("kv_cache_metrics", "num_reused_blocks"),  # over all attention windows, as the next
    "blocks_missed": ("kv_cache_metrics", "num_missed_blocks"),
    "draft_tokens": ("speculative_decoding", "total_draft_tokens"),
    "draft_tokens_accepted": ("speculative_decoding", "total_accepted_draft_tokens"),
}


def measured_times(metrics: Any) -> dict[str, float]:
    """Values by name; without those that this release lacks or that did not happen."""
    return dict(_found(metrics)) if metrics is not None else {}


def _found(metrics: Any) -> Iterator[tuple[str, float]]:
    timing = getattr(metrics, "timing_metrics", None)
    for name, (start, end) in _SPANS.items():
        begin, finish = _seconds(getattr(timing, start, None)), _seconds(getattr(timing, end, None))
        if begin > 0 and finish >= begin:
            yield name, round(finish - begin, 9)
    for name, (part, field) in _COUNTS.items():
        value = getattr(getattr(metrics, part, None), field, None)
        if isinstance(value, int | float) and value:
            yield name, value
    first, last = getattr(metrics, "first_iter", None), getattr(metrics, "last_iter", None)
    if isinstance(first, int) and isinstance(last, int) and last >= first:
        yield "iterations", last - first + 1


def _seconds(moment: Any) -> float:
    total = getattr(moment, "total_seconds", None)
    return float(total()) if callable(total) else 0.0
