"""Two cells while the broker of one is away: what runs in the other goes on, and nothing runs twice."""

import asyncio
import base64
import contextlib
import json
import os
import random
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from penstock.infra.model.modeldir import MODELS
from penstock.schemas.requests import cell_in
from tests.demo_model import vision
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, Event, Oracle, joined, parse_sse, until, words
from tests.pipeline.test_cells import command

HOME, OTHER = "nats", "nats-1"
REFUSED_S = 15.0  # within which a request is accepted or refused
COUNT = 300


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment) -> Deployment:
    return new_deployment("--cells", "2", "--gateways", "2", "--workers", "4", "--mock-speedup", "1")


@pytest.fixture
async def gateways(deployment: Deployment) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Clients of the two gateways, each of which uses its own nearest cell."""
    made = [httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) for url in deployment.urls]

    async def settled() -> bool:
        found = [await asked(http, chat(900)) for http in made]
        return [cell_in(_id_of(each)) for each in found if each.status_code == 200] == [0, 1]

    await until(settled, "each gateway uses its nearest cell", 60)
    yield made
    for each in made:
        await each.aclose()


def chat(seed: int, count: int = 4, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": words(20, seed)}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": count, "ignore_eos": True, **more}


async def asked(http: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> httpx.Response:
    return await http.post("/v1/chat/completions", json=body, headers=headers)


def _id_of(answer: httpx.Response) -> str:
    return str(answer.json()["id"]).removeprefix("chatcmpl-")


def pid_of(deployment: Deployment, name: str) -> int:
    return next((each.pid or 0 for each in deployment.state.processes if each.name == name), 0)


@contextlib.asynccontextmanager
async def away(deployment: Deployment, name: str) -> AsyncIterator[None]:
    """A broker is killed whenever it is started again, before it listens."""
    folder = deployment.data_dir / "cells" / "1" if name == OTHER else deployment.data_dir
    killed = asyncio.Event()

    async def kill() -> None:
        pid, before = pid_of(deployment, name), 0
        while True:
            if pid != before:  # once: a pid may be anyone's later
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                before = pid
                killed.set()
            await asyncio.sleep(0.005)
            with contextlib.suppress(OSError, ValueError):
                pid = int((folder / "nats.pid").read_text())

    killing = asyncio.create_task(kill())
    try:
        await killed.wait()
        yield
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)


async def test_while_home_is_away_running_answers_continue_elsewhere_also_when_their_worker_dies(
    deployment: Deployment, gateways: list[httpx.AsyncClient], oracle: Oracle
) -> None:
    body = chat(1, COUNT)
    async with gateways[1].stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
        parts = answer.aiter_bytes()
        raw = await anext(parts)
        assert cell_in(answer.headers["x-request-id"]) == 1
        async with away(deployment, HOME):
            for name in ("worker-1", "worker-3"):  # all that could go on with it, until they are started again
                os.kill(pid_of(deployment, name), signal.SIGKILL)
            async for part in parts:
                raw += part
    events = b"".join(part + b"\n\n" for part in raw.split(b"\n\n") if part.startswith((b"id: ", b"data: ")))
    assert joined(parse_sse(events)).strip() == oracle.answer(body, COUNT).strip()

    async def accepted() -> bool:
        return (await asked(gateways[1], chat(3))).status_code == 200

    await until(accepted, "home is back")


@contextlib.asynccontextmanager
async def without_workers(deployment: Deployment, *names: str) -> AsyncIterator[None]:
    """Workers are killed whenever they are started again."""

    async def kill() -> None:
        killed: set[int] = set()
        while True:
            for pid in {pid_of(deployment, name) for name in names} - killed - {0}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            await asyncio.sleep(0.05)

    killing = asyncio.create_task(kill())
    try:
        yield
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)


def migrations(deployment: Deployment) -> int:
    """How many times requests have left the second cell."""
    return deployment.logs("router-1").count("requests_migrated")


async def until_migrated(deployment: Deployment, before: int) -> None:
    async def migrated() -> bool:
        return migrations(deployment) > before

    await until(migrated, "the request has left its cell")


def events_of(raw: bytes) -> list[Event]:
    kept = (part + b"\n\n" for part in raw.split(b"\n\n") if part.startswith((b"id: ", b"data: ")))
    return parse_sse(b"".join(kept))


@pytest.mark.parametrize("no_store", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["stored", "no_store"])
async def test_an_answer_whose_cell_has_lost_all_workers_continues_in_another_cell(
    deployment: Deployment, gateways: list[httpx.AsyncClient], oracle: Oracle, no_store: bool
) -> None:
    body = chat(5 + no_store, COUNT)
    more = {"stream": True, "no_store": no_store, "stream_options": {"include_usage": True}}
    async with gateways[1].stream("POST", "/v1/chat/completions", json=body | more) as answer:
        parts = answer.aiter_bytes()
        raw = await anext(parts)
        request_id = answer.headers["x-request-id"]
        assert cell_in(request_id) == 1
        async with without_workers(deployment, "worker-1", "worker-3"):
            async for part in parts:
                raw += part
    events = events_of(raw)
    assert joined(events).strip() == oracle.answer(body, COUNT).strip()
    usages = [each.body["usage"] for each in events if each.data != "[DONE]" and each.body.get("usage")]
    assert [each["completion_tokens"] for each in usages] == [COUNT]
    for http in gateways:
        found = (await http.get(f"/v1/requests/{request_id}")).json()
        assert found["state"] == "done", found


@pytest.mark.slow  # both cells are without workers for longer than requests wait for one before they leave
async def test_an_answer_that_the_other_cell_cannot_run_either_continues_when_workers_are_back(
    deployment: Deployment, gateways: list[httpx.AsyncClient], oracle: Oracle
) -> None:
    body = chat(9, COUNT)
    returned = re.compile("returned: cell 0 as ([0-9a-f-]{36}): this cell has no worker")
    async with gateways[1].stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
        parts = answer.aiter_bytes()
        raw = await anext(parts)
        request_id = answer.headers["x-request-id"]
        assert cell_in(request_id) == 1
        before = migrations(deployment)
        async with without_workers(deployment, "worker-1", "worker-3"):
            await until_migrated(deployment, before)
            async with without_workers(deployment, "worker-0", "worker-2"):

                async def is_back() -> bool:
                    return returned.search(deployment.logs("router-1")) is not None

                await until(is_back, "its own cell has it again")
        async for part in parts:
            raw += part
    assert joined(events_of(raw)).strip() == oracle.answer(body, COUNT).strip()
    found = returned.search(deployment.logs("router-1"))
    assert found is not None
    assert (await gateways[0].get(f"/v1/requests/{found[1]}")).status_code == 200

    async def done() -> bool:
        return bool((await gateways[0].get(f"/v1/requests/{request_id}")).json()["state"] == "done")

    await until(done, "it has its record")
    await command(deployment, "forget", "--yes", request_id)
    for gone in (request_id, found[1]):
        assert (await gateways[0].get(f"/v1/requests/{gone}")).status_code == 404


@pytest.mark.slow  # fleet/test_client_survival kills all gateways
async def test_it_also_continues_when_all_gateways_are_killed_meanwhile(
    deployment: Deployment, gateways: list[httpx.AsyncClient], oracle: Oracle
) -> None:
    """Whoever carries it is replaced: the request is found in the other cell under the same id."""
    body = chat(7, COUNT)
    before = migrations(deployment)
    async with without_workers(deployment, "worker-1", "worker-3"):
        async with gateways[1].stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            request_id = answer.headers["x-request-id"]
            await anext(answer.aiter_bytes())
            await until_migrated(deployment, before)
            for name in ("gateway-0", "gateway-1"):
                os.kill(pid_of(deployment, name), signal.SIGKILL)

        async def done() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return bool((await gateways[0].get(f"/v1/requests/{request_id}")).json().get("state") == "done")
            return False

        await until(done, "its end is in the log of its own cell")
    again = await gateways[1].get(f"/v1/requests/{request_id}/stream")
    assert joined(parse_sse(again.content)).strip() == oracle.answer(body, COUNT).strip()
    async with asyncio.timeout(60):
        shown = json.loads(await command(deployment, "inspect", request_id, "--json"))
    assert cell_in(shown["request"]["ran_as"]) == 0, shown["request"]
    listed = [json.loads(line) for line in (await command(deployment, "requests", "--json")).splitlines()]
    assert [each["id"] for each in listed].count(request_id) == 1
    ran_as = shown["request"]["ran_as"]
    assert ran_as not in {each["id"] for each in listed}, "it is no request of its own"
    await command(deployment, "forget", "--yes", request_id)
    for gone in (request_id, ran_as):
        assert (await gateways[0].get(f"/v1/requests/{gone}")).status_code == 404


@pytest.mark.slow  # the answer that moves is above
async def test_a_request_without_a_worker_in_its_cell_can_be_cancelled_where_it_runs(
    deployment: Deployment, gateways: list[httpx.AsyncClient]
) -> None:
    body = chat(8, 4000)
    before = migrations(deployment)
    async with without_workers(deployment, "worker-1", "worker-3"):
        async with gateways[1].stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
            request_id = answer.headers["x-request-id"]
            await anext(answer.aiter_bytes())
            await until_migrated(deployment, before)

        async def cancelled() -> bool:
            return bool((await gateways[0].get(f"/v1/requests/{request_id}")).json()["state"] == "cancelled")

        await until(cancelled, "the other cell has stopped it")


@pytest.mark.slow
async def test_while_the_broker_of_a_cell_is_away_its_keys_wait_for_it_and_gateways_use_the_other(
    deployment: Deployment, gateways: list[httpx.AsyncClient]
) -> None:
    key = {"Idempotency-Key": "of cell 1"}
    first = await asked(gateways[1], chat(10), **key)
    assert cell_in(_id_of(first)) == 1
    pid = pid_of(deployment, "gateway-1")
    async with away(deployment, OTHER):
        async with asyncio.timeout(REFUSED_S + 3):
            for answer in await asyncio.gather(*(asked(http, chat(10), **key) for http in gateways)):
                assert answer.status_code == 503, answer.text
                assert answer.json()["error"]["code"] == "broker_unavailable"
        os.kill(pid, signal.SIGTERM)

        async def serves() -> bool:
            if pid_of(deployment, "gateway-1") in (0, pid):
                return False
            with contextlib.suppress(httpx.HTTPError):
                answer = await asked(gateways[1], chat(20))
                return answer.status_code == 200 and cell_in(_id_of(answer)) == 0
            return False

        await until(serves, "the gateway has ended, and another one serves without that cell")
    said = deployment.logs("gateway-1")
    assert "stop_timeout" not in said
    assert "stop_incomplete" not in said

    async def answered() -> bool:
        again = await asked(gateways[0], chat(10), **key)
        assert again.status_code == 503 or _id_of(again) == _id_of(first)
        return again.status_code == 200

    await until(answered, "its cell is back")


@pytest.mark.slow
async def test_images_go_with_their_request(new_deployment: NewDeployment) -> None:
    flags = ("--cells", "2", "--gateways", "2", "--workers", "2", "--mock-speedup", "1", "--model")
    deployment = new_deployment(*flags, str(MODELS / "demo-vision"))
    raw = base64.b64encode(vision.png(vision.scene(random.Random(7), True))).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{raw}"}},
        {"type": "text", "text": "What do you see?"},
    ]
    messages = [{"role": "user", "content": content}]
    body = {"model": "demo-vision", "messages": messages, "temperature": 0, "max_tokens": 150, "ignore_eos": True}

    async def streamed(http: httpx.AsyncClient, *, disturbed: bool, no_store: bool = False) -> str:
        asked = body | {"stream": True, "no_store": no_store}
        async with contextlib.AsyncExitStack() as stack:
            answer = await stack.enter_async_context(http.stream("POST", "/v1/chat/completions", json=asked))
            parts = answer.aiter_bytes()
            said = await anext(parts)
            assert cell_in(answer.headers["x-request-id"]) == 1
            if disturbed:
                await stack.enter_async_context(without_workers(deployment, "worker-1"))
            async for part in parts:
                said += part
        return joined(events_of(said))

    async with httpx.AsyncClient(base_url=deployment.urls[1], trust_env=False, timeout=60) as http:

        async def settled() -> bool:
            answer = await asked(http, body | {"max_tokens": 2})
            return answer.status_code == 200 and cell_in(_id_of(answer)) == 1

        await until(settled, "the cell is used")
        whole = await streamed(http, disturbed=False)
        assert await streamed(http, disturbed=True, no_store=True) == whole
        await until(settled, "its worker is back")
        assert await streamed(http, disturbed=True) == whole


@pytest.mark.slow  # there has to be work left when a worker has started again
async def test_in_overload_a_cell_with_room_takes_what_another_one_holds(
    new_deployment: NewDeployment, oracle: Oracle
) -> None:
    flags = ("--cells", "2", "--gateways", "2", "--workers", "2", "--max-running", "2", "--mock-speedup", "1")
    deployment = new_deployment(*flags)
    bodies = [chat(20 + number, COUNT) for number in range(14)]
    async with httpx.AsyncClient(base_url=deployment.urls[0], trust_env=False, timeout=60) as http:
        async with without_workers(deployment, "worker-0"):

            async def is_alone() -> bool:
                answer = await asked(http, chat(19))
                return answer.status_code == 200 and cell_in(_id_of(answer)) == 1

            await until(is_alone, "one cell has no worker")
            asking = [asyncio.create_task(asked(http, body)) for body in bodies]

            async def are_there() -> bool:
                lines = (await command(deployment, "requests", "-n", "100", "--json")).splitlines()
                states = [json.loads(line)["state"] for line in lines]
                return states.count("queued") + states.count("running") == len(bodies)

            await until(are_there, "the other cell has them all")
        answers = await asyncio.gather(*asking)
    for body, answer in zip(bodies, answers, strict=True):
        assert cell_in(_id_of(answer)) == 1
        assert answer.json()["choices"][0]["message"]["content"].strip() == oracle.answer(body, COUNT).strip()
    listed = [json.loads(line) for line in (await command(deployment, "requests", "-n", "100", "--json")).splitlines()]
    ids = {_id_of(each) for each in answers}
    moved = [each for each in listed if each["ran_as"] and each["id"] in ids]
    assert {cell_in(each["ran_as"]) for each in moved} == {0}
    assert all(each["attempts"] == 1 for each in moved), "no worker had got them before"
