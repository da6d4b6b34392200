"""The connection to the broker: reconnects for ever, tells its users when it did, ends the process if it cannot.

nats-py closes a connection for good on some server errors, whatever the reconnect settings (a password changed
by a reload, for example). A process that went on without noticing would be deaf, so it exits; its supervisor
starts another.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

import structlog
from nats.aio.client import Client
from nats.errors import SlowConsumerError
from nats.js import JetStreamContext

from infra.bus.tasks import Failed, Tasks
from schemas.errors import Code, ServingError
from schemas.streams import HEADROOM, MAX_PAYLOAD
from schemas.subjects import Subjects

log = structlog.get_logger("bus")

EXIT_BROKER_LOST = 75  # EX_TEMPFAIL: a supervisor should start the process again
CONNECT_S = 10.0
CLOSE_S = 3.0
DROPPED_S = 0.25
# With others to go to, a server that hangs is left after 2 to 3 s, before an election (4 to 9 s) can be over:
# nobody listens to a leader that wakes up deposed.
_QUICK: dict[str, Any] = {"ping_interval": 1, "connect_timeout": 1}
SAME_ERROR_S = 5.0

Hook = Callable[[], Awaitable[None]]


class _Client(Client):  # type: ignore[misc]  # untyped
    """What nats-py leaves undone.

    It outlives a flush that was given up (nats-py ends its read loop over the answer, and is deaf from then on), and
    closes the link to a server that accepted and said nothing before it tries the next.
    """

    async def _connect_to_server(self, s: Any) -> None:
        if self._transport is not None:
            with contextlib.suppress(Exception):
                self._transport.close()
        await super()._connect_to_server(s)

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()


class Bus:
    """One connection. ``on_reconnect`` hooks run in order after each reconnect, in a task of their own.

    Attributes:
        tasks: the process's background tasks; what works on this connection spawns in it or in a group of it.
    """

    def __init__(self, client: Client, subjects: Subjects, tasks: Tasks | None = None) -> None:
        self.nc = client
        self.tasks = tasks if tasks is not None else Tasks("process")  # an empty group is false
        self.js: JetStreamContext = client.jetstream()
        self.subjects = subjects
        self.on_reconnect: list[Hook] = []
        self.closing = False
        self._recovery: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return bool(self.nc.is_connected)

    @property
    def reconnects(self) -> int:
        """How often the link was made anew; counted before anything can be sent on the new one."""
        return int(self.nc.stats["reconnects"])

    @property
    def clustered(self) -> bool:
        """Whether the server is one of several: streams may have replicas then, and leaders that change."""
        return bool(self.nc._server_info.get("cluster"))  # as of the last connect; nats-py shows it nowhere else

    @property
    def max_message(self) -> int:
        """Largest body, in bytes, that leaves room for headers."""
        return min(int(self.nc.max_payload), MAX_PAYLOAD) - HEADROOM

    def recover(self) -> None:
        """Run the reconnect hooks; a recovery that is still running is replaced, since it worked on a dead link."""
        if self._recovery is not None:
            self._recovery.cancel()
        self._recovery = self.tasks.spawn(self._recover(), name="bus-recovery")

    def recover_soon(self) -> None:
        """Messages were dropped on a link that stands: the same hooks mend that. Once for a burst of drops."""
        if self._recovery is None or self._recovery.done():
            self._recovery = self.tasks.spawn(self._recover(after=DROPPED_S), name="bus-recovery")

    async def _recover(self, after: float = 0.0) -> None:
        await asyncio.sleep(after)
        for hook in list(self.on_reconnect):
            try:
                await hook()
            except Exception as error:
                log.warning("reconnect_hook_failed", hook=getattr(hook, "__qualname__", "?"), error=repr(error))

    async def close(self) -> None:
        """Send what is queued, end the tasks, close; never raises, bounded to a few seconds."""
        self.closing = True
        await self.tasks.aclose()
        if self.connected:
            await _bounded(self.nc.flush(timeout=2))
        await _bounded(self.nc.close())


async def _bounded(step: Coroutine[Any, Any, None]) -> None:
    """Wait for a step at most ``CLOSE_S``. Not ``wait_for``, which waits for ever for a step that ignores its end."""
    task = asyncio.ensure_future(step)
    await asyncio.wait([task], timeout=CLOSE_S)
    if not task.done():
        task.cancel()
        log.warning("close_incomplete")
    elif not task.cancelled() and task.exception() is not None:
        # also uvloop's "handler is closed" when the link is already down
        log.debug("close_failed", error=repr(task.exception()))


def _login(url: str) -> dict[str, Any]:
    """The URL's credentials as options: nats-py would not show them to servers that it learns of later."""
    parts = urlsplit(url)
    if parts.username and parts.password is not None:
        return {"user": unquote(parts.username), "password": unquote(parts.password)}
    return {"token": unquote(parts.username)} if parts.username else {}


async def connect(
    url: str,
    *,
    role: str,
    name: str,
    namespace: str = "ps",
    timeout: float = CONNECT_S,
    end_process: Callable[[int], NoReturn] = os._exit,
    on_fatal: Failed | None = None,
    **options: Any,
) -> Bus:
    """Open the connection of one process.

    Args:
        url: one or more servers, comma-separated, with credentials.
        role: the broker user's role; names the private inbox that its permissions allow.
        name: shown in the broker's monitoring and in its disconnect events.
        on_fatal: ends the process in order, when one of its background tasks failed (``Stop.failed``).
    Raises:
        ServingError: no server answered within ``timeout`` seconds, or it refused the credentials.
    """
    holder: list[Bus] = []

    said: dict[str, Any] = {"error": "", "at": 0.0}

    async def on_error(error: Exception) -> None:  # runs in the read loop: must neither block nor raise
        text, now = repr(error)[:500], time.monotonic()
        if text != said["error"] or now - said["at"] > SAME_ERROR_S:  # a broker that is away is tried 10 times a second
            said.update(error=text, at=now)
            log.warning("bus_error", error=text)
        if isinstance(error, SlowConsumerError) and holder:
            holder[0].recover_soon()

    async def on_closed() -> None:
        if holder and not holder[0].closing:
            log.error("bus_closed", action="exiting; the supervisor starts this process again")
            end_process(EXIT_BROKER_LOST)

    async def on_reconnected() -> None:
        log.info("bus_reconnected")
        if holder:
            holder[0].recover()

    async def on_disconnected() -> None:
        if holder and not holder[0].closing:
            log.warning("bus_disconnected")

    client = _Client()
    urls = url.split(",")
    if len(urls) > 1:
        options = _QUICK | options
    try:
        await asyncio.wait_for(
            client.connect(
                urls,
                **{
                    "name": name,
                    "max_reconnect_attempts": -1,
                    "reconnect_time_wait": 0.1,
                    "ping_interval": 5,
                    "pending_size": 32 << 20,
                    "inbox_prefix": f"_INBOX_{role}" if role != "client" else "_INBOX",
                    "error_cb": on_error,
                    "closed_cb": on_closed,
                    "reconnected_cb": on_reconnected,
                    "disconnected_cb": on_disconnected,
                }
                | _login(urls[0])
                | options,
            ),
            timeout,
        )
    except Exception as error:
        where = ", ".join(part.rpartition("@")[2] for part in url.split(","))
        raise ServingError(
            Code.broker_unavailable,
            f"no NATS server answers at {where} within {timeout:g} s ({type(error).__name__}: {error}); "
            "start one with 'penstock nats', or check --nats-url and its credentials",
        ) from None
    bus = Bus(client, Subjects(namespace), Tasks(role, on_fatal))
    holder.append(bus)
    return bus
