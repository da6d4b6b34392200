"""Which workers a request goes to: filter, score, pick. A pure function of the pools, the overlaps and the rng.

A request needs a *home*, where it decodes. An aggregated worker does everything; a decode worker computes a prompt
itself if little of it is left to compute, and else is paired with a prefill worker. If one of these two pools is
empty, the other does everything. Media go through an encode worker first, if there is one.

Score of a home in mode "kv", in blocks of prompt work, lowest wins:

    alone    prefill_weight · max(0, (A + P) / B − overlap_weight · C)  +  D + U
    paired   the first term at the prefill worker, and its D, and way · M, then D + U

A: prompt tokens that the worker has yet to compute for others; P: this prompt's tokens; B: its block size;
C: leading prompt blocks that the worker holds; D: prompt blocks of its unfinished requests that it had to compute or
was handed; U: blocks that this prompt would add to them; M: blocks to be moved; way: see ``pairs``. The first term is
how long the first token takes, D + U how much the worker's batch and cache are burdened for as long as the request
lives. D of a prefill worker is what it has not yet been seen to finish.
"""

from collections.abc import Mapping, Sequence
from math import exp
from random import Random
from typing import Literal, NamedTuple

import msgspec

from router import encoders
from router.holders import Place
from router.load_tracker import ENCODE, RoutingTarget
from router.pairs import Partners, way
from router.scoring import (
    Mode,
    Need,
    RoutingRequest,
    Weights,
    burden,
    busy,
    common_reason,
    excluded,
    explained,
    prefill_cost,
    score,
    uncached_tokens,
    verdict,
)
from schemas.errors import Code
from schemas.fleet import Registration
from schemas.jobs import Candidate, Stage

Kind = Literal["aggregated", "local", "split"]

STORED_CANDIDATES = 16
TIE = 1e-6  # scores closer than this are equal


class RoutingDecision(msgspec.Struct, frozen=True):
    """The answer. Without ``route``: why, and whether waiting can help (``code`` empty) or not."""

    route: tuple[Stage, ...]  # all stages
    candidates: tuple[Candidate, ...]
    overlap_blocks: int = 0  # at the worker that computes the prompt
    reason: str = ""
    code: Code | None = None
    how: str = ""  # why this kind of route, in words
    kind: Kind = "aggregated"  # "local": a worker of a disaggregated pool does everything

    @property
    def chosen(self) -> Place | None:
        """Who gets the request first."""
        return (self.route[0].worker, self.route[0].rank) if self.route else None

    @property
    def computing(self) -> str:
        """The worker that computes the prompt; there is a route."""
        return next(stage.worker for stage in self.route if stage.role != ENCODE)


class _Homes(NamedTuple):
    """Who can be the home, column by column. ``moved``: blocks from a prefill worker; -1: it does everything itself."""

    targets: list[RoutingTarget]
    scores: list[float]
    moved: list[int]


class RoutingContext:
    """One decision: what is asked, and how to weigh and pick."""

    def __init__(
        self,
        request: RoutingRequest,
        overlaps: Mapping[Place, int],
        mode: Mode,
        weights: Weights,
        rng: Random,
        turn: int,
    ) -> None:
        self.request = request
        self.overlaps = overlaps
        self.mode = mode
        self.weights = weights
        self._rng = rng
        self._turn = turn

    def overlap(self, target: RoutingTarget) -> int:
        return self.overlaps.get(target.place, 0)

    def prefill(self, target: RoutingTarget) -> float:
        if self.mode != "kv":
            return busy(target)
        return prefill_cost(self.request, target, self.overlap(target), self.weights) + target.load.active_blocks

    def pick(self, scores: Sequence[float]) -> int:
        if self.mode == "round_robin":
            return self._turn % len(scores)
        if self.mode == "random":
            return self._rng.randrange(len(scores))
        return _pick(scores, self.weights.temperature, self._rng)

    def trusted(self, targets: list[RoutingTarget]) -> list[RoutingTarget]:
        """Without those that failed this request, unless nobody else is left."""
        if not self.request.avoid:
            return targets
        return [target for target in targets if target.place[0] not in self.request.avoid] or targets

    def line(self, target: RoutingTarget, score: float, why: str = "", stage: str = "") -> Candidate:
        load = target.load
        worker, rank = target.place
        return Candidate(
            worker,
            self.overlap(target),
            load.active_blocks,
            int(load.prefill_tokens),
            load.sequences,
            target.registration.slots,
            score,
            why,
            rank,
            stage,
        )


def decide(
    request: RoutingRequest,
    targets: Sequence[RoutingTarget],
    overlaps: Mapping[Place, int],
    mode: Mode,
    weights: Weights,
    rng: Random,
    turn: int = 0,
) -> RoutingDecision:
    """Pick the places for one request.

    Args:
        targets: all places, in the order of ``Fleet.targets``.
        overlaps: leading prompt blocks held, by place (``PrefixIndex.match``).
        turn: requests placed before this one; round robin goes by it.
    """
    if mode == "direct" and not request.worker:
        return _refusal("worker_not_named", ())
    context = RoutingContext(request, overlaps, mode, weights, rng, turn)
    if request.picture:
        return _studio(context, targets)
    return _with_media(context, targets) if request.medium else _place(context, targets)


# Pictures


def _studio(context: RoutingContext, targets: Sequence[RoutingTarget]) -> RoutingDecision:
    """A diffusion worker that is free: no cache, one request at a time, so one is as good as another."""
    pool = [(target, excluded(context.request, target)) for target in targets]
    shut = [(target, why) for target, why in pool if why and why != "other_model"]
    open_ = context.trusted([target for target, why in pool if not why])
    if not open_:
        return _nobody(context, targets, shut)
    scores = [busy(target) for target in open_]
    at = context.pick(scores)
    homes = _Homes(open_, scores, [])
    lines = [context.line(open_[at], scores[at])]
    role = open_[at].registration.role
    return RoutingDecision((Stage(role, *open_[at].place),), _table(context, lines, at, homes, None, shut))


# Media


def _with_media(context: RoutingContext, targets: Sequence[RoutingTarget]) -> RoutingDecision:
    """An encode worker in front of somebody who can take what it makes; without one, somebody with eyes."""
    request = context.request
    if any(target.registration.vision and request.names(target.registration) for target in targets):
        return _place(context, targets, _sight)
    anybody = msgspec.structs.replace(request, worker="")
    pool = [(m, excluded(anybody, m)) for m in targets if m.registration.role == ENCODE and m.registration.transfer]
    open_ = context.trusted([target for target, why in pool if not why])
    if open_:
        encoder, note = _encoder(context, open_)
        decision = _place(context, targets, _reading_from(encoder.registration))
        if decision.reason != "no_transfer":
            return _behind(context, encoder, note, open_, decision) if decision.route else decision
    elif any(why == "full" for _, why in pool):
        return _refusal("full", tuple(context.line(target, 0.0, why, ENCODE) for target, why in pool))
    return _place(context, targets, _sight)


def _encoder(context: RoutingContext, open_: list[RoutingTarget]) -> tuple[RoutingTarget, str]:
    if context.mode in ("kv", "direct"):
        chosen, preferred = encoders.pick(context.request.medium, open_)
        return chosen, "" if preferred else ", as the preferred one has too much to do"
    return open_[context.pick([busy(target) for target in open_])], ""


def _behind(
    context: RoutingContext, encoder: RoutingTarget, note: str, open_: list[RoutingTarget], decision: RoutingDecision
) -> RoutingDecision:
    """``decision`` with an encode worker in front."""
    others = [context.line(target, busy(target), "", ENCODE) for target in open_ if target is not encoder]
    stages = len(decision.route)
    lines = (context.line(encoder, busy(encoder), "", ENCODE), *decision.candidates[:stages], *others[:3])
    how = f"media through {encoder.place[0]}{note}"
    return msgspec.structs.replace(
        decision,
        route=(Stage(ENCODE, *encoder.place), *decision.route),
        candidates=(*lines, *decision.candidates[stages:])[:STORED_CANDIDATES],
        how=f"{decision.how}; {how}" if decision.how else how,
    )


def _reading_from(encoder: Registration) -> Need:
    assert encoder.transfer is not None
    backend, pool = encoder.transfer.backend, encoder.transfer.pools.get("embeds")

    def need(registration: Registration) -> str:
        endpoint = registration.transfer
        if endpoint is None or endpoint.backend != backend:
            return "no_transfer"
        own = endpoint.pools.get("embeds")
        return "no_transfer" if own is not None and pool is not None and own.layout != pool.layout else ""

    return need


def _sight(registration: Registration) -> str:
    """A worker that has a pool for embeddings waits for an encode worker: there will be one (again)."""
    if registration.vision:
        return ""
    return (
        "no_encoder" if registration.transfer is not None and "embeds" in registration.transfer.pools else "no_vision"
    )


# Prompt and answer


class _Pools(NamedTuple):
    """The places of a model by what they can do for the request."""

    open: dict[str, list[RoutingTarget]]  # by role
    shut: list[tuple[RoutingTarget, str]]  # and why

    def full(self, role: str) -> list[RoutingTarget]:
        return [target for target, why in self.shut if why == "full" and target.registration.role == role]

    def pool(self, role: str) -> bool:
        """Whether anybody of a role will ever take the request."""
        return bool(self.open[role] or (self.shut and self.full(role)))


def _place(context: RoutingContext, targets: Sequence[RoutingTarget], need: Need | None = None) -> RoutingDecision:
    """The worker that does everything, or the pair."""
    pools = _sorted(context.request, targets, need)
    decodes = pools.pool("decode")
    candidates = pools.open["aggregated"]
    if decodes:
        candidates = candidates + pools.open["decode"]
    if context.request.worker or not decodes:
        candidates = candidates + pools.open["prefill"]
        partners = None
    else:
        partners = _partners(context, pools)
    homes = _homes(context, context.trusted(candidates), partners, pools.shut)
    if not homes.targets:
        return _nobody(context, targets, pools.shut)
    at = context.pick(homes.scores)
    if homes.moved and homes.moved[at] >= 0:
        assert partners is not None
        return _paired(context, at, homes, partners, pools.shut)
    return _alone(context, at, homes, partners, pools)


def _sorted(request: RoutingRequest, targets: Sequence[RoutingTarget], need: Need | None) -> _Pools:
    open_: dict[str, list[RoutingTarget]] = {"aggregated": [], "prefill": [], "decode": []}
    shut: list[tuple[RoutingTarget, str]] = []
    for target in targets:
        why = excluded(request, target, need)
        pool = open_.get(target.registration.role)
        if pool is None:
            if why == "encode_only":
                shut.append((target, why))
        elif not why:
            pool.append(target)
        elif why != "other_model":
            shut.append((target, why))
    return _Pools(open_, shut)


def _partners(context: RoutingContext, pools: _Pools) -> Partners | None:
    """The prefill workers, if any will ever take the request."""
    if not pools.pool("prefill"):
        return None
    weight = context.weights.transfer if context.mode == "kv" else 0.0
    return Partners(context.trusted(pools.open["prefill"]), pools.full("prefill"), context.prefill, weight)


def _homes(
    context: RoutingContext,
    targets: list[RoutingTarget],
    partners: Partners | None,
    shut: list[tuple[RoutingTarget, str]],
) -> _Homes:
    """Every target with its score; decode workers that need a prefill worker which is full go to ``shut``."""
    request, mode, weights, overlaps = context.request, context.mode, context.weights, context.overlaps
    if partners is None:
        return _Homes(targets, [score(request, m, overlaps.get(m.place, 0), mode, weights) for m in targets], [])
    homes = _Homes([], [], [])
    for target in targets:
        overlap, moved, cost = overlaps.get(target.place, 0), -1, None
        alone = target.registration.role != "decode"
        if not alone and uncached_tokens(request, target, overlap) > weights.local_prefill_tokens:
            moved = request.prompt_blocks - min(overlap, request.prompt_blocks)
            cost = partners.cheapest(target.registration, moved)
            if cost is None and partners.will_be(target.registration):
                shut.append((target, "prefill_full"))
                continue
        if cost is None:
            moved, cost = -1, score(request, target, overlap, mode, weights)
        else:
            cost = cost + burden(request, target, overlap) if mode == "kv" else busy(target)
        homes.targets.append(target)
        homes.scores.append(cost)
        homes.moved.append(moved)
    return homes


def _alone(
    context: RoutingContext, at: int, homes: _Homes, partners: Partners | None, pools: _Pools
) -> RoutingDecision:
    target = homes.targets[at]
    role = target.registration.role
    return RoutingDecision(
        (Stage(role, *target.place),),
        _table(context, [context.line(target, homes.scores[at])], at, homes, partners, pools.shut),
        min(context.request.prompt_blocks, context.overlap(target)),
        how=_why_alone(context, at, homes, pools),
        kind="aggregated" if role == "aggregated" else "local",
    )


def _paired(
    context: RoutingContext, at: int, homes: _Homes, partners: Partners, shut: list[tuple[RoutingTarget, str]]
) -> RoutingDecision:
    decode, moved, prompt_blocks = homes.targets[at], homes.moved[at], context.request.prompt_blocks
    scored = partners.of(decode.registration, moved)
    source, cost = scored[context.pick([each.cost for each in scored])]
    lines = [context.line(source, cost, "", "prefill"), context.line(decode, homes.scores[at], "", "decode")]
    return RoutingDecision(
        (Stage("prefill", *source.place), Stage("decode", *decode.place)),
        _table(context, lines, at, homes, partners, shut),
        min(prompt_blocks, context.overlap(source)),
        how=f"split: {moved} of {prompt_blocks} blocks to compute, worth a transfer "
        + way(source.registration, decode.registration),
        kind="split",
    )


def _why_alone(context: RoutingContext, at: int, homes: _Homes, pools: _Pools) -> str:
    """In words; nothing where there is nothing to decide."""
    if context.request.worker:
        return "the request names its worker"
    decodes, prefills = pools.pool("decode"), pools.pool("prefill")
    if not decodes and not prefills:
        return ""
    role = homes.targets[at].registration.role
    if role == "prefill" or not decodes:
        return "no decode worker"
    if role == "aggregated":
        others = [s for m, s in zip(homes.targets, homes.scores, strict=True) if m.registration.role != role]
        if not others:
            return "aggregated: no other place has room"
        return f"aggregated: score {homes.scores[at]:.1f}, the best other place {min(others):.1f}"
    if not prefills:
        return "no prefill worker"
    tokens = uncached_tokens(context.request, homes.targets[at], context.overlap(homes.targets[at]))
    limit = context.weights.local_prefill_tokens
    if tokens <= limit:
        return f"local: {tokens} tokens to compute, limit {limit}"
    return "no prefill worker that it can take blocks from"


def _nobody(
    context: RoutingContext, targets: Sequence[RoutingTarget], shut: list[tuple[RoutingTarget, str]]
) -> RoutingDecision:
    lines = tuple(context.line(target, 0.0, why) for target, why in shut[:STORED_CANDIDATES])
    if context.request.worker and not any(context.request.names(target.registration) for target in targets):
        return _refusal("unknown_worker", lines)
    return _refusal(common_reason({why for _, why in shut}), lines)


def _refusal(reason: str, lines: tuple[Candidate, ...]) -> RoutingDecision:
    return RoutingDecision((), lines[:STORED_CANDIDATES], 0, reason, verdict(reason))


def _pick(scores: Sequence[float], temperature: float, rng: Random) -> int:
    best = min(scores)
    if temperature <= 0:
        ties = [at for at, value in enumerate(scores) if value - best <= TIE]
        return ties[0] if len(ties) == 1 else rng.choice(ties)
    scale = (max(scores) - best) * temperature
    if scale <= 0:
        return rng.randrange(len(scores))
    return rng.choices(range(len(scores)), [exp((best - value) / scale) for value in scores])[0]


def _table(
    context: RoutingContext,
    lines: list[Candidate],
    at: int,
    homes: _Homes,
    partners: Partners | None,
    shut: list[tuple[RoutingTarget, str]],
) -> tuple[Candidate, ...]:
    """The score table: the chosen, the best other homes and prefill workers, the excluded; cut to what is stored."""
    targets, scores, moved = homes
    others = []
    if partners is not None:
        chosen = (lines[0].worker, lines[0].rank)
        others = sorted([each for each in partners.scored if each.target.place != chosen], key=lambda each: each.cost)
    order = sorted(range(len(targets)), key=scores.__getitem__)
    order.remove(at)
    room = STORED_CANDIDATES - len(lines)
    for i in order[: max(room - len(others), (room + 1) // 2)]:
        lines.append(context.line(targets[i], scores[i], "", "decode" if moved and moved[i] >= 0 else ""))
    for each in others[: STORED_CANDIDATES - len(lines)]:
        lines.append(context.line(each.target, each.cost, "", "prefill"))
    for target, why in shut[: STORED_CANDIDATES - len(lines)]:
        role = target.registration.role
        lines.append(context.line(target, 0.0, why, "" if role == "aggregated" else role))
    return tuple(lines)


__all__ = [
    "STORED_CANDIDATES",
    "Mode",
    "RoutingDecision",
    "RoutingRequest",
    "Weights",
    "decide",
    "excluded",
    "explained",
    "score",
]
