"""The router's own policy behind a simulated fleet: the code that a live router runs, unchanged.

Several replicas each have every other request, hold what they cannot place, and read each other's decisions late, as
from the log. All of them fold the same KV events, so they share one index here.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from penstock.measure.simulation.cache import StoredRun
from penstock.measure.simulation.policy import Fleet, Placement, Target
from penstock.measure.simulation.simulated_router import Arrival, Placed, SimulatedRouter
from penstock.measure.simulation.trace import Request
from penstock.router.placement import encoders
from penstock.router.placement.job_message import sends_keys
from penstock.router.placement.routing import ModelPart, Weights
from penstock.router.state.approximate import ApproximateIndex
from penstock.router.state.holders import Holders, Holding
from penstock.router.state.load import ENCODE, Load, RoutingTarget
from penstock.schemas.fleet import Registration, State
from penstock.schemas.jobs import LoadHeader
from penstock.schemas.transfer import Endpoint, Memory

_INDEX_BLOCKS = 1 << 26
_WAKE_NS = 250_000_000  # between two looks at held requests without an event
_MODEL = "simulated"
DELAY_NS = 2_000_000  # from a decision until another replica has folded it; docs/routing.md has how it was measured


class PlacementPolicy:
    """
    Args:
        seed: breaks ties.
        replicas: routers that share the requests.
        delay_ns: from a decision until the other replicas have folded it.
        kv_events: False: they predict what targets cache from their own decisions.
        joined: False: workers take requests only after ``join``.
    """

    def __init__(
        self,
        seed: int = 0,
        replicas: int = 1,
        weights: Weights = Weights(),  # noqa: B008  # frozen
        *,
        kv_events: bool = True,
        joined: bool = True,
        delay_ns: int = DELAY_NS,
    ) -> None:
        self._seed = seed
        self._joined = joined
        self._kv_events = kv_events
        self._replicas = replicas
        self._delay_ns = delay_ns
        self._weights = weights

    def start(self, fleet: Fleet, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._index = Holders(_INDEX_BLOCKS)
        self._holdings: dict[Target, Holding] = {}
        self._blocks = [worker.blocks for worker in fleet.workers]
        self._predicted = [ApproximateIndex(_INDEX_BLOCKS) for _ in range(self._replicas)]
        self._routers = [
            SimulatedRouter(
                self._index.match if self._kv_events else predicted.match,
                weights=self._weights,
                kv_events=self._kv_events,
                part=ModelPart(index, self._replicas),
            )
            for index, predicted in enumerate(self._predicted)
        ]
        self._late: deque[tuple[int, SimulatedRouter, Placed]] = deque()
        self._encoders = _Encoders(fleet)
        self._now = 0
        self._fleet = fleet
        for number in range(len(fleet.workers) if self._joined else 0):
            self.join(number)

    def join(self, number: int) -> None:
        """A worker is ready."""
        for rank in range(self._fleet.workers[number].ranks):
            self._holdings[number, rank] = self._index.open((name(number), rank))
        for each in self._routers:
            each.join(registration(number, self._fleet))

    def drain(self, number: int) -> None:
        """A worker takes no further request."""
        for each in self._routers:
            each.join(msgspec.structs.replace(registration(number, self._fleet), state=State.draining))

    def arrive(self, request: Request, now_ns: int) -> Placement | None:
        self._learn(now_ns)
        router = self._routers[request.index % len(self._routers)]
        seed = hash((self._seed, request.index)) & 0xFFFFFFFF
        placed = router.arrive(
            Arrival(str(request.index), request.keys, request.prompt_tokens, now_ns, seed=seed), now_ns
        )
        return None if placed is None else self._placement(router, placed, now_ns)

    def decode(self, request: Request, now_ns: int) -> Target:
        raise AssertionError("decode workers are chosen with the prefill worker")

    def pump(self, now_ns: int) -> Iterator[tuple[Request, Placement]]:
        self._learn(now_ns)
        for router in self._routers:
            for placed in router.pump(now_ns):
                yield self._requests[int(placed.arrival.id)], self._placement(router, placed, now_ns)

    def wake(self) -> int | None:
        return self._now + _WAKE_NS

    def events(self, target: Target, stored: Sequence[StoredRun], removed: Sequence[int], now_ns: int) -> None:
        self._learn(now_ns)
        if not self._kv_events:
            return
        holding = self._holdings[target]
        self._index.remove(holding, removed)
        for keys, parent in stored:
            self._index.store(holding, keys, parent)
            for router in self._routers:
                router.stored((name(target[0]), target[1]), keys, now_ns)

    def prefilled(self, request: Request, now_ns: int) -> None:
        for router in self._routers:
            router.moved(str(request.index), now_ns)

    def finished(self, request: Request, now_ns: int) -> None:
        self._encoders.finished(request)
        for router in self._routers:
            router.ended(str(request.index), now_ns)

    def _placement(self, router: SimulatedRouter, placed: Placed, now_ns: int) -> Placement:
        if len(self._routers) > 1:
            self._late.append((now_ns + self._delay_ns, router, placed))
        request = self._requests[int(placed.arrival.id)]
        if not self._kv_events:
            self._predict(router, placed, now_ns)
        decode = None if placed.decode is None else _target(placed.decode)
        return Placement(_target(placed.target), decode, self._encoders.pick(request))

    def _predict(self, router: SimulatedRouter, placed: Placed, now_ns: int) -> None:
        predicted = self._predicted[self._routers.index(router)]
        for target in (placed.target, placed.decode):
            if target is not None:
                predicted.record(target, placed.arrival.keys, now_ns / 1e9, self._blocks[_target(target)[0]])

    def _learn(self, now_ns: int) -> None:
        """Let the replicas read decisions that the others made some time ago."""
        self._now = now_ns
        while self._late and self._late[0][0] <= now_ns:
            _, router, (arrival, target, decision, _decode) = self._late.popleft()
            overlap = decision.overlap_blocks * router.tracker.block_size(_MODEL)
            load = LoadHeader(
                arrival.prompt_tokens, overlap, "", arrival.deadline_ns, "", arrival.sequences, decision.route
            )
            for other in self._routers:
                if other is not router:
                    keys = arrival.keys if sends_keys(load, len(arrival.keys)) else ()
                    other.tracker.admit(arrival.id, 1, target[0], load, now_ns=now_ns, keys=keys, echoed=True)


class _Encoders:
    """The encode worker of each medium, and how many requests each of them has."""

    def __init__(self, fleet: Fleet) -> None:
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
            RoutingTarget((each.worker, 0), each, Load(load))
            for each, load in zip(self._registrations, self._loads, strict=True)
        ]
        chosen, _preferred = encoders.pick(request.media.to_bytes(8, "little"), targets)
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


def registration(number: int, fleet: Fleet) -> Registration:
    """What a worker of the fleet would register."""
    worker = fleet.workers[number]
    pools = {"kv": Memory(0, 1, worker.blocks, "cuda")}
    transfer = (
        Endpoint(name(number), "simulated", pools=pools, rdma=True) if worker.role in ("prefill", "decode") else None
    )
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
    )
