"""The order in which held requests are tried. No clock, no tasks.

1. Classes take turns: each request brings its class one turn, dated at its arrival, and the oldest turn is next, where
   a lower class has a handicap. A request that is taken uses up its class' oldest turn, whatever its deadline.
2. In a class the tenant is next that has had least work for its weight (``class_queue``); weights are 1 by default.
3. A tenant's requests are in the order of their due times: the arrival, plus ``DELAY_NS`` for each prompt token that no
   target caches, at most ``PATIENCE_NS``; or ``URGENT_NS`` before the deadline if that comes first.
4. A request that has waited five seconds, and for twelve times the work that was held in front of it when it arrived
   and as much as is held now, goes first, however long its prompt; after 16 times the former and twice the latter it is
   tried alone, until there is room for it.
5. The requests of a lane wait for the same workers. The first ``WINDOW`` of a lane are tried in this order, since a
   shorter prompt may fit where a longer one does not; lanes do not wait for each other.
"""

import heapq
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from penstock.router.held.class_queue import ClassQueue, QueueEntry

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


class RequestQueue(Generic[T]):
    """Requests in lanes, which do not wait for each other.

    Args:
        weights: by tenant, above 0; 1 unless given. They may change.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights: Mapping[str, float] = {} if weights is None else weights
        self._waiting: dict[str, QueueEntry[T]] = {}
        self._lanes: dict[str, dict[int, ClassQueue[T]]] = {}  # by lane and rank; none is empty
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
        self,
        id: str,
        item: T,
        *,
        rank: int,
        arrived_ns: int,
        deadline_ns: int,
        lane: str = "",
        delay_ns: int = 0,
        tenant: str = "",
        size: float = 1.0,
    ) -> bool:
        """Add a request; False: it is there already.

        Args:
            rank: of its class, 0 is served first (``Priority.rank``).
            arrived_ns: its first arrival, also when it is requeued, so that it keeps its turn.
            delay_ns: by the size of its prompt, see the function.
            size: work that it counts as, in prompt tokens to compute.
        """
        if id in self._waiting:
            return False
        self._order += 1
        due = min(arrived_ns + delay_ns, deadline_ns - URGENT_NS)
        entry = QueueEntry(due, self._order, id, deadline_ns, arrived_ns, lane, rank, item, tenant, size)
        self._waiting[id] = entry
        classes = self._lanes.setdefault(lane, {})
        if rank not in classes:
            classes[rank] = ClassQueue(self._weights)
        classes[rank].push(entry)
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
            self._lanes[entry.lane][entry.rank].moved(entry, self._waiting)

    def window(self, lane: str = "", size: int = WINDOW, now_ns: int = 0) -> list[QueueEntry[T]]:
        """The requests of a lane to try, in order: those of the class whose turn is next, then of the other classes.

        Args:
            now_ns: 0: unknown, nothing is overdue.
        """
        classes = self._lanes.get(lane, {})
        ordered: list[QueueEntry[T]] = []
        for _, rank in sorted(_turn(rank, each) for rank, each in classes.items()):
            if len(ordered) == size:
                break
            entries, alone = classes[rank].first(size - len(ordered), self._waiting, now_ns)
            if alone and not ordered:
                return entries
            ordered += entries
        return ordered

    def take(self, id: str) -> QueueEntry[T]:
        """Remove and return a request that is placed: it uses up the oldest turn of its class."""
        entry = self._waiting.pop(id)
        self._lanes[entry.lane][entry.rank].take(entry, self._waiting)
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
            self._lanes[entry.lane][entry.rank].remove(entry, self._waiting)
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

    def _delete_empty(self, entry: QueueEntry[T]) -> None:
        classes = self._lanes[entry.lane]
        if not classes[entry.rank].turns:
            del classes[entry.rank]
            if not classes:
                del self._lanes[entry.lane]

    def _compact(self) -> None:
        """Remove leftovers of removed entries."""
        self._deadlines = [(e.deadline_ns, e.order, e.id) for e in self._waiting.values()]
        heapq.heapify(self._deadlines)


def _turn(rank: int, among: ClassQueue[T]) -> tuple[int, int]:
    """The turn of a class; of two equal ones the higher class is next."""
    return among.turns[0] + HANDICAP_NS[min(rank, len(HANDICAP_NS) - 1)], rank
