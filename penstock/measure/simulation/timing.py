"""How long one pass of a simulated engine takes, in whole nanoseconds.

The two polynomials are the timing model of the mock engine of NVIDIA Dynamo 1.6.1 (vLLM-like, "polynomial").
"""

import sys
from importlib.util import find_spec
from typing import Protocol


class PassTimes(Protocol):
    """What passes take in other engines than the mock's, in ns."""

    def prefill_ns(self, sequences: int, mean_tokens: int, mean_before: int) -> int:
        """As the function of this name."""

    def decode_run_ns(self, context_tokens: int, growth: int, passes: int) -> list[int]:
        """As the function of this name; ``growth`` sequences decode."""


_VECTORISE_FROM = 24 if find_spec("numpy") else sys.maxsize  # passes; below, a loop is faster than numpy's calls


def prefill_ns(sequences: int, mean_tokens: int, mean_before: int) -> int:
    """The prefill part of a pass.

    Args:
        sequences: that compute prompt tokens in this pass.
        mean_tokens: mean over them of the prompt tokens computed before and in this pass, rounded down.
        mean_before: mean of the prompt tokens computed or cached before, rounded down.
    """
    tokens = sequences * max(0, mean_tokens - mean_before)
    if tokens == 0:
        return 0
    return round((4.209989e-7 * tokens * tokens + 1.518344e-2 * tokens + 16.50142) * 1e6)


def decode_ns(context_tokens: int, pool_tokens: int) -> int:
    """The decode part of a pass; ``context_tokens`` is the sum over the decoding sequences."""
    used = min(1.0, context_tokens / pool_tokens)
    return round(max(1.0, -25.74 * used * used + 54.01 * used + 5.74) * 1e6)


def decode_run_ns(context_tokens: int, growth: int, pool_tokens: int, passes: int) -> list[int]:
    """``decode_ns`` of successive passes, each with ``growth`` more tokens of context than the one before."""
    if passes < _VECTORISE_FROM:
        return [decode_ns(context_tokens + growth * n, pool_tokens) for n in range(passes)]
    import numpy as np

    used = np.minimum(1.0, (context_tokens + growth * np.arange(passes, dtype=np.int64)) / pool_tokens)
    ms = np.maximum(1.0, -25.74 * used * used + 54.01 * used + 5.74)
    durations: list[int] = np.rint(ms * 1e6).astype(np.int64).tolist()
    return durations


class MockTimes:
    """The mock's, for a pool of so many tokens."""

    def __init__(self, pool_tokens: int) -> None:
        self._pool_tokens = pool_tokens

    def prefill_ns(self, sequences: int, mean_tokens: int, mean_before: int) -> int:
        return prefill_ns(sequences, mean_tokens, mean_before)

    def decode_run_ns(self, context_tokens: int, growth: int, passes: int) -> list[int]:
        return decode_run_ns(context_tokens, growth, self._pool_tokens, passes)
