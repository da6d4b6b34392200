"""Asks and reads at a gateway that stops, on a real broker."""

import asyncio
import json
from typing import Any

import pytest

from penstock.gateway.nats import services
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.publisher import Ack, Publisher
from penstock.infra.model.modeldir import ModelDir
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.subjects import HEADER_MSG_ID, HEADER_REQUEST, Subjects
from tests.gateway.nats.support import (
    BODY,
    WITHIN_S,
    Engine,
    Running,
    Submitter,
    answering,
    error_of,
    finals,
    gateway_on,
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
    await eventually(lambda: running.gateway.open_requests and len(running.api.services.tasks) == 2)
    stopping = asyncio.create_task(running.stop(WITHIN_S))
    await eventually(lambda: not running.api.services.subscriptions)
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
async def test_asks_and_reads_that_a_gateway_cannot_finish_say_where_to_continue(
    client: Submitter, engine: Engine, running: Running, bus: Bus, stream: bool
) -> None:
    await ask(bus, stream=stream)
    await eventually(lambda: engine.accepted)
    [request] = engine.accepted
    await bus.nc.publish(f"{bus.subjects.namespace}.read", json.dumps({"id": request.id}).encode(), reply=READ)
    await eventually(lambda: len(running.api.services.tasks) == 2)
    await running.stop(0.0)
    messages = await client.got(lambda messages: len(messages) == 2)
    assert {each.subject for each in messages} == {ASKED, READ}
    assert {(number_of(each), error_of(each)) for each in messages} == {(-1, "shutting_down")}
    ids = {each.subject: (each.headers or {}).get(HEADER_REQUEST) for each in messages}
    assert ids[ASKED] == request.id
    asked = next(each for each in messages if each.subject == ASKED)  # either may be the first
    assert request.id in json.loads(asked.data)["error"]["message"]


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


async def test_reads_of_one_answer_are_limited_and_those_that_were_replaced_do_not_count(
    client: Submitter, engine: Engine, running: Running, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message of an answer is sent to all of its reads: a thousand would keep the gateway from other tenants."""
    monkeypatch.setattr(services, "SAME_ANSWER", 2)
    await ask(bus, stream=True)
    await eventually(lambda: engine.accepted)
    [request] = engine.accepted
    readers = running.api.services.readers
    for reader in ("a", "b", "b", "b", "c"):
        before = dict(readers)
        query = json.dumps({"id": request.id, "reader": reader}).encode()
        await bus.nc.publish(f"{bus.subjects.namespace}.read", query, reply=READ)
        if reader != "c":
            await eventually(lambda before=before: readers and dict(readers) != before)
    refused = await client.got(lambda messages: any(each.subject == READ for each in messages))
    assert [error_of(each) for each in refused if each.subject == READ] == ["queue_full"]
    assert "2 reads of this answer" in json.loads(refused[-1].data)["error"]["message"]
    await engine.stream(request, 0, 1, end=True)
    await eventually(lambda: not readers and not running.api.services.same_answer)


@pytest.mark.parametrize("named", [True, False])
async def test_a_reader_that_reads_again_is_served_once(
    client: Submitter, engine: Engine, running: Running, bus: Bus, named: bool
) -> None:
    """The first read ends: after lost messages, each repeat would send the whole rest once more."""
    await ask(bus, stream=True)
    await eventually(lambda: engine.accepted)
    [request] = engine.accepted
    query = {"id": request.id} | ({"reader": "me"} if named else {})
    subjects = ["_INBOX.first", "_INBOX.second"] if named else ["_INBOX.same", "_INBOX.same"]
    await client.listen(*set(subjects))
    readers, before = running.api.services.readers, None
    for number, subject in enumerate(subjects, 1):
        await bus.nc.publish(f"{bus.subjects.namespace}.read", json.dumps(query).encode(), reply=subject)
        await eventually(lambda before=before: len(readers) == 1 and before not in readers.values())
        [before] = readers.values()
        await engine.stream(request, 2 * (number - 1), 2)
        await client.got(lambda messages, subject=subject, number=number: texts_at(messages, subject) >= number)
    await engine.stream(request, 4, 4, end=True)
    await client.got(lambda messages: sum(finals([m]) for m in messages if m.subject == subjects[1]) == 1)
    await eventually(lambda: not readers)
    numbers = [number_of(message) for message in client.received if message.subject == subjects[1]]
    if named:
        assert numbers == sorted(set(numbers))
        assert not any(finals([message]) for message in client.received if message.subject == subjects[0])
    else:
        assert numbers.count(max(numbers)) == 1


def texts_at(messages: list[Any], subject: str) -> int:
    return sum(message.subject == subject and number_of(message) >= 0 for message in messages)


async def test_a_reader_that_reads_at_another_gateway_is_no_longer_served_here(
    client: Submitter, engine: Engine, running: Running, bus: Bus
) -> None:
    await ask(bus, stream=True)
    await eventually(lambda: engine.accepted)
    [request] = engine.accepted
    query = json.dumps({"id": request.id, "reader": "me"}).encode()
    await bus.nc.publish(f"{bus.subjects.namespace}.read", query, reply=READ)
    await eventually(lambda: len(running.api.services.readers) == 1)
    there = {"gateway": "another", "tenant": "default", "request": request.id, "reader": "me"}
    await bus.nc.publish(bus.subjects.reading, json.dumps(there).encode())
    await eventually(lambda: not running.api.services.readers)
    await engine.stream(request, 0, 2)
    await engine.stream(request, 2, 1, end=True)
    await client.got(lambda messages: sum(finals([m]) for m in messages if m.subject == ASKED) == 1)
    await eventually(lambda: not running.api.services.tasks)
    assert not any(finals([message]) for message in client.received if message.subject == READ)


@pytest.mark.parametrize("no_store", [True, False])
async def test_an_ask_whose_acceptance_is_not_confirmed_as_its_gateway_stops_continues_elsewhere(
    client: Submitter,
    engine: Engine,
    running: Running,
    bus: Bus,
    broker: EmbeddedNats,
    subjects: Subjects,
    model: ModelDir,
    monkeypatch: pytest.MonkeyPatch,
    no_store: bool,
) -> None:
    """It is stored, as is its content: nobody cancels it, and whoever asks again under its name gets its answer."""
    sent, cancels = asyncio.Event(), list[bytes]()

    async def unconfirmed(self: Publisher, *args: Any, **options: Any) -> Ack:
        await self.send(*args, **options)
        sent.set()
        return await asyncio.get_running_loop().create_future()

    async def note(message: Any) -> None:
        cancels.append(message.data)

    await bus.nc.subscribe(bus.subjects.cancel, cb=note)
    ask_again = json.dumps({**BODY, "no_store": no_store}).encode(), {HEADER_MSG_ID: "the same"}
    with monkeypatch.context() as patched:
        patched.setattr(Publisher, "publish", unconfirmed)
        await bus.nc.publish(f"{bus.subjects.namespace}.ask.tiny", ask_again[0], reply=ASKED, headers=ask_again[1])
        await sent.wait()
        await eventually(lambda: engine.accepted)
        await running.stop(0.0)
    messages = await client.got(len)
    assert [error_of(each) for each in messages] == ["shutting_down"]
    async with gateway_on(broker, subjects, model), answering(engine):
        await bus.nc.publish(f"{bus.subjects.namespace}.ask.tiny", ask_again[0], reply=ASKED, headers=ask_again[1])
        messages = await client.got(lambda messages: finals(messages) == 2)
    assert error_of(messages[-1]) == ""
    assert len({request.id for request in engine.accepted}) == 1
    assert cancels == []
