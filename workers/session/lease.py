"""A worker's registration under a lease, renewed by compare-and-set so that its owner notices when it is lost.

A router that declares a worker dead removes its key, and the server removes a key that expires. The owner's next
renewal then fails, and until a renewal is known to have succeeded the owner publishes nothing. This fences off a
process that was stalled and resumes: it cannot publish for requests that others have taken over.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last
from penstock.infra.bus.jetstream import WRONG_LAST_SEQUENCE, PublishReply, decode_publish_reply
from penstock.schemas import fleet, wire
from penstock.schemas.errors import Code, ServingError

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
        self._revision = 0
        self._renewed = 0.0
        self._in_doubt = False
        self._task: asyncio.Task[None] | None = None
        self._renewal = asyncio.Lock()
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
        async with self._renewal:  # a renewal under way ends first, since it moves the revision
            owned, self.gone = not self.gone, True
        await self._stop()
        with contextlib.suppress(NatsError, TimeoutError, _Lost):
            for _ in range(RELEASE_ATTEMPTS if owned else 0):
                reply = await self._request(b"", fleet.removal_headers(self._revision))
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
        async with self._renewal:
            if self.gone:
                return False
            try:
                if not await self._write(expected=self._revision):
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
        self._revision = reply.seq
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
        self._revision = entry.seq
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
