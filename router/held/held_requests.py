"""The requests that a router holds until a worker has capacity, and in which order they are tried. No clock, no NATS.

1. Classes take turns: each request brings its class one turn, dated at its arrival, and the oldest turn is next, where
   a lower class has a handicap. A request that is taken uses up its class' oldest turn, whatever its deadline.
2. In a class the tenant is next that has had least work for its weight (``class_queue``); weights are 1 by default.
3. A tenant's requests are in the order of their due times: the arrival, plus ``DELAY_NS`` for each prompt token that no
   target caches, at most ``PATIENCE_NS``; or ``URGENT_NS`` before the deadline if that comes first.
4. A request that has waited a second, and for twice the work that was held in front of it when it arrived and as much
   as is held now, goes first, however long its prompt; the longer it has waited, the more, up to twelve times after 30
   seconds. After 16 times the former and twice the latter it is tried alone, until there is room for it.
5. The requests of a lane wait for the same workers. The first ``WINDOW`` of a lane are tried in this order, since a
   shorter prompt may fit where a longer one does not; lanes do not wait for each other.

A prompt's cached blocks are looked up when it is held and again every second. Trying a request costs a full decision,
so where one pool of aggregated workers serves a lane, the requests that have a target are found first.

What is held is bounded in bytes, by class and by model: beyond that, requests wait in the log, first come, first
served. So that the order holds for many, only half of the bytes are for what clients wrote. Beyond it, prompts are left
in the log too, and read again when their request is placed.
"""

import heapq
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.infra.process.class_queue import ClassQueue, QueueEntry
from penstock.router.placement.cost import FEW, HeldRequest, aggregated_pool, are_many, is_ready
from penstock.router.placement.pending import PendingRequest, lane, routing_request, trimmed
from penstock.router.placement.routing import RoutingRequest
from penstock.router.state.holders import TargetId, keys_view
from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas.fleet import Registration
from penstock.schemas.requests import Priority
from penstock.schemas.routers import HeldByModel, HeldByTenant, held_by_model, held_by_tenant
from penstock.schemas.streams import ROUTER_ACK_WAIT_S

if TYPE_CHECKING:
    from penstock.router.placement.arrays import ArrayDecisions

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

    def window(self, lane: str = "", size: int = WINDOW, now_ns: int = 0, wanted: int = WINDOW) -> list[QueueEntry[T]]:
        """The requests of a lane to try, in order: those of the class whose turn is next, then of the other classes.

        Args:
            now_ns: 0: unknown, nothing is overdue.
            wanted: how many of them are returned; each costs a few microseconds.
        """
        classes = self._lanes.get(lane, {})
        ordered: list[QueueEntry[T]] = []
        for _, rank in sorted(_turn(rank, each) for rank, each in classes.items()):
            if len(ordered) >= min(size, wanted):
                break
            left = size - len(ordered)
            entries, alone = classes[rank].first(left, self._waiting, now_ns, min(left, wanted - len(ordered)))
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


Overlaps = Callable[[Sequence[int]], Mapping[TargetId, int]]

REFRESH_NS = SECOND_NS
REFRESH_EACH_NS = 1_000_000  # per held request, if that is longer: lookups take a few percent of the time
REFRESHED = 64  # looked up again at once, at most
TRIED = 8  # requests of a lane for which ``candidates`` cannot compute targets in advance
# Of a window, at once: where a target has room, one of the first requests mostly fits. For one, a loop takes 12 µs with
# two targets and 20 with four; arrays take 40 with any, 60 for four requests and 230 for 28, or 15 if none fits.
PARTS = (1, 4, WINDOW)
TARGET_BYTES = 100  # of a held request, for each target that caches some of it
PREFIX_BYTES = 100  # for each length of its prompt that ``HeldPrefixes`` keeps


class Held(Generic[T]):
    """A held request, with the cached blocks of its prompt by target, as of the last lookup.

    Attributes:
        bytes: that it takes, about; ``HeldOrder.push`` sets what it adds.
        leading: blocks of its prompt that active requests of a target had when that was looked up last, at most.
        queued: whether it came with a message, as all do but later attempts.
    """

    __slots__ = ("bytes", "cached", "item", "keys", "leading", "looked_ns", "queued", "request")

    def __init__(self, item: T, request: RoutingRequest, keys: Sequence[int]) -> None:
        self.item = item
        self.request = request
        self.keys = keys
        self.cached: Mapping[TargetId, int] = {}
        self.leading = 0
        self.looked_ns = 0
        self.bytes = 0
        self.queued = False


PREFIX_LENGTHS = (1, 2, 3, *(step << octave for octave in range(16) for step in (4, 5, 6, 7)))  # in blocks


class HeldPrefixes:
    """Prefixes of the prompts of held requests, at ``PREFIX_LENGTHS``: lengths are exact to a quarter."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # by the key of the last block

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, keys: Sequence[int]) -> int:
        """Returns how many lengths of the prompt are kept."""
        lasts = _ends_of_prefixes(keys)
        for key in lasts:
            self._counts[key] = self._counts.get(key, 0) + 1
        return len(lasts)

    def remove(self, keys: Sequence[int]) -> None:
        for key in _ends_of_prefixes(keys):
            left = self._counts[key] - 1
            if left:
                self._counts[key] = left
            else:
                del self._counts[key]

    def blocks(self, keys: Sequence[int]) -> int:
        """Leading blocks of a prompt with which a held one begins, too."""
        common = 0
        for length in PREFIX_LENGTHS:
            if length > len(keys) or keys[length - 1] not in self._counts:
                break
            common = length
        return common


def _ends_of_prefixes(keys: Sequence[int]) -> list[int]:
    return [keys[length - 1] for length in PREFIX_LENGTHS[: bisect_right(PREFIX_LENGTHS, len(keys))]]


class HeldOrder(Generic[T]):
    """
    Attributes:
        queue: to look at. ``take``, ``remove`` and ``expired`` change it.

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
        self._prefixes: HeldPrefixes | None = None  # from the first time on that ``uncomputed`` is asked

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
        entered = self.queue.push(
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
        if entered:
            held.bytes = TARGET_BYTES * len(held.cached)
            if self._prefixes is not None:
                held.bytes += PREFIX_BYTES * self._prefixes.add(held.keys)
        return entered

    def take(self, id: str) -> QueueEntry[Held[T]]:
        """As ``RequestQueue.take``."""
        return self._left(self.queue.take(id))

    def remove(self, id: str) -> QueueEntry[Held[T]] | None:
        """As ``RequestQueue.remove``."""
        entry = self.queue.remove(id)
        return None if entry is None else self._left(entry)

    def expired(self, now_ns: int) -> list[QueueEntry[Held[T]]]:
        """As ``RequestQueue.expired``."""
        return [self._left(entry) for entry in self.queue.expired(now_ns)]

    def _left(self, entry: QueueEntry[Held[T]]) -> QueueEntry[Held[T]]:
        if self._prefixes is not None:
            self._prefixes.remove(entry.item.keys)
        return entry

    def uncomputed(self, request: RoutingRequest, keys: Sequence[int]) -> int:
        """Prompt tokens of a request that would be held: what no target caches or computes, and no held one has."""
        tokens = request.prompt_tokens + request.resumed_tokens
        if not self._by_size or not len(keys):
            return tokens
        if self._prefixes is None:
            self._prefixes = HeldPrefixes()
            for entry in self.queue:
                self._prefixes.add(entry.item.keys)
        return tokens - self._size(request) * max(
            self._present(self._overlaps(keys), keys), self._prefixes.blocks(keys)
        )

    def refresh(self, now_ns: int) -> None:
        """Repeat the lookups that are a second old, or older where very many requests are held."""
        age_ns = max(REFRESH_NS, REFRESH_EACH_NS * len(self.queue))
        for _ in range(REFRESHED):
            if not self._looked or now_ns - self._looked[0][0] < age_ns:
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
        tried: set[str] = set()
        for wanted in PARTS:
            window = self.queue.window(lane, now_ns=now_ns, wanted=wanted)
            if not window:
                return
            serving = aggregated_pool(self._tracker, window[0].item.request)
            if not serving:
                yield from self.queue.window(lane, now_ns=now_ns, wanted=TRIED)
                return
            part = [entry for entry in window if entry.id not in tried]
            tried.update(entry.id for entry in part)
            yield from self._ready(part, serving, now_ns)
            if len(window) < wanted:
                return

    def _look(self, id: str, held: Held[T], now_ns: int) -> int:
        """Look up the cached blocks of a prompt. Returns the number of tokens that no target has."""
        held.looked_ns = now_ns
        tokens = held.request.prompt_tokens + held.request.resumed_tokens
        if not self._by_size:
            return tokens
        held.cached = self._overlaps(held.keys)
        self._looked.append((now_ns, id))
        return tokens - self._size(held.request) * self._present(held.cached, held.keys)

    def _present(self, cached: Mapping[TargetId, int], keys: Sequence[int]) -> int:
        """Leading blocks of a prompt that a target caches or is about to compute."""
        leading = self._tracker.loads.prefixes(keys)
        return max(max(cached.values(), default=0), max(leading.values(), default=0))

    def _size(self, request: RoutingRequest) -> int:
        return self._tracker.block_size(request.model)

    def _ready(
        self, part: Sequence[QueueEntry[Held[T]]], serving: Sequence[Registration], now_ns: int
    ) -> Iterator[QueueEntry[Held[T]]]:
        """The requests that have a target with room and need not wait for a better one."""
        if self._arrays is not None and len(part) > 1:
            # In overload most have none, and to look at all of them takes several times as long as to leave those out.
            pool, room = self._arrays.room_of(part[0].item.request, now_ns)
            part = [each for each in part if pool.may_fit(each.item.request, self._leading(each.item), room)]
        if not part:
            return
        if self._arrays is not None and (are_many(serving) or len(part) > FEW):
            requests = [self._held_request(entry, now_ns) for entry in part]
            for at in self._arrays.ready(requests, now_ns):
                yield part[at]
            return
        targets = self._tracker.targets(now_ns, part[0].item.request.model)
        for entry in part:
            if is_ready(self._held_request(entry, now_ns), targets):
                yield entry

    def _leading(self, held: Held[T]) -> int:
        """At most this many leading blocks of a prompt belong to active requests of a target."""
        if not self._tracker.loads.shares_at_most(held.keys, held.leading):
            held.leading = max(self._tracker.loads.prefixes(held.keys).numbers, default=0)
        return held.leading

    def _held_request(self, entry: QueueEntry[Held[T]], now_ns: int) -> HeldRequest:
        held = entry.item
        leading = self._tracker.loads.prefixes(held.keys)
        return HeldRequest(held.request, held.cached, leading, (now_ns - entry.arrived_ns) / SECOND_NS)


CLAIM_S = ROUTER_ACK_WAIT_S / 2  # between two extensions of a held message's ack_wait
PASSED_ON = 2  # times the space: what other routers pass on comes on top
HELD_BYTES = 4096  # of a held request; besides come its prompt, the names of its blocks, and what targets cache of it
READ_AHEAD = 512  # requests that are read from the log at once, with their prompts


class HeldRequests:
    """
    Args:
        max_bytes: of the requests held per class; half of it for requests as they were stored. Models without a worker
            may take a quarter of it together, each other model half, so that one model's requests leave space for those
            of others.
        local_prefill_tokens: longer prompts may need a prefill worker, and wait in a lane of their own.
        order: in which they are tried.
        bounds: of tenants' requests that wait, of those that have one. They may change.
    """

    def __init__(
        self,
        max_bytes: int,
        local_prefill_tokens: int,
        order: HeldOrder[PendingRequest],
        bounds: Mapping[str, int] | None = None,
    ) -> None:
        self._bounds: Mapping[str, int] = {} if bounds is None else bounds
        self._max_bytes = max_bytes
        self._local_prefill_tokens = local_prefill_tokens
        self._order = order
        self._queue = order.queue
        self._held = dict.fromkeys(Priority, 0)
        self._bytes = dict.fromkeys(Priority, 0)
        self._raw_bytes = dict.fromkeys(Priority, 0)  # of these, of requests as they were stored
        self._shares: Counter[tuple[Priority, str]] = Counter()  # bytes
        self._tenants: dict[Priority, Counter[str]] = {priority: Counter() for priority in Priority}
        self._models: Counter[str] = Counter()  # of requests with a message
        self._claims: deque[tuple[int, PendingRequest]] = deque()  # when each was claimed, oldest first; some have left
        self._deferred: dict[str, str] = {}  # request -> reply, of requests that the broker will deliver again

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._queue

    def __iter__(self) -> Iterator[PendingRequest]:
        return (entry.item.item for entry in self._queue)

    def space(self, priority: Priority) -> int:
        """Further requests of a class that may be read from the log now."""
        held, left = self._held[priority], self._max_bytes - self._bytes[priority]
        each = self._bytes[priority] / held if held else HELD_BYTES
        return max(0 if held else 1, min(READ_AHEAD, int(left / each)))

    def by_tenant(self) -> tuple[HeldByTenant, ...]:
        """How many requests are held, by class and tenant."""
        return tuple(
            held_by_tenant(priority.value, counts, bounds=self._bounds)
            for priority, counts in self._tenants.items()
            if counts
        )

    def by_model(self) -> HeldByModel:
        """How many requests of the log are held, by model. Later attempts were placed before."""
        return held_by_model(self._models)

    def hold(self, pending: PendingRequest, serving: int, registered: int, now_ns: int = 0) -> bool:
        """Hold a request; False: its model has its share of the space, or others passed on more than there is space
        for, and its message must be delivered again later.

        A later attempt, which has no message, is always held, with its prompt.

        Args:
            serving: number of workers that serve its model.
            registered: number of all workers.
        """
        request = pending.request
        priority = request.priority
        full = self._bytes[priority] >= PASSED_ON * self._max_bytes
        left = pending.reply and self._raw_bytes[priority] + len(pending.raw) > self._max_bytes // 2
        size = HELD_BYTES + len(request.digests) + (0 if left else len(pending.raw))
        if pending.reply and (full or (serving != registered and self._share_is_full(pending, serving, size))):
            self._deferred[request.id] = pending.reply
            return False
        pending.request = request = trimmed(request)
        if left:
            pending.raw = b""
        keys = () if pending.computes_whole_prompt else keys_view(request.digests)
        held = Held(pending, routing_request(pending, keys, avoid=frozenset(), revision=None), keys)
        entered = self._order.push(
            request.id,
            held,
            rank=request.priority.rank,
            arrived_ns=request.created_ns,
            deadline_ns=request.deadline_ns,
            now_ns=now_ns,
            lane=self._lane(pending),
            tenant=request.tenant,
        )
        if entered:
            held.bytes += size
            held.queued = bool(pending.reply)
            self._count(held, 1)
            if pending.reply and not pending.claimed_ns:
                pending.claimed_ns = now_ns
                self._claims.append((now_ns, pending))
        return True

    def delivered_again(self, request_id: str, reply: str) -> bool:
        """Whether a request is held. Its latest delivery counts: the broker ignores rejections of earlier ones."""
        entry = self._queue.get(request_id)
        if entry is not None and entry.item.item.reply:
            entry.item.item.reply = reply
        return entry is not None

    def claims(self, now_ns: int) -> Iterator[str]:
        """Where to extend the ack_wait of held messages that came, or were claimed, ``CLAIM_S`` ago: claimed now."""
        while self._claims and now_ns - self._claims[0][0] >= CLAIM_S * SECOND_NS:
            _, pending = self._claims.popleft()
            entry = self._queue.get(pending.request.id)
            if entry is None or entry.item.item is not pending or not pending.reply:
                pending.claimed_ns = 0
                continue
            pending.claimed_ns = now_ns
            self._claims.append((now_ns, pending))
            yield pending.reply

    def remove(self, request_id: str) -> PendingRequest | None:
        return self._removed(self._order.remove(request_id))

    def expired(self, now_ns: int) -> list[PendingRequest]:
        """Remove and return the requests whose deadline has passed."""
        requests = [self._removed(entry) for entry in self._order.expired(now_ns)]
        return [pending for pending in requests if pending is not None]

    def heads(self) -> list[tuple[int, str]]:
        """The turn and the name of every lane."""
        lanes = self._queue.lanes
        return [(turn, name) for name in lanes if (turn := self._queue.turn(name)) is not None]

    def turn(self, lane_name: str) -> int | None:
        return self._queue.turn(lane_name)

    def is_waiting(self, pending: PendingRequest) -> bool:
        """Whether requests are held that wait for the same workers as ``pending``."""
        return len(self._queue) > 0 and self._queue.turn(self._lane(pending)) is not None

    def uncomputed(self, pending: PendingRequest) -> int:
        """As ``HeldOrder.uncomputed``."""
        keys = () if pending.computes_whole_prompt else keys_view(pending.request.digests)
        return self._order.uncomputed(routing_request(pending, keys, avoid=frozenset(), revision=None), keys)

    def candidates(self, lane_name: str, now_ns: int) -> Iterator[PendingRequest]:
        """The requests of a lane to decide on, next first; after one was placed, ask again."""
        self._order.refresh(now_ns)
        return (entry.item.item for entry in self._order.candidates(lane_name, now_ns))

    def take(self, request_id: str) -> PendingRequest | None:
        """Remove and return a held request to place it."""
        return self._removed(self._order.take(request_id) if request_id in self._queue else None)

    def unacknowledged(self, *, reading: bool) -> Iterator[tuple[str, str]]:
        """(request, reply) of the requests deferred since the last call, and of held ones.

        Nothing held is looked at before the result is read, which is rare, and takes 0.1 s where 100,000 are held.

        Held requests are left out where this router reads no more of their class: a copy would be stored after
        requests that no router has read.

        Args:
            reading: whether this router reads requests at all.
        """
        deferred, self._deferred = self._deferred, {}
        return self._unacknowledged(deferred, reading)

    def _unacknowledged(self, deferred: dict[str, str], reading: bool) -> Iterator[tuple[str, str]]:
        held = {
            pending.request.id: pending.reply
            for pending in self
            if reading and pending.reply and self.space(pending.request.priority)
        }
        yield from (deferred | held).items()

    def release(self, request_id: str, reply: str) -> None:
        """Remove a request if it is held with this message; a copy of it was published."""
        entry = self._queue.get(request_id)
        if entry is not None and entry.item.item.reply == reply:
            self.remove(request_id)

    def _share_is_full(self, pending: PendingRequest, serving: int, size: int) -> bool:
        pending.share = pending.request.model if serving else ""
        limit = self._max_bytes // (2 if serving else 4)
        used = self._shares[pending.request.priority, pending.share]
        return used > 0 and used + size > limit

    def _count(self, held: Held[PendingRequest], sign: int) -> None:
        """Count a request that enters (1) or leaves (-1). Meanwhile ``raw`` stays."""
        pending = held.item
        priority = pending.request.priority
        self._held[priority] += sign
        self._bytes[priority] += sign * held.bytes
        self._raw_bytes[priority] += sign * len(pending.raw)
        self._shares[priority, pending.share] += sign * held.bytes
        _add(self._tenants[priority], pending.request.tenant, sign)
        if held.queued:
            _add(self._models, pending.request.model, sign)

    def _lane(self, pending: PendingRequest) -> str:
        return lane(pending, self._local_prefill_tokens)

    def _removed(self, entry: QueueEntry[Held[PendingRequest]] | None) -> PendingRequest | None:
        if entry is None:
            return None
        self._count(entry.item, -1)
        return entry.item.item


def _add(counts: Counter[str], name: str, more: int) -> None:
    """Names without any are left out."""
    counts[name] += more
    if not counts[name]:
        del counts[name]
