"""What a router answers when a gateway asks what a request would cost in its cell, on a real nats-server."""

import asyncio

import msgspec
import pytest
from nats.errors import NoRespondersError

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas import wire
from penstock.schemas.cells import OWN_WORK, CellCost, CellLoads, decode_cost, decode_loads
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import eventually
from tests.router.support import Clients, Routing, routing
from tests.workers.support import MODEL, LogClient, request


async def cost(log: LogClient, asked: GenerateRequest) -> CellCost:
    without = msgspec.structs.replace(asked, prompt=b"", prompt_length=asked.prompt_tokens)
    reply = await log.bus.nc.request(log.bus.subjects.cost, wire.encode(without), timeout=5)
    return decode_cost(reply.data)


async def test_the_cost_of_a_request_is_the_one_that_its_decision_has(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, log: LogClient
) -> None:
    async with routing(broker, pipeline, cells=2) as one:
        await clients.stub("w1")
        await one.knows("w1")
        asked = request()
        before = await cost(log, asked)
        assert before.tokens > 0
        assert (before.full, before.held) == (False, 0)
        assert not one.folded, "nothing was placed"
        await clients.ask(asked)
        _, job = await clients.placed(asked)
        assert job.decision.candidates[0].score == before.tokens
        assert (await cost(log, request())).tokens < before.tokens, "the worker will have the blocks of this prompt"


async def test_in_overload_a_request_costs_what_is_left_of_its_prompt_and_what_is_held(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, log: LogClient
) -> None:
    async with routing(broker, pipeline, cells=2) as one:
        await clients.stub("w1", slots=1)
        await one.knows("w1")
        running, held, other = request(), request(range(100, 108)), request(range(200, 208))
        await clients.ask(running)
        await clients.placed(running)
        assert (await cost(log, held)).tokens == OWN_WORK * held.prompt_tokens, "nobody has its prompt"
        await clients.ask(held)
        await eventually(lambda: one.waiting == [held.id])
        async with asyncio.timeout(10):
            while await cost(log, other) != CellCost(OWN_WORK * other.prompt_tokens, True, held.prompt_tokens):
                pass  # what is held is counted 50 times a second
        assert await cost(log, request(range(100, 108))) == CellCost(0.0, True, held.prompt_tokens)


async def test_loads_are_published_while_there_are_several_cells(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, log: LogClient
) -> None:
    seen: list[CellLoads] = []

    async def take(message: object) -> None:
        seen.append(decode_loads(message.data))  # type: ignore[attr-defined]

    await log.bus.nc.subscribe(log.bus.subjects.loads, cb=take)
    async with routing(broker, pipeline, cells=2) as one:
        await clients.stub("w1")
        await one.knows("w1")
        await eventually(lambda: any(each.models for each in seen))
        (model,) = seen[-1].models
        assert (model.model, len(model.targets), model.targets[0].uncomputed) == (MODEL, 1, 0)
        asked = request()
        await clients.ask(asked)
        await eventually(lambda: seen[-1].models[0].targets[0].computing == 1)
        assert seen[-1].models[0].targets[0].uncomputed == asked.prompt_tokens


async def test_the_router_of_a_deployment_in_one_cell_answers_nobody(one: Routing, log: LogClient) -> None:
    with pytest.raises(NoRespondersError):
        await cost(log, request())
