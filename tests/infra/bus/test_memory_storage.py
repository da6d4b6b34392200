"""Reading the contents of requests with ``no_store``, on a real nats-server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from nats.errors import NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

from penstock.infra.bus import memory_storage
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.memory_storage import ContentReader, MemoryStreams
from penstock.infra.bus.publisher import Publisher
from penstock.schemas.contents import REQUEST
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from tests.infra.bus.support import eventually
from tests.workers.support import request


@pytest.fixture
async def reader(bus: Bus) -> AsyncIterator[ContentReader]:
    reader = ContentReader(bus)
    await reader.open()
    yield reader
    await reader.close()


async def stored(bus: Bus, count: int, size: int = 0) -> dict[str, bytes]:
    parts = {
        bus.subjects.contents("gw", f"r{number}", "request"): b"%d" % number + bytes(size) for number in range(count)
    }
    for subject, data in parts.items():
        await bus.js.publish(subject, data)
    return parts


@pytest.mark.parametrize("count", [1, 2, memory_storage.ASKED_PARTS + 3])
async def test_parts_are_read_by_one_question_each_few_hundred(bus: Bus, reader: ContentReader, count: int) -> None:
    parts = await stored(bus, count)
    before = bus.nc.stats["out_msgs"]
    assert await reader.find(list(parts)) == parts
    assert bus.nc.stats["out_msgs"] - before == -(-count // memory_storage.ASKED_PARTS)


async def test_what_is_not_there_is_left_out_without_a_wait(bus: Bus, reader: ContentReader) -> None:
    parts = await stored(bus, 2)
    missing = [bus.subjects.contents("gw", f"none{number}", "request") for number in range(2)]
    assert await reader.find([missing[0], *parts, missing[1]]) == parts
    assert await reader.find(missing) == {}
    assert await reader.find(missing[:1]) == {}
    assert await reader.find([]) == {}


async def test_of_more_than_an_answer_may_take_some_is_left_out(bus: Bus, reader: ContentReader) -> None:
    parts = await stored(bus, 8, size=900 << 10)
    found = await reader.find(list(parts))
    assert 0 < len(found) < len(parts)
    assert found.items() <= parts.items()


async def test_while_the_link_is_down_nothing_is_found(bus: Bus, reader: ContentReader) -> None:
    parts = await stored(bus, 1)
    await bus.close()
    assert await reader.find(list(parts)) == {}


async def test_a_content_that_was_sent_ahead_is_there_once(bus: Bus, reader: ContentReader) -> None:
    asked = [request(id=f"r{number}") for number in range(3)]
    for each in asked[:2]:
        await bus.js.publish(bus.subjects.contents(each.gateway, each.id, "request"), each.id.encode())
    for each in (asked[2], *asked[:2]):  # the first one is not there, and nobody waits for it
        memory_storage.send_content(bus, each, reader.inbox)
    await eventually(lambda: len(reader.sent) == 2)
    assert [reader.take(each.id) for each in asked] == [b"r0", b"r1", None]
    assert [reader.take(each.id) for each in asked] == [None] * 3


async def test_contents_whose_jobs_never_come_are_kept_for_some_time_and_up_to_some_bytes(
    bus: Bus, reader: ContentReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_storage, "SENT_BYTES", 250)
    monkeypatch.setattr(memory_storage, "SENT_S", 0.1)
    for number in range(4):
        await bus.nc.publish(f"{reader.inbox}.r{number}", bytes(100))
    await eventually(lambda: "r3" in reader.sent)
    assert len(reader.sent) <= 2
    assert reader.sent_bytes == 100 * len(reader.sent)
    await eventually(lambda: not reader.sent and reader._expiry is None)
    assert reader.sent_bytes == 0


@pytest.mark.parametrize("error", [TimeoutError(), NoRespondersError(), OSError()], ids=repr)
async def test_a_broker_that_does_not_say_how_full_it_is_is_no_internal_error(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def request(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(bus.nc, "request", request)
    with pytest.raises(ServingError, match="how full") as refused:
        await MemoryStreams(bus).fill()
    assert refused.value.code is Code.broker_unavailable
    assert refused.value.retry_after


async def test_who_gets_no_answer_during_an_election_asks_again_how_full_it_is(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, asked = bus.nc.request, list[str]()

    async def request(subject: str, *arguments: Any, **more: Any) -> Any:
        asked.append(subject)
        if len(asked) == 1:
            raise NatsTimeoutError
        return await answered(subject, *arguments, **more)

    monkeypatch.setattr(bus.nc, "request", request)
    contents, tokens = await MemoryStreams(bus).fill()
    assert (contents.used, tokens.used) == (0, 0)
    assert asked[0] == asked[1] != asked[2]


async def put_later(bus: Bus, asked: GenerateRequest, part: str, again_s: float) -> None:
    await asyncio.sleep(again_s)
    await bus.js.publish(bus.subjects.contents(asked.gateway, asked.id, part), b"whole")


async def test_what_a_router_is_about_to_put_is_waited_for_although_its_gateway_is_gone(bus: Bus) -> None:
    """The job was stored first: the leader of one stream was away, say."""
    asked, streams = request(id="r1"), MemoryStreams(bus)
    assert not await memory_storage.answers(bus, asked.gateway)
    await bus.js.publish(bus.subjects.contents(asked.gateway, asked.id, REQUEST), b"request")
    putting = asyncio.create_task(put_later(bus, asked, "2", 3 * memory_storage.LOOK_S))
    assert await memory_storage.fetch(bus, streams, asked, "2") == b"whole"
    await putting


async def test_who_begins_just_after_the_streams_were_lost_waits_for_gateways_too(bus: Bus) -> None:
    """A worker's next session ended requests with ``content_lost`` while their gateway was still reconnecting."""
    asked, streams = request(id="r1"), MemoryStreams(bus)
    await streams.open()
    assert streams.misses(0)
    assert not streams.misses(bus.clock.now_ns() + 3_600_000_000_000), "it came later"
    putting = asyncio.create_task(put_later(bus, asked, REQUEST, 3 * memory_storage.LOOK_S))
    assert await memory_storage.fetch(bus, streams, asked, REQUEST) == b"whole"
    await putting
    streams.close()


async def test_streams_that_were_made_long_ago_have_lost_nothing(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    streams, now_ns = MemoryStreams(bus), bus.clock.now_ns
    monkeypatch.setattr(bus.clock, "now_ns", lambda: now_ns() + 3_600_000_000_000)
    await streams.open()
    assert not streams.settling
    streams.close()


@pytest.mark.parametrize(("kept", "code"), [(True, Code.broker_unavailable), (False, Code.content_lost)])
async def test_a_part_that_never_comes_is_lost_only_if_it_cannot_be_made_again(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, kept: bool, code: Code
) -> None:
    asked, streams = request(id="r1"), MemoryStreams(bus)
    if kept:
        monkeypatch.setattr(memory_storage, "SETTLE_S", 0.5)
        await bus.js.publish(bus.subjects.contents(asked.gateway, asked.id, REQUEST), b"request")
    with pytest.raises(ServingError) as caught:
        await memory_storage.fetch(bus, streams, asked, "2")
    assert caught.value.code is code


async def test_two_gateways_that_store_one_request_each_have_its_content(bus: Bus) -> None:
    """Whichever the log takes, it names one of them. The second content was dropped as a repeat, and so was lost."""
    async with Publisher(bus) as publisher:
        for gateway in ("gw-a", "gw-b"):
            asked = request(id="r1", gateway=gateway)
            await (await memory_storage.put(bus, publisher, asked, REQUEST, b"whole", now_ns=bus.clock.now_ns()))
            assert await memory_storage.find(bus, asked, REQUEST) == b"whole"
