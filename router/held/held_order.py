"""Which held requests to try, in which order: ``queue`` by how much of each prompt is cached. No clock, no NATS.

A prompt's cached blocks are looked up when it is held and again every second. Trying a request costs a full decision,
so where one pool of aggregated workers serves a lane, the requests that have a target are found first.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.router.held.class_queue import QueueEntry
from penstock.router.held.queue import SECOND_NS, SHORTEST_TOKENS, RequestQueue, delay_ns
from penstock.router.placement.aggregated import HeldRequest, aggregated_pool, is_ready
from penstock.router.placement.routing import RoutingRequest
from penstock.router.state.depths import TargetId
from penstock.router.state.load_tracker import LoadTracker

if TYPE_CHECKING:
    from penstock.router.placement.arrays import ArrayDecisions

T = TypeVar("T")

Overlaps = Callable[[Sequence[int]], Mapping[TargetId, int]]

REFRESH_NS = SECOND_NS
REFRESHED = 64  # looked up again at once, at most
TRIED = 8  # requests of a lane for which ``candidates`` cannot compute targets in advance


class Held(Generic[T]):
    """A held request, with the cached blocks of its prompt by target, as of the last lookup."""

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
        arrays: to find requests that have a target; None: a loop finds them.
        overlaps: leading blocks of a prompt cached, by target.
        by_size: whether short prompts go first, and requests wait for better targets; False: first come, first served.
        weights: of tenants, as in ``RequestQueue``.
    """

    def __init__(
        self,
        tracker: LoadTracker,
        arrays: "ArrayDecisions | None",
        overlaps: Overlaps,
        *,
        by_size: bool = True,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.queue: RequestQueue[Held[T]] = RequestQueue(weights)
        self._tracker = tracker
        self._arrays = arrays
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
        tenant: str = "",
    ) -> bool:
        """As ``RequestQueue.push``."""
        tokens = self._look(id, held, now_ns)
        return self.queue.push(
            id,
            held,
            rank=rank,
            arrived_ns=arrived_ns,
            deadline_ns=deadline_ns,
            lane=lane,
            delay_ns=delay_ns(tokens) if self._by_size else 0,
            tenant=tenant,
            size=max(SHORTEST_TOKENS, tokens),
        )

    def refresh(self, now_ns: int) -> None:
        """Repeat the lookups that are a second old."""
        for _ in range(REFRESHED):
            if not self._looked or now_ns - self._looked[0][0] < REFRESH_NS:
                return
            looked_ns, id = self._looked.popleft()
            entry = self.queue.get(id)
            if entry is not None and entry.item.looked_ns == looked_ns:
                self.queue.delay(id, delay_ns(self._look(id, entry.item, now_ns)))

    def candidates(self, lane: str, now_ns: int) -> Iterator[QueueEntry[Held[T]]]:
        """The requests of a lane to decide on, next first. After one was placed, ask again."""
        if not self._by_size:
            yield from self.queue.window(lane, 1)
            return
        window = self.queue.window(lane, now_ns=now_ns)
        if not window:
            return
        if not aggregated_pool(self._tracker, window[0].item.request):
            yield from window[:TRIED]
            return
        yield from self._ready(window, now_ns)

    def _look(self, id: str, held: Held[T], now_ns: int) -> int:
        """Look up the cached blocks of a prompt. Returns the number of tokens that no target has."""
        held.looked_ns = now_ns
        tokens = held.request.prompt_tokens + held.request.resumed_tokens
        if not self._by_size:
            return tokens
        held.cached = self._overlaps(held.keys)
        leading = self._tracker.loads.prefixes(held.keys)
        blocks = max(max(held.cached.values(), default=0), max(leading.values(), default=0))
        self._looked.append((now_ns, id))
        size = self._tracker.block_size(held.request.model)
        return tokens - blocks * size

    def _ready(self, window: Sequence[QueueEntry[Held[T]]], now_ns: int) -> Iterator[QueueEntry[Held[T]]]:
        """The requests that have a target with room and need not wait for a better one."""
        requests = (self._held_request(entry, now_ns) for entry in window)
        if self._arrays is not None:
            for at in self._arrays.ready(list(requests), now_ns):
                yield window[at]
            return
        targets = self._tracker.targets(now_ns, window[0].item.request.model)
        for entry, request in zip(window, requests, strict=True):
            if is_ready(request, targets):
                yield entry

    def _held_request(self, entry: QueueEntry[Held[T]], now_ns: int) -> HeldRequest:
        held = entry.item
        leading = self._tracker.loads.prefixes(held.keys)
        return HeldRequest(held.request, held.cached, leading, (now_ns - entry.arrived_ns) / SECOND_NS)
