"""The formula of ``placement.cost`` at many targets, and for many requests, at once."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.placement.arrays.columns import Column
from router.placement.cost import RequestSize, terms


class RequestSizes(NamedTuple):
    """``RequestSize`` of several requests: columns of shape (requests, 1)."""

    tokens: Column
    blocks: Column
    sequences: Column
    shared: Column


class Costs(NamedTuple):
    """By request and target, or by target alone."""

    whole: Column
    prefill: Column
    decode: Column
    uncached_tokens: Column
    fits: NDArray[np.bool_]


def costs(
    size: RequestSize | RequestSizes,
    cached: Column,
    leading: Column,
    at: Column,
    *,
    overlap_weight: float = 1.0,
    prefill_weight: float = 1.0,
) -> Costs:
    """
    Args:
        cached: leading blocks cached, by target; for several requests of shape (requests, targets).
        leading: the same for blocks of active requests.
        at: the targets' columns.
        overlap_weight: of a reused token.
        prefill_weight: of a token to compute.
    """
    return Costs(*terms(size, cached, leading, at, overlap_weight, prefill_weight, np.minimum, np.maximum))
