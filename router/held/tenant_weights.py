"""The tenants' weights, followed from their bucket: what share of the held requests' work each of them gets."""

from contextlib import AsyncExitStack

import msgspec
import structlog

from infra.bus.connection import Bus
from infra.bus.direct_get import Entry
from infra.bus.log_tail import LogTail
from schemas.errors import ServingError
from schemas.tenants import decode

log = structlog.get_logger("router")


class TenantWeights:
    """
    Attributes:
        weights: by tenant; those that are missing have 1.
    """

    def __init__(self, bus: Bus) -> None:
        bucket = bus.subjects.bucket("tenants")
        subject = f"$KV.{bucket}.>"
        self._tail = LogTail(bus, f"KV_{bucket}", subject, bus.subjects.live(subject), self._on_entry)
        self._following = AsyncExitStack()
        self.weights: dict[str, float] = {}

    async def start(self) -> None:
        """Follow the bucket. Where it may not be read, as with users of an older broker, all weights stay equal."""
        try:
            await self._following.enter_async_context(self._tail.following())
        except ServingError as error:
            log.warning("tenant_weights_unknown", error=error.message, effect="all tenants have the same weight")

    async def stop(self) -> None:
        await self._following.aclose()

    def _on_entry(self, entry: Entry) -> None:
        tenant = entry.subject.rpartition(".")[2]
        if not entry.data:
            self.weights.pop(tenant, None)
            return
        try:
            self.weights[tenant] = decode(entry.data).weight
        except msgspec.MsgspecError as error:
            log.warning("tenant_unreadable", tenant=tenant, error=str(error))
