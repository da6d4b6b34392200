"""The connections of a load generator to one server, and the two ways to use them.

``ClosedLoop`` keeps a fixed number of requests in flight; ``send_in_time`` sends each when it is due, however many are.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial

from penstock.measure.generator.connection import Connection
from penstock.measure.generator.exchange import Exchange
from penstock.measure.generator.target import Target

_CONNECT_S = 30.0
_RECONNECT_S = 0.05  # between a failed connection and the next
_CHECK_S = 0.5
_CLOSING_STEPS = 100


class Pool:
    """Sends each request on an idle connection, or on a new one.

    Args:
        most: number of connections; a request that would need another one fails.
        timeout_s: a request without a complete answer after this time fails; 0: none does.
    """

    def __init__(self, target: Target, *, most: int = 8192, timeout_s: float = 0.0) -> None:
        self._target = target
        self._most = most
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []
        self._connections: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._check: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> "Pool":
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
        connection = Connection(self._idle.append, self._on_lost)
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

    def _on_lost(self, connection: Connection) -> None:
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

    def __init__(self, pool: Pool, concurrency: int, following: Callable[[], Exchange | None]) -> None:
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


async def send_in_time(pool: Pool, requests: Iterable[tuple[float, Exchange]], began: float) -> None:
    """Send each request when it is due: seconds after ``began``, in ascending order."""
    for at_s, exchange in requests:
        exchange.due = began + at_s
        left = exchange.due - time.perf_counter()
        await asyncio.sleep(max(0.0, left))
        pool.send(exchange)
