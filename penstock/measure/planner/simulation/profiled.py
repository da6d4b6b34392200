"""Simulated engines that take as long as a profile says, instead of the mock's formula."""

from penstock.measure.planner.timing import EngineTiming
from penstock.measure.simulation.engine import MAX_SEQUENCES
from penstock.measure.simulation.policy import WorkerSpec
from penstock.schemas.plans import Role

_UNKNOWN_TOKENS = 1 << 24  # of KV cache, where a profile does not tell


class ProfileTimes:
    """``penstock.measure.simulation.timing.PassTimes`` of one rank of a worker.

    A pass with prompts takes as long as one prompt of as many tokens would, or, for a later part of a long one, what
    that adds to the earlier parts if it is more. Sequences that decode beside it add a token's time.
    """

    def __init__(self, timing: EngineTiming) -> None:
        self._timing = timing

    def prefill_ns(self, sequences: int, mean_tokens: int, mean_before: int) -> int:
        new = sequences * max(0, mean_tokens - mean_before)
        if not new:
            return 0
        ms = self._timing.prefill_ms(new)
        if mean_before and sequences == 1:
            ms = max(ms, self._timing.prefill_ms(mean_tokens) - self._timing.prefill_ms(mean_before))
        return round(ms * 1e6)

    def decode_run_ns(self, context_tokens: int, growth: int, passes: int) -> list[int]:
        if not growth:
            return [0] * passes
        # Between two contexts, the time of a token is on a straight line in a profile, too.
        first, last = (
            self._timing.itl_ms(tokens / growth, growth * self._timing.dp) * 1e6
            for tokens in (context_tokens, context_tokens + growth * (passes - 1))
        )
        step = (last - first) / max(1, passes - 1)
        return [round(first + step * number) for number in range(passes)]


def worker_of(role: Role, timing: EngineTiming, block_size: int) -> WorkerSpec:
    """A worker with the ranks, memory, batch and times of a profile."""
    setup = timing.profile.setup
    return WorkerSpec(
        role,
        (setup.max_kv_tokens or _UNKNOWN_TOKENS) // timing.dp // block_size,
        ranks=timing.dp,
        max_sequences=max(1, (setup.max_batch or MAX_SEQUENCES) // timing.dp),
        times=ProfileTimes(timing),
    )
