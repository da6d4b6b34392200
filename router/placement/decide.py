"""Which targets a request goes to: filter, score, pick. A pure function of a ``RoutingContext``.

An aggregated worker runs prefill and decode. A decode worker computes a prompt itself if few of its tokens are not
cached, and is paired with a prefill worker otherwise. If one of these two pools is empty, the other runs both stages,
unless its engines cannot (``Registration.pair_only``). Media go through an encode worker first, if there is one.

In mode "kv" the score of a target is what the request costs there, in prompt tokens of work (``placement.cost``); the
lowest wins. A pair costs its prefill stage, the transfer of the blocks (``pairs``) and its decode stage. A request that
is held waits for a better target that is full, for at most ``PATIENCE_S`` per token that it would not have to compute.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from penstock.router.placement import encoders
from penstock.router.placement.cost import TargetCost
from penstock.router.placement.filters import Requirement, rejection
from penstock.router.placement.pairs import PrefillPool, describe_path
from penstock.router.placement.routing import PATIENCE_S, RoutingContext, RoutingDecision
from penstock.router.placement.score_table import (
    STORED_CANDIDATES,
    Rejected,
    ScoredTargets,
    candidate,
    no_target,
    refusal,
    table,
)
from penstock.router.placement.scoring import target_costs, uncached_tokens, utilization
from penstock.router.state.depths import TargetId
from penstock.router.state.load import ENCODE, RoutingTarget
from penstock.schemas.fleet import Registration
from penstock.schemas.jobs import Stage


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
        targets = _whole(targets, pools.rejected, "pair_only" if context.request.worker else "no_partner")
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
        if not reason and costs and target.registration.role != ENCODE and not costs[target.id].fits:
            reason = "full"
        pool = available.get(target.registration.role)
        if pool is None:
            if reason == "encode_only":
                rejected.append((target, reason))
        elif not reason:
            pool.append(target)
        elif reason != "other_model":
            rejected.append((target, reason))
    return _Pools(available, rejected)


def _whole(targets: list[RoutingTarget], rejected: Rejected, reason: str) -> list[RoutingTarget]:
    """Targets that run a request alone; the others move to ``rejected``."""
    rejected += [(target, reason) for target in targets if target.registration.pair_only]
    return [target for target in targets if not target.registration.pair_only]


def _waits_for_better(
    context: RoutingContext, scored: ScoredTargets, rejected: Rejected, costs: Mapping[TargetId, TargetCost]
) -> bool:
    """Whether a held request waits for a target that is full now, and cheaper."""
    if context.waited_s is None or not costs:
        return False
    full = [costs[target.id] for target, reason in rejected if reason == "full"]
    best = min(costs[target.id] for target in scored.targets)
    better = min(full, default=None)
    if better is None or better.whole >= best.whole:
        return False
    return context.waited_s < PATIENCE_S * (best.uncached_tokens - better.uncached_tokens)


def _prefill_pool(context: RoutingContext, pools: _Pools, costs: Mapping[TargetId, TargetCost]) -> PrefillPool | None:
    """None: no prefill worker will ever take the request."""
    if not pools.exists("prefill"):
        return None

    def cost(target: RoutingTarget) -> float:
        return costs[target.id].prefill if costs else utilization(target)

    weight = context.weights.transfer if context.mode == "kv" else 0.0
    available = context.without_avoided(pools.available["prefill"])
    return PrefillPool(available, pools.full("prefill"), cost, weight)


def _score(
    context: RoutingContext,
    targets: list[RoutingTarget],
    prefills: PrefillPool | None,
    rejected: Rejected,
    costs: Mapping[TargetId, TargetCost],
) -> ScoredTargets:
    """Score every target; decode workers whose only partners are full move to ``rejected``."""
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
            if cost is None and prefills.has_full_partner(registration):
                rejected.append((target, "prefill_full"))
                continue
            if cost is None and registration.pair_only:
                rejected.append((target, "no_partner"))
                continue
        if cost is None:
            transfer_blocks, cost = -1, costs[target.id].whole if costs else utilization(target)
        else:
            cost = cost + costs[target.id].decode if costs else utilization(target)
        scored.targets.append(target)
        scored.scores.append(cost)
        scored.transfer_blocks.append(transfer_blocks)
    return scored


def _single(
    context: RoutingContext, at: int, scored: ScoredTargets, prefills: PrefillPool | None, pools: _Pools
) -> RoutingDecision:
    target = scored.targets[at]
    role = target.registration.role
    return RoutingDecision(
        (Stage(role, *target.id),),
        table(context, [candidate(context, target, scored.scores[at])], at, scored, prefills, pools.rejected),
        context.overlap(target),
        how=_explain_single(context, at, scored, pools),
        kind="aggregated" if role == "aggregated" else "local",
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


def _explain_single(context: RoutingContext, at: int, scored: ScoredTargets, pools: _Pools) -> str:
    """Why the route has a single stage; "" if no other route was possible."""
    if context.request.worker:
        return "the request names its worker"
    has_decode, has_prefill = pools.exists("decode"), pools.exists("prefill")
    if not has_decode and not has_prefill:
        return ""
    role = scored.targets[at].registration.role
    if role == "prefill" or not has_decode:
        return "no decode worker"
    if role == "aggregated":
        others = [s for t, s in zip(scored.targets, scored.scores, strict=True) if t.registration.role != role]
        if not others:
            return "aggregated: no other target has capacity"
        return f"aggregated: score {scored.scores[at]:.1f}, the best other target {min(others):.1f}"
    if not has_prefill:
        return "no prefill worker"
    tokens = uncached_tokens(context.request, scored.targets[at], context.overlap(scored.targets[at]))
    limit = _local_tokens(context, scored.targets[at])
    if tokens <= limit:
        return f"local: {tokens} tokens to compute, limit {limit}"
    return "no prefill worker with a compatible KV transfer"


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


def _pick_encoder(context: RoutingContext, available: list[RoutingTarget]) -> tuple[RoutingTarget, str]:
    if context.mode in ("kv", "direct"):
        chosen, preferred = encoders.pick(context.request.medium, available)
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
