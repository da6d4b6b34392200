"""Decides requests by the workers and loads of a ``LoadTracker``, in the cheaper of two ways. No clock, no NATS."""

from collections.abc import Mapping, Sequence

from configs.settings import RouterMode
from router.holders import TargetId
from router.load_tracker import LoadTracker
from router.placement import pool
from router.placement.pool import PoolContext, Pools
from router.policy import decide
from router.routing import RoutingContext, RoutingDecision, RoutingRequest, Weights

FEW = 12  # targets, up to which a loop over them is cheaper than array operations


class Decisions:
    """A decision is a function of the tracker's state and of the arguments of ``decide``."""

    def __init__(self, tracker: LoadTracker, mode: RouterMode, weights: Weights) -> None:
        self.pools = Pools(tracker)
        self._tracker = tracker
        self._mode: RouterMode = mode
        self._weights = weights

    def decide(
        self,
        request: RoutingRequest,
        keys: Sequence[int],
        overlaps: Mapping[TargetId, int],
        *,
        now_ns: int,
        seed: int,
        turn: int = 0,
        waited_s: float | None = None,
    ) -> RoutingDecision:
        """
        Args:
            keys: of the full blocks of its prompt, as far as they may be reused.
            overlaps, seed, turn, waited_s: as in ``RoutingContext``.
        """
        tracker, weights = self._tracker, self._weights
        leading = tracker.loads.prefixes(keys) if self._mode == "kv" else {}
        among = self.pools.pool(request) if self._mode == "kv" else None
        if among is not None and len(among.ids) > FEW:
            columns = tracker.columns(among.rows, now_ns)
            found = pool.decide(PoolContext(request, among, columns, overlaps, leading, weights, seed, waited_s))
            if found is not None:
                return found
        targets = tracker.targets(now_ns, request.model)
        return decide(RoutingContext(request, targets, overlaps, self._mode, weights, seed, turn, leading, waited_s))
