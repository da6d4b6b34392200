"""Routing policies to compare with the router's own, on a simulated fleet.

Round robin, random, fewest requests and fewest blocks know nothing of caches.

``DynamoPolicy`` is the default cost of NVIDIA Dynamo's KV router (1.6.1), as its documentation publishes it:

    cost = scale · max(0, (A + P) / B - credit · C) + D

A: uncached prompt tokens of requests without a first token; P: tokens of this prompt; B: block size; C: leading blocks
cached by the events seen so far; D: distinct prompt blocks of unfinished requests, with this one. The lowest cost wins,
ties are random, nothing is held. In a prefill pool D is left out; a decode pool takes the fewest prompt blocks.

``CellsPolicy`` is the router's own in several cells, each with a router that sees its own workers (``placement``).
Gateways choose a cell for each request by the code that live ones run, and know what those would know: loads that
routers publish at intervals, and for long prompts what routers answer at once. In overload, routers ask gateways which
other cells have room for what they hold, as ``penstock.router.recovery.migration`` does. A message takes no time,
except those by which a request gets from one cell to another.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from penstock.gateway.service import cell_choice
from penstock.gateway.service.cell_choice import CellChoice
from penstock.measure.simulation.cache import LowerChanges, StoredRun
from penstock.measure.simulation.placement import PlacementPolicy
from penstock.measure.simulation.policy import Placement, Policy, SimulatedFleet, Target
from penstock.measure.simulation.trace import Request
from penstock.router.placement.routing import Weights
from penstock.router.recovery import migration
from penstock.router.service import cell_costs
from penstock.router.service.cell_costs import computes, load_of
from penstock.schemas.cells import OWN_WORK, CellCost, CellLoads, ModelLoad

_PUBLISH_NS = round(cell_costs.PUBLISH_S * 1e9)
_LOOK_NS = round(migration.LOOK_S * 1e9)
_HELD_NS = round(migration.HELD_S * 1e9)
_CARRIED_NS = 5_000_000  # from a router's decision that a request leaves until the other cell's router has it


@dataclass(eq=False)
class CellsPolicy:
    """
    Attributes:
        gateways: each is nearest to one cell, in turn.
        taking: False: nothing leaves a cell in overload.
        moved: requests that left their cell.
    """

    seed: int = 0
    cells: int = 2
    gateways: int = 4
    weights: Weights = Weights()  # noqa: RUF009  # frozen
    taking: bool = True

    def start(self, fleet: SimulatedFleet, requests: Sequence[Request]) -> None:
        self.moved = 0
        self._requests = requests
        self._rng = random.Random(self.seed)
        self._choices = [CellChoice(self.cells, gateway % self.cells) for gateway in range(self.gateways)]
        self._policies = [PlacementPolicy(self.seed, weights=self.weights, joined=False) for _ in range(self.cells)]
        self._of_worker = cells_of(fleet, self.cells)
        self._of_request: dict[int, int] = {}
        self._guests: set[int] = set()
        self._held: list[dict[int, int]] = [{} for _ in range(self.cells)]  # request -> when its router got it
        self._held_each = [0.0] * self.cells  # tokens for each target, as published last
        self._carried: list[tuple[int, int, int]] = []
        self._published = self._looked = self._now = 0
        for policy in self._policies:
            policy.start(fleet, requests)
        for number, cell in enumerate(self._of_worker):
            self._policies[cell].join(number)
        self._publish()

    def arrive(self, request: Request, now_ns: int) -> Placement | None:
        self._until(now_ns)
        choice = self._choices[self._rng.randrange(self.gateways)]
        keys = request.keys
        beginnings = [hash((keys[length - 1],)) for length in cell_choice.ALIKE if length <= len(keys)]
        usable = choice.considered(beginnings, range(self.cells))
        costs = {}
        if request.prompt_tokens >= cell_choice.ASK_TOKENS:
            costs = {cell: self._cost(cell, request, now_ns) for cell in usable}
        return self._enter(choice.choose(_MODEL, request.prompt_tokens, usable, costs), request, now_ns)

    def decode(self, request: Request, now_ns: int) -> Target:
        raise AssertionError("decode workers are chosen with the prefill worker")

    def pump(self, now_ns: int) -> Iterator[tuple[Request, Placement]]:
        self._until(now_ns)
        for cell, policy in enumerate(self._policies):
            for request, placement in policy.pump(now_ns):
                del self._held[cell][request.index]
                yield request, placement
        if self.taking and now_ns - self._looked >= _LOOK_NS:
            self._looked = now_ns
            for cell in range(self.cells):
                self._offer(cell, now_ns)
        while self._carried and self._carried[0][0] <= now_ns:
            _, index, cell = heapq.heappop(self._carried)
            request = self._requests[index]
            placed = self._enter(cell, request, now_ns)
            if placed is not None:
                yield request, placed

    def wake(self) -> int | None:
        due = self._now + _LOOK_NS
        return min(due, self._carried[0][0]) if self._carried else due

    def events(self, target: Target, stored: Sequence[StoredRun], removed: Sequence[int], now_ns: int) -> None:
        self._until(now_ns)
        self._policies[self._of_worker[target[0]]].events(target, stored, removed, now_ns)

    def lower_events(self, target: Target, changes: Sequence[LowerChanges]) -> None:
        self._policies[self._of_worker[target[0]]].lower_events(target, changes)

    def prefilled(self, request: Request, now_ns: int) -> None:
        self._until(now_ns)
        self._policies[self._of_request[request.index]].prefilled(request, now_ns)

    def finished(self, request: Request, now_ns: int) -> None:
        self._until(now_ns)
        self._policies[self._of_request[request.index]].finished(request, now_ns)

    def _enter(self, cell: int, request: Request, now_ns: int) -> Placement | None:
        self._of_request[request.index] = cell
        placement = self._policies[cell].arrive(request, now_ns)
        if placement is None:
            self._held[cell][request.index] = now_ns
        return placement

    def _offer(self, cell: int, now_ns: int) -> None:
        """Let other cells take what this one holds."""
        held = self._held[cell]
        old = [
            self._requests[index]
            for index, since in held.items()
            if since <= now_ns - _HELD_NS and index not in self._guests
        ]
        if not old:
            return
        old = heapq.nsmallest(migration.AT_ONCE, old, key=lambda each: (each.priority.rank, each.arrival_ns))
        choice = self._choices[self._rng.randrange(self.gateways)]
        others = [each for each in range(self.cells) if each != cell]
        chosen = choice.room(_MODEL, [each.prompt_tokens for each in old], others, stranded=False)
        for request, other in zip(old, chosen, strict=False):
            del held[request.index]
            self._policies[cell].router.drop(str(request.index))
            self._guests.add(request.index)
            heapq.heappush(self._carried, (now_ns + _CARRIED_NS, request.index, other))
            self.moved += 1

    def _cost(self, cell: int, request: Request, now_ns: int) -> CellCost:
        policy = self._policies[cell]
        arrival = policy.arrival(request)
        held = self._held_each[cell]
        tokens = policy.router.cost(arrival, now_ns)
        if tokens is None:
            return CellCost(OWN_WORK * policy.router.uncomputed(arrival), True, held)
        return CellCost(tokens, False, held)

    def _until(self, now_ns: int) -> None:
        """Publish loads as they have been since the event before, if that is due."""
        if now_ns - self._published >= _PUBLISH_NS and now_ns > self._now:
            self._published = now_ns
            self._publish()
        self._now = now_ns

    def _publish(self) -> None:
        for cell, policy in enumerate(self._policies):
            held = sum(self._requests[index].prompt_tokens for index in self._held[cell])
            targets = [each for each in policy.router.tracker.targets(self._now, _MODEL) if computes(each)]
            self._held_each[cell] = held / len(targets)
            load = ModelLoad(_MODEL, held, tuple(map(load_of, targets)))
            for choice in self._choices:
                choice.observe(cell, CellLoads("", (load,)))


_MODEL = "simulated"


def cells_of(fleet: SimulatedFleet, cells: int) -> list[int]:
    """The cell of each worker: those of each role are dealt over the cells, as ``penstock up`` does."""
    dealt: dict[str, int] = {}
    numbers = []
    for worker in fleet.workers:
        turn = dealt.get(worker.role, 0)
        dealt[worker.role] = turn + 1
        numbers.append(turn % cells)
    return numbers


Choose = Callable[[Sequence[Target], "TargetCounts"], Target]


class TargetCounts:
    """What a rule may look at: how many requests and prompt blocks each target has, and how often it was asked."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.turns: dict[Target, int] = {}  # decisions so far, by the first target of the pool
        self.requests: dict[Target, int] = {}
        self.blocks: dict[Target, int] = {}

    def add(self, target: Target, blocks: int, sign: int) -> None:
        self.requests[target] = self.requests.get(target, 0) + sign
        self.blocks[target] = self.blocks.get(target, 0) + sign * blocks


def round_robin(pool: Sequence[Target], counts: TargetCounts) -> Target:
    turn = counts.turns.get(pool[0], 0)
    counts.turns[pool[0]] = turn + 1
    return pool[turn % len(pool)]


def uniform(pool: Sequence[Target], counts: TargetCounts) -> Target:
    return pool[counts.rng.randrange(len(pool))]


def least_requests(pool: Sequence[Target], counts: TargetCounts) -> Target:
    return _least(pool, counts.requests, counts.rng)


def least_blocks(pool: Sequence[Target], counts: TargetCounts) -> Target:
    return _least(pool, counts.blocks, counts.rng)


def _least(pool: Sequence[Target], loads: dict[Target, int], rng: random.Random) -> Target:
    best = min(loads.get(target, 0) for target in pool)
    ties = [target for target in pool if loads.get(target, 0) == best]
    return ties[0] if len(ties) == 1 else rng.choice(ties)


class RulePolicy(Policy):
    """Places each request when it comes; decode workers are chosen by the same rule when the prompt is computed."""

    def __init__(self, choose: Choose, seed: int = 0) -> None:
        self._choose = choose
        self._counts = TargetCounts(seed)
        self._placed: dict[int, Target] = {}

    def start(self, fleet: SimulatedFleet, requests: Sequence[Request]) -> None:
        self._entrances, self._decoders = fleet.entrances, fleet.with_role("decode")
        self._encoders = [(-1 - number, 0) for number in range(fleet.encoders)]

    def arrive(self, request: Request, now_ns: int) -> Placement:
        encoder = None
        if request.media and self._encoders:
            encoder = -1 - self._choose(self._encoders, self._counts)[0]
        return Placement(self._take(request, self._entrances), encoder=encoder)

    def decode(self, request: Request, now_ns: int) -> Target:
        self._drop(request)
        return self._take(request, self._decoders)

    def finished(self, request: Request, now_ns: int) -> None:
        self._drop(request)

    def _take(self, request: Request, pool: Sequence[Target]) -> Target:
        target = self._choose(pool, self._counts)
        self._counts.add(target, len(request.keys), 1)
        self._placed[request.index] = target
        return target

    def _drop(self, request: Request) -> None:
        self._counts.add(self._placed.pop(request.index), len(request.keys), -1)


def _leading(held: Container[int], keys: Sequence[int]) -> int:
    """Number of leading keys that are held."""
    return next((at for at, key in enumerate(keys) if key not in held), len(keys))


class DynamoPolicy(Policy):
    def __init__(self, seed: int = 0, *, credit: float = 1.0, scale: float = 1.0) -> None:
        self._rng = random.Random(seed)
        self._credit, self._scale = credit, scale

    def start(self, fleet: SimulatedFleet, requests: Sequence[Request]) -> None:
        self._size = fleet.block_size
        self._targets = fleet.entrances
        self._positions = {target: at for at, target in enumerate(self._targets)}
        self._counts_decode = not fleet.with_role("prefill")
        self._cached: list[set[int]] = [set() for _ in self._targets]
        self._active: list[Counter[int]] = [Counter() for _ in self._targets]
        self._backlog = [0] * len(self._targets)
        self._uncached: dict[int, int] = {}  # by request without a first token
        self._placed: dict[int, int] = {}
        self._decoders = fleet.with_role("decode")
        self._decode_blocks = dict.fromkeys(self._decoders, 0)
        self._decoding: dict[int, Target] = {}

    def arrive(self, request: Request, now_ns: int) -> Placement:
        cached = [_leading(held, request.keys) for held in self._cached]
        costs = []
        for at, backlog in enumerate(self._backlog):
            blocks = (backlog + request.prompt_tokens) / self._size - self._credit * cached[at]
            cost = self._scale * max(0.0, blocks)
            if self._counts_decode:
                active = self._active[at]
                cost += len(active) + len(request.keys) - _leading(active, request.keys)
            costs.append(cost)
        at = self._lowest(costs)
        self._placed[request.index] = at
        uncached = self._uncached[request.index] = max(0, request.prompt_tokens - cached[at] * self._size)
        self._backlog[at] += uncached
        if self._counts_decode:
            self._active[at].update(request.keys)
        return Placement(self._targets[at])

    def decode(self, request: Request, now_ns: int) -> Target:
        self.prefilled(request, now_ns)
        target = self._decoders[self._lowest([self._decode_blocks[target] for target in self._decoders])]
        self._decode_blocks[target] += len(request.keys)
        self._decoding[request.index] = target
        return target

    def events(self, target: Target, stored: Sequence[StoredRun], removed: Sequence[int], now_ns: int) -> None:
        at = self._positions.get(target)
        if at is not None:
            self._cached[at].difference_update(removed)
            for keys, _parent in stored:
                self._cached[at].update(keys)

    def prefilled(self, request: Request, now_ns: int) -> None:
        self._backlog[self._placed[request.index]] -= self._uncached.pop(request.index, 0)

    def finished(self, request: Request, now_ns: int) -> None:
        self.prefilled(request, now_ns)
        at = self._placed.pop(request.index)
        if self._counts_decode:
            active = self._active[at]
            for key in request.keys:
                active[key] -= 1
                if not active[key]:
                    del active[key]
        target = self._decoding.pop(request.index, None)
        if target is not None:
            self._decode_blocks[target] -= len(request.keys)

    def _lowest(self, costs: Sequence[float]) -> int:
        best = min(costs)
        ties = [at for at, cost in enumerate(costs) if cost == best]
        return ties[0] if len(ties) == 1 else self._rng.choice(ties)
