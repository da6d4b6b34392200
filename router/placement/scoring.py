"""What a request costs at each target of a decision. Pure; ``placement.cost`` has the formula of mode "kv"."""

from collections.abc import Mapping
from typing import Any

from penstock.router.placement.cost import RequestSize, TargetCost, favour_tokens, favoured, target_cost
from penstock.router.placement.routing import RoutingContext, RoutingRequest
from penstock.router.state.depths import TargetId
from penstock.router.state.load import RoutingTarget


def target_costs(context: RoutingContext) -> Mapping[TargetId, TargetCost]:
    """The costs at all targets of a context."""
    size, weights = size_of(context.request), context.weights
    costs = {
        target.id: target_cost(
            size,
            context.overlaps.get(target.id, 0),
            context.leading.get(target.id, 0),
            columns_of(target),
            overlap_weight=weights.overlap,
            prefill_weight=weights.prefill,
        )
        for target in context.targets
    }
    for target_id in context.request.session:
        if target_id in costs:
            costs[target_id] = favoured(costs[target_id], favour_tokens(size))
    return costs


def size_of(request: RoutingRequest) -> RequestSize:
    return RequestSize(
        request.prompt_tokens + request.resumed_tokens, request.prompt_blocks, request.n, request.shared_blocks
    )


def utilization(target: RoutingTarget) -> float:
    """Sequences per slot; above 1 when sequences queue."""
    return target.load.sequences / max(1, target.registration.slots)


def uncached_tokens(request: RoutingRequest, target: RoutingTarget, overlap: int) -> int:
    """Tokens that ``target`` would have to compute itself."""
    cached = min(overlap, request.prompt_blocks) * target.registration.block_size
    return max(0, request.prompt_tokens + request.resumed_tokens - cached)


def columns_of(target: RoutingTarget) -> list[Any]:
    """As ``TargetLoads`` has them."""
    registration, load = target.registration, target.load
    return [
        registration.block_size,
        registration.total_blocks,
        registration.slots,
        registration.slots + registration.queue,
        load.sequences,
        load.active_blocks,
        load.context_blocks,
        load.prefill_tokens,
        load.computing,
        load.slowness,
        load.decode_slowness,
        load.served_tokens,
    ]
