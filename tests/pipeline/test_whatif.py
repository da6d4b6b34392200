"""What routers recorded is decided again, and their index is found again in the log."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from penstock.log_tools.whatif import whatif_command
from penstock.operate import index_command
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, ok, token_prompt

REQUESTS = 24


@pytest.fixture(scope="module")
def recorded(new_deployment: NewDeployment) -> Deployment:
    return new_deployment("--mock-speedup", "0", "--workers", "3", "--routers", "2")


async def ask(deployment: Deployment) -> None:
    async with httpx.AsyncClient(base_url=deployment.urls[0], trust_env=False, timeout=30) as http:
        for number in range(REQUESTS):
            prompt = token_prompt(200, number % 5) + token_prompt(40, 100 + number)
            await ok(http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 8}))


async def output(
    run: Callable[[Sequence[str]], int], deployment: Deployment, capsys: pytest.CaptureFixture[str], *flags: str
) -> dict[str, Any]:
    assert await asyncio.to_thread(run, [*flags, "--json", "--data-dir", str(deployment.data_dir)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


async def test_every_decision_is_made_again_as_it_was_and_with_a_change(
    recorded: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    await ask(recorded)
    same = await output(whatif_command.run, recorded, capsys)
    assert same["decisions"] == same["usable"] == same["reproduced"] == REQUESTS
    assert (same["moved"], same["waiting"]) == (0, 0)
    assert same["recorded"] == same["then"]
    assert same["ms_per_token"] > 0
    why = same["reasons"]
    chosen = {each["worker"]: each["chosen"] for each in why["workers"] if each["chosen"]}
    assert chosen == same["recorded"]["by_worker"]
    assert sum(why["decided_by"].values()) == why["decisions"] == REQUESTS
    without = await output(whatif_command.run, recorded, capsys, "--without", "worker-0")
    assert without["reproduced"] == REQUESTS
    assert without["moved"] == sum(
        count for worker, count in same["recorded"]["by_worker"].items() if worker.startswith("worker-0-")
    )
    nobody = await output(whatif_command.run, recorded, capsys, *(f"--without=worker-{number}" for number in range(3)))
    assert nobody["waiting"] == REQUESTS


async def test_the_index_of_each_router_is_what_the_log_leads_to(
    recorded: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    await ask(recorded)
    async with asyncio.timeout(30):
        while True:  # routers note their checksum once the stream rests
            now = await output(index_command.run, recorded, capsys, "--check")
            if all(check["kv_seq"] == now["kv_seq"] for check in now["routers"]):
                break
            await asyncio.sleep(0.2)
    assert len(now["routers"]) == 2
    assert all(check["checksum"] == check["expected"] == now["checksum"] for check in now["routers"])
    assert sum(target["blocks"] for target in now["targets"]) >= now["blocks"] > 0
    early = await output(index_command.run, recorded, capsys, "--at", str(now["first_seq"]))
    assert early["kv_seq"] == now["first_seq"]
    assert early["blocks"] < now["blocks"]
    assert await asyncio.to_thread(index_command.run, ["--at", "999999999", "--data-dir", str(recorded.data_dir)]) == 1
    assert f"has {now['first_seq']} to {now['kv_seq']}" in capsys.readouterr().err
