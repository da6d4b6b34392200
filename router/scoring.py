"""What a request costs at one target, in blocks of prompt work. Pure; ``policy`` has the formula."""

from configs.settings import RouterMode
from router.load import RoutingTarget
from router.routing import RoutingRequest, Weights


def score(request: RoutingRequest, target: RoutingTarget, overlap: int, mode: RouterMode, weights: Weights) -> float:
    """The cost of running prefill and decode on ``target``; the lowest wins.

    Args:
        overlap: leading prompt blocks cached there.
    """
    load = target.load
    if mode != "kv":
        return load.sequences / max(1, target.registration.slots)
    # This is prefill_cost + decode_cost, inlined: it runs for every target and every request.
    size = target.registration.block_size
    overlap = min(overlap, request.prompt_blocks)
    prefill = (load.prefill_tokens + request.prompt_tokens + request.resumed_tokens) / size - weights.overlap * overlap
    return weights.prefill * max(0.0, prefill) + load.active_blocks + request.prompt_tokens // size - overlap


def utilization(target: RoutingTarget) -> float:
    """Sequences per slot; above 1 when sequences queue."""
    return target.load.sequences / max(1, target.registration.slots)


def prefill_cost(request: RoutingRequest, target: RoutingTarget, overlap: int, weights: Weights) -> float:
    """Blocks to compute before the first token."""
    tokens = target.load.prefill_tokens + request.prompt_tokens + request.resumed_tokens
    blocks = tokens / target.registration.block_size - weights.overlap * min(overlap, request.prompt_blocks)
    return weights.prefill * max(0.0, blocks)


def decode_cost(request: RoutingRequest, target: RoutingTarget, overlap: int) -> float:
    """Blocks in use on ``target`` once it has taken the request."""
    added = request.prompt_tokens // target.registration.block_size - min(overlap, request.prompt_blocks)
    return target.load.active_blocks + added


def uncached_tokens(request: RoutingRequest, target: RoutingTarget, overlap: int) -> int:
    """Tokens that ``target`` would have to compute itself."""
    cached = min(overlap, request.prompt_blocks) * target.registration.block_size
    return max(0, request.prompt_tokens + request.resumed_tokens - cached)
