"""A router's load state in the object store, so that a restart reads the tail of the logs and not their last hour."""

import msgspec
import structlog
from nats.errors import Error as NatsError
from nats.js.errors import Error as JetStreamError

from configs.bus.connection import Bus
from router.fleet import FleetState
from schemas import wire

log = structlog.get_logger("router")

_FAILED = (NatsError, JetStreamError, TimeoutError)


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fold of WORK and DONE up to these stream sequences."""

    taken_ns: int
    work_seq: int
    done_seq: int
    returned_seq: int
    fleet: FleetState


_decode = wire.decoder(Snapshot)


class Snapshots:
    """One object per router name; a newer one replaces it. Losing it costs time at the next start, nothing else."""

    def __init__(self, bus: Bus, router: str) -> None:
        self._bus = bus
        self._name = f"fleet-{router or 'router'}"
        self._bucket = bus.subjects.bucket("snapshots")

    async def load(self) -> Snapshot | None:
        try:
            store = await self._bus.js.object_store(self._bucket)
            found = await store.get(self._name)
            return _decode(found.data or b"")
        except (*_FAILED, msgspec.MsgspecError) as error:
            log.info("no_snapshot", reason=repr(error)[:200])
            return None

    async def save(self, snapshot: Snapshot) -> None:
        try:
            store = await self._bus.js.object_store(self._bucket)
            await store.put(self._name, wire.encode(snapshot))
        except _FAILED as error:
            log.warning("snapshot_not_saved", error=repr(error)[:200])
