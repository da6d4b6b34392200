"""The order of waiting requests: tenants by their shares, a tenant's by due time. No clock, no tasks.

A router orders with it what it holds of a class, a worker what waits for a place in its engine.

Work is counted in prompt tokens to compute, when a request is pushed. A tenant has had the work of what was taken of
it, divided by its weight; the one that has had least is next. So the shares of tenants that always have something
waiting converge to their weights. A tenant that returns from having nothing waiting begins with at least what the one
that was next last had had: it has saved nothing up (start-time fair queuing). That beginning moves on by itself, too,
with a part of all work (``AGEING``). Without that, tenants that come once each, however many, could overtake one
that waits for ever.

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
from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

# Lower values shorten the longest waits of overload and lengthen the mean.
OVERDUE_AFTER = 12.0  # times the work that was held in front of a request, and once what is held now
ALONE_AFTER = 16.0  # times that work, and twice what is held, from which on nothing else is tried
# Of a tenant's share of all work. With 1, tenants that ask seldom wait 5 to 10 % longer beside one that asks much.
AGEING = 1 / 16
# Tokens by which a tenant may be ahead at a worker: what one step computes. Routers have chosen the order. With 0 it is
# turned over for less than a step, and half of all requests wait up to 11 % longer where they wait for seconds
# (``penstock bench router --workload tenants --load 2``).
QUANTUM = 8192
LEAST = 1024  # tokens that a request counts as there, at least: it takes one of the places of those that run, too
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


class TenantShares:
    """What tenants have had, by weight; those that have something waiting in the order of their turns.

    Args:
        weights: above 0; 1 unless given. They may change.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._numbers = count()
        self._present: dict[str, tuple[float, int]] = {}  # what each has had by weight, and its place among equals
        self._order: list[tuple[float, int, str]] = []
        self._counted: dict[str, float] = {}  # the weights that make up ``_total``
        self._total = 0.0
        self._reached = 0.0  # where a tenant begins
        self._gone: dict[str, float] = {}  # what tenants that are not present have had, if that is further

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[str]:
        """Those present, the next one first."""
        return (name for _, _, name in self._order)

    def within(self, quantum: float) -> Iterator[str]:
        """Those present that are ahead of the next one by at most so much work."""
        least = self._order[0][0]
        for had, _, name in self._order:
            if (had - least) * self._counted[name] <= quantum:
                yield name

    def enter(self, name: str) -> None:
        """A tenant has something waiting again."""
        self._count(name)
        self._insert(name, max(self._gone.pop(name, 0.0), self._reached))

    def charge(self, name: str, work: float) -> None:
        """Work of a tenant that is present was taken."""
        had = self._remove(name)
        weight = self._count(name)
        self._reached = max(self._reached + AGEING * work / self._total, had)
        self._insert(name, had + work / weight)

    def leave(self, name: str) -> None:
        """A tenant has nothing waiting any more."""
        self._gone[name] = self._remove(name)
        del self._present[name]
        self._total -= self._counted.pop(name)
        if not self._present:
            self._total = 0.0
        if len(self._gone) > 2 * len(self._present) + 64:
            self._gone = {name: had for name, had in self._gone.items() if had > self._reached}

    def _count(self, name: str) -> float:
        weight = self._weights.get(name, 1.0)
        self._total += weight - self._counted.get(name, 0.0)
        self._counted[name] = weight
        return weight

    def _insert(self, name: str, had: float) -> None:
        place = self._present[name] = had, next(self._numbers)
        insort(self._order, (*place, name))

    def _remove(self, name: str) -> float:
        had, number = self._present[name]
        del self._order[bisect_left(self._order, (had, number, name))]
        return had


class _Tenant(Generic[T]):
    """The requests of one tenant."""

    __slots__ = ("count", "had", "heap", "held", "limits")

    def __init__(self) -> None:
        self.heap: list[QueueEntry[T]] = []  # by due time; removed entries stay until they reach the top
        # By request, oldest first. The first key of a dict is found behind all that were deleted before it.
        self.limits: OrderedDict[str, _Limit] = OrderedDict()
        self.count = 0
        self.held = 0.0  # work
        self.had = 0.0

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
        self._tenants: dict[str, _Tenant[T]] = {}
        self._shares = TenantShares(weights)

    def push(self, entry: QueueEntry[T]) -> None:
        insort(self.turns, entry.arrived_ns)
        tenant = self._tenants.get(entry.tenant)
        if tenant is None:
            tenant = self._tenants[entry.tenant] = _Tenant()
            self._shares.enter(entry.tenant)
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
        each = max(1, count // max(1, len(self._shares)))
        first_entries: list[QueueEntry[T]] = []
        for name in islice(self._shares, count):
            left = wanted - len(first_entries)
            if left <= 0:
                break
            entries, alone = self._tenants[name].first(min(each, left), waiting, now_ns)
            if alone and not first_entries:
                return entries, True
            first_entries += entries
        return first_entries, False

    def oldest(self, waiting: Mapping[str, QueueEntry[T]], quantum: float) -> QueueEntry[T]:
        """Of the tenants that are ahead by at most so much work, the request that came first."""
        heads = (self._tenants[name].first(1, waiting, 0)[0][0] for name in self._shares.within(quantum))
        return min(heads, key=lambda entry: entry.order)

    def take(self, entry: QueueEntry[T], waiting: Mapping[str, QueueEntry[T]]) -> None:
        """A request was taken: it uses up the oldest turn, and counts for its tenant."""
        self.turns.popleft()
        tenant = self._tenants[entry.tenant]
        tenant.had += entry.size
        self._shares.charge(entry.tenant, entry.size)
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
        self._shares.leave(entry.tenant)


class StartShare(NamedTuple):
    """Whose share of a worker's queue a request takes.

    Attributes:
        rank: of its class (``Priority.rank``).
        weight: of its tenant.
    """

    rank: int = 0
    tenant: str = ""
    weight: float = 1.0


class StartQueue(Generic[T]):
    """What waits at a worker, where classes keep their turns: each arrival is one of its class, and the oldest is next.

    Routers have weighed classes against each other before. A class' turn takes the request that came first, as routers
    chose, unless its tenant is ahead of another's share by more than ``QUANTUM``.
    """

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}  # the latest that came with a request
        self._classes: dict[int, ClassQueue[T]] = {}  # by rank; none is empty
        self._waiting: dict[str, QueueEntry[T]] = {}
        self._ids: dict[object, str] = {}
        self._number = 0
        self._head: T | None = None  # None: unknown, or nothing waits

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, key: object, item: T, share: StartShare, size: float) -> None:
        """
        Args:
            share: its weight is the tenant's from now on.
            size: work that it counts as, if that is more than ``LEAST``.
        """
        self._head = None
        self._number += 1
        rank, tenant, weight = share
        at, id = self._number, str(self._number)
        if weight != self._weights.get(tenant, 1.0):
            self._weights[tenant] = weight
        entry = QueueEntry(at, at, id, at, at, "", rank, item, tenant, max(LEAST, size))
        self._waiting[id], self._ids[key] = entry, id
        if rank not in self._classes:
            self._classes[rank] = ClassQueue(self._weights)
        self._classes[rank].push(entry)

    def first(self) -> T | None:
        """Whose turn it is; None: nothing waits."""
        if self._head is None and self._classes:
            following = min(self._classes.values(), key=lambda each: each.turns[0])
            self._head = following.oldest(self._waiting, QUANTUM).item
        return self._head

    def take(self, key: object) -> None:
        """It starts, and counts for its tenant."""
        entry = self._pop(key)
        self._classes[entry.rank].take(entry, self._waiting)
        self._delete_empty(entry.rank)

    def remove(self, key: object) -> None:
        """It no longer waits."""
        entry = self._pop(key)
        self._classes[entry.rank].remove(entry, self._waiting)
        self._delete_empty(entry.rank)

    def _pop(self, key: object) -> QueueEntry[T]:
        self._head = None
        return self._waiting.pop(self._ids.pop(key))

    def _delete_empty(self, rank: int) -> None:
        if not self._classes[rank].turns:
            del self._classes[rank]
            if not self._classes:
                self._weights.clear()
