"""Which tenants there are and what each may do: the ``tenants`` bucket as a live table."""

from collections.abc import Callable
from contextlib import AsyncExitStack

import msgspec
import structlog

from infra.bus.connection import Bus
from infra.bus.direct_get import Entry
from infra.bus.log_tail import LogTail
from schemas.errors import Code, ServingError
from schemas.subjects import DEFAULT_TENANT
from schemas.tenants import Limits, decode

log = structlog.get_logger("gateway")

_NONE = Limits()


class TenantTable:
    """``joined`` and ``left`` are called with names as they come and go; ``default`` is always there."""

    def __init__(self, bus: Bus, joined: Callable[[str], None], left: Callable[[str], None]) -> None:
        bucket = bus.subjects.bucket("tenants")
        subject = f"$KV.{bucket}.>"
        self._tail = LogTail(bus, f"KV_{bucket}", subject, bus.subjects.live(subject), self._on_entry)
        self._joined = joined
        self._left = left
        self._limits: dict[str, Limits] = {}
        self._following = AsyncExitStack()

    async def start(self) -> None:
        """
        Raises:
            ServingError: the bucket cannot be read.
        """
        self._joined(DEFAULT_TENANT)
        await self._following.enter_async_context(self._tail.following())

    async def stop(self) -> None:
        await self._following.aclose()

    def limits(self, tenant: str) -> Limits:
        return self._limits.get(tenant, _NONE)

    def check_model(self, tenant: str, model: str) -> None:
        """
        Raises:
            ServingError: model_not_found.
        """
        models = self.limits(tenant).models
        if models and model not in models:
            served = ", ".join(map(repr, models))
            raise ServingError(
                Code.model_not_found,
                f"model {model[:200]!r} is not served to {tenant!r}; served: {served}",
                param="model",
            )

    def _on_entry(self, entry: Entry) -> None:
        tenant = entry.subject.rpartition(".")[2]
        if not entry.data:
            if self._limits.pop(tenant, None) is not None:
                self._left(tenant)
            return
        try:
            limits = decode(entry.data)
        except msgspec.MsgspecError as error:
            log.warning("tenant_unreadable", tenant=tenant, error=str(error))
            return
        existed = tenant in self._limits
        self._limits[tenant] = limits
        if not existed:
            self._joined(tenant)
