"""Acknowledged publishing on a real nats-server: once each, whatever happens to the server in between."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
from nats.aio.msg import Msg

from penstock.infra.bus.connection import Bus, connect
from penstock.infra.bus.direct_get import read
from penstock.infra.bus.publisher import Ack, Publisher
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import eventually, opened


@pytest.fixture
async def publisher(bus: Bus) -> AsyncIterator[Publisher]:
    publisher = Publisher(bus)
    await publisher.open()
    yield publisher
    await publisher.close()


async def stored(bus: Bus, stream: str, subject: str) -> list[bytes]:
    return [entry.data async for entry in read(bus, bus.subjects.stream(stream), subject)]


async def test_a_message_is_acknowledged_with_its_sequence(bus: Bus, publisher: Publisher) -> None:
    subject = bus.subjects.request("m", "batch", "id")
    assert (await publisher.publish(subject, b"one", "id-1")).seq == 1
    second = await publisher.publish(subject, b"two", "id-2", headers={"Extra": "1"})
    assert (second.seq, second.duplicate) == (2, False)
    entries = [entry async for entry in read(bus, bus.subjects.stream("REQUESTS"), subject)]
    assert [entry.data for entry in entries] == [b"one", b"two"]
    assert entries[1].headers["Extra"] == "1"


async def test_the_same_id_again_is_a_duplicate(bus: Bus, publisher: Publisher) -> None:
    subject = bus.subjects.request("m", "batch", "id")
    first = await publisher.publish(subject, b"one", "id-1")
    again = await publisher.publish(subject, b"other", "id-1")
    assert (again.seq, again.duplicate) == (first.seq, True)
    assert await stored(bus, "REQUESTS", subject) == [b"one"]


async def test_many_are_in_flight_at_once_and_keep_their_order(bus: Bus, publisher: Publisher) -> None:
    subject = bus.subjects.request("m", "batch", "id")
    futures = [await publisher.send(subject, b"%d" % i, f"id-{i}") for i in range(1000)]
    acks = await asyncio.gather(*futures)
    assert [ack.seq for ack in acks] == list(range(1, 1001))
    assert publisher.waiting == 0


async def test_a_message_that_no_stream_takes_fails_at_its_deadline(bus: Bus, publisher: Publisher) -> None:
    began = time.monotonic()
    with pytest.raises(ServingError, match="did not confirm") as caught:
        await publisher.publish(f"{bus.subjects.namespace}.nowhere", b"", "id", timeout=0.3)
    assert caught.value.code is Code.broker_unavailable
    assert time.monotonic() - began < 2
    assert publisher.waiting == 0


async def test_a_message_too_large_is_refused_before_it_is_sent(bus: Bus, publisher: Publisher) -> None:
    """Sent, it would make the server cut the connection for good."""
    subject = bus.subjects.request("m", "batch", "id")
    with pytest.raises(ServingError) as caught:
        await publisher.publish(subject, bytes(bus.max_message + 1), "id")
    assert caught.value.code is Code.body_too_large
    assert (await publisher.publish(subject, bytes(bus.max_message), "id")).seq == 1
    assert publisher.waiting == 0


async def test_a_refusal_by_the_stream_is_reported(bus: Bus, publisher: Publisher) -> None:
    subject = bus.subjects.request("m", "batch", "id")
    with pytest.raises(ServingError, match="refused"):
        await publisher.publish(subject, b"", "id", headers={"Nats-Expected-Last-Sequence": "7"})


async def test_closing_fails_who_still_waits_and_who_comes_later(bus: Bus) -> None:
    publisher = Publisher(bus)
    await publisher.open()
    waiting = await publisher.send(f"{bus.subjects.namespace}.nowhere", b"", "id")
    await publisher.close()
    with pytest.raises(ServingError) as caught:
        await waiting
    assert caught.value.code is Code.shutting_down
    with pytest.raises(ServingError, match="stopping"):
        await publisher.publish(bus.subjects.request("m", "batch", "id"), b"", "id")
    assert not bus.on_reconnect


async def test_who_stops_waiting_is_forgotten(bus: Bus, publisher: Publisher) -> None:
    future = await publisher.send(f"{bus.subjects.namespace}.nowhere", b"", "id")
    future.cancel()
    await eventually(lambda: publisher.waiting == 0)


async def test_each_message_is_stored_once_although_the_server_is_killed(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects
) -> None:
    server = make_broker()
    await server.start()
    subject = subjects.request("m", "batch", "id")
    async with opened(server, subjects) as bus:
        publisher = Publisher(bus)
        await publisher.open()
        futures: list[asyncio.Future[Ack]] = []

        async def produce() -> None:
            for number in range(600):
                futures.append(await publisher.send(subject, b"%d" % number, f"id-{number}"))
                await asyncio.sleep(0.001)

        producing = asyncio.create_task(produce())

        def passed(limit: int) -> bool:
            return len(futures) > limit

        for limit in (100, 300):
            await eventually(partial(passed, limit))
            server.kill()
            await eventually(lambda: not bus.connected)
            await server.start()
        await producing
        await asyncio.wait_for(asyncio.gather(*futures), 20)
        found = await stored(bus, "REQUESTS", subject)
        assert sorted(map(int, found)) == list(range(600))
        await publisher.close()


async def test_connecting_to_nobody_says_what_to_do() -> None:
    with pytest.raises(ServingError, match="penstock nats") as caught:
        await connect("nats://user:secret@127.0.0.1:1", role="worker", name="x", timeout=0.3)
    assert caught.value.code is Code.broker_unavailable
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_connect_that_is_given_up_leaves_no_link_open(cancelled: bool) -> None:
    """The server accepts and stays silent, as one that is stopped."""
    accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(None)
        ended.set_result(await reader.read())
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        connecting = asyncio.create_task(connect(url, role="operator", name="test", timeout=30 if cancelled else 0.5))
        await asyncio.wait_for(accepted, 10)
        if cancelled:
            connecting.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else ServingError):
            await connecting
        assert await asyncio.wait_for(ended, 10) == b""


async def test_reconnecting_ends_with_close_also_where_its_cancellation_was_lost(
    make_broker: Callable[..., EmbeddedNats],
) -> None:
    server = make_broker()
    await server.start()
    bus = await connect(server.url("operator"), role="operator", name="test")
    server.kill()
    await eventually(lambda: bus.nc.is_reconnecting)
    reconnecting, bus.nc._reconnection_task = bus.nc._reconnection_task, None
    await bus.close()
    await eventually(reconnecting.done)


async def test_a_connection_closed_for_good_ends_the_process(broker: EmbeddedNats) -> None:
    ended: list[int] = []
    bus = await connect(broker.url("operator"), role="operator", name="x", end_process=ended.append)  # type: ignore[arg-type]
    await bus.nc.close()
    assert ended == [75]


async def test_closing_a_bus_does_not_end_the_process(broker: EmbeddedNats) -> None:
    ended: list[int] = []
    bus = await connect(broker.url("operator"), role="operator", name="x", end_process=ended.append)  # type: ignore[arg-type]
    await bus.close()
    await bus.close()
    assert not ended


async def test_a_flush_that_was_given_up_leaves_the_connection_receiving(bus: Bus) -> None:
    flush = asyncio.create_task(bus.nc.flush())
    await asyncio.sleep(0)
    assert bus.nc._pongs
    flush.cancel()  # before its answer can have been read
    await asyncio.wait([flush])
    assert flush.cancelled()
    await bus.nc.flush()
    assert (await bus.nc.request("$JS.API.INFO", timeout=5)).data


async def test_a_failing_reconnect_hook_does_not_keep_the_others_from_running(broker: EmbeddedNats) -> None:
    bus = await connect(broker.url("operator"), role="operator", name="x")
    ran = asyncio.Event()

    async def fails() -> None:
        raise RuntimeError("hook")

    async def runs() -> None:
        ran.set()

    bus.on_reconnect += [fails, runs]
    bus.recover()
    await asyncio.wait_for(ran.wait(), 5)
    await bus.close()


async def limit(bus: Bus, stream: str, **changes: Any) -> None:
    """Change a stream's limits."""
    name = bus.subjects.stream(stream)
    config = json.loads((await bus.nc.request(f"$JS.API.STREAM.INFO.{name}", b"")).data)["config"] | changes
    config.pop("metadata", None)
    reply = json.loads((await bus.nc.request(f"$JS.API.STREAM.UPDATE.{name}", json.dumps(config).encode())).data)
    assert "error" not in reply, reply


async def test_a_refusal_that_passes_is_tried_again_for_the_time_that_was_promised(
    bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.infra.bus.publisher.RESEND_S", 0.1)
    subject = bus.subjects.request("m", "batch", "id")
    await publisher.publish(subject, b"", "filler")
    await limit(bus, "REQUESTS", max_msgs=1, discard="new")
    waiting = await publisher.send(subject, b"one", "id", timeout=10)
    with pytest.raises(ServingError, match="refused"):
        await publisher.publish(subject, b"two", "id-2", insist=False)
    with pytest.raises(ServingError, match="refused"):
        await publisher.publish(subject, b"three", "id-3", timeout=0.3)
    assert not waiting.done()
    await limit(bus, "REQUESTS", max_msgs=-1, discard="old")
    assert (await asyncio.wait_for(waiting, 10)).seq == 2


@pytest.mark.parametrize("code", [10008, 10158, 10164, 10167])
async def test_a_message_whose_first_copy_is_being_stored_is_sent_again(
    code: int, bus: Bus, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As servers of a cluster answer while their leader changes: also who does not insist waits for it."""
    monkeypatch.setattr("penstock.infra.bus.publisher.RESEND_S", 0.1)
    subject = f"{bus.subjects.namespace}.stand.in"
    asked = 0

    async def answer(message: Msg) -> None:
        nonlocal asked
        asked += 1
        error = {"error": {"code": 409, "err_code": code, "description": "in process"}}
        await bus.nc.publish(message.reply, json.dumps(error if asked < 3 else {"stream": "s", "seq": 7}).encode())

    server = await bus.nc.subscribe(subject, cb=answer)
    await bus.nc.flush()
    assert (await publisher.publish(subject, b"", "id", insist=False, timeout=10)).seq == 7
    assert asked == 3
    await server.unsubscribe()


async def test_of_what_is_published_once_a_subject_has_the_first_one_only(bus: Bus, publisher: Publisher) -> None:
    """Also when the stream has long forgotten the message's id."""
    subject = bus.subjects.done("t", "m", "r")
    first = await publisher.publish(subject, b"one", "id-1", once=True)
    again = await publisher.publish(subject, b"two", "id-2", once=True)
    assert (first.duplicate, again.duplicate) == (False, True)
    assert await stored(bus, "DONE", subject) == [b"one"]


async def test_what_waits_at_its_gate_is_sent_when_that_opens(bus: Bus, publisher: Publisher) -> None:
    subject = bus.subjects.request("m", "batch", "id")
    gate = False
    waiting = await publisher.send(subject, b"one", "id", gate=lambda: gate)
    dropped = await publisher.send(subject, b"two", "id-2", gate=lambda: gate)
    await asyncio.sleep(0.5)  # longer than a sweep
    assert not waiting.done()
    dropped.cancel()
    gate = True
    assert (await asyncio.wait_for(waiting, 5)).seq == 1
    await eventually(lambda: publisher.waiting == 0)
    assert await stored(bus, "REQUESTS", subject) == [b"one"]


async def test_one_message_that_cannot_be_asked_about_does_not_hold_up_the_others(
    bus: Bus, publisher: Publisher
) -> None:
    subject = bus.subjects.request("m", "batch", "id")
    asked = False

    def broken() -> bool:
        nonlocal asked
        if asked:
            raise RuntimeError("a broken gate")
        asked = True
        return False

    failing = await publisher.send(subject, b"", "id", gate=broken)
    late = await publisher.send(f"{bus.subjects.namespace}.nowhere", b"", "id", timeout=0.4)
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(failing, 5)
    with pytest.raises(ServingError, match="did not confirm"):
        await asyncio.wait_for(late, 5)


async def test_a_server_that_accepts_and_sends_nothing_is_passed_over_and_its_link_closed(
    make_broker: Callable[..., EmbeddedNats],
) -> None:
    left = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        left.set()
        writer.close()
        await writer.wait_closed()

    broker = make_broker()
    await broker.start()
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        url = f"{broker.url('operator')},nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        bus = await connect(url, role="operator", name="test", dont_randomize=True)
        broker.kill()
        await eventually(lambda: not bus.connected)
        await broker.start()
        await eventually(lambda: bus.connected)
        async with asyncio.timeout(5):
            await left.wait()
        await bus.close()
