"""Handlers of FastStream's on Penstock's connection, on a real nats-server."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import msgspec
import pytest
from faststream import BaseMiddleware, Depends
from faststream.exceptions import StopConsume
from faststream.nats import NatsMessage, TestNatsBroker
from structlog.testing import capture_logs

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.faststream_app import BusBroker, JobSubscriber
from penstock.infra.bus.jetstream import Message
from penstock.infra.bus.puller import ACK
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import CONSUMER, delivered, eventually, make_consumer, opened, publish_jobs, unacked


class Work(msgspec.Struct):
    number: int
    delivery: Any = None


def decode(message: Message) -> Work:
    """
    Raises:
        ValueError: the message is no number.
    """
    return Work(int(message.data), message)


def job_subscriber(broker: BusBroker, room: Callable[[], int] = lambda: 100) -> JobSubscriber:
    subjects = broker._bus.subjects if broker._bus is not None else Subjects("ps")
    return broker.jobs(
        subjects.work("aggregated", CONSUMER),
        stream=subjects.stream("WORK"),
        consumer=CONSUMER,
        room=room,
        decode=decode,
        payload=Work,
        title="Jobs",
    )


@pytest.fixture
async def bus(broker: EmbeddedNats, subjects: Subjects) -> AsyncIterator[Bus]:
    async with opened(broker, subjects) as bus:
        await make_consumer(bus)
        yield bus


class Noting(BaseMiddleware):
    """Notes what passes it, in ``seen``."""

    seen: list[Any] = []

    async def consume_scope(self, call_next: Any, msg: Any) -> Any:
        self.seen.append(msg.body)
        return await call_next(msg)


class Forgiving(BaseMiddleware):
    """Lets no exception pass."""

    async def consume_scope(self, call_next: Any, msg: Any) -> Any:
        with contextlib.suppress(Exception):
            return await call_next(msg)


@contextlib.asynccontextmanager
async def running(broker: BusBroker, subscriber: JobSubscriber) -> AsyncIterator[None]:
    await broker.connect()
    await subscriber.start()
    try:
        yield
    finally:
        await broker.remove(subscriber)


async def sent(bus: Bus, count: int) -> None:
    """Until the server has sent so many messages."""
    while await delivered(bus) < count:
        continue


@pytest.fixture
def own_way(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The messages that took FastStream's own way."""
    taken: list[Any] = []
    process = JobSubscriber.process_message

    async def noted(self: JobSubscriber, msg: Any) -> Any:
        taken.append(msg)
        return await process(self, msg)

    monkeypatch.setattr(JobSubscriber, "process_message", noted)
    return taken


# -- the two ways of a message ------------------------------------------------------------------------------------


async def test_jobs_reach_a_decorated_handler_in_order_and_never_more_than_there_is_room_for(
    bus: Bus, own_way: list[Any]
) -> None:
    broker, seen = BusBroker(bus), []
    held: list[Work] = []
    jobs = job_subscriber(broker, lambda: 3 - len(held))

    @jobs
    async def take(work: Work) -> None:
        held.append(work)
        seen.append(work.number)

    await publish_jobs(bus, *range(10))
    async with running(broker, jobs):
        for done in range(10):
            await eventually(lambda: held)
            assert await delivered(bus) - done <= 3
            await bus.nc.publish(held.pop(0).delivery.reply, ACK)
            await jobs.top_up()
    assert seen == list(range(10))
    assert own_way == []


async def test_a_request_stays_open_while_a_handler_runs(bus: Bus) -> None:
    broker, begun, gate = BusBroker(bus), [], asyncio.Event()
    jobs = job_subscriber(broker)

    @jobs
    async def take(work: Work) -> None:
        begun.append(work.number)
        await gate.wait()

    async with running(broker, jobs):
        await publish_jobs(bus, 1)
        await eventually(lambda: begun)
        await publish_jobs(bus, 2, 3)
        assert await delivered(bus) == 3
        gate.set()
        await eventually(lambda: begun == [1, 2, 3])


async def test_middlewares_see_every_job_also_one_that_was_added_later(bus: Bus, own_way: list[Any]) -> None:
    Noting.seen = []
    broker, seen = BusBroker(bus, middlewares=[Noting]), []
    jobs = job_subscriber(broker)

    @jobs
    async def take(work: Work) -> None:
        seen.append(work.number)

    async with running(broker, jobs):
        await publish_jobs(bus, 1, 2)
        await eventually(lambda: seen == [1, 2])
        assert Noting.seen == [b"1", b"2"]
        broker.add_middleware(Noting)
        await publish_jobs(bus, 3)
        await eventually(lambda: seen == [1, 2, 3])
    assert Noting.seen == [b"1", b"2", b"3", b"3"]
    assert len(own_way) == 3


async def test_a_middleware_that_is_added_while_jobs_come_sees_the_next_one(bus: Bus, own_way: list[Any]) -> None:
    Noting.seen = []
    broker, seen = BusBroker(bus), []
    jobs = job_subscriber(broker)

    @jobs
    async def take(work: Work) -> None:
        seen.append(work.number)

    async with running(broker, jobs):
        await publish_jobs(bus, 1)
        await eventually(lambda: seen == [1])
        broker.add_middleware(Noting)
        await publish_jobs(bus, 2)
        await eventually(lambda: seen == [1, 2])
    assert Noting.seen == [b"2"]
    assert len(own_way) == 1


async def test_a_handler_may_depend_on_something(bus: Bus, own_way: list[Any]) -> None:
    broker, seen, made = BusBroker(bus), [], []
    jobs = job_subscriber(broker)

    async def clock() -> str:
        made.append(1)
        return "now"

    @jobs
    async def take(work: Work, when: Annotated[str, Depends(clock)]) -> None:
        seen.append((work.number, when))

    async with running(broker, jobs):
        await publish_jobs(bus, 1, 2)
        await eventually(lambda: seen == [(1, "now"), (2, "now")])
    assert len(made) == len(own_way) == 2


async def test_a_handler_may_want_a_context(bus: Bus, own_way: list[Any]) -> None:
    broker, seen = BusBroker(bus), []
    jobs = job_subscriber(broker)

    @jobs
    async def take(work: Work, message: NatsMessage) -> None:
        assert message.raw_message is work.delivery
        seen.append(message.body)
        await message.ack()

    async with running(broker, jobs):
        await publish_jobs(bus, 1)
        await eventually(lambda: seen == [b"1"])
        await bus.nc.flush()
        assert await unacked(bus) == 0
    assert len(own_way) == 1


async def test_several_handlers_get_what_their_filters_let_pass(bus: Bus, own_way: list[Any]) -> None:
    broker, odd, rest = BusBroker(bus), [], []
    jobs = job_subscriber(broker)

    async def is_odd(message: NatsMessage) -> bool:
        return bool(int(message.body) % 2)

    @jobs(filter=is_odd)
    async def take_odd(work: Work) -> None:
        odd.append(work.number)

    @jobs
    async def take_rest(work: Work) -> None:
        rest.append(work.number)

    async with running(broker, jobs):
        await publish_jobs(bus, 1, 2, 3, 4)
        await eventually(lambda: len(odd) + len(rest) == 4)
    assert (odd, rest) == ([1, 3], [2, 4])
    assert len(own_way) == 4


async def test_a_handler_that_blocks_runs_in_a_thread(bus: Bus, own_way: list[Any]) -> None:
    broker, seen = BusBroker(bus), []
    jobs = job_subscriber(broker)

    @jobs
    def take(work: Work) -> None:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        seen.append(work.number)

    async with running(broker, jobs):
        await publish_jobs(bus, 1)
        await eventually(lambda: seen == [1])
    assert len(own_way) == 1


async def test_a_test_client_calls_the_handler_without_a_broker() -> None:
    broker, seen = BusBroker(None), []
    jobs = job_subscriber(broker)

    @jobs
    async def take(work: Work) -> None:
        seen.append(work.number)

    async with TestNatsBroker(broker):
        await broker.publish(b"7", "ps.work.aggregated.worker-1")
        take.mock.assert_called_once()
        with pytest.raises(Exception, match="invalid literal"):
            await broker.publish(b"seven", "ps.work.aggregated.worker-1")
    assert seen == [7]


async def test_a_test_client_on_a_real_broker_sees_the_calls(bus: Bus, own_way: list[Any]) -> None:
    broker = BusBroker(bus)
    jobs = job_subscriber(broker)

    @jobs
    async def take(work: Work) -> None:
        await bus.nc.publish(work.delivery.reply, ACK)

    async with TestNatsBroker(broker, with_real=True):
        await publish_jobs(bus, 3)
        await take.wait_call(10)
        take.mock.assert_called_once()
        await jobs.stop()
        bus.closing = True  # the test client closes the connection
    assert len(own_way) == 1


# -- the start and the end ----------------------------------------------------------------------------------------


async def test_a_job_that_comes_in_the_moment_of_the_start_is_handled(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FastStream drops what comes before ``start`` has returned."""
    broker, seen, publish = BusBroker(bus), [], bus.nc.publish
    jobs = job_subscriber(broker)

    @jobs
    async def take(work: Work) -> None:
        seen.append(work.number)

    async def publish_until_answered(subject: str, *args: Any, **kwargs: Any) -> None:
        await publish(subject, *args, **kwargs)
        if ".MSG.NEXT." in subject:
            await eventually(lambda: bool(seen))

    await publish_jobs(bus, 1)
    monkeypatch.setattr(bus.nc, "publish", publish_until_answered)
    await broker.connect()
    await jobs.start()
    assert seen == [1]
    await broker.remove(jobs)


async def test_what_is_on_its_way_is_handled_before_a_stop_and_nothing_after_it(bus: Bus) -> None:
    broker, seen, gate = BusBroker(bus), [], asyncio.Event()
    jobs = job_subscriber(broker)

    @jobs
    async def take(work: Work) -> None:
        await gate.wait()
        seen.append(work.number)

    await publish_jobs(bus, 1, 2, 3)
    await broker.connect()
    await jobs.start()
    await asyncio.wait_for(sent(bus, 3), 10)
    await bus.nc.flush()  # they are here
    stopping = asyncio.create_task(jobs.stop())
    await asyncio.sleep(0)
    gate.set()
    await stopping
    assert seen == [1, 2, 3]
    await publish_jobs(bus, 4)
    await bus.nc.flush()
    assert seen == [1, 2, 3]


async def test_a_handler_may_stop_its_subscriber(bus: Bus) -> None:
    broker, seen = BusBroker(bus), []
    jobs = job_subscriber(broker)

    @jobs
    async def take(work: Work) -> None:
        seen.append(work.number)
        raise StopConsume

    await publish_jobs(bus, 1, 2)
    async with running(broker, jobs):
        await eventually(lambda: not jobs.running)
    assert seen == [1]


async def test_subscribers_that_come_and_go_leave_nothing_behind(bus: Bus) -> None:
    broker = BusBroker(bus)
    await broker.connect()
    left: weakref.WeakSet[Any] = weakref.WeakSet()
    tasks, subs = len(asyncio.all_tasks()), len(bus.nc._subs)

    async def come_and_go(number: int) -> None:  # FastStream keeps the local names of whoever starts a subscriber
        subject = f"{bus.subjects.namespace}.x.{number}"
        made = [
            job_subscriber(broker),
            broker.orders(subject, bytes, payload=bytes, title="Orders"),
            broker.orders(f"{subject}.y", bytes, payload=bytes, title="Several", at_once=4),
        ]
        for subscriber in made:

            @subscriber
            async def take(work: Any) -> None:
                pass

            await subscriber.start()
            left.add(subscriber)
        assert len(broker.subscribers) == 3
        for subscriber in made:
            await broker.remove(subscriber)

    for number in range(5):
        await asyncio.create_task(come_and_go(number))
    assert broker.subscribers == []
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks)
    gc.collect()
    assert list(left) == []
    assert (len(bus.nc._subs), len(bus.on_reconnect)) == (subs, 0)


async def test_it_resumes_at_once_after_the_server_was_killed(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects
) -> None:
    server = make_broker()
    await server.start()
    async with opened(server, subjects) as bus:
        await make_consumer(bus)
        broker, seen = BusBroker(bus), []
        jobs = job_subscriber(broker)

        @jobs
        async def take(work: Work) -> None:
            seen.append(work.number)
            await bus.nc.publish(work.delivery.reply, ACK)

        async with running(broker, jobs):
            await publish_jobs(bus, 1)
            await eventually(lambda: seen == [1])
            server.kill()
            await eventually(lambda: not bus.connected)
            await server.start()
            await eventually(lambda: bus.connected)
            await publish_jobs(bus, 2)
            await eventually(lambda: seen[-1] == 2, within_s=5)


# -- what goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("middlewares", [[], [Noting], [Forgiving]], ids=["short", "own", "forgiving"])
async def test_a_job_that_cannot_be_read_is_terminated_and_logged(bus: Bus, middlewares: list[Any]) -> None:
    broker, seen = BusBroker(bus, middlewares=middlewares), []
    jobs = job_subscriber(broker)

    @jobs
    async def take(work: Work) -> None:
        seen.append(work.number)

    with capture_logs() as logs:
        async with running(broker, jobs):
            await bus.js.publish(bus.subjects.work("aggregated", CONSUMER), b"seven")
            await publish_jobs(bus, 8)
            await eventually(lambda: seen == [8])
            await bus.nc.flush()
            assert await unacked(bus) == 1  # the other one
    errors = [entry for entry in logs if entry["log_level"] == "error"]
    assert [entry["event"] for entry in errors] == ["job_unreadable"]
    assert "seven" in errors[0]["error"]


@pytest.mark.parametrize("middlewares", [[], [Noting]], ids=["short", "own"])
async def test_an_exception_of_a_handler_is_logged_and_its_job_comes_again(bus: Bus, middlewares: list[Any]) -> None:
    broker, seen = BusBroker(bus, middlewares=middlewares), []
    jobs = job_subscriber(broker)

    @jobs
    async def take(work: Work) -> None:
        seen.append(work.number)
        if work.number == 1:
            raise RuntimeError("no")

    with capture_logs() as logs:
        async with running(broker, jobs):
            await publish_jobs(bus, 1, 2)
            await eventually(lambda: seen == [1, 2])
            await bus.nc.flush()
            assert await unacked(bus) == 2
    errors = [entry for entry in logs if entry["log_level"] == "error"]
    assert [(entry["event"], entry["exc_info"]) for entry in errors] == [("handler_failed", True)]
