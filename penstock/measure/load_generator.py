"""Load on one server over HTTP: the server's address, the connections to it, and the two ways to use them.

``ClosedLoop`` keeps a fixed number of requests in flight; ``send_in_time`` sends each when it is due, however many are.
The generator shares the machine with the server, so each read of an answer costs as little as possible: it searches the
bytes for markers (events, text, the end) and parses only the usage at the end. ``LagMeter`` says whether the generator
is itself the bottleneck.
"""

import asyncio
import os
import re
import ssl
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import cast
from urllib.parse import urlsplit

import httpcore2

_MOST_BYTES = 16 << 20
_PORTS = {"http": 80, "https": 443}


class BadTarget(ValueError):
    """A URL that cannot be loaded; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """
    Attributes:
        prefix: of the path, without ``/v1``.
        tls: None: plain HTTP.
        api_key: bearer token; "": none.
    """

    host: str
    port: int
    prefix: str = ""
    tls: ssl.SSLContext | None = None
    api_key: str = ""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"

    def head(self, path: str) -> str:
        """The head of a POST of JSON, up to the length of the body."""
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        return (
            f"POST {self.prefix}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{key}"
            "Content-Type: application/json\r\nAccept: */*\r\nContent-Length: "
        )


def parse_target(url: str, *, api_key: str = "", insecure: bool = False) -> HttpTarget:
    """A server by its URL, with or without scheme (http) and ``/v1``.

    Args:
        insecure: accept any certificate.

    Raises:
        BadTarget: no host, another scheme, or a port that is none.
    """
    parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
    if parts.scheme not in _PORTS:
        raise BadTarget(f"{url}: only http and https")
    try:
        port = parts.port or _PORTS[parts.scheme]
    except ValueError:
        raise BadTarget(f"{url}: the port is not a number up to 65535") from None
    if not parts.hostname or any(each.isspace() for each in url):
        raise BadTarget(f"{url!r} names no host; expected http://host:port")
    if any(not each.isprintable() for each in api_key):
        raise BadTarget("the API key has control characters")
    tls = None
    if parts.scheme == "https":
        tls = ssl.create_default_context()
        if insecure:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
    return HttpTarget(parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"), tls, api_key)


async def ask(target: HttpTarget, path: str, body: bytes | None = None, timeout_s: float = 10.0) -> tuple[int, bytes]:
    """Send a GET, or a POST of ``body``, and return status and body. Status 0: no answer, and the body says why."""
    headers = [("Authorization", f"Bearer {target.api_key}")] if target.api_key else []
    if body is not None:
        headers.append(("Content-Type", "application/json"))
    limits = dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)
    try:
        async with httpcore2.AsyncConnectionPool(ssl_context=target.tls) as pool:
            response = await pool.request(
                "GET" if body is None else "POST",
                f"{target.url}{path}",
                headers=headers,
                content=body,
                extensions={"timeout": limits},
            )
            return response.status, response.content[:_MOST_BYTES]
    except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError) as error:
        return 0, (str(error) or type(error).__name__).encode()


@dataclass(slots=True, eq=False)
class Exchange:
    """Times come from ``time.perf_counter``; 0.0 means that it did not happen.

    Attributes:
        request: the bytes to send, headers included.
        done: called once, when the answer is complete or has failed.
        key: identifies the request for the caller.
        due: when it should have been sent; 0.0: as soon as possible.
        sent: when its bytes were written.
        first: when the first text arrived.
        last: when the last text arrived.
        ended: when the answer was complete.
        gaps_s: seconds between reads that carried text.
        events: server-sent events but ``[DONE]``.
        status: of HTTP; 0: none.
        prompt_tokens: of the answer's usage, like the next two; -1: it did not say.
        error: why it failed; "": answered with status 200.
    """

    request: bytes
    done: Callable[["Exchange"], None]
    key: int = 0
    due: float = 0.0
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    ended: float = 0.0
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    events: int = 0
    status: int = 0
    prompt_tokens: int = -1
    cached_tokens: int = -1
    output_tokens: int = -1
    error: str = ""

    @property
    def unreached(self) -> bool:
        """The connection failed, rather than the request."""
        return bool(self.error) and not self.status


_EVENT = b"data: {"
_CHUNKED_END = b"\r\n0\r\n\r\n"
_TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|text)": ?"(?!")')  # some events have empty text
_USAGE = {
    "prompt_tokens": re.compile(rb'"prompt_tokens": ?(\d+)'),
    "cached_tokens": re.compile(rb'"cached_tokens": ?(\d+)'),
    "output_tokens": re.compile(rb'"completion_tokens": ?(\d+)'),
}
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_TAIL_BYTES = 2048
_QUOTED_BYTES = 200  # of an error's body


class PooledConnection(asyncio.Protocol):
    """
    Args:
        idle: called when an answer is complete and another request may be sent, before ``Exchange.done``.
        lost: called when the connection has ended, wanted or not.
    """

    def __init__(self, idle: Callable[["PooledConnection"], None], lost: Callable[["PooledConnection"], None]) -> None:
        self._idle = idle
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None  # under way
        self._reset()

    def _reset(self) -> None:
        self._head = b""  # until the headers are complete
        self._in_body = False
        self._left = -1  # bytes of the body to come; -1: chunked
        self._close = False
        self._end = b""  # the last bytes, where a mark may be cut by the border of two reads
        self._tail = b""  # the last part of the body, where the usage is

    @property
    def exchange(self) -> Exchange | None:
        """The request in flight."""
        return self._exchange

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def send(self, exchange: Exchange) -> None:
        """Send a request; the connection must be open and idle."""
        assert self._transport is not None
        assert self._exchange is None
        self._reset()
        self._exchange = exchange
        exchange.sent = time.perf_counter()
        self._transport.write(exchange.request)

    def close(self, error: str = "") -> None:
        """Close. A request in flight fails with ``error``, or is dropped without a call if ``error`` is empty."""
        exchange, self._exchange = self._exchange, None
        if self._transport is not None:
            if exchange is None:
                self._transport.close()
            else:
                self._transport.abort()
        if exchange is not None and error:
            exchange.error = error
            exchange.done(exchange)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            return  # closed, or more than was asked for
        if self._in_body:
            self._body(exchange, data)
            return
        self._head += data
        head, mark, body = self._head.partition(b"\r\n\r\n")
        if not mark:
            return
        self._in_body = True
        lower = head.lower()
        exchange.status = int(head[9:12])
        self._close = b"connection: close" in lower
        if b"transfer-encoding: chunked" not in lower:
            length = _LENGTH.search(head)
            self._left = int(length[1]) if length else 0
        # The end of the headers may already be the beginning of the last chunk's mark.
        self._end = b"\r\n"
        if body or self._left == 0:
            self._body(exchange, body)

    def _body(self, exchange: Exchange, data: bytes) -> None:
        joined = self._end + data
        exchange.events += joined.count(_EVENT)
        self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:] if self._left < 0 else self._tail + data
        if _TEXT.search(joined):  # ends at the first match, mostly in the first event
            self._text(exchange)
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._answered(exchange)
        elif joined.endswith(_CHUNKED_END):
            self._answered(exchange)
        else:
            self._end = joined[1 - len(_EVENT) :]

    def _text(self, exchange: Exchange) -> None:
        now = time.perf_counter()
        if exchange.first:
            exchange.gaps_s.append(now - exchange.last)
        else:
            exchange.first = now
        exchange.last = now

    def _answered(self, exchange: Exchange) -> None:
        assert self._transport is not None
        exchange.ended = time.perf_counter()
        if exchange.status != 200:
            quoted = self._tail[:_QUOTED_BYTES].decode(errors="replace")
            exchange.error = f"HTTP {exchange.status}: {quoted}"
        else:
            for name, pattern in _USAGE.items():
                if matches := pattern.findall(self._tail):
                    setattr(exchange, name, int(matches[-1]))
        self._exchange = None
        if self._close:
            self._transport.close()
        else:
            self._idle(self)
        exchange.done(exchange)

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self._exchange = self._exchange, None
        self._lost(self)
        if exchange is not None:
            exchange.error = "connection lost" + (f": {exc!r}" if exc else "")
            exchange.done(exchange)


_CONNECT_S = 30.0
_RECONNECT_S = 0.05  # between a failed connection and the next
_CHECK_S = 0.5
_CLOSING_STEPS = 100


class ConnectionPool:
    """Sends each request on an idle connection, or on a new one.

    Args:
        most: number of connections; a request that would need another one fails.
        timeout_s: a request without a complete answer after this time fails; 0: none does.
    """

    def __init__(self, target: HttpTarget, *, most: int = 8192, timeout_s: float = 0.0) -> None:
        self._target = target
        self._most = most
        self._timeout_s = timeout_s
        self._idle: list[PooledConnection] = []
        self._connections: set[PooledConnection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._check: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> "ConnectionPool":
        if self._timeout_s:
            self._check = asyncio.create_task(self._fail_late(), name="late requests")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections and drop the requests in flight."""
        self._closed = True
        tasks = [*self._opening, *([self._check] if self._check else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in tuple(self._connections):
            connection.close()
        for _step in range(_CLOSING_STEPS):  # transports close in the loop's next steps
            if self._connections:
                await asyncio.sleep(0)

    def send(self, exchange: Exchange) -> None:
        """Send now, or as soon as a connection is open; ``exchange.done`` is called later, never from here."""
        if self._idle:
            self._idle.pop().send(exchange)
            return
        task = asyncio.create_task(self._open(exchange), name="connect")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, exchange: Exchange) -> None:
        if len(self._connections) >= self._most:
            exchange.error = f"no connection: {self._most} are open; the server is slower than the load"
            exchange.done(exchange)
            return
        connection = PooledConnection(self._idle.append, self._on_lost)
        self._connections.add(connection)
        target = self._target
        try:
            async with asyncio.timeout(_CONNECT_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection, target.host, target.port, ssl=target.tls
                )
        except OSError as error:  # TimeoutError and ssl.SSLError are OSErrors
            self._connections.discard(connection)
            exchange.error = f"no connection: {error.strerror or error or type(error).__name__}"
            exchange.done(exchange)
            return
        if self._closed:
            connection.close()
        else:
            connection.send(exchange)

    def _on_lost(self, connection: PooledConnection) -> None:
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def _fail_late(self) -> None:
        while True:
            await asyncio.sleep(min(_CHECK_S, self._timeout_s / 4))
            oldest = time.perf_counter() - self._timeout_s
            for connection in tuple(self._connections):
                if connection.exchange is not None and connection.exchange.sent < oldest:
                    connection.close(f"no answer within {self._timeout_s:g} s")


class ClosedLoop:
    """Keeps ``concurrency`` requests in flight until ``following`` returns None or ``stop`` is called."""

    def __init__(self, pool: ConnectionPool, concurrency: int, following: Callable[[], Exchange | None]) -> None:
        self._pool = pool
        self._following = following
        self._stopped = False
        self._open = concurrency
        self._ended = asyncio.Event()  # nothing is under way, and nothing will be
        for _ in range(concurrency):
            self._next()

    def _next(self) -> None:
        exchange = None if self._stopped else self._following()
        if exchange is None:
            self._open -= 1
            if self._open == 0:
                self._ended.set()
            return
        exchange.done = partial(self._done, exchange.done)
        self._pool.send(exchange)

    def _done(self, done: Callable[[Exchange], None], exchange: Exchange) -> None:
        done(exchange)
        if exchange.unreached:
            asyncio.get_running_loop().call_later(_RECONNECT_S, self._next)
        else:
            self._next()

    def stop(self) -> None:
        """Send nothing more."""
        self._stopped = True

    async def ended(self, within_s: float) -> bool:
        """Wait until no request is in flight; False: the time was over before that."""
        try:
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True


async def send_in_time(pool: ConnectionPool, requests: Iterable[tuple[float, Exchange]], began: float) -> None:
    """Send each request when it is due: seconds after ``began``, in ascending order."""
    for at_s, exchange in requests:
        exchange.due = began + at_s
        left = exchange.due - time.perf_counter()
        await asyncio.sleep(max(0.0, left))
        pool.send(exchange)


WORDS = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea kid body information
back parent face others level office door health person art war history party result change morning reason research
girl guy moment air teacher force education""".split()  # noqa: SIM905 - as a list it would be a page


def own_seconds() -> float:
    times = os.times()
    return times.user + times.system


_EVERY_S = 0.02


class LagMeter:
    """A context manager that measures while it is entered.

    Attributes:
        late_s: how much later than asked a timer of the event loop ran, each time.
        cpu_share: of one core that this process used, over ``seconds``.
    """

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self.cpu_share = 0.0
        self.seconds = 0.0
        self._task: asyncio.Task[None] | None = None
        self._began = self._cpu = 0.0

    async def __aenter__(self) -> "LagMeter":
        self._began, self._cpu = time.perf_counter(), own_seconds()
        self._task = asyncio.create_task(self._measure(), name="lag meter")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.seconds = max(1e-9, time.perf_counter() - self._began)
        self.cpu_share = (own_seconds() - self._cpu) / self.seconds

    async def _measure(self) -> None:
        while True:
            due = time.perf_counter() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            self.late_s.append(max(0.0, time.perf_counter() - due))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's event loop. asyncio's own runs late at a few thousand requests per second."""
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
