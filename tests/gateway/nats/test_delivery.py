"""Answers that are sent again, on a real broker."""

import functools
import re
import time
from typing import Any

import pytest
from nats.aio.msg import Msg

from penstock.infra.bus.connection import Bus
from penstock.infra.model.modeldir import ModelDir
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.subjects import Subjects
from tests.gateway.nats.support import BODY, Engine, Running, Submitter, finals, gateway_on, number_of
from tests.infra.bus.support import eventually

AHEAD_NS = 600_000_000_000


@pytest.fixture(params=[0, AHEAD_NS, -AHEAD_NS], ids=["clocks agree", "gateway ahead", "gateway behind"])
def _clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + request.param)


def shown(message: Msg) -> tuple[int, bytes]:
    """Number and body, without the time of creation: far from the broker's, it is not the same again."""
    return number_of(message), re.sub(rb'"created":\d+', b"", message.data)


@pytest.mark.usefixtures("_clock")
async def test_an_answer_is_sent_again_from_its_beginning_when_the_link_was_broken(
    broker: EmbeddedNats, subjects: Subjects, model: ModelDir, bus: Bus, engine: Engine
) -> None:
    async with gateway_on(broker, subjects, model) as running:
        client = Submitter(bus)
        await client.listen(client.answer_subject("again"))
        await client.submit({**BODY, "stream": True}, Nats_Msg_Id="again")
        await eventually(lambda: engine.accepted)
        [request] = engine.accepted
        await engine.stream(request, 0, 3)
        await client.got(lambda messages: len(messages) == 3)
        running.gateway.bus.nc.drop_link()
        await eventually(lambda: running.gateway.bus.reconnects == 1 and running.gateway.bus.connected)
        await engine.stream(request, 3, 1)
        await client.got(lambda messages: [number_of(each) for each in messages[-4:]] == [0, 1, 2, 3])
        await engine.stream(request, 4, 1, end=True)
        messages = await client.got(finals)
        bodies = [{shown(each) for each in messages if number_of(each) == number} for number in range(5)]
        assert [len(each) for each in bodies] == [1] * 5


async def test_an_answer_is_sent_again_when_the_link_breaks_as_its_end_is_flushed(
    running: Running, bus: Bus, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    nc, broken = running.gateway.bus.nc, 0
    write = type(nc.link).write

    def closed(self: Any, data: bytes) -> None:
        nonlocal broken
        if data == b"PING\r\n" and not broken:
            broken += 1
            raise ConnectionResetError("the link to the broker is closed")
        write(self, data)

    client = Submitter(bus)
    await client.listen(client.answer_subject("flushed"))
    await client.submit(BODY, Nats_Msg_Id="flushed")
    await eventually(lambda: engine.accepted)
    monkeypatch.setattr(nc.link, "write", functools.partial(closed, nc._transport))
    await engine.stream(engine.accepted[0], 0, 3, end=True)
    messages = await client.got(finals)
    await eventually(lambda: broken)
    assert not any("Penstock-Error" in (each.headers or {}) for each in messages)
    again = await client.got(lambda messages: sum(number_of(each) == 0 for each in messages) == 2)
    assert not any("Penstock-Error" in (each.headers or {}) for each in again)


@pytest.mark.usefixtures("_clock")
async def test_a_streamed_answer_that_is_too_large_for_its_record_is_read_from_the_token_log(
    broker: EmbeddedNats, subjects: Subjects, model: ModelDir, bus: Bus, engine: Engine
) -> None:
    async with gateway_on(broker, subjects, model):
        client = Submitter(bus)
        await client.listen(client.answer_subject("large"), "_INBOX.read")
        await client.submit({**BODY, "stream": True}, Nats_Msg_Id="large")
        await eventually(lambda: engine.accepted)
        [request] = engine.accepted
        await engine.stream(request, 0, 5, end=True)
        await engine.record(request, 5, left_out=("tokens",))
        sent = len(await client.got(finals))
        await bus.nc.publish(f"{bus.subjects.namespace}.read", b'{"key": "large"}', reply="_INBOX.read")
        messages = await client.got(lambda messages: finals(messages) == 2)
        assert list(map(shown, messages[sent:])) == list(map(shown, messages[:sent]))
