"""Workers of all roles under load, one of them killed every two seconds: nothing is lost, nothing stays held."""

import asyncio
import base64
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.bus.connection import Bus, connect
from infra.bus.direct_get import read
from infra.demo_model import vision
from infra.model.modeldir import MODELS
from infra.timeline.leases import leases
from schemas import done
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, Oracle, idle_workers, joined, parse_sse, token_prompt, until

pytestmark = pytest.mark.timeout(240)

CLIENTS = 4
KILL_EACH_S = 2.0
STRUCK = ("prefill", "decode", "encode", "prefill", "decode")  # the stages whose workers are killed
MORE = 8  # further kills at most
TOKENS = 40


@pytest.fixture(scope="module")
def fleet(new_deployment: NewDeployment) -> Deployment:
    return new_deployment(
        *("--mock-speedup", "1", "--prefill", "2", "--decode", "3", "--encode", "1", "--routers", "2"),
        *("--model", "demo-vision", "--local-prefill-tokens", "64", "--handoff-lease-s", "10"),
        *("--no-store-grace-s", "1"),
    )


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(MODELS / "demo-vision")


@pytest.fixture
async def fleet_bus(fleet: Deployment) -> AsyncIterator[Bus]:
    bus = await connect(fleet.state.nats_url, role="client", name="test")
    yield bus
    await bus.close()


def text(tokens: int, seed: int) -> dict[str, Any]:
    return {"prompt": [16 + token % 1200 for token in token_prompt(tokens, seed)]}


def picture(number: int) -> dict[str, Any]:
    raw = base64.b64encode(vision.png(vision.scene(random.Random(number), True))).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{raw}"}},
        {"type": "text", "text": f"What do you see in picture {number}? " * 4},
    ]
    return {"messages": [{"role": "user", "content": content}]}


async def ask(http: httpx.AsyncClient, question: dict[str, Any]) -> tuple[str, str]:
    """The request's id and the whole answer."""
    path = "/v1/chat/completions" if "messages" in question else "/v1/completions"
    asked = {"model": "demo-vision", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    answer = await http.post(path, json=asked | question)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"], joined(parse_sse(answer.content))


async def client(
    fleet: Deployment, answers: list[tuple[dict[str, Any], str]], number: int, over: asyncio.Event, ended: list[str]
) -> None:
    """Ask one question after another; each answer must be the undisturbed one."""
    rng = random.Random(number)
    async with httpx.AsyncClient(base_url=fleet.urls[0], trust_env=False, timeout=60) as http:
        while not over.is_set():
            question, undisturbed = rng.choice(answers)
            request, said = await ask(http, question)
            assert said == undisturbed, request
            ended.append(request)


async def killer(fleet: Deployment, bus: Bus, over: asyncio.Event) -> None:
    """SIGKILL a worker of one stage after the other every two seconds, then end the load.

    If all of them were idle when they were killed, decode workers follow until a request was disturbed.
    """
    rng = random.Random(7)
    for number, stage in enumerate((*STRUCK, *["decode"] * MORE)):
        if number >= len(STRUCK) and any(event.attempt > 1 for event in await endings(bus)):
            break

        def alive(stage: str = stage) -> list[int]:
            found = fleet.state.processes
            return [process.pid for process in found if process.name.startswith(stage) and process.pid is not None]

        async def runs() -> bool:
            return bool(alive())

        await asyncio.sleep(KILL_EACH_S)
        await until(runs, f"a {stage} worker runs")
        os.kill(rng.choice(alive()), signal.SIGKILL)
    await asyncio.sleep(KILL_EACH_S)
    over.set()


async def endings(bus: Bus) -> list[done.Done]:
    """The terminal events of all requests."""
    stream, subject = bus.subjects.stream("DONE"), bus.subjects.all("done")
    found = [done.decode(entry.data) async for entry in read(bus, stream, subject)]
    return [event for event in found if isinstance(event, done.Done)]


async def test_kills_of_every_stage_lose_no_request_and_leave_nothing_held(
    fleet: Deployment, fleet_bus: Bus, oracle: Oracle
) -> None:
    questions = [text(tokens, seed) for tokens in (40, 90, 160, 320, 500) for seed in range(5)]
    answers = [(question, oracle.answer({**question, "temperature": 0}, TOKENS)) for question in questions]
    ended: list[str] = []
    async with httpx.AsyncClient(base_url=fleet.urls[0], trust_env=False, timeout=60) as http:
        for question in map(picture, range(6)):
            request, said = await ask(http, question)
            ended.append(request)
            answers.append((question, said))
    assert len({said for _, said in answers[-6:]}) == 6, "the answer depends on the picture"
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(fleet, answers, number, over, ended))
        group.create_task(killer(fleet, fleet_bus, over))
    assert len(ended) > 40
    events = await endings(fleet_bus)
    assert sorted(event.request for event in events) == sorted(ended), "each ended once"
    assert {event.code for event in events} == {""}
    assert any(event.attempt > 1 for event in events), "nobody was disturbed"

    async def nothing_held() -> bool:
        now = time.time_ns()
        held = [lease for lease in (await leases(fleet_bus, now)).values() if lease.is_open(now)]
        return not held and await idle_workers(fleet_bus)

    await until(nothing_held, "all blocks are free and the ledger is empty", within_s=30)
    lines = Counter([lease.last.state for lease in (await leases(fleet_bus, time.time_ns())).values()])
    assert lines["released"] > 20, lines


async def test_cancelled_prefills_do_not_delay_the_next_request(fleet: Deployment, oracle: Oracle) -> None:
    async with httpx.AsyncClient(base_url=fleet.urls[0], trust_env=False, timeout=60) as http:
        long = {"model": "demo-vision", "temperature": 0, "max_tokens": 50, "stream": True}
        for number in range(10):  # half a minute of prefill, were they computed
            asked = {**long, **text(8000, 500 + number)}
            async with http.stream("POST", "/v1/completions", json=asked) as answer:
                assert answer.status_code == 200
        short = {"model": "demo-vision", "temperature": 0, "max_tokens": 2, **text(100, 600)}
        began = time.monotonic()
        answer = await http.post("/v1/completions", json=short)
        waited = time.monotonic() - began
        assert answer.json()["choices"][0]["text"] == oracle.answer(short, 2)
        assert waited < 1.0


async def test_images_of_a_request_with_no_store_are_erased_though_a_router_dies(
    fleet: Deployment, oracle: Oracle
) -> None:
    asked = picture(77)
    url = asked["messages"][0]["content"][0]["image_url"]["url"]
    raw = base64.b64decode(url.partition(",")[2])
    wanted = [raw[at : at + 16] for at in range(64, len(raw) - 16, 32)]
    routers = {process.pid for process in fleet.state.processes if process.name.startswith("router-")}

    async def gone() -> bool:
        return not on_disk(fleet.data_dir, wanted)

    async with httpx.AsyncClient(base_url=fleet.urls[0], trust_env=False, timeout=60) as http:
        _, said = await ask(http, asked | {"no_store": True})
        assert len(on_disk(fleet.data_dir, wanted)) == len(wanted), "until the grace is over"
        os.kill(next(pid for pid in routers if pid is not None), signal.SIGKILL)
        await until(gone, "erasure of the image")
        assert (await ask(http, asked))[1] == said
        assert on_disk(fleet.data_dir, wanted), "one that is stored stays"


def on_disk(folder: Path, wanted: list[bytes]) -> list[bytes]:
    """Those that some file of the broker contains."""
    stored = b"\0\0".join(path.read_bytes() for path in folder.rglob("*.blk"))
    return [each for each in wanted if each in stored]
