"""Registrations of dead workers are removed, also those that a killed server brought back, which never expire."""

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.infra.bus.worker_leases import RENEWED_S, WorkerRegistry
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.router.state.lost_workers import RegistrationRemoval
from penstock.schemas import fleet
from penstock.schemas.subjects import Subjects
from penstock.schemas.wire import encode
from tests.infra.bus.support import eventually, opened


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def register(bus: Bus, worker: str) -> None:
    """As a worker does, but for a minute."""
    entry = fleet.Registration(worker, "m", "aggregated", "mock", 1, 32, 100, 8, 1024)
    await bus.js.publish(bus.subjects.lease(worker), encode(entry), headers={"Nats-TTL": "60"})


async def test_what_nobody_renews_is_removed_from_the_log_and_no_live_worker(
    broker: EmbeddedNats, subjects: Subjects
) -> None:
    """By sequence: of a cluster's servers, each one forgets what only this one has."""
    clock, bucket = Clock(), subjects.bucket("workers")
    async with opened(broker, subjects) as bus:
        await register(bus, "dead")
        async with WorkerRegistry(bus, clock=clock) as registry:
            removal = RegistrationRemoval(bus, registry, bus.tasks)
            for _ in range(int(2.5 * RENEWED_S * 4)):
                clock.now += 0.25
                if clock.now % 1 == 0:
                    await register(bus, "alive")
                    await eventually(lambda: "alive" in registry.members)
                    await eventually(lambda: registry.members["alive"].renewed_at == clock.now)
                registry.expire()
                removal.purge_ended()
                await eventually(lambda: removal.idle)
        found = [entry.subject async for entry in read(bus, f"KV_{bucket}", f"$KV.{bucket}.>") if entry.data]
        assert found == [subjects.lease("alive")]
