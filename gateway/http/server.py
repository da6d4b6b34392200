"""The HTTP server of a gateway: it accepts connections within bounds, and stops in order.

uvicorn's protocol without its ``Server``, which cancels what it cannot finish.
"""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import structlog
import uvicorn
from uvicorn.server import ServerState

from penstock.gateway.http.connections import Connection, Limits
from penstock.gateway.http.middleware import TrustedProxies
from penstock.gateway.http.tls import HANDSHAKE_S, Certificate
from penstock.infra.bus.tasks import Tasks, end
from penstock.infra.process.turns import TimeSlice, TurnBudget
from penstock.schemas.errors import Code, ServingError

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
        limits: Limits,
        tasks: Tasks,
        *,
        tls: Certificate | None = None,
        proxies: TrustedProxies | None = None,
        turns: TurnBudget | None = None,
    ) -> None:
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
        self._handshakes: WeakKeyDictionary[Connection, float] = WeakKeyDictionary()
        self._servers: list[asyncio.Server] = []

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        secured: dict[str, Any] = {}
        if self._tls is not None:
            secured = {"ssl": self._tls.context, "ssl_handshake_timeout": HANDSHAKE_S}
            self._tasks.spawn(self._tls.watch(), name="certificate")
        for listener in self._listeners:
            self._servers.append(await loop.create_server(self._accepted, sock=listener, backlog=BACKLOG, **secured))
        self._tasks.spawn(self._check(), name="connections")

    def _accepted(self) -> Connection:
        connection = Connection(self)
        if self._tls is not None:
            self._handshakes[connection] = asyncio.get_running_loop().time()
        return connection

    @property
    def connections(self) -> list[Connection]:
        return list(self.state.connections)  # type: ignore[arg-type]

    # --- bounds ---

    def opened(self, connection: Connection) -> ServingError | None:
        self._handshakes.pop(connection, None)
        limits, count = self.limits, len(self.state.connections)
        if limits.per_address and not (self._proxies and self._proxies.trusts(connection.address)):
            self._by_address[connection.address] += 1
            if self._by_address[connection.address] > limits.per_address:
                return self._full(connection, f"{limits.per_address} from one address (--max-connections-per-address)")
        if count > limits.connections:
            return self._full(connection, f"{limits.connections} (--max-connections)")
        return None

    def closed(self, connection: Connection) -> None:
        if connection.address in self._by_address:
            self._by_address[connection.address] -= 1
            if self._by_address[connection.address] <= 0:
                del self._by_address[connection.address]

    def _full(self, connection: Connection, limit: str) -> ServingError:
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
