"""What a request costs at each target of a decision. Pure; ``placement.cost`` has the formula of mode "kv"."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from router.holders import TargetId
from router.load import RoutingTarget
from router.placement.cost import Costs, RequestSize, costs
from router.placement.target_loads import Column
from router.routing import RoutingContext, RoutingRequest


class TargetCost(NamedTuple):
    """``Costs`` at one target. ``fits``: it has room for the request now."""

    whole: float
    prefill: float
    decode: float
    uncached_tokens: float
    fits: bool


def target_costs(context: RoutingContext) -> Mapping[TargetId, TargetCost]:
    """The costs at all targets of a context."""
    targets, weights = context.targets, context.weights
    found = costs(
        size_of(context.request),
        _column(targets, context.overlaps),
        _column(targets, context.leading),
        _columns(targets),
        overlap_weight=weights.overlap,
        prefill_weight=weights.prefill,
    )
    return by_target(targets, found)


def by_target(targets: Sequence[RoutingTarget], found: Costs) -> dict[TargetId, TargetCost]:
    rows = zip(*(column.tolist() for column in found), strict=True)
    return {target.id: TargetCost(*row) for target, row in zip(targets, rows, strict=True)}


def size_of(request: RoutingRequest) -> RequestSize:
    return RequestSize(request.prompt_tokens + request.resumed_tokens, request.prompt_blocks, request.n)


def utilization(target: RoutingTarget) -> float:
    """Sequences per slot; above 1 when sequences queue."""
    return target.load.sequences / max(1, target.registration.slots)


def uncached_tokens(request: RoutingRequest, target: RoutingTarget, overlap: int) -> int:
    """Tokens that ``target`` would have to compute itself."""
    cached = min(overlap, request.prompt_blocks) * target.registration.block_size
    return max(0, request.prompt_tokens + request.resumed_tokens - cached)


def _column(targets: Sequence[RoutingTarget], blocks: Mapping[TargetId, int]) -> Column:
    return np.array([blocks.get(target.id, 0) for target in targets], np.float64)


def _columns(targets: Sequence[RoutingTarget]) -> Column:
    """The columns of ``TargetLoads``."""
    rows = []
    for target in targets:
        registration, load = target.registration, target.load
        capacity = (registration.block_size, registration.total_blocks, registration.slots + registration.queue)
        rows.append((*capacity, load.sequences, load.active_blocks, load.prefill_tokens, load.computing, load.slowness))
    return np.array(rows, np.float64).reshape(-1, 8).T
