"""Which points a profile measures, and how its figures follow from the measured requests. No clock, no network."""

import itertools
import statistics
from collections.abc import Sequence

from penstock.measure.sweep.figures import RequestRecord

SHORTEST = 100  # tokens of the shortest prompt
RESERVE = 512  # tokens of the context that the longest prompt of prefill leaves
_STEADY = 0.1  # least share of the tokens that must come while all requests decode


def spaced(low: int, high: int, count: int) -> list[int]:
    """Up to ``count`` whole numbers from ``low`` to ``high``, evenly spaced and with both ends."""
    if count < 2 or high <= low:
        return [low] if high >= low else []
    return sorted({low + round((high - low) * number / (count - 1)) for number in range(count)})


def prefill_lengths(max_context: int, granularity: int) -> list[int]:
    """Prompt lengths, tokens; empty: the context has no room for the shortest."""
    return spaced(SHORTEST, max_context - RESERVE, granularity)


def decode_lengths(max_context: int, osl: int, granularity: int) -> list[int]:
    """Prompt lengths whose answers of ``osl`` tokens fit into the context, tokens."""
    return spaced(SHORTEST, max_context - osl, granularity)


def concurrencies(length: int, max_kv_tokens: int, most: int, granularity: int, attention_dp: int = 1) -> list[int]:
    """Requests at once whose ``length`` tokens each all fit into the KV cache; the same number for each rank."""
    per_rank = min(most, max_kv_tokens // length) // attention_dp
    return [each * attention_dp for each in spaced(1, per_rank, granularity)]


def kv_tokens(max_batch: int, isl: int, osl: int) -> int:
    """Tokens that the KV cache must hold if ``max_batch`` such requests decode at once."""
    return max_batch * (isl + osl)


def prefill_throughput(isl: int, ttft_ms: float, gpus: int, attention_dp: int = 1) -> float:
    """Prompt tokens per second and GPU, one prompt on each rank at a time."""
    return isl / (ttft_ms / 1e3) / gpus * attention_dp


def kv_usage(context: float, concurrency: int, max_kv_tokens: int) -> float:
    """Share of the KV cache, 0 to 1."""
    return min(1.0, context * concurrency / max_kv_tokens)


def ttft(records: Sequence[RequestRecord]) -> float | None:
    """Median TTFT, ms; None: nothing was streamed."""
    measured = [record.ttft_ms for record in records if record.ttft_ms > 0]
    return statistics.median(measured) if measured else None


def steady_itl(records: Sequence[RequestRecord]) -> float | None:
    """Time per token while all requests decode, ms; None: they never did, or for too few tokens.

    It starts when the last request has its first text and ends when the first one has its last, so that prompts which
    are still computed, and a batch that has begun to shrink, are not part of it.
    """
    if not records or any(record.error or record.ttft_ms < 0 or not record.gaps_ms for record in records):
        return None
    times = [list(itertools.accumulate(record.gaps_ms, initial=record.sent_ms + record.ttft_ms)) for record in records]
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    seconds = tokens = 0.0
    for record, seen in zip(records, times, strict=True):
        inside = [time for time in seen if begin <= time <= end]
        if len(inside) < 2:
            return None
        seconds += inside[-1] - inside[0]
        # A read may carry several tokens: they are spread evenly over the answer's reads.
        tokens += (len(inside) - 1) * (answered(record) - 1) / len(record.gaps_ms)
    if tokens < _STEADY * sum(answered(record) - 1 for record in records):
        return None
    return seconds / tokens


def answered(record: RequestRecord) -> int:
    """The number of tokens in an answer: the server's count, or else the number of events with text."""
    return record.osl if record.osl >= 0 else record.events


def cached_share(records: Sequence[RequestRecord]) -> float:
    """Share of the prompt tokens that the server found in its cache; 0.0 if it does not report them."""
    counted = [record for record in records if record.cached >= 0 and record.isl > 0]
    return sum(record.cached for record in counted) / sum(record.isl for record in counted) if counted else 0.0
