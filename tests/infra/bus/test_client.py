"""Our ways through nats-py's client, on a real broker."""

import asyncio
import json
import time

import pytest
import uvloop
from nats.errors import BadSubjectError, Error, NoRespondersError

from penstock.infra.bus import client
from penstock.infra.bus.client import BusClient, Frame, Headers
from penstock.infra.bus.connection import connect as bus_connect
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import ServingError
from tests.conftest import Connect
from tests.infra.bus.support import eventually

MANY = 2_000


async def test_a_direct_handler_gets_each_message_once_and_in_order(broker: EmbeddedNats, connect: Connect) -> None:
    nc, other = await connect(broker), await connect(broker)
    found: list[Frame] = []
    await nc.subscribe_direct("bus-test.direct.*", found.append)
    await nc.flush()
    for number in range(MANY):
        await other.publish(f"bus-test.direct.{number % 7}", b"x" * (number % 5000), headers={"Number": str(number)})
    await eventually(lambda: len(found) == MANY)
    assert [int(Headers(message.headers)["Number"]) for message in found] == list(range(MANY))
    assert all(len(message.data) == number % 5000 for number, message in enumerate(found))


async def test_other_tasks_run_between_the_messages_of_one_read(broker: EmbeddedNats, connect: Connect) -> None:
    nc, other = await connect(broker), await connect(broker)
    order: list[str] = []

    def handle(frame: Frame) -> None:
        time.sleep(1.1 * client.READ_S)
        order.append("message")

    await nc.subscribe_direct("bus-test.direct.slow", handle)
    await nc.flush()
    for _ in range(20):
        assert other.post("bus-test.direct.slow", b"x")  # in one write, and so in few reads
    while order.count("message") < 20:
        order.append("other")
        await asyncio.sleep(0)
    between = "".join(each[0] for each in order).split("o")
    assert max(map(len, between)) == 1


async def test_a_direct_handler_gets_what_arrives_without_waking_the_task_that_reads(
    broker: EmbeddedNats, connect: Connect
) -> None:
    nc, other = await connect(broker), await connect(broker)
    found: list[bytes] = []
    await nc.subscribe_direct("bus-test.direct.one", lambda frame: found.append(frame.data))
    await nc.flush()
    reads = 0
    parse = nc._ps.parse

    async def counted(data: bytes = b"") -> None:
        nonlocal reads
        reads += 1
        await parse(data)

    nc._ps.parse = counted
    for number in range(50):
        await other.publish("bus-test.direct.one", b"%d" % number)
        await eventually(lambda expected=number + 1: len(found) == expected)
    assert reads == 0
    assert nc.stats["in_msgs"] >= 50


async def test_what_arrives_keeps_its_order_when_some_of_it_has_to_be_awaited(
    broker: EmbeddedNats, connect: Connect
) -> None:
    errors: list[str] = []
    nc, other = await connect(broker, errors=errors), await connect(broker)
    found: list[int] = []

    def handle(frame: Frame) -> None:
        found.append(int(frame.data))
        if not found[-1] % 9:
            raise ValueError("no good")

    await nc.subscribe_direct("bus-test.mixed.direct", handle)
    queued = await nc.subscribe("bus-test.mixed.queued")
    await nc.flush()
    for number in range(MANY):
        where = "queued" if number % 4 == 3 else "direct"
        await other.publish(f"bus-test.mixed.{where}", b"%d" % number)
        if number % 50 == 0:
            await nc.flush()  # its answer, a line, lies among them
    direct = [number for number in range(MANY) if number % 4 != 3]
    await eventually(lambda: len(found) == len(direct) and len(errors) == sum(not each % 9 for each in direct))
    assert found == direct
    assert [int((await queued.next_msg()).data) for _ in range(MANY // 4)] == list(range(3, MANY, 4))


async def test_a_malformed_line_ends_the_link_and_nothing_behind_it_is_handled(
    broker: EmbeddedNats, connect: Connect
) -> None:
    nc = await connect(broker)
    found: list[bytes] = []
    sub = await nc.subscribe_direct("bus-test.malformed", lambda frame: found.append(frame.data))
    await nc.flush()
    message = b"MSG bus-test.malformed %d 1\r\n%%d\r\n" % sub._id
    nc.link._io_reader.feed_data(message % 1 + b"MSG ?\r\n" + message % 2)
    await eventually(lambda: nc.stats["reconnects"] == 1 and nc.is_connected)
    await nc.publish("bus-test.malformed", b"again")
    await eventually(lambda: len(found) == 2)
    assert found == [b"1", b"again"]


async def test_a_wrong_password_is_reported_as_such(broker: EmbeddedNats) -> None:
    server = broker.url().rpartition("@")[2]
    with pytest.raises(ServingError, match=f"{server} within 0.3 s .*Authorization Violation.*credentials"):
        await bus_connect(f"nats://operator:wrong@{server}", role="operator", name="test", timeout=0.3)


async def test_servers_that_a_cluster_no_longer_announces_are_forgotten() -> None:
    """Pods of a broker have other addresses after each upgrade, and those of before answer nobody."""
    links: list[asyncio.StreamWriter] = []

    def announce(writer: asyncio.StreamWriter, *addresses: str) -> None:
        about = {"server_id": "S", "max_payload": 1 << 20, "connect_urls": addresses}
        writer.write(b"INFO " + json.dumps(about).encode() + b"\r\n")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        links.append(writer)
        announce(writer, "10.0.0.1:4222", "10.0.0.2:4222")
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    nc, place = BusClient(), f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, asyncio.timeout(20):
        await nc.connect(f"nats://{place}")
        assert {each.netloc for each in nc.discovered_servers} == {"10.0.0.1:4222", "10.0.0.2:4222"}
        announce(links[0], "10.0.0.2:4222", "10.0.0.3:4222")
        await eventually(lambda: "10.0.0.3:4222" in {each.netloc for each in nc.discovered_servers})
        assert {each.netloc for each in nc.servers} == {place, "10.0.0.2:4222", "10.0.0.3:4222"}
        await nc.close()


async def test_messages_larger_than_a_read_arrive_whole(broker: EmbeddedNats, connect: Connect) -> None:
    nc = await connect(broker)
    found: list[bytes] = []
    await nc.subscribe_direct("bus-test.large", lambda message: found.append(message.data))
    large = bytes(range(256)) * 3000
    await nc.publish("bus-test.large", large)
    await nc.publish("bus-test.large", b"small", reply="bus-test.reply")
    await eventually(lambda: len(found) == 2)
    assert found == [large, b"small"]


async def test_an_error_of_a_direct_handler_is_reported_and_ends_nothing(
    broker: EmbeddedNats, connect: Connect
) -> None:
    errors: list[str] = []
    nc = await connect(broker, errors=errors)
    found: list[bytes] = []

    def handle(message: Frame) -> None:
        found.append(message.data)
        raise ValueError("no good")

    await nc.subscribe_direct("bus-test.failing", handle)
    for data in (b"1", b"2"):
        await nc.publish("bus-test.failing", data)
    await eventually(lambda: len(errors) == 2)
    assert found == [b"1", b"2"]
    assert errors == ["no good", "no good"]


async def test_a_direct_subscription_ends_with_unsubscribe(broker: EmbeddedNats, connect: Connect) -> None:
    nc = await connect(broker)
    found: list[bytes] = []
    sub = await nc.subscribe_direct("bus-test.ending", lambda message: found.append(message.data))
    await sub.unsubscribe()
    await nc.publish("bus-test.ending", b"late")
    await nc.flush()
    await nc.flush()
    assert found == []
    assert nc._handlers == {}


async def test_a_direct_subscription_survives_a_reconnect(broker: EmbeddedNats, connect: Connect) -> None:
    nc = await connect(broker)
    found: list[bytes] = []
    await nc.subscribe_direct("bus-test.again", lambda message: found.append(message.data))
    await nc.flush()
    nc.link.close()
    await eventually(lambda: nc.stats["reconnects"] == 1 and nc.is_connected)
    await nc.publish("bus-test.again", b"here")
    await eventually(lambda: found == [b"here"])


async def test_headers_reach_subscriptions_with_a_queue(broker: EmbeddedNats, connect: Connect) -> None:
    nc = await connect(broker)
    sub = await nc.subscribe("bus-test.queued")
    await nc.publish("bus-test.queued", b"1", headers={"Name": " value "})
    await nc.publish("bus-test.queued", b"2", headers={"Name": "zwölf"})
    first, second = await sub.next_msg(), await sub.next_msg()
    assert (first.headers, second.headers) == ({"Name": "value"}, {"Name": "zwölf"})


async def test_a_bad_subject_or_header_raises_as_in_nats_py(broker: EmbeddedNats, connect: Connect) -> None:
    nc = await connect(broker)
    with pytest.raises(BadSubjectError):
        await nc.publish("a b", b"")
    with pytest.raises(Error):
        await nc.publish("a", b"", headers={"a b": "1"})
    with pytest.raises(Error):
        await nc.publish("a", b"x" * (nc.max_payload + 1))


async def test_what_is_published_is_sent_while_the_server_reads_slowly(broker: EmbeddedNats, connect: Connect) -> None:
    """More than the socket takes at once: the flusher waits, and order is kept."""
    nc, other = await connect(broker), await connect(broker)
    found: list[bytes] = []
    await other.subscribe_direct("bus-test.bulk", lambda message: found.append(message.data[:4]))
    await other.flush()
    for number in range(200):
        await nc.publish("bus-test.bulk", number.to_bytes(4, "big") + b"x" * 100_000)
        if number % 10 == 0:
            await asyncio.sleep(0)
    await nc.flush(timeout=10)
    await eventually(lambda: len(found) == 200)
    assert found == [number.to_bytes(4, "big") for number in range(200)]


async def test_a_post_is_left_to_publish_while_the_link_is_down(broker: EmbeddedNats, connect: Connect) -> None:
    nc = await connect(broker)
    assert nc.post("bus-test.post", b"1")
    assert not nc.post("a b", b"")
    await nc.close()
    assert not nc.post("bus-test.post", b"2")


class SlowSocket:
    """A transport whose buffer is full until ``drain`` returns; what it was given is in ``written``."""

    def __init__(self) -> None:
        self.buffered, self.written, self.drained = 0, bytearray(), asyncio.Event()
        self.writer = self.transport = self

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: list[bytes]) -> None:
        self.written += b"".join(parts)

    async def drain(self) -> None:
        await self.drained.wait()


async def test_while_the_socket_is_full_nothing_is_written_but_by_the_flusher() -> None:
    nc, socket = BusClient(), SlowSocket()
    nc._transport, nc._status, nc._flush_queue, nc._max_pending_size = socket, nc.CONNECTED, asyncio.Queue(), 1 << 20
    flusher = asyncio.create_task(nc._flusher())
    assert nc.post("a", b"1")
    await asyncio.sleep(0)
    assert socket.written == b"PUB a  1\r\n1\r\n"
    socket.buffered = 1 << 20
    assert nc.post("a", b"2")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert socket.written.endswith(b"2\r\n")  # the flusher writes once, and waits
    for number in range(3, 6):
        assert nc.post("a", b"%d" % number)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert socket.written.endswith(b"2\r\n")
    socket.buffered = 0
    socket.drained.set()
    for _ in range(4):
        await asyncio.sleep(0)
    assert socket.written.endswith(b"3\r\nPUB a  1\r\n4\r\nPUB a  1\r\n5\r\n")
    flusher.cancel()


async def test_a_link_that_is_read_with_pauses_gets_each_message_once_and_in_order(
    broker: EmbeddedNats, connect: Connect
) -> None:
    nc, other = await connect(broker), await connect(broker)
    found: list[bytes] = []
    await nc.subscribe_direct("bus-test.paused", lambda message: found.append(message.data[:8]))
    await nc.flush()
    reads = 0
    parse = nc._ps.parse

    async def counted(data: bytes = b"") -> None:
        nonlocal reads
        reads += 1
        await parse(data)

    nc._ps.parse = counted
    nc.read_pause_s = 0.02
    for number in range(100):
        await other.publish("bus-test.paused", b"%08d" % number)
        await other.flush()
    await eventually(lambda: len(found) == 100)
    assert reads < 90, "messages that came one by one were read together"
    for number in range(100, 400):  # more than one read of what the kernel keeps
        await other.publish("bus-test.paused", b"%08d" % number + bytes(10_000))
    await eventually(lambda: len(found) == 400)
    assert found == [b"%08d" % number for number in range(400)]
    await nc.flush()
    nc.link.close()
    await eventually(lambda: nc.stats["reconnects"] == 1 and nc.is_connected)
    nc.read_pause_s = 0.0
    await nc.flush()
    await other.publish("bus-test.paused", b"after it")
    await eventually(lambda: found[-1] == b"after it")


async def test_what_nobody_waits_for_leaves_with_what_is_published_next_or_soon(
    broker: EmbeddedNats, connect: Connect
) -> None:
    nc, other = await connect(broker), await connect(broker)
    found: list[bytes] = []
    await other.subscribe_direct("bus-test.later", lambda message: found.append(message.data))
    await other.flush()
    written: list[bytes] = []
    writer = nc.link.writer
    write = writer.write
    writer.write = lambda data: (written.append(data), write(data))
    assert nc.post("bus-test.later", b"1", later=True)
    await asyncio.sleep(0)
    assert not written
    assert nc.post("bus-test.later", b"2")
    await eventually(lambda: len(found) == 2)
    assert len(written) == 1
    assert nc.post("bus-test.later", b"3", later=True)
    await eventually(lambda: found == [b"1", b"2", b"3"])


async def test_what_nobody_waits_for_is_sent_before_the_connection_closes(
    broker: EmbeddedNats, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_LATER_S", 3600.0)
    nc, other = await connect(broker), await connect(broker)
    found: list[bytes] = []
    await other.subscribe_direct("bus-test.closed", lambda message: found.append(message.data))
    await other.flush()
    assert nc.post("bus-test.closed", b"1", later=True)
    await nc.flush()
    await eventually(lambda: found == [b"1"])
    assert nc.post("bus-test.closed", b"2", later=True)
    await nc.close()
    await eventually(lambda: found == [b"1", b"2"])


@pytest.mark.parametrize("connected", [True, False])
async def test_a_callback_waits_for_the_write_of_what_was_published_before_it(
    broker: EmbeddedNats, connect: Connect, *, connected: bool
) -> None:
    nc = await connect(broker)
    done: list[bytes] = []
    nc.link.writer.write = done.append
    nc.when_written(lambda: done.append(b"nothing waits"))
    assert nc.post("bus-test.then", b"1")
    nc.when_written(lambda: done.append(b"written"))
    if not connected:
        nc._status = nc.RECONNECTING
    for _ in range(3):
        await asyncio.sleep(0)
    nc._status = nc.CONNECTED
    assert done == [b"nothing waits", *([b"PUB bus-test.then  1\r\n1\r\n"] if connected else []), b"written"]


async def test_turns_leave_in_one_write_while_more_is_expected_but_not_many(
    broker: EmbeddedNats, connect: Connect
) -> None:
    nc = await connect(broker)
    written: list[bytes] = []
    nc.link.writer.write = written.append
    expected = True
    nc.expects_more = lambda: expected
    for _ in range(3):
        assert nc.post("bus-test.turns", b"1")
        await asyncio.sleep(0)
    assert not written
    expected = False
    await asyncio.sleep(0)
    assert len(written) == 1
    expected = True
    assert nc.post("bus-test.turns", b"2")
    for _ in range(client.MOST_TURNS + 1):
        assert len(written) == 1
        await asyncio.sleep(0)
    assert len(written) == 2


async def test_a_flush_is_over_when_what_was_sent_before_it_was_read(broker: EmbeddedNats, connect: Connect) -> None:
    nc = await connect(broker)
    written: list[bytes] = []
    write = nc.link.write

    def note(data: bytes) -> None:
        written.append(data)
        write(data)

    nc.link.write = note
    await nc.subscribe_direct("bus-test.flushed", lambda message: None)
    await nc.publish("bus-test.flushed", b"1")
    await nc.flush()
    sent = b"".join(written)
    assert sent.index(b"SUB bus-test.flushed") < sent.index(b"PUB bus-test.flushed") < sent.index(b"PING")


@pytest.mark.parametrize("use", ["flush", "publish", "request", "ping", "subscribe"])
async def test_whatever_meets_a_link_that_uvloop_has_just_closed_is_told_of_no_program_error(
    broker: EmbeddedNats, use: str
) -> None:
    """uvloop raises RuntimeError there, which nobody takes for a broken link."""
    await asyncio.to_thread(uvloop.run, uses_a_closed_link(broker.url(), use))


async def uses_a_closed_link(url: str, use: str) -> None:
    nc = BusClient()
    await nc.connect_within(10, [url], reconnect_time_wait=0.01)
    try:
        heard: list[bytes] = []
        await nc.subscribe_direct("bus-test.closed", lambda frame: heard.append(frame.data))
        await nc.flush()
        link = nc.link.writer.transport
        link.abort()
        while "closed=True" not in repr(link):  # noqa: ASYNC110 - uvloop closes it
            await asyncio.sleep(0)
        assert nc.is_connected, "nobody has noticed"
        match use:
            case "flush":
                await nc.publish("bus-test.closed", b"first")
                with pytest.raises(ConnectionResetError):
                    await nc.flush()
            case "publish":
                await nc.publish("bus-test.closed", b"first")
            case "request":
                with pytest.raises(NoRespondersError):
                    await nc.request("bus-test.nobody", b"")
            case "ping":
                await nc._send_ping()
            case "subscribe":
                await nc.subscribe("bus-test.other")
        await eventually(lambda: nc.stats["reconnects"] == 1)
        await nc.publish("bus-test.closed", b"second")
        await eventually(lambda: bool(heard) and heard[-1] == b"second")
        assert heard[:-1] == ([b"first"] if use in ("flush", "publish") else [])
    finally:
        await nc.close()
