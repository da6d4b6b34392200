"""Decides among the targets of a pool, and which held requests have one, by array operations.

The results are those of ``policy.decide`` and of ``aggregated.is_ready``; property tests compare them.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.router.placement.aggregated import HeldRequest
from penstock.router.placement.columns import Column, LoadColumns, Rows
from penstock.router.placement.cost import favour_tokens
from penstock.router.placement.costs import Costs, RequestSizes, costs
from penstock.router.placement.pool import Pool, Pools
from penstock.router.placement.routing import PATIENCE_S, TIE, RoutingDecision, RoutingRequest, Weights, draw
from penstock.router.placement.score_table import STORED_CANDIDATES, candidate_of
from penstock.router.placement.scoring import size_of
from penstock.router.state.depths import TargetId
from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas.jobs import Candidate, Stage


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
        """The cheapest target with room; None: there is none, a better one will have room, or a loop has to decide.

        Args:
            overlaps, leading, seed, waited_s: as in ``RoutingContext``.
        """
        pool = self._pools.pool(request) if weights.temperature <= 0 else None
        if pool is None or len(pool.ids) <= self._few:
            return None
        size, own = size_of(request), self._columns.terms(pool.rows, request.n, now_ns, weights.prefill)
        cached, active = pool.column(overlaps), pool.column(leading) if leading else None
        target_costs = costs(size, cached, active, own, pool.block_size, overlap_weight=weights.overlap)
        for target in request.session:
            at = pool.position.get(target)
            if at is not None:
                target_costs.whole[at] -= favour_tokens(size)
        allowed = pool.allowed(request)
        free = (allowed & target_costs.fits).nonzero()[0]
        if not len(free):
            return None
        scores = target_costs.whole[free]
        if waited_s is not None and _waits(target_costs, allowed, int(free[scores.argmin()]), waited_s):
            return None
        rows = free[_best_first(scores, seed)]
        if len(rows) < min(STORED_CANDIDATES, len(pool.ids)):  # then all with room are in
            others = np.delete(np.arange(len(pool.ids)), free)
            rows = np.concatenate((rows, others))[:STORED_CANDIDATES]
        table = self._table(pool, request, target_costs, rows, len(free), now_ns)
        chosen = table[0]
        return RoutingDecision((Stage("aggregated", chosen.worker, chosen.rank),), table, chosen.overlap_blocks)

    def _table(
        self, pool: Pool, request: RoutingRequest, target_costs: Costs, at: Rows, free: int, now_ns: int
    ) -> tuple[Candidate, ...]:
        """The score table of the targets ``at`` these places of the pool, of which the first ``free`` have room."""
        places = at.tolist()
        ids = [pool.ids[each] for each in places]
        scores, rejections = target_costs.whole[at].tolist(), [""] * len(places)
        for number in range(free, len(places)):
            scores[number], rejections[number] = 0.0, pool.rejection(places[number], request) or "full"
        blocks = target_costs.blocks[at].astype(np.int64).tolist()
        loads = self._columns.loads(pool.rows[at], now_ns)
        return tuple(map(candidate_of, ids, blocks, loads, scores, rejections))

    def ready(self, requests: Sequence[HeldRequest], now_ns: int) -> list[int]:
        """Positions of the requests for which ``is_ready`` holds.

        Args:
            requests: at least one, all of one lane that an ``aggregated_pool`` serves.
        """
        pool = self._pools.pool(requests[0].request)
        assert pool is not None
        sizes = np.zeros((4, len(requests), 1))
        cached, leading = np.zeros((2, len(requests), len(pool.ids)))
        allowed = np.zeros(cached.shape, np.bool_)
        for number, held in enumerate(requests):
            sizes[:, number, 0] = size_of(held.request)
            cached[number] = pool.column(held.overlaps)
            leading[number] = pool.column(held.leading)
            allowed[number] = pool.allowed(held.request)
        one = all(held.request.n == 1 for held in requests)
        own = self._columns.terms(pool.rows, 1 if one else sizes[2], now_ns)
        target_costs = costs(RequestSizes(*sizes), cached, leading, own, pool.block_size)
        fits = target_costs.fits & allowed
        open_cost = np.where(fits, target_costs.whole, np.inf)
        any_cost = np.where(allowed, target_costs.whole, np.inf)
        every = np.arange(len(requests))
        at, best = open_cost.argmin(axis=1), any_cost.argmin(axis=1)
        saved = target_costs.uncached_tokens[every, at] - target_costs.uncached_tokens[every, best]
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


def _best_first(scores: Column, seed: int) -> Rows:
    """Positions of the lowest scores for a score table; among those that tie, ``seed`` says which comes first."""
    lowest = _lowest(scores, STORED_CANDIDATES)
    if len(lowest) == 1 or scores[lowest[1]] - scores[lowest[0]] > TIE:
        return lowest
    ties = (scores - scores[lowest[0]] <= TIE).nonzero()[0]
    chosen = ties[draw(seed) % len(ties)]
    return np.concatenate(([chosen], lowest[lowest != chosen]))[:STORED_CANDIDATES]


def _lowest(scores: Column, count: int) -> Rows:
    """Positions of the lowest scores, the first of equal ones first."""
    if len(scores) <= 4 * count:
        return scores.argsort(kind="stable")[:count]
    near = (scores <= np.partition(scores, count)[count]).nonzero()[0]
    lowest: Rows = near[scores[near].argsort(kind="stable")[:count]]
    return lowest
