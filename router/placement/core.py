"""Which target runs each request, and when: the placement policy of mode "kv". No NATS, clock or tasks.

Everything that happens is a call, with its time as an argument; decisions are return values. The same calls in the
same order give the same decisions, so that a simulation runs exactly what a router runs:

    join, leave      a worker registered, changed or left; each of its ranks is a target
    arrive           a request arrived: a ``Placed``, or None: it is held
    stored           KV events: a target holds further blocks. Call it after the index has folded them. A prompt counts
                     as computed when its last full block is stored, so the first token needs no message of its own
    ended            a request ended
    pump             after any of these: the held requests that are placed now, next first
    withdraw         a held request was cancelled or its deadline passed

The prefix index is outside: ``overlaps`` is its ``match``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from router.holders import TargetId
from router.placement.cost import Costs, costs
from router.placement.order import SECOND_NS, WINDOW, DueOrder, due_ns
from router.placement.target_loads import Column, Rows, TargetLoads, Task
from schemas.fleet import Registration

Overlaps = Callable[[Sequence[int]], Mapping[TargetId, int]]

REFRESH_NS = SECOND_NS  # between two looks at what is cached of a held prompt
PATIENCE_NS = 4_000_000  # per uncached token that the better target saves
TIE = 1e-6  # costs closer than this are equal


class Arrival(NamedTuple):
    """A request to be placed.

    Attributes:
        keys: of the full blocks of its prompt.
        rank: of its priority class; 0 is served first.
        seed: breaks ties.
        ahead_of_share_s: seconds by which its tenant is ahead of its share.
    """

    id: str
    keys: Sequence[int]
    prompt_tokens: int
    arrived_ns: int
    deadline_ns: int = 1 << 62
    sequences: int = 1
    rank: int = 0
    seed: int = 0
    ahead_of_share_s: float = 0.0


class Placed(NamedTuple):
    """A decision: ``arrival`` goes to ``target``, which has the leading ``overlap_blocks`` of its prompt or will have
    computed them by then for another request."""

    arrival: Arrival
    target: TargetId
    overlap_blocks: int
    cost: float


class _Held:
    """A held request, and what its targets had of its prompt when it was looked up last."""

    __slots__ = ("arrival", "cached", "looked_ns")

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.cached: Mapping[TargetId, int] = {}
        self.looked_ns = 0


class Placement:
    """
    Args:
        overlaps: leading blocks of a prompt that each target caches (``PrefixIndex.match``); absent: none.
    """

    def __init__(self, overlaps: Overlaps) -> None:
        self._overlaps = overlaps
        self._loads = TargetLoads()
        self._workers: dict[str, list[TargetId]] = {}
        self._targets: list[TargetId] = []
        self._rows: Rows = np.zeros(0, np.intp)
        self._position: dict[TargetId, int] = {}  # in ``_targets``
        self._placed: dict[str, TargetId] = {}
        self._held: DueOrder[_Held] = DueOrder()
        self._changed = True  # since the last ``pump`` that placed nothing

    def __len__(self) -> int:
        """Number of held requests."""
        return len(self._held)

    # Workers

    def join(self, registration: Registration) -> None:
        """A worker registered, or its registration changed."""
        worker = registration.worker
        targets = [(worker, rank) for rank in range(registration.dp_size)]
        for target in set(self._workers.get(worker, ())) - set(targets):
            self._loads.remove(target)
        self._workers[worker] = targets
        for target in targets:
            self._loads.put(
                target,
                block_size=registration.block_size,
                blocks=registration.total_blocks,
                limit=registration.slots + registration.queue,
            )
        self._renumber()

    def leave(self, worker: str) -> list[str]:
        """A worker left. Returns the requests that were placed there: they have to arrive again."""
        lost = [task.request for target in self._workers.pop(worker, ()) for task in self._loads.remove(target)]
        for request in lost:
            del self._placed[request]
        self._renumber()
        return lost

    # Requests

    def arrive(self, arrival: Arrival, now_ns: int) -> Placed | None:
        """Place a request at once, if none is held and a target has room; hold it otherwise."""
        if not len(self._held) and self._targets:
            cached = self._overlaps(arrival.keys)
            found = self._costs(arrival, cached)
            at = self._cheapest(found, arrival.seed)
            if at is not None:
                return self._place(arrival, at, found, cached)
        held = _Held(arrival)
        self._held.push(arrival.id, held, self._look(held, now_ns))
        self._changed = True
        return None

    def withdraw(self, request: str) -> bool:
        """Remove a held request; False: it is not held."""
        return self._held.remove(request) is not None

    def stored(self, target: TargetId, keys: Sequence[int]) -> None:
        """KV events: ``target`` now holds these blocks."""
        if self._loads.stored(target, keys):
            self._changed = True

    def ended(self, request: str) -> None:
        """A request ended; unknown requests are ignored."""
        target = self._placed.pop(request, None)
        if target is not None:
            self._loads.end(request, target)
            self._changed = True

    def pump(self, now_ns: int) -> Iterator[Placed]:
        """The held requests that have a target now. Each is placed before the next one is considered."""
        if not len(self._held) or not self._targets:
            return
        self._refresh(now_ns)
        while self._changed:
            self._changed = False
            for held in self._held.first(WINDOW):
                placed = self._try(held, now_ns)
                if placed is not None:
                    self._changed = True
                    yield placed

    def _try(self, held: _Held, now_ns: int) -> Placed | None:
        arrival = held.arrival
        found = self._costs(arrival, held.cached)
        at = self._cheapest(found, arrival.seed)
        if at is None:
            return None
        best = int(found.cost.argmin())
        saved = float(found.uncached_tokens[at] - found.uncached_tokens[best])
        if not found.fits[best] and saved > 0 and now_ns - arrival.arrived_ns < PATIENCE_NS * saved:
            return None
        self._held.remove(arrival.id)
        return self._place(arrival, at, found, held.cached)

    def _place(self, arrival: Arrival, at: int, found: Costs, cached: Mapping[TargetId, int]) -> Placed:
        target = self._targets[at]
        uncached = int(found.uncached_tokens[at])
        self._placed[arrival.id] = target
        self._loads.add(Task(arrival.id, target, arrival.keys, len(arrival.keys), uncached, arrival.sequences))
        return Placed(arrival, target, cached.get(target, 0), float(found.cost[at]))

    # Costs

    def _costs(self, arrival: Arrival, cached: Mapping[TargetId, int]) -> Costs:
        return costs(
            (arrival.prompt_tokens, len(arrival.keys), arrival.sequences),
            self._column(cached),
            self._column(self._loads.prefixes(arrival.keys)),
            self._loads.columns(self._rows),
        )

    def _cheapest(self, found: Costs, seed: int) -> int | None:
        """The position of the cheapest target with room; None: there is none."""
        if not found.fits.any():
            return None
        cost = np.where(found.fits, found.cost, np.inf)
        ties = np.flatnonzero(cost <= cost.min() + TIE)
        return int(ties[seed % len(ties)])

    def _column(self, blocks: Mapping[TargetId, int]) -> Column:
        column = np.zeros(len(self._targets))
        position = self._position
        for target, count in blocks.items():
            at = position.get(target)
            if at is not None:
                column[at] = count
        return column

    def _refresh(self, now_ns: int) -> None:
        for held in self._held:
            if now_ns - held.looked_ns >= REFRESH_NS:
                self._held.move(held.arrival.id, self._look(held, now_ns))
                self._changed = True

    def _look(self, held: _Held, now_ns: int) -> int:
        """Look up what is cached of a held prompt; returns when the request is due."""
        arrival = held.arrival
        held.cached, held.looked_ns = self._overlaps(arrival.keys), now_ns
        uncached = float(arrival.prompt_tokens)
        if self._targets:
            uncached = float(self._costs(arrival, held.cached).uncached_tokens.min())
        return due_ns(arrival.arrived_ns, arrival.deadline_ns, arrival.rank, uncached, arrival.ahead_of_share_s)

    def _renumber(self) -> None:
        self._targets = [target for worker in sorted(self._workers) for target in self._workers[worker]]
        self._position = {target: at for at, target in enumerate(self._targets)}
        self._rows = np.array([self._loads.row(target) for target in self._targets], np.intp)
        self._changed = True
