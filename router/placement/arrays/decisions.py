"""Decides among the targets of a pool, and which held requests have one, by array operations.

The results are those of ``policy.decide`` and of ``aggregated.is_ready``; property tests compare them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.depths import TargetId
from router.filters import rejection
from router.load import RoutingTarget
from router.load_tracker import LoadTracker
from router.placement.aggregated import HeldRequest
from router.placement.arrays.columns import Column, LoadColumns, Rows
from router.placement.arrays.costs import Costs, RequestSizes, costs
from router.placement.arrays.pool import IDLE, Pool, Pools
from router.placement.cost import favour_tokens
from router.placement.target_loads import (
    ACTIVE,
    BACKLOG,
    COMPUTING,
    CONTEXT,
    DECODE_SLOWNESS,
    SEQUENCES,
    SERVED,
    SLOTS,
    SLOWNESS,
)
from router.routing import PATIENCE_S, TIE, RoutingDecision, RoutingRequest, Weights, draw
from router.score_table import STORED_CANDIDATES
from router.scoring import size_of
from schemas.jobs import Candidate, Stage


class ArrayDecisions:
    """
    Args:
        few: targets, up to which a loop over them is cheaper.
    """

    def __init__(self, tracker: LoadTracker, few: int) -> None:
        self._pools = Pools(tracker)
        self._columns = LoadColumns(tracker.loads, tracker.tokens_per_s)
        self._few = few

    def decide(
        self,
        request: RoutingRequest,
        overlaps: Mapping[TargetId, int],
        leading: Mapping[TargetId, int],
        weights: Weights,
        *,
        now_ns: int,
        seed: int,
        waited_s: float | None = None,
    ) -> RoutingDecision | None:
        """The cheapest target with room; None: there is none, a better one is to be waited for, or a loop has to tell.

        Args:
            overlaps, leading, seed, waited_s: as in ``RoutingContext``.
        """
        pool = self._pools.pool(request) if weights.temperature <= 0 else None
        if pool is None or len(pool.ids) <= self._few:
            return None
        columns = self._columns.read(pool.rows, now_ns)
        both: Column = np.zeros((2, len(pool.ids) + 1))
        pool.fill(both[0], overlaps)
        pool.fill(both[1], leading)
        both = both[:, :-1]
        costs_of = costs(
            size_of(request), both[0], both[1], columns, overlap_weight=weights.overlap, prefill_weight=weights.prefill
        )
        for target in request.session:
            at = pool.position.get(target)
            if at is not None:
                costs_of.whole[at] -= favour_tokens(size_of(request))
        allowed = pool.allowed(request)
        free = (allowed & costs_of.fits).nonzero()[0]
        if not len(free):
            return None
        scores = costs_of.whole[free]
        best = scores.argmin()
        ties = (scores - scores[best] <= TIE).nonzero()[0]
        if waited_s is not None and _waits(costs_of, allowed, int(free[best]), waited_s):
            return None
        chosen = int(free[int(ties[draw(seed) % len(ties)])])
        present = np.minimum(np.maximum(*both), request.prompt_blocks)
        worker, rank = pool.ids[chosen]
        table = _ScoreTable(request, pool, columns, costs_of, present)
        return RoutingDecision((Stage("aggregated", worker, rank),), table.lines(chosen, free), int(present[chosen]))

    def ready(self, requests: Sequence[HeldRequest], now_ns: int) -> list[int]:
        """Positions of the requests for which ``is_ready`` holds.

        Args:
            requests: at least one, all of one lane that an ``aggregated_pool`` serves.
        """
        pool = self._pools.pool(requests[0].request)
        assert pool is not None
        sizes = np.zeros((4, len(requests), 1))
        both = np.zeros((2, len(requests), len(pool.ids) + 1))
        cached, leading = both[:, :, :-1]
        allowed = np.zeros(cached.shape, np.bool_)
        for number, held in enumerate(requests):
            sizes[:, number, 0] = size_of(held.request)
            pool.fill(both[0, number], held.overlaps)
            pool.fill(both[1, number], held.leading)
            allowed[number] = pool.allowed(held.request)
        costs_of = costs(RequestSizes(*sizes), cached, leading, self._columns.read(pool.rows, now_ns))
        fits = costs_of.fits & allowed
        open_cost = np.where(fits, costs_of.whole, np.inf)
        any_cost = np.where(allowed, costs_of.whole, np.inf)
        every = np.arange(len(requests))
        at, best = open_cost.argmin(axis=1), any_cost.argmin(axis=1)
        saved = costs_of.uncached_tokens[every, at] - costs_of.uncached_tokens[every, best]
        waits = ~fits[every, best] & (np.array([held.waited_s for held in requests]) < PATIENCE_S * saved)
        kept: list[int] = np.flatnonzero(fits.any(axis=1) & ~waits | ~allowed.any(axis=1)).tolist()
        return kept


def _waits(target_costs: Costs, allowed: NDArray[np.bool_], best: int, waited_s: float) -> bool:
    """Whether a held request waits for a target that is full now, and cheaper."""
    full = np.flatnonzero(allowed & ~target_costs.fits)
    if not len(full):
        return False
    better = full[int(target_costs.whole[full].argmin())]
    if target_costs.whole[better] >= target_costs.whole[best]:
        return False
    return bool(waited_s < PATIENCE_S * (target_costs.uncached_tokens[best] - target_costs.uncached_tokens[better]))


def _lowest(scores: Column, free: Rows, count: int) -> Rows:
    """Those ``free`` with the lowest scores, the first of equal ones first."""
    among = scores[free]
    if len(free) > 4 * count:
        near = (among <= np.partition(among, count)[count]).nonzero()[0]
        free, among = free[near], among[near]
    lowest: Rows = free[among.argsort(kind="stable")[:count]]
    return lowest


class _ScoreTable(NamedTuple):
    """As ``score_table.table`` makes it."""

    request: RoutingRequest
    pool: Pool
    columns: Column
    found: Costs
    present: Column

    def lines(self, chosen: int, free: Rows) -> tuple[Candidate, ...]:
        scores = self.found.whole
        best = _lowest(scores, free, STORED_CANDIDATES + 1).tolist()
        places = [chosen, *(at for at in best if at != chosen)][:STORED_CANDIDATES]
        reasons = [""] * len(places)
        if len(places) < STORED_CANDIDATES:
            taken = set(free.tolist())
            others = [at for at in range(len(self.pool.ids)) if at not in taken][: STORED_CANDIDATES - len(places)]
            places += others
            reasons += map(self._rejection, others)
        at = np.array(places)
        values = self.columns.take(at, axis=1)
        counts = values.astype(np.int64).tolist()
        rows = zip(
            [self.pool.ids[at] for at in places],
            self.present[at].astype(np.int64).tolist(),
            counts[ACTIVE],
            counts[BACKLOG],
            counts[SEQUENCES],
            counts[SLOTS],
            scores[at].tolist(),
            reasons,
            counts[CONTEXT],
            counts[COMPUTING],
            values[SLOWNESS].tolist(),
            values[DECODE_SLOWNESS].tolist(),
            counts[SERVED],
            strict=True,
        )
        return tuple(
            [
                Candidate(
                    worker, overlap, active, backlog, running, slots, 0.0 if reason else score, reason, rank, "", *rest
                )
                for (worker, rank), overlap, active, backlog, running, slots, score, reason, *rest in rows
            ]
        )

    def _rejection(self, at: int) -> str:
        target = RoutingTarget(self.pool.ids[at], self.pool.registrations[at], IDLE)
        return rejection(self.request, target) or "full"
