"""Removes the registrations of dead workers: after a broken connection, when their process is reported to have ended,
and those that a killed broker brought back."""

import asyncio

import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.registry import WorkerRegistry
from penstock.infra.bus.tasks import Tasks
from penstock.schemas import fleet

log = structlog.get_logger("router")

TRIES = 3
BROKE = "its connection broke"
ENDED = "its process ended"


class RegistrationRemoval:
    def __init__(self, bus: Bus, registry: WorkerRegistry, tasks: Tasks) -> None:
        self._bus = bus
        self._registry = registry
        self._tasks = tasks
        self._stale: asyncio.Task[None] | None = None

    def remove_connections(self, connections: frozenset[str]) -> None:
        """The workers of these connections are dead. A worker that is not stops when its key is removed."""
        for name, worker in list(self._registry.members.items()):
            if worker.registration.connection in connections:
                self._tasks.spawn(self._remove_key(name, worker.revision), name=f"remove-{name}")
                self._registry.remove(name, BROKE)

    def remove_ended(self, name: str) -> None:
        """The process of this worker has ended. Otherwise it would be given requests until its lease expires."""
        if (worker := self._registry.members.get(name)) is not None:
            self._tasks.spawn(self._remove_key(name, worker.revision), name=f"remove-{name}")
            self._registry.remove(name, ENDED)

    def remove_stale(self) -> None:
        """Remove expired registrations that a killed broker brought back, in a task; one runs at a time."""
        if self._stale is None or self._stale.done():
            self._stale = self._tasks.spawn(self._remove_stale(), name="stale-keys", on_failure=_not_read)

    async def _remove_stale(self) -> None:
        await self._registry.find_stale_keys()
        for worker, revision in self._registry.take_stale_keys().items():
            await self._remove_key(worker, revision)
            log.info("stale_registration_removed", worker=worker)

    async def _remove_key(self, worker: str, revision: int) -> None:
        headers = fleet.removal_headers(revision)
        for _ in range(TRIES):
            try:
                await self._bus.nc.request(self._bus.subjects.lease(worker), b"", timeout=1.0, headers=headers)
                return
            except (NatsError, TimeoutError) as error:
                log.debug("key_not_removed", worker=worker, error=repr(error))


def _not_read(error: BaseException) -> None:
    log.debug("stale_registrations_not_read", error=repr(error))  # tried again a moment later
