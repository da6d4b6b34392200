"""The order in which held requests are tried, by class, lane, arrival and deadline. No clock, no tasks.

Classes take turns. Each request brings its class one turn, dated at its arrival; the next class is the one with the
oldest turn, where a lower class has a handicap. A request that is taken uses up the oldest turn of its class, so a
deadline never changes which class is next.

Within a class the order is by min(arrived, deadline - URGENT): first come, first served, except for near deadlines.

No request is overtaken by one that arrived later by more than the handicap of its class and twice URGENT.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

SECOND_NS = 1_000_000_000
HANDICAP_NS = (0, 5 * SECOND_NS, 60 * SECOND_NS)  # by Priority.rank
URGENT_NS = 30 * SECOND_NS


class QueueEntry(NamedTuple, Generic[T]):
    """One held request. Times are Unix ns."""

    due_ns: int
    order: int
    id: str
    deadline_ns: int
    arrived_ns: int
    lane: str
    rank: int
    item: T


class _Class(Generic[T]):
    """The requests of one class in one lane."""

    __slots__ = ("heap", "turns")

    def __init__(self) -> None:
        self.heap: list[QueueEntry[T]] = []  # removed entries stay until they reach the top
        self.turns: list[int] = []  # arrivals, oldest first: one per request

    def remove_turn(self, arrived_ns: int) -> None:
        """A request is removed without being taken: its own turn goes or, if that is used up, the next one."""
        del self.turns[min(bisect_left(self.turns, arrived_ns), len(self.turns) - 1)]


class RequestQueue(Generic[T]):
    """At most ``limit`` requests in lanes, which do not wait for each other."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: dict[str, QueueEntry[T]] = {}
        self._lanes: dict[str, dict[int, _Class[T]]] = {}  # by lane and rank; none is empty
        self._deadlines: list[tuple[int, int, str]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: str) -> bool:
        return request in self._waiting

    def __iter__(self) -> Iterator[QueueEntry[T]]:
        return iter(list(self._waiting.values()))

    def get(self, request: str) -> QueueEntry[T] | None:
        return self._waiting.get(request)

    @property
    def lanes(self) -> list[str]:
        """Lanes with requests."""
        return list(self._lanes)

    def push(self, id: str, item: T, *, rank: int, arrived_ns: int, deadline_ns: int, lane: str = "") -> bool:
        """Add a request; False: the queue is full, or has it already.

        Args:
            rank: of its class, 0 is served first (``Priority.rank``).
            arrived_ns: its first arrival, also when it is requeued, so that it keeps its turn.
        """
        if id in self._waiting or len(self._waiting) >= self.limit:
            return False
        self._order += 1
        due = min(arrived_ns, deadline_ns - URGENT_NS)
        entry = QueueEntry(due, self._order, id, deadline_ns, arrived_ns, lane, rank, item)
        self._waiting[id] = entry
        self._admit(entry)
        insort(self._lanes[lane][rank].turns, arrived_ns)
        heapq.heappush(self._deadlines, (deadline_ns, entry.order, id))
        if len(self._deadlines) > 2 * len(self._waiting) + 64:
            self._compact()
        return True

    def turn(self, lane: str = "") -> int | None:
        """The turn of a lane; the lane with the lowest is next. None: the lane is empty."""
        classes = self._lanes.get(lane)
        return min(_turn(rank, each) for rank, each in classes.items())[0] if classes else None

    def peek(self, lane: str = "") -> QueueEntry[T] | None:
        """The next request of a lane."""
        classes = self._lanes.get(lane)
        if not classes:
            return None
        heap = classes[min(_turn(rank, each) for rank, each in classes.items())[1]].heap
        while self._waiting.get(heap[0].id) is not heap[0]:
            heapq.heappop(heap)
        return heap[0]

    def pop_best(self, lane: str = "") -> QueueEntry[T] | None:
        """Remove and return the next request of a lane."""
        entry = self.peek(lane)
        if entry is not None:
            among = self._lanes[lane][entry.rank]
            heapq.heappop(among.heap)
            del self._waiting[entry.id], among.turns[0]
            self._delete_empty(entry)
        return entry

    def remove(self, id: str) -> QueueEntry[T] | None:
        """Remove and return one request, wherever it stands."""
        entry = self._waiting.pop(id, None)
        if entry is not None:
            self._lanes[entry.lane][entry.rank].remove_turn(entry.arrived_ns)
            self._delete_empty(entry)
        return entry

    def expired(self, now_ns: int) -> list[QueueEntry[T]]:
        """Remove and return the requests whose deadline has come, earliest first."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, order, id = heapq.heappop(self._deadlines)
            entry = self._waiting.get(id)
            if entry is not None and entry.order == order:
                self.remove(id)
                late.append(entry)
        return late

    def _admit(self, entry: QueueEntry[T]) -> None:
        classes = self._lanes.setdefault(entry.lane, {})
        among = classes.get(entry.rank)
        if among is None:
            among = classes[entry.rank] = _Class()
        heapq.heappush(among.heap, entry)

    def _delete_empty(self, entry: QueueEntry[T]) -> None:
        classes = self._lanes[entry.lane]
        if not classes[entry.rank].turns:
            del classes[entry.rank]
            if not classes:
                del self._lanes[entry.lane]

    def _compact(self) -> None:
        """Remove what is left of removed entries."""
        self._deadlines = [(e.deadline_ns, e.order, e.id) for e in self._waiting.values()]
        heapq.heapify(self._deadlines)
        for classes in self._lanes.values():
            for among in classes.values():
                among.heap.clear()
        for entry in self._waiting.values():
            self._admit(entry)


def _turn(rank: int, among: _Class[T]) -> tuple[int, int]:
    """The turn of a class; of two equal ones the higher class is next."""
    return among.turns[0] + HANDICAP_NS[min(rank, len(HANDICAP_NS) - 1)], rank


__all__ = ["HANDICAP_NS", "SECOND_NS", "URGENT_NS", "QueueEntry", "RequestQueue"]
