"""The cells of a deployment behind a simulated fleet: what gateways choose, and what leaves a cell in overload.

Each cell has a router of its own, which sees its own workers (``placement``). Gateways choose a cell for each request
by the code that live ones run, and know what those would know: loads that routers publish at intervals, and for long
prompts what routers answer at once. In overload, routers ask gateways which other cells have room for what they hold,
as ``penstock.router.recovery.migration`` does.

Simplified: a message takes no time, except those by which a request gets from one cell to another.
"""

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.gateway.service import cell_choice
from penstock.gateway.service.cell_choice import CellChoice
from penstock.measure.simulation.cache import LowerChanges, StoredRun
from penstock.measure.simulation.placement import PlacementPolicy
from penstock.measure.simulation.policy import Placement, SimulatedFleet, Target
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
