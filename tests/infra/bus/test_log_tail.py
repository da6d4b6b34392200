"""Following a stream on a real nats-server: every stored entry once, in stream order, whatever is lost on the way."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import structlog.testing
from nats.errors import NoRespondersError

from penstock.infra.bus import log_tail as module
from penstock.infra.bus.client import Frame, Headers
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, read
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.bus.publisher import Publisher
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import eventually, opened
from tests.infra.nats_server.support import lose_end
from tests.properties import some


class Follower:
    """A tail of TOKENS that notes what it is given, and can be made deaf to live messages."""

    def __init__(self, bus: Bus, subject: str = "") -> None:
        self.bus = bus
        self.entries: list[Entry] = []
        self.deaf: Callable[[Entry], bool] = lambda entry: False
        self.subject = subject or bus.subjects.all("tokens")
        self.tail = LogTail(bus, bus.subjects.stream("TOKENS"), self.subject, self.entries.append)
        self.hear = self.tail.on_live
        self.tail.on_live = self._on_live  # type: ignore[method-assign]

    def _on_live(self, frame: Frame) -> None:
        headers = Headers(frame.headers)
        entry = Entry(frame.subject.decode(), int(headers.get("Nats-Sequence", 0)), frame.data, headers)
        if not self.deaf(entry):
            self.hear(frame)

    @property
    def seqs(self) -> list[int]:
        return [entry.seq for entry in self.entries]

    async def is_complete(self, last: int) -> None:
        """Wait for the last entry, then compare with the stream."""
        await eventually(lambda: self.tail.position >= last)
        stored = [e async for e in read(self.bus, self.bus.subjects.stream("TOKENS"), self.subject)]
        assert [(e.seq, e.subject, e.data) for e in self.entries] == [(e.seq, e.subject, e.data) for e in stored]


async def put(bus: Bus, gateway: str, count: int = 1) -> int:
    """Store messages; the last one's sequence."""
    seq = 0
    for number in range(count):
        seq = (await bus.js.publish(bus.subjects.tokens(gateway), b"%d" % number)).seq
    return seq


async def test_past_and_present_join_without_loss_or_duplicate(bus: Bus, broker: EmbeddedNats) -> None:
    async with opened(broker, bus.subjects) as other:
        done = asyncio.Event()

        async def produce(gateway: str) -> None:
            for number in range(400):
                await other.nc.publish(bus.subjects.tokens(gateway), b"%d" % number)
                if number % 8 == 0:
                    await other.nc.flush()
            if gateway == "c":
                done.set()

        producing = [asyncio.create_task(produce(gateway)) for gateway in "abc"]
        await put(bus, "first", 20)
        followers = [Follower(bus), Follower(bus, bus.subjects.tokens("b"))]
        for follower in followers:
            await follower.tail.start()
        await asyncio.gather(*producing)
        last = [await put(other, "first"), await put(other, "b")]
        for follower in followers:
            await follower.is_complete(last[1])
        assert len(followers[0].entries) == 1222
        assert len(followers[1].entries) == 401
        for follower in followers:
            await follower.tail.stop()


async def test_only_what_came_since_a_time_is_handled(bus: Bus) -> None:
    last = await put(bus, "a", 3)
    since = time.time_ns()
    follower = Follower(bus)
    async with follower.tail.following(since_ns=since):
        assert follower.entries == []
        await put(bus, "a", 2)
        await eventually(lambda: follower.seqs == [last + 1, last + 2])


async def test_only_what_came_after_a_sequence_is_handled(bus: Bus) -> None:
    last = await put(bus, "a", 5)
    follower = Follower(bus)
    async with follower.tail.following(after=last - 2):
        assert follower.seqs == [last - 1, last]


async def test_without_losses_nothing_is_read_again(bus: Bus) -> None:
    await put(bus, "a", 5)
    everything, one = Follower(bus), Follower(bus, bus.subjects.tokens("b"))
    await everything.tail.start()
    await one.tail.start()
    await put(bus, "a", 5)
    await put(bus, "b", 5)
    await put(bus, "a", 5)
    last = await put(bus, "b", 5)
    await everything.is_complete(last)
    await one.is_complete(last)
    assert everything.tail.repairs == one.tail.repairs == 0
    await everything.tail.stop()
    await one.tail.stop()


async def test_a_tail_that_is_left_follows_no_more(bus: Bus) -> None:
    follower = Follower(bus)
    async with follower.tail.following():
        seen = await put(bus, "a")
        await follower.is_complete(seen)
    await put(bus, "a")
    await bus.nc.flush()
    assert follower.seqs == [seen]
    assert not bus.on_reconnect


async def test_a_lost_message_is_read_from_the_stream_before_the_next_is_handled(bus: Bus) -> None:
    follower = Follower(bus, bus.subjects.tokens("a"))
    async with follower.tail.following():
        last = await put(bus, "a", 3)
        await follower.is_complete(last)
        follower.deaf = lambda entry: entry.seq in (last + 1, last + 2)
        await follower.is_complete(await put(bus, "a", 3))
        assert follower.tail.repairs == 1


async def test_a_loss_on_one_subject_shows_in_the_next_message_of_another(bus: Bus) -> None:
    """Else a fold of the whole stream would run ahead of what it missed."""
    follower = Follower(bus)
    async with follower.tail.following():
        last = await put(bus, "a", 2)
        await follower.is_complete(last)
        follower.deaf = lambda entry: entry.seq == last + 1
        await put(bus, "a")
        await follower.is_complete(await put(bus, "b"))
        assert follower.seqs == list(range(1, last + 3))


async def test_a_filter_that_leaves_out_some_subjects_still_sees_all_it_asked_for(bus: Bus) -> None:
    entries: list[Entry] = []
    subject = bus.subjects.all("returned")
    tail = LogTail(bus, bus.subjects.stream("DONE"), subject, entries.append)
    await tail.start()
    for number in range(20):
        await bus.js.publish(bus.subjects.done("t", "m", "r"), b"")
        if number % 3 == 0:
            await bus.js.publish(bus.subjects.returned("m"), b"%d" % number)
    await eventually(lambda: [int(entry.data) for entry in entries] == list(range(0, 20, 3)))
    await tail.stop()


async def test_random_losses_never_show(bus: Bus) -> None:
    follower = Follower(bus)
    follower.deaf = lambda entry: entry.seq * 2654435761 % 7 == 0
    async with follower.tail.following():
        for number in range(600):
            await bus.nc.publish(bus.subjects.tokens("abc"[number % 3]), b"%d" % number)
            if number % 50 == 0:
                await bus.nc.flush()
        follower.deaf = lambda entry: False
        await follower.is_complete(await put(bus, "a"))


async def test_a_lost_tail_is_read_by_catch_up(bus: Bus) -> None:
    follower = Follower(bus)
    async with follower.tail.following():
        follower.deaf = lambda entry: True
        last = await put(bus, "a", 3)
        await bus.nc.flush()
        assert follower.entries == []
        await follower.tail.catch_up()
        assert follower.tail.position == last
        await follower.is_complete(last)


async def test_forged_live_messages_are_ignored(bus: Bus) -> None:
    follower = Follower(bus)
    async with follower.tail.following():
        live = bus.subjects.live(bus.subjects.tokens("a"))
        await bus.nc.publish(live, b"forged")
        await bus.nc.publish(live, b"forged", headers={"Nats-Subject": bus.subjects.tokens("a")})
        await bus.nc.publish(
            live, b"forged", headers={"Nats-Subject": "x", "Nats-Sequence": "many", "Nats-Last-Sequence": "0"}
        )
        await follower.is_complete(await put(bus, "a"))
        assert follower.tail.repairs == 0


async def test_an_entry_behind_a_gap_that_nobody_can_fill_is_not_waited_for_for_ever(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its predecessor, and it too, were removed before they could be read (an expired key)."""
    monkeypatch.setattr(module, "REREAD_S", 0.005)
    stream = bus.subjects.stream("TOKENS")
    follower = Follower(bus)
    async with follower.tail.following():
        last = await put(bus, "a")
        await follower.is_complete(last)
        held: list[Any] = []
        hear = follower.hear

        follower.hear = held.append
        await put(bus, "a", 2)
        await eventually(lambda: len(held) == 2)
        await bus.js.purge_stream(stream)
        follower.hear = hear
        hear(held[1])
        await eventually(lambda: follower.seqs == [last, last + 2])
        await put(bus, "a")
        await eventually(lambda: follower.seqs == [last, last + 2, last + 3])


@pytest.mark.parametrize("subject", ["", "a"])
@pytest.mark.parametrize("count", [2, 9])
async def test_a_recreated_stream_while_the_link_stands_is_followed_from_its_start(
    bus: Bus, subject: str, count: int
) -> None:
    """Its numbers begin at 1 again, and may have passed the old ones before anybody looks."""
    follower = Follower(bus, bus.subjects.tokens(subject) if subject else "")
    async with follower.tail.following():
        await put(bus, "a", 5)
        await eventually(lambda: len(follower.entries) == 5 and follower.tail.created)
        stream = bus.subjects.stream("TOKENS")
        config = (await bus.js.stream_info(stream)).config
        await bus.js.delete_stream(stream)
        await bus.js.add_stream(config)
        await put(bus, "a", count)
        await eventually(lambda: [int(e.data) for e in follower.entries[5:]] == list(range(count)))
        await put(bus, "a")
        await eventually(lambda: len(follower.entries) == 5 + count + 1)


async def test_a_recreated_stream_is_followed_from_its_start(bus: Bus) -> None:
    follower = Follower(bus)
    async with follower.tail.following():
        await put(bus, "a", 5)
        await eventually(lambda: len(follower.entries) == 5)
        stream = bus.subjects.stream("TOKENS")
        config = (await bus.js.stream_info(stream)).config
        await bus.js.delete_stream(stream)
        await bus.js.add_stream(config)
        await put(bus, "b", 2)
        await follower.tail.reconnected()
        await eventually(lambda: [e.subject for e in follower.entries[5:]] == [bus.subjects.tokens("b")] * 2)


async def test_a_stream_that_cannot_be_read_is_reported_once_until_it_can(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a service waited for its streams, its log had four lines a second of it."""
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    tries = 0
    follower = Follower(bus)

    async def check_end() -> None:
        nonlocal tries
        tries += 1
        if tries <= 20:
            raise OSError("it is away")

    async with follower.tail.following():
        monkeypatch.setattr(follower.tail, "_check_end", check_end)
        with structlog.testing.capture_logs() as logged:
            await follower.tail.catch_up()
        assert tries == 21
        said = [line["event"] for line in logged if line["event"].startswith("log_repair")]
        assert said == ["log_repair_failed", "log_repaired"]


async def test_a_handler_that_raises_does_not_end_the_tail(bus: Bus) -> None:
    seen: list[int] = []

    def handle(entry: Entry) -> None:
        seen.append(entry.seq)
        raise RuntimeError("handler")

    subject = bus.subjects.all("tokens")
    tail = LogTail(bus, bus.subjects.stream("TOKENS"), subject, handle)
    await put(bus, "a", 2)
    await tail.start()
    await put(bus, "a", 2)
    await eventually(lambda: seen == [1, 2, 3, 4])
    await tail.stop()


async def test_a_tail_that_cannot_start_leaves_nothing_behind(bus: Bus) -> None:
    subscriptions = len(bus.nc._subs)
    tail = LogTail(bus, "no_such_stream", "x", lambda entry: None, live="y")
    with pytest.raises(ServingError):
        await tail.start()
    assert not bus.on_reconnect
    assert len(bus.nc._subs) == subscriptions


@pytest.mark.parametrize("error", [TimeoutError(), NoRespondersError(), OSError()], ids=repr)
async def test_a_tail_of_memory_storage_whose_broker_goes_silent_as_it_starts_leaves_nothing_behind(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """What follows the tokens of a request with no_store: its client gets 503, not an internal error."""
    ask = bus.nc.request

    async def request(subject: str, *args: Any, **options: Any) -> Any:
        if "STREAM.INFO" in subject:
            raise error
        return await ask(subject, *args, **options)

    monkeypatch.setattr(bus.nc, "request", request)
    subscriptions, subject = len(bus.nc._subs), bus.subjects.tokens("memory.gw")
    tail = LogTail(bus, bus.subjects.stream("MEMORY_TOKENS"), subject, lambda entry: None)
    with pytest.raises(ServingError) as raised:
        await tail.start(memory_storage=True)
    assert raised.value.code is Code.broker_unavailable
    assert not bus.on_reconnect
    assert len(bus.nc._subs) == subscriptions


async def test_a_stopped_tail_receives_nothing_more(bus: Bus) -> None:
    follower = Follower(bus)
    await follower.tail.start()
    await put(bus, "a", 2)
    await eventually(lambda: len(follower.entries) == 2)
    await follower.tail.stop()
    await put(bus, "a", 2)
    await bus.nc.flush()
    assert len(follower.entries) == 2
    assert not bus.on_reconnect


async def test_every_stored_entry_is_handled_once_although_the_server_is_killed(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects
) -> None:
    server = make_broker()
    await server.start()
    async with opened(server, subjects) as bus, opened(server, subjects) as other:
        everything, one = Follower(bus), Follower(bus, subjects.tokens("a"))
        await everything.tail.start()
        await one.tail.start()
        publisher = Publisher(other)
        await publisher.open()
        futures: list[asyncio.Future[Any]] = []

        async def produce() -> None:
            for number in range(600):
                subject = subjects.tokens("abc"[number % 3])
                futures.append(await publisher.send(subject, b"%d" % number, f"id-{number}"))
                await asyncio.sleep(0.001)

        producing = asyncio.create_task(produce())

        def passed(limit: int) -> bool:
            return len(futures) > limit

        for limit in (100, 250, 400):
            await eventually(partial(passed, limit))
            server.kill()
            await eventually(lambda: not bus.connected)
            await server.start()
            await eventually(lambda: bus.connected)
        await producing
        last = max(ack.seq for ack in await asyncio.wait_for(asyncio.gather(*futures), 20))
        assert last == 600
        await everything.is_complete(600)
        await eventually(lambda: len(one.entries) == 200)
        await one.is_complete(0)
        await publisher.close()
        await everything.tail.stop()
        await one.tail.stop()


@pytest.mark.parametrize("subject", ["", "a"])
@pytest.mark.parametrize("erased", [False, True])
@pytest.mark.parametrize("stored", some([1, 2, 3, 5], 2, 5))
async def test_what_takes_the_sequences_of_lost_messages_is_handled(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects, subject: str, stored: int, erased: bool
) -> None:
    """A broker that lost power has lost the end of its streams. New messages there looked like those handled before,
    and were passed over for ever."""
    server = make_broker()
    await server.start()
    stream = subjects.stream("TOKENS")
    async with opened(server, subjects) as bus:
        follower = Follower(bus, subjects.tokens(subject) if subject else "")
        async with follower.tail.following():
            await put(bus, "a", 6)
            await eventually(lambda: follower.seqs == [1, 2, 3, 4, 5, 6])
            server.kill()
            await eventually(lambda: not bus.connected)
            lose_end(server.data_dir, stream, 3)
            before = follower.tail.reconnected  # only once the new messages are there

            async def later() -> None:
                return

            bus.on_reconnect[bus.on_reconnect.index(before)] = later
            await server.start()
            await eventually(lambda: bus.connected)
            follower.deaf = lambda entry: True
            assert await put(bus, "a", stored) == 3 + stored
            if erased and stored >= 3:
                await bus.js.delete_msg(stream, 6)
            bus.on_reconnect[bus.on_reconnect.index(later)] = before
            await before()
            kept = [1, 2, 3, *(seq for seq in range(4, 4 + stored) if seq != 6 or not erased)]
            await eventually(lambda: follower.seqs == [1, 2, 3, 4, 5, 6, *kept])


async def test_messages_of_a_stream_that_lost_its_end_behind_another_server_are_noticed(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects
) -> None:
    """In a cluster the link may stand while the server that has the stream restarts."""
    server = make_broker()
    await server.start()
    async with opened(server, subjects) as bus:
        follower = Follower(bus)
        async with follower.tail.following():
            await put(bus, "a", 6)
            await eventually(lambda: len(follower.seqs) == 6)
            server.kill()
            await eventually(lambda: not bus.connected)
            lose_end(server.data_dir, subjects.stream("TOKENS"), 3)
            bus.on_reconnect.remove(follower.tail.reconnected)
            await server.start()
            await eventually(lambda: bus.connected)
            await put(bus, "a", 2)
            await eventually(lambda: follower.seqs == [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5])


async def test_a_tail_that_has_handled_nothing_since_its_start_notices_a_lost_end(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects
) -> None:
    server = make_broker()
    await server.start()
    async with opened(server, subjects) as bus:
        await put(bus, "a", 6)
        follower = Follower(bus)
        async with follower.tail.following(after=6):
            await eventually(lambda: follower.tail._newest is not None)
            server.kill()
            await eventually(lambda: not bus.connected)
            lose_end(server.data_dir, subjects.stream("TOKENS"), 3)
            bus.on_reconnect.remove(follower.tail.reconnected)
            await server.start()
            await eventually(lambda: bus.connected)
            await put(bus, "a", 3)
            bus.on_reconnect.append(follower.tail.reconnected)
            await follower.tail.reconnected()
            await eventually(lambda: follower.seqs == [1, 2, 3, 4, 5, 6])


async def test_what_a_tail_has_passed_is_handled_again_from_where_it_is_rewound(bus: Bus) -> None:
    follower = Follower(bus)
    async with follower.tail.following():
        await put(bus, "a", 4)
        await eventually(lambda: follower.seqs == [1, 2, 3, 4])
        follower.tail.rewind(3)
        await eventually(lambda: follower.seqs == [1, 2, 3, 4, 3, 4])
        follower.tail.rewind(9)
        await put(bus, "a")
        await eventually(lambda: follower.seqs == [1, 2, 3, 4, 3, 4, 5])


async def test_after_a_reconnect_what_passed_unseen_is_read_without_waiting_for_more(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects
) -> None:
    server = make_broker()
    await server.start()
    async with opened(server, subjects) as bus:
        follower = Follower(bus)
        await follower.tail.start()
        follower.deaf = lambda entry: True
        last = await put(bus, "a", 3)
        server.kill()
        await eventually(lambda: not bus.connected)
        await server.start()
        await follower.is_complete(last)
        await follower.tail.stop()


async def test_a_tail_that_could_not_start_and_is_started_again_compares_its_position_when_it_is_silent(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a cluster, whose last message before a silence may not be republished."""
    monkeypatch.setattr(Bus, "clustered", property(lambda self: True))
    monkeypatch.setattr(module, "IDLE_S", 0.05)
    monkeypatch.setattr(module, "IDLE_AGAIN_S", 0.05)
    await bus.js.delete_stream(bus.subjects.stream("TOKENS"))
    follower = Follower(bus)
    follower.deaf = lambda entry: True
    with pytest.raises(ServingError):
        await follower.tail.start()
    await apply(bus.nc, topology(bus.subjects))
    async with follower.tail.following():
        await follower.is_complete(await put(bus, "a"))
