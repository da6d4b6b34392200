"""Lines of the engine's log that announce a deadlock or a loss, and the fix for each. Pure; ``now`` is an argument."""

import re
from typing import NamedTuple

QUIET_S = 60.0  # a diagnosis is repeated only after this


class Diagnosis(NamedTuple):
    code: str
    advice: str


_NO_ROOM = "too few KV blocks for a prompt that arrives from a prefill worker"
_DIAGNOSES: tuple[tuple[re.Pattern[str], Diagnosis], ...] = (
    (
        re.compile(
            r"num_fitting_reqs\s*=\s*0\b.*fitting_disagg_gen_init_requests(?:\s*=\s*\[\s*\]|\W+is\W+empty)", re.I
        ),
        Diagnosis(
            "disagg_deadlock",
            f"{_NO_ROOM}: the decode engine starts no more requests; set cache_transceiver_config.max_tokens_in_buffer "
            "to the longest prompt or more, raise kv_cache_config.free_gpu_memory_fraction, or lower max_batch_size",
        ),
    ),
    (
        re.compile(
            r"num_fitting_reqs\s*=\s*0\b|fitting_disagg_gen_init_requests(?:\s*=\s*\[\s*\]|\W+is\W+empty)", re.I
        ),
        Diagnosis("no_request_fits", "no waiting request fits into the KV pool; if this persists, the engine hangs"),
    ),
    (
        re.compile(r"may use dynamic buffer|dynamic buffer.*(?:fail|nixl)", re.I),
        Diagnosis(
            "transfer_buffer_small",
            "a prompt is longer than cache_transceiver_config.max_tokens_in_buffer; set it to the longest prompt",
        ),
    ),
    (
        re.compile(
            r"(?:kv|cache).{0,40}transfer.{0,60}(?:timed? ?out|timeout)|(?:timed? ?out|timeout).{0,60}transfer", re.I
        ),
        Diagnosis(
            "transfer_timeout",
            "a KV transfer timed out; check the network between the workers and kv_transfer_timeout_ms",
        ),
    ),
    (
        re.compile(r"can ?not find (?:the )?sequence", re.I),
        Diagnosis(
            "sequence_lost",
            "a sequence was removed during its KV transfer (TensorRT-LLM issue 12540); restart the engine",
        ),
    ),
    (
        re.compile(r"event queue has reached the max size", re.I),
        Diagnosis("kv_events_lost", "raise kv_cache_config.event_buffer_max_size"),
    ),
    (
        re.compile(r"maxNumTokens\s*%\s*tokensPerBlock", re.I),
        Diagnosis(
            "not_block_aligned",
            "make max_num_tokens and max_tokens_in_buffer multiples of kv_cache_config.tokens_per_block",
        ),
    ),
)


class Detector:
    """Feed it every line of the log; it returns each diagnosis at most once per ``quiet_s`` seconds."""

    def __init__(self, quiet_s: float = QUIET_S) -> None:
        self._quiet_s = quiet_s
        self._last: dict[str, float] = {}

    def line(self, text: str, now: float) -> Diagnosis | None:
        """The diagnosis of a line; None: it has none, or a recent one."""
        for pattern, diagnosis in _DIAGNOSES:
            if pattern.search(text):
                last = self._last.get(diagnosis.code)
                if last is not None and now - last < self._quiet_s:
                    return None
                self._last[diagnosis.code] = now
                return diagnosis
        return None
