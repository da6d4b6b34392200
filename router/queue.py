"""The waiting room: requests that no worker can take now, in the order in which they shall be tried.

Classes take turns by arrival alone: next is the class whose oldest turn, plus the head start of the classes above it,
is oldest. Each request brings one turn, dated when it arrived, and whoever is taken uses up the oldest turn of its
class. So no deadline changes which class is next, whatever clients make up.

Within a class the order is by min(arrived, deadline - URGENT): first come, first served, but for near deadlines.

Nobody is overtaken by a request that came more than its class's handicap and twice URGENT after it.
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
    """One request in the room. Times are Unix ns."""

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
        self.heap: list[QueueEntry[T]] = []  # those that left the room early, too, until they come up
        self.turns: list[int] = []  # arrivals, oldest first: one for each that is here

    def give_up(self, arrived_ns: int) -> None:
        """One request leaves untaken, with its own turn or, if that was used for another, the next."""
        del self.turns[min(bisect_left(self.turns, arrived_ns), len(self.turns) - 1)]


class RequestQueue(Generic[T]):
    """At most ``limit`` requests, in lanes (one per model) that do not hold each other up."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: dict[str, QueueEntry[T]] = {}
        self._lanes: dict[str, dict[int, _Class[T]]] = {}  # by lane and rank; only where somebody waits
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
        """Lanes in which somebody waits."""
        return list(self._lanes)

    def push(self, id: str, item: T, *, rank: int, arrived_ns: int, deadline_ns: int, lane: str = "") -> bool:
        """Let a request in; False: the room is full, or it is in already.

        Args:
            rank: of its class, 0 is served first (``Priority.rank``).
            arrived_ns: when it first asked, also if it comes back, so that it keeps its turn.
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
        """When a lane's turn is, to be compared with other lanes'; None: nobody waits there."""
        classes = self._lanes.get(lane)
        return min(_turn(rank, each) for rank, each in classes.items())[0] if classes else None

    def peek(self, lane: str = "") -> QueueEntry[T] | None:
        """Who is next in a lane."""
        classes = self._lanes.get(lane)
        if not classes:
            return None
        heap = classes[min(_turn(rank, each) for rank, each in classes.items())[1]].heap
        while self._waiting.get(heap[0].id) is not heap[0]:
            heapq.heappop(heap)
        return heap[0]

    def pop_best(self, lane: str = "") -> QueueEntry[T] | None:
        """Take out who is next in a lane."""
        entry = self.peek(lane)
        if entry is not None:
            among = self._lanes[lane][entry.rank]
            heapq.heappop(among.heap)
            del self._waiting[entry.id], among.turns[0]
            self._forget_empty(entry)
        return entry

    def remove(self, id: str) -> QueueEntry[T] | None:
        """Take out one request, wherever it stands."""
        entry = self._waiting.pop(id, None)
        if entry is not None:
            self._lanes[entry.lane][entry.rank].give_up(entry.arrived_ns)
            self._forget_empty(entry)
        return entry

    def expired(self, now_ns: int) -> list[QueueEntry[T]]:
        """Take out and return everybody whose deadline has come, earliest first."""
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

    def _forget_empty(self, entry: QueueEntry[T]) -> None:
        classes = self._lanes[entry.lane]
        if not classes[entry.rank].turns:
            del classes[entry.rank]
            if not classes:
                del self._lanes[entry.lane]

    def _compact(self) -> None:
        """Drop what is kept of those who left early."""
        self._deadlines = [(e.deadline_ns, e.order, e.id) for e in self._waiting.values()]
        heapq.heapify(self._deadlines)
        for classes in self._lanes.values():
            for among in classes.values():
                among.heap.clear()
        for entry in self._waiting.values():
            self._admit(entry)


def _turn(rank: int, among: _Class[T]) -> tuple[int, int]:
    """When a class's turn is; of two at the same time the higher class goes first."""
    return among.turns[0] + HANDICAP_NS[min(rank, len(HANDICAP_NS) - 1)], rank


__all__ = ["HANDICAP_NS", "SECOND_NS", "URGENT_NS", "QueueEntry", "RequestQueue"]
