"""Two prefill and three decode workers under load, one of them killed every two seconds: nothing is lost or held."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import pytest

from configs.bus.connection import Bus, connect
from configs.bus.read import read
from infra.leases import is_open, leases
from schemas import done
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, Oracle, idle_workers, joined, parse_sse, token_prompt, until

pytestmark = pytest.mark.timeout(240)

CLIENTS = 12
KILL_EACH_S = 2.0
FOR_S = 60.0
TOKENS = 40


@pytest.fixture(scope="module")
def fleet(new_deployment: NewDeployment) -> Deployment:
    return new_deployment(
        *("--mock-speedup", "2", "--prefill", "2", "--decode", "3", "--routers", "2"),
        *("--local-prefill-tokens", "64", "--handoff-lease-s", "10"),
    )


@pytest.fixture
async def fleet_bus(fleet: Deployment) -> AsyncIterator[Bus]:
    bus = await connect(fleet.state.nats_url, role="client", name="test")
    yield bus
    await bus.close()


async def client(fleet: Deployment, oracle: Oracle, number: int, until_s: float, ended: list[str]) -> None:
    """Ask one question after another; each answer must be the undisturbed one."""
    rng = random.Random(number)
    async with httpx.AsyncClient(base_url=fleet.urls[0], trust_env=False, timeout=60) as http:
        while time.monotonic() < until_s:
            # Some prompts again: what they left in caches may be on workers that are gone.
            prompt = token_prompt(rng.choice((40, 90, 160, 320, 500)), rng.randrange(40))
            asked = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
            answer = await http.post("/v1/completions", json={**asked, "stream": True})
            assert answer.status_code == 200, answer.text
            assert joined(parse_sse(answer.content)) == oracle.answer(asked, TOKENS), answer.text[-2000:]
            ended.append(answer.headers["x-request-id"])


async def killer(fleet: Deployment, until_s: float) -> Counter[str]:
    """SIGKILL a random worker every two seconds."""
    rng, killed = random.Random(7), Counter[str]()
    while time.monotonic() < until_s:
        await asyncio.sleep(KILL_EACH_S)
        alive = [process for process in fleet.state.processes if process.role == "worker" and process.pid]
        victim = rng.choice(alive)
        os.kill(victim.pid, signal.SIGKILL)
        killed[victim.name.partition("-")[0]] += 1
    return killed


async def test_random_kills_for_a_minute_lose_no_request_and_leave_nothing_held(
    fleet: Deployment, fleet_bus: Bus, oracle: Oracle
) -> None:
    until_s = time.monotonic() + FOR_S
    ended: list[str] = []
    *_, killed = await asyncio.gather(
        *(client(fleet, oracle, number, until_s, ended) for number in range(CLIENTS)), killer(fleet, until_s)
    )
    assert killed["prefill"] >= 2  # type: ignore[index]
    assert killed["decode"] >= 2  # type: ignore[index]
    assert len(ended) > 100
    subjects = fleet_bus.subjects
    events = [
        event
        async for entry in read(fleet_bus, subjects.stream("DONE"), subjects.all("done"))
        if isinstance(event := done.decode(entry.data), done.Done)
    ]
    assert sorted(event.request for event in events) == sorted(ended), "each ended once"
    assert {event.code for event in events} == {""}
    assert any(event.attempt > 1 for event in events), "nobody was disturbed"

    async def nothing_held() -> bool:
        now = time.time_ns()
        held = [lease for lease in (await leases(fleet_bus, now)).values() if is_open(lease, now)]
        return not held and await idle_workers(fleet_bus)

    await until(nothing_held, "all blocks are free and the ledger is empty", within_s=30)
    lines = Counter([lease.last.state for lease in (await leases(fleet_bus, time.time_ns())).values()])
    assert lines["released"] > 50, lines


async def test_cancelled_prefills_do_not_delay_the_next_request(fleet: Deployment, oracle: Oracle) -> None:
    async with httpx.AsyncClient(base_url=fleet.urls[0], trust_env=False, timeout=60) as http:
        long = {"model": "tiny", "temperature": 0, "max_tokens": 50, "stream": True}
        for number in range(10):  # several seconds of prefill, were they computed
            asked = {**long, "prompt": token_prompt(60_000, 500 + number)}
            async with http.stream("POST", "/v1/completions", json=asked) as answer:
                assert answer.status_code == 200
        short = {"model": "tiny", "prompt": token_prompt(100, 600), "temperature": 0, "max_tokens": 2}
        began = time.monotonic()
        answer = await http.post("/v1/completions", json=short)
        waited = time.monotonic() - began
        assert answer.json()["choices"][0]["text"] == oracle.answer(short, 2)
        assert waited < 1.0
