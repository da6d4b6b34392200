"""Which connections are broken, from the events of the broker's system account.

Events report a killed worker within milliseconds; its lease would take seconds to expire.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import structlog

from penstock.infra.bus.connection import Bus, connect
from penstock.schemas.errors import ServingError


class Link(NamedTuple):
    """A connection to the broker: id of the server, and of the connection there."""

    server: str
    connection: int


log = structlog.get_logger("router")

GRACE_S = 0.4  # for a broken connection to come back


class DisconnectWatch:
    """``broken`` maps the name of each broken connection to the monotonic time when it broke.

    Args:
        is_worker: whether a connection of this name belongs to a worker; others are not in ``broken``.

    Attributes:
        link_broke: called with every connection that broke.
    """

    def __init__(self, is_worker: Callable[[str], bool]) -> None:
        self._is_worker = is_worker
        self.link_broke: Callable[[Link], None] = lambda link: None
        self.broken: dict[str, float] = {}
        self._system: Bus | None = None

    async def start(self, url: str) -> None:
        """Without the system account, only leases report dead workers."""
        try:
            self._system = await connect(url, role="sys", name="router-sys", end_process=_on_closed)
            await self._system.nc.subscribe("$SYS.ACCOUNT.*.DISCONNECT", cb=self._on_disconnect)
            await self._system.nc.subscribe("$SYS.ACCOUNT.*.CONNECT", cb=self._on_connect)
        except ServingError as error:
            log.warning("no_disconnect_events", error=error.message, action="only leases report dead workers")

    async def stop(self) -> None:
        if self._system is not None:
            await self._system.close()

    def restored(self, connection: str) -> None:
        """The connection works: its worker has registered or renewed its lease."""
        self.broken.pop(connection, None)

    def expired(self, now: float) -> list[str]:
        """Remove and return connections that did not come back in time."""
        if not self.broken:
            return []
        late = [connection for connection, since in self.broken.items() if now - since > GRACE_S]
        for connection in late:
            del self.broken[connection]
        return late

    async def _on_disconnect(self, message: Any) -> None:
        event = _read(message.data)
        self.link_broke(Link(event.server.id, event.client.id))
        if self._is_worker(event.client.name):
            self.broken[event.client.name] = time.monotonic()

    async def _on_connect(self, message: Any) -> None:
        self.broken.pop(_read(message.data).client.name, None)


class _Client(msgspec.Struct, frozen=True):
    name: str = ""
    id: int = 0


class _Server(msgspec.Struct, frozen=True):
    id: str = ""


class _Event(msgspec.Struct, frozen=True):
    client: _Client = _Client()
    server: _Server = _Server()


_decode_event = msgspec.json.Decoder(_Event).decode


def _read(data: bytes) -> _Event:
    try:
        return _decode_event(data)
    except msgspec.MsgspecError:
        return _Event()


def _on_closed(code: int) -> Any:
    log.warning("system_connection_closed", action="only leases report dead workers")
