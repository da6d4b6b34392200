"""Bytes of streams that change on the disk while everything runs: nobody hangs, no other request is lost, and logs say
what was.
"""

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.log_tools.sources.data_folder import STREAMS_DIR
from penstock.log_tools.sources.store_files import Place, records
from penstock.operate.doctor.broker import check_stored_messages
from penstock.operate.doctor.finding import CheckStatus
from tests.infra.nats_server.support import lose_end
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, Oracle, until, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CACHED_S = 11.0  # for so long nats-server keeps in memory what it has stored last
TOKENS = 1_500  # 18 s


@pytest.fixture(scope="module")
def paced(new_deployment: NewDeployment) -> Deployment:
    """About 12 ms per token."""
    return new_deployment("--mock-speedup", "0.5", "--workers", "1", "--list-requests")


def stored(deployment: Deployment, name: str) -> list[Place]:
    """Where the messages of a stream's newest block are."""
    return records(newest_block(deployment, name).read_bytes()).places


def newest_block(deployment: Deployment, name: str) -> Path:
    folder = deployment.data_dir / STREAMS_DIR / f"ps_{name}" / "msgs"
    return max(folder.glob("*.blk"), key=lambda each: int(each.stem))


def overwrite(deployment: Deployment, name: str, number: int, begin: int) -> None:
    """64 bytes of a stream's message, from a place in its record on."""
    at = stored(deployment, name)[number][2] + begin
    with newest_block(deployment, name).open("r+b") as file:
        file.seek(at)
        file.write(random.Random(1).randbytes(64))


def body(seed: int, count: int = TOKENS) -> dict[str, Any]:
    prompt = words(20, seed)
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "timeout_s": 120,
    }


def pid(deployment: Deployment, role: str) -> int:
    return next(each.pid for each in deployment.state.processes if each.role == role)


async def test_requests_continue_although_bytes_of_every_stream_have_changed(paced: Deployment, oracle: Oracle) -> None:
    """Of a job, of tokens in the middle of answers, of a record and of KV events; then their worker is killed."""
    async with httpx.AsyncClient(base_url=paced.urls[0], trust_env=False, timeout=130) as http:
        ended = [
            (await http.post("/v1/completions", json=body(seed, 5))).json()["id"].removeprefix("cmpl-")
            for seed in (1, 2)
        ]
        asked = [asyncio.create_task(http.post("/v1/completions", json=body(seed))) for seed in range(10, 14)]
        await asyncio.sleep(CACHED_S)
        overwrite(paced, "WORK", 3, 300)
        overwrite(paced, "TOKENS", 100, 60)
        overwrite(paced, "KV", 1, 60)
        overwrite(paced, "DONE", 0, 300)
        worker = pid(paced, "worker")
        os.kill(worker, signal.SIGKILL)
        for seed, task in zip(range(10, 14), asked, strict=True):
            answer = await task
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == oracle.answer(body(seed), TOKENS)
        assert "job_not_found" in paced.logs("router")

        async def states() -> list[str]:
            answers = [await http.get(f"/v1/requests/{name}") for name in ended]
            return [answer.json()["state"] for answer in answers]

        assert (await states())[1] == "done"
        assert (await states())[0] in ("done", "unknown")  # the token stream may have its end
        assert (await http.post("/v1/completions", json=body(3, 5))).status_code == 200
    found = check_stored_messages([paced.data_dir], everything=True)
    named = {each.what.partition(" ")[0] for each in found if each.status is CheckStatus.problem}
    assert named == {"ps_WORK", "ps_TOKENS", "ps_KV", "ps_DONE"}


async def test_requests_that_a_restarted_broker_has_dropped_are_stored_again(paced: Deployment, oracle: Oracle) -> None:
    """It drops a damaged message, and what follows in its block: these clients waited until their deadlines."""
    before = len(stored(paced, "REQUESTS"))
    router, nats = pid(paced, "router"), pid(paced, "nats")
    async with httpx.AsyncClient(base_url=paced.urls[0], trust_env=False, timeout=130) as http:
        os.kill(router, signal.SIGSTOP)  # so that nobody reads them
        seeds = range(20, 24)
        asked = [asyncio.create_task(http.post("/v1/completions", json=body(seed, 5))) for seed in seeds]

        async def are_stored() -> bool:
            return len(stored(paced, "REQUESTS")) == before + len(seeds)

        await until(are_stored, "the requests are stored")
        os.kill(nats, signal.SIGKILL)
        overwrite(paced, "REQUESTS", -2, 200)
        os.kill(router, signal.SIGKILL)
        for seed, task in zip(seeds, asked, strict=True):
            answer = await task
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == oracle.answer(body(seed, 5), 5)
    assert "requests_stored_again" in paced.logs("gateway")


@pytest.mark.parametrize("victims", [("worker",), ("worker", "router")], ids=" and ".join)
async def test_answers_continue_although_their_records_and_their_worker_are_lost_together(
    paced: Deployment, oracle: Oracle, victims: tuple[str, ...]
) -> None:
    """A power failure: the broker's streams have lost their ends. These clients waited until their deadlines."""
    seeds, count = range(30 + 10 * len(victims), 33 + 10 * len(victims)), 400
    before = {name: len(stored(paced, name)) for name in ("REQUESTS", "WORK", "TOKENS")}
    async with httpx.AsyncClient(base_url=paced.urls[0], trust_env=False, timeout=130) as http:
        asked = [asyncio.create_task(http.post("/v1/completions", json=body(seed, count))) for seed in seeds]

        async def are_streaming() -> bool:
            return len(stored(paced, "TOKENS")) > before["TOKENS"] + 30

        await until(are_streaming, "the requests stream")
        nats = pid(paced, "nats")
        os.kill(nats, signal.SIGSTOP)
        for name in ("REQUESTS", "WORK"):
            lose_end(paced.data_dir, f"ps_{name}", len(stored(paced, name)) - before[name])
        for role in victims:
            os.kill(pid(paced, role), signal.SIGKILL)
        os.kill(nats, signal.SIGKILL)
        for seed, task in zip(seeds, asked, strict=True):
            answer = await task
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == oracle.answer(body(seed, count), count)
