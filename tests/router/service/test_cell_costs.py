"""What a router answers when a gateway asks what a request would cost in its cell, on a real nats-server."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.router.service import cell_costs
from penstock.router.service.cell_costs import CellCosts
from penstock.schemas import fleet, wire
from penstock.schemas.cells import OWN_WORK, CellCost, CellLoads, decode_cost, decode_loads
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import eventually
from tests.router.support import Clients, routing
from tests.workers.support import MODEL, LogClient, request


async def cost(log: LogClient, asked: GenerateRequest) -> CellCost:
    without = msgspec.structs.replace(asked, prompt=b"", prompt_length=asked.prompt_tokens)
    reply = await log.bus.nc.request(log.bus.subjects.cost, wire.encode(without), timeout=5)
    return decode_cost(reply.data)


async def test_the_cost_of_a_request_is_the_one_that_its_decision_has(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, log: LogClient
) -> None:
    async with routing(broker, pipeline) as one:
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
    async with routing(broker, pipeline) as one:
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


async def test_loads_are_published_while_gateways_ask_for_them(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, log: LogClient
) -> None:
    seen: list[CellLoads] = []

    async def take(message: object) -> None:
        seen.append(decode_loads(message.data))  # type: ignore[attr-defined]

    await log.bus.nc.subscribe(log.bus.subjects.loads, cb=take)
    async with routing(broker, pipeline) as one:
        stub = await clients.stub("w1")
        await one.knows("w1")
        assert not seen, "no gateway has asked"
        await log.bus.nc.publish(log.bus.subjects.cost)  # as one of several cells does
        await eventually(lambda: any(each.models for each in seen))
        (model,) = seen[-1].models
        assert (model.model, len(model.targets), model.targets[0].uncomputed) == (MODEL, 1, 0)
        asked = request()
        await clients.ask(asked)
        await eventually(lambda: seen[-1].models[0].targets[0].computing == 1)
        assert seen[-1].models[0].targets[0].uncomputed == asked.prompt_tokens
        await stub.change(load=fleet.Load(work_ns=2_000))
        await eventually(lambda: seen[-1].models[0].work_ns == 2_000)
        await clients.stub("w2", load=fleet.Load(work_ns=45_000))
        await eventually(lambda: seen[-1].models[0].work_ns == 45_000)


async def test_loads_are_published_no_longer_when_no_gateway_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways of a deployment in one cell never do."""
    published, answers = list[bytes](), list[Any]()

    async def subscribe(subject: str, cb: object) -> None:
        answers.append(cb)

    async def publish(subject: str, payload: bytes) -> None:
        published.append(payload)

    nc = SimpleNamespace(subscribe=subscribe, publish=publish)
    bus = SimpleNamespace(nc=nc, subjects=Subjects(), connected=True, clock=SimpleNamespace(now_ns=time.time_ns))
    parts: dict[str, Any] = {"tracker": SimpleNamespace(models=dict), "decider": None, "held": []}
    costs = CellCosts(cast(Any, bus), "r", **parts, owns=lambda model: True, registrations=list)
    running = asyncio.create_task(costs.run())
    await eventually(lambda: answers)
    assert not costs.wanted
    question = SimpleNamespace(data=b"", reply="")
    await answers[0](question)
    assert costs.wanted
    await eventually(lambda: published)
    monkeypatch.setattr(cell_costs, "WANTED_S", 0.0)
    await eventually(lambda: not costs._asked.is_set())  # it waits to be asked
    monkeypatch.undo()
    before = len(published)
    await answers[0](question)
    await eventually(lambda: len(published) > before)
    running.cancel()
