"""Tells gateways how loaded the workers of this cell are, so that they choose between cells."""

import asyncio
import time
from collections.abc import Callable

from penstock.infra.bus.connection import Bus
from penstock.router.held.held_requests import HeldRequests
from penstock.router.placement.cost import OCCUPANCY, SLOT_TOKENS
from penstock.router.state.load_tracker import LoadTracker
from penstock.router.state.target_loads import ENCODE, RoutingTarget
from penstock.schemas.cells import CellLoads, ModelLoad
from penstock.schemas.fleet import WorkerState
from penstock.schemas.wire import encode

PUBLISH_S = 0.02
REPEAT_S = 1.0  # unchanged loads are published again, for gateways that have just started
SHARE = 25.0  # of the time, computing loads takes at most one part in so many


class LoadPublisher:
    """
    Args:
        router: its id.
        owns: whether this router places the requests of a model.
    """

    def __init__(
        self, bus: Bus, router: str, tracker: LoadTracker, held: HeldRequests, owns: Callable[[str], bool]
    ) -> None:
        self._bus = bus
        self._router = router
        self._tracker = tracker
        self._held = held
        self._owns = owns

    async def run(self) -> None:
        published, at, took = b"", 0.0, 0.0
        while True:
            await asyncio.sleep(max(PUBLISH_S, SHARE * took))
            began = time.monotonic()
            loads = encode(self.loads(self._bus.clock.now_ns()))
            took = time.monotonic() - began
            if self._bus.connected and (loads != published or began - at >= REPEAT_S):
                await self._bus.nc.publish(self._bus.subjects.loads, loads)
                published, at = loads, began

    def loads(self, now_ns: int) -> CellLoads:
        """As they are now."""
        waiting: dict[str, int] = {}
        for pending in self._held:
            model = pending.request.model
            waiting[model] = waiting.get(model, 0) + pending.request.prompt_tokens
        found = []
        for model in sorted(set(self._tracker.models().values())):
            if not self._owns(model):
                continue
            targets = [each for each in self._tracker.targets(now_ns, model) if _computes(each)]
            if targets:
                least = min(map(tokens_of, targets)) + waiting.get(model, 0) / len(targets)
                found.append(ModelLoad(model, float(round(least)), len(targets)))
        return CellLoads(self._router, tuple(found))


def _computes(target: RoutingTarget) -> bool:
    """Whether a target takes new prompts."""
    return target.registration.state is WorkerState.ready and target.registration.role not in (ENCODE, "decode")


def tokens_of(target: RoutingTarget) -> float:
    """The part of a target's cost that does not depend on the request; see ``penstock.router.placement.cost``."""
    load, registration = target.load, target.registration
    decoding = load.context_blocks * registration.block_size * OCCUPANCY
    over = max(0, load.sequences - registration.slots)
    return load.slowness * load.prefill_tokens + load.decode_slowness * (decoding + SLOT_TOKENS * over)
