"""Checks that a target can take a request, and computes its cost there in prompt tokens of work. Pure.

    whole request   s · (A + A · min(u / 8192, 1) + 2 u + u · min(d / 40 + n / 8, 2.5))
                                    +  t · (D / 32 + 3000 w)  +  max(s, t) · S / 256
    prefill stage   s · (A + 2 u)   +  t · (D / 32 + 3000 w)  +  max(s, t) · S / 256
    decode stage                       t · (D / 32 + 3000 w)

u: tokens of the prompt that the target neither caches nor is about to compute for another request, at least 1; but
   those of a prefix that many prompts share are free (``SharedPrefixes``). A block in host memory or on disk counts as
   much as bringing it back takes of computing it (``TIER_COSTS``)
A: tokens that it has yet to compute for other requests, which come first
d: sequences that it is decoding, each of which u holds up
n: sequences whose prompt it has yet to compute, each of which u holds up where one pass computes them together
D: prompt tokens of its active sequences, with this request; every step reads them, shared ones for each sequence
w: sequences beyond its slots, with this request; each waits for another to end, about an answer's time per slot
S: tokens of the prompts that it received recently, cached or not, and more if another router prefers it. So idle
   targets take turns, and no target collects all rarely used prefixes
s, t: learnt time per prompt token and per step, relative to the other targets

A request with a LoRA adapter costs ``ADAPTER_TOKENS`` more if the adapter is not on the device.

u counts twice: once for this request, once for those that come after it. It counts up to 2.5 times more for those that
it delays; the limit bounds how long a prompt waits to spare them. A counts up to twice for a long prompt: long prompts
have the longest TTFT anyway, so they avoid each other, and short ones go where work waits. A target has room for a
request if it is idle, or if the blocks of all its active prompts, one for the answer of each sequence included, fill at
most ``FILL`` of its KV cache, and it accepts another sequence. With more than ``MOST_UNCOMPUTED`` tokens to compute, by
its KV events, it has room only for a prompt of which it has most (``STAYS``): a worker considers tenants, but unlike a
router, it starts waiting requests without regard to their lengths and the order of classes.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.router.placement.routing import PATIENCE_S, RoutingContext, RoutingRequest, Weights
from penstock.router.state.holders import TargetId, TierDepths
from penstock.router.state.load_tracker import LoadTracker
from penstock.router.state.target_loads import ENCODE, RoutingTarget, TargetColumns, serves
from penstock.schemas.cells import HELD_UP, HELD_UP_COMPUTING, MOST_HELD_UP, OWN_WORK, PASS_TOKENS, SLOT_TOKENS
from penstock.schemas.errors import Code
from penstock.schemas.fleet import APART, Registration, WorkerState, reads
from penstock.schemas.requests import ADAPTER, CONSTRAINT_MARKS

Requirement = Callable[[Registration], str]  # a further filter: returns a reason, or "" if the worker passes


def rejection(request: RoutingRequest, target: RoutingTarget, requirement: Requirement | None = None) -> str:
    """Why ``target`` cannot take the stage of its role now; "": it can."""
    registration = target.registration
    if not serves(registration, request.model):
        return "other_model"
    if request.worker and not request.names(registration):
        return "other_worker"
    if request.revision is not None and request.revision != registration.revision:
        return "other_revision"
    if not reads(registration, request.tokenizer):
        return "other_tokenizer"
    if request.output or registration.role in APART:
        return _rejection_apart(request, target)
    if registration.role == ENCODE:
        if request.worker:
            return "encode_only"
        if registration.state is not WorkerState.ready:
            return registration.rests or "draining"
        return "" if target.capacity else "full"
    if requirement is not None and (reason := requirement(registration)):
        return reason
    if request.processors and not request.processors.issubset(registration.logits_processors):
        missing = request.processors.difference(registration.logits_processors)
        if ADAPTER in missing:
            return "no_adapter"
        return "no_constraints" if missing & CONSTRAINT_MARKS else "no_processor"
    if request.adapter and all(each.id != request.adapter for each in registration.adapters):
        return "no_adapter"
    if request.prompt_tokens + request.max_tokens > registration.max_model_len:
        return "too_long"
    if request.prompt_tokens >= registration.total_blocks * registration.block_size:
        return "too_small"
    if registration.state is not WorkerState.ready:
        return registration.rests or "draining"
    if target.load.sequences and request.n > target.capacity:  # an idle target takes any one request
        return "full"
    return ""


def _rejection_apart(request: RoutingRequest, target: RoutingTarget) -> str:
    """Check requests for images, videos or vectors, and workers that make them."""
    registration = target.registration
    if registration.output != request.output:
        return "other_kind" if request.worker else "other_model"
    if registration.state is not WorkerState.ready:
        return "draining"
    return "" if target.capacity else "full"


# Reasons that may pass. One of them is enough to let the request wait, whatever is wrong with the other workers.
_TEMPORARY = (
    "full", "better_full", "prefill_full", "no_partner", "draining", "asleep", "paused", "other_revision",
    "other_tokenizer", "no_encoder", "no_adapter",
)  # fmt: skip
# Reasons that end the request.
_PERMANENT = {
    "other_kind": (Code.invalid_request, "the named worker does not produce this kind of output"),
    "no_transfer": (Code.unsupported, "no worker can receive image embeddings"),
    "too_small": (Code.out_of_blocks, "the prompt does not fit into any worker's KV cache"),
    "too_long": (Code.context_length_exceeded, "prompt and max_tokens exceed every worker's max_model_len"),
    "no_vision": (Code.unsupported, "no worker accepts images: start an encode worker or a worker with a vision model"),
    "no_processor": (Code.invalid_request, "no worker has all the requested logits processors"),
    "no_constraints": (
        Code.unsupported,
        "no worker applies structured output: install penstock[structured] where native and mock workers run",
    ),
    "encode_only": (Code.invalid_request, "the named worker only encodes media"),
    "unknown_worker": (Code.invalid_request, "the named worker is not registered"),
    "pair_only": (Code.invalid_request, "the named worker runs requests only together with another one; name none"),
    "worker_not_named": (Code.invalid_request, "routing mode direct requires a worker name in the request"),
}


def common_reason(reasons: Iterable[str]) -> str:
    """The one reason to report when every target was rejected; temporary reasons come first."""
    distinct = set(reasons)
    return next((reason for reason in (*_TEMPORARY, *_PERMANENT) if reason in distinct), "no_worker")


def error_code(reason: str) -> Code | None:
    """The error that ends a request rejected for this reason; None: the request can wait."""
    return _PERMANENT[reason][0] if reason in _PERMANENT else None


def describe(reason: str) -> str:
    """A reason with its explanation, for error messages."""
    return f"{reason}: {_PERMANENT[reason][1]}" if reason in _PERMANENT else reason


FILL = 0.95
OCCUPANCY = 1 / 32  # with 1 / 16 the p99 of overload is 5 % higher where prompts share a long prefix
SERVED_COST = 1 / 256  # with 1 / 128 answers take 3 % longer where long prompts come among short ones
# With 32,768 the p99 of chats beside documents is 10 to 20 % higher. Without the exception for prompts that a target
# has most of, and if new requests did not wait for a better target as held ones do, follow-ups would go where their
# prefix is computed again: agents in overload would wait 35 % longer.
MOST_UNCOMPUTED = 2 * PASS_TOKENS
STAYS = 1 / 2  # of a prompt, at least; the rest is computed in a pass
# Copying an adapter to the device takes about as long as computing this many tokens of a prompt (``python -m
# tests.gpu.lora speed``), and may take the slot of one that the next request needs.
ADAPTER_TOKENS = 512.0
FAVOUR = 256.0  # prompt tokens of work, at most, that a session's last target is ahead


# Cost of copying a block back from host memory and from disk, relative to computing it, until a worker has measured it
# (``Registration.tier_costs``).
TIER_COSTS = (0.1, 0.5)


class RequestSize(NamedTuple):
    """
    Attributes:
        tokens: that must be in the cache before the first new token.
        blocks: full blocks of the prompt; no more can be reused.
        shared: leading blocks that many prompts begin with.
    """

    tokens: int
    blocks: int
    sequences: int
    shared: int = 0


class TargetCost(NamedTuple):
    """The cost of a request at one target.

    Attributes:
        absent_tokens: tokens of the prompt that are not on the device. A request waits for a better target that lacks
            fewer. Blocks on its lower tiers count as absent: they stay available, while others wait for the device.
        fits: the target has room for the request now.
        decodes: it has room to decode the request after another target has computed the prompt.
    """

    whole: float
    prefill: float
    decode: float
    absent_tokens: float
    fits: bool
    decodes: bool


def favour_tokens(size: RequestSize) -> float:
    """The discount for a request at the target of its session's last request."""
    return min(FAVOUR, size.tokens)


def loading_tokens(adapter: str, registration: Registration) -> float:
    """The extra cost at a worker that has an adapter only in host memory."""
    return 0.0 if any(each.loaded and each.id == adapter for each in registration.adapters) else ADAPTER_TOKENS


def tier_costs(registration: Registration) -> tuple[float, ...]:
    """Costs of a block on the lower tiers, in order; at most 1, since a worker computes what is slower to copy."""
    measured = registration.tier_costs
    costs = (*measured, *TIER_COSTS[len(measured) :])
    return tuple(min(max(each, 0.0), 1.0) for each in costs[: len(TIER_COSTS)])


def reusable(tiers: Sequence[Any], costs: Iterable[Any], leading: Any, most: Any, ops: Any) -> Any:
    """Blocks of a prompt that need not be computed, less what it costs to bring back those on lower tiers.

    Args:
        tiers: leading blocks on the device, in host memory or on the device, and on disk or either: numbers, or arrays
            of many targets.
        costs: ``tier_costs``.
        leading: as in ``target_cost``.
        most: number of blocks that can be reused.
        ops: as for ``reuse``.
    """
    held = ops.minimum(ops.maximum(tiers[0], leading), most)
    worth = held
    for cost, depth in zip(costs, tiers[1:], strict=False):
        further = ops.maximum(held, ops.minimum(depth, most))
        worth = worth + (1.0 - cost) * (further - held)
        held = further
    return worth


def lower_tiers(tiers: Sequence[int], leading: int, most: int) -> list[int]:
    """How many of a prompt's leading blocks a target must copy from each lower tier. Arguments as above."""
    held, found = min(max(tiers[0], leading), most), []
    for depth in tiers[1:]:
        found.append(max(0, min(depth, most) - held))
        held += found[-1]
    return found


def favoured(cost: TargetCost, tokens: float) -> TargetCost:
    if not tokens:
        return cost
    whole, prefill, decode = cost.whole - tokens, cost.prefill - tokens, cost.decode - tokens
    return cost._replace(whole=whole, prefill=prefill, decode=decode)


def target_cost(
    size: RequestSize,
    cached: float,
    leading: float,
    at: TargetColumns,
    *,
    device: float | None = None,
    overlap_weight: float = 1.0,
    prefill_weight: float = 1.0,
) -> TargetCost:
    """
    Args:
        cached: leading blocks cached at the target, or what they are worth (``reusable``).
        device: of these, those on the device; None: all.
        leading: the same for blocks of active requests.
        at: the target's.
        overlap_weight: of a reused token.
        prefill_weight: of a token to compute.
    """
    own = target_terms(at, size.sequences, Scalars, prefill_weight)
    fixed, decode, slope, held_up, queued, read, room, late = own
    reused = reuse(size, max(cached, leading), at.block_size, Scalars, overlap_weight)
    prompt_blocks = size.tokens // at.block_size
    reading = read * prompt_blocks
    whole = fixed + (slope + held_up + queued) * reused.work + reading - queued * max(0.0, reused.work - PASS_TOKENS)
    decodes = prompt_blocks - min(leading, size.blocks) <= room
    fits = decodes and (not late or reused.uncached_tokens <= most_uncached(size.tokens, Scalars))
    absent = reused.uncached_tokens if device is None else absent_tokens(size, device, leading, at.block_size, Scalars)
    return TargetCost(whole, fixed + slope * reused.work + reading, decode + reading, absent, fits, decodes)


def absent_tokens(size: Any, device: Any, leading: Any, block_size: Any, ops: Any) -> Any:
    """See ``TargetCost``. For the arguments, see ``target_cost`` and ``reuse``."""
    present = ops.minimum(ops.maximum(device, leading), size.blocks)
    return ops.maximum(1.0, size.tokens - block_size * present)


class Scalars:
    """The functions of ``numpy`` that are used here, for numbers."""

    minimum = min
    maximum = max

    @staticmethod
    def where(condition: bool, yes: float, no: float) -> float:
        return yes if condition else no


class TargetTerms(NamedTuple):
    """The terms of the formula that depend only on the target, for any request of this many sequences.

    Attributes:
        fixed: constant cost of the whole request and of its prefill stage.
        decode: constant cost of its decode stage.
        slope: for each token to compute.
        held_up: for each token to compute, by the sequences and prompts that it holds up.
        queued: for each token to compute, up to ``PASS_TOKENS``, by the work that it waits for.
        read: for each block of the prompt.
        room: blocks of the prompt, other than those of active requests, up to which the request fits.
        late: the target has so much to compute that a request fits only if most of its prompt is there.
    """

    fixed: Any
    decode: Any
    slope: Any
    held_up: Any
    queued: Any
    read: Any
    room: Any
    late: Any


def target_terms(at: Any, sequences: Any, ops: Any, prefill_weight: float = 1.0) -> TargetTerms:
    """
    Args:
        at: ``TargetColumns`` of numbers, or of arrays of many targets.
        sequences: of the request.
        ops: ``Scalars``, or ``numpy`` for arrays.
    """
    running, computing = at.sequences, at.computing
    compute = prefill_weight * at.slowness
    block = OCCUPANCY * at.block_size * at.decode_slowness
    beyond = ops.maximum(0.0, running + sequences - at.slots)
    decode = block * at.context_blocks + SLOT_TOKENS * at.decode_slowness * beyond
    served = SERVED_COST * ops.maximum(at.slowness, at.decode_slowness) * at.served_tokens
    room = FILL * at.total_blocks - (at.active_blocks + running + sequences)
    room = ops.where(running + sequences <= at.limit, room, -math.inf)
    backlog = compute * at.prefill_tokens
    return TargetTerms(
        backlog + decode + served,
        decode,
        OWN_WORK * compute,
        compute * ops.minimum(MOST_HELD_UP, HELD_UP * (running - computing) + HELD_UP_COMPUTING * computing),
        backlog / PASS_TOKENS,
        block * sequences,
        ops.where(running == 0, math.inf, room),
        (at.prefill_tokens > MOST_UNCOMPUTED) & (computing > 0),  # a mere estimate would limit a fast target
    )


def most_uncached(tokens: Any, ops: Any) -> Any:
    """Number of uncached tokens up to which a prompt fits at a late target; ``ops`` as above."""
    return ops.minimum(PASS_TOKENS, (1 - STAYS) * tokens)


class Reuse(NamedTuple):
    """
    Attributes:
        blocks: of the prompt that a target has, or is about to compute for another request.
        uncached_tokens: tokens of the prompt that it has to compute, at least 1.
        work: how many of them count, by the weight of a reused one, and since shared prefixes are free.
    """

    blocks: Any
    uncached_tokens: Any
    work: Any


def reuse(size: Any, blocks: Any, block_size: Any, ops: Any, overlap_weight: float = 1.0) -> Reuse:
    """
    Args:
        size: a ``RequestSize``, or columns of several.
        blocks: leading ones that a target caches or that active requests have: a number, or an array of many targets.
        ops: ``Scalars``, or ``numpy`` for arrays.
    """
    blocks = ops.minimum(blocks, size.blocks)
    present = block_size * blocks
    uncached = ops.maximum(1.0, size.tokens - present)
    work = uncached if overlap_weight == 1.0 else ops.maximum(1.0, size.tokens - overlap_weight * present)
    if not isinstance(size.shared, int) or size.shared:  # a shared prefix is free
        work = ops.maximum(1.0, work - ops.maximum(0.0, block_size * size.shared - present))
    return Reuse(blocks, uncached, work)


def target_costs(context: RoutingContext) -> Mapping[TargetId, TargetCost]:
    """The costs at all targets of a context."""
    size, weights, overlaps = size_of(context.request), context.weights, context.overlaps
    costs: dict[TargetId, TargetCost] = {}
    for target in context.targets:
        leading = context.leading.get(target.id, 0)
        cached: float = overlaps.get(target.id, 0)
        device = None
        if isinstance(overlaps, TierDepths) and cached > leading:
            own, tiers = tier_costs(target.registration), overlaps.tiers(target.id)
            cached, device = reusable(tiers, own, leading, size.blocks, Scalars), tiers[0]
        costs[target.id] = target_cost(
            size,
            cached,
            leading,
            columns_of(target),
            device=device,
            overlap_weight=weights.overlap,
            prefill_weight=weights.prefill,
        )
    for target_id in context.request.session:
        if target_id in costs:
            costs[target_id] = favoured(costs[target_id], favour_tokens(size))
    if adapter := context.request.adapter:
        for target in context.targets:
            costs[target.id] = favoured(costs[target.id], -loading_tokens(adapter, target.registration))
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


def columns_of(target: RoutingTarget) -> TargetColumns:
    """As ``TargetLoads`` has them."""
    registration, load = target.registration, target.load
    return TargetColumns(
        block_size=registration.block_size,
        total_blocks=registration.total_blocks,
        slots=registration.slots,
        limit=registration.slots + registration.queue,
        sequences=load.sequences,
        active_blocks=load.active_blocks,
        context_blocks=load.context_blocks,
        prefill_tokens=int(load.prefill_tokens),  # whole tokens, which score tables need
        computing=load.computing,
        slowness=load.slowness,
        decode_slowness=load.decode_slowness,
        served_tokens=load.served_tokens,
    )


def is_plain(request: RoutingRequest) -> bool:
    """Whether a request names and avoids no worker, has no media, and produces tokens."""
    return not (request.worker or request.medium or request.output or request.avoid)


def aggregated_pool(tracker: LoadTracker, request: RoutingRequest) -> Sequence[Registration]:
    """The workers of a plain request's model; empty: there is none, or some are not aggregated."""
    if not is_plain(request):
        return ()
    serving = tracker.serving(request.model)
    return () if any(each.role != "aggregated" for each in serving) else serving


# Number of targets up to which a loop is cheaper. Arrays are faster from one target on if nothing happens between two
# decisions. Since each request changes rows that they have to copy, they are faster from four targets on, and from nine
# after code that evicts them from the CPU's caches.
FEW = 4


def are_many(serving: Sequence[Registration], few: int = FEW) -> bool:
    """Whether a loop over the targets of these workers costs more than array operations."""
    return len(serving) > few or sum(each.dp_size for each in serving) > few


class HeldRequest(NamedTuple):
    """Fields as in ``RoutingContext``."""

    request: RoutingRequest
    overlaps: Mapping[TargetId, int]
    leading: Mapping[TargetId, int]
    waited_s: float


def is_ready(held: HeldRequest, targets: Sequence[RoutingTarget]) -> bool:
    """Whether a target has room for the request, and it need not wait for a better one.

    A request that no target can ever take is ready, too, so that the decision ends it.

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
    saved = best.absent_tokens - best_of_all.absent_tokens
    return best_of_all.fits or held.waited_s >= PATIENCE_S * saved
