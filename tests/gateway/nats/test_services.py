"""Asks and reads at a gateway that stops, on a real broker."""

import asyncio
import json

import pytest

from gateway.nats import services
from infra.bus.connection import Bus
from schemas.subjects import HEADER_REQUEST
from tests.gateway.nats.support import (
    BODY,
    WITHIN_S,
    Engine,
    Running,
    Submitter,
    answering,
    error_of,
    finals,
    number_of,
)
from tests.infra.bus.support import eventually

ASKED, READ = "_INBOX.asked", "_INBOX.read"


@pytest.fixture
async def client(running: Running, bus: Bus) -> Submitter:
    client = Submitter(bus)
    await client.listen(ASKED, READ)
    return client


async def ask(bus: Bus, *, stream: bool) -> None:
    body = json.dumps({**BODY, "stream": stream}).encode()
    await bus.nc.publish(f"{bus.subjects.namespace}.ask.tiny", body, reply=ASKED)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_gateway_that_stops_finishes_asks_and_reads(
    client: Submitter, engine: Engine, running: Running, bus: Bus, stream: bool
) -> None:
    await ask(bus, stream=stream)
    await eventually(lambda: engine.accepted)
    [request] = engine.accepted
    await engine.stream(request, 0, 1)
    await bus.nc.publish(f"{bus.subjects.namespace}.read", json.dumps({"id": request.id}).encode(), reply=READ)
    await eventually(lambda: running.gateway.open_requests and len(running.api._services._tasks) == 2)
    stopping = asyncio.create_task(running.stop(WITHIN_S))
    await eventually(lambda: not running.api._services._subs)
    await engine.stream(request, 1, 1, end=True)
    messages = await client.got(lambda messages: finals(messages) == 2)
    assert {error_of(each) for each in messages} == {""}
    await stopping


async def test_asks_that_arrive_as_a_gateway_stops_are_answered(
    client: Submitter, engine: Engine, running: Running, bus: Bus
) -> None:
    async with answering(engine):
        for _ in range(50):
            await ask(bus, stream=False)
        await bus.nc.flush()  # they are on their way to the gateway
        await running.stop(WITHIN_S)
        messages = await client.got(lambda messages: finals(messages) == 50)
    assert {error_of(each) for each in messages} == {""}


@pytest.mark.parametrize("stream", [True, False])
async def test_asks_and_reads_that_a_gateway_cannot_finish_are_told_where_to_go_on(
    client: Submitter, engine: Engine, running: Running, bus: Bus, stream: bool
) -> None:
    await ask(bus, stream=stream)
    await eventually(lambda: engine.accepted)
    [request] = engine.accepted
    await bus.nc.publish(f"{bus.subjects.namespace}.read", json.dumps({"id": request.id}).encode(), reply=READ)
    await eventually(lambda: len(running.api._services._tasks) == 2)
    await running.stop(0.0)
    messages = await client.got(lambda messages: len(messages) == 2)
    assert {each.subject for each in messages} == {ASKED, READ}
    assert {(number_of(each), error_of(each)) for each in messages} == {(-1, "shutting_down")}
    ids = {each.subject: (each.headers or {}).get(HEADER_REQUEST) for each in messages}
    assert ids[ASKED] == request.id
    assert request.id in json.loads(messages[0].data)["error"]["message"]


async def test_reads_of_one_tenant_do_not_keep_out_those_of_another(
    client: Submitter, engine: Engine, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "MAX_READS", 1)
    await ask(bus, stream=True)
    await eventually(lambda: engine.accepted)
    body = json.dumps({"id": engine.accepted[0].id}).encode()
    for tenant in ("default", "default", "acme"):
        await bus.nc.publish(f"{bus.subjects.namespace}.read.{tenant}", body, reply=READ)
    messages = await client.got(lambda messages: len(messages) == 2)
    assert sorted(map(error_of, messages)) == ["queue_full", "request_not_found"]
