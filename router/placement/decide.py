"""Chooses the targets of a request: filter, score, pick. A pure function of a ``RoutingContext``.

An aggregated worker runs prefill and decode. A decode worker computes a prompt itself if few of its tokens are not
cached, or if every prefill worker is behind and the decode worker costs less (``Weights.prefill_queue_tokens``). It is
paired with a prefill worker otherwise. If one of these two pools is empty, the other runs both stages, unless its
engines cannot (``Registration.pair_only``). Media go through an encode worker first, if there is one.

In mode "kv" the score of a target is what the request costs there, in prompt tokens of work (``cost``); the lowest
wins. A request waits for a better target that is full, for at most ``PATIENCE_S`` per token that it would not have to
compute.

A pair costs its prefill stage, the transfer of the blocks and its decode stage. KV blocks move only between pools of
the same layout and backend, over one of three distances. The cheapest partner of a decode worker is therefore the best
on its host, the best with RDMA, or the best of all: one pass over the prefill workers and one over the decode workers.

A worker that lacks leading blocks of the prompt that it is to compute reads them from one that has them, where that is
cheaper (``prefix_move``). This has no part in the choice: if a prefix counted as cheap wherever it can be read, prompts
would spread over all workers, and copies would push other prefixes out of their caches.

The encode worker of a medium is the one that probably still caches its embeddings. Rendezvous hashing sends the same
image to the same worker in every router, and moves few images when workers join or leave. A worker with much more than
its share of the load is skipped, so that one popular image overloads no worker.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import NamedTuple

import msgspec
from blake3 import blake3

from penstock.router.placement.cost import (
    Requirement,
    TargetCost,
    columns_of,
    common_reason,
    error_code,
    rejection,
    target_costs,
    uncached_tokens,
    utilization,
)
from penstock.router.placement.routing import (
    PATIENCE_S,
    RouteKind,
    RoutingContext,
    RoutingDecision,
    RoutingRequest,
    draw,
)
from penstock.router.state.holders import TargetId, TierDepths, as_dict
from penstock.router.state.target_loads import ENCODE, RoutingTarget, TargetColumns
from penstock.schemas.fleet import Registration, WorkerState
from penstock.schemas.jobs import Candidate, Move, Stage

# Pairs: which prefill worker can transfer KV to a decode worker, and at what cost

NEAR, MEDIUM, FAR = 0.02, 0.1, 0.5  # cost of moving a token, as a share of computing it
_PATHS = {NEAR: "on the same host", MEDIUM: "over RDMA", FAR: "over the network"}

TransferKind = tuple[str, str, int, int, str, str]


def transfer_kind(registration: Registration) -> TransferKind | None:
    """Workers of the same kind can transfer KV to each other; None: this worker has no transfer endpoint."""
    endpoint = registration.transfer
    if endpoint is None:
        return None
    pool = endpoint.pools.get("kv")
    layout, size = pool.whole_block if pool is not None else ("", 0)
    return (endpoint.backend, layout, size, registration.block_size, registration.revision, endpoint.quantization)


def distance(source: Registration, target: Registration) -> float:
    """NEAR, MEDIUM or FAR; both workers must have an endpoint."""
    one, two = source.transfer, target.transfer
    assert one is not None
    assert two is not None
    if one.host and one.host == two.host:
        return NEAR
    return MEDIUM if one.rdma and two.rdma else FAR


def describe_path(source: Registration, target: Registration) -> str:
    """The distance in words."""
    return _PATHS[distance(source, target)]


class _Cheapest:
    """The lowest costs among the prefill workers of one kind."""

    __slots__ = ("any", "hosts", "rdma")

    def __init__(self) -> None:
        self.any = self.rdma = float("inf")
        self.hosts: dict[str, float] = {}

    def add(self, registration: Registration, cost: float) -> None:
        endpoint = registration.transfer
        assert endpoint is not None
        self.any = min(self.any, cost)
        if endpoint.rdma:
            self.rdma = min(self.rdma, cost)
        if endpoint.host:
            self.hosts[endpoint.host] = min(cost, self.hosts.get(endpoint.host, cost))


class ScoredTarget(NamedTuple):
    """A prefill worker and the cost of computing the prompt there."""

    target: RoutingTarget
    cost: float


class PrefillPool:
    """Prefill workers as partners of decode workers.

    Args:
        available: those that can take the request now.
        full: those that could take it later.
        cost: of computing the prompt at a prefill worker.
        weight: of the transfer.
        queue: of a prefill worker, as ``queue_tokens`` returns it.

    Attributes:
        behind: all workers of some kind have such a queue.
    """

    def __init__(
        self,
        available: Sequence[RoutingTarget],
        full: Iterable[RoutingTarget],
        cost: Callable[[RoutingTarget], float],
        weight: float,
        queue: Callable[[RoutingTarget], float] = lambda target: 0.0,
    ) -> None:
        self._weight = weight
        self._cheapest: dict[TransferKind, _Cheapest] = {}
        self._full: dict[TransferKind, _Cheapest] = {}
        self._queues: dict[TransferKind, float] = {}
        self.scored = [ScoredTarget(target, cost(target)) for target in available]
        for scored, lowest in ((self.scored, self._cheapest), ([ScoredTarget(t, cost(t)) for t in full], self._full)):
            for target, value in scored:
                kind = transfer_kind(target.registration)
                if kind is None:
                    continue
                if kind not in lowest:
                    lowest[kind] = _Cheapest()
                lowest[kind].add(target.registration, value)
                self._queues[kind] = min(queue(target), self._queues.get(kind, float("inf")))
        self.behind = any(self._queues.values())

    def __bool__(self) -> bool:
        """Whether any of these workers can transfer KV, now or later."""
        return bool(self._cheapest or self._full)

    def queue(self, decode: Registration) -> float:
        """The shortest queue of all partners, also of those that are full; 0: one is not behind, or there are none."""
        kind = transfer_kind(decode)
        return self._queues.get(kind, 0.0) if kind is not None else 0.0

    def cheapest(self, decode: Registration, blocks: int, *, full: bool = False) -> float | None:
        """The cost of the best partner including the transfer of ``blocks``; None: there is none now.

        Args:
            full: of those that are full.
        """
        endpoint, kind = decode.transfer, transfer_kind(decode)
        among = self._full if full else self._cheapest
        if endpoint is None or kind is None or (lowest := among.get(kind)) is None:
            return None
        step = self._weight * blocks * decode.block_size
        cost = lowest.any + FAR * step
        if endpoint.rdma:
            cost = min(cost, lowest.rdma + MEDIUM * step)
        if endpoint.host in lowest.hosts:
            cost = min(cost, lowest.hosts[endpoint.host] + NEAR * step)
        return cost

    def has_full_partner(self, decode: Registration) -> bool:
        """Whether a partner exists that is only full."""
        return transfer_kind(decode) in self._full

    def partners(self, decode: Registration, blocks: int) -> list[ScoredTarget]:
        """All partners, each with its cost including the transfer of ``blocks``."""
        kind = transfer_kind(decode)
        step = self._weight * blocks * decode.block_size
        return [
            ScoredTarget(target, cost + distance(target.registration, decode) * step)
            for target, cost in self.scored
            if kind is not None and transfer_kind(target.registration) == kind
        ]


def queue_tokens(ahead: float, uncached: float, limit: int) -> float:
    """Prompt tokens that a prefill worker computes until a prompt is, its own included; 0: it is not behind.

    It is behind with more than ``limit``, if a prompt's own are at most a third of them (``WAITS``): then the prompt
    waits for others above all.
    """
    return ahead + uncached if 0 < limit < ahead + uncached and ahead >= WAITS * uncached else 0.0


# With 1 answers take 2 % longer where prefill workers are busy but keep up; with 3, first tokens come 10 % later where
# they do not (``penstock bench router --trace conversation_trace.jsonl --prefill 4 --decode 4 --load 2``, and 2 and 6).
WAITS = 2


# Prefixes: what the worker that computes a prompt reads from another one

# What a move costs at any length, in prompt tokens: the source is asked, and two steps of the reader's engine may have
# to end first. With 1,024, chats near saturation wait 18 % longer for their first token, as long as without moves; with
# 64 no less (``penstock bench router --policies kv,kv_moves --workload chat --load 0.7 --blocks 8192 --seeds 1``).
MOVE_TOKENS = 256


def prefix_move(
    request: RoutingRequest,
    reader: Registration,
    have: int,
    overlaps: Mapping[TargetId, int],
    worker: Callable[[str], Registration | None],
    weight: float,
    seed: int,
) -> Move | None:
    """What a worker reads from another one instead of computing it; None: nothing.

    It has to be on the same host or reached over RDMA. What is read costs a share of computing it (``NEAR``,
    ``MEDIUM``) and ``MOVE_TOKENS``; as much has to be saved beside that.

    Args:
        reader: computes the prompt.
        have: leading blocks of the prompt that it has, or is about to compute.
        overlaps: leading blocks cached, by target; only those on devices can be read.
        worker: the registration of a worker; None: it has left.
        weight: of transfers.
        seed: which of several sources that have most.
    """
    there = overlaps.device if isinstance(overlaps, TierDepths) else overlaps
    if not moves_prefixes(reader) or request.medium or request.output or not there:
        return None
    fixed = MOVE_TOKENS / reader.block_size
    best, sources = fixed, list[Move]()
    for (name, _), depth in as_dict(there).items():
        further = min(depth, request.prompt_blocks) - have
        if further < best or name == reader.worker or name in request.avoid:
            continue
        source = worker(name)
        if source is None or not moves_prefixes(source) or transfer_kind(source) != transfer_kind(reader):
            continue
        far = distance(source, reader)
        saved = (1 - far * weight) * further - fixed
        if far == FAR or saved < best:
            continue
        if saved > best:
            best, sources = saved, []
        sources.append(Move(name, have + further, _PATHS[far]))
    sources.sort(key=lambda each: each.source)
    return sources[draw(seed, 1) % len(sources)] if sources else None


def moves_prefixes(registration: Registration) -> bool:
    """Whether a worker can read prefixes from others, and others from it, now."""
    ready = registration.state is WorkerState.ready and not registration.rests
    return registration.moves_prefixes and ready and registration.transfer is not None and registration.dp_size == 1


# The score table that is stored with a job: the chosen targets, the best others, and those that were rejected

STORED_CANDIDATES = 16

Rejected = list[tuple[RoutingTarget, str]]  # with the reason


class ScoredTargets(NamedTuple):
    """Targets that can decode the request, column by column.

    ``transfer_blocks`` come from a prefill worker; -1: the target computes the prompt itself. The column is empty where
    no prefill worker takes part.
    """

    targets: list[RoutingTarget]
    scores: list[float]
    transfer_blocks: list[int]


def candidate(
    context: RoutingContext, target: RoutingTarget, score: float, rejection: str = "", role: str = ""
) -> Candidate:
    return candidate_of(target.id, context.overlap(target), columns_of(target), score, rejection, role)


def candidate_of(
    target_id: TargetId, overlap: int, columns: TargetColumns, score: float, rejection: str, role: str = ""
) -> Candidate:
    worker, rank = target_id
    return Candidate(
        worker,
        overlap,
        columns.active_blocks,
        columns.prefill_tokens,
        columns.sequences,
        columns.slots,
        score,
        rejection,
        rank,
        role,
        columns.context_blocks,
        columns.computing,
        columns.slowness,
        columns.decode_slowness,
        columns.served_tokens,
    )


def table(
    context: RoutingContext,
    lines: list[Candidate],
    at: int,
    scored: ScoredTargets,
    prefills: PrefillPool | None,
    rejected: Rejected,
) -> tuple[Candidate, ...]:
    """
    Args:
        lines: of the chosen targets.
        at: position of the chosen one in ``scored``.
    """
    targets, scores, transfer_blocks = scored
    others = []
    if prefills is not None:
        chosen = (lines[0].worker, lines[0].rank)
        others = sorted([each for each in prefills.scored if each.target.id != chosen], key=lambda each: each.cost)
    order = sorted(range(len(targets)), key=scores.__getitem__)
    order.remove(at)
    room = STORED_CANDIDATES - len(lines)
    for i in order[: max(room - len(others), (room + 1) // 2)]:
        role = "decode" if transfer_blocks and transfer_blocks[i] >= 0 else ""
        lines.append(candidate(context, targets[i], scores[i], "", role))
    for each in others[: STORED_CANDIDATES - len(lines)]:
        lines.append(candidate(context, each.target, each.cost, "", "prefill"))
    for target, reason in rejected[: STORED_CANDIDATES - len(lines)]:
        role = target.registration.role
        lines.append(candidate(context, target, 0.0, reason, "" if role == "aggregated" else role))
    return tuple(lines)


def no_target(context: RoutingContext, rejected: Rejected) -> RoutingDecision:
    """The decision when every target was rejected."""
    lines = tuple(candidate(context, target, 0.0, reason) for target, reason in rejected[:STORED_CANDIDATES])
    request = context.request
    if request.worker and not any(request.names(target.registration) for target in context.targets):
        return refusal("unknown_worker", lines)
    return refusal(common_reason(reason for _, reason in rejected), lines)


def refusal(reason: str, lines: tuple[Candidate, ...] = ()) -> RoutingDecision:
    """No route: the request waits or ends, as the reason says."""
    return RoutingDecision((), lines[:STORED_CANDIDATES], 0, reason, error_code(reason))


# The decision


def decide(context: RoutingContext) -> RoutingDecision:
    """Pick the target of each stage of one request."""
    request = context.request
    if context.mode == "direct" and not request.worker:
        return refusal("worker_not_named")
    if request.output:
        return _decide_apart(context)
    return _decide_media(context) if request.medium else _decide_tokens(context)


# Tokens


class _Pools(NamedTuple):
    """The targets of a model by role."""

    available: dict[str, list[RoutingTarget]]
    rejected: Rejected

    def full(self, role: str) -> list[RoutingTarget]:
        return [target for target, reason in self.rejected if reason == "full" and target.registration.role == role]

    def exists(self, role: str) -> bool:
        """Whether a target of this role takes the request, now or once it is no longer full."""
        return bool(self.available[role] or (self.rejected and self.full(role)))


def _decide_tokens(context: RoutingContext, requirement: Requirement | None = None) -> RoutingDecision:
    """One target for prefill and decode, or a pair."""
    costs = target_costs(context) if context.mode == "kv" else {}
    pools = _filter(context, requirement, costs)
    has_decode = pools.exists("decode")
    targets = pools.available["aggregated"]
    if has_decode:
        targets = targets + pools.available["decode"]
    if context.request.worker or not has_decode:
        targets = targets + pools.available["prefill"]
        prefills = None
    else:
        prefills = _prefill_pool(context, pools, costs)
    if prefills is None:
        targets = _whole(targets, pools.rejected, "pair_only" if context.request.worker else "no_partner", costs)
    scored = _score(context, context.without_avoided(targets), prefills, pools.rejected, costs)
    if not scored.targets:
        return no_target(context, pools.rejected)
    if prefills is None and _waits_for_better(context, scored, pools.rejected, costs):
        return refusal("better_full")
    at = context.pick(scored.scores)
    if scored.transfer_blocks and scored.transfer_blocks[at] >= 0:
        assert prefills is not None
        return _pair(context, at, scored, prefills, pools.rejected)
    return _single(context, at, scored, prefills, pools)


def _filter(context: RoutingContext, requirement: Requirement | None, costs: Mapping[TargetId, TargetCost]) -> _Pools:
    available: dict[str, list[RoutingTarget]] = {"aggregated": [], "prefill": [], "decode": []}
    rejected: Rejected = []
    request = context.request
    for target in context.targets:
        reason = rejection(request, target, requirement)
        role = target.registration.role
        if not reason and costs and role != ENCODE:
            cost = costs[target.id]
            reason = "" if (cost.decodes if role == "decode" else cost.fits) else "full"
        pool = available.get(role)
        if pool is None:
            if reason == "encode_only":
                rejected.append((target, reason))
        elif not reason:
            pool.append(target)
        elif reason != "other_model":
            rejected.append((target, reason))
    return _Pools(available, rejected)


def _whole(
    targets: list[RoutingTarget], rejected: Rejected, reason: str, costs: Mapping[TargetId, TargetCost]
) -> list[RoutingTarget]:
    """Targets that run a request alone now; the others move to ``rejected``."""
    found = []
    for target in targets:
        if target.registration.pair_only:
            rejected.append((target, reason))
        elif costs and not costs[target.id].fits:
            rejected.append((target, "full"))
        else:
            found.append(target)
    return found


def _waits_for_better(
    context: RoutingContext, scored: ScoredTargets, rejected: Rejected, costs: Mapping[TargetId, TargetCost]
) -> bool:
    """Whether a request waits for a target that is full now, and cheaper."""
    if context.waited_s is None or not costs:
        return False
    full = [costs[target.id] for target, reason in rejected if reason == "full"]
    if not full:
        return False
    best, better = min(costs[target.id] for target in scored.targets), min(full)
    if better.whole >= best.whole:
        return False
    return context.waited_s < PATIENCE_S * (best.absent_tokens - better.absent_tokens)


def _prefill_pool(context: RoutingContext, pools: _Pools, costs: Mapping[TargetId, TargetCost]) -> PrefillPool | None:
    """None: no prefill worker will ever take the request."""
    if not pools.exists("prefill"):
        return None

    def cost(target: RoutingTarget) -> float:
        return costs[target.id].prefill if costs else utilization(target)

    def queue(target: RoutingTarget) -> float:
        limit = context.weights.prefill_queue_tokens
        return queue_tokens(target.load.prefill_tokens, costs[target.id].absent_tokens, limit) if costs else 0.0

    weight = context.weights.transfer if context.mode == "kv" else 0.0
    available = context.without_avoided(pools.available["prefill"])
    return PrefillPool(available, pools.full("prefill"), cost, weight, queue)


def _score(
    context: RoutingContext,
    targets: list[RoutingTarget],
    prefills: PrefillPool | None,
    rejected: Rejected,
    costs: Mapping[TargetId, TargetCost],
) -> ScoredTargets:
    """Score every target; decode workers that cannot take the request now move to ``rejected``."""
    request = context.request
    if prefills is None:
        return ScoredTargets(targets, [costs[t.id].whole if costs else utilization(t) for t in targets], [])
    scored = ScoredTargets([], [], [])
    for target in targets:
        overlap, transfer_blocks, cost = context.overlap(target), -1, None
        registration = target.registration
        far = uncached_tokens(request, target, overlap) > _local_tokens(context, target)
        if registration.role == "decode" and (far or registration.pair_only):
            transfer_blocks = request.prompt_blocks - overlap
            cost = prefills.cheapest(registration, transfer_blocks)
            if prefills.behind and _cheaper_alone(context, target, prefills, cost, transfer_blocks, costs):
                cost = None
            elif cost is None and prefills.has_full_partner(registration):
                rejected.append((target, "prefill_full"))
                continue
            elif cost is None and registration.pair_only:
                rejected.append((target, "no_partner"))
                continue
        if cost is None and costs and not costs[target.id].fits:
            rejected.append((target, "full"))
            continue
        if cost is None:
            transfer_blocks, cost = -1, costs[target.id].whole if costs else utilization(target)
        else:
            cost = cost + costs[target.id].decode if costs else utilization(target)
        scored.targets.append(target)
        scored.scores.append(cost)
        scored.transfer_blocks.append(transfer_blocks)
    return scored


def _cheaper_alone(
    context: RoutingContext,
    target: RoutingTarget,
    prefills: PrefillPool,
    pair: float | None,
    blocks: int,
    costs: Mapping[TargetId, TargetCost],
) -> bool:
    """Whether a decode worker computes a prompt since all its partners are behind, and it costs less there.

    Args:
        pair: cost of the best partner; None: all are full.
        blocks: to transfer from it.
    """
    registration = target.registration
    if registration.pair_only or not prefills.queue(registration):
        return False
    own = costs[target.id]
    if pair is None:
        pair = prefills.cheapest(registration, blocks, full=True)
    return own.fits and pair is not None and own.whole < pair + own.decode


def _single(
    context: RoutingContext, at: int, scored: ScoredTargets, prefills: PrefillPool | None, pools: _Pools
) -> RoutingDecision:
    target = scored.targets[at]
    role = target.registration.role
    kind, how = _explain_single(context, at, scored, prefills, pools)
    return RoutingDecision(
        (Stage(role, *target.id),),
        table(context, [candidate(context, target, scored.scores[at])], at, scored, prefills, pools.rejected),
        context.overlap(target),
        how=how,
        kind=kind,
    )


def _pair(
    context: RoutingContext, at: int, scored: ScoredTargets, prefills: PrefillPool, rejected: Rejected
) -> RoutingDecision:
    decode, blocks, prompt_blocks = scored.targets[at], scored.transfer_blocks[at], context.request.prompt_blocks
    partners = prefills.partners(decode.registration, blocks)
    prefill, cost = partners[context.pick([each.cost for each in partners], stage=1)]
    lines = [
        candidate(context, prefill, cost, "", "prefill"),
        candidate(context, decode, scored.scores[at], "", "decode"),
    ]
    path = describe_path(prefill.registration, decode.registration)
    return RoutingDecision(
        (Stage("prefill", *prefill.id), Stage("decode", *decode.id)),
        table(context, lines, at, scored, prefills, rejected),
        context.overlap(prefill),
        how=f"split: {blocks} of {prompt_blocks} blocks to compute, worth a transfer {path}",
        kind="split",
    )


def _explain_single(
    context: RoutingContext, at: int, scored: ScoredTargets, prefills: PrefillPool | None, pools: _Pools
) -> tuple[RouteKind, str]:
    """The kind of a route with a single stage, and why it has no second one; "" if no other route was possible."""
    target = scored.targets[at]
    role = target.registration.role
    kind: RouteKind = "aggregated" if role == "aggregated" else "local"
    if context.request.worker:
        return kind, "the request names its worker"
    has_decode, has_prefill = pools.exists("decode"), pools.exists("prefill")
    if not has_decode and not has_prefill:
        return kind, ""
    if role == "prefill" or not has_decode:
        return kind, "no decode worker"
    if role == "aggregated":
        others = [s for t, s in zip(scored.targets, scored.scores, strict=True) if t.registration.role != role]
        if not others:
            return kind, "aggregated: no other target has capacity"
        return kind, f"aggregated: score {scored.scores[at]:.1f}, the best other target {min(others):.1f}"
    if prefills is None:
        return kind, "no prefill worker"
    tokens, limit = uncached_tokens(context.request, target, context.overlap(target)), _local_tokens(context, target)
    if tokens <= limit:
        return kind, f"local: {tokens} tokens to compute, limit {limit}"
    queue, limit = prefills.queue(target.registration), context.weights.prefill_queue_tokens
    if queue:
        how = f"local: prefill workers are behind, {queue:.0f} tokens with this prompt, limit {limit}"
        return "local_behind", how
    return kind, "no prefill worker with a compatible KV transfer"


def _local_tokens(context: RoutingContext, target: RoutingTarget) -> int:
    endpoint = target.registration.transfer
    return context.weights.local_tokens(gpu=endpoint is not None and endpoint.gpu)


# Media


def _decide_media(context: RoutingContext) -> RoutingDecision:
    """An encode worker before a target that can receive its embeddings; otherwise a target with a vision model."""
    request = context.request
    if any(target.registration.vision and request.names(target.registration) for target in context.targets):
        return _decide_tokens(context, _vision_required)
    unnamed = msgspec.structs.replace(request, worker="")
    pool = [
        (target, rejection(unnamed, target))
        for target in context.targets
        if target.registration.role == ENCODE and target.registration.transfer
    ]
    available = context.without_avoided([target for target, reason in pool if not reason])
    if available:
        encoder, note = _pick_encoder(context, available)
        decision = _decide_tokens(context, _embeddings_required(encoder.registration))
        if decision.reason != "no_transfer":
            return _prepend_encoder(context, encoder, note, available, decision) if decision.route else decision
    elif any(reason == "full" for _, reason in pool):
        return refusal("full", tuple(candidate(context, target, 0.0, reason, ENCODE) for target, reason in pool))
    return _decide_tokens(context, _vision_required)


SLACK = 1.25  # a worker takes at most this multiple of its fair share, rounded up


def by_preference(medium: bytes, targets: Sequence[RoutingTarget]) -> list[RoutingTarget]:
    """``targets`` in this medium's order of preference."""
    return sorted(targets, key=lambda target: _weight(medium, target), reverse=True)


def pick(medium: bytes, targets: Sequence[RoutingTarget]) -> tuple[RoutingTarget, bool]:
    """The encode worker for a medium, and whether it is the preferred one.

    Args:
        medium: digest of the request's first medium.
        targets: the candidates, at least one.
    """
    ordered = by_preference(medium, targets)
    limit = ceil(SLACK * (sum(target.load.requests for target in targets) + 1) / len(targets))
    for target in ordered:
        if target.load.requests < limit:
            return target, target is ordered[0]
    raise AssertionError("some target is always at or below its fair share")


def _weight(medium: bytes, target: RoutingTarget) -> bytes:
    worker, rank = target.id
    return blake3(f"{worker}:{rank}:".encode() + medium).digest(length=8)


def _pick_encoder(context: RoutingContext, available: list[RoutingTarget]) -> tuple[RoutingTarget, str]:
    if context.mode in ("kv", "direct"):
        chosen, preferred = pick(context.request.medium, available)
        return chosen, "" if preferred else ", since the preferred one is overloaded"
    return available[context.pick([utilization(target) for target in available], stage=2)], ""


def _prepend_encoder(
    context: RoutingContext,
    encoder: RoutingTarget,
    note: str,
    available: list[RoutingTarget],
    decision: RoutingDecision,
) -> RoutingDecision:
    others = [
        candidate(context, target, utilization(target), "", ENCODE) for target in available if target is not encoder
    ]
    stages = len(decision.route)
    first = candidate(context, encoder, utilization(encoder), "", ENCODE)
    lines = (first, *decision.candidates[:stages], *others[:3], *decision.candidates[stages:])
    how = f"media through {encoder.id[0]}{note}"
    return msgspec.structs.replace(
        decision,
        route=(Stage(ENCODE, *encoder.id), *decision.route),
        candidates=lines[:STORED_CANDIDATES],
        how=f"{decision.how}; {how}" if decision.how else how,
    )


def _embeddings_required(encoder: Registration) -> Requirement:
    """The worker must be able to receive embeddings from ``encoder``."""
    assert encoder.transfer is not None
    backend, pool = encoder.transfer.backend, encoder.transfer.pools.get("embeds")

    def requirement(registration: Registration) -> str:
        endpoint = registration.transfer
        if endpoint is None or endpoint.backend != backend:
            return "no_transfer"
        own = endpoint.pools.get("embeds")
        return "no_transfer" if own is not None and pool is not None and own.layout != pool.layout else ""

    return requirement


def _vision_required(registration: Registration) -> str:
    """A worker with a pool for embeddings waits for an encode worker, which is expected to come (back)."""
    if registration.vision:
        return ""
    has_pool = registration.transfer is not None and "embeds" in registration.transfer.pools
    return "no_encoder" if has_pool else "no_vision"


# Images, videos and vectors


def _decide_apart(context: RoutingContext) -> RoutingDecision:
    """The worker with the most room: diffusion and embed workers have no prefix cache."""
    pool = [(target, rejection(context.request, target)) for target in context.targets]
    rejected = [(target, reason) for target, reason in pool if reason and reason != "other_model"]
    available = context.without_avoided([target for target, reason in pool if not reason])
    if not available:
        return no_target(context, rejected)
    scores = [utilization(target) for target in available]
    at = context.pick(scores)
    scored = ScoredTargets(available, scores, [])
    lines = [candidate(context, available[at], scores[at])]
    role = available[at].registration.role
    return RoutingDecision((Stage(role, *available[at].id),), table(context, lines, at, scored, None, rejected))
