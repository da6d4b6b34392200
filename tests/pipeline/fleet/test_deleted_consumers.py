"""Consumers and streams that somebody deletes on the broker: made again within seconds, and said so."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import httpx
import nats
import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.nats_server.apply_streams import apply
from penstock.schemas.streams import topology
from tests.pipeline.support import Deployment, Oracle, ok, registrations, until, words

pytestmark = pytest.mark.timeout(150)

COUNT = 20
LONG = 150  # about 1.8 s
Ask = Callable[[int], Awaitable[None]]


def body(seed: int) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": words(20, seed),
        "max_tokens": COUNT,
        "temperature": 0,
        "ignore_eos": True,
        "timeout_s": 30,
    }


@pytest.fixture
def ask(http: httpx.AsyncClient, oracle: Oracle) -> Ask:
    async def answered(seed: int) -> None:
        answer = await ok(http.post("/v1/completions", json=body(seed)))
        assert answer.json()["choices"][0]["text"] == oracle.answer(body(seed), COUNT)

    return answered


async def test_a_worker_whose_consumer_was_deleted_gets_jobs_again(fleet: Deployment, fleet_bus: Bus, ask: Ask) -> None:
    await ask(1)
    stream = fleet_bus.subjects.stream("WORK")
    workers = [each.worker for each in (await registrations(fleet_bus)).values()]
    for worker in workers:
        assert await fleet_bus.js.delete_consumer(stream, worker)
    for seed in range(2, 8):  # to each of them
        await ask(seed)
    assert {each.worker for each in (await registrations(fleet_bus)).values()} == set(workers)
    assert fleet.logs("worker").count("consumer_made_again") == len(workers)
    for worker in workers:  # nothing that had been run came again
        info = await fleet_bus.js.consumer_info(stream, worker)
        assert info.delivered is not None
        assert info.delivered.consumer_seq <= 7


async def test_routers_make_their_consumers_again(fleet: Deployment, fleet_bus: Bus, ask: Ask) -> None:
    stream = fleet_bus.subjects.stream("REQUESTS")
    for priority in ("interactive", "standard", "batch"):
        assert await fleet_bus.js.delete_consumer(stream, f"router-{priority}")
    await ask(10)
    assert "consumer_made_again" in fleet.logs("router")


async def test_gateways_make_theirs_of_submissions_again(fleet: Deployment, fleet_bus: Bus, oracle: Oracle) -> None:
    assert await fleet_bus.js.delete_consumer(fleet_bus.subjects.stream("SUBMIT"), "gateway")
    client = await nats.connect(fleet.state.client_nats_url)
    try:
        answers = await client.subscribe("ps.answer.>")
        await client.flush()
        payload = httpx.Request("POST", "http://x", json=body(20)).content
        await client.jetstream().publish("ps.submit.tiny", payload, headers={"Nats-Msg-Id": "deleted-20"})
        answer = await answers.next_msg(timeout=40)
        assert oracle.answer(body(20), COUNT) in httpx.Response(200, content=answer.data).json()["choices"][0]["text"]
    finally:
        await client.close()


async def test_streaming_continues_after_tokens_were_deleted_and_made_again(fleet_bus: Bus, ask: Ask) -> None:
    await ask(30)
    stream = fleet_bus.subjects.stream("TOKENS")
    assert await fleet_bus.js.delete_stream(stream)
    await apply(fleet_bus.nc, topology(fleet_bus.subjects))
    for seed in range(31, 35):
        await ask(seed)


@pytest.mark.parametrize("name", ["REQUESTS", pytest.param("WORK", marks=pytest.mark.slow)])
async def test_requests_are_answered_after_their_stream_was_deleted_and_made_again(
    fleet_bus: Bus, ask: Ask, name: str
) -> None:
    """By those that have read more of the stream before than there is in the new one, too."""
    for seed in range(60, 66):
        await ask(seed)
    assert await fleet_bus.js.delete_stream(fleet_bus.subjects.stream(name))
    whole = topology(fleet_bus.subjects)
    await apply(fleet_bus.nc, replace(whole, consumers=()))
    for seed in range(66, 69):
        await ask(seed)
    await apply(fleet_bus.nc, whole)


@pytest.mark.parametrize("at_once", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["MEMORY_CONTENTS", "MEMORY_TOKENS"])
async def test_requests_with_no_store_are_answered_although_a_stream_of_theirs_was_deleted(
    fleet: Deployment, oracle: Oracle, fleet_bus: Bus, name: str, at_once: bool
) -> None:
    """Those that run meanwhile, too, also if no later one has a gateway look at the stream."""
    stream = fleet_bus.subjects.stream(name)
    running, later = ([body(first + number) for number in range(4)] for first in (40, 50))
    for asked in running:
        asked["max_tokens"] = LONG
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=url, trust_env=False, timeout=40))
            for url in fleet.urls[:2]
        ]

        async def answered(number: int, asked: dict[str, Any]) -> None:
            answer = await clients[number % 2].post("/v1/completions", json=asked | {"no_store": True})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == oracle.answer(asked, asked["max_tokens"])

        begun = [asyncio.create_task(answered(number, asked)) for number, asked in enumerate(running)]
        await until(lambda: has_tokens(fleet_bus), "they run")
        assert await fleet_bus.js.delete_stream(stream)
        if not at_once:
            await asyncio.gather(*begun)
        await asyncio.gather(*begun, *(answered(number, asked) for number, asked in enumerate(later)))
    assert (await fleet_bus.js.stream_info(stream)).config.name == stream, "it was declared again"


async def has_tokens(bus: Bus) -> bool:
    return (await bus.js.stream_info(bus.subjects.stream("MEMORY_TOKENS"))).state.messages > 0


async def test_a_consumer_that_cannot_be_made_is_named_by_health_and_doctor(
    fleet: Deployment, fleet_bus: Bus, http: httpx.AsyncClient, ask: Ask
) -> None:
    """The routers' stream itself is gone, so that nobody can make its consumers."""
    stream = fleet_bus.subjects.stream("REQUESTS")
    assert await fleet_bus.js.delete_stream(stream)

    async def named() -> bool:
        answer = await http.get("/health")
        return answer.status_code == 503 and "streams apply" in answer.text

    await until(named, "health says what is missing")
    assert "start one with 'penstock router'" not in (await http.get("/health")).text
    await apply(fleet_bus.nc, topology(fleet_bus.subjects))

    async def ready() -> bool:
        return (await http.get("/health/ready")).status_code == 200

    await until(ready, "it is ready again")
    await ask(40)
