"""Publishes the messages of one answer to subjects that a client reads, possibly through its tenant's account.

Whether anybody still reads is asked of the broker, every second or every 32 messages. In the pipeline's own account a
message with a reply subject brings "no responders". The reply subjects that the broker makes for other accounts
(``_R_.…``) never do. There a message asks for the broker's trace of it: as long as the client is subscribed, the trace
has the step into the client's account; the broker drops that mapping for good once the subscription has gone.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.gateway.nats.messages import AnswerMessage
from penstock.infra.bus.connection import Bus
from penstock.schemas.subjects import HEADER_IGNORED, HEADER_REQUEST

INTEREST_S = 5.0  # nats-py's clients reconnect within 2 s of the broker's return
PROBE_S = 0.1
RETURN_S = 60.0  # for which a refusal waits for the broker's return
CHECK_EVERY = 32  # messages after which, as after CHECK_S, the broker is asked whether there is a subscriber
CHECK_S = 1.0
TRACED_S = 1.5  # by then every server of a cluster has sent its part of a trace
MAPPED = "_R_."  # begins the reply subjects that the broker makes for clients of other accounts
HEADER_TRACE = "Nats-Trace-Dest"


class _Step(msgspec.Struct):
    type: str = ""
    to: str = ""


class _Trace(msgspec.Struct):
    """What one server did with a message; ``si``: it passed it into the account of a service's caller."""

    events: list[_Step] = []


_decode_trace = msgspec.json.Decoder(_Trace).decode


class ReplyPublisher:
    """
    Args:
        first, until: numbers of the first and last message to send.
        durable: the subjects survive a restart of the broker. The broker's own reply subjects do not.
        check_interest: set ``unread`` once there was no subscriber for ``INTEREST_S``; requires ``close``.

    Attributes:
        unread: the answer has no reader.
        on_inbox: called with the client's own subject once the broker has named it, in another account.
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
        self._links = bus.reconnects
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
        self.on_inbox: Callable[[str], None] | None = None
        self._mapped = any(subject.startswith(MAPPED) for subject in self._subjects)
        self._check_number = 0
        self._traced = 0  # number of the last check whose message reached the client's account
        self._dropped: tuple[int, float] | None = None  # a check whose message did not, and when that was first seen

    def set_request(self, request_id: str, ignored: str = "") -> None:
        """Set the request that is answered; its id is known only once it is accepted.

        Args:
            ignored: options of its body that are not known here; "": none, or it was accepted elsewhere.
        """
        self.request_id = request_id
        self._headers = {HEADER_REQUEST: request_id}
        if ignored:
            self._headers[HEADER_IGNORED] = ignored

    def is_last(self, message: AnswerMessage) -> bool:
        """Whether no later message is to be sent."""
        return message.final or (self.until is not None and message.number >= self.until)

    def ended_before_first(self, message: AnswerMessage) -> bool:
        """Whether the answer ends with this message, before the first that is to be sent."""
        return message.final and not message.record and message.number < self.first

    def require_subscriber(self) -> None:
        """Have the next message wait for a subscriber: after a reconnect, a gateway is back before its clients."""
        self._subscriber_required = True

    def give_up(self) -> None:
        """Send no more: the same reader reads the answer anew."""
        self.unread = True

    @property
    def waits_for_subscriber(self) -> bool:
        return self._subscriber_required

    async def send(self, message: AnswerMessage) -> None:
        in_range = message.number >= self.first or message.number < 0 or message.record
        if self.unread or not in_range or (self.until is not None and message.number > self.until):
            return
        headers = message.headers(self._headers)
        if self._subscriber_required:
            received = await self._send_until_received(message.body, headers)
            self._subscriber_required = False
            self.unread = self.unread or (self.check_interest and not received)
            return
        reply = await self._check_reply() if self.check_interest else ""
        if reply and self._mapped:
            headers = headers | {HEADER_TRACE: reply}
            reply = ""
        for subject in self._subjects:
            await self._bus.nc.publish(subject, message.body, reply=reply, headers=headers)

    async def refuse(self, refusal: AnswerMessage, *, at_once: bool = False) -> None:
        """Send why there is no answer, whichever of its messages were wanted.

        If the connection to the broker broke meanwhile, the client may not be back yet, and is waited for unless
        ``at_once``.
        """
        self.first, self.until = 0, None
        if self.durable and not at_once and (not self._bus.connected or self._bus.reconnects != self._links):
            deadline = time.monotonic() + RETURN_S
            while not self._bus.connected and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(PROBE_S)
            self.require_subscriber()
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
            if self._mapped:
                self._checks = await self._bus.nc.subscribe(f"{self._check_inbox}.*", cb=self._on_trace)
            else:
                self._checks = await self._bus.nc.subscribe(self._check_inbox, cb=self._on_no_responders)
        self._unchecked, self._checked_at = 0, now
        if not self._mapped:
            return self._check_inbox
        if self._dropped is not None and now - self._dropped[1] > TRACED_S:
            self.unread = True
        self._check_number += 1
        return f"{self._check_inbox}.{self._check_number}"

    async def _on_trace(self, message: Any) -> None:
        try:
            steps = _decode_trace(message.data).events
            number = int(message.subject.rpartition(".")[2])
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
            return
        into = next((step.to for step in steps if step.type == "si"), "")
        if into:
            self._traced = max(self._traced, number)
            if self._dropped is not None and self._dropped[0] <= number:
                self._dropped = None
            if self.on_inbox is not None:
                on_inbox, self.on_inbox = self.on_inbox, None
                on_inbox(into)
        elif number > self._traced and self._dropped is None:  # another server may still report the step
            self._dropped = (number, time.monotonic())

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
