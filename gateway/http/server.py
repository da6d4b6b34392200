"""The HTTP server of a gateway: it accepts connections within bounds, serves each within limits, and stops in order.

uvicorn's protocol without its ``ConnectionOwner``, which cancels what it cannot finish, and with limits on headers, on
time and on unread output. All deadlines are checked by the server's sweep, so that a request needs no timer.
"""

import asyncio
import contextlib
import fcntl
import functools
import re
import socket
import sys
import termios
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import msgspec
import structlog
import uvicorn
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.gateway.base.chat_objects import error_body
from penstock.gateway.http.middleware import TrustedProxies
from penstock.gateway.http.shared_socket import ConnectionCounts, SharedSocket
from penstock.gateway.http.tls import HANDSHAKE_S, Certificate
from penstock.infra.bus.tasks import Tasks, end
from penstock.infra.process.turns import TimeSlice, TurnBudget
from penstock.schemas.errors import Code, ServingError

SCOPE = "penstock.connection"  # the connection, in the ASGI scope of each of its requests
REFUSED_LINGER_S = 2.0  # for a client that is refused while it still sends, to read why
SLOWEST = 16_384  # bytes per second of a body, beyond the time that every body has
MAX_LINE = 8_192  # bytes of one header, or of the request line

_UPGRADE = re.compile(rb"\r\nupgrade:(?=[ \t]*h2c)", re.IGNORECASE)

_json = msgspec.json.encode


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bytes and seconds."""

    header_bytes: int = 32_768
    header_s: float = 30.0
    body_s: float = 30.0
    keep_alive_s: float = 75.0
    write_s: float = 60.0
    spare: int = 256  # connections beyond the limit that get an error; those beyond are reset
    connections: int = 16_384
    per_address: int = 0  # 0: no limit


class ConnectionOwner(Protocol):
    """What a connection uses of its server."""

    config: Config
    state: ServerState
    limits: ConnectionLimits
    turns: TurnBudget
    draining: bool

    def opened(self, connection: "HttpConnection") -> ServingError | None:
        """Count a new connection; returns why it is refused, or None."""

    def closed(self, connection: "HttpConnection") -> None: ...


class CloseDelimitedCycle(RequestResponseCycle):
    """An exchange over HTTP/1.0, which has no chunks: an answer of unknown length ends with the connection."""

    length_unknown = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.length_unknown = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if self.length_unknown:
                self.chunked_encoding = False
        elif self.length_unknown:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class HttpConnection(HttpToolsProtocol):
    """From ``connection_made`` to ``connection_lost``.

    Attributes:
        on_lost: called when the client has disconnected; set by the code that answers it.
    """

    def __init__(self, server: ConnectionOwner) -> None:
        super().__init__(server.config, server.state, {}, asyncio.get_running_loop())
        self.on_lost: Callable[[], None] | None = None
        self.lost = False
        self.address = ""
        self._server = server
        self._limits = server.limits
        self._head_since = 0.0  # a head is expected, or has begun; 0: none is
        self._head_bytes = 0
        self._receiving = False  # a request's body has not arrived yet
        self._body_since = 0.0
        self._body_bytes = 0
        self._overhead_bytes = 0  # since the last of the body: extensions of chunks, trailers
        self._ended = False  # a request has arrived whole with what was received last
        self._refusal: ServingError | None = None  # sent in answer to whatever comes
        self._refused_at = 0.0  # when an error was sent that ends the connection
        self._last_error: ServingError | None = None  # sent behind the open answers; nothing more is read
        self._answered: RequestResponseCycle | None = None  # the oldest open request; uvicorn's ``cycle`` is the newest
        self._idle_since = 0.0  # while the server drains; 0: it is not idle
        self._stalled_since = 0.0  # the client does not read
        self._unsent = 0
        self._unread = b""  # received when this turn's requests had been read

    # --- the protocol ---

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_since = self.loop.time()
        self.address = self.client[0] if self.client else ""
        self._refusal = self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        self._server.closed(self)
        self._unset_keepalive_if_required()
        if self.on_lost is not None:
            self.on_lost()
        # Its requests refer to it. Without references to them it is freed at once, not by garbage collection.
        self.cycle = self._answered = None  # type: ignore[assignment]
        self.pipeline.clear()
        self.scope = {}  # type: ignore[typeddict-item]

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._refusal is not None:
            self.refuse(self._refusal)
            return
        if self._receiving:
            self._body_bytes += len(data)
            self._overhead_bytes += len(data)
            super().data_received(data)
            if self._receiving and self._overhead_bytes > self._limits.header_bytes:
                self.refuse(_headers_too_large(self._limits.header_bytes))
            return
        if self._unread:
            self._unread += data
            self.flow.pause_reading()
        elif self._server.turns.may_read(self._read_on):
            self._begin(data)
        else:
            self._unread = data
            self._unset_keepalive_if_required()

    def _read_on(self) -> None:
        data, self._unread = self._unread, b""
        if not (self.lost or self._closing or self.transport.is_closing()):
            self.flow.resume_reading()
            self._begin(data)

    def _begin(self, data: bytes) -> None:
        """Read what is not the body of a request that has begun."""
        if b"h2c" in data:
            data = _without_upgrade(data)
        begun, self._ended = bool(self._head_since), False
        super().data_received(data)
        if self._receiving or not self._head_since:
            if not self._receiving and self._idle and not self._closing and not begun:
                self._head_since = self.loop.time()  # line breaks before a request, or nothing of one
            return
        if begun and not self._ended:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.header_bytes:
                self.refuse(_headers_too_large(self._limits.header_bytes))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[SCOPE] = self  # type: ignore[literal-required]
        if not self._head_since:
            self._head_since, self._head_bytes = self.loop.time(), 0

    def on_headers_complete(self) -> None:
        if self._closing:
            return
        size = line = len(self.url)
        for name, value in self.headers:
            length = len(name) + len(value)
            size += length
            if length > line:
                line = length
        if line > MAX_LINE or size > self._limits.header_bytes:
            self.refuse(
                _headers_too_large(self._limits.header_bytes if line <= MAX_LINE else MAX_LINE, line > MAX_LINE)
            )
            return
        self._head_since = 0.0
        self._receiving, self._body_since, self._body_bytes, self._overhead_bytes = True, self.loop.time(), 0, 0
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = CloseDelimitedCycle
        if self._server.draining:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes = 0
        if not self._closing:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._receiving, self._ended = False, True
        if not self._closing:
            super().on_message_complete()
            if self.cycle is self._answered:  # uvicorn waits for a reader of the body, and would not see the client go
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self.on_lost = None
        super().on_response_complete()
        if self._answered is not None and not self._answered.response_complete:
            if self.pipeline:  # further requests are read when these are answered
                self.flow.pause_reading()
        elif self._last_error is not None and not self.transport.is_closing():
            self._send_last(self._last_error)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def add_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Have the answer that the application is about to begin carry these headers, too."""
        if self._answered is not None:
            self._answered.default_headers = [*self._answered.default_headers, *headers]

    def send_400_response(self, msg: str) -> None:
        self.refuse(ServingError(Code.invalid_request, msg))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled_since, self._unsent = self.loop.time(), self._unconfirmed_bytes

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stalled_since = 0.0

    # --- limits ---

    @property
    def _idle(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _unconfirmed_bytes(self) -> int:
        """Bytes that were written and that the client's machine has not confirmed."""
        socket = self.transport.get_extra_info("socket")
        if socket is None:
            return 0  # over TLS, between its end and ``connection_lost``
        unsent = self.transport.get_write_buffer_size()
        with contextlib.suppress(OSError, ValueError):
            queued = fcntl.ioctl(socket.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
            unsent += int.from_bytes(queued, sys.byteorder)
        return unsent

    @property
    def _closing(self) -> bool:
        """Nothing more is read, as an error was or will be sent that ends the connection."""
        return bool(self._refused_at) or self._last_error is not None

    def refuse(self, error: ServingError) -> None:
        """Stop reading, answer the complete requests, then send an error and close.

        The client has a moment to read the error. A request whose answer began before its body was complete is cut.
        """
        if self._closing:
            return
        answered = self._answered
        if answered is None or answered.response_complete:
            self._send_last(error)
        elif self._receiving and answered is self.cycle:
            if answered.response_started:
                self._refused_at = self.loop.time()
                self.transport.abort()
                return
            answered.disconnected = True
            answered.message_event.set()
            self._send_last(error)
        else:
            if self._receiving and self.pipeline:
                self.pipeline.popleft()  # the request whose body is refused
            self._last_error = error

    def _send_last(self, error: ServingError) -> None:
        self._refused_at = self.loop.time()
        self.transport.write(error_response(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def drain(self, now: float, linger_s: float) -> None:
        """Answer at most once more, with "Connection: close"; close the connection when it was idle for ``linger_s``.

        An answer that has begun cannot say that it is the last one. Its client may have sent the next request before
        it sees the connection end, so that one is still answered.
        """
        if not self._idle:
            self._idle_since = 0.0
            if not self.cycle.response_started:
                self.cycle.keep_alive = False
            return
        self._idle_since = self._idle_since or now
        reading = self._receiving or self._unread
        if now - self._idle_since >= linger_s and not reading and not self._closing:
            self.transport.close()

    def check(self, now: float) -> None:
        """End what takes too long."""
        limits = self._limits
        if self._refused_at or self._refusal is not None:
            if now - (self._refused_at or self._head_since) > REFUSED_LINGER_S:
                self.transport.abort()
        elif self._stalled_since:
            self._check_unsent(now)
        elif self.transport.is_closing():
            self._stalled_since, self._unsent = now, self._unconfirmed_bytes
        elif self._head_since and now - self._head_since > limits.header_s:
            if self._idle:
                self._late_head()
        elif self._receiving and now - self._body_since > limits.body_s + self._body_bytes / SLOWEST:
            if self._idle:
                self.transport.abort()  # it was answered before it had arrived
            elif not self.cycle.response_started:
                self.refuse(_timed_out("the body", f"{limits.body_s:g} s, and {SLOWEST} bytes per second beyond"))

    def _late_head(self) -> None:
        if self._head_bytes:
            self.refuse(_timed_out("the request's header", f"{self._limits.header_s:g} s (--header-timeout-s)"))
        else:
            self.transport.close()

    def _check_unsent(self, now: float) -> None:
        """Disconnect a client that reads nothing; a slow one is left alone."""
        unsent = self._unconfirmed_bytes
        if unsent < self._unsent:
            self._stalled_since = now
        elif now - self._stalled_since > self._limits.write_s:
            self.transport.abort()
        self._unsent = unsent


def error_response(error: ServingError) -> bytes:
    """An answer in OpenAI's shape that ends the connection."""
    body = _json(error_body(error))
    head = STATUS_LINE[error.code.status] + b"content-type: application/json\r\nconnection: close\r\n"
    if error.retry_after is not None:
        head += b"retry-after: %d\r\n" % max(1, round(error.retry_after))
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def _without_upgrade(data: bytes) -> bytes:
    """Remove the offer of HTTP/2 that Java's clients send: the parser would drop the body behind it."""
    head, end, body = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nx-upgrade:", head) + end + body


def _headers_too_large(limit: int, line: bool = False) -> ServingError:
    what = "a line of the request's header" if line else "the request's header"
    flag = "" if line else " (--max-header-bytes)"
    return ServingError(Code.headers_too_large, f"{what} is larger than {limit} bytes{flag}")


def _timed_out(what: str, limit: str) -> ServingError:
    return ServingError(Code.request_timeout, f"{what} did not arrive within {limit}")


log = structlog.get_logger("gateway")

CHECK_S = 1.0
WARN_S = 10.0
BACKLOG = 2048
ACCEPT_S = 0.05  # after the end was asked for, for connections that the kernel has accepted
LINGER_S = 1.0  # idle connections may ask once more, and are answered with "Connection: close"
HANDSHAKE_LINGER_S = 2.0  # connections whose TLS handshake has begun have no more time than this at the end
LOOK_S = 0.05
FLUSH_S = 1.0


class HttpServer:
    """Answers with ``app`` on listening sockets, which it closes at its end.

    Attributes:
        draining: no connection is kept behind its present answer.
        turns: shares the event loop's turns, in which new requests are read.
    """

    def __init__(
        self,
        app: Any,
        listeners: Sequence[socket.socket],
        limits: ConnectionLimits,
        tasks: Tasks,
        *,
        tls: Certificate | None = None,
        proxies: TrustedProxies | None = None,
        turns: TurnBudget | None = None,
        counts: ConnectionCounts | None = None,
    ) -> None:
        """
        Args:
            counts: of all gateways that accept from the last of the listeners.
        """
        self.limits = limits
        self.turns = turns or TurnBudget()
        self._tls = tls
        self._proxies = proxies
        self.state = ServerState()
        self.draining = False
        self.refused = 0
        self._warned = -WARN_S
        self.config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            proxy_headers=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]  # whole seconds only by declaration
        )
        self.config.load()
        self._listeners = listeners
        self._tasks = tasks.group("http")
        self._by_address: Counter[str] = Counter()
        # When each was accepted whose TLS handshake is not done. asyncio does not tell of one that fails, so weakly.
        self._handshakes: WeakKeyDictionary[HttpConnection, float] = WeakKeyDictionary()
        self._servers: list[asyncio.Server] = []
        self._counts = counts
        self._shared: SharedSocket | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        secured: dict[str, Any] = {}
        if self._tls is not None:
            secured = {"ssl": self._tls.context, "ssl_handshake_timeout": HANDSHAKE_S}
            self._tasks.spawn(self._tls.watch(), name="certificate")
        listeners = list(self._listeners)
        if self._counts is not None:
            connect = functools.partial(loop.connect_accepted_socket, self._accepted, **secured)
            self._shared = SharedSocket(
                listeners.pop(),
                self._counts,
                self._tasks,
                connections=lambda: len(self.state.connections),
                connect=connect,
            )
            self._shared.start()
        for listener in listeners:
            self._servers.append(await loop.create_server(self._accepted, sock=listener, backlog=BACKLOG, **secured))
        self._tasks.spawn(self._check(), name="connections")

    def _accepted(self) -> HttpConnection:
        connection = HttpConnection(self)
        if self._tls is not None:
            self._handshakes[connection] = asyncio.get_running_loop().time()
        return connection

    @property
    def connections(self) -> list[HttpConnection]:
        return list(self.state.connections)  # type: ignore[arg-type]

    # --- bounds ---

    def opened(self, connection: HttpConnection) -> ServingError | None:
        self._handshakes.pop(connection, None)
        limits, count = self.limits, len(self.state.connections)
        if limits.per_address and not (self._proxies and self._proxies.trusts(connection.address)):
            self._by_address[connection.address] += 1
            if self._by_address[connection.address] > limits.per_address:
                return self._full(connection, f"{limits.per_address} from one address (--max-connections-per-address)")
        if count > limits.connections:
            return self._full(connection, f"{limits.connections} (--max-connections)")
        return None

    def closed(self, connection: HttpConnection) -> None:
        if connection.address in self._by_address:
            self._by_address[connection.address] -= 1
            if self._by_address[connection.address] <= 0:
                del self._by_address[connection.address]
        if self._shared is not None:
            self._shared.note()

    def _full(self, connection: HttpConnection, limit: str) -> ServingError:
        self.refused += 1
        now = time.monotonic()
        if now - self._warned >= WARN_S:  # also of those that are reset, whose clients see no reason
            self._warned = now
            log.warning("connections_refused", limit=limit, open=len(self.state.connections), refused=self.refused)
        if len(self.state.connections) > self.limits.connections + self.limits.spare:
            connection.abort()
        return ServingError(
            Code.too_many_connections,
            f"this gateway has too many connections; the limit is {limit}",
            retry_after=1.0,
        )

    async def _check(self) -> None:
        loop = asyncio.get_running_loop()
        limits = self.limits
        pause = min(CHECK_S, limits.header_s / 4, limits.body_s / 4, limits.write_s / 4)
        while True:
            await asyncio.sleep(pause)
            if self._shared is not None:
                self._shared.note()
            now = loop.time()
            time_slice = TimeSlice()
            for connection in self.connections:
                connection.check(now)
                await time_slice.yield_if_spent()

    # --- the end ---

    async def drain(self, within_s: float) -> bool:
        """Stop accepting requests and answer the open ones. False: that took longer than ``within_s``.

        A connection may ask once more within a moment after its last answer: its client cannot know yet.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.draining = True
        await asyncio.sleep(min(ACCEPT_S, within_s))
        self._stop_listening()
        linger_s = min(LINGER_S, within_s / 3)
        while (connections := self.connections) or self._in_handshake(loop.time()):
            now = loop.time()
            for connection in connections:
                connection.drain(now, linger_s)
            if now - began > within_s:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    def _in_handshake(self, now: float) -> bool:
        """Whether clients will ask that have a connection by now, as they see it."""
        return any(now - since < HANDSHAKE_LINGER_S for since in list(self._handshakes.values()))

    def _stop_listening(self) -> None:
        if self._shared is not None:
            self._shared.close()
        for server in self._servers:
            server.close()

    async def close(self) -> None:
        """End everything: answers that can end by themselves now get a moment, then they are cut."""
        self._stop_listening()
        now = asyncio.get_running_loop().time()
        for connection in self.connections:
            connection.drain(now, 0.0)
        working = set(self.state.tasks)
        if working:
            await asyncio.wait(working, timeout=FLUSH_S)
        await end(list(self.state.tasks), within_s=FLUSH_S)  # an upload, a request that was not accepted yet
        for _ in range(round(FLUSH_S / LOOK_S)):
            if self.connections:
                await asyncio.sleep(LOOK_S)
        for connection in self.connections:
            connection.abort()
        await self._tasks.aclose()
        await asyncio.sleep(0)  # for the connections' last callbacks
