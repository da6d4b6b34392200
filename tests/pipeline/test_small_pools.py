"""Prefill and decode with pools of any two sizes, over real NIXL: every request ends with its answer, none waits for
itself."""

import asyncio

import httpx
import pytest

from penstock.infra.bus.connection import Bus
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.pairs.test_disaggregated import nothing_held, stages
from tests.pipeline.support import MODEL, Deployment, Oracle, Process, bus_of, stopped, token_prompt, until

AT_ONCE = 7
REQUESTS = 8
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def pools(new_deployment: NewDeployment) -> Deployment:
    """No workers of its own."""
    return new_deployment("--workers", "0", "--local-prefill-tokens", "64")


pools_bus = bus_of("pools")


@pytest.mark.parametrize(
    ("prefill", "decode", "speedup"),
    [*(pytest.param(*each, marks=pytest.mark.slow) for each in ((2000, 40, 8), (40, 2000, 0))), (36, 36, 0)],
)
async def test_every_request_ends_whatever_the_ratio_of_the_pools(
    pools: Deployment, pools_bus: Bus, oracle: Oracle, prefill: int, decode: int, speedup: float
) -> None:
    workers: list[Process] = []
    for role, blocks in (("prefill", prefill), ("decode", decode)):
        mock = ("--engine", "mock", "--mock-speedup", str(speedup), "--model", str(MODEL), "--drain-s", "3")
        workers.append(pools.also("worker", *mock, "--role", role, "--kv-blocks", str(blocks)))
    await asyncio.gather(*(asyncio.to_thread(each.wait_for, "worker_registered") for each in workers))
    turn = asyncio.Semaphore(AT_ONCE)
    ids: list[str] = []

    async def one(number: int) -> None:
        tokens = 700 + number * 11
        asked = {"model": "tiny", "prompt": token_prompt(tokens, 90_000 + decode * 100 + number), "temperature": 0}
        async with turn, httpx.AsyncClient(base_url=pools.urls[0], trust_env=False, timeout=40) as http:
            answer = await http.post("/v1/completions", json=asked | {"max_tokens": 150, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == oracle.answer(asked, 150)
        ids.append(answer.headers["x-request-id"])

    await asyncio.gather(*(one(number) for number in range(REQUESTS)))
    assert "decode" in [role for each in ids for role in await stages(pools_bus, each)], "nothing was handed off"
    await until(lambda: nothing_held(pools_bus), "all blocks are free")
    assert await stopped(workers) == [0, 0]
