"""A worker that is twenty times slower than its peers: ``doctor``, ``top`` and a router's metric name it."""

import asyncio

import httpx
import pytest

from penstock.schemas.pace import SLOW
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import MODEL, MODEL_NAME, START_S, Deployment, metrics, ok, token_prompt, until

pytestmark = pytest.mark.timeout(180)
STRAGGLER = "worker-slow"


@pytest.fixture(scope="module")
def fleet(new_deployment: NewDeployment) -> Deployment:
    made = new_deployment("--mock-speedup", "1", "--workers", "2", "--metrics-port", "0")
    slow = ("--engine", "mock", "--mock-speedup", "0.05", "--model", str(MODEL), "--name", STRAGGLER)
    made.also("worker", *slow).wait_for("worker_registered", START_S)
    return made


@pytest.mark.slow  # doctor/test_doctor has the finding
async def test_a_worker_that_is_twenty_times_slower_than_its_peers_is_named(fleet: Deployment) -> None:
    (router,) = [process for process in fleet.state.processes if process.role == "router"]
    seeds = iter(range(1_000_000))

    async def ask(http: httpx.AsyncClient) -> None:
        """Answers that the slow worker has not ended when it is named."""
        while True:
            body = {"model": MODEL_NAME, "prompt": token_prompt(40, next(seeds)), "max_tokens": 200}
            await ok(http.post("/v1/completions", json=body))

    async def slowness() -> dict[str, float]:
        found = {}
        for name, value in (await metrics(router.metrics_url)).items():
            if "worker_slowness" in name:
                found[name.partition('worker="')[2].partition('"')[0]] = value
        return found

    async def named() -> bool:
        return (await slowness()).get(STRAGGLER, 0.0) >= SLOW

    async with httpx.AsyncClient(base_url=fleet.urls[0], trust_env=False, timeout=120) as http:
        load = asyncio.gather(*(ask(http) for _ in range(6)))
        try:
            await until(named, "a router's metric shows the slow worker", 90)
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
    assert {name for name, factor in (await slowness()).items() if factor >= SLOW} == {STRAGGLER}
    (snapshot,) = await fleet.json_lines("top", "--once")
    factors = {each["name"]: each["slowness"] for each in snapshot["workers"]}
    assert {name for name, factor in factors.items() if factor is not None and factor >= SLOW} == {STRAGGLER}
    (found,) = [each for each in await fleet.json_lines("doctor", "--all") if each["check"] == "slow worker"]
    assert found["status"] == "warning"
    assert found["what"].startswith(f"{STRAGGLER} is ")
    assert f"penstock drain {STRAGGLER}" in found["fix"]
