"""Where the messages of one answer are sent: subjects that a client reads, possibly through its tenant's account."""

import asyncio
import time
from collections.abc import Sequence

from gateway.nats.messages import AnswerMessage
from infra.bus.connection import Bus
from schemas.subjects import HEADER_REQUEST

INTEREST_S = 5.0  # nats-py's clients come back 2 s after the broker
PROBE_S = 0.1


class ReplyPublisher:
    """
    Args:
        first, until: numbers of the first and last message that are wanted.
        durable: the subjects outlive a restart of the broker. The broker's own reply subjects do not.
    """

    def __init__(
        self, bus: Bus, subjects: Sequence[str], *, first: int = 0, until: int | None = None, durable: bool = True
    ) -> None:
        self._bus = bus
        self._subjects = tuple(dict.fromkeys(subjects))
        self._headers: dict[str, str] = {}
        self._subscriber_required = False
        self.first = first
        self.until = until
        self.durable = durable
        self.reports_end = False  # also to who asks for numbers behind the last

    def set_request(self, request_id: str) -> None:
        """The request whose answer this is; known only once it is accepted."""
        self._headers = {HEADER_REQUEST: request_id}

    def is_last(self, message: AnswerMessage) -> bool:
        """Whether nothing is wanted behind this message."""
        return message.final or (self.until is not None and message.number >= self.until)

    def ended_before_first(self, message: AnswerMessage) -> bool:
        """Whether the answer ends with this message, before the first that is wanted."""
        return self.reports_end and message.final and not message.record and message.number < self.first

    def require_subscriber(self) -> None:
        """The broker was away: a gateway is back long before its clients, and what is sent now may reach nobody."""
        self._subscriber_required = True

    async def send(self, message: AnswerMessage) -> None:
        wanted = message.number >= self.first or message.number < 0 or message.record
        if not wanted or (self.until is not None and message.number > self.until):
            return
        headers = message.headers(self._headers)
        if self._subscriber_required:
            await self._send_until_received(message.body, headers)
            self._subscriber_required = False
            return
        for subject in self._subjects:
            await self._bus.nc.publish(subject, message.body, headers=headers)

    async def _send_until_received(self, body: bytes, headers: dict[str, str]) -> None:
        """Send until somebody is subscribed, at most for ``INTEREST_S``."""
        inbox, nobody = self._bus.nc.new_inbox(), asyncio.Event()

        async def note(message: object) -> None:  # the broker's "no responders"
            nobody.set()

        deadline = time.monotonic() + INTEREST_S
        sub = await self._bus.nc.subscribe(inbox, cb=note)
        try:
            while self._bus.connected:
                received = False
                for subject in self._subjects:
                    nobody.clear()
                    await self._bus.nc.publish(subject, body, reply=inbox, headers=headers)
                    for _ in range(2):  # nats-py writes the first PING ahead of what is still buffered
                        await self._bus.nc.flush(timeout=2)
                    await asyncio.sleep(0)  # the callback has a task of its own
                    received |= not nobody.is_set()
                if received or time.monotonic() > deadline:
                    return
                await asyncio.sleep(PROBE_S)
        finally:
            if not self._bus.nc.is_closed:
                await sub.unsubscribe()
