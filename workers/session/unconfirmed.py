"""Published messages that their stream has not acknowledged yet, sent again until it has. For clusters and slow disks.

In a cluster the link to a server says nothing about the stream: its leader may be on another node, and what arrives
during an election (4 to 9 s) is lost silently. So each message asks for an acknowledgement and is kept until it comes.
"""

from collections.abc import Callable
from typing import Any, Protocol

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.jetstream import decode_publish_reply
from penstock.schemas.subjects import HEADER_MSG_ID

RESEND_S = 0.5


class SentMessage(Protocol):
    sent: float
    subject: str
    payload: bytes
    msg_id: str


class Unconfirmed:
    """In order of first publish. ``confirmed`` is called when a message was acknowledged."""

    def __init__(self, bus: Bus, confirmed: Callable[[], None]) -> None:
        self._bus = bus
        self._confirmed = confirmed
        self._waiting: dict[int, SentMessage] = {}
        self._next_number = 0
        self._inbox = ""
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    async def publish(self, message: SentMessage) -> None:
        """
        Raises:
            nats.errors.Error: the link broke; ``again`` sends it on the next one.
        """
        if not self._inbox:
            self._inbox = self._bus.nc.new_inbox()
            await self._bus.nc.subscribe(f"{self._inbox}.*", cb=self._on_reply)
        number = self._next_number
        self._next_number += 1
        self._waiting[number] = message
        self.bytes += len(message.payload)
        await self._transmit(number, message)

    async def again(self, now: float, after_s: float = RESEND_S) -> None:
        """Send again, in order, what was last sent ``after_s`` seconds ago or earlier.

        Raises:
            nats.errors.Error: the link broke.
        """
        for number, message in list(self._waiting.items()):
            if message.sent <= now - after_s and number in self._waiting:
                message.sent = now
                await self._transmit(number, message)

    def clear(self) -> None:
        self._waiting.clear()
        self.bytes = 0

    async def _transmit(self, number: int, message: SentMessage) -> None:
        await self._bus.nc.publish(
            message.subject,
            message.payload,
            reply=f"{self._inbox}.{number}",
            headers={HEADER_MSG_ID: message.msg_id},
        )

    async def _on_reply(self, answer: Any) -> None:
        if not answer.data or decode_publish_reply(answer.data).error is not None:
            return  # no leader, or the disk is full: ``again`` sends it
        message = self._waiting.pop(int(answer.subject.rpartition(".")[2]), None)
        if message is not None:
            self.bytes -= len(message.payload)
            self._confirmed()
