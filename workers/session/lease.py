"""A worker's lease, and the output that it publishes only while it holds that.

The registration is renewed by compare-and-set, so that its owner notices when it is lost. A router that declares a
worker dead removes its key, and the server removes a key that expires. The owner's next renewal then fails, and until a
renewal is known to have succeeded the owner publishes nothing. This fences off a process that was stalled and resumes:
it cannot publish for requests that others have taken over.

``Outbox`` is for output that must not be lost but is too much to be acknowledged one by one: tokens and KV events.
Messages are published without waiting, with a message id, and kept for a few seconds. After a reconnect everything kept
is sent again in order; the stream stores each message once. While the worker is disconnected or its lease is in doubt,
messages are only kept. A renewed lease on the same link proves that the server has read what was sent before it, so
then the oldest messages may be dropped.

It proves nothing in a cluster, where the stream's leader may be on another node, and what arrives during an election (4
to 9 s) is lost silently; nor where the server syncs its disk before it acknowledges. There each message asks for an
acknowledgement and is kept until it comes (``Unconfirmed``). What is nowhere else, the output of requests with
``no_store``, is stored there before its terminal event is.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last
from penstock.infra.bus.jetstream import WRONG_LAST_SEQUENCE, PublishReply, decode_publish_reply
from penstock.schemas import fleet, wire
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import HEADER_MSG_ID

log = structlog.get_logger("lease")

TRUST_S = fleet.LEASE_S * 0.7
ACQUIRE_S = 20.0
RETRY_S = 0.1
RELEASE_ATTEMPTS = 3


class Lease:
    """One key in the ``workers`` bucket.

    Args:
        describe: returns the registration to publish; called for each renewal.
        on_lost: called once when the key turned out to be removed or taken over.
        on_regained: called when a renewal succeeded after the lease was in doubt.
    Attributes:
        revision: of the key, which each renewal moves on.
        gone: the key is removed, taken over, or left alone.
    """

    def __init__(
        self,
        bus: Bus,
        worker: str,
        describe: Callable[[], fleet.Registration],
        on_lost: Callable[[], None],
        on_regained: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._subject = bus.subjects.lease(worker)
        self._stream = f"KV_{bus.subjects.bucket('workers')}"
        self._describe = describe
        self._on_lost = on_lost
        self._on_regained = on_regained
        self._clock = clock
        self.revision = 0
        self._renewed = 0.0
        self._in_doubt = False
        self._task: asyncio.Task[None] | None = None
        self.renewal = asyncio.Lock()
        self.gone = False

    def trusted(self) -> bool:
        """Whether this worker may publish. False starts a check, which ends with ``on_regained`` or ``on_lost``."""
        if self.gone:
            return False
        if not self._in_doubt and self._clock() - self._renewed > TRUST_S:
            self._in_doubt = True
        return not self._in_doubt

    async def acquire(self) -> None:
        """Register.

        Raises:
            ServingError: the broker did not store the registration.
        """
        deadline = self._clock() + ACQUIRE_S
        while self._clock() < deadline:
            if await self._write(expected=None):
                self._task = self._bus.tasks.spawn(self._keep_renewed(), name="lease")
                self._bus.on_reconnect.insert(0, self.confirm)
                return
            await asyncio.sleep(RETRY_S)
        raise ServingError(
            Code.broker_unavailable,
            f"the registration could not be stored under {self._subject}; run 'penstock streams apply' and check "
            "the user's permissions",
        )

    async def confirm(self) -> None:
        """Renew now; also called after a reconnect."""
        self._in_doubt = True
        await self._renew()

    async def update(self) -> None:
        """Publish a changed registration at once."""
        await self._renew()

    async def release(self) -> None:
        """Remove the key, unless it is no longer this worker's."""
        async with self.renewal:  # a renewal under way ends first, since it moves the revision
            owned, self.gone = not self.gone, True
        await self._stop()
        with contextlib.suppress(NatsError, TimeoutError, _Lost):
            for _ in range(RELEASE_ATTEMPTS if owned else 0):
                reply = await self._request(b"", fleet.removal_headers(self.revision))
                if reply.error is None or reply.error.err_code != WRONG_LAST_SEQUENCE:
                    return
                await self._read_revision()

    async def stop(self) -> None:
        """Stop renewing and leave the key."""
        self.gone = True
        await self._stop()

    async def _stop(self) -> None:
        if self.confirm in self._bus.on_reconnect:
            self._bus.on_reconnect.remove(self.confirm)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _keep_renewed(self) -> None:
        renewed = True
        while not self.gone:
            # In doubt: retry often, tokens are waiting.
            await asyncio.sleep(fleet.RENEW_S if renewed and not self._in_doubt else RETRY_S)
            if not self._bus.connected:
                continue
            try:
                renewed = await self._renew()
            except Exception as error:  # else the lease would no longer be renewed
                renewed = False
                log.warning("lease_renewal_failed", error=repr(error))

    async def _renew(self) -> bool:
        async with self.renewal:
            if self.gone:
                return False
            try:
                if not await self._write(expected=self.revision):
                    return False
            except _Lost:
                self.gone = True
                log.warning("lease_lost", subject=self._subject)
                self._on_lost()
                return False
            if self._in_doubt:
                self._in_doubt = False
                try:
                    await self._on_regained()
                except BaseException:
                    self._in_doubt = True
                    raise
            return True

    async def _write(self, expected: int | None) -> bool:
        """Store the registration; False: no answer, retry. Raises _Lost."""
        headers = {"Nats-TTL": str(int(fleet.LEASE_S))}
        if expected is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(expected)
        began = self._clock()
        try:
            reply = await self._request(wire.encode(self._describe()), headers)
        except (NatsError, TimeoutError) as error:
            log.debug("lease_renewal_timeout", error=repr(error))
            return False
        if reply.error is not None:
            if reply.error.err_code == WRONG_LAST_SEQUENCE:
                await self._read_revision()
                return False  # the next attempt renews on the right revision
            log.warning("lease_renewal_rejected", error=reply.error.description)
            return False
        self.revision = reply.seq
        self._renewed = began
        return True

    async def _read_revision(self) -> bool:
        """A renewal whose answer was lost moved the revision: read it, if the key is still this worker's.

        False: no answer. Raises _Lost.
        """
        try:
            entry = await get_last(self._bus, self._stream, self._subject, newest=True, within_s=1.0)
        except ServingError:
            return False
        if entry is None:  # even the removal marker has expired
            raise _Lost
        operation = entry.headers.get("KV-Operation") or entry.headers.get("Nats-Marker-Reason")
        if operation or not entry.data or not self._ours(entry.data):
            raise _Lost
        self.revision = entry.seq
        return True

    def _ours(self, stored: bytes) -> bool:
        try:
            return fleet.decode(stored).epoch == self._describe().epoch
        except msgspec.MsgspecError:
            return False

    async def _request(self, payload: bytes, headers: dict[str, str]) -> PublishReply:
        message = await self._bus.nc.request(self._subject, payload, timeout=1.0, headers=headers)
        return decode_publish_reply(message.data)


class _Lost(Exception):
    """The key was removed or overwritten: this worker was declared dead."""


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
            message.subject, message.payload, reply=f"{self._inbox}.{number}", headers={HEADER_MSG_ID: message.msg_id}
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
        """Whether nothing is unsent, so that the server reads what is published now after everything before it."""
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
        self._awaited.clear()  # waiting tasks are cancelled, or continue in the end
        self._unsent_bytes = 0
        self._below_limit.set()
