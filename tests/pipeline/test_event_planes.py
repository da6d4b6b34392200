"""Ranks and event planes with the real processes: a prompt goes back to its worker and rank, whoever restarted."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence

import httpx
import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.launch.state import Running
from penstock.schemas import block_hashes, kv, wire
from penstock.schemas.jobs import Decision
from penstock.workers.engines.events.relay import EventPublisher
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.shared.test_prefix_reuse import BLOCK, ask_and_settle, cached, decision_of, published, text_body
from tests.pipeline.support import Deployment, Oracle, bus_of, http_of, registrations, stopped, token_prompt, until

RANKS = 4


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment) -> Deployment:
    return new_deployment("--workers", "0")


bus = bus_of("deployment")
http = http_of("deployment")


@pytest.fixture(params=[pytest.param("nats", marks=pytest.mark.slow), "zmq"])
async def plane(request: pytest.FixtureRequest, deployment: Deployment, bus: Bus) -> AsyncIterator[str]:
    """Two workers with ranks on an event plane."""
    flags = ("--mock-ranks", str(RANKS), "--event-plane", request.param)
    ports = ("--kv-events-port", "0") if request.param == "zmq" else ()
    workers = await deployment.also_workers(*flags, *ports, count=2)
    yield request.param
    assert await stopped(workers) == [0, 0]

    async def gone() -> bool:
        return not await registrations(bus)

    await until(gone, "the workers left")


def place(decision: Decision) -> tuple[str, int]:
    return decision.chosen, decision.rank


def overlap(decision: Decision) -> int:
    """Blocks that the chosen place was known to hold."""
    [line] = [each for each in decision.candidates if (each.worker, each.rank) == place(decision)]
    return line.overlap_blocks


async def repeated(http: httpx.AsyncClient, bus: Bus, oracle: Oracle, prompts: Sequence[list[int]]) -> list[Decision]:
    """Ask again what was asked before: each is cached but for its end."""
    decisions = []
    for prompt in prompts:
        body = text_body(prompt)
        answer = await http.post("/v1/completions", json=body)
        assert cached(answer) == 10 * BLOCK
        assert answer.json()["choices"][0]["text"] == oracle.answer(body, 3)
        decisions.append(await decision_of(bus, answer))
    return decisions


def router(deployment: Deployment) -> Running:
    [found] = [process for process in deployment.state.processes if process.role == "router"]
    return found


async def test_prompts_go_back_to_their_worker_and_rank_also_when_the_router_has_restarted(
    deployment: Deployment, http: httpx.AsyncClient, bus: Bus, oracle: Oracle, plane: str
) -> None:
    seed = 1000 if plane == "nats" else 2000
    prompts = [token_prompt(10 * BLOCK + 5, seed + n) for n in range(10)]
    first = [await ask_and_settle(http, bus, text_body(prompt)) for prompt in prompts]
    assert len({place(decision) for decision in first}) > 2, "all went to one place"
    assert {decision.rank for decision in first} <= set(range(RANKS))
    assert all(registration.dp_size == RANKS for registration in (await registrations(bus)).values())
    again = await repeated(http, bus, oracle, prompts)
    assert list(map(place, again)) == list(map(place, first))
    assert {overlap(decision) for decision in again} == {10}

    dumps = deployment.logs("router").count("index_loaded")
    os.kill(router(deployment).pid, signal.SIGKILL)

    async def loaded() -> bool:
        return deployment.logs("router").count("index_loaded") >= dumps + 2

    await until(loaded, "the new router has the workers' dumps", 30)
    after = await repeated(http, bus, oracle, prompts)
    assert list(map(place, after)) == list(map(place, first))
    assert {decision.router for decision in after}.isdisjoint(decision.router for decision in first)


async def test_a_cache_beside_the_engine_draws_requests_until_it_is_gone(
    deployment: Deployment, http: httpx.AsyncClient, bus: Bus
) -> None:
    cache = EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", block_size=BLOCK, rank=2)
    source = f"{cache.endpoint}/{cache.replay.rpartition(':')[2]}"
    flags = ("--mock-ranks", str(RANKS), "--event-plane", "zmq", "--kv-events-port", "0")
    workers = await deployment.also_workers(*flags)
    workers += await deployment.also_workers(*flags, "--kv-events-from", source, "--name", "beside")
    try:
        [revision] = {each.revision for each in (await registrations(bus)).values()}
        one, other = (token_prompt(10 * BLOCK + 5, 3000 + n) for n in range(2))
        names = [
            block_hashes.chain(wire.pack_tokens(prompt), BLOCK, block_hashes.root(revision)) for prompt in (one, other)
        ]
        for digests in names:
            cache.publish([kv.Stored(digests)])
            await published(bus, digests)

        async def folded() -> bool:
            """A router that has restarted reads the first events that follow from the stream, a moment later."""
            seen = await decision_of(bus, await http.post("/v1/completions", json=text_body(token_prompt(2, 1))))
            return seen.kv_seq >= (await bus.js.stream_info(bus.subjects.stream("KV"))).state.last_seq

        await until(folded, "the router has read the cache's events")
        answer = await http.post("/v1/completions", json=text_body(one))
        assert cached(answer) == 0  # the mock takes nothing from it
        decision = await decision_of(bus, answer)
        assert decision.chosen.startswith("beside-")
        assert (decision.rank, overlap(decision)) == (2, 10)
        assert await asyncio.to_thread(cache.close)

        async def dropped() -> bool:
            entries = read(bus, bus.subjects.stream("KV"), bus.subjects.all("kv"))
            events = [event async for entry in entries for event in kv.decode(entry.data).events]
            gone = {
                name for event in events if isinstance(event, kv.Removed) for name in block_hashes.split(event.digests)
            }
            return set(block_hashes.split(names[1])) <= gone

        await until(dropped, "the blocks of the cache that died")
        assert overlap(await decision_of(bus, await http.post("/v1/completions", json=text_body(other)))) == 0
    finally:
        cache.close()
        assert await stopped(workers) == [0, 0]
