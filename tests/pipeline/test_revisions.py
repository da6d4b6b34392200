"""Several revisions of a model, and another model, under one name: every answer is wholly of one revision.

The weights are computed with by vLLM's stand-in, which starts in half the native engine's time.
"""

import asyncio
import json
import os
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.infra.bus.connection import Bus, connect
from penstock.infra.model.modeldir import DEMO, TINY, revision
from penstock.schemas.fleet import Registration
from tests import standins
from tests.adapters import other_weights
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import (
    ROOT,
    Deployment,
    Process,
    accepted,
    ending,
    free_port,
    metrics,
    ok,
    registrations,
    stopped,
    until,
    words,
)

pytestmark = pytest.mark.timeout(180)

PROMPTS = 8
VLLM = ("--threads", "1", "--max-model-len", "2048", "--max-running", "8", "--drain-s", "20")
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two revisions of one model: the same tokenizer and sizes, other weights."""
    home = tmp_path_factory.mktemp("models")
    one = Path(shutil.copytree(TINY, home / "one"))
    two = other_weights(TINY, home / "two")
    assert (two / "model.safetensors").stat().st_size == (one / "model.safetensors").stat().st_size
    return one, two


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment, models: tuple[Path, Path]) -> Deployment:
    """No workers yet."""
    return new_deployment("--model", str(models[0]), "--served-model-name", "tiny", "--workers", "0", "--routers", "2")


Running = dict[str, Process]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """Workers by name. Each takes seconds to start, so that those of one test stay for the next."""
    processes: Running = {}
    yield processes
    for process in processes.values():
        process.ask_to_stop()
    assert [process.stop() for process in processes.values()] == [0] * len(processes)


class Fleet:
    """Workers that a test starts and ends."""

    def __init__(self, deployment: Deployment, bus: Bus, running: Running) -> None:
        self.deployment = deployment
        self.bus = bus
        self.processes = running

    async def start(self, name: str, model: Path, engine: str = "vllm") -> None:
        """Returns when it is registered; one that runs already stays."""
        if name not in self.processes:
            flags = ("--engine", engine, "--model", str(model), "--served-model-name", "tiny", "--name", name)
            more = VLLM if engine == "vllm" else ()
            self.processes[name] = self.deployment.also("worker", *flags, *more, PYTHONPATH=f"{standins.FOLDER}:{ROOT}")
        await until(lambda: self.registration(name), f"{name} registers", within_s=60)

    async def only(self, *names: str) -> None:
        """Stop all others and wait until they are forgotten."""
        await self.stop(*(name for name in self.processes if name not in names))

        async def gone() -> bool:
            return {one.name for one in (await registrations(self.bus)).values()} <= set(names)

        await until(gone, "the others are gone")

    async def registration(self, name: str) -> Registration | None:
        found = (await registrations(self.bus)).values()
        return next((one for one in found if one.name == name), None)

    async def stop(self, *names: str) -> None:
        assert await stopped([self.processes.pop(name) for name in names]) == [0] * len(names)

    async def kill(self, name: str) -> None:
        os.kill(self.processes[name].pid, signal.SIGKILL)
        await asyncio.to_thread(self.processes.pop(name).wait)


@pytest.fixture
async def fleet(deployment: Deployment, running: Running) -> AsyncIterator[Fleet]:
    bus = await connect(deployment.state.nats_url, role="client", name="test")
    yield Fleet(deployment, bus, running)
    await bus.close()


@pytest.fixture
async def http(deployment: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=deployment.urls[0], trust_env=False, timeout=60, limits=limits) as made:
        yield made


def body(number: int, count: int = 48, **more: Any) -> dict[str, Any]:
    prompt = words(60) + f" and then {number}"
    return {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": count, "ignore_eos": True, **more}


async def ask(http: httpx.AsyncClient, number: int, **more: Any) -> str:
    answer = await ok(http.post(PATH, json=body(number, **more)))
    text: str = answer.json()["choices"][0]["text"]
    return text


async def answers_of(http: httpx.AsyncClient, worker: str) -> list[str]:
    """What one worker answers, asked by its name."""
    return list(await asyncio.gather(*(ask(http, number, worker=worker) for number in range(PROMPTS))))


def lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


async def test_a_worker_of_another_model_under_the_same_name_is_given_nothing(
    fleet: Fleet, http: httpx.AsyncClient, deployment: Deployment, models: tuple[Path, Path]
) -> None:
    await fleet.only()
    await fleet.start("foreign", DEMO, engine="mock")  # first: it would serve, as the oldest
    foreign = await fleet.registration("foreign")
    assert foreign is not None

    async def refused() -> bool:
        page = await metrics(deployment.urls[0])
        return any(key.startswith("penstock_gateway_workers_refused{") and foreign.worker in key for key in page)

    await until(refused, "the gateway says that it refuses the worker")
    ready = await http.get("/health/ready")
    assert ready.status_code == 503
    asked = [asyncio.create_task(ask(http, number)) for number in range(PROMPTS)]  # before any worker is known
    await fleet.start("one-a", models[0])
    expected = await answers_of(http, "one-a")
    assert list(await asyncio.gather(*asked)) == expected
    assert [await ask(http, number) for number in range(PROMPTS)] == expected
    log = deployment.logs("gateway")
    assert "worker_refused" in log
    assert foreign.tokenizer in log


@pytest.mark.slow  # router/test_revisions has which revision serves
async def test_a_rolling_upgrade_fails_no_request_and_mixes_no_answer(
    fleet: Fleet, http: httpx.AsyncClient, models: tuple[Path, Path]
) -> None:
    one, two = models
    await fleet.only("one-a")
    await fleet.start("one-a", one)
    old = await answers_of(http, "one-a")
    answers: list[tuple[int, str]] = []
    upgraded = asyncio.Event()

    async def load(number: int) -> None:
        while not upgraded.is_set():
            answers.append((number, await ask(http, number)))
            await asyncio.sleep(0.1)  # some load, not all that there can be

    clients = [asyncio.create_task(load(number)) for number in range(PROMPTS)]
    await fleet.start("two-a", two)  # it stands by
    new = await answers_of(http, "two-a")
    assert all(a != b for a, b in zip(old, new, strict=True))
    served_by_old = len(answers)
    await fleet.stop("one-a")
    before = len(answers)

    async def some_more() -> bool:
        return len(answers) > before + 2 * PROMPTS

    await until(some_more, "the new revision answers", within_s=30)
    upgraded.set()
    await asyncio.gather(*clients)
    assert all(text == old[number] for number, text in answers[:served_by_old])
    assert all(text in (old[number], new[number]) for number, text in answers)
    assert all(text == new[number] for number, text in answers[-PROMPTS:])
    assert "revision_stands_by" in fleet.deployment.logs("gateway")


@pytest.mark.slow  # router/test_revisions has the choice
async def test_a_killed_workers_answers_continue_with_the_weights_they_began_with(
    fleet: Fleet, http: httpx.AsyncClient, models: tuple[Path, Path]
) -> None:
    one, two = models
    assert revision(one) != revision(two)
    await fleet.only("two-a")
    await fleet.start("two-a", two)  # first: the oldest revision serves
    await asyncio.gather(fleet.start("two-b", two), fleet.start("one-a", one))
    expected, other = await answers_of(http, "two-a"), await answers_of(http, "one-a")
    assert all(a != b for a, b in zip(expected, other, strict=True))
    seen = 0

    async def streamed(number: int) -> str:
        nonlocal seen
        text = ""
        async with http.stream("POST", PATH, json=body(number, stream=True)) as answer:
            async for line in answer.aiter_lines():
                for event in lines(line):
                    assert "error" not in event, event
                    text += event["choices"][0]["text"]
                    seen += 1
        return text

    async def well_under_way() -> bool:
        return seen > PROMPTS * 8

    streams = [asyncio.create_task(streamed(number)) for number in range(PROMPTS)]
    await until(well_under_way, "the streams run")
    await fleet.kill("two-a")
    assert list(await asyncio.gather(*streams)) == expected


async def test_a_canary_gets_its_share_and_each_answer_is_wholly_of_the_revision_that_it_was_given_to(
    fleet: Fleet, models: tuple[Path, Path]
) -> None:
    await fleet.start("old", models[0], engine="mock")
    await fleet.only("old")
    await fleet.start("new", models[1], engine="mock")
    port = free_port()
    flags = ("--model", str(models[0]), "--served-model-name", "tiny", "--http-port", str(port), "--canary", "50%")
    gateway = fleet.deployment.also("gateway", *flags)
    await asyncio.to_thread(gateway.wait_for, "gateway_listening")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:
        await asyncio.gather(*(ask(http, number, user="canary") for number in range(40)))
    given = Counter[str]()
    for request in await accepted(fleet.bus, "canary"):
        _, end = await ending(fleet.bus, request.id)
        assert end.timings.made_with is not None
        assert end.timings.made_with.revision == request.revision
        given[request.revision] += 1
    assert given.keys() == {revision(model) for model in models}
    assert given.total() == 40
