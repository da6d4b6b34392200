"""What a request costs at each target, in prompt tokens of work. Pure.

    whole request   s · (A + 2 u + u · d / 64)  +  t · (D / 16 + 3000 w)  +  max(s, t) · S / 256
    prefill stage   s · (A + 2 u)               +  t · (D / 16 + 3000 w)  +  max(s, t) · S / 256
    decode stage                                   t · (D / 16 + 3000 w)

u: tokens of the prompt that the target neither caches nor is about to compute for another request, at least 1; but
   those of a prefix that many prompts share are free (``shared_prefixes``)
A: tokens that it has yet to compute for other requests, which come first
d: sequences that it is decoding, each of which u holds up
D: prompt tokens of its active sequences, with this request; every step reads them, shared ones for each sequence
w: sequences beyond its slots, with this request; each waits for another to end, about an answer's time per slot
S: tokens of the prompts that it was sent lately, cached or not; so idle targets take turns, and no target collects all
   prefixes that are used now and then
s, t: time per prompt token and per step relative to the other targets, learnt

u counts twice: once for this request, once for those that come behind it. A target has room for a request if it is
idle, or if the blocks of all its active prompts, one for the answer of each sequence included, fill at most ``FILL`` of
its KV cache, and it accepts another sequence.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from router.placement.target_loads import (
    ACTIVE,
    BACKLOG,
    BLOCK_SIZE,
    BLOCKS,
    COMPUTING,
    CONTEXT,
    DECODE_SLOWNESS,
    LIMIT,
    SEQUENCES,
    SERVED,
    SLOTS,
    SLOWNESS,
)

FILL = 0.95
OWN_WORK = 2.0
HELD_UP = 1 / 64
OCCUPANCY = 1 / 16
TURNS = 1 / 256
FAVOUR = 256.0  # prompt tokens of work, at most, that a session's last target is ahead
SLOT_TOKENS = 3000.0  # prompt tokens that a target computes in the time in which one of its slots becomes free


class RequestSize(NamedTuple):
    """
    Attributes:
        tokens: to be in the cache before the first new token.
        blocks: full blocks of the prompt, at most so many can be reused.
        shared: leading blocks that many prompts begin with.
    """

    tokens: int
    blocks: int
    sequences: int
    shared: int = 0


class TargetCost(NamedTuple):
    """What a request costs at one target. ``fits``: it has room for the request now."""

    whole: float
    prefill: float
    decode: float
    uncached_tokens: float
    fits: bool


def favour_tokens(size: RequestSize) -> float:
    """How much less a request costs at the target of its session's last request."""
    return min(FAVOUR, size.tokens)


def favoured(cost: TargetCost, tokens: float) -> TargetCost:
    if not tokens:
        return cost
    whole, prefill, decode = cost.whole - tokens, cost.prefill - tokens, cost.decode - tokens
    return cost._replace(whole=whole, prefill=prefill, decode=decode)


def target_cost(
    size: RequestSize,
    cached: float,
    leading: float,
    at: Sequence[float],
    *,
    overlap_weight: float = 1.0,
    prefill_weight: float = 1.0,
) -> TargetCost:
    """
    Args:
        cached: leading blocks cached at the target.
        leading: the same for blocks of active requests.
        at: the target's columns.
        overlap_weight: of a reused token.
        prefill_weight: of a token to compute.
    """
    return TargetCost(*terms(size, cached, leading, at, overlap_weight, prefill_weight, min, max))


def terms(
    size: Any,
    cached: Any,
    leading: Any,
    at: Any,
    overlap_weight: float,
    prefill_weight: float,
    lower: Callable[[Any, Any], Any],
    higher: Callable[[Any, Any], Any],
) -> tuple[Any, Any, Any, Any, Any]:
    """The fields of ``TargetCost``: of numbers with ``min`` and ``max``, of arrays with what takes their place."""
    block_size, slowness, running = at[BLOCK_SIZE], at[SLOWNESS], at[SEQUENCES]
    present = block_size * lower(higher(cached, leading), size.blocks)
    uncached = higher(1.0, size.tokens - present)
    work = uncached if overlap_weight == 1.0 else higher(1.0, size.tokens - overlap_weight * present)
    if not isinstance(size.shared, int) or size.shared:  # a shared prefix is free
        work = higher(1.0, work - higher(0.0, block_size * size.shared - present))
    prompt_blocks = size.tokens // block_size
    occupied = at[ACTIVE] + running + (prompt_blocks - lower(leading, size.blocks))
    read = at[CONTEXT] + prompt_blocks * size.sequences
    beyond = higher(0.0, running + size.sequences - at[SLOTS])
    decode = at[DECODE_SLOWNESS] * (OCCUPANCY * block_size * read + SLOT_TOKENS * beyond)
    scale = slowness if prefill_weight == 1.0 else prefill_weight * slowness
    turn = TURNS * higher(slowness, at[DECODE_SLOWNESS]) * at[SERVED]
    prefill = scale * (at[BACKLOG] + OWN_WORK * work) + decode + turn
    whole = prefill + scale * HELD_UP * work * (running - at[COMPUTING])
    room = (occupied + size.sequences <= FILL * at[BLOCKS]) & (running + size.sequences <= at[LIMIT])
    return whole, prefill, decode, uncached, room | (running == 0)
