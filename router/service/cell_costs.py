"""Tells gateways what requests cost in this cell, so that they choose between cells.

For a long prompt it matters which worker has its beginning, and what that one has to do: the gateway asks, and the
answer is what the decision would be. For others the loads of the workers suffice, which are published at intervals.
That happens while a gateway asks for them, which it does if it has several cells: a router need not know.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import structlog

from penstock.infra.bus.connection import Bus
from penstock.router.held.held_requests import HeldRequests
from penstock.router.placement.cost import OCCUPANCY, SERVED_COST
from penstock.router.placement.decision_inputs import Decider
from penstock.router.placement.pending import PendingRequest
from penstock.router.state.holders import keys_view
from penstock.router.state.load_tracker import LoadTracker
from penstock.router.state.target_loads import ENCODE, RoutingTarget
from penstock.schemas import requests
from penstock.schemas.cells import OWN_WORK, SLOT_TOKENS, CellCost, CellLoads, ModelLoad, TargetLoad
from penstock.schemas.fleet import Registration, WorkerState
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.wire import encode

log = structlog.get_logger("router")

PUBLISH_S = 0.02
REPEAT_S = 1.0  # unchanged loads are published again, for gateways that have just started
WANTED_S = 3.0  # after a gateway has asked for them; it does every ``ASK_LOADS_S``
SHARE = 25.0  # of the time, computing loads takes at most one part in this many


class CellCosts:
    """
    Args:
        router: its id.
        owns: whether this router places the requests of a model.
        registrations: of the workers as they were renewed last; ``tracker`` has the loads of their first ones.

    Attributes:
        wanted: gateways of several cells are there.
    """

    def __init__(
        self,
        bus: Bus,
        router: str,
        *,
        tracker: LoadTracker,
        decider: Decider,
        held: HeldRequests,
        owns: Callable[[str], bool],
        registrations: Callable[[], Iterable[Registration]],
    ) -> None:
        self._bus = bus
        self._router = router
        self._tracker = tracker
        self._decider = decider
        self._held = held
        self._held_tokens: dict[str, int] = {}  # by model, when loads were computed last: thousands may be held
        self._owns = owns
        self._registrations = registrations
        self._asked = asyncio.Event()
        self._asked_at = -math.inf

    @property
    def wanted(self) -> bool:
        return time.monotonic() - self._asked_at < WANTED_S

    async def run(self) -> None:
        """Answer, and publish loads while they are wanted, until it is cancelled."""
        await self._bus.nc.subscribe(self._bus.subjects.cost, cb=self._answer)
        published, at, took = b"", 0.0, 0.0
        while True:
            if not self.wanted:
                self._asked.clear()
                await self._asked.wait()
            await asyncio.sleep(max(PUBLISH_S, SHARE * took))
            began = time.monotonic()
            loads = encode(self.loads(self._bus.clock.now_ns()))
            took = time.monotonic() - began
            if self._bus.connected and (loads != published or began - at >= REPEAT_S):
                await self._bus.nc.publish(self._bus.subjects.loads, loads)
                published, at = loads, began

    async def _answer(self, message: Any) -> None:
        self._asked_at = time.monotonic()
        self._asked.set()
        if not message.data:  # for the loads, which it gets without an answer
            return
        try:
            request = requests.decode(message.data)
        except msgspec.MsgspecError as error:  # of a later release
            log.debug("cost_not_known", error=str(error))
            return
        if message.reply and self._owns(request.model):
            await self._bus.nc.publish(message.reply, encode(self.cost(request, self._bus.clock.now_ns())))

    def cost(self, request: GenerateRequest, now_ns: int) -> CellCost:
        """What a request costs here now. Nothing is placed."""
        pending = PendingRequest(request, b"", "", now_ns)
        targets = [each for each in self._tracker.targets(now_ns, request.model) if computes(each)]
        held = self._held_tokens.get(request.model, 0) / max(1, len(targets))
        if self._held.is_waiting(pending):  # it would be held after those
            return self._held_cost(pending, held)
        decision, _ = self._decider.decide(pending, keys_view(request.digests), now_ns, waited_s=0.0)
        costs = [each.score for each in decision.candidates if not each.excluded]
        return CellCost(min(costs), False, held) if costs else self._held_cost(pending, held)

    def _held_cost(self, pending: PendingRequest, held: float) -> CellCost:
        return CellCost(OWN_WORK * self._held.uncomputed(pending), True, held)

    def loads(self, now_ns: int) -> CellLoads:
        """As they are now."""
        self._held_tokens = held = self._count_held()
        work_ns = {each.worker: each.load.work_ns for each in self._registrations()}
        found = []
        for model in sorted(set(self._tracker.models().values())):
            if not self._owns(model):
                continue
            targets = [each for each in self._tracker.targets(now_ns, model) if computes(each)]
            if targets:
                slowest_ns = max(work_ns.get(target.registration.worker, 0) for target in targets)
                found.append(ModelLoad(model, held.get(model, 0), tuple(map(load_of, targets)), slowest_ns))
        return CellLoads(self._router, tuple(found))

    def _count_held(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for pending in self._held:
            model = pending.request.model
            held[model] = held.get(model, 0) + pending.request.prompt_tokens
        return held


def computes(target: RoutingTarget) -> bool:
    """Whether a target takes new prompts."""
    return target.registration.state is WorkerState.ready and target.registration.role not in (ENCODE, "decode")


def load_of(target: RoutingTarget) -> TargetLoad:
    """What the cost of a request at a target depends on (``penstock.router.placement.cost``), in whole tokens."""
    load, registration = target.load, target.registration
    read = load.context_blocks * registration.block_size * OCCUPANCY
    over = max(0, load.sequences - registration.slots)
    waiting = load.decode_slowness * (read + SLOT_TOKENS * over) + load.served_tokens * SERVED_COST
    uncomputed = round(load.slowness * load.prefill_tokens)
    return TargetLoad(uncomputed, load.computing, max(0, load.sequences - load.computing), round(waiting))
