"""``penstock plan`` on a real deployment: workers come under load and leave after it, and no request fails."""

import asyncio
import functools
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.infra.bus.connection import connect
from penstock.infra.bus.worker_leases import registrations
from penstock.launch.state import Running
from penstock.measure.profile.data import save
from penstock.planner.connectors import LocalWorkers
from tests.penstock.planner.engines import engine
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, Process, http_of, until

TOKENS = 60


@pytest.fixture(scope="module")
def split(new_deployment: NewDeployment) -> Deployment:
    return new_deployment("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0")


http = http_of("split")


def planner(deployment: Deployment, home: Path) -> Process:
    """By a profile in which a decode worker runs three requests at once, each for 1.2 s: enough for 0.8 a second."""
    save(home / "profile", engine(prefill_ms=1, step_ms=20, growth_ms=0, max_batch=3).profile)
    return Process(
        home / "plan.log",
        *("plan", "--data-dir", str(deployment.data_dir), "--connector", "local", "--profile", str(home / "profile")),
        *("--itl", "1000", "--ttft", "100000", "--predictor", "moving_average", "--interval-s", "0.5", "--start-s"),
        *("0.5", "--drain-s", "5", "--down-after-s", "1", "--down-cooldown-s", "0.5", "--max-workers", "2", "--json"),
    )


def running(deployment: Deployment, stem: str) -> list[Running]:
    return [each for each in deployment.state.processes if each.name.startswith(f"{stem}-") and not each.drained]


async def answer(
    http: httpx.AsyncClient, number: int, tokens: int = TOKENS, begun: asyncio.Queue[None] | None = None
) -> int:
    words = " ".join(f"word{number}x{index}" for index in range(300))
    body = {"model": "tiny", "prompt": words, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        events = []
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                if begun is not None and not events:
                    begun.put_nowait(None)
                events.append(line[6:])
    return int(json.loads(events[-1])["usage"]["completion_tokens"])


async def test_decode_workers_come_and_go_under_load_without_a_failed_request(
    split: Deployment, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    planning = planner(split, tmp_path)
    answers: list[int] = []
    sent = 0

    async def load(pause_s: float = 0.0) -> None:
        nonlocal sent
        while True:
            sent += 1
            answers.append(await answer(http, sent))
            await asyncio.sleep(pause_s)

    async def grown() -> bool:
        return len(running(split, "decode")) == 2

    async def shrunk() -> bool:
        return len(running(split, "decode")) == 1

    clients: list[asyncio.Task[None]] = []
    try:
        clients = [asyncio.create_task(load(2.5)), *(asyncio.create_task(load()) for _ in range(11))]
        await until(grown, "a second decode worker", 40)
        for client in clients[1:]:
            client.cancel()
        await asyncio.gather(*clients[1:], return_exceptions=True)
        await until(shrunk, "one decode worker again", 40)  # while one client still sends
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        planning.stop()
    failures = [client.exception() for client in clients if not client.cancelled()]
    assert failures == []
    assert set(answers) == {TOKENS}
    told = [line for line in planning.log.read_text().splitlines() if line.startswith('{"planner"')]
    changes = [json.loads(line)["decision"]["changes"]["decode"] for line in told]
    moves = [(change["current"], change["target"]) for change in changes]
    assert (1, 2) in moves
    assert (2, 1) in moves
    history = Process(tmp_path / "history.log", "plan", "--history", "--json", "--data-dir", str(split.data_dir))
    assert await asyncio.to_thread(history.wait) == 0
    stored = [line for line in history.log.read_text().splitlines() if line.startswith('{"planner"')]
    assert stored == told


async def test_a_worker_without_a_gpu_is_added_while_others_finish_their_requests(
    split: Deployment, http: httpx.AsyncClient
) -> None:
    bus = await connect(split.state.nats_url, role="planner", name="moves")
    connector = LocalWorkers(bus, split.data_dir, "tiny")
    try:
        await connector.apply({"prefill": 1, "decode": 2})

        async def registered() -> bool:
            return "decode-1" in {each.name for each in await registrations(bus)}

        await until(registered, "decode-1")
        begun = asyncio.Queue[None]()
        clients = [asyncio.create_task(answer(http, 1000 + number, 600, begun)) for number in range(6)]
        for _ in clients:
            await begun.get()
        await connector.apply({"prefill": 2, "decode": 1})
        assert len(running(split, "prefill")) == len(running(split, "decode")) == 2, "decode-1 has not ended"
        assert await connector.counts() == {"prefill": 2, "decode": 1}
        assert set(await asyncio.gather(*clients)) == {600}
    finally:
        await bus.close()


@pytest.mark.slow  # session/test_weights has the sleep
async def test_a_model_without_requests_sleeps_stays_listed_and_answers_the_next_one(
    new_deployment: NewDeployment, tmp_path: Path
) -> None:
    two = new_deployment("--workers", "1", "--model", "demo", "--model", "other=demo")
    flags = ("--data-dir", str(two.data_dir), "--connector", "local", "--model", "demo", "--json", "--interval-s=0.5")
    planning = Process(tmp_path / "plan.log", "plan", *flags, "--min-workers", "0", "--zero-after-s", "1.5")
    workers = [each.name for each in two.state.processes if each.role == "worker"]
    async with httpx.AsyncClient(base_url=two.urls[0], timeout=60, trust_env=False) as http:

        def plans() -> list[Any]:
            text = (tmp_path / "plan.log").read_text()
            return [json.loads(each)["decision"] for each in text.splitlines() if each.startswith('{"planner"')]

        async def asleep() -> bool:
            pools = [each["observed"]["pools"]["aggregated"] for each in plans()]
            return bool(pools) and pools[-1].get("asleep", 0) == 1

        async def ask(model: str) -> int:
            body = {"model": model, "prompt": "word", "max_tokens": 4, "ignore_eos": True}
            return (await http.post("/v1/completions", json=body)).status_code

        try:
            for _ in range(2):
                await until(asleep, "its worker sleeps", 30)
                assert {each["id"] for each in (await http.get("/v1/models")).json()["data"]} >= {"demo", "other"}
                assert await ask("other") == 200
                assert await ask("demo") == 200

                async def awake() -> bool:
                    return not await asleep()

                await until(awake, "the planner sees it awake", 30)
        finally:
            planning.stop()
    last = [each for each in plans() if each.get("sleep")][-1]
    assert "idle" in last["changes"]["aggregated"]["reasons"]
    assert [each.name for each in two.state.processes if each.role == "worker" and not each.drained] == workers


@pytest.mark.slow  # of one model above
async def test_of_several_models_each_planner_adds_and_drains_its_own_workers(
    new_deployment: NewDeployment, tmp_path: Path
) -> None:
    both = new_deployment("--mock-speedup", "0", "--workers", "1", "--model", "demo", "--model", "small=tiny")
    names = ["demo", "small"]

    def planned(most: str) -> list[Process]:
        flags = (*("--data-dir", str(both.data_dir), "--connector", "local", "--interval-s", "0.5", "--json"),)
        flags += ("--start-s", "0.5", "--drain-s", "5", "--down-after-s", "0.5", "--down-cooldown-s", "0.5")
        counts = ("--min-workers", most, "--max-workers", most)
        logs = [tmp_path / f"{name}-{most}.log" for name in names]
        return [Process(log, "plan", *flags, *counts, "--model", name) for log, name in zip(logs, names, strict=True)]

    async def answered(client: httpx.AsyncClient) -> None:
        for name in names:
            body = {"model": name, "prompt": "word", "max_tokens": 2, "ignore_eos": True}
            assert (await client.post("/v1/completions", json=body)).status_code == 200

    async def has_workers(client: httpx.AsyncClient, number: int) -> bool:
        await answered(client)  # a planner decides from the first request on
        return [len(running(both, f"{name}-worker")) for name in names] == [number, number]

    async with httpx.AsyncClient(base_url=both.urls[0], timeout=30, trust_env=False) as client:
        for most, what in ((2, "a second worker of both models"), (1, "one worker of each again")):
            planning = planned(str(most))
            try:
                await until(functools.partial(has_workers, client, most), what, 40)
            finally:
                for each in planning:
                    each.stop()
        await answered(client)
