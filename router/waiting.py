"""The waiting room: requests that no worker can take now, in the order in which they shall be tried.

Each request gets a fixed due time when it enters, so the order never has to be recomputed:

    due = min(arrived + the head start of the classes above it, deadline − URGENT)

Within a class that is first come, first served. A lower class goes behind what arrives during its handicap, and
no longer, so it is never starved; whoever's deadline is near is tried first, whatever its class.
"""

import heapq
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

SECOND_NS = 1_000_000_000
HANDICAP_NS = (0, 5 * SECOND_NS, 60 * SECOND_NS)  # by Priority.rank
URGENT_NS = 30 * SECOND_NS


class Waiting(NamedTuple, Generic[T]):
    """One request in the room. Times are Unix ns."""

    due_ns: int
    order: int
    id: str
    deadline_ns: int
    arrived_ns: int
    lane: str
    item: T


class WaitingRoom(Generic[T]):
    """At most ``limit`` requests, in lanes (one per model) that do not hold each other up. O(log n) a step."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: dict[str, Waiting[T]] = {}
        self._lanes: dict[str, list[Waiting[T]]] = {}
        self._deadlines: list[tuple[int, int, str]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: str) -> bool:
        return request in self._waiting

    def __iter__(self) -> Iterator[Waiting[T]]:
        return iter(list(self._waiting.values()))

    @property
    def lanes(self) -> list[str]:
        """Lanes in which somebody waits."""
        return [lane for lane in list(self._lanes) if self._head(lane) is not None]

    def push(self, id: str, item: T, *, rank: int, arrived_ns: int, deadline_ns: int, lane: str = "") -> bool:
        """Let a request in; False: the room is full, or it is in already.

        Args:
            rank: of its class, 0 is served first (``Priority.rank``).
            arrived_ns: when it first asked, also if it comes back, so that it keeps its turn.
        """
        if id in self._waiting or len(self._waiting) >= self.limit:
            return False
        due = min(arrived_ns + HANDICAP_NS[min(rank, len(HANDICAP_NS) - 1)], deadline_ns - URGENT_NS)
        self._order += 1
        entry = self._waiting[id] = Waiting(due, self._order, id, deadline_ns, arrived_ns, lane, item)
        heapq.heappush(self._lanes.setdefault(lane, []), entry)
        heapq.heappush(self._deadlines, (deadline_ns, entry.order, id))
        if len(self._deadlines) > 2 * len(self._waiting) + 64:
            self._compact()
        return True

    def peek(self, lane: str = "") -> Waiting[T] | None:
        """Who is next in a lane."""
        return self._head(lane)

    def pop_best(self, lane: str = "") -> Waiting[T] | None:
        """Take out who is next in a lane."""
        entry = self._head(lane)
        if entry is not None:
            heapq.heappop(self._lanes[lane])
            del self._waiting[entry.id]
        return entry

    def remove(self, id: str) -> Waiting[T] | None:
        """Take out one request, wherever it stands."""
        return self._waiting.pop(id, None)

    def expired(self, now_ns: int) -> list[Waiting[T]]:
        """Take out and return everybody whose deadline has come, earliest first."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, order, id = heapq.heappop(self._deadlines)
            entry = self._waiting.get(id)
            if entry is not None and entry.order == order:
                late.append(self._waiting.pop(id))
        return late

    def next_deadline_ns(self) -> int | None:
        """When ``expired`` has something to say next; may be early, never late."""
        return self._deadlines[0][0] if self._deadlines else None

    def _head(self, lane: str) -> Waiting[T] | None:
        heap = self._lanes.get(lane)
        while heap:
            if self._waiting.get(heap[0].id) is heap[0]:
                return heap[0]
            heapq.heappop(heap)
        self._lanes.pop(lane, None)
        return None

    def _compact(self) -> None:
        self._deadlines = [(e.deadline_ns, e.order, e.id) for e in self._waiting.values()]
        heapq.heapify(self._deadlines)
        self._lanes = {}
        for entry in self._waiting.values():
            self._lanes.setdefault(entry.lane, []).append(entry)
        for heap in self._lanes.values():
            heapq.heapify(heap)
