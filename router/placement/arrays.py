"""Decides among the targets of a pool, and which held requests have one, by array operations.

The results are those of ``decide.decide`` and of ``cost.is_ready``; property tests compare them. The columns of
``TargetLoads`` are kept as arrays (``LoadColumns``), and so are the targets of one kind of request (``TargetPool``). So
a decision costs the same few operations for any fleet: the formula of ``placement.cost`` at many targets, and for many
requests, at once (``costs``).
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.router.placement.cost import (
    HeldRequest,
    RequestSize,
    Scalars,
    absent_tokens,
    aggregated_pool,
    favour_tokens,
    is_plain,
    loading_tokens,
    most_uncached,
    rejection,
    reusable,
    reuse,
    size_of,
    target_terms,
    tier_costs,
)
from penstock.router.placement.decide import STORED_CANDIDATES, candidate_of
from penstock.router.placement.routing import PATIENCE_S, TIE, RoutingDecision, RoutingRequest, Weights, draw
from penstock.router.state.holders import Depths, TargetBits, TargetId, TierDepths
from penstock.router.state.load_tracker import LoadTracker
from penstock.router.state.target_loads import ExpectedLoad, RoutingTarget, TargetColumns, TargetLoads
from penstock.schemas.cells import PASS_TOKENS
from penstock.schemas.fleet import Registration
from penstock.schemas.jobs import Candidate, Stage

Rows = NDArray[np.intp]
Column = NDArray[np.float64]


class WholeTerms(NamedTuple):
    """What ``TargetTerms`` has for whole requests. ``slope``: all of a token to compute, up to ``PASS_TOKENS``."""

    fixed: Any
    slope: Any
    queued: Any
    read: Any
    room: Any
    late: Any


def whole_terms(at: Any, sequences: Any, ops: Any, prefill_weight: float = 1.0) -> WholeTerms:
    """As ``target_terms``."""
    own = target_terms(at, sequences, ops, prefill_weight)
    return WholeTerms(own.fixed, own.slope + own.held_up + own.queued, own.queued, own.read, own.room, own.late)


_TERMS = len(WholeTerms._fields)
_COLUMNS = len(TargetColumns.__struct_fields__)
_PREFILL_TOKENS = TargetColumns.__struct_fields__.index("prefill_tokens")


class LoadColumns:
    """A copy of ``loads``, brought up to date when it is read. It has to be the only one: it empties ``changed``.

    The terms of requests of one sequence are kept too: few rows change between two decisions.

    Args:
        tokens_per_s: at which estimated backlogs drain.
    """

    def __init__(self, loads: TargetLoads, tokens_per_s: float) -> None:
        self._loads = loads
        self._rate = tokens_per_s
        self._columns: Column = np.zeros((8, _COLUMNS))
        self._terms: Column = np.zeros((_TERMS, 8))
        self._estimates: Column = np.zeros((8, 3))  # tokens, when, at most

    def terms(self, rows: Rows, sequences: Any, now_ns: int, prefill_weight: float = 1.0) -> WholeTerms:
        """
        Args:
            rows: of the targets.
            sequences: of a request, or a column of them for several.
        """
        self._update()
        if isinstance(sequences, int) and sequences == 1 and prefill_weight == 1.0 and not self._loads.estimates:
            return WholeTerms(*self._terms.take(rows, axis=1))
        columns = self._columns.take(rows, axis=0).T
        if self._loads.estimates:
            columns[_PREFILL_TOKENS] += self._estimated(rows, now_ns)
        return whole_terms(TargetColumns(*columns), sequences, np, prefill_weight)

    def loads(self, rows: Rows, now_ns: int) -> Sequence[TargetColumns]:
        """All columns of some targets; ``prefill_tokens`` with its estimate."""
        values = self._loads.loads(rows.tolist())
        if self._loads.estimates:
            values = list(map(copy.copy, values))
            for each, estimated in zip(values, self._estimated(rows, now_ns).tolist(), strict=True):
                each.prefill_tokens += int(estimated)
        return values

    def _estimated(self, rows: Rows, now_ns: int) -> Column:
        """Prompt tokens that are estimated to be left, less what drained since then."""
        tokens, at_ns, most = self._estimates.take(rows, axis=0).T
        drained = np.maximum(0.0, now_ns - at_ns) * self._rate / 1e9
        left: Column = np.floor(np.minimum(np.maximum(0.0, tokens - drained), most))
        return left

    def _update(self) -> None:
        loads = self._loads
        for row in loads.changed:
            if row >= len(self._columns):
                self._grow(row)
            values = loads.load(row)
            self._columns[row] = msgspec.structs.astuple(values)
            self._terms[:, row] = whole_terms(values, 1, Scalars)
            if row in loads.estimates or self._estimates[row, -1]:
                self._estimates[row] = loads.estimates.get(row, (0.0, 0, 0))
        loads.changed.clear()

    def _grow(self, row: int) -> None:
        more = max(row + 1 - len(self._columns), len(self._columns))
        self._columns = np.pad(self._columns, ((0, more), (0, 0)))
        self._terms = np.pad(self._terms, ((0, 0), (0, more)))
        self._estimates = np.pad(self._estimates, ((0, more), (0, 0)))


class RequestSizes(NamedTuple):
    """``RequestSize`` of several requests: columns of shape (requests, 1)."""

    tokens: Column
    blocks: Column
    sequences: Column
    shared: Column


class Costs(NamedTuple):
    """By request and target, or by target alone; fields as in ``Reuse`` and ``TargetCost``."""

    blocks: Column
    whole: Column
    absent_tokens: Column
    fits: NDArray[np.bool_]


def costs(
    size: RequestSize | RequestSizes,
    cached: Column,
    leading: Column | None,
    own: WholeTerms,
    block_size: Column | float,
    *,
    device: Column | None = None,
    overlap_weight: float = 1.0,
) -> Costs:
    """
    Args:
        cached: leading blocks cached, by target; for several requests of shape (requests, targets).
        device: of these, those on the device; None: all.
        leading: the same for blocks of active requests; None: they have none.
        own: terms of the targets.
        block_size: of each target, or of all.
        overlap_weight: of a reused token.
    """
    blocks = cached if leading is None else np.maximum(cached, leading)
    reused = reuse(size, blocks, block_size, np, overlap_weight)
    prompt_blocks = size.tokens // block_size
    whole = own.fixed + own.slope * reused.work + own.read * prompt_blocks
    if not isinstance(size.tokens, int) or size.tokens > PASS_TOKENS:
        whole -= own.queued * np.maximum(0.0, reused.work - PASS_TOKENS)
    needed = prompt_blocks if leading is None else prompt_blocks - np.minimum(leading, size.blocks)
    fits = needed <= own.room
    if own.late.any():
        fits &= (own.late == 0) | (reused.uncached_tokens <= most_uncached(size.tokens, np))
    absent: Column = reused.uncached_tokens
    if device is not None:
        absent = absent_tokens(size, device, 0 if leading is None else leading, block_size, np)
    return Costs(reused.blocks, whole, absent, fits)


POOLS_CACHED = 256  # kinds of requests
SPARSE = 4  # if fewer than one word of this many has a bit
IDLE = ExpectedLoad()
_NO_ROWS: Rows = np.zeros(0, np.intp)


class TargetPool(NamedTuple):
    """The targets of one kind of request, in the order of ``LoadTracker.targets``.

    Attributes:
        usable: whether a target would take a request of no length, if it had room.
        some_usable: whether any would.
        longest, largest: tokens of prompt and answer together, tokens of a prompt, that a target takes.
        least_longest, least_largest: that every target takes.
        block_size: of all targets, or of each.
        most_block_size: the largest.
        places: of the targets of bits, with the version that they are of.
        loading: what it costs at each target to load the requests' adapter; None: they have none.
        tier_costs: by lower tier and target.
    """

    ids: Sequence[TargetId]
    registrations: Sequence[Registration]
    position: Mapping[TargetId, int]
    rows: Rows
    usable: NDArray[np.bool_]
    some_usable: bool
    longest: Column
    largest: Column
    least_longest: float
    least_largest: float
    block_size: Column | float
    most_block_size: int
    places: dict[TargetBits, tuple[int, Rows]]
    loading: Column | None
    tier_costs: Column

    def cached(self, overlaps: Mapping[TargetId, int], leading: Column | None, most: int) -> Column:
        """Leading blocks that each target caches, or what they are worth (``cost.reusable``)."""
        if not isinstance(overlaps, TierDepths):
            return self.column(overlaps)
        tiers = [self.column(each) for each in (overlaps.device, *overlaps.lower)]
        worth: Column = reusable(tiers, self.tier_costs, 0 if leading is None else leading, most, np)
        return worth

    def column(self, blocks: Mapping[TargetId, int]) -> Column:
        """Values of some targets in their places, 0 in the others; those of other pools' targets are left out."""
        if isinstance(blocks, Depths):
            return self._column_of(blocks)[:-1]
        column: Column = np.zeros(len(self.ids) + 1)
        if blocks:
            elsewhere, place = len(self.ids), self.position.get
            column[[place(target, elsewhere) for target in blocks]] = list(blocks.values())
        return column[:-1]

    def _column_of(self, depths: Depths) -> Column:
        """With one more element, for targets of other pools."""
        masks = depths.masks
        if not masks:
            return np.zeros(len(self.ids) + 1)
        places = self._places_of(depths.bits)
        column: Column = np.zeros(len(self.ids) + 1)
        width = len(places) // 8
        if len(masks) == 1:
            column[places[_set_bits(masks[0].to_bytes(width, "little"))]] = depths.numbers[0]
            return column
        packed = b"".join([mask.to_bytes(width, "little") for mask in masks])
        bits = _set_bits(packed)
        column[places[bits & (len(places) - 1)]] = np.array(depths.numbers)[bits >> len(places).bit_length() - 1]
        return column

    def _places_of(self, bits: TargetBits) -> Rows:
        """The place of the target of each bit, by the bit's number; 64, 128, 256, ... elements."""
        version, places = self.places.get(bits, (-1, _NO_ROWS))
        if version != bits.version:
            most = max((bit.bit_length() for bit in bits.targets), default=0)
            places = np.full(max(64, 1 << (most - 1).bit_length()), len(self.ids), np.intp)
            for bit, target in bits.targets.items():
                places[bit.bit_length() - 1] = self.position.get(target, len(self.ids))
            self.places[bits] = bits.version, places
        return places

    def allowed(self, request: RoutingRequest) -> NDArray[np.bool_]:
        """Targets that take the request now or once they have room."""
        tokens = request.prompt_tokens
        if tokens + request.max_tokens <= self.least_longest and tokens < self.least_largest:
            return self.usable
        return self.usable & (tokens + request.max_tokens <= self.longest) & (tokens < self.largest)

    def may_fit(self, request: RoutingRequest, leading: int, room: float) -> bool:
        """False: no target has room for a request, although one takes it once there is.

        Args:
            leading: at most this many leading blocks of it belong to active requests of a target.
            room: as ``ArrayDecisions.room_of`` returned it.
        """
        tokens = request.prompt_tokens + request.resumed_tokens
        needed = tokens // self.most_block_size - min(leading, request.prompt_blocks)
        if needed <= room:
            return True
        allowed = self.allowed(request)
        return not (self.some_usable if allowed is self.usable else allowed.any())

    def rejection(self, at: int, request: RoutingRequest) -> str:
        """Why a target never takes the request; "": it does, once it has room."""
        return rejection(request, RoutingTarget(self.ids[at], self.registrations[at], IDLE))


def _set_bits(masks: bytes) -> Rows:
    """The numbers of the bits that are set; ``masks``: a multiple of 8 bytes.

    Where most words are 0, only the bits of the others are looked at. Of 512 depths among 2,000 workers (512 masks of
    2,048 bits), that made a column in 156 µs instead of 311 (``python -m tests.perf.index --only decision`` has 512
    workers at most).
    """
    octets = np.frombuffer(masks, np.uint8)
    words = (octets.view(np.uint64) != 0).nonzero()[0]
    if len(words) * SPARSE > len(octets) // 8:
        return _ones(octets)
    octets = octets.reshape(-1, 8)[words].reshape(-1)
    filled = (octets != 0).nonzero()[0]
    bits = _ones(octets[filled])
    octet = filled[bits >> 3]
    found: Rows = (words[octet >> 3] << 6) + ((octet & 7) << 3) + (bits & 7)
    return found


def _ones(octets: NDArray[np.uint8]) -> Rows:
    bits: NDArray[np.bool_] = np.unpackbits(octets, bitorder="little").view(np.bool_)  # of bytes, it is slower
    found: Rows = bits.nonzero()[0]
    return found


class Pools:
    """The pools of a ``LoadTracker``."""

    def __init__(self, tracker: LoadTracker) -> None:
        self._tracker = tracker
        self._version = -1
        self._cache: dict[tuple[str, str | None, str, frozenset[str], str], TargetPool | None] = {}

    def pool(self, request: RoutingRequest) -> TargetPool | None:
        """The pool of a request; None: it has to be decided in the general way (``aggregated_pool``)."""
        if not is_plain(request):
            return None
        if self._version != self._tracker.version or len(self._cache) > POOLS_CACHED:
            self._version = self._tracker.version
            self._cache.clear()
        kind = (request.model, request.revision, request.tokenizer, request.processors, request.adapter)
        if kind not in self._cache:
            self._cache[kind] = self._made(request)
        return self._cache[kind]

    def _made(self, request: RoutingRequest) -> TargetPool | None:
        serving = aggregated_pool(self._tracker, request)
        if not serving:
            return None
        each_rank = [(each, rank) for each in serving for rank in range(each.dp_size)]
        ids = [(registration.worker, rank) for registration, rank in each_rank]
        registrations = [registration for registration, _ in each_rank]
        small = msgspec.structs.replace(request, prompt_tokens=0, max_tokens=0)
        usable = np.array([not rejection(small, RoutingTarget(("", 0), each, IDLE)) for each in registrations])
        longest = np.array([each.max_model_len for each in registrations], np.float64)
        sizes = {each.block_size for each in registrations}
        largest = np.array([each.total_blocks * each.block_size for each in registrations], np.float64)
        return TargetPool(
            ids,
            registrations,
            {target: at for at, target in enumerate(ids)},
            np.array([self._tracker.loads.row(target) for target in ids], np.intp),
            usable,
            bool(usable.any()),
            longest,
            largest,
            longest.min(),
            largest.min(),
            sizes.pop() if len(sizes) == 1 else np.array([each.block_size for each in registrations], np.float64),
            max(each.block_size for each in registrations),
            {},
            np.array([loading_tokens(request.adapter, each) for each in registrations]) if request.adapter else None,
            np.array([tier_costs(each) for each in registrations], np.float64).T,
        )


class ArrayDecisions:
    def __init__(self, tracker: LoadTracker) -> None:
        self._pools = Pools(tracker)
        self._columns = LoadColumns(tracker.loads, tracker.tokens_per_s)

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
        if pool is None:
            return None
        size, own = size_of(request), self._columns.terms(pool.rows, request.n, now_ns, weights.prefill)
        active = pool.column(leading) if leading else None
        cached = pool.cached(overlaps, active, size.blocks)
        device = pool.column(overlaps.device) if isinstance(overlaps, TierDepths) else None
        target_costs = costs(size, cached, active, own, pool.block_size, device=device, overlap_weight=weights.overlap)
        for target in request.session:
            at = pool.position.get(target)
            if at is not None:
                target_costs.whole[at] -= favour_tokens(size)
        if pool.loading is not None:
            target_costs.whole[:] += pool.loading
        allowed = pool.allowed(request)
        free = (allowed & target_costs.fits).nonzero()[0]
        if not len(free):
            return None
        scores = target_costs.whole[free]
        some_full = len(free) < len(pool.ids)
        if waited_s is not None and some_full and _waits(target_costs, allowed, int(free[scores.argmin()]), waited_s):
            return None
        rows = free[_best_first(scores, seed)]
        if len(rows) < min(STORED_CANDIDATES, len(pool.ids)):  # then all with room are in
            others = np.delete(np.arange(len(pool.ids)), free)
            rows = np.concatenate((rows, others))[:STORED_CANDIDATES]
        blocks = target_costs.blocks[rows]
        if isinstance(overlaps, TierDepths):
            held = pool.column(overlaps.blocks)[rows]
            blocks = np.minimum(held if active is None else np.maximum(held, active[rows]), size.blocks)
        table = self._table(pool, request, target_costs, rows, blocks, len(free), now_ns)
        chosen = table[0]
        return RoutingDecision((Stage("aggregated", chosen.worker, chosen.rank),), table, chosen.overlap_blocks)

    def _table(
        self,
        pool: TargetPool,
        request: RoutingRequest,
        target_costs: Costs,
        at: Rows,
        blocks: Column,
        free: int,
        now_ns: int,
    ) -> tuple[Candidate, ...]:
        """The score table of the targets ``at`` these places of the pool, of which the first ``free`` have room.

        Args:
            blocks: leading ones that each of them has.
        """
        places = at.tolist()
        ids = [pool.ids[each] for each in places]
        scores, rejections = target_costs.whole[at].tolist(), [""] * len(places)
        for number in range(free, len(places)):
            scores[number], rejections[number] = 0.0, pool.rejection(places[number], request) or "full"
        loads = self._columns.loads(pool.rows[at], now_ns)
        return tuple(map(candidate_of, ids, blocks.astype(np.int64).tolist(), loads, scores, rejections))

    def room_of(self, request: RoutingRequest, now_ns: int) -> tuple[TargetPool, float]:
        """The pool of a request that an ``aggregated_pool`` serves, and the most blocks that a target of it has room
        for (``TargetTerms``)."""
        pool = self._pools.pool(request)
        assert pool is not None
        return pool, float(self._columns.terms(pool.rows, 1, now_ns).room.max())

    def ready(self, requests: Sequence[HeldRequest], now_ns: int) -> list[int]:
        """Positions of the requests for which ``is_ready`` holds.

        Args:
            requests: at least one, all of one lane that an ``aggregated_pool`` serves.
        """
        pool = self._pools.pool(requests[0].request)
        assert pool is not None
        sizes = np.zeros((4, len(requests), 1))
        cached, leading, device = np.zeros((3, len(requests), len(pool.ids)))
        allowed = np.zeros(cached.shape, np.bool_)
        for number, held in enumerate(requests):
            sizes[:, number, 0] = size_of(held.request)
            leading[number] = pool.column(held.leading)
            cached[number] = pool.cached(held.overlaps, leading[number], held.request.prompt_blocks)
            near = held.overlaps.device if isinstance(held.overlaps, TierDepths) else None
            device[number] = cached[number] if near is None else pool.column(near)
            allowed[number] = pool.allowed(held.request)
        one = all(held.request.n == 1 for held in requests)
        own = self._columns.terms(pool.rows, 1 if one else sizes[2], now_ns)
        target_costs = costs(RequestSizes(*sizes), cached, leading, own, pool.block_size, device=device)
        if pool.loading is not None:
            target_costs.whole[:] += pool.loading
        fits = target_costs.fits & allowed
        open_cost = np.where(fits, target_costs.whole, np.inf)
        any_cost = np.where(allowed, target_costs.whole, np.inf)
        every = np.arange(len(requests))
        at, best = open_cost.argmin(axis=1), any_cost.argmin(axis=1)
        saved = target_costs.absent_tokens[every, at] - target_costs.absent_tokens[every, best]
        waits = ~fits[every, best] & (np.array([held.waited_s for held in requests]) < PATIENCE_S * saved)
        ready: list[int] = np.flatnonzero(fits.any(axis=1) & ~waits | ~allowed.any(axis=1)).tolist()
        return ready


def _waits(target_costs: Costs, allowed: NDArray[np.bool_], best: int, waited_s: float) -> bool:
    """Whether a request waits for a target that is full now, and cheaper."""
    full = np.flatnonzero(allowed & ~target_costs.fits)
    if not len(full):
        return False
    better = full[int(target_costs.whole[full].argmin())]
    if target_costs.whole[better] >= target_costs.whole[best]:
        return False
    return bool(waited_s < PATIENCE_S * (target_costs.absent_tokens[best] - target_costs.absent_tokens[better]))


def _best_first(scores: Column, seed: int) -> Rows:
    """Positions of the lowest scores for a score table; among those that tie, ``seed`` says which comes first."""
    lowest = lowest_of(scores, STORED_CANDIDATES)
    if len(lowest) == 1 or scores[lowest[1]] - scores[lowest[0]] > TIE:
        return lowest
    ties = (scores - scores[lowest[0]] <= TIE).nonzero()[0]
    chosen = ties[draw(seed) % len(ties)]
    return np.concatenate(([chosen], lowest[lowest != chosen]))[:STORED_CANDIDATES]


def lowest_of(scores: Column, count: int) -> Rows:
    """Positions of the lowest scores, the first of equal ones first."""
    if len(scores) <= 4 * count:
        return scores.argsort(kind="stable")[:count]
    near = (scores <= np.partition(scores, count)[count]).nonzero()[0]
    lowest: Rows = near[scores[near].argsort(kind="stable")[:count]]
    return lowest
