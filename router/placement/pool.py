"""Decisions among the targets of one pool of aggregated workers, with array operations instead of a loop over them.

The result is the same as ``policy.decide`` has for these targets; a property test compares the two. None: this request
needs the general way, because of other roles, a named worker, a temperature, or since no target has room.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.filters import rejection
from router.holders import TargetId
from router.load import Load, RoutingTarget
from router.load_tracker import LoadTracker
from router.placement.cost import Costs, costs
from router.placement.target_loads import ACTIVE, BACKLOG, SEQUENCES, Column, Rows
from router.routing import PATIENCE_S, TIE, RoutingDecision, RoutingRequest, Weights, draw
from router.score_table import STORED_CANDIDATES
from router.scoring import size_of
from schemas.fleet import Registration
from schemas.jobs import Candidate, Stage

POOLS_CACHED = 256  # kinds of requests


class Pool(NamedTuple):
    """The targets of one kind of request, in the order of ``LoadTracker.targets``.

    Attributes:
        usable: whether a target would take a request of no length, if it had room.
        longest, largest: tokens of prompt and answer together, tokens of a prompt, that a target takes.
    """

    ids: Sequence[TargetId]
    registrations: Sequence[Registration]
    position: Mapping[TargetId, int]
    rows: Rows
    usable: NDArray[np.bool_]
    longest: Column
    largest: Column

    def fill(self, column: Column, blocks: Mapping[TargetId, int]) -> None:
        """Write what is known of some targets to their places in ``column``."""
        if not blocks:
            return
        known = [at for at in map(self.position.get, blocks) if at is not None]
        if len(known) == len(blocks):
            column[known] = list(blocks.values())
            return
        column[known] = [count for target, count in blocks.items() if target in self.position]

    def allowed(self, request: RoutingRequest) -> NDArray[np.bool_]:
        """Targets that take the request now or once they have room."""
        tokens = request.prompt_tokens
        return self.usable & (tokens + request.max_tokens <= self.longest) & (tokens < self.largest)


class Pools:
    """The pools of a ``LoadTracker``."""

    def __init__(self, tracker: LoadTracker) -> None:
        self._tracker = tracker
        self._version = -1
        self._cache: dict[tuple[str, str | None, str, frozenset[str]], Pool | None] = {}

    def pool(self, request: RoutingRequest) -> Pool | None:
        """The pool of a request; None: it has to be decided in the general way."""
        if request.worker or request.medium or request.output or request.avoid:
            return None
        if self._version != self._tracker.version or len(self._cache) > POOLS_CACHED:
            self._version = self._tracker.version
            self._cache.clear()
        kind = (request.model, request.revision, request.tokenizer, request.processors)
        if kind not in self._cache:
            self._cache[kind] = self._made(request)
        return self._cache[kind]

    def _made(self, request: RoutingRequest) -> Pool | None:
        serving = self._tracker.serving(request.model)
        if not serving or any(each.role != "aggregated" for each in serving):
            return None
        each_rank = [(each, rank) for each in serving for rank in range(each.dp_size)]
        ids = [(registration.worker, rank) for registration, rank in each_rank]
        registrations = [registration for registration, _ in each_rank]
        small = msgspec.structs.replace(request, prompt_tokens=0, max_tokens=0)
        return Pool(
            ids,
            registrations,
            {target: at for at, target in enumerate(ids)},
            np.array([self._tracker.loads.row(target) for target in ids], np.intp),
            np.array([not rejection(small, RoutingTarget(("", 0), each, _IDLE)) for each in registrations]),
            np.array([each.max_model_len for each in registrations], np.float64),
            np.array([each.total_blocks * each.block_size for each in registrations], np.float64),
        )


class PoolContext(NamedTuple):
    """All inputs of one decision; fields as in ``RoutingContext``, ``columns`` those of ``TargetLoads``."""

    request: RoutingRequest
    pool: Pool
    columns: Column
    overlaps: Mapping[TargetId, int]
    leading: Mapping[TargetId, int]
    weights: Weights
    seed: int
    waited_s: float | None = None


def decide(context: PoolContext) -> RoutingDecision | None:
    """The cheapest target with room; None: there is none, or a better one is to be waited for."""
    pool, request, weights = context.pool, context.request, context.weights
    if weights.temperature > 0:
        return None
    both = np.zeros((2, len(pool.ids)))
    pool.fill(both[0], context.overlaps)
    pool.fill(both[1], context.leading)
    found = costs(
        size_of(request),
        both[0],
        both[1],
        context.columns,
        overlap_weight=weights.overlap,
        prefill_weight=weights.prefill,
    )
    allowed = pool.allowed(request)
    free = np.flatnonzero(allowed & found.fits)
    if not len(free):
        return None
    scores = found.whole[free]
    ties = np.flatnonzero(scores - scores.min() <= TIE)
    at = int(ties[draw(context.seed) % len(ties)])
    if context.waited_s is not None and _waits(found, allowed, int(free[int(scores.argmin())]), context.waited_s):
        return None
    chosen = int(free[at])
    present = np.minimum(both.max(axis=0), request.prompt_blocks)
    worker, rank = pool.ids[chosen]
    return RoutingDecision(
        (Stage("aggregated", worker, rank),),
        tuple(_table(context, found, present, chosen, free)),
        int(present[chosen]),
    )


def _waits(found: Costs, allowed: NDArray[np.bool_], best: int, waited_s: float) -> bool:
    """Whether a held request waits for a target that is full now, and cheaper."""
    full = np.flatnonzero(allowed & ~found.fits)
    if not len(full):
        return False
    better = full[int(found.whole[full].argmin())]
    if found.whole[better] >= found.whole[best]:
        return False
    return bool(waited_s < PATIENCE_S * (found.uncached_tokens[best] - found.uncached_tokens[better]))


def _table(context: PoolContext, found: Costs, present: Column, chosen: int, free: Rows) -> list[Candidate]:
    pool, room = context.pool, STORED_CANDIDATES
    order = free[np.argsort(found.whole[free], kind="stable")[: room + 1]]
    places = [chosen, *(int(at) for at in order if at != chosen)][:room]
    rejected: list[int] = []
    if len(places) < room:
        taken = set(free.tolist())
        rejected = [at for at in range(len(pool.ids)) if at not in taken][: room - len(places)]
    reasons = [""] * len(places) + [_reason(context, at) for at in rejected]
    places += rejected
    columns = context.columns[:, places].T.tolist()
    blocks, scores = present[places].tolist(), found.whole[places].tolist()
    lines = []
    for at, reason, column, overlap, score in zip(places, reasons, columns, blocks, scores, strict=True):
        (worker, rank), registration = pool.ids[at], pool.registrations[at]
        running, active, backlog = int(column[SEQUENCES]), int(column[ACTIVE]), int(column[BACKLOG])
        shown = 0.0 if reason else score
        slots = registration.slots
        lines.append(Candidate(worker, int(overlap), active, backlog, running, slots, shown, reason, rank))
    return lines


def _reason(context: PoolContext, at: int) -> str:
    target = RoutingTarget(context.pool.ids[at], context.pool.registrations[at], _IDLE)
    return rejection(context.request, target) or "full"


_IDLE = Load()
