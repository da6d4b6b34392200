"""What a deployment's processes would have stored."""

from penstock.infra.bus.connection import Bus
from penstock.schemas import wire
from penstock.schemas.routers import HeldByTenant, Member


async def holds(bus: Bus, *tenants: tuple[str, int], others: int = 0) -> None:
    """The lease of a router that holds requests of the class "batch"."""
    member = Member("r-1", 1, held=(HeldByTenant("batch", tenants, others),))
    await bus.js.publish(f"$KV.{bus.subjects.bucket('routers')}.r-1", wire.encode(member))
