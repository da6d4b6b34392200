"""Registered workers by name, and the registered routers."""

import time
from collections.abc import Iterable, Sequence

import msgspec

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.infra.bus.worker_leases import STALE_NS
from penstock.schemas.fleet import Registration, WorkerState
from penstock.schemas.routers import Member, decode


def unserved(registered: Iterable[Registration], models: Iterable[str]) -> str:
    """A warning about those of ``models`` that no worker serves, which names what is served; "": all are."""
    served = {name for each in registered for name in (each.model, *each.aliases)}
    unknown = [name for name in models if name not in served]
    if not unknown:
        return ""
    there = f"served are {', '.join(sorted(served))}" if served else "no worker is there"
    return f"no worker serves {', '.join(map(repr, unknown))} now ({there}): requests for it get 404 until one does"


def chosen(registered: Sequence[Registration], name: str) -> Registration:
    """The worker with this name or id, or whose id begins so.

    Raises:
        ValueError: none or several.
    """
    matching = [each for each in registered if name in (each.name, each.worker)]
    matching = matching or [each for each in registered if each.worker.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ValueError(f"{name!r} names {len(matching)} workers: {', '.join(each.worker for each in matching)}")
    names = ", ".join(each.name or each.worker for each in registered)
    raise ValueError(f"no worker {name!r} is registered; there are {names}" if names else "no worker is registered")


def alone(registered: Sequence[Registration], leaving: Sequence[Registration]) -> Registration | None:
    """One of ``leaving`` after which no worker is left that is ready for its role and model; None: there is none."""
    ids = {each.worker for each in leaving}
    for one in leaving:
        candidates = (each for each in registered if each.worker not in ids and each.state is WorkerState.ready)
        if not any((each.model, each.role) == (one.model, one.role) for each in candidates):
            return one
    return None


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
