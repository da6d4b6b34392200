"""The formula of ``placement.cost`` at many targets, and for many requests, at once."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.router.placement.columns import Column, WholeTerms
from penstock.router.placement.cost import PASS_TOKENS, RequestSize, reuse


class RequestSizes(NamedTuple):
    """``RequestSize`` of several requests: columns of shape (requests, 1)."""

    tokens: Column
    blocks: Column
    sequences: Column
    shared: Column


class Costs(NamedTuple):
    """By request and target, or by target alone; fields as in ``Reuse`` and ``TargetCost``."""

    blocks: Column
    whole: Column
    uncached_tokens: Column
    fits: NDArray[np.bool_]


def costs(
    size: RequestSize | RequestSizes,
    cached: Column,
    leading: Column | None,
    own: WholeTerms,
    block_size: Column | float,
    *,
    overlap_weight: float = 1.0,
) -> Costs:
    """
    Args:
        cached: leading blocks cached, by target; for several requests of shape (requests, targets).
        leading: the same for blocks of active requests; None: they have none.
        own: terms of the targets.
        block_size: of each target, or of all.
        overlap_weight: of a reused token.
    """
    blocks = cached if leading is None else np.maximum(cached, leading)
    reused = reuse(size, blocks, block_size, np, overlap_weight)
    prompt_blocks = size.tokens // block_size
    whole = own.fixed + own.slope * reused.work + own.read * prompt_blocks
    if not isinstance(size.tokens, int) or size.tokens > PASS_TOKENS:
        whole -= own.queued * np.maximum(0.0, reused.work - PASS_TOKENS)
    needed = prompt_blocks if leading is None else prompt_blocks - np.minimum(leading, size.blocks)
    fits = needed <= own.room
    return Costs(reused.blocks, whole, reused.uncached_tokens, fits)
