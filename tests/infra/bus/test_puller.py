"""Taking work from a durable consumer on a real nats-server: never more than there is room for, never stuck."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.infra.bus.client import Frame, Handler
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.puller import ACK, HEARTBEAT_S, NAK, Puller
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import CONSUMER, delivered, eventually, make_consumer, opened, publish_jobs, unacked
from tests.infra.nats_server.support import lose_end

SOON_S = HEARTBEAT_S / 2  # sooner than by any timer, also on a loaded machine


class Taker:
    """Takes jobs, holds them, and notes the most it ever held."""

    def __init__(self, bus: Bus, slots: int) -> None:
        self.bus = bus
        self.slots = slots
        self.held: list[Any] = []
        self.seen: list[bytes] = []
        self.most = 0
        self.slow = False
        self.puller = Puller(bus, bus.subjects.stream("WORK"), CONSUMER, self._handle, self._room)

    def _room(self) -> int:
        return self.slots - len(self.held)

    async def _handle(self, message: Any) -> None:
        if self.slow:  # others may top up while this one is not yet counted
            await self.puller.top_up()
            await asyncio.sleep(0)
        self.held.append(message)
        self.seen.append(message.data)
        self.most = max(self.most, len(self.held))

    async def finish(self, count: int = 1) -> None:
        for _ in range(count):
            await self.bus.nc.publish(self.held.pop(0).reply, ACK)
        await self.puller.top_up()


async def request_waits(bus: Bus) -> None:
    """Until the server has taken in a pull request; deleting the consumer before would lose it without a word."""
    while not (await bus.js.consumer_info(bus.subjects.stream("WORK"), CONSUMER)).num_waiting:
        continue


@pytest.mark.parametrize("slow", [False, True])
async def test_never_more_is_taken_than_there_is_room_for(bus: Bus, slow: bool) -> None:
    await make_consumer(bus)
    await publish_jobs(bus, *range(40))
    taker = Taker(bus, slots=5)
    taker.slow = slow
    await taker.puller.start()
    for done in range(40):
        await eventually(lambda: taker.held)
        if done < 35:
            await eventually(lambda: len(taker.held) >= 3)
        assert await delivered(bus) - done <= 5
        await taker.finish()
    assert taker.most == 5
    assert taker.seen == [b"%d" % job for job in range(40)]
    await taker.puller.close()


@pytest.mark.parametrize("done", [0, 2, 6])
async def test_jobs_in_the_place_of_lost_ones_are_taken(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects, done: int
) -> None:
    """A broker that lost power has lost the end of the stream, and remembers what it has delivered of it."""
    server = make_broker()
    await server.start()
    async with opened(server, subjects) as bus:
        await make_consumer(bus)
        await publish_jobs(bus, *range(6))
        taker = Taker(bus, slots=20)
        await taker.puller.start()
        await eventually(lambda: len(taker.seen) == 6)
        await taker.finish(done)
        await bus.nc.flush()
        while await unacked(bus) != 6 - done:
            continue
        server.kill()
        await eventually(lambda: not bus.connected)
        lose_end(server.data_dir, subjects.stream("WORK"), 3)
        await server.start()
        await eventually(lambda: bus.connected)
        await publish_jobs(bus, *range(10, 15))
        await eventually(lambda: set(taker.seen[6:]) >= {b"%d" % job for job in range(10, 15)})
        await taker.puller.close()


async def test_work_that_comes_later_is_taken_at_once(bus: Bus) -> None:
    await make_consumer(bus)
    taker = Taker(bus, slots=2)
    await taker.puller.start()
    await bus.nc.flush()
    began = time.monotonic()
    await publish_jobs(bus, 1)
    await eventually(lambda: taker.seen == [b"1"])
    assert time.monotonic() - began < SOON_S
    await taker.puller.close()


async def test_a_message_wakes_no_task_but_the_one_that_handles_it(
    bus: Bus, broker: EmbeddedNats, subjects: Subjects
) -> None:
    await make_consumer(bus)
    taker = Taker(bus, slots=100)
    await taker.puller.start()
    await bus.nc.flush()
    reads = 0
    parse = bus.nc._ps.parse

    async def counted(data: bytes = b"") -> None:
        nonlocal reads
        reads += b"MSG " in data  # and no PING, which the server sends every second
        await parse(data)

    bus.nc._ps.parse = counted  # of the task that reads the link
    async with opened(broker, subjects) as other:
        for job in range(20):
            await publish_jobs(other, job)
            await eventually(lambda expected=job + 1: len(taker.seen) == expected)
    assert reads == 0
    await taker.puller.close()


async def test_without_room_nothing_is_asked_for(bus: Bus) -> None:
    await make_consumer(bus)
    taker = Taker(bus, slots=0)
    await taker.puller.start()
    await publish_jobs(bus, 1)
    info = await bus.js.consumer_info(bus.subjects.stream("WORK"), CONSUMER)
    assert info.num_waiting == 0
    taker.slots = 1
    await taker.puller.top_up()
    await eventually(lambda: taker.seen == [b"1"])
    await taker.puller.close()


async def test_room_that_is_freed_before_the_start_is_asked_for_by_the_start(bus: Bus) -> None:
    await make_consumer(bus)
    taker = Taker(bus, 3)
    await taker.puller.top_up()
    await bus.js.publish(bus.subjects.work("aggregated", CONSUMER), b"job")
    await taker.puller.start()
    await eventually(lambda: taker.seen == [b"job"])
    await taker.puller.close()


async def test_a_message_given_back_comes_again(bus: Bus) -> None:
    await make_consumer(bus)
    await publish_jobs(bus, 1)
    taker = Taker(bus, slots=1)
    await taker.puller.start()
    await eventually(lambda: taker.held)
    await bus.nc.publish(taker.held.pop().reply, NAK)
    await taker.puller.top_up()
    await eventually(lambda: taker.seen == [b"1", b"1"])
    await taker.puller.close()


async def test_after_a_stop_no_room_is_asked_for_and_after_a_close_nothing_arrives(bus: Bus) -> None:
    await make_consumer(bus)
    await publish_jobs(bus, 1)
    taker = Taker(bus, slots=1)
    await taker.puller.start()
    await eventually(lambda: taker.held)
    await taker.puller.stop()
    await taker.finish()
    await publish_jobs(bus, 2)
    assert await delivered(bus) == 1
    other = Taker(bus, slots=3)
    await other.puller.start()
    await eventually(lambda: other.seen == [b"2"])
    await other.puller.close()
    await publish_jobs(bus, 3)
    await bus.nc.flush()
    assert other.seen == [b"2"]
    assert await unacked(bus) == 1
    assert not bus.on_reconnect


async def test_a_handler_that_raises_does_not_use_up_the_room(bus: Bus) -> None:
    await make_consumer(bus)
    seen: list[bytes] = []

    async def handle(message: Any) -> None:
        seen.append(message.data)
        await bus.nc.publish(message.reply, ACK)
        raise RuntimeError("handler")

    puller = Puller(bus, bus.subjects.stream("WORK"), CONSUMER, handle, lambda: 1)
    await puller.start()
    await publish_jobs(bus, 1, 2)
    await eventually(lambda: seen == [b"1", b"2"])
    await puller.close()


async def test_how_much_room_there_is_is_not_asked_while_enough_is_requested(bus: Bus) -> None:
    """A router with requests that it holds tops up with each turn of its event loop."""
    await make_consumer(bus)
    asked, seen = 0, 0

    def room() -> int:
        nonlocal asked
        asked += 1
        return 8

    async def handle(message: Any) -> None:
        nonlocal seen
        await bus.nc.publish(message.reply, ACK)
        seen += 1

    puller = Puller(bus, bus.subjects.stream("WORK"), CONSUMER, handle, room, most=8)
    await puller.start()
    for _ in range(9):
        await puller.top_up()
    assert asked == 1
    await publish_jobs(bus, *range(40))
    await eventually(lambda: seen == 40)
    assert asked == 11, "once in four messages"
    await puller.close()


@pytest.mark.parametrize("there_before", [True, False])
async def test_without_its_consumer_it_asks_now_and_then_and_continues_when_it_is_back(
    bus: Bus, there_before: bool
) -> None:
    """FastStream's subscriber would pull 8,400 times a second here."""
    asked = 0
    publish = bus.nc.publish

    async def counted(subject: str, *args: Any, **kwargs: Any) -> None:
        nonlocal asked
        asked += ".MSG.NEXT." in subject
        await publish(subject, *args, **kwargs)

    bus.nc.publish = counted
    if there_before:
        await make_consumer(bus)
    taker = Taker(bus, slots=3)
    await taker.puller.start()
    await bus.nc.flush()
    if there_before:
        await asyncio.wait_for(request_waits(bus), 5)
        await bus.js.delete_consumer(bus.subjects.stream("WORK"), CONSUMER)
    before = asked
    await eventually(lambda: asked >= before + 2)
    assert asked <= before + 2
    await make_consumer(bus)
    await publish_jobs(bus, 1)
    began = time.monotonic()
    await eventually(lambda: taker.seen == [b"1"])
    assert time.monotonic() - began < SOON_S
    await taker.puller.close()


async def test_it_resumes_at_once_after_the_server_was_killed(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects
) -> None:
    server = make_broker()
    await server.start()
    async with opened(server, subjects) as bus:
        await make_consumer(bus)
        taker = Taker(bus, slots=4)
        await taker.puller.start()
        await publish_jobs(bus, 1)
        await eventually(lambda: taker.seen == [b"1"])
        await taker.finish()
        server.kill()
        await eventually(lambda: not bus.connected)
        await server.start()
        await eventually(lambda: bus.connected)
        began = time.monotonic()
        await publish_jobs(bus, 2)
        await eventually(lambda: b"2" in taker.seen)
        assert time.monotonic() - began < SOON_S
        await taker.puller.close()


class Slow:
    """Takes whatever comes, a little at a time."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.seen: list[bytes] = []
        self.within = 0
        self.puller = Puller(bus, bus.subjects.stream("WORK"), CONSUMER, self._handle, lambda: 1000 - len(self.seen))

    async def _handle(self, message: Any) -> None:
        self.within += 1
        await asyncio.sleep(0)
        self.seen.append(message.data)
        await self.bus.nc.publish(message.reply, ACK)
        self.within -= 1


@pytest.mark.parametrize("restarts", [0, 1, 3])
async def test_after_a_drain_nothing_is_delivered_and_all_that_came_has_been(bus: Bus, restarts: int) -> None:
    await make_consumer(bus)
    came = 0
    process, subscribe = bus.nc._process_msg, bus.nc.subscribe_direct

    async def counted(sid: int, subject: bytes, reply: bytes, *rest: Any) -> None:  # what has no handler any more
        nonlocal came
        came += reply.startswith(b"$JS.ACK.")
        await process(sid, subject, reply, *rest)

    async def subscribed(subject: str, handler: Handler) -> Any:
        def handle(frame: Frame) -> None:
            nonlocal came
            came += frame.reply.startswith(b"$JS.ACK.")
            handler(frame)

        return await subscribe(subject, handle)

    bus.nc._process_msg, bus.nc.subscribe_direct = counted, subscribed
    for delay in (0.0, 0.003, 0.01, 0.02):
        came = 0
        taker = Slow(bus)
        await taker.puller.start()
        giving = asyncio.create_task(publish_jobs(bus, *range(60)))
        await asyncio.sleep(delay)
        restarting = [asyncio.create_task(taker.puller._restart()) for _ in range(restarts)]
        await taker.puller.drain()
        seen = len(taker.seen)
        assert taker.within == 0
        assert came == seen, "the server has sent more than was delivered"
        await giving
        await asyncio.gather(*restarting)
        await bus.nc.flush()
        await bus.nc.flush()
        assert len(taker.seen) == seen
        assert came == seen, "the server still sends"
        await bus.js.purge_stream(bus.subjects.stream("WORK"))
    assert not bus.on_reconnect


async def test_a_drain_delivers_what_had_come_although_the_server_is_gone_and_nothing_comes_when_it_is_back(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects
) -> None:
    server = make_broker()
    await server.start()
    async with opened(server, subjects) as bus:
        await make_consumer(bus)
        taker = Slow(bus)
        await taker.puller.start()
        await publish_jobs(bus, *range(20))
        server.kill()
        await eventually(lambda: not bus.connected)
        began = time.monotonic()
        await taker.puller.drain()
        assert time.monotonic() - began < SOON_S
        seen = len(taker.seen)
        await server.start()
        await eventually(lambda: bus.connected)
        await publish_jobs(bus, 99)
        await bus.nc.flush()
        await asyncio.sleep(0.2)  # whatever would come now
        assert len(taker.seen) == seen
        assert b"99" not in taker.seen


class Gated:
    """A handler that goes on when the test says so."""

    def __init__(self, bus: Bus) -> None:
        self.begun: list[bytes] = []
        self.gate = asyncio.Event()
        self.puller = Puller(bus, bus.subjects.stream("WORK"), CONSUMER, self._handle, lambda: 5)

    async def _handle(self, message: Any) -> None:
        self.begun.append(message.data)
        await self.gate.wait()


async def test_a_drain_waits_for_what_came_before_a_reconnect(bus: Bus) -> None:
    await make_consumer(bus)
    taker = Gated(bus)
    await taker.puller.start()
    await publish_jobs(bus, 1, 2, 3)
    await eventually(lambda: taker.begun)
    await bus.nc.flush()
    await taker.puller._restart()
    drained = asyncio.create_task(taker.puller.drain())
    done, _ = await asyncio.wait([drained], timeout=0.3)
    assert not done
    taker.gate.set()
    await drained
    assert taker.begun == [b"1", b"2", b"3"]


async def test_a_handler_that_hangs_does_not_hold_up_a_drain_for_ever_and_gets_nothing_more(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.infra.bus.puller.DRAIN_S", 0.3)
    await make_consumer(bus)
    taker = Gated(bus)
    await taker.puller.start()
    await publish_jobs(bus, 1, 2)
    await eventually(lambda: taker.begun)
    began = time.monotonic()
    await taker.puller.drain()
    assert time.monotonic() - began < SOON_S
    taker.gate.set()
    await publish_jobs(bus, 3)
    await bus.nc.flush()
    assert taker.begun == [b"1"]
