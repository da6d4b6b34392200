"""Which workers a request goes to: filter, score, pick. A pure function of the fleet, the overlaps and the rng.

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
from router.load_tracker import ENCODE, Member
from router.pairs import Partners, way
from router.scoring import (
    Ask,
    Mode,
    Need,
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


class Choice(msgspec.Struct, frozen=True):
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

    members: list[Member]
    scores: list[float]
    moved: list[int]


class _Case:
    """One decision: what is asked, and how to weigh and pick."""

    def __init__(
        self, ask: Ask, overlaps: Mapping[Place, int], mode: Mode, weights: Weights, rng: Random, turn: int
    ) -> None:
        self.ask = ask
        self.overlaps = overlaps
        self.mode = mode
        self.weights = weights
        self._rng = rng
        self._turn = turn

    def overlap(self, member: Member) -> int:
        return self.overlaps.get(member.place, 0)

    def prefill(self, member: Member) -> float:
        if self.mode != "kv":
            return busy(member)
        return prefill_cost(self.ask, member, self.overlap(member), self.weights) + member.load.active_blocks

    def pick(self, scores: Sequence[float]) -> int:
        if self.mode == "round_robin":
            return self._turn % len(scores)
        if self.mode == "random":
            return self._rng.randrange(len(scores))
        return _pick(scores, self.weights.temperature, self._rng)

    def trusted(self, members: list[Member]) -> list[Member]:
        """Without those that failed this request, unless nobody else is left."""
        if not self.ask.avoid:
            return members
        return [member for member in members if member.place[0] not in self.ask.avoid] or members

    def line(self, member: Member, score: float, why: str = "", stage: str = "") -> Candidate:
        load = member.load
        worker, rank = member.place
        return Candidate(
            worker,
            self.overlap(member),
            load.active_blocks,
            int(load.prefill_tokens),
            load.sequences,
            member.registration.slots,
            score,
            why,
            rank,
            stage,
        )


def choose(
    ask: Ask,
    members: Sequence[Member],
    overlaps: Mapping[Place, int],
    mode: Mode,
    weights: Weights,
    rng: Random,
    turn: int = 0,
) -> Choice:
    """Pick the places for one request.

    Args:
        members: all places, in the order of ``Fleet.members``.
        overlaps: leading prompt blocks held, by place (``PrefixIndex.match``).
        turn: requests placed before this one; round robin goes by it.
    """
    if mode == "direct" and not ask.worker:
        return _refusal("worker_not_named", ())
    case = _Case(ask, overlaps, mode, weights, rng, turn)
    if ask.picture:
        return _studio(case, members)
    return _with_media(case, members) if ask.medium else _place(case, members)


# Pictures


def _studio(case: _Case, members: Sequence[Member]) -> Choice:
    """A diffusion worker that is free: no cache, one request at a time, so one is as good as another."""
    pool = [(member, excluded(case.ask, member)) for member in members]
    shut = [(member, why) for member, why in pool if why and why != "other_model"]
    open_ = case.trusted([member for member, why in pool if not why])
    if not open_:
        return _nobody(case, members, shut)
    scores = [busy(member) for member in open_]
    at = case.pick(scores)
    homes = _Homes(open_, scores, [])
    lines = [case.line(open_[at], scores[at])]
    role = open_[at].registration.role
    return Choice((Stage(role, *open_[at].place),), _table(case, lines, at, homes, None, shut))


# Media


def _with_media(case: _Case, members: Sequence[Member]) -> Choice:
    """An encode worker in front of somebody who can take what it makes; without one, somebody with eyes."""
    ask = case.ask
    if any(member.registration.vision and ask.names(member.registration) for member in members):
        return _place(case, members, _sight)
    anybody = msgspec.structs.replace(ask, worker="")
    pool = [(m, excluded(anybody, m)) for m in members if m.registration.role == ENCODE and m.registration.transfer]
    open_ = case.trusted([member for member, why in pool if not why])
    if open_:
        encoder, note = _encoder(case, open_)
        choice = _place(case, members, _reading_from(encoder.registration))
        if choice.reason != "no_transfer":
            return _behind(case, encoder, note, open_, choice) if choice.route else choice
    elif any(why == "full" for _, why in pool):
        return _refusal("full", tuple(case.line(member, 0.0, why, ENCODE) for member, why in pool))
    return _place(case, members, _sight)


def _encoder(case: _Case, open_: list[Member]) -> tuple[Member, str]:
    if case.mode in ("kv", "direct"):
        chosen, preferred = encoders.pick(case.ask.medium, open_)
        return chosen, "" if preferred else ", as the preferred one has too much to do"
    return open_[case.pick([busy(member) for member in open_])], ""


def _behind(case: _Case, encoder: Member, note: str, open_: list[Member], choice: Choice) -> Choice:
    """``choice`` with an encode worker in front."""
    others = [case.line(member, busy(member), "", ENCODE) for member in open_ if member is not encoder]
    stages = len(choice.route)
    lines = (case.line(encoder, busy(encoder), "", ENCODE), *choice.candidates[:stages], *others[:3])
    how = f"media through {encoder.place[0]}{note}"
    return msgspec.structs.replace(
        choice,
        route=(Stage(ENCODE, *encoder.place), *choice.route),
        candidates=(*lines, *choice.candidates[stages:])[:STORED_CANDIDATES],
        how=f"{choice.how}; {how}" if choice.how else how,
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


class _Fleet(NamedTuple):
    """The places of a model by what they can do for the request."""

    open: dict[str, list[Member]]  # by role
    shut: list[tuple[Member, str]]  # and why

    def full(self, role: str) -> list[Member]:
        return [member for member, why in self.shut if why == "full" and member.registration.role == role]

    def pool(self, role: str) -> bool:
        """Whether anybody of a role will ever take the request."""
        return bool(self.open[role] or (self.shut and self.full(role)))


def _place(case: _Case, members: Sequence[Member], need: Need | None = None) -> Choice:
    """The worker that does everything, or the pair."""
    fleet = _sorted(case.ask, members, need)
    decodes = fleet.pool("decode")
    candidates = fleet.open["aggregated"]
    if decodes:
        candidates = candidates + fleet.open["decode"]
    if case.ask.worker or not decodes:
        candidates = candidates + fleet.open["prefill"]
        partners = None
    else:
        partners = _partners(case, fleet)
    homes = _homes(case, case.trusted(candidates), partners, fleet.shut)
    if not homes.members:
        return _nobody(case, members, fleet.shut)
    at = case.pick(homes.scores)
    if homes.moved and homes.moved[at] >= 0:
        assert partners is not None
        return _paired(case, at, homes, partners, fleet.shut)
    return _alone(case, at, homes, partners, fleet)


def _sorted(ask: Ask, members: Sequence[Member], need: Need | None) -> _Fleet:
    open_: dict[str, list[Member]] = {"aggregated": [], "prefill": [], "decode": []}
    shut: list[tuple[Member, str]] = []
    for member in members:
        why = excluded(ask, member, need)
        pool = open_.get(member.registration.role)
        if pool is None:
            if why == "encode_only":
                shut.append((member, why))
        elif not why:
            pool.append(member)
        elif why != "other_model":
            shut.append((member, why))
    return _Fleet(open_, shut)


def _partners(case: _Case, fleet: _Fleet) -> Partners | None:
    """The prefill workers, if any will ever take the request."""
    if not fleet.pool("prefill"):
        return None
    weight = case.weights.transfer if case.mode == "kv" else 0.0
    return Partners(case.trusted(fleet.open["prefill"]), fleet.full("prefill"), case.prefill, weight)


def _homes(case: _Case, members: list[Member], partners: Partners | None, shut: list[tuple[Member, str]]) -> _Homes:
    """Every member with its score; decode workers that need a prefill worker which is full go to ``shut``."""
    ask, mode, weights, overlaps = case.ask, case.mode, case.weights, case.overlaps
    if partners is None:
        return _Homes(members, [score(ask, m, overlaps.get(m.place, 0), mode, weights) for m in members], [])
    homes = _Homes([], [], [])
    for member in members:
        overlap, moved, cost = overlaps.get(member.place, 0), -1, None
        alone = member.registration.role != "decode"
        if not alone and uncached_tokens(ask, member, overlap) > weights.local_prefill_tokens:
            moved = ask.prompt_blocks - min(overlap, ask.prompt_blocks)
            cost = partners.cheapest(member.registration, moved)
            if cost is None and partners.will_be(member.registration):
                shut.append((member, "prefill_full"))
                continue
        if cost is None:
            moved, cost = -1, score(ask, member, overlap, mode, weights)
        else:
            cost = cost + burden(ask, member, overlap) if mode == "kv" else busy(member)
        homes.members.append(member)
        homes.scores.append(cost)
        homes.moved.append(moved)
    return homes


def _alone(case: _Case, at: int, homes: _Homes, partners: Partners | None, fleet: _Fleet) -> Choice:
    member = homes.members[at]
    role = member.registration.role
    return Choice(
        (Stage(role, *member.place),),
        _table(case, [case.line(member, homes.scores[at])], at, homes, partners, fleet.shut),
        min(case.ask.prompt_blocks, case.overlap(member)),
        how=_why_alone(case, at, homes, fleet),
        kind="aggregated" if role == "aggregated" else "local",
    )


def _paired(case: _Case, at: int, homes: _Homes, partners: Partners, shut: list[tuple[Member, str]]) -> Choice:
    target, moved, prompt_blocks = homes.members[at], homes.moved[at], case.ask.prompt_blocks
    scored = partners.of(target.registration, moved)
    source, cost = scored[case.pick([each.cost for each in scored])]
    lines = [case.line(source, cost, "", "prefill"), case.line(target, homes.scores[at], "", "decode")]
    return Choice(
        (Stage("prefill", *source.place), Stage("decode", *target.place)),
        _table(case, lines, at, homes, partners, shut),
        min(prompt_blocks, case.overlap(source)),
        how=f"split: {moved} of {prompt_blocks} blocks to compute, worth a transfer "
        + way(source.registration, target.registration),
        kind="split",
    )


def _why_alone(case: _Case, at: int, homes: _Homes, fleet: _Fleet) -> str:
    """In words; nothing where there is nothing to choose."""
    if case.ask.worker:
        return "the request names its worker"
    decodes, prefills = fleet.pool("decode"), fleet.pool("prefill")
    if not decodes and not prefills:
        return ""
    role = homes.members[at].registration.role
    if role == "prefill" or not decodes:
        return "no decode worker"
    if role == "aggregated":
        others = [s for m, s in zip(homes.members, homes.scores, strict=True) if m.registration.role != role]
        if not others:
            return "aggregated: no other place has room"
        return f"aggregated: score {homes.scores[at]:.1f}, the best other place {min(others):.1f}"
    if not prefills:
        return "no prefill worker"
    tokens = uncached_tokens(case.ask, homes.members[at], case.overlap(homes.members[at]))
    limit = case.weights.local_prefill_tokens
    if tokens <= limit:
        return f"local: {tokens} tokens to compute, limit {limit}"
    return "no prefill worker that it can take blocks from"


def _nobody(case: _Case, members: Sequence[Member], shut: list[tuple[Member, str]]) -> Choice:
    lines = tuple(case.line(member, 0.0, why) for member, why in shut[:STORED_CANDIDATES])
    if case.ask.worker and not any(case.ask.names(member.registration) for member in members):
        return _refusal("unknown_worker", lines)
    return _refusal(common_reason({why for _, why in shut}), lines)


def _refusal(reason: str, lines: tuple[Candidate, ...]) -> Choice:
    return Choice((), lines[:STORED_CANDIDATES], 0, reason, verdict(reason))


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
    case: _Case,
    lines: list[Candidate],
    at: int,
    homes: _Homes,
    partners: Partners | None,
    shut: list[tuple[Member, str]],
) -> tuple[Candidate, ...]:
    """The score table: the chosen, the best other homes and prefill workers, the excluded; cut to what is stored."""
    members, scores, moved = homes
    others = []
    if partners is not None:
        chosen = (lines[0].worker, lines[0].rank)
        others = sorted([each for each in partners.scored if each.member.place != chosen], key=lambda each: each.cost)
    order = sorted(range(len(members)), key=scores.__getitem__)
    order.remove(at)
    room = STORED_CANDIDATES - len(lines)
    for i in order[: max(room - len(others), (room + 1) // 2)]:
        lines.append(case.line(members[i], scores[i], "", "decode" if moved and moved[i] >= 0 else ""))
    for each in others[: STORED_CANDIDATES - len(lines)]:
        lines.append(case.line(each.member, each.cost, "", "prefill"))
    for member, why in shut[: STORED_CANDIDATES - len(lines)]:
        role = member.registration.role
        lines.append(case.line(member, 0.0, why, "" if role == "aggregated" else role))
    return tuple(lines)


__all__ = [
    "STORED_CANDIDATES",
    "Ask",
    "Choice",
    "Mode",
    "Weights",
    "choose",
    "excluded",
    "explained",
    "score",
]
