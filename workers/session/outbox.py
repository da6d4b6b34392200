"""Publishes output that must not be lost but is too much to be acknowledged one by one: tokens and KV events.

Messages are published without waiting, with a message id, and kept for a few seconds. After a reconnect everything kept
is sent again in order; the stream stores each message once. While the worker is disconnected or its lease is in doubt,
messages are only kept. A renewed lease on the same link proves that the server has read what was sent before it, so
then the oldest messages may be dropped. It proves nothing in a cluster, where the stream's leader may be on another
node, nor where the server syncs its disk before it acknowledges: there each message waits for its own acknowledgement.
What is nowhere else, the output of requests with ``no_store``, is stored there before its terminal event is.

Published messages that their stream has not acknowledged yet, sent again until it has. For clusters and slow disks.

In a cluster the link to a server says nothing about the stream: its leader may be on another node, and what arrives
during an election (4 to 9 s) is lost silently. So each message asks for an acknowledgement and is kept until it comes.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.jetstream import decode_publish_reply
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import HEADER_MSG_ID

RESEND_S = 0.5


class SentMessage(Protocol):
    number: int
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

    @property
    def oldest(self) -> int | None:
        """The number of the oldest message that is not acknowledged; None: all are."""
        return next(iter(self._waiting.values())).number if self._waiting else None

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


KEEP_S = 5.0
LIMIT_BYTES = 64 << 20


class _Message(msgspec.Struct):
    number: int  # in the order of ``send``
    sent: float  # monotonic; of the last time
    subject: str
    payload: bytes
    msg_id: str


class Outbox:
    """``send`` waits while more than ``LIMIT_BYTES`` are unsent, and then the engine waits too.

    Args:
        acknowledged: wait for the streams' acknowledgements on a single server too.
    """

    def __init__(
        self,
        bus: Bus,
        trusted: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        *,
        acknowledged: bool = False,
    ) -> None:
        self._bus = bus
        self._trusted = trusted
        self._clock = clock
        self._kept: deque[_Message] = deque()
        self._behind = False  # from the first unsent message to the end of a resend
        self._link = bus.reconnects
        self._unsent_bytes = 0
        self._unconfirmed = Unconfirmed(bus, self._on_confirmed)
        self._acknowledged = acknowledged
        self._sent = 0  # messages
        self._awaited: deque[tuple[int, asyncio.Future[None]]] = deque()  # all messages below this number are stored
        self._below_limit = asyncio.Event()
        self._below_limit.set()

    @property
    def unsent_bytes(self) -> int:
        return self._unsent_bytes

    def open(self) -> bool:
        """Whether nothing is unsent, so that the server reads what is published now behind everything before it."""
        # On a new link, what the old one lost is sent first.
        bus = self._bus
        return not self._behind and bus.connected and self._link == bus.reconnects and self._trusted()

    async def send(self, subject: str, payload: bytes, msg_id: str) -> None:
        """Publish, or keep until ``resend``.

        Raises:
            ServingError: body_too_large; no broker limit would ever let it through.
        """
        if len(payload) > self._bus.max_message:
            raise ServingError(Code.body_too_large, f"{len(payload)} bytes for {subject} do not fit into one message")
        now = self._clock()
        message = _Message(self._sent, now, subject, payload, msg_id)
        self._sent += 1
        if not self.open():
            self._behind = True
            self._kept.append(message)
            self._unsent_bytes += len(payload)
            if self._unsent_bytes > LIMIT_BYTES:
                self._below_limit.clear()
                await self._below_limit.wait()
            return
        if self._confirms:
            await self._unconfirmed.publish(message)
            if self._unconfirmed.bytes > LIMIT_BYTES:
                self._below_limit.clear()
                await self._below_limit.wait()
            return
        kept = self._kept
        while kept and kept[0].sent < now - KEEP_S:
            kept.popleft()
        kept.append(message)
        await self._publish(message)

    @property
    def _confirms(self) -> bool:
        return self._acknowledged or self._bus.clustered

    async def stored(self, within_s: float) -> bool:
        """Wait until everything sent so far is acknowledged, where messages are; False: it was not in time."""
        if not self._confirms or self._oldest >= self._sent:
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._awaited.append((self._sent, future))
        await asyncio.wait([future], timeout=within_s)
        future.cancel()
        return not future.cancelled()

    @property
    def _oldest(self) -> int:
        """The number of the oldest message that is not acknowledged, or of the next one."""
        oldest = self._unconfirmed.oldest
        if oldest is None:
            oldest = self._kept[0].number if self._kept else self._sent
        return oldest

    async def resend(self) -> None:
        """The lease is trusted again: send everything kept, in order, also what is added meanwhile.

        Raises:
            nats.errors.Error: the link broke again; call this on the next one.
        """
        self._behind = True
        self._link = self._bus.reconnects
        if self._confirms:
            await self._resend_unconfirmed()
        index = 0
        while index < len(self._kept):
            message = self._kept[index]
            message.sent = self._clock()
            await self._publish(message)
            index += 1
        self._behind = False
        self._unsent_bytes = 0
        self._below_limit.set()

    async def confirm(self) -> None:
        """Several times a second: send again what a cluster has not acknowledged.

        Raises:
            nats.errors.Error: the link broke; ``resend`` follows on the next one.
        """
        if self._unconfirmed and self.open():
            await self._unconfirmed.again(self._clock())

    async def _resend_unconfirmed(self) -> None:
        await self._unconfirmed.again(self._clock(), after_s=0.0)
        while self._kept:
            message = self._kept.popleft()
            message.sent = self._clock()
            await self._unconfirmed.publish(message)

    def _on_confirmed(self) -> None:
        while self._awaited and self._awaited[0][0] <= self._oldest:
            _, future = self._awaited.popleft()
            if not future.done():
                future.set_result(None)
        if not self._behind and self._unconfirmed.bytes <= LIMIT_BYTES:
            self._below_limit.set()

    async def _publish(self, message: _Message) -> None:
        await self._bus.nc.publish(message.subject, message.payload, headers={HEADER_MSG_ID: message.msg_id})

    def clear(self) -> None:
        """The lease is lost: drop everything that is kept."""
        self._kept.clear()
        self._unconfirmed.clear()
        self._awaited.clear()  # whoever waits is cancelled, or goes on in the end
        self._unsent_bytes = 0
        self._below_limit.set()
