"""Limits of HTTP connections, on bare sockets: headers, times, numbers, clients that do not read, an orderly end."""

import asyncio
import gc
import json
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import structlog.testing

from penstock.gateway.http.server import FOLLOWED, SCOPE, ConnectionLimits, HttpConnection, HttpServer
from penstock.infra.bus.tasks import Tasks
from penstock.infra.process import turns
from penstock.infra.process.sockets import listening
from tests.infra.bus.support import eventually

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Application:
    """Answers with the size of the body; ``/flood`` with as much as is read; ``/wait``, ``/begin``: when allowed."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun = asyncio.Event()
        self.lost = asyncio.Event()
        self.sent = 0
        self.header: tuple[bytes, bytes] | None = None  # one more, of every answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size += len(message.get("body", b""))
            if not message.get("more_body"):
                break
        self.begun.set()
        if scope["path"] == "/flood":
            scope[SCOPE].on_lost = self.lost.set
            await self._start(send, [])
            while not self.lost.is_set():
                await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
                self.sent += 65_536
                await asyncio.sleep(0)
            return
        if scope["path"] == "/stream":
            await self._start(send, [])
            await send({"type": "http.response.body", "body": b"one", "more_body": True})
            await send({"type": "http.response.body", "body": b"two"})
            return
        if scope["path"] == "/begin":
            await self._start(send, [])
            await send({"type": "http.response.body", "body": b"one", "more_body": True})
            await self.go.wait()
            await send({"type": "http.response.body", "body": b"two"})
            return
        if scope["path"] == "/wait":
            scope[SCOPE].on_lost = self.lost.set
            await self.go.wait()
        body = str(size).encode()
        await self._start(send, [(b"content-length", str(len(body)).encode())])
        await send({"type": "http.response.body", "body": body})

    async def _start(self, send: Any, headers: list[tuple[bytes, bytes]]) -> None:
        headers += [self.header] if self.header is not None else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})


class Serving:
    def __init__(self, server: HttpServer, app: Application, port: int) -> None:
        self.server = server
        self.app = app
        self.port = port

    @asynccontextmanager
    async def client(self, sent: bytes = b"", limit: int = 1 << 20) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=limit)
        try:
            if sent:
                writer.write(sent)
                with suppress(ConnectionError):
                    await writer.drain()
            yield reader, writer
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def ask(self, sent: bytes = GET) -> bytes:
        """All that comes until the server closes."""
        async with asyncio.timeout(10), self.client(sent) as (reader, _):
            return await everything(reader)


async def everything(reader: asyncio.StreamReader) -> bytes:
    parts = []
    with suppress(ConnectionError):
        while part := await reader.read(65_536):
            parts.append(part)
    return b"".join(parts)


Serve = Callable[..., Awaitable[Serving]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    started: list[tuple[HttpServer, Tasks]] = []

    async def start(host: str = "127.0.0.1", **limits: Any) -> Serving:
        tasks, app = Tasks("test"), Application()
        listener = listening(host, 0)
        port = listener.getsockname()[1]
        server = HttpServer(app, [listener], ConnectionLimits(**limits), tasks)
        await server.start()
        started.append((server, tasks))
        return Serving(server, app, port)

    yield start
    for server, tasks in started:
        await asyncio.wait_for(server.close(), 10)
        assert server.connections == []
        assert await tasks.aclose()


def status(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:80]
    return int(answer[9:12])


def error_of(answer: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# -- headers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"".join(b"x-%d: %b\r\n" % (number, b"y" * 1_000) for number in range(40)),
        b"x: " + b"y" * 9_000 + b"\r\n",
        b"x" * 9_000 + b": y\r\n",
    ],
    ids=["many headers", "a long value", "a long name"],
)
async def test_a_header_beyond_the_limit_is_refused_with_431(serve: Serve, head: bytes) -> None:
    serving = await serve()
    answer = await serving.ask(b"GET / HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n")
    assert status(answer) == 431
    assert error_of(answer)["code"] == "headers_too_large"
    assert not serving.app.begun.is_set()


@pytest.mark.parametrize("pieces", [1, 2])
async def test_so_it_is_on_a_kept_connection_in_whatever_pieces_it_comes(serve: Serve, pieces: int) -> None:
    serving = await serve()
    head = b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 9_000 + b"\r\n\r\n"
    async with asyncio.timeout(10), serving.client(GET) as (reader, writer):
        await reader.readuntil(b"\r\n\r\n0")
        for at in range(pieces):
            writer.write(head[at * 8_000 : (at + 1) * 8_000] if pieces > 1 else head)
            await asyncio.sleep(0)
        assert status(await everything(reader)) == 431


class Recorded(asyncio.Transport):
    """What a connection writes, by write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return False


@pytest.mark.parametrize("followed", [True, False])
async def test_a_head_is_sent_with_what_follows_it_immediately(followed: bool) -> None:
    app, transport = Application(), Recorded()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]}
        await send(start | ({FOLLOWED: True} if followed else {}))
        await send({"type": "http.response.body", "body": b"one"})
        app.begun.set()

    tasks = Tasks("test")
    connection = HttpConnection(HttpServer(answer, [], ConnectionLimits(), tasks))
    connection.connection_made(transport)
    connection.data_received(GET)
    async with asyncio.timeout(10):
        await app.begun.wait()
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n"
    assert transport.writes == ([head + b"one"] if followed else [head, b"one"])
    connection.connection_lost(ConnectionError())
    await tasks.aclose()


async def test_a_header_that_would_begin_another_is_an_error_of_the_server(serve: Serve) -> None:
    serving = await serve()
    serving.app.header = (b"x", b"1\r\ny: 2")
    answer = await serving.ask(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert status(answer) == 500
    assert b"y: 2" not in answer


async def test_a_long_request_line_is_refused(serve: Serve) -> None:
    serving = await serve()
    assert status(await serving.ask(b"GET /" + b"x" * 9_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")) == 431


async def test_a_header_without_end_is_cut_off_at_the_limit(serve: Serve) -> None:
    serving = await serve(header_bytes=16_384)
    async with asyncio.timeout(20), serving.client(b"GET / HTTP/1.1\r\nx: ") as (reader, writer):
        reading = asyncio.create_task(everything(reader))
        sent = 0
        with suppress(ConnectionError):
            while sent < 200 << 20 and not reading.done():
                writer.write(b"y" * 65_536)
                await writer.drain()
                sent += 65_536
        answer = await reading
    assert status(answer) == 431
    assert sent < 200 << 20


@pytest.mark.parametrize(
    ("before", "part"),
    [(b"0\r\n", b"x: y\r\n" * 8_000), (b"0\r\nx: ", b"y" * 64_000), (b"1;", b"y" * 64_000)],
    ids=["many trailers", "a trailer without end", "a chunk's extension"],
)
async def test_what_comes_beside_a_chunked_body_is_cut_off_at_the_limit(
    serve: Serve, before: bytes, part: bytes
) -> None:
    serving = await serve()
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"
    async with asyncio.timeout(20), serving.client(head + before) as (reader, writer):
        reading = asyncio.create_task(everything(reader))
        sent = 0
        with suppress(ConnectionError):
            while sent < 50 << 20 and not reading.done():
                writer.write(part)
                await writer.drain()
                sent += len(part)
        answer = await reading
    assert status(answer) == 431
    assert sent < 50 << 20
    assert not serving.app.begun.is_set()


async def test_a_slow_body_of_small_chunks_is_no_header(serve: Serve) -> None:
    serving = await serve(header_bytes=1_024)
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with asyncio.timeout(20), serving.client(head) as (reader, writer):
        for _ in range(1_000):
            writer.write(b"2\r\nzz\r\n")
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\nx: y\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n2000")


async def test_several_requests_in_one_piece_are_not_one_large_header(serve: Serve) -> None:
    serving = await serve(header_bytes=16_384)
    async with asyncio.timeout(10), serving.client(GET * 2_000 + GET[:-2]) as (reader, writer):
        for _ in range(2_000):
            assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")
        writer.write(b"\r\n")
        assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")


async def test_what_is_sent_ahead_is_not_read_while_requests_wait(serve: Serve) -> None:
    serving = await serve()
    serving.app.go.set()
    async with asyncio.timeout(60), serving.client(GET * 100) as (reader, writer):
        await reader.readuntil(b"\r\n\r\n0")
        [connection] = serving.server.connections
        most = 0
        for _ in range(60):
            writer.write(GET * 1_000)
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1 << 20), 0.01)
            most = max(most, len(connection.pipeline))
        assert 0 < most < 10_000, "what one read from the socket holds"


@pytest.mark.parametrize("behind", [b"\0garbage\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 9_000 + b"\r\n\r\n"])
@pytest.mark.parametrize("ahead", [1, 2, 3])
async def test_garbage_behind_pipelined_requests_is_refused_behind_their_answers(
    serve: Serve, caplog: pytest.LogCaptureFixture, ahead: int, behind: bytes
) -> None:
    serving = await serve()
    async with asyncio.timeout(10), serving.client(GET.replace(b"/", b"/wait", 1) * ahead + behind) as (reader, _):
        await serving.app.begun.wait()
        serving.app.go.set()
        answers = (await everything(reader)).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200"] * ahead + [b"431" if b"GET" in behind else b"400"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_bad_body_behind_a_pipelined_request_is_refused_behind_its_answer(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    serving = await serve()
    bad = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nno size\r\n"
    async with asyncio.timeout(10), serving.client(GET.replace(b"/", b"/wait", 1) + bad) as (reader, _):
        await serving.app.begun.wait()
        serving.app.go.set()
        answers = (await everything(reader)).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"400"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_stream_over_http_1_0_ends_with_the_connection_and_has_no_chunks(serve: Serve) -> None:
    serving = await serve()
    answer = await serving.ask(b"GET /stream HTTP/1.0\r\nhost: x\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"onetwo"
    assert (await serving.ask(b"GET / HTTP/1.0\r\nhost: x\r\n\r\n")).endswith(
        b"content-length: 1\r\nconnection: close\r\n\r\n0"
    )


async def test_headers_within_the_limits_are_served_also_on_a_kept_connection(serve: Serve) -> None:
    serving = await serve()
    head = b"".join(b"x-%d: %b\r\n" % (number, b"y" * 1_000) for number in range(30))
    async with asyncio.timeout(10), serving.client() as (reader, writer):
        for _ in range(5):
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 70000\r\n" + head + b"\r\n" + b"z" * 70_000)
            assert await reader.readuntil(b"70000") != b""


async def test_a_request_that_offers_http_2_keeps_its_body(serve: Serve) -> None:
    serving = await serve()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    async with asyncio.timeout(10), serving.client() as (reader, writer):
        for _ in range(2):
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 13\r\n" + offer + b"\r\nupgrade: h2c!")
            assert (await reader.readuntil(b"\r\n\r\n13")).startswith(b"HTTP/1.1 200")


async def test_what_is_no_http_is_refused_in_openai_s_shape(serve: Serve) -> None:
    serving = await serve()
    answer = await serving.ask(b"GARBAGE\r\n\r\n")
    assert status(answer) == 400
    assert error_of(answer)["code"] == "invalid_request"


# -- times --------------------------------------------------------------------------------------------------------


async def test_a_connection_that_asks_nothing_is_closed(serve: Serve) -> None:
    serving = await serve(header_s=0.3)
    assert await serving.ask(b"") == b""


@pytest.mark.parametrize("before", [b"", GET], ids=["first request", "kept connection"])
@pytest.mark.parametrize("part", [b"GET / HTTP/1.1\r\nhost: x\r\nx", b"\r\n"], ids=["half a header", "a line break"])
async def test_a_slow_header_is_answered_with_408(serve: Serve, before: bytes, part: bytes) -> None:
    serving = await serve(header_s=0.5)
    async with asyncio.timeout(10), serving.client(before) as (reader, writer):
        if before:
            await reader.readuntil(b"\r\n\r\n0")
        sending = asyncio.create_task(dribble(writer, part))
        answer = await everything(reader)
        sending.cancel()
    if answer:  # nothing, where nothing of a header had come
        assert status(answer) == 408
        assert error_of(answer)["code"] == "request_timeout"
    else:
        assert part == b"\r\n"


async def dribble(writer: asyncio.StreamWriter, part: bytes) -> None:
    with suppress(ConnectionError):
        writer.write(part)
        while True:
            await asyncio.sleep(0.05)
            writer.write(b"\r\n" if part == b"\r\n" else b"y")
            await writer.drain()


@pytest.mark.parametrize("part", [b"", b"z"], ids=["no body", "a byte now and then"])
async def test_a_slow_body_is_answered_with_408(serve: Serve, part: bytes) -> None:
    serving = await serve(body_s=0.4)
    async with (
        asyncio.timeout(10),
        serving.client(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n") as (reader, writer),
    ):
        sending = asyncio.create_task(dribble(writer, part)) if part else None
        answer = await everything(reader)
        if sending is not None:
            sending.cancel()
    assert status(answer) == 408
    assert not serving.app.begun.is_set()


async def test_an_answer_may_take_longer_than_any_of_the_times(serve: Serve) -> None:
    serving = await serve(header_s=0.2, body_s=0.2, write_s=0.2, keep_alive_s=0.2)
    async with asyncio.timeout(10), serving.client(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n") as (reader, _):
        await serving.app.begun.wait()
        await asyncio.sleep(1.0)
        serving.app.go.set()
        assert (await reader.readuntil(b"\r\n\r\n0")).startswith(b"HTTP/1.1 200")
        assert await everything(reader) == b"", "then it is idle, and closed after keep_alive_s"


# -- clients that do not read -------------------------------------------------------------------------------------


async def test_a_client_that_reads_nothing_is_cut_off_and_little_is_kept_for_it(serve: Serve) -> None:
    serving = await serve(write_s=0.5)
    async with asyncio.timeout(15), serving.client(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n", limit=1024):
        await serving.app.begun.wait()
        [connection] = serving.server.connections
        await serving.app.lost.wait()
        assert connection.transport.get_write_buffer_size() < 1 << 20
    assert serving.app.sent < 32 << 20, "the kernel's buffers, and little more"


async def test_a_client_that_reads_slowly_is_not_cut_off(serve: Serve) -> None:
    serving = await serve(write_s=0.5)
    slow = socket.create_connection(("127.0.0.1", serving.port))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(15):
            await loop.sock_sendall(slow, b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
            for _ in range(20):
                assert await loop.sock_recv(slow, 1 << 20)
                await asyncio.sleep(0.1)
        assert not serving.app.lost.is_set()
    finally:
        slow.close()


# -- numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 1_000_000])
async def test_a_client_that_leaves_is_noticed_also_behind_a_large_body(serve: Serve, size: int) -> None:
    serving = await serve()
    head = b"POST /wait HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size
    async with asyncio.timeout(10):
        async with serving.client(head + b"x" * size):
            await serving.app.begun.wait()
        await serving.app.lost.wait()
    serving.app.go.set()


async def test_connections_beyond_the_limit_are_refused_and_room_comes_back(serve: Serve) -> None:
    serving = await serve(connections=2)
    async with asyncio.timeout(10), serving.client(GET) as (first, _), serving.client(GET) as (second, _):
        for reader in (first, second):
            await reader.readuntil(b"\r\n\r\n0")
        answer = await serving.ask()
        assert status(answer) == 503
        assert b"retry-after: 1" in answer
        assert error_of(answer)["code"] == "too_many_connections"
    assert serving.server.refused == 1
    async with asyncio.timeout(10):
        while serving.server.connections:  # noqa: ASYNC110 - the kernel says when
            await asyncio.sleep(0.01)
        async with serving.client(GET) as (reader, _):
            assert status(await reader.readuntil(b"\r\n\r\n0")) == 200


@pytest.mark.parametrize("path", [b"/health/live", b"/health/ready", b"/health", b"/metrics"])
async def test_probes_and_scrapes_are_answered_once_beyond_the_limit(serve: Serve, path: bytes) -> None:
    serving = await serve(connections=1)
    probe = b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path
    async with asyncio.timeout(10), serving.client(GET) as (reader, _):
        await reader.readuntil(b"\r\n\r\n0")
        for more in (b"", GET):
            async with serving.client(probe + more) as (answer, _):
                whole = await everything(answer)
            assert status(whole) == 200
            assert whole.lower().count(b"connection: close") == whole.count(b"HTTP/1.1 ") == 1
        assert status(await serving.ask(GET.replace(b"GET /", b"GET /metricsx"))) == 503


async def test_a_probe_beyond_the_limit_takes_no_longer_than_a_refusal(serve: Serve) -> None:
    """Few connections are answered beyond it: slow ones must not take the place of probes."""
    serving = await serve(connections=1)
    async with asyncio.timeout(10), serving.client(GET) as (reader, _):
        await reader.readuntil(b"\r\n\r\n0")
        async with serving.client(b"GET /health/live HTTP/1.1\r\nhost:") as (answer, _):
            assert status(await everything(answer)) == 408


async def test_refused_connections_that_stay_do_not_add_up(serve: Serve) -> None:
    serving = await serve(connections=1, header_s=1.0)
    async with asyncio.timeout(20):
        clients = [await asyncio.open_connection("127.0.0.1", serving.port) for _ in range(300)]
        assert len(serving.server.connections) <= 1 + 256 + 1
        answers = await asyncio.gather(*(everything(reader) for reader, _ in clients))
        assert set(answers) == {b""}
        for _, writer in clients:
            writer.close()


async def test_connections_per_address_are_limited_if_asked_for(serve: Serve) -> None:
    serving = await serve(per_address=1)
    async with asyncio.timeout(10), serving.client(GET) as (reader, _):
        await reader.readuntil(b"\r\n\r\n0")
        assert status(await serving.ask()) == 503


async def test_what_is_no_http_is_logged_once_with_an_address_however_often_it_comes(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """Port scanners and clients that speak TLS to a plain port wrote a line each, which named nobody."""
    serving = await serve()
    with structlog.testing.capture_logs() as logged:
        for _ in range(5):
            assert status(await serving.ask(b"\x80scan\r\n\r\n")) == 400
    assert [(each["event"], each["last_address"], each["requests"]) for each in logged] == [
        ("requests_malformed", "127.0.0.1", 1)
    ]
    assert not caplog.records


@pytest.mark.parametrize(
    ("sent", "begins", "fix"),
    [
        ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "--tls-cert"),
        ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/1.1"),
        ("PROXY protocol", b"PROXY TCP4 10.0.0.1 10.0.0.2 4711 80\r\n" + GET, "X-Forwarded-For"),
        ("PROXY protocol 2", b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes(12) + GET, "load balancer"),
    ],
)
async def test_what_a_client_or_load_balancer_sends_in_place_of_http_is_named(
    serve: Serve, sent: str, begins: bytes, fix: str
) -> None:
    serving = await serve()
    with structlog.testing.capture_logs() as logged:
        answer = await serving.ask(begins)
    assert status(answer) == 400
    assert fix.encode() in answer
    assert (logged[0]["last_sent"], fix in logged[0]["action"]) == (sent, True)


async def test_an_address_of_ipv4_is_the_same_at_a_socket_of_both_families(serve: Serve) -> None:
    serving = await serve("::")
    async with asyncio.timeout(10), serving.client(GET) as (reader, _):
        await reader.readuntil(b"\r\n\r\n0")
        (connection,) = serving.server.connections
        assert connection.address == "127.0.0.1"
        assert connection.client is not None
        assert connection.client[0] == "127.0.0.1"


# -- several gateways -------------------------------------------------------------------------------------------------


async def test_connections_of_the_shared_address_close_behind_an_answer_when_others_have_fewer(serve: Serve) -> None:
    serving = await serve()
    async with (
        asyncio.timeout(10),
        serving.client(GET) as (own, own_writer),
        serving.client(GET) as (moved, moved_writer),
        serving.client(GET) as (kept, kept_writer),
    ):
        for reader in (own, moved, kept):
            assert b"connection: close" not in await reader.readuntil(b"\r\n\r\n0")
        ports = {writer.get_extra_info("sockname")[1] for writer in (moved_writer, kept_writer)}
        for connection in serving.server.connections:
            assert connection.client is not None
            connection.is_shared = connection.client[1] in ports
        serving.server.to_move = 1
        own_writer.write(GET)
        assert b"connection: close" not in await own.readuntil(b"\r\n\r\n0")
        moved_writer.write(GET)
        answer = await everything(moved)
        assert status(answer) == 200
        assert b"connection: close" in answer
        kept_writer.write(GET)
        assert b"connection: close" not in await kept.readuntil(b"\r\n\r\n0")
        assert (serving.server.to_move, serving.server.moved, serving.server.gateways) == (0, 1, 1)


# -- the end ------------------------------------------------------------------------------------------------------


async def test_a_drain_waits_for_answers_and_serves_kept_connections_once_more(serve: Serve) -> None:
    serving = await serve()
    async with (
        asyncio.timeout(10),
        serving.client(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n") as (working, _),
        serving.client(GET) as (kept, writer),
        serving.client(GET) as (idle, _),
    ):
        await serving.app.begun.wait()
        for reader in (kept, idle):
            await reader.readuntil(b"\r\n\r\n0")
        draining = asyncio.create_task(serving.server.drain(5.0))
        while not serving.server.draining:  # noqa: ASYNC110
            await asyncio.sleep(0)
        writer.write(GET)
        answer = await everything(kept)
        assert status(answer) == 200
        assert b"connection: close" in answer
        assert await everything(idle) == b"", "closed, after a moment in which it might have asked"
        assert not draining.done()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", serving.port)
        serving.app.go.set()
        answer = await everything(working)
        assert status(answer) == 200
        assert b"connection: close" in answer
        assert await draining


async def test_a_connection_whose_answer_had_begun_before_a_drain_is_answered_once_more(serve: Serve) -> None:
    serving = await serve()
    async with asyncio.timeout(10), serving.client(b"GET /begin HTTP/1.1\r\nhost: x\r\n\r\n") as (reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" not in head
        draining = asyncio.create_task(serving.server.drain(5.0))
        while not serving.server.draining:  # noqa: ASYNC110
            await asyncio.sleep(0)
        serving.app.go.set()
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(GET)  # by a client that has read no more than its answer
        answer = await everything(reader)
        assert status(answer) == 200
        assert b"connection: close" in answer
        assert await draining


async def test_the_end_is_bounded_whatever_clients_do(serve: Serve) -> None:
    serving = await serve()
    async with (
        asyncio.timeout(15),
        serving.client(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n"),
        serving.client(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n", limit=1024),
        serving.client(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nz"),
        serving.client(b"GET / HTTP/1.1\r\nx"),
        serving.client(),
    ):
        await serving.app.begun.wait()
        began = asyncio.get_running_loop().time()
        assert not await serving.server.drain(0.5)
        await serving.server.close()
        assert asyncio.get_running_loop().time() - began < 5.0
        assert serving.server.connections == []


@pytest.mark.parametrize("sent", [GET, GET.replace(b"/", b"/wait", 1) + GET], ids=["answered", "waiting"])
async def test_a_lost_connection_is_freed_without_a_garbage_collection(serve: Serve, sent: bytes) -> None:
    """Full collections are rare in a process that serves."""
    serving = await serve()
    gc.disable()
    try:
        async with asyncio.timeout(10), serving.client(sent):
            await serving.app.begun.wait()
            (connection,) = map(weakref.ref, serving.server.connections)
        serving.app.go.set()
        await eventually(lambda: connection() is None)
    finally:
        gc.enable()


# -- many at once ---------------------------------------------------------------------------------------------------


async def test_of_requests_that_come_together_each_is_read_whole_and_in_order(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "READS", 1)
    serving = await serve()
    sent = [b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (size, b"x" * size) for size in range(20)]
    ends = b"".join(sent[:3]) + GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    async with asyncio.timeout(10), AsyncExitStack() as clients:
        opened = [await clients.enter_async_context(serving.client()) for _ in range(22)]
        waited: list[HttpConnection] = []
        read_on = HttpConnection._read_on

        def note(connection: HttpConnection) -> None:
            waited.append(connection)
            read_on(connection)

        monkeypatch.setattr(HttpConnection, "_read_on", note)
        for (_, writer), request in zip(opened, [*sent, ends, sent[0]], strict=True):
            writer.write(request)
        opened[-1][1].transport.abort()
        for size, (reader, _) in enumerate(opened[:20]):
            head = await reader.readuntil(b"\r\n\r\n")
            assert status(head) == 200
            assert await reader.readexactly(len(str(size))) == str(size).encode()
        answers = (await everything(opened[20][0])).split(b"HTTP/1.1 200 OK")
    assert [answer[-1:] for answer in answers[1:]] == [b"0", b"1", b"2", b"0"]
    assert waited
