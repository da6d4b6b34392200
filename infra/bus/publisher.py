"""Publishing with acknowledgement: many messages at once over one inbox, each resent until it is stored.

Every message carries a ``Nats-Msg-Id``, so resending is safe within the stream's duplicate window. A message that is
tried for longer needs a subject of its own: with ``once`` the stream refuses any second message on it.
nats-py's acknowledged publish costs a future, a timer and a task per message. This is the same protocol with one sweep
for all messages.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.client import Frame
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.jetstream import BUSY, FINAL, WRONG_LAST_SEQUENCE, decode_publish_reply
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import HEADER_LAST_ON_SUBJECT, HEADER_MSG_ID

log = structlog.get_logger("bus")

RESEND_S = 1.0
SWEEP_S = 0.25


class Ack(msgspec.Struct, frozen=True):
    """Stored at ``seq``. ``duplicate``: it was stored before, perhaps at an unknown sequence (0)."""

    seq: int
    duplicate: bool = False


class Refused(ServingError):
    """The broker does not store the message. Without this error, one that was not confirmed may be stored."""


class _Pending:
    __slots__ = ("deadline", "future", "gate", "headers", "insist", "once", "payload", "refusal", "sent", "subject")

    def __init__(
        self, subject: str, payload: bytes, headers: dict[str, str], future: "asyncio.Future[Ack]", deadline: float
    ) -> None:
        self.subject = subject
        self.payload = payload
        self.headers = headers
        self.future = future
        self.deadline = deadline
        self.sent = time.monotonic()
        self.once = False
        self.insist = True
        self.gate: Callable[[], bool] | None = None
        self.refusal = ""  # the latest one; "": it was not refused


class Publisher:
    """Acknowledged publishes of one connection.

    Guarantees: a future that succeeds means that the stream holds the message, once. A future that fails with
    ``broker_unavailable`` leaves open whether it does. Futures never wait longer than their ``timeout`` and a sweep.
    Messages of different subjects may be stored in another order than they were sent in.

    Use it as a context manager: leaving it fails the futures that still wait with ``shutting_down``.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._inbox = bus.nc.new_inbox()
        self._next = 0
        self._pending: dict[str, _Pending] = {}
        self._tasks = bus.tasks.group("publish")
        self._sub: Any = None
        self._closed = False

    async def __aenter__(self) -> "Publisher":
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        self._sub = await self._bus.nc.subscribe_direct(self._inbox + ".*", self._on_reply)
        self._bus.on_reconnect.append(self._resend_all)
        self._tasks.spawn(self._sweep(), name="publish-sweep")

    async def close(self) -> None:
        await self._tasks.aclose()
        self._closed = True
        if self._resend_all in self._bus.on_reconnect:
            self._bus.on_reconnect.remove(self._resend_all)
        if self._sub is not None and not self._bus.nc.is_closed:
            await self._sub.unsubscribe()
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(ServingError(Code.shutting_down, "the process is stopping"))
                pending.future.exception()  # retrieved here: the waiter may have been cancelled
        self._pending.clear()

    @property
    def waiting(self) -> int:
        """Messages that are not acknowledged yet."""
        return len(self._pending)

    async def send(
        self,
        subject: str,
        payload: bytes,
        msg_id: str,
        *,
        headers: dict[str, str] | None = None,
        timeout: float = 30.0,
        once: bool = False,
        insist: bool = True,
        gate: Callable[[], bool] | None = None,
    ) -> "asyncio.Future[Ack]":
        """Send one message; the returned future is its acknowledgement.

        The future fails with ServingError (broker_unavailable) if the message is not stored within ``timeout`` seconds,
        or refused for good. Cancel the future to stop resending.

        Args:
            once: the stream stores only the first message of this subject. An earlier one counts as stored.
            insist: wait out a refusal that may pass (full disk, limits) until ``timeout`` is over.
            gate: called before each transmission; the message waits while it returns False.
        Raises:
            ServingError: body_too_large, before anything is sent; shutting_down: the publisher is closed.
        """
        if self._closed:
            raise ServingError(Code.shutting_down, "the process is stopping")
        if len(payload) > self._bus.max_message:
            raise ServingError(
                Code.body_too_large,
                f"message of {len(payload)} bytes; the broker takes {self._bus.max_message} (max_payload)",
            )
        token = str(self._next)
        self._next += 1
        all_headers = {HEADER_MSG_ID: msg_id}
        if once:
            all_headers[HEADER_LAST_ON_SUBJECT] = "0"
        if headers:
            all_headers.update(headers)
        future: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()
        pending = _Pending(subject, payload, all_headers, future, time.monotonic() + timeout)
        pending.once, pending.insist, pending.gate = once, insist, gate
        self._pending[token] = pending
        if gate is None and self._bus.nc.post(subject, payload, f"{self._inbox}.{token}", all_headers):
            return future
        try:
            await self._transmit(token, pending)
        except asyncio.CancelledError:
            self._pending.pop(token, None)
            raise
        return future

    async def publish(
        self,
        subject: str,
        payload: bytes,
        msg_id: str,
        *,
        headers: dict[str, str] | None = None,
        timeout: float = 30.0,
        once: bool = False,
        insist: bool = True,
        gate: Callable[[], bool] | None = None,
    ) -> Ack:
        """Send and wait for the acknowledgement. Arguments and errors as for ``send``."""
        return await (
            await self.send(
                subject, payload, msg_id, headers=headers, timeout=timeout, once=once, insist=insist, gate=gate
            )
        )

    async def _transmit(self, token: str, pending: _Pending) -> None:
        if pending.future.done():
            return
        if pending.gate is not None and not pending.gate():
            pending.sent = 0.0  # the next sweep calls the gate again
            return
        pending.sent = time.monotonic()
        # While disconnected, leave it to the sweep: nats-py's own buffer would fill up and raise.
        if not self._bus.connected:
            return
        nc, reply = self._bus.nc, f"{self._inbox}.{token}"
        try:
            if not nc.post(pending.subject, pending.payload, reply, pending.headers):
                await nc.publish(pending.subject, pending.payload, reply, pending.headers)
        except (NatsError, OSError) as error:  # the link broke just now
            log.debug("publish_failed", subject=pending.subject, error=repr(error))

    def _on_reply(self, message: Frame) -> None:
        token = message.subject.rpartition(b".")[2].decode()
        pending = self._pending.get(token)
        if pending is None:
            return
        if not message.data:
            return  # 503: no stream listens (yet, after a restart); the sweep resends it
        reply = decode_publish_reply(message.data)
        error = reply.error
        if error is not None and error.err_code not in FINAL and (pending.insist or error.err_code in BUSY):
            if not pending.refusal and error.err_code not in BUSY:
                log.warning("publish_refused", subject=pending.subject, error=error.description, code=error.err_code)
            pending.refusal = str(error)
            return  # the sweep resends it
        del self._pending[token]
        if pending.future.done():
            return
        if error is None:
            pending.future.set_result(Ack(reply.seq, reply.duplicate))
        elif pending.once and error.err_code == WRONG_LAST_SEQUENCE:
            pending.future.set_result(Ack(0, True))
        else:
            pending.future.set_exception(_refused(pending.subject, str(error)))

    async def _resend_all(self) -> None:
        for token, pending in list(self._pending.items()):
            await self._transmit(token, pending)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            for token, pending in list(self._pending.items()):
                try:
                    await self._look(token, pending, now)
                except Exception as error:  # one message's failure must not stop the sweep of the others
                    log.exception("publish_failed", subject=pending.subject)
                    self._pending.pop(token, None)
                    if not pending.future.done():
                        pending.future.set_exception(error)

    async def _look(self, token: str, pending: _Pending, now: float) -> None:
        if pending.future.done():
            self._pending.pop(token, None)
        elif now > pending.deadline:
            self._pending.pop(token, None)
            pending.future.set_exception(_late(pending))
        elif now - pending.sent > RESEND_S:
            await self._transmit(token, pending)


def _refused(subject: str, reason: str) -> Refused:
    return Refused(
        Code.broker_unavailable,
        f"the stream of {subject} refused the message: {reason}; check its limits and the free disk space",
        retry_after=1.0,
    )


def _late(pending: _Pending) -> ServingError:
    if pending.refusal:
        return _refused(pending.subject, pending.refusal)
    return ServingError(
        Code.broker_unavailable,
        f"the broker did not confirm {pending.subject} in time; check that it runs, has its streams "
        "('penstock streams apply') and room on its disk",
        retry_after=1.0,
    )
