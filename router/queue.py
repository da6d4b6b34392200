"""The order in which held requests are tried. No clock, no tasks.

1. Classes take turns: each request brings its class one turn, dated at its arrival, and the oldest turn is next, where
   a lower class has a handicap. A request that is taken uses up its class' oldest turn, whatever its deadline.
2. In a class the order is by due time: the arrival, plus ``DELAY_NS`` for each prompt token that no target caches, at
   most ``PATIENCE_NS``. Short prompts are first, long ones first come, first served, and none waits for ever.
3. A request is due ``URGENT_NS`` before its deadline if that comes first.
4. The requests of a lane wait for the same workers. The first ``WINDOW`` of a lane are tried in this order, since a
   shorter prompt may fit where a longer one does not; lanes do not wait for each other.
5. What is pushed with a later arrival, such as a tenant's that is ahead of its share, waits for the others.

No request is overtaken by one that arrived later by more than its class' handicap, ``PATIENCE_NS`` and twice URGENT.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

SECOND_NS = 1_000_000_000
HANDICAP_NS = (0, 5 * SECOND_NS, 60 * SECOND_NS)  # by Priority.rank
URGENT_NS = 30 * SECOND_NS
DELAY_NS = 12_500_000  # about 600 times what a large accelerator needs to compute a token
PATIENCE_NS = 400 * SECOND_NS
SHORTEST_TOKENS = 64
WINDOW = 32


def delay_ns(uncached_tokens: float) -> int:
    """How much later than its arrival a request with so much to compute is due."""
    return min(int(DELAY_NS * max(SHORTEST_TOKENS, uncached_tokens)), PATIENCE_NS)


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

    def first(self, count: int, waiting: dict[str, QueueEntry[T]]) -> list[QueueEntry[T]]:
        """The requests that are due first."""
        heap = self.heap
        found: list[QueueEntry[T]] = []
        while heap and len(found) < count:
            entry = heapq.heappop(heap)
            if waiting.get(entry.id) is entry:
                found.append(entry)
        for entry in found:
            heapq.heappush(heap, entry)
        return found

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

    def push(
        self, id: str, item: T, *, rank: int, arrived_ns: int, deadline_ns: int, lane: str = "", delay_ns: int = 0
    ) -> bool:
        """Add a request; False: the queue is full, or has it already.

        Args:
            rank: of its class, 0 is served first (``Priority.rank``).
            arrived_ns: its first arrival, also when it is requeued, so that it keeps its turn.
            delay_ns: by the size of its prompt, see the function.
        """
        if id in self._waiting or len(self._waiting) >= self.limit:
            return False
        self._order += 1
        due = min(arrived_ns + delay_ns, deadline_ns - URGENT_NS)
        entry = QueueEntry(due, self._order, id, deadline_ns, arrived_ns, lane, rank, item)
        self._waiting[id] = entry
        self._admit(entry)
        insort(self._lanes[lane][rank].turns, arrived_ns)
        heapq.heappush(self._deadlines, (deadline_ns, entry.order, id))
        if len(self._deadlines) > 2 * len(self._waiting) + 64:
            self._compact()
        return True

    def delay(self, id: str, delay_ns: int) -> None:
        """Change the delay of a request that waits."""
        old = self._waiting[id]
        due = min(old.arrived_ns + delay_ns, old.deadline_ns - URGENT_NS)
        if due != old.due_ns:
            entry = self._waiting[id] = old._replace(due_ns=due)
            among = self._lanes[entry.lane][entry.rank]
            heapq.heappush(among.heap, entry)
            if len(among.heap) > 2 * len(among.turns) + 64:
                among.heap = [each for each in among.heap if self._waiting.get(each.id) is each]
                heapq.heapify(among.heap)

    def window(self, lane: str = "", size: int = WINDOW) -> list[QueueEntry[T]]:
        """The requests of a lane to try, in order: those of the class whose turn is next, then of the other classes."""
        classes = self._lanes.get(lane, {})
        found: list[QueueEntry[T]] = []
        for _, rank in sorted(_turn(rank, each) for rank, each in classes.items()):
            among = classes[rank]
            if len(found) < size:
                found += among.first(size - len(found), self._waiting)
        return found

    def take(self, id: str) -> QueueEntry[T]:
        """Remove and return a request that is placed: it uses up the oldest turn of its class."""
        entry = self._waiting.pop(id)
        del self._lanes[entry.lane][entry.rank].turns[0]
        self._delete_empty(entry)
        return entry

    def turn(self, lane: str = "") -> int | None:
        """The turn of a lane; the lane with the lowest is next. None: the lane is empty."""
        classes = self._lanes.get(lane)
        return min(_turn(rank, each) for rank, each in classes.items())[0] if classes else None

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
