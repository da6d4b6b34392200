"""What a request costs at each target, in prompt tokens of work. Pure.

    cost = slowness · (A + 2 u + u · d / 64) + D / 16

u: tokens of the prompt that the target neither caches nor is about to compute for another request, at least 1
A: tokens that it has yet to compute for other requests, which come first
d: sequences that it is decoding, each of which u holds up
D: tokens in the KV blocks of its active requests, with this one; they slow every step down

u counts twice: once for this request, once for those that come behind it. ``slowness`` is time per token relative to
the other targets. A target has room for a request if it is idle, or if the blocks of all its active prompts, one for
the answer of each sequence included, fill at most ``FILL`` of its KV cache, and it accepts another sequence.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.placement.target_loads import (
    ACTIVE,
    BACKLOG,
    BLOCK_SIZE,
    BLOCKS,
    COMPUTING,
    LIMIT,
    SEQUENCES,
    SLOWNESS,
    UNTRACKED,
    Column,
)

FILL = 0.95
OWN_WORK = 2.0
HELD_UP = 1 / 64
OCCUPANCY = 1 / 16


Size = float | Column


class Costs(NamedTuple):
    """By request and target, or by target alone."""

    cost: Column
    uncached_tokens: Column
    fits: NDArray[np.bool_]


def costs(sizes: tuple[Size, Size, Size], cached: Column, leading: Column, at: Column) -> Costs:
    """
    Args:
        sizes: of the request: tokens of the prompt, its full blocks, sequences. For several requests at once each is
            a column of shape (requests, 1).
        cached: leading blocks cached, by target; for several requests of shape (requests, targets).
        leading: the same for blocks of active requests.
        at: the targets' columns.
    """
    prompt_tokens, blocks, sequences = sizes
    size, active = at[BLOCK_SIZE], at[ACTIVE] + at[UNTRACKED]
    present = np.minimum(np.maximum(cached, leading), blocks)
    uncached = np.maximum(1.0, prompt_tokens - size * present)
    occupied = active + at[SEQUENCES] + (blocks - np.minimum(leading, blocks))
    decoding = at[SEQUENCES] - at[COMPUTING]
    work = at[BACKLOG] + uncached * (OWN_WORK + HELD_UP * decoding)
    idle = at[SEQUENCES] == 0
    fits = (occupied + sequences <= FILL * at[BLOCKS]) & (at[SEQUENCES] + sequences <= at[LIMIT]) | idle
    return Costs(at[SLOWNESS] * work + OCCUPANCY * size * occupied, uncached, fits)
