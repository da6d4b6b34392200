"""Publishes the messages of one answer to subjects that a client reads, possibly through its tenant's account."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from gateway.nats.messages import AnswerMessage
from infra.bus.connection import Bus
from schemas.subjects import HEADER_REQUEST

INTEREST_S = 5.0  # nats-py's clients reconnect within 2 s of the broker's return
PROBE_S = 0.1
CHECK_EVERY = 32  # messages after which, as after CHECK_S, the broker is asked whether there is a subscriber
CHECK_S = 1.0


class ReplyPublisher:
    """
    Args:
        first, until: numbers of the first and last message to send.
        durable: the subjects survive a restart of the broker. The broker's own reply subjects do not.
        check_interest: set ``unread`` once there was no subscriber for ``INTEREST_S``; requires ``close``.

    Attributes:
        unread: the answer has no reader.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Sequence[str],
        *,
        first: int = 0,
        until: int | None = None,
        durable: bool = True,
        check_interest: bool = False,
    ) -> None:
        self._bus = bus
        self._subjects = tuple(dict.fromkeys(subjects))
        self.request_id = ""
        self._headers: dict[str, str] = {}
        self._subscriber_required = False
        self.first = first
        self.until = until
        self.durable = durable
        self.check_interest = check_interest
        self.unread = False
        self._checks: Any = None  # subscription to the broker's "no responders"
        self._check_inbox = ""
        self._unchecked = 0  # messages since the last check
        self._checked_at = 0.0

    def set_request(self, request_id: str) -> None:
        """Set the request that is answered; its id is known only once it is accepted."""
        self.request_id = request_id
        self._headers = {HEADER_REQUEST: request_id}

    def is_last(self, message: AnswerMessage) -> bool:
        """Whether no later message is to be sent."""
        return message.final or (self.until is not None and message.number >= self.until)

    def ended_before_first(self, message: AnswerMessage) -> bool:
        """Whether the answer ends with this message, before the first that is to be sent."""
        return message.final and not message.record and message.number < self.first

    def require_subscriber(self) -> None:
        """Have the next message wait for a subscriber: after a reconnect, a gateway is back before its clients."""
        self._subscriber_required = True

    @property
    def waits_for_subscriber(self) -> bool:
        return self._subscriber_required

    async def send(self, message: AnswerMessage) -> None:
        in_range = message.number >= self.first or message.number < 0 or message.record
        if not in_range or (self.until is not None and message.number > self.until):
            return
        headers = message.headers(self._headers)
        if self._subscriber_required:
            received = await self._send_until_received(message.body, headers)
            self._subscriber_required = False
            self.unread = self.check_interest and not received
            return
        reply = await self._check_reply() if self.check_interest else ""
        for subject in self._subjects:
            await self._bus.nc.publish(subject, message.body, reply=reply, headers=headers)

    async def refuse(self, refusal: AnswerMessage) -> None:
        """Send why there is no answer, whichever of its messages were wanted."""
        self.first, self.until = 0, None
        await self.send(refusal)

    async def close(self) -> None:
        if self._checks is not None and not self._bus.nc.is_closed:
            await self._checks.unsubscribe()

    async def _check_reply(self) -> str:
        """The reply subject of the next message: an inbox if it checks for subscribers, else ""."""
        now = time.monotonic()
        self._unchecked += 1
        if self._checks is not None and self._unchecked < CHECK_EVERY and now - self._checked_at < CHECK_S:
            return ""
        if self._checks is None:
            self._check_inbox = self._bus.nc.new_inbox()
            self._checks = await self._bus.nc.subscribe(self._check_inbox, cb=self._on_no_responders)
        self._unchecked, self._checked_at = 0, now
        return self._check_inbox

    async def _on_no_responders(self, message: object) -> None:
        self._subscriber_required = True

    async def _send_until_received(self, body: bytes, headers: dict[str, str]) -> bool:
        """Send until there is a subscriber, for at most ``INTEREST_S``; False: there was none."""
        inbox, no_responders = self._bus.nc.new_inbox(), asyncio.Event()

        async def on_no_responders(message: object) -> None:
            no_responders.set()

        deadline = time.monotonic() + INTEREST_S
        sub = await self._bus.nc.subscribe(inbox, cb=on_no_responders)
        try:
            while self._bus.connected:
                received = False
                for subject in self._subjects:
                    no_responders.clear()
                    await self._bus.nc.publish(subject, body, reply=inbox, headers=headers)
                    for _ in range(2):  # nats-py writes the first PING ahead of buffered messages
                        await self._bus.nc.flush(timeout=2)
                    await asyncio.sleep(0)  # the callback has a task of its own
                    received |= not no_responders.is_set()
                if received or time.monotonic() > deadline:
                    return received
                await asyncio.sleep(PROBE_S)
            return True  # unknown: the broker is away
        finally:
            if not self._bus.nc.is_closed:
                await sub.unsubscribe()
