"""A worker that is stopped over and over: the doctor, ``top`` and a metric name it, while it is there and while not."""

import os
import signal
from typing import Any

import pytest

from penstock.infra.bus.connection import Bus
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, bus_of, metrics, registrations, until

pytestmark = pytest.mark.timeout(180)
STOPPED = "worker-1"


@pytest.fixture(scope="module")
def fleet(new_deployment: NewDeployment) -> Deployment:
    return new_deployment("--mock-speedup", "1", "--workers", "3", "--metrics-port", "0")


bus = bus_of("fleet")


async def seen_by_top(fleet: Deployment) -> dict[str, dict[str, Any]]:
    (snapshot,) = await fleet.json_lines("top", "--once")
    return {worker["name"]: worker for worker in snapshot["workers"]}


@pytest.mark.slow  # operate/doctor/test_doctor has the finding
async def test_a_worker_that_is_stopped_over_and_over_is_named(fleet: Deployment, bus: Bus) -> None:
    (pid,) = [process.pid for process in fleet.state.processes if process.name == STOPPED]
    assert pid is not None

    async def there(count: int) -> None:
        async def so_many() -> bool:
            return len(await registrations(bus)) == count

        await until(so_many, f"{count} workers are registered", 60)

    await there(3)
    for _ in range(2):
        os.kill(pid, signal.SIGSTOP)
        try:
            await there(2)

            async def lost() -> bool:
                return (await seen_by_top(fleet)).get(STOPPED, {}).get("state") == "lost"

            await until(lost, "top shows the stopped worker as lost", 60)
        finally:
            os.kill(pid, signal.SIGCONT)
        await there(3)
    workers = await seen_by_top(fleet)
    assert {name: (each["state"], each["lost"]) for name, each in workers.items()} == {
        "worker-0": ("ready", 0),
        STOPPED: ("ready", 2),
        "worker-2": ("ready", 0),
    }
    found = [each for each in await fleet.json_lines("doctor", "--all") if each["check"] == "leases"]
    assert [each["status"] for each in found] == ["problem"]
    assert f"{STOPPED} lost its lease 2 times in ten minutes" in found[0]["what"]
    (router,) = [process for process in fleet.state.processes if process.role == "router"]
    series = {name: value for name, value in (await metrics(router.metrics_url)).items() if "lease_losses" in name}
    assert [value for name, value in series.items() if STOPPED in name] == [2.0]
