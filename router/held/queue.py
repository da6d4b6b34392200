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

The order of held requests within one class: tenants by their shares, a tenant's by due time. No clock, no tasks.

Work is counted in prompt tokens to compute, when a request is pushed. A tenant has had the work of what was taken of
it, divided by its weight; the one that has had least is next. A tenant that returns from having nothing held begins
with at least the work of the tenant that was next last. So the shares of tenants that always have something held
converge to their weights.

Within a tenant each request has a limit: twelve times the work that was held in front of it when it came, or as much
as is held now if that is more: who came first when overload began had little in front of it, and would stop the short
ones at its height. Once the tenant has had so much since then, it is overdue, and goes first. Limits never decrease
from one request to the next, so the overdue ones are the oldest. Hence every request is placed after at most twelve
times the work that first come, first served would place before it, or the most that is held at once meanwhile. An
overdue one that no target has room for is tried alone after 16 times that work, or twice what is held.
"""

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

# Lower values shorten the longest waits of overload and lengthen the mean.
OVERDUE_AFTER = 12.0  # times the work that was held in front of a request, and once what is held now
ALONE_AFTER = 16.0  # times that work, and twice what is held, from which on nothing else is tried
OVERDUE_NS = 5_000_000_000  # no request is overdue before


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
    tenant: str = ""
    size: float = 1.0


class _Limit(NamedTuple):
    """When a request is overdue, and when it is tried alone: work that its tenant has had by then.

    Attributes:
        came: work that its tenant had had when it came.
    """

    entry_order: int
    id: str
    came: float
    overdue: float
    alone: float


class _Tenant(Generic[T]):
    """The requests of one tenant."""

    __slots__ = ("count", "had", "heap", "held", "limits", "passed")

    def __init__(self, passed: float) -> None:
        self.heap: list[QueueEntry[T]] = []  # by due time; removed entries stay until they reach the top
        self.limits: deque[_Limit] = deque()  # oldest first; those of removed entries stay until they are first
        self.count = 0
        self.held = 0.0  # work
        self.had = 0.0
        self.passed = passed  # work by weight

    def push(self, entry: QueueEntry[T]) -> None:
        heapq.heappush(self.heap, entry)
        overdue, alone = self.had + OVERDUE_AFTER * self.held, self.had + ALONE_AFTER * self.held
        if self.limits:
            overdue, alone = max(overdue, self.limits[-1].overdue), max(alone, self.limits[-1].alone)
        self.limits.append(_Limit(entry.order, entry.id, self.had, overdue, alone))
        self.count += 1
        self.held += entry.size

    def first(self, count: int, waiting: Mapping[str, QueueEntry[T]], now_ns: int) -> tuple[list[QueueEntry[T]], bool]:
        """The next requests, and whether the first of them is tried alone."""
        first_entries = self._overdue(count, waiting, now_ns)
        if first_entries and self.had > max(self.limits[0].alone, self.limits[0].came + 2 * self.held):
            return first_entries[:1], True
        taken, kept = {entry.id for entry in first_entries}, []
        while self.heap and len(first_entries) < count:
            entry = heapq.heappop(self.heap)
            if waiting.get(entry.id) is entry:
                kept.append(entry)
                if entry.id not in taken:
                    first_entries.append(entry)
        for entry in kept:
            heapq.heappush(self.heap, entry)
        return first_entries, False

    def compact(self, waiting: Mapping[str, QueueEntry[T]]) -> None:
        """Remove leftovers of removed entries once they are more than half."""
        if len(self.heap) > 2 * self.count + 64:
            self.heap = [each for each in self.heap if waiting.get(each.id) is each]
            heapq.heapify(self.heap)
        if len(self.limits) > 2 * self.count + 64:
            self.limits = deque(each for each in self.limits if _is_waiting(each, waiting))

    def _overdue(self, count: int, waiting: Mapping[str, QueueEntry[T]], now_ns: int) -> list[QueueEntry[T]]:
        limits = self.limits
        while limits and not _is_waiting(limits[0], waiting):
            limits.popleft()
        overdue: list[QueueEntry[T]] = []
        for limit in limits:
            if len(overdue) == count or self.had <= max(limit.overdue, limit.came + self.held):
                break
            if _is_waiting(limit, waiting):
                entry = waiting[limit.id]
                if now_ns - entry.arrived_ns < OVERDUE_NS:
                    break
                overdue.append(entry)
        return overdue


class ClassQueue(Generic[T]):
    """The requests of one class in one lane.

    Attributes:
        turns: arrivals, oldest first: one per request.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.turns: list[int] = []
        self._weights = weights
        self._tenants: dict[str, _Tenant[T]] = {}
        self._reached = 0.0  # what the tenant taken last had passed before
        self._gone: dict[str, float] = {}  # what tenants without held requests had passed, if that is further

    def push(self, entry: QueueEntry[T]) -> None:
        insort(self.turns, entry.arrived_ns)
        tenant = self._tenants.get(entry.tenant)
        if tenant is None:
            passed = max(self._gone.pop(entry.tenant, 0.0), self._reached)
            tenant = self._tenants[entry.tenant] = _Tenant(passed)
        tenant.push(entry)

    def moved(self, entry: QueueEntry[T], waiting: Mapping[str, QueueEntry[T]]) -> None:
        """The due time of an entry changed."""
        tenant = self._tenants[entry.tenant]
        heapq.heappush(tenant.heap, entry)
        tenant.compact(waiting)

    def first(self, count: int, waiting: Mapping[str, QueueEntry[T]], now_ns: int) -> tuple[list[QueueEntry[T]], bool]:
        """The requests to try next, and whether only the first of them."""
        by_share = sorted(self._tenants, key=lambda name: (self._tenants[name].passed, name))
        each = max(1, count // max(1, len(by_share)))
        first_entries: list[QueueEntry[T]] = []
        for name in by_share[:count]:
            entries, alone = self._tenants[name].first(each, waiting, now_ns)
            if alone and not first_entries:
                return entries, True
            first_entries += entries
        return first_entries, False

    def take(self, entry: QueueEntry[T], waiting: Mapping[str, QueueEntry[T]]) -> None:
        """A request was taken: it uses up the oldest turn, and counts for its tenant."""
        del self.turns[0]
        tenant = self._tenants[entry.tenant]
        self._reached = max(self._reached, tenant.passed)
        tenant.had += entry.size
        tenant.passed += entry.size / self._weights.get(entry.tenant, 1.0)
        self._drop(entry, tenant, waiting)

    def remove(self, entry: QueueEntry[T], waiting: Mapping[str, QueueEntry[T]]) -> None:
        """A request left without being taken: its own turn goes or, if that is used up, the next one."""
        del self.turns[min(bisect_left(self.turns, entry.arrived_ns), len(self.turns) - 1)]
        self._drop(entry, self._tenants[entry.tenant], waiting)

    def _drop(self, entry: QueueEntry[T], tenant: _Tenant[T], waiting: Mapping[str, QueueEntry[T]]) -> None:
        tenant.count -= 1
        tenant.held -= entry.size
        if tenant.count:
            tenant.compact(waiting)
            return
        del self._tenants[entry.tenant]
        self._gone[entry.tenant] = tenant.passed
        if len(self._gone) > 2 * len(self._tenants) + 64:
            self._gone = {name: passed for name, passed in self._gone.items() if passed > self._reached}


def _is_waiting(limit: _Limit, waiting: Mapping[str, QueueEntry[T]]) -> bool:
    entry = waiting.get(limit.id)
    return entry is not None and entry.order == limit.entry_order


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
