"""The common case: aggregated workers alone serve a model, and a request may go to any of them. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.router.placement.cost import target_costs
from penstock.router.placement.filters import rejection
from penstock.router.placement.routing import PATIENCE_S, RoutingContext, RoutingRequest, Weights
from penstock.router.state.depths import TargetId
from penstock.router.state.load import RoutingTarget
from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas.fleet import Registration


class HeldRequest(NamedTuple):
    """Fields as in ``RoutingContext``."""

    request: RoutingRequest
    overlaps: Mapping[TargetId, int]
    leading: Mapping[TargetId, int]
    waited_s: float


def is_plain(request: RoutingRequest) -> bool:
    """Whether a request needs neither a certain worker nor a medium, and produces tokens."""
    return not (request.worker or request.medium or request.output or request.avoid)


def aggregated_pool(tracker: LoadTracker, request: RoutingRequest) -> Sequence[Registration]:
    """The workers of a plain request's model; empty: there is none, or some are not aggregated."""
    if not is_plain(request):
        return ()
    serving = tracker.serving(request.model)
    return () if any(each.role != "aggregated" for each in serving) else serving


def is_ready(held: HeldRequest, targets: Sequence[RoutingTarget]) -> bool:
    """Whether a target has room for the request, and it need not wait for a better one.

    A request that no target ever takes is ready too: it is decided, so that it ends.

    Args:
        targets: of its pool.
    """
    request, weights = held.request, Weights()
    costs = target_costs(RoutingContext(request, targets, held.overlaps, "kv", weights, 0, 0, held.leading))
    allowed = [costs[target.id] for target in targets if rejection(request, target) in ("", "full")]
    if not allowed:
        return True
    free = [cost for cost in allowed if cost.fits]
    if not free:
        return False
    best, best_of_all = (min(among, key=lambda cost: cost.whole) for among in (free, allowed))
    saved = best.uncached_tokens - best_of_all.uncached_tokens
    return best_of_all.fits or held.waited_s >= PATIENCE_S * saved
