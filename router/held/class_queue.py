"""The order of held requests within one class: tenants by their shares, a tenant's by due time. No clock, no tasks.

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

Twelve times is for an overload of minutes, in which the short ones could not be served otherwise. Where workers are
behind by seconds only, short ones gain little from a long one that waits for as many times as long: in its first
seconds a request is overdue after twice the work in front of it, and after more the longer it has waited.
"""

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

# Lower values shorten the longest waits of overload and lengthen the mean.
OVERDUE_AFTER = 12.0  # times the work that was held in front of a request, and once what is held now
ALONE_AFTER = 16.0  # times that work, and twice what is held, from which on nothing else is tried
OVERDUE_NS = 1_000_000_000  # no request is overdue before
OVERDUE_FIRST = 1 / 6  # of the multiple, at first; without it the p99 at saturation is 1.7 times as high
GROWING_NS = 30_000_000_000  # until all of the multiple counts


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

    came: float
    overdue: float
    alone: float


class _Tenant(Generic[T]):
    """The requests of one tenant."""

    __slots__ = ("count", "had", "heap", "held", "limits", "passed")

    def __init__(self, passed: float) -> None:
        self.heap: list[QueueEntry[T]] = []  # by due time; removed entries stay until they reach the top
        # By request, oldest first. The first key of a dict is found behind all that were deleted before it.
        self.limits: OrderedDict[str, _Limit] = OrderedDict()
        self.count = 0
        self.held = 0.0  # work
        self.had = 0.0
        self.passed = passed  # work by weight

    def push(self, entry: QueueEntry[T]) -> None:
        heapq.heappush(self.heap, entry)
        overdue, alone = self.had + OVERDUE_AFTER * self.held, self.had + ALONE_AFTER * self.held
        for last in reversed(self.limits.values()):
            overdue, alone = max(overdue, last.overdue), max(alone, last.alone)
            break
        self.limits[entry.id] = _Limit(self.had, overdue, alone)
        self.count += 1
        self.held += entry.size

    def first(self, count: int, waiting: Mapping[str, QueueEntry[T]], now_ns: int) -> tuple[list[QueueEntry[T]], bool]:
        """The next requests, and whether the first of them is tried alone."""
        first_entries = self._overdue(count, waiting, now_ns)
        if first_entries:
            limit = self.limits[first_entries[0].id]
            if self.had > max(limit.alone, limit.came + 2 * self.held):
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

    def _overdue(self, count: int, waiting: Mapping[str, QueueEntry[T]], now_ns: int) -> list[QueueEntry[T]]:
        overdue: list[QueueEntry[T]] = []
        for id, limit in self.limits.items():
            entry = waiting[id]
            waited_ns = now_ns - entry.arrived_ns
            share = min(1.0, max(OVERDUE_FIRST, waited_ns / GROWING_NS))
            after = max(share * (limit.overdue - limit.came), self.held)
            if len(overdue) == count or waited_ns < OVERDUE_NS or self.had <= limit.came + after:
                break
            overdue.append(entry)
        return overdue


class ClassQueue(Generic[T]):
    """The requests of one class in one lane.

    Attributes:
        turns: arrivals, oldest first: one per request.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.turns: deque[int] = deque()
        self._weights = weights
        self._tenants: dict[str, _Tenant[T]] = {}
        self._by_share: list[tuple[float, str]] = []  # what each has passed, in order
        self._reached = 0.0  # what the tenant taken last had passed before
        self._gone: dict[str, float] = {}  # what tenants without held requests had passed, if that is further

    def push(self, entry: QueueEntry[T]) -> None:
        insort(self.turns, entry.arrived_ns)
        tenant = self._tenants.get(entry.tenant)
        if tenant is None:
            passed = max(self._gone.pop(entry.tenant, 0.0), self._reached)
            tenant = self._tenants[entry.tenant] = _Tenant(passed)
            insort(self._by_share, (passed, entry.tenant))
        tenant.push(entry)

    def moved(self, entry: QueueEntry[T], waiting: Mapping[str, QueueEntry[T]]) -> None:
        """The due time of an entry changed."""
        tenant = self._tenants[entry.tenant]
        heapq.heappush(tenant.heap, entry)
        tenant.compact(waiting)

    def first(
        self, count: int, waiting: Mapping[str, QueueEntry[T]], now_ns: int, wanted: int
    ) -> tuple[list[QueueEntry[T]], bool]:
        """The requests to try next, and whether only the first of them.

        Args:
            wanted: how many of the ``count`` are returned.
        """
        each = max(1, count // max(1, len(self._by_share)))
        first_entries: list[QueueEntry[T]] = []
        for _, name in self._by_share[:count]:
            left = wanted - len(first_entries)
            if left <= 0:
                break
            entries, alone = self._tenants[name].first(min(each, left), waiting, now_ns)
            if alone and not first_entries:
                return entries, True
            first_entries += entries
        return first_entries, False

    def take(self, entry: QueueEntry[T], waiting: Mapping[str, QueueEntry[T]]) -> None:
        """A request was taken: it uses up the oldest turn, and counts for its tenant."""
        self.turns.popleft()
        tenant = self._tenants[entry.tenant]
        self._reached = max(self._reached, tenant.passed)
        tenant.had += entry.size
        self._delete_share(entry.tenant, tenant)
        tenant.passed += entry.size / self._weights.get(entry.tenant, 1.0)
        insort(self._by_share, (tenant.passed, entry.tenant))
        self._drop(entry, tenant, waiting)

    def remove(self, entry: QueueEntry[T], waiting: Mapping[str, QueueEntry[T]]) -> None:
        """A request left without being taken: its own turn goes or, if that is used up, the next one."""
        del self.turns[min(bisect_left(self.turns, entry.arrived_ns), len(self.turns) - 1)]
        self._drop(entry, self._tenants[entry.tenant], waiting)

    def _drop(self, entry: QueueEntry[T], tenant: _Tenant[T], waiting: Mapping[str, QueueEntry[T]]) -> None:
        del tenant.limits[entry.id]
        tenant.count -= 1
        tenant.held -= entry.size
        if tenant.count:
            tenant.compact(waiting)
            return
        del self._tenants[entry.tenant]
        self._delete_share(entry.tenant, tenant)
        self._gone[entry.tenant] = tenant.passed
        if len(self._gone) > 2 * len(self._tenants) + 64:
            self._gone = {name: passed for name, passed in self._gone.items() if passed > self._reached}

    def _delete_share(self, name: str, tenant: _Tenant[T]) -> None:
        del self._by_share[bisect_left(self._by_share, (tenant.passed, name))]
