"""TensorRT-LLM's measurements of one request (``CompletionOutput.request_perf_metrics``) as plain numbers. Pure.

Its times count from an epoch of its own, so only differences are meaningful; 0 means that something did not happen.
"""

from collections.abc import Iterator
from typing import Any

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


def measured(metrics: Any) -> dict[str, float]:
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
