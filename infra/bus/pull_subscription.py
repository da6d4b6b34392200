"""The inbox of one generation of pull requests. What Penstock needs of nats-py's private parts is here."""

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.message import Message
from penstock.infra.bus.tasks import end

FLUSH_S = 2  # a round trip to the server


class PullSubscription:
    """Delivers messages in order, with the generation that they belong to."""

    def __init__(self, bus: Bus, generation: int, handle: Callable[[Message, int], Awaitable[None]]) -> None:
        self.inbox: str = bus.nc.new_inbox()
        self.generation = generation
        self._bus = bus
        self._handle = handle
        self._sub: Any = None

    async def open(self) -> None:
        self._sub = await self._bus.nc.subscribe(self.inbox, cb=self._on_message)

    async def _on_message(self, message: Message) -> None:
        await self._handle(message, self.generation)

    async def drain(self) -> None:
        """Return when no message is in flight any more and all received ones have been delivered."""
        nc = self._bus.nc
        if self._bus.connected:
            with contextlib.suppress(NatsError, OSError):  # messages in flight on a broken connection are lost
                await nc._send_unsubscribe(self._sub._id)
                await nc.flush(timeout=FLUSH_S)  # the server's answer is behind its last message
        await self._sub._pending_queue.join()

    async def close(self) -> None:
        """Deliver nothing more; messages that are still here are delivered again later."""
        with contextlib.suppress(NatsError, OSError):
            await self._sub.unsubscribe()
        await end([self._sub._wait_for_msgs_task])  # it may be inside the handler
