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
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol
from urllib.parse import unquote
from weakref import WeakKeyDictionary

import httptools
import msgspec
import structlog
import uvicorn
from uvicorn import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    HEADER_RE,
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from penstock.gateway.base.chat_objects import error_body
from penstock.gateway.http.middleware import TrustedProxies
from penstock.gateway.http.shared_socket import ConnectionCounts, SharedSocket
from penstock.gateway.http.tls import HANDSHAKE_S, Certificate
from penstock.infra.bus.tasks import Tasks, end
from penstock.infra.process.turns import TimeSlice, TurnBudget
from penstock.schemas.errors import Code, ServingError

FOLLOWED = "penstock.followed"  # in the start of an answer: the body's first part follows in the same write
SCOPE = "penstock.connection"  # the connection, in the ASGI scope of each of its requests
REFUSED_LINGER_S = 2.0  # for a client that is refused while it still sends, to read why
SLOWEST = 16_384  # bytes per second of a body, beyond the time that every body has
MAX_LINE = 8_192  # bytes of one header, or of the request line

_PLAIN_PATH = re.compile(rb"/[A-Za-z0-9/_.~-]*")  # the whole of a URL that needs no parser
_PROBE = re.compile(rb"(?:GET|HEAD) /(?:health(?:/live|/ready)?|ping|metrics) HTTP/1\.[01]\r\n")
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
    to_move: int

    def moves(self, connection: "HttpConnection") -> bool:
        """Whether a connection is to close after the answer that it is about to get, as others have fewer."""

    def opened(self, connection: "HttpConnection") -> ServingError | None:
        """Count a new connection; returns why it is refused, or None."""

    def closed(self, connection: "HttpConnection") -> None: ...

    def malformed(self, connection: "HttpConnection", sent: str) -> None:
        """Count what is not HTTP. ``sent``: what it is instead, a key of ``_INSTEAD``; "": unknown."""


_FEW_VALUES = frozenset({b"content-type", b"cache-control", b"x-accel-buffering"})  # of which each line is made once
# What clients and load balancers send to a port of plain HTTP/1.1: how it begins, and what to do.
_INSTEAD = {
    "TLS": (b"\x16\x03", "this port has no TLS: use http://, or start the gateway with --tls-cert and --tls-key"),
    "HTTP/2": (b"PRI * HTTP/2", "only HTTP/1.1 is served: switch HTTP/2 off for this server in the client or proxy"),
    "PROXY protocol": (
        b"PROXY ",
        "the PROXY protocol is not read: switch it off in the load balancer, and have it send X-Forwarded-For",
    ),
    "PROXY protocol 2": (b"\r\n\r\n\0\r\nQUIT\n", "the PROXY protocol is not read: switch it off in the load balancer"),
}
_FRAMING = frozenset({b"content-length: ", b"transfer-encoding: ", b"connection: "})


@functools.lru_cache(maxsize=256)
def _line_start(name: bytes) -> bytes:
    """
    Raises:
        RuntimeError: not the name of a header.
    """
    if HEADER_RE.search(name):
        raise RuntimeError("Invalid HTTP header name.")
    return name.lower() + b": "


@functools.lru_cache(maxsize=64)
def _line(name: bytes, value: bytes) -> bytes:
    """
    Raises:
        RuntimeError: not a header.
    """
    if HEADER_VALUE_RE.search(value):
        raise RuntimeError("Invalid HTTP header value.")
    return _line_start(name) + value + b"\r\n"


class AsgiCycle(RequestResponseCycle):
    """One request and its answer, as ASGI sees them: uvicorn's cycle at a third of its cost.

    A request that has arrived whole is read without a wait or a copy, and lines of a head are made once.

    Over HTTP/1.0, which has no chunks, an answer of unknown length ends with the connection.
    """

    def __init__(self, connection: "HttpConnection", *, keep_alive: bool) -> None:
        self.scope = connection.scope
        self.transport = connection.transport
        self.flow = connection.flow
        self.logger = connection.logger
        self.default_headers = connection.server_state.default_headers
        self.message_event = asyncio.Event()
        self.on_response = connection.on_response_complete
        self.disconnected = False
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = connection.expect_100_continue
        self.body: bytes | bytearray = b""  # type: ignore[assignment]
        self.more_body = True
        self.response_started = False
        self.response_complete = False
        self.chunked_encoding: bool | None = None
        self.expected_content_length = 0  # of what is still to be sent; negative: unknown
        self.own_lines = b""  # of the head, with line breaks
        self._head = b""  # not written yet, as the body's first part is

    def add_body(self, part: bytes) -> None:
        """The client has sent this much more of the body."""
        if not self.body:
            self.body = part
        elif isinstance(self.body, bytearray):
            self.body += part
        else:
            self.body = bytearray(self.body + part)

    async def receive(self) -> Any:
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), b""
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Any) -> None:
        """
        Args:
            message: as in ASGI; a start may have ``FOLLOWED``.
        Raises:
            RuntimeError: the message is none that may follow, or does not fit the head.
        """
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.body" and self.response_started and not self.response_complete:
            self._send_body(message.get("body", b""), last=not message.get("more_body", False))
        elif kind == "http.response.start" and not self.response_started:
            self._send_head(message["status"], message.get("headers", ()), followed=FOLLOWED in message)
        else:
            raise RuntimeError(f"ASGI message {kind!r} was sent out of turn")

    def _send_head(self, status: int, headers: Sequence[tuple[bytes, bytes]], *, followed: bool) -> None:
        lines, closes, length, chunked = [STATUS_LINE[status], self.own_lines], False, 0, None
        for name, value in chain(self.default_headers, headers):
            if name in _FEW_VALUES:
                lines.append(_line(name, value))
                continue
            start = _line_start(name)
            if HEADER_VALUE_RE.search(value):
                raise RuntimeError("Invalid HTTP header value.")
            if start in _FRAMING:
                if start == b"content-length: ":
                    if chunked is None:
                        length, chunked = int(value), False
                elif start == b"connection: ":
                    closes = closes or b"close" in [token.strip() for token in value.lower().split(b",")]
                elif value.lower() == b"chunked":
                    length, chunked = 0, True
            lines += (start, value, b"\r\n")
        if closes:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if chunked is None and self.scope["method"] != "HEAD" and status not in (204, 304):
            if self.scope["http_version"] == "1.0":
                length = -1
            else:
                chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
        self.chunked_encoding, self.expected_content_length = chunked, length
        lines.append(b"\r\n")
        self.response_started, self.waiting_for_100_continue = True, False
        self._head = b"".join(lines)
        if not followed:
            self._write(b"")

    def _write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        self.transport.write(data)

    def _send_body(self, body: bytes, *, last: bool) -> None:
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
            self._write(b"")
        elif self.chunked_encoding:
            if body:
                end = b"\r\n0\r\n\r\n" if last else b"\r\n"
                self._write(b"%x\r\n%b%b" % (len(body), body, end))
            elif last or self._head:
                self._write(b"0\r\n\r\n" if last else b"")
        else:
            if self.expected_content_length >= 0:
                if len(body) > self.expected_content_length:
                    raise RuntimeError("Response content longer than Content-Length")
                self.expected_content_length -= len(body)
            self._write(body)
        if last:
            if self.expected_content_length > 0:
                raise RuntimeError("Response content shorter than Content-Length")
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()


class HttpConnection(HttpToolsProtocol):
    """From ``connection_made`` to ``connection_lost``.

    Attributes:
        on_lost: called when the client has disconnected; set by the code that answers it.
    """

    def __init__(self, server: ConnectionOwner) -> None:
        super().__init__(server.config, server.state, {}, asyncio.get_running_loop())
        self.on_lost: Callable[[], None] | None = None
        self.lost = False
        self.is_shared = False  # accepted from the socket of all gateways, so that another would accept it next time
        self.address = ""
        self._server = server
        self._limits = server.limits
        self._most_unchecked = min(MAX_LINE, server.limits.header_bytes)
        self._head_since = 0.0  # a head is expected, or has begun; 0: none is
        self._head_bytes = 0
        self._receiving = False  # a request's body has not arrived yet
        self._body_since = 0.0
        self._body_bytes = 0
        self._overhead_bytes = 0  # since the last of the body: extensions of chunks, trailers
        self._ended = False  # a request has arrived whole with what was received last
        self._refusal: ServingError | None = None  # sent in answer to whatever comes, but a probe
        self._probed = False  # a probe is answered beyond the limit of connections, and nothing after it
        self._refused_at = 0.0  # when an error was sent that ends the connection
        self._last_error: ServingError | None = None  # sent after the open answers; nothing more is read
        self.cycle: AsgiCycle = None  # type: ignore[assignment]  # the newest request
        self._answered: AsgiCycle | None = None  # the oldest open one
        self.pipeline: deque[AsgiCycle] = deque()  # type: ignore[assignment]  # those after it, the newest first
        self._idle_since = 0.0  # while the server drains; 0: it is not idle
        self._kept_since = 0.0  # the last answer ended, and nothing has come since; 0: something has
        self._small = False  # what is being read is so short that no head in it exceeds the limits
        self._stalled_since = 0.0  # the client does not read
        self._unsent = 0
        self._unread = b""  # received when this turn's requests had been read
        self._begun = b""  # what is being read

    # --- the protocol ---

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_since = self.loop.time()
        if self.client:
            self.client = (self.client[0].removeprefix("::ffff:"), self.client[1])  # at a socket of both families
            self.address = self.client[0]
        self._refusal = self._server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        self._server.closed(self)
        if self.on_lost is not None:
            self.on_lost()
        # Its requests refer to it. Without references to them, it is freed here and not by garbage collection.
        self.cycle = self._answered = None  # type: ignore[assignment]
        self.pipeline.clear()
        self.scope = {}  # type: ignore[typeddict-item]

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._refusal is not None:
            # Refused, a probe would have Kubernetes restart a gateway whose connections are all in use.
            self._probed = _PROBE.match(data) is not None
            if not self._probed:
                self.refuse(self._refusal)
                return
            self._refusal = None
            most_s = REFUSED_LINGER_S  # it is kept no longer than one that is refused
            self._limits = replace(self._limits, header_s=most_s, body_s=most_s, write_s=most_s)
        self._kept_since = 0.0
        if self._receiving:
            self._small = False
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
        self._small = not begun and len(data) <= self._most_unchecked
        self._begun = data
        super().data_received(data)
        self._begun = b""
        if self._receiving or not self._head_since:
            if not self._receiving and self._idle and not self._closing and not begun:
                self._head_since = self.loop.time()  # line breaks before a request, or nothing of one
            return
        if begun and not self._ended:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.header_bytes:
                self.refuse(_headers_too_large(self._limits.header_bytes))

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        if not self._head_since:
            self._head_since, self._head_bytes = self.loop.time(), 0

    def on_headers_complete(self) -> None:
        if self._closing:
            return
        if not self._small and (too_large := self._check_head()) is not None:
            self.refuse(too_large)
            return
        self._head_since = 0.0
        self._receiving, self._body_since, self._body_bytes, self._overhead_bytes = True, self.loop.time(), 0, 0
        version, url = self.parser.get_http_version(), self.url
        if _PLAIN_PATH.fullmatch(url):
            raw_path, query = url, b""
            path = url.decode("ascii")
        else:
            parsed = httptools.parse_url(url)
            raw_path, query = parsed.path, parsed.query or b""
            path = unquote(raw_path.decode("ascii"))
        self.scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": "",
            "headers": self.headers,
            "state": {},
            "method": self.parser.get_method().decode("ascii"),
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            SCOPE: self,  # type: ignore[misc]
        }
        server = self._server
        keep_alive = version != "1.0" and not (server.draining or self._probed) and self.parser.should_keep_alive()
        if server.to_move and keep_alive and not self.pipeline:
            keep_alive = not server.moves(self)
        earlier, cycle = self.cycle, AsgiCycle(self, keep_alive=keep_alive)
        self.cycle = cycle
        if earlier is None or earlier.response_complete:
            self._start(cycle)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft(cycle)

    def _check_head(self) -> ServingError | None:
        """Why this head is too large; None: it is not."""
        size = line = len(self.url)
        for name, value in self.headers:
            length = len(name) + len(value)
            size += length
            if length > line:
                line = length
        limit = self._limits.header_bytes
        if line <= MAX_LINE and size <= limit:
            return None
        return _headers_too_large(limit if line <= MAX_LINE else MAX_LINE, line > MAX_LINE)

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes = 0
        cycle = self.cycle
        if not self._closing and not cycle.response_complete:
            cycle.add_body(body)
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._receiving, self._ended = False, True
        cycle = self.cycle
        if not self._closing:
            if not cycle.response_complete:
                cycle.more_body = False
                cycle.message_event.set()
            if cycle is self._answered:  # nothing more has to be read for it, but to see the client go
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self.on_lost = None
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self._start(self.pipeline.pop())
            else:
                self._kept_since = self.loop.time()
        if self._answered is not None and not self._answered.response_complete:
            if self.pipeline:  # further requests are read when these are answered
                self.flow.pause_reading()
        elif self._last_error is not None and not self.transport.is_closing():
            self._send_last(self._last_error)

    def _start(self, cycle: AsgiCycle) -> None:
        self._answered = cycle
        task = self.loop.create_task(cycle.run_asgi(self.app))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def add_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Have the answer that the application is about to begin carry these headers, too."""
        if self._answered is not None:
            self._answered.default_headers = [*self._answered.default_headers, *headers]

    def add_lines(self, lines: bytes) -> None:
        """Likewise of headers whose values are ours: they are not checked. Each ends with a line break."""
        if self._answered is not None:
            self._answered.own_lines += lines

    def send_400_response(self, msg: str) -> None:
        sent, (_, fix) = next(
            (each for each in _INSTEAD.items() if self._begun.startswith(each[1][0])), ("", (b"", msg))
        )
        self._server.malformed(self, sent)
        self.refuse(ServingError(Code.invalid_request, fix))

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
        elif self._kept_since and now - self._kept_since > limits.keep_alive_s:
            self.transport.close()

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
    """Remove the offer of HTTP/2 that Java's clients send: the parser would drop the body after it."""
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
        draining: no connection is kept after its present answer.
        to_move: number of connections to close, since other gateways on the shared socket have fewer.
        moved: this many were.
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
        self.to_move = self.moved = 0
        self.refused = 0
        self._warned = self._warned_malformed = -WARN_S
        self._malformed = 0
        # Its warnings are about what clients send: one for each request of a port scanner, which they do not name.
        self.config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            proxy_headers=False,
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
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
            connect = functools.partial(loop.connect_accepted_socket, self._accepted_shared, **secured)
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

    def _accepted_shared(self) -> HttpConnection:
        connection = self._accepted()
        connection.is_shared = True
        return connection

    def _accepted(self) -> HttpConnection:
        connection = HttpConnection(self)
        if self._tls is not None:
            self._handshakes[connection] = asyncio.get_running_loop().time()
        return connection

    @property
    def connections(self) -> list[HttpConnection]:
        return list(self.state.connections)  # type: ignore[arg-type]

    @property
    def gateways(self) -> int:
        """How many accept from the same socket as this one."""
        return 1 if self._shared is None else self._shared.gateways

    def moves(self, connection: HttpConnection) -> bool:
        if not connection.is_shared:
            return False
        self.to_move -= 1
        self.moved += 1
        return True

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

    def malformed(self, connection: HttpConnection, sent: str) -> None:
        self._malformed += 1
        now = time.monotonic()
        if now - self._warned_malformed >= WARN_S:
            self._warned_malformed = now
            log.warning(
                "requests_malformed",
                last_address=connection.address,
                last_sent=sent or "unknown",
                requests=self._malformed,
                action=_INSTEAD[sent][1] if sent else "see what that address runs",
            )

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
        pause = min(CHECK_S, limits.header_s / 4, limits.body_s / 4, limits.write_s / 4, limits.keep_alive_s / 4)
        while True:
            await asyncio.sleep(pause)
            if self._shared is not None:
                self._shared.note()
                self.to_move = self._shared.to_move()
            now = loop.time()
            time_slice = TimeSlice()
            for connection in self.connections:
                connection.check(now)
                await time_slice.yield_if_spent()

    # --- the end ---

    async def drain(self, within_s: float, linger_s: float = LINGER_S) -> bool:
        """Stop accepting requests and answer the open ones. False: that took longer than ``within_s``.

        A connection may ask once more within ``linger_s`` after its last answer: its client cannot know yet.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.draining = True
        await asyncio.sleep(min(ACCEPT_S, within_s))
        self._stop_listening()
        linger_s = min(linger_s, within_s / 3)
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
