"""The running routers, read once."""

import time

import msgspec

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.infra.bus.registry import STALE_NS
from penstock.schemas.routers import Member, decode


async def routers(bus: Bus) -> list[Member]:
    """Routers with a live lease, by id. One whose lease cannot be read, of a later build, is left out.

    Raises:
        ServingError: the bucket cannot be read.
    """
    bucket, now_ns, found = bus.subjects.bucket("routers"), time.time_ns(), []
    async for entry in read(bus, f"KV_{bucket}", f"$KV.{bucket}.>"):
        if entry.data and now_ns - entry.time_ns < STALE_NS:  # else the marker of a lease that ended
            try:
                found.append(decode(entry.data))
            except msgspec.MsgspecError:
                continue
    return sorted(found, key=lambda each: each.router)
