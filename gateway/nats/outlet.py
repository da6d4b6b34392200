"""Where the messages of one answer are sent: subjects that a client reads, possibly through its tenant's account."""

import asyncio
import time
from collections.abc import Sequence

from gateway.nats.numbered import Message
from infra.bus.connection import Bus
from schemas.subjects import HEADER_REQUEST

INTEREST_S = 5.0  # nats-py's clients come back 2 s after the broker
PROBE_S = 0.1


class Outlet:
    """
    Args:
        first, until: numbers of the first and last message that are wanted.
        lasting: the subjects outlive a restart of the broker. The broker's own reply subjects do not.
    """

    def __init__(
        self, bus: Bus, subjects: Sequence[str], *, first: int = 0, until: int | None = None, lasting: bool = True
    ) -> None:
        self._bus = bus
        self._subjects = tuple(dict.fromkeys(subjects))
        self._headers: dict[str, str] = {}
        self._doubt = False
        self.first = first
        self.until = until
        self.lasting = lasting
        self.tells_end = False  # also to who asks for numbers behind the last

    def about(self, request_id: str) -> None:
        """The request whose answer this is; known only once it is accepted."""
        self._headers = {HEADER_REQUEST: request_id}

    def past(self, message: Message) -> bool:
        """Whether nothing is wanted behind this message."""
        return message.final or (self.until is not None and message.number >= self.until)

    def missed(self, message: Message) -> bool:
        """Whether the answer ends with this message, before the first that is wanted."""
        return self.tells_end and message.final and not message.record and message.number < self.first

    def doubt(self) -> None:
        """The broker was away: a gateway is back long before its clients, and what is sent now may reach nobody."""
        self._doubt = True

    async def send(self, message: Message) -> None:
        wanted = message.number >= self.first or message.number < 0 or message.record
        if not wanted or (self.until is not None and message.number > self.until):
            return
        headers = message.headers(self._headers)
        if self._doubt:
            await self._until_heard(message.body, headers)
            self._doubt = False
            return
        for subject in self._subjects:
            await self._bus.nc.publish(subject, message.body, headers=headers)

    async def _until_heard(self, body: bytes, headers: dict[str, str]) -> None:
        """Send until somebody is subscribed, at most for ``INTEREST_S``."""
        inbox, nobody = self._bus.nc.new_inbox(), asyncio.Event()

        async def note(message: object) -> None:  # the broker's "no responders"
            nobody.set()

        deadline = time.monotonic() + INTEREST_S
        sub = await self._bus.nc.subscribe(inbox, cb=note)
        try:
            while self._bus.connected:
                heard = False
                for subject in self._subjects:
                    nobody.clear()
                    await self._bus.nc.publish(subject, body, reply=inbox, headers=headers)
                    for _ in range(2):  # nats-py writes the first PING ahead of what is still buffered
                        await self._bus.nc.flush(timeout=2)
                    await asyncio.sleep(0)  # the callback has a task of its own
                    heard |= not nobody.is_set()
                if heard or time.monotonic() > deadline:
                    return
                await asyncio.sleep(PROBE_S)
        finally:
            if not self._bus.nc.is_closed:
                await sub.unsubscribe()
