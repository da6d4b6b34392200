"""The parts of tenants' limits that routers need, followed from their bucket: weights and bounds."""

import asyncio

import msgspec
import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry
from penstock.infra.bus.log_tail import LogTail
from penstock.schemas.errors import ServingError
from penstock.schemas.tenants import decode

log = structlog.get_logger("router")

AGAIN_S = 30.0  # until the bucket may be read: an operator may make it, or give the right, at any time


class TenantWeights:
    """
    Attributes:
        weights: by tenant; those that are missing have 1.
        bounds: of requests that wait, of those that have one.
    """

    def __init__(self, bus: Bus) -> None:
        self._tail = LogTail.of_bucket(bus, "tenants", self._on_entry)
        self.weights: dict[str, float] = {}
        self.bounds: dict[str, int] = {}
        self._reported = False

    async def start(self) -> None:
        """Follow the bucket, as soon as it may be read. Until then all weights are equal."""
        while error := await self._follow():
            if not self._reported:
                self._reported = True
                log.warning("tenant_weights_unknown", error=error, effect="all tenants have the same weight")
            await asyncio.sleep(AGAIN_S)
        if self._reported:
            log.info("tenant_weights_followed", tenants=len(self.weights))

    async def _follow(self) -> str:
        """Why the bucket cannot be followed; "": it is."""
        try:
            await self._tail.start()
        except ServingError as error:
            return error.message
        return ""

    async def stop(self) -> None:
        await self._tail.stop()

    def _on_entry(self, entry: Entry) -> None:
        tenant = entry.subject.rpartition(".")[2]
        if not entry.data:
            self.weights.pop(tenant, None)
            self.bounds.pop(tenant, None)
            return
        try:
            limits = decode(entry.data)
        except msgspec.MsgspecError as error:
            log.warning("tenant_unreadable", tenant=tenant, error=str(error))
            return
        self.weights[tenant] = limits.weight
        self.bounds.pop(tenant, None)
        if limits.max_waiting:
            self.bounds[tenant] = limits.max_waiting
