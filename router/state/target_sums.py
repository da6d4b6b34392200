"""The active requests of each target, and its estimated prefill backlog. No clock, no NATS."""

from penstock.router.state.depths import TargetId
from penstock.router.state.target_loads import TargetLoads


class TargetSum:
    """The active requests of one target, and its prefill backlog as a leaky bucket."""

    __slots__ = ("at_ns", "backlog", "names", "requests", "uncached_tokens")

    def __init__(self) -> None:
        self.names: dict[str, None] = {}  # oldest first
        self.requests = self.uncached_tokens = 0
        self.backlog = 0.0
        self.at_ns = 0

    def prefill_tokens(self, now_ns: int, tokens_per_s: float) -> float:
        if not self.backlog:
            return 0.0
        drained = max(0, now_ns - self.at_ns) * tokens_per_s / 1e9
        return min(max(0.0, self.backlog - drained), float(self.uncached_tokens))


class TargetSums:
    """The ``TargetSum`` of each target that has active requests.

    Args:
        loads: gets the estimated backlogs.
        tokens_per_s: at which these drain.
    """

    def __init__(self, loads: TargetLoads, tokens_per_s: float) -> None:
        self.by_target: dict[TargetId, TargetSum] = {}
        self._loads = loads
        self._tokens_per_s = tokens_per_s

    def add(self, target_id: TargetId, request: str, uncached_tokens: int, now_ns: int) -> None:
        held = self.by_target.get(target_id)
        if held is None:
            held = self.by_target[target_id] = TargetSum()
        if uncached_tokens or held.backlog:
            left = held.prefill_tokens(now_ns, self._tokens_per_s)
            held.backlog, held.at_ns = left + uncached_tokens, max(now_ns, held.at_ns)
        held.names[request] = None
        held.requests += 1
        if uncached_tokens:
            held.uncached_tokens += uncached_tokens
            self._loads.estimate(target_id, held.backlog, held.at_ns, held.uncached_tokens)

    def remove(self, target_id: TargetId, request: str, uncached_tokens: int) -> None:
        held = self.by_target[target_id]
        held.names.pop(request, None)  # two of its stages may have been here
        held.requests -= 1
        if uncached_tokens:
            held.uncached_tokens -= uncached_tokens
            self._loads.estimate(target_id, held.backlog, held.at_ns, held.uncached_tokens)
        if not held.requests:
            del self.by_target[target_id]

    def backlogs(self) -> tuple[tuple[str, int, float, int], ...]:
        """As in ``LoadState``."""
        return tuple((*target_id, held.backlog, held.at_ns) for target_id, held in sorted(self.by_target.items()))
