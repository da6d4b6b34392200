"""The tenants and their rights: the ``tenants`` bucket as a live table, for both APIs."""

from collections.abc import Callable

import msgspec
import structlog

from penstock.gateway.access.authentication import Caller
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry
from penstock.infra.bus.log_tail import LogTail
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import DEFAULT_TENANT
from penstock.schemas.tenants import Limits, decode

log = structlog.get_logger("gateway")

_NONE = Limits()


class TenantTable:
    """
    Attributes:
        known: tenants with an entry; ``default`` is always there, and needs none.
        on_joined, on_left: called with names as they come and go, ``default`` first.
        on_changed: called after every change.
    """

    def __init__(self, bus: Bus) -> None:
        self._tail = LogTail.of_bucket(bus, "tenants", self._on_entry)
        self.on_joined: Callable[[str], None] = lambda tenant: None
        self.on_left: Callable[[str], None] = lambda tenant: None
        self.on_changed: Callable[[], None] = lambda: None
        self.known: dict[str, Limits] = {}
        self._callers: dict[str, Caller] = {}

    async def start(self) -> None:
        """
        Raises:
            ServingError: the bucket cannot be read.
        """
        self.on_joined(DEFAULT_TENANT)
        await self._tail.start()

    async def stop(self) -> None:
        await self._tail.stop()

    def limits(self, tenant: str) -> Limits:
        return self.known.get(tenant, _NONE)

    def caller(self, tenant: str) -> Caller:
        """Who asks for this tenant over NATS, where the broker has checked the password."""
        found = self._callers.get(tenant)
        if found is None:
            limits = self.limits(tenant)
            found = self._callers[tenant] = Caller(tenant, tenant, own_cache=not limits.shared_cache, limits=limits)
        return found

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
        self._callers.pop(tenant, None)
        if not entry.data:
            if self.known.pop(tenant, None) is not None:
                self.on_left(tenant)
                self.on_changed()
            return
        try:
            limits = decode(entry.data)
        except msgspec.MsgspecError as error:
            log.warning("tenant_unreadable", tenant=tenant, error=str(error))
            return
        existed = tenant in self.known
        self.known[tenant] = limits
        if not existed:
            self.on_joined(tenant)
        self.on_changed()
