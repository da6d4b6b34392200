"""FastStream as the application shell, on a connection that Penstock opened.

FastStream's own connection wraps the error callback in one that can raise inside the reconnect task, after which the
client never connects again. FastStream's subscribers serve control messages; jobs come through
``penstock.infra.bus.puller``.
"""

from typing import Any

from faststream.nats import NatsBroker, NatsMessage

from penstock.infra.bus.connection import Bus


class OwnConnection(NatsBroker):
    """A FastStream broker over an open ``Bus``, which keeps owning the connection."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(apply_types=False, logger=None, graceful_timeout=5.0)
        self._bus = bus

    async def _connect(self) -> Any:
        self.config.connect(self._bus.nc)
        return self._bus.nc


async def raw(message: NatsMessage) -> NatsMessage:
    """A decoder that leaves the body as it is; FastStream's own would try JSON."""
    return message
