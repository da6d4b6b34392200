"""Router replicas as real processes: the owner of the model is struck under load, and another one goes on."""

import asyncio
import os
import signal
import time
from contextlib import suppress

import httpx
import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.schemas import jobs, routers
from tests.pipeline.support import Deployment, ok, token_prompt, until

REQUESTS = 60
PAUSE_S = 0.04
SLOW_MACHINE_S = 3.0  # what a loaded machine may add to every bound


async def members(bus: Bus) -> dict[str, routers.Member]:
    """The routers that renew their lease. A broker that was killed may keep what should have expired."""
    bucket = bus.subjects.bucket("routers")
    found = {}
    oldest_ns = bus.clock.now_ns() - int(2 * routers.LEASE_S * 1e9)
    async for entry in read(bus, f"KV_{bucket}", f"$KV.{bucket}.>"):
        if entry.data and "KV-Operation" not in entry.headers and entry.time_ns > oldest_ns:
            member = routers.decode(entry.data)
            found[member.router] = member
    return found


async def owner(bus: Bus) -> routers.Member:
    """The one router that owns the model, beside another one."""

    async def only() -> list[routers.Member]:
        found = await members(bus)
        owners = [member for member in found.values() if member.models]
        return owners if len(owners) == 1 and len(found) == 2 else []

    return (await until(only, "one of two routers owns the model"))[0]


def pid_of(fleet: Deployment, member: routers.Member) -> int:
    name = member.router.rpartition("-")[0]
    return next(process.pid for process in fleet.state.processes if process.name == name and process.pid)


async def load(fleet: Deployment, strike_at: int, strike: "asyncio.Future[None] | None" = None) -> list[float]:
    """Seconds that each of ``REQUESTS`` requests took, which come while ``strike`` is carried out."""
    waited: list[float] = []

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        began = time.monotonic()
        short = {"model": "tiny", "prompt": token_prompt(20, 900 + number), "max_tokens": 1, "temperature": 0}
        await ok(client.post(fleet.urls[0] + "/v1/completions", json=short))
        waited.append(time.monotonic() - began)

    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        tasks = []
        for number in range(REQUESTS):
            if number == strike_at and strike is not None:
                strike.set_result(None)
            tasks.append(asyncio.create_task(ask(client, number)))
            await asyncio.sleep(PAUSE_S)
        await asyncio.gather(*tasks)
    return waited


async def deciders(bus: Bus) -> list[str]:
    """The router of each job in WORK, in order; each request has one job."""
    stream, subject = bus.subjects.stream("WORK"), bus.subjects.all("work")
    found = [jobs.decode(entry.data) async for entry in read(bus, stream, subject)]
    decisions = [job.decision.router for job in found if isinstance(job, jobs.Job)]
    assert len(decisions) == len(found)
    return decisions


@pytest.mark.parametrize(
    ("sign", "bound_s"),
    [(signal.SIGKILL, 2.0), pytest.param(signal.SIGTERM, 1.0, marks=pytest.mark.slow), (signal.SIGSTOP, 2.5)],
    ids=lambda it: str(it),
)
async def test_another_router_continues_when_the_owner_is_struck(
    fleet: Deployment, fleet_bus: Bus, sign: signal.Signals, bound_s: float
) -> None:
    first, earlier = await owner(fleet_bus), len(await deciders(fleet_bus))
    pid = pid_of(fleet, first)
    due: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    due.add_done_callback(lambda _: os.kill(pid, sign))
    try:
        waited = await load(fleet, REQUESTS // 4, due)
        assert len(waited) == REQUESTS
        assert max(waited) < bound_s + SLOW_MACHINE_S
        by = (await deciders(fleet_bus))[earlier:]
        assert len(by) == REQUESTS, "each request was placed once"
        assert by[0] == first.router
        assert by[-1] != first.router
    finally:
        if sign is signal.SIGSTOP:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    # A router that was stopped, or started again, leaves the model where it is.
    assert len(await load(fleet, 0)) == REQUESTS
    assert (await deciders(fleet_bus))[-1] == by[-1]
    assert (await owner(fleet_bus)).router == by[-1]


async def test_the_model_has_one_owner_again_after_the_broker_was_killed(fleet: Deployment, fleet_bus: Bus) -> None:
    before, earlier = await owner(fleet_bus), len(await deciders(fleet_bus))
    broker = next(process.pid for process in fleet.state.processes if process.role == "nats")
    assert broker is not None
    due: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    due.add_done_callback(lambda _: os.kill(broker, signal.SIGKILL))
    waited = await load(fleet, REQUESTS // 4, due)
    assert len(waited) == REQUESTS
    assert len(await deciders(fleet_bus)) == earlier + REQUESTS
    assert (await owner(fleet_bus)).router == before.router
