"""Which worker a request goes to: filter, score, pick. A pure function of the fleet, the overlaps and the rng.

Score in mode "kv", in blocks of prompt work, lowest wins:

    score = prefill_weight · max(0, (A + P) / B − overlap_weight · C)  +  D + U

A: prompt tokens that the worker has yet to compute for others; P: this prompt's tokens; B: its block size;
C: leading prompt blocks that the worker holds; D: prompt blocks that its unfinished requests had to compute;
U: blocks that this prompt would add to them. The first term is how long the first token takes, the second how
much the worker's batch and cache are burdened for as long as the request lives.
"""

from collections.abc import Mapping, Sequence
from math import exp
from random import Random
from typing import Literal

import msgspec

from router.fleet import Member, serves
from router.holders import Place
from schemas.errors import Code
from schemas.fleet import State
from schemas.jobs import Candidate

Mode = Literal["kv", "round_robin", "random", "least_loaded", "direct"]

STORED_CANDIDATES = 16
TIE = 1e-6  # scores closer than this are equal


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the policy must know of a request. Sizes in tokens; ``prompt_blocks`` full blocks."""

    model: str
    prompt_tokens: int
    max_tokens: int
    prompt_blocks: int = 0
    n: int = 1
    role: str = "aggregated"
    worker: str = ""  # this one and no other: a worker's id or name
    avoid: frozenset[str] = frozenset()  # workers that failed this request; taken only if nobody else is left


class Weights(msgspec.Struct, frozen=True):
    """Of the terms of the score; ``temperature`` above 0 draws by softmax over scores scaled to 0..1."""

    overlap: float = 1.0
    prefill: float = 1.0
    temperature: float = 0.0


class Choice(msgspec.Struct, frozen=True):
    """The answer. Without ``chosen``: why, and whether waiting can help (``code`` empty) or not."""

    chosen: Place | None
    candidates: tuple[Candidate, ...]
    overlap_blocks: int = 0
    reason: str = ""
    code: Code | None = None


# Why a worker was not scored, and the error of a request for which no worker is left but such.
_HOPELESS = {
    "too_long": Code.context_length_exceeded,
    "too_small": Code.out_of_blocks,
    "unknown_worker": Code.invalid_request,
    "worker_not_named": Code.invalid_request,
}


def choose(
    ask: Ask,
    members: Sequence[Member],
    overlaps: Mapping[Place, int],
    mode: Mode,
    weights: Weights,
    rng: Random,
    turn: int = 0,
) -> Choice:
    """Pick a place for one request.

    Args:
        members: all places, in the order of ``Fleet.members``.
        overlaps: leading prompt blocks held, by place (``PrefixIndex.match``).
        turn: requests placed before this one; round robin goes by it.
    """
    if mode == "direct" and not ask.worker:
        return _refusal("worker_not_named", [])
    open_, shut = [], []
    for member in members:
        why = excluded(ask, member)
        if why:
            if why != "other_model":
                shut.append(_candidate(member, overlaps.get(member.place, 0), 0.0, why))
        else:
            open_.append(member)
    if ask.avoid and len(open_) > 1:
        open_ = [member for member in open_ if member.place[0] not in ask.avoid] or open_
    if not open_:
        if ask.worker and not any(ask.worker in (m.place[0], m.registration.name) for m in members):
            return _refusal("unknown_worker", shut)
        return _refusal(_common_reason(shut), shut)
    scores = [score(ask, member, overlaps.get(member.place, 0), mode, weights) for member in open_]
    if mode == "round_robin":
        at = turn % len(open_)
    elif mode == "random":
        at = rng.randrange(len(open_))
    else:
        at = _pick(scores, weights.temperature, rng)
    chosen = open_[at]
    return Choice(
        chosen.place, _table(open_, scores, at, overlaps, shut), min(ask.prompt_blocks, overlaps.get(chosen.place, 0))
    )


def excluded(ask: Ask, member: Member) -> str:
    """Why ``member`` cannot take the request now; empty: it can."""
    registration = member.registration
    if not serves(registration, ask.model):
        return "other_model"
    if registration.role != ask.role:
        return "other_role"
    if ask.worker and ask.worker != registration.worker and ask.worker != registration.name:
        return "not_asked_for"
    if ask.prompt_tokens + ask.max_tokens > registration.max_model_len:
        return "too_long"
    if ask.prompt_tokens >= registration.total_blocks * registration.block_size:
        return "too_small"
    if registration.state is not State.ready:
        return "draining"
    if member.load.sequences and ask.n > member.room:
        return "full"
    return ""


def score(ask: Ask, member: Member, overlap: int, mode: Mode, weights: Weights) -> float:
    """The cost of sending the request to ``member``; see the top of this module."""
    load = member.load
    if mode != "kv":
        return load.sequences / max(1, member.registration.slots)
    size = member.registration.block_size
    overlap = min(overlap, ask.prompt_blocks)
    prefill = (load.prefill_tokens + ask.prompt_tokens) / size - weights.overlap * overlap
    return weights.prefill * max(0.0, prefill) + load.active_blocks + ask.prompt_tokens // size - overlap


def _pick(scores: list[float], temperature: float, rng: Random) -> int:
    best = min(scores)
    if temperature <= 0:
        ties = [at for at, value in enumerate(scores) if value - best <= TIE]
        return ties[0] if len(ties) == 1 else rng.choice(ties)
    scale = (max(scores) - best) * temperature
    if scale <= 0:
        return rng.randrange(len(scores))
    return rng.choices(range(len(scores)), [exp((best - value) / scale) for value in scores])[0]


def _table(
    members: Sequence[Member], scores: list[float], at: int, overlaps: Mapping[Place, int], shut: list[Candidate]
) -> tuple[Candidate, ...]:
    """The score table: the chosen first, then the best, then the excluded; at most ``STORED_CANDIDATES``."""
    order = sorted(range(len(members)), key=scores.__getitem__)
    order.remove(at)
    shown = [at, *order[: STORED_CANDIDATES - 1]]
    lines = [_candidate(members[i], overlaps.get(members[i].place, 0), scores[i], "") for i in shown]
    return (*lines, *shut[: STORED_CANDIDATES - len(lines)])


def _candidate(member: Member, overlap: int, score: float, excluded: str) -> Candidate:
    load = member.load
    worker, rank = member.place
    return Candidate(
        worker,
        overlap,
        load.active_blocks,
        int(load.prefill_tokens),
        load.sequences,
        member.registration.slots,
        score,
        excluded,
        rank,
    )


def _refusal(reason: str, shut: list[Candidate]) -> Choice:
    return Choice(None, tuple(shut[:STORED_CANDIDATES]), 0, reason, _HOPELESS.get(reason))


def _common_reason(shut: list[Candidate]) -> str:
    """Why nobody is left: what may pass comes first, since then waiting helps."""
    reasons = {candidate.excluded for candidate in shut}
    for reason in ("full", "draining", "too_small", "too_long"):
        if reason in reasons:
            return reason
    return "no_worker"
