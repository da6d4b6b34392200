"""The progress of a running request, from the gateway that follows it: reading the log takes longer the more it has."""

from collections.abc import Callable, Sequence
from typing import Any

import structlog
from nats.errors import Error as NatsError

from penstock.gateway.log.inflight import InflightRequest
from penstock.infra.bus.connection import Bus
from penstock.schemas import control
from penstock.schemas.wire import encode

log = structlog.get_logger("gateway")

ASK_S = 0.25

ReadersOf = Callable[[str], Sequence[InflightRequest]]


def progress_of(inflight: InflightRequest) -> control.Progress:
    fold = inflight.fold
    return control.Progress(fold.attempt, sum(fold.position(choice) for choice in range(inflight.request.n)))


class Progress:
    """``readers_of``: this gateway's open answers of a request."""

    def __init__(self, bus: Bus, gateway: str, readers_of: ReadersOf) -> None:
        self._bus = bus
        self._gateway = gateway
        self._readers = readers_of

    async def open(self) -> None:
        await self._bus.nc.subscribe(self._bus.subjects.progress(self._gateway), cb=self._answer)

    async def _answer(self, message: Any) -> None:
        progress = self.here(message.data.decode("ascii", "replace"))
        if message.reply:
            await self._bus.nc.publish(message.reply, encode(progress) if progress is not None else b"")

    def here(self, request_id: str) -> control.Progress | None:
        """The progress known to this gateway; None: it does not follow the request."""
        positions = [progress_of(inflight) for inflight in self._readers(request_id) if not inflight.behind]
        return max(positions, key=lambda each: (each.attempt, each.tokens), default=None)

    async def ask(self, gateway: str, request_id: str) -> control.Progress | None:
        """The progress known to another gateway; None: it is gone, or does not follow the request (any more)."""
        try:
            subject = self._bus.subjects.progress(gateway)
            reply = await self._bus.nc.request(subject, request_id.encode(), timeout=ASK_S)
        except (NatsError, TimeoutError) as error:
            log.debug("progress_unknown", gateway=gateway, error=repr(error))
            return None
        return control.decode_progress(reply.data) if reply.data else None
