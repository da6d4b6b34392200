"""Which held requests to try, in which order: ``queue`` by how much of each prompt is cached. No clock, no NATS.

A prompt's cached blocks are looked up when it is held and again every second. Trying a request costs a full decision,
so where one pool of aggregated workers serves a lane, the requests that have a target are found first, with a few array
operations for all the window together.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from router.holders import TargetId
from router.load_tracker import LoadTracker
from router.placement.cost import RequestSize, costs
from router.placement.pool import Pool, Pools
from router.queue import SECOND_NS, QueueEntry, RequestQueue, delay_ns
from router.routing import PATIENCE_S, RoutingRequest
from router.scoring import size_of

T = TypeVar("T")

Overlaps = Callable[[Sequence[int]], Mapping[TargetId, int]]

REFRESH_NS = SECOND_NS
REFRESHED = 64  # looked up again at once, at most
TRIED = 8  # of a lane for which ``candidates`` cannot tell who has a target


class Held(Generic[T]):
    """A held request, and what targets had of its prompt when it was looked up last."""

    __slots__ = ("cached", "item", "keys", "looked_ns", "request")

    def __init__(self, item: T, request: RoutingRequest, keys: Sequence[int]) -> None:
        self.item = item
        self.request = request
        self.keys = keys
        self.cached: Mapping[TargetId, int] = {}
        self.looked_ns = 0


class HeldOrder(Generic[T]):
    """
    Args:
        overlaps: leading blocks of a prompt cached, by target.
        by_size: whether short prompts go first, and requests wait for better targets; False: first come, first served.
    """

    def __init__(self, tracker: LoadTracker, pools: Pools, overlaps: Overlaps, *, by_size: bool = True) -> None:
        self.queue: RequestQueue[Held[T]] = RequestQueue(1 << 30)
        self._tracker = tracker
        self._pools = pools
        self._overlaps = overlaps
        self._by_size = by_size
        self._looked: deque[tuple[int, str]] = deque()  # when each was looked up, oldest first

    def push(
        self,
        id: str,
        held: Held[T],
        *,
        rank: int,
        arrived_ns: int,
        deadline_ns: int,
        now_ns: int,
        lane: str = "",
    ) -> bool:
        """As ``RequestQueue.push``."""
        delay = self._look(id, held, now_ns)
        queue = self.queue
        return queue.push(
            id, held, rank=rank, arrived_ns=arrived_ns, deadline_ns=deadline_ns, lane=lane, delay_ns=delay
        )

    def refresh(self, now_ns: int) -> None:
        """Look up again what was looked up a second ago."""
        for _ in range(REFRESHED):
            if not self._looked or now_ns - self._looked[0][0] < REFRESH_NS:
                return
            looked_ns, id = self._looked.popleft()
            entry = self.queue.get(id)
            if entry is not None and entry.item.looked_ns == looked_ns:
                self.queue.delay(id, self._look(id, entry.item, now_ns))

    def candidates(self, lane: str, now_ns: int) -> Iterator[QueueEntry[Held[T]]]:
        """The requests of a lane to decide on, next first. After one was placed, ask again."""
        if not self._by_size:
            yield from self.queue.window(lane, 1)
            return
        window = self.queue.window(lane)
        if not window:
            return
        pool = self._pools.pool(window[0].item.request)
        if pool is None:
            yield from window[:TRIED]
            return
        for at in self._ready(window, pool, now_ns):
            yield window[at]

    def _look(self, id: str, held: Held[T], now_ns: int) -> int:
        """Look up what is cached of a prompt; returns by how much the size of the rest delays it."""
        held.looked_ns = now_ns
        if not self._by_size:
            return 0
        held.cached = self._overlaps(held.keys)
        leading = self._tracker.loads.prefixes(held.keys)
        blocks = max(max(held.cached.values(), default=0), max(leading.values(), default=0))
        self._looked.append((now_ns, id))
        size = self._tracker.block_size(held.request.model)
        return delay_ns(held.request.prompt_tokens + held.request.resumed_tokens - blocks * size)

    def _ready(self, window: Sequence[QueueEntry[Held[T]]], pool: Pool, now_ns: int) -> list[int]:
        """Positions of the requests that have a target with room and need not wait for a better one."""
        sizes = np.zeros((3, len(window), 1))
        cached, leading = np.zeros((2, len(window), len(pool.ids)))
        allowed = np.zeros(cached.shape, np.bool_)
        for number, entry in enumerate(window):
            held = entry.item
            sizes[:, number, 0] = size_of(held.request)
            pool.fill(cached[number], held.cached)
            pool.fill(leading[number], self._tracker.loads.prefixes(held.keys))
            allowed[number] = pool.allowed(held.request)
        found = costs(RequestSize(*sizes), cached, leading, self._tracker.columns(pool.rows, now_ns))
        fits = found.fits & allowed
        open_cost = np.where(fits, found.whole, np.inf)
        any_cost = np.where(allowed, found.whole, np.inf)
        every = np.arange(len(window))
        at, best = open_cost.argmin(axis=1), any_cost.argmin(axis=1)
        saved = found.uncached_tokens[every, at] - found.uncached_tokens[every, best]
        waited = np.array([now_ns - entry.arrived_ns for entry in window], np.float64) / SECOND_NS
        waits = ~fits[every, best] & (waited < PATIENCE_S * saved)
        # A request that no target ever takes is decided, so that it ends.
        return np.flatnonzero(fits.any(axis=1) & ~waits | ~allowed.any(axis=1)).tolist()
