"""Values from the engine's iteration statistics, of which every key may be missing or null. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

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


class Blocks(NamedTuple):
    """Numbers of blocks in the KV pool."""

    total: int
    used: int  # by running requests
    free: int  # empty, or with reusable content


def number(stat: Mapping[str, Any], section: str, key: str) -> float | None:
    """One value of a statistic; None: it is missing."""
    inner: Any = stat.get(section) if section else stat
    value = inner.get(key) if isinstance(inner, Mapping) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def blocks(stat: Mapping[str, Any]) -> Blocks | None:
    """The pool according to a statistic; None: it does not say."""
    total = number(stat, "kvCacheStats", "maxNumBlocks")
    if total is None:
        return None
    used = number(stat, "kvCacheStats", "usedNumBlocks")
    free = number(stat, "kvCacheStats", "freeNumBlocks")
    if used is None:
        used = total - free if free is not None else 0.0
    return Blocks(int(total), int(used), int(total - used if free is None else free))


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
