"""The router's own policy behind a simulated fleet: the code that a live router runs, unchanged.

One router without log, clock or tasks: the cores that a router decides with, driven by calls.

Everything that happens is a call, with its time as an argument; decisions are return values. The same calls in the
same order give the same decisions:

    join, leave      a worker registered, changed or left; each of its ranks is a target
    arrive           a request arrived: a ``PlacedArrival``, or None: it is held
    stored           KV events: a target holds further blocks. Call it after the index has folded them. A prompt counts
                     as computed when its last full block is stored, so the first token needs no message of its own
    moved            the prefill stage of a pair ended: the request leaves its prefill target
    ended            a request ended
    pump             after any of these: the held requests that are placed now, next first
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import msgspec

from penstock.configs.settings import RouterMode
from penstock.measure.simulation.cache import LowerChanges, StoredRun
from penstock.measure.simulation.policy import Placement, SimulatedFleet, Target, WorkerSpec
from penstock.measure.simulation.trace import Request
from penstock.router.held.held_requests import Held, HeldOrder, Overlaps
from penstock.router.placement import decide
from penstock.router.placement.decision_inputs import Decisions, SessionId, array_decisions
from penstock.router.placement.routing import RoutingDecision, RoutingRequest, Weights
from penstock.router.state.holders import Holders, Holding, TargetId, TierDepths
from penstock.router.state.load_tracker import LoadTracker
from penstock.router.state.prefix_index import ApproximateIndex
from penstock.router.state.target_loads import ENCODE, ExpectedLoad, RoutingTarget
from penstock.schemas.fleet import Registration, WorkerState
from penstock.schemas.jobs import LoadHeader
from penstock.schemas.transfer import Endpoint, Memory


class Arrival(NamedTuple):
    """A request to be placed.

    Attributes:
        keys: of the full blocks of its prompt.
        rank: of its priority class; 0 is served first.
        seed: breaks ties.
        session: its name; "": none.
        model: "": that of the first worker.
    """

    id: str
    keys: Sequence[int]
    prompt_tokens: int
    arrived_ns: int
    deadline_ns: int = 1 << 62
    sequences: int = 1
    rank: int = 0
    seed: int = 0
    model: str = ""
    max_tokens: int = 1
    tenant: str = ""
    session: str = ""

    @property
    def session_id(self) -> SessionId:
        return SessionId(self.tenant, self.model, "", self.session)


class PlacedArrival(NamedTuple):
    """A decision: ``arrival`` goes to ``target``, and from there to ``decode`` unless that is None."""

    arrival: Arrival
    target: TargetId
    decision: RoutingDecision
    decode: TargetId | None = None


class SimulatedRouter:
    """
    Args:
        overlaps: leading blocks of a prompt that each target caches (``PrefixIndex.match``); absent: none.
        kv_events: False: ``stored`` is not called, so the backlog of prompts is estimated.
    """

    def __init__(
        self,
        overlaps: Overlaps,
        *,
        mode: RouterMode = "kv",
        weights: Weights = Weights(),  # noqa: B008  # frozen
        kv_events: bool = True,
    ) -> None:
        self.tracker = LoadTracker(kv_events=kv_events)
        self._overlaps = overlaps
        arrays = array_decisions(self.tracker)
        self._decisions = Decisions(self.tracker, arrays, mode, weights)
        self._order: HeldOrder[Arrival] = HeldOrder(self.tracker, arrays, overlaps, by_size=mode == "kv")
        self._number = 0
        self._changed = False  # since the last ``pump`` that placed nothing

    def __len__(self) -> int:
        """Number of held requests."""
        return len(self._order.queue)

    def join(self, registration: Registration) -> None:
        """A worker registered, or its registration changed."""
        self.tracker.put_worker(registration)
        self._changed = True

    def leave(self, worker: str) -> list[str]:
        """A worker left. Returns the requests that were placed there: they have to arrive again."""
        lost = self.tracker.remove_worker(worker)
        for entry in lost:
            self.tracker.release(entry.request, entry.attempt)
        self._changed = True
        return [entry.request for entry in lost]

    def arrive(self, arrival: Arrival, now_ns: int) -> PlacedArrival | None:
        """Place a request at once, if none is held and a target has room, and no better one will; hold it otherwise."""
        request = self._request(arrival)
        if not len(self):
            decision = self._decide(arrival, request, self._overlaps(arrival.keys), now_ns, 0.0)
            if decision.route:
                return self._place(arrival, decision, now_ns)
        held = Held(arrival, request, arrival.keys)
        self._order.push(
            arrival.id,
            held,
            rank=arrival.rank,
            arrived_ns=arrival.arrived_ns,
            deadline_ns=arrival.deadline_ns,
            now_ns=now_ns,
            tenant=arrival.tenant,
        )
        self._changed = True
        return None

    def stored(self, target: TargetId, keys: Sequence[int], now_ns: int = 0) -> None:
        """KV events: ``target`` now holds these blocks; ``now_ns`` 0: unknown, no costs are learnt."""
        if self.tracker.stored(target, keys, now_ns):
            self._changed = True

    def moved(self, request: str, now_ns: int) -> None:
        """A request left its prefill target for its decode target."""
        entry = self.tracker.request(request)
        if entry is not None and entry.later:
            load = LoadHeader(entry.prompt_tokens, entry.cached_tokens, "", 1 << 62, "", entry.n, entry.later)
            first = entry.later[0]
            self.tracker.admit(request, entry.attempt, first.worker, load, now_ns=now_ns, echoed=True, handed=True)
            self._changed = True

    def ended(self, request: str, now_ns: int = 0) -> None:
        """A request ended; unknown requests are ignored. ``now_ns`` 0: unknown, no costs are learnt."""
        if self.tracker.finish(request, now_ns) is not None:
            self._changed = True

    def pump(self, now_ns: int) -> Iterator[PlacedArrival]:
        """The held requests that have a target now. Each is placed before the next one is considered."""
        if not len(self):
            return
        self._order.refresh(now_ns)
        while self._changed:
            self._changed = False
            for entry in self._order.candidates("", now_ns):
                held = entry.item
                waited_s = (now_ns - entry.arrived_ns) / 1e9
                decision = self._decide(held.item, held.request, held.cached, now_ns, waited_s)
                if decision.route:
                    self._order.take(entry.id)
                    self._changed = True
                    yield self._place(held.item, decision, now_ns)
                    break

    def cost(self, arrival: Arrival, now_ns: int) -> float | None:
        """What a request costs where it costs least; None: it would be held. Nothing is placed."""
        if len(self):
            return None
        decision = self._decide(arrival, self._request(arrival), self._overlaps(arrival.keys), now_ns, 0.0)
        return min((each.score for each in decision.candidates if not each.excluded), default=None)

    def uncomputed(self, arrival: Arrival) -> int:
        """Prompt tokens of a request that would be held, as ``HeldOrder.uncomputed``."""
        return self._order.uncomputed(self._request(arrival), arrival.keys)

    def held(self) -> Iterator[Arrival]:
        """The held requests, in no order."""
        return (entry.item.item for entry in self._order.queue)

    def drop(self, request: str) -> None:
        """A held request goes elsewhere."""
        self._order.remove(request)
        self._changed = True

    def _request(self, arrival: Arrival) -> RoutingRequest:
        workers = self.tracker.workers()
        model = arrival.model or (workers[0].model if workers else "")
        return RoutingRequest(
            model,
            arrival.prompt_tokens,
            arrival.max_tokens,
            prompt_blocks=len(arrival.keys),
            n=arrival.sequences,
            shared_blocks=self._decisions.shared_blocks(model, arrival.keys),
        )

    def _decide(
        self, arrival: Arrival, request: RoutingRequest, cached: Mapping[TargetId, int], now_ns: int, waited_s: float
    ) -> RoutingDecision:
        self._number += 1
        if arrival.session:
            targets = self._decisions.sessions.targets(arrival.session_id, arrival.id)
            request = msgspec.structs.replace(request, session=targets)
        return self._decisions.decide(
            request, arrival.keys, cached, now_ns=now_ns, seed=arrival.seed, number=self._number, waited_s=waited_s
        )

    def _place(self, arrival: Arrival, decision: RoutingDecision, now_ns: int) -> PlacedArrival:
        route = decision.route
        first = route[0]
        size = self.tracker.block_size(arrival.model or self.tracker.workers()[0].model)
        load = LoadHeader(
            arrival.prompt_tokens, decision.present_blocks * size, "", 1 << 62, "", arrival.sequences, route
        )
        self.tracker.admit(arrival.id, 1, first.worker, load, now_ns=now_ns, keys=arrival.keys)
        if arrival.session:
            targets = [(stage.worker, stage.rank) for stage in route]
            self._decisions.sessions.sent(arrival.session_id, arrival.id, targets)
        decode = (route[-1].worker, route[-1].rank) if len(route) > 1 else None
        return PlacedArrival(arrival, (first.worker, first.rank), decision, decode)


_INDEX_BLOCKS = 1 << 26
_WAKE_NS = 250_000_000  # between two looks at held requests without an event
_MODEL = "simulated"


@dataclass(eq=False)
class PlacementPolicy:
    """
    Attributes:
        seed: breaks ties.
        kv_events: False: the router predicts what targets cache from its own decisions.
        joined: False: workers take requests only after ``join``.
        moves: over which way workers read prefixes from each other, "host" or "rdma"; "": they do not.
    """

    seed: int = 0
    weights: Weights = Weights()  # noqa: RUF009  # frozen
    _: KW_ONLY
    kv_events: bool = True
    joined: bool = True
    moves: str = ""

    def start(self, fleet: SimulatedFleet, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._index = Holders(_INDEX_BLOCKS)
        self._holdings: dict[Target, Holding] = {}
        self._blocks = [worker.blocks for worker in fleet.workers]
        self._predicted = ApproximateIndex(_INDEX_BLOCKS)
        self._lower = [Holders(_INDEX_BLOCKS) for _ in range(max(map(_tiers, fleet.workers), default=0))]
        self._below: dict[Target, list[Holding]] = {}
        overlaps = self.overlaps if self.kv_events else self._predicted.match
        self.router = SimulatedRouter(overlaps, weights=self.weights, kv_events=self.kv_events)
        self._encoders = _Encoders(fleet)
        self._now = 0
        self._fleet = fleet
        for number in range(len(fleet.workers) if self.joined else 0):
            self.join(number)

    def overlaps(self, keys: Sequence[int]) -> Mapping[TargetId, int]:
        found = self._index.match(keys)
        return TierDepths(found, [each.match(keys) for each in self._lower]) if self._lower else found

    def join(self, number: int) -> None:
        """A worker is ready."""
        for rank in range(self._fleet.workers[number].ranks):
            target = (name(number), rank)
            self._holdings[number, rank] = self._index.open(target)
            self._below[number, rank] = [each.open(target) for each in self._lower]
        self.router.join(registration(number, self._fleet, self.moves))

    def drain(self, number: int) -> None:
        """A worker takes no further request."""
        self.router.join(
            msgspec.structs.replace(registration(number, self._fleet, self.moves), state=WorkerState.draining)
        )

    def arrive(self, request: Request, now_ns: int) -> Placement | None:
        self._now = now_ns
        placed = self.router.arrive(self.arrival(request), now_ns)
        return None if placed is None else self._placement(placed, now_ns)

    def arrival(self, request: Request) -> Arrival:
        """A request as a router gets it."""
        seed = hash((self.seed, request.index)) & 0xFFFFFFFF
        return Arrival(
            str(request.index),
            request.keys,
            request.prompt_tokens,
            request.arrival_ns,
            rank=request.priority.rank,
            seed=seed,
            tenant=request.tenant,
        )

    def decode(self, request: Request, now_ns: int) -> Target:
        raise AssertionError("decode workers are chosen with the prefill worker")

    def pump(self, now_ns: int) -> Iterator[tuple[Request, Placement]]:
        self._now = now_ns
        for placed in self.router.pump(now_ns):
            yield self._requests[int(placed.arrival.id)], self._placement(placed, now_ns)

    def wake(self) -> int | None:
        return self._now + _WAKE_NS

    def events(self, target: Target, stored: Sequence[StoredRun], removed: Sequence[int], now_ns: int) -> None:
        self._now = now_ns
        if not self.kv_events:
            return
        holding = self._holdings[target]
        self._index.remove(holding, removed)
        for keys, parent in stored:
            self._index.store(holding, keys, parent)
            self.router.stored((name(target[0]), target[1]), keys, now_ns)

    def lower_events(self, target: Target, changes: Sequence[LowerChanges]) -> None:
        below = self._below[target]
        for number, holders in enumerate(self._lower if self.kv_events else ()):
            stored, removed = changes[min(number, len(changes) - 1)]
            holders.remove(below[number], removed)
            for keys, parent in stored:
                holders.store(below[number], keys, parent)

    def prefilled(self, request: Request, now_ns: int) -> None:
        self.router.moved(str(request.index), now_ns)

    def finished(self, request: Request, now_ns: int) -> None:
        self._encoders.finished(request)
        self.router.ended(str(request.index), now_ns)

    def _placement(self, placed: PlacedArrival, now_ns: int) -> Placement:
        request = self._requests[int(placed.arrival.id)]
        if not self.kv_events:
            self._predict(placed, now_ns)
        decode = None if placed.decode is None else _target(placed.decode)
        placement = Placement(_target(placed.target), decode, self._encoders.pick(request))
        move = placed.decision.route[0].move
        if move is None:
            return placement
        return placement._replace(source=_target((move.source, 0)), prefix_blocks=move.blocks)

    def _predict(self, placed: PlacedArrival, now_ns: int) -> None:
        for target in (placed.target, placed.decode):
            if target is not None:
                self._predicted.record(target, placed.arrival.keys, now_ns / 1e9, self._blocks[_target(target)[0]])


class _Encoders:
    """The encode worker of each medium, and how many requests each of them has."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._registrations = [
            Registration(name(number), _MODEL, ENCODE, "mock", 1, fleet.block_size, 0, 1, 1)
            for number in range(fleet.encoders)
        ]
        self._loads = [0] * fleet.encoders
        self._at: dict[int, int] = {}

    def pick(self, request: Request) -> int | None:
        if not request.media or not self._registrations:
            return None
        targets = [
            RoutingTarget((each.worker, 0), each, ExpectedLoad(load))
            for each, load in zip(self._registrations, self._loads, strict=True)
        ]
        chosen, _preferred = decide.pick(request.media.to_bytes(8, "little"), targets)
        number = self._at[request.index] = _target(chosen.id)[0]
        self._loads[number] += 1
        return number

    def finished(self, request: Request) -> None:
        number = self._at.pop(request.index, None)
        if number is not None:
            self._loads[number] -= 1


def name(number: int) -> str:
    return f"w{number:05}"


def _target(target_id: tuple[str, int]) -> Target:
    return int(target_id[0][1:]), target_id[1]


def registration(number: int, fleet: SimulatedFleet, moves: str = "") -> Registration:
    """What a worker of the fleet would register; ``moves`` as in ``PlacementPolicy``."""
    worker = fleet.workers[number]
    pools = {"kv": Memory(0, 1, worker.blocks, "cuda")}
    transfer = None
    if worker.role in ("prefill", "decode") or moves:
        host = "host" if moves == "host" else ""
        transfer = Endpoint(name(number), "simulated", pools=pools, host=host, rdma=True)
    return Registration(
        name(number),
        _MODEL,
        worker.role,
        "mock",
        1,
        fleet.block_size,
        worker.blocks,
        worker.max_sequences,
        1 << 20,
        dp_size=worker.ranks,
        queue=worker.max_sequences // 4,  # as workers register
        transfer=transfer,
        moves_prefixes=bool(moves),
        tier_costs=worker.tier_costs,
    )


def _tiers(worker: WorkerSpec) -> int:
    """Lower tiers of a worker, those before its last one included."""
    return 2 if worker.lower[1] else 1 if worker.lower[0] else 0
