"""The connection that a client's readers share, and the subjects that they use."""

import asyncio
import contextlib
import hashlib
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from nats.aio.client import Client as NatsClient
from nats.aio.transport import TcpTransport
from nats.errors import Error as NatsError

from .answers import error

CONNECT_S = 10.0
CLOSE_S = 5.0
CLOSED_S = 1.0


class Connection:
    """Reconnects forever; calls ``changed`` of every open reader after a reconnect, and once it is closed for good."""

    def __init__(self, nc: NatsClient, namespace: str, listeners: set[Callable[[], None]]) -> None:
        self.nc = nc
        self.js = nc.jetstream()
        self.listeners = listeners
        self._namespace = namespace

    def submit(self, model: str) -> str:
        return f"{self._namespace}.submit.{token(model)}"

    def answer(self, key: str) -> str:
        return f"{self._namespace}.answer.{hashlib.sha256(key.encode()).hexdigest()[:32]}"

    @property
    def read(self) -> str:
        return f"{self._namespace}.read"

    @property
    def cancel(self) -> str:
        return f"{self._namespace}.cancel"

    @property
    def connected(self) -> bool:
        return bool(self.nc.is_connected)

    @property
    def closed(self) -> bool:
        return bool(self.nc.is_closed)

    async def unsubscribe(self, subscription: Any) -> None:
        if subscription is not None and not self.nc.is_closed:
            with contextlib.suppress(NatsError, OSError):
                await subscription.unsubscribe()

    async def close(self) -> None:
        """Never raises, and takes ``CLOSE_S`` at most."""
        with contextlib.suppress(NatsError, OSError, RuntimeError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.nc.close()


def token(name: str) -> str:
    """A model's name as one token of a subject."""
    out: list[str] = []
    for char in name:
        kept = char.isascii() and (char.isalnum() or char in "_-")
        if kept or not out or out[-1] != "_":
            out.append(char if kept else "_")
    return "".join(out) or "_"


class _Transport(TcpTransport):  # type: ignore[misc]  # untyped
    """nats-py waits for the end of a link before it tries the next server, and again when it is closed.

    A link whose TLS never began has no end. Where the first wait is cancelled, asyncio cancels the second, too.
    """

    def __bool__(self) -> bool:
        return True  # nats-py replaces one that is not connected by its own

    async def wait_closed(self) -> None:
        if self._io_writer is None:
            return
        closed: asyncio.Future[None] = self._io_writer._protocol._get_close_waiter(self._io_writer)
        await asyncio.wait([closed], timeout=CLOSED_S)  # which cancels nothing
        if not closed.done():
            self._io_writer.transport.abort()
        elif not closed.cancelled():
            closed.exception()  # the link was broken: that is why it is closed


def _login(url: str) -> dict[str, Any]:
    """The credentials of the first server: nats-py takes them from a URL as they stand, percent signs included."""
    parts = urlsplit(url.partition(",")[0])
    if parts.username and parts.password is not None:
        return {"user": unquote(parts.username), "password": unquote(parts.password)}
    return {"token": unquote(parts.username)} if parts.username else {}


def _reason(problem: Exception) -> str:
    if isinstance(problem, ssl.SSLCertVerificationError):
        return (
            f"certificate verify failed: {problem.verify_message.rstrip('.')}; if an authority of your own signs it, "
            "set SSL_CERT_FILE to a file with that, or pass tls=ssl.create_default_context(cafile=...)"
        )
    return f"{type(problem).__name__}: {problem}".rstrip(": ")


async def connect(url: str, namespace: str, **options: Any) -> Connection:
    """
    Args:
        url: one server or several, comma-separated, with credentials.
        options: of ``nats.connect``.
    Raises:
        PenstockError: no server answers, or it refuses the credentials.
    """
    listeners: set[Callable[[], None]] = set()

    async def changed() -> None:
        for listener in list(listeners):
            listener()

    last: list[Exception] = []

    async def noted(problem: Exception) -> None:
        """For the first connect; later errors are handled where they occur. nats-py would print them."""
        last[:] = [problem]

    nats_options: dict[str, Any] = {
        "name": "penstock-client",
        "max_reconnect_attempts": -1,
        "error_cb": noted,
        "reconnected_cb": changed,
        "closed_cb": changed,
    }
    try:
        async with asyncio.timeout(CONNECT_S):
            nc = NatsClient()
            if not url.startswith(("ws://", "wss://")):
                nc._transport = _Transport()
            await nc.connect(url.split(","), **nats_options | _login(url) | options)
    except (NatsError, OSError, TimeoutError) as problem:
        where = ", ".join(part.rpartition("@")[2] for part in url.split(","))
        reason = _reason(last[0] if last else problem)
        message = f"no NATS server at {where} accepted the connection within {CONNECT_S:g} s ({reason})"
        raise error("disconnected", message) from None
    return Connection(nc, namespace, listeners)
