"""The registered workers: the ``workers`` bucket as a live table. Each lease is timed by this process's clock."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec
import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, read
from penstock.infra.bus.log_tail import LogTail
from penstock.schemas import fleet

log = structlog.get_logger("fleet")

PAUSE_S = 1.0
EXPIRED = "lease expired"  # why a worker left, if it did not remove its key
STALE_NS = int((fleet.LEASE_S + 2.0) * 1e9)  # an older key is not a registration


class RegisteredWorker(msgspec.Struct):
    registration: fleet.Registration
    revision: int  # of the key, for removing it
    renewed_at: float  # monotonic
    joined_at: float = 0.0  # monotonic; when it was first read


class WorkerRegistry:
    """The table, and callbacks for its changes; ``async with`` starts and stops it.

    Guarantees: a worker that renews its lease is in ``members`` once ``start`` has returned. One that does not is
    removed after ``LEASE_S``, by the first ``expire`` while connected. This process's clock decides, not the bucket's
    expiry marker, which comes up to 0.3 s late and not at all while the broker restarts. After a reconnect all leases
    start again: until then, silence meant nothing.

    A server that was killed can bring back keys that had expired, and then never removes them (seen on 2.15.1). Keys
    that are too old when the table is read stay apart in ``stale_keys`` (worker → revision) until they are renewed.

    Args:
        joined: a worker registered, or changed more than its load.
        left: its key was removed or expired; the reason.
        renewed: its lease was renewed, and at most the load changed: 1,300 times a second with 1,000 workers.
    """

    def __init__(
        self,
        bus: Bus,
        joined: Callable[[RegisteredWorker], None] = lambda member: None,
        left: Callable[[RegisteredWorker, str], None] = lambda member, reason: None,
        renewed: Callable[[RegisteredWorker], None] = lambda member: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        bucket = bus.subjects.bucket("workers")
        self._stream, self._subject = f"KV_{bucket}", f"$KV.{bucket}.>"
        self._tail = LogTail(bus, self._stream, self._subject, bus.subjects.live(self._subject), self._on_entry)
        self._bus = bus
        self._joined = joined
        self._left = left
        self._renewed = renewed
        self._clock = clock
        self._checked = self._stale_since = clock()
        self._links = self._checked_links = bus.reconnects
        self._reading_ns = 0  # Unix time at which reading of the table began; 0: it is complete
        self.members: dict[str, RegisteredWorker] = {}
        self.stale_keys: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Read the table, then follow it.

        Raises:
            ServingError: the bucket cannot be read.
        """
        self._reading_ns = self._bus.clock.now_ns()
        try:
            await self._tail.start()
        finally:
            self._reading_ns = 0
        if self.stale_keys:
            log.warning("stale_registrations_ignored", workers=sorted(self.stale_keys))
        self._checked = self._stale_since = self._clock()

    async def find_stale_keys(self) -> None:
        """Read the table once more if the link broke since the last time: a broker may have brought keys back.

        Call it a few times a second. It reads two leases after a reconnect, when every live worker has renewed.

        Raises:
            ServingError: the bucket cannot be read; it will be tried again.
        """
        if self._checked_links == self._links or self._clock() - self._stale_since < 2 * fleet.LEASE_S:
            return
        links, misses = self._links, dict[str, int]()
        async for entry in read(self._bus, self._stream, self._subject):
            worker = entry.subject.rpartition(".")[2]
            if entry.data and "KV-Operation" not in entry.headers and worker not in self.members:
                misses[worker] = entry.seq
        self._checked_links = links
        if misses:
            self._stale_since = self._clock()
            self.stale_keys = misses

    def take_stale_keys(self) -> dict[str, int]:
        """Keys (worker → revision) that can be removed: too old when the table was read, and not renewed since.

        They had two leases of time to be renewed: clocks of machines differ, so age alone proves nothing.
        """
        if not self.stale_keys or self._clock() - self._stale_since < 2 * fleet.LEASE_S or not self._bus.connected:
            return {}
        stale, self.stale_keys = self.stale_keys, {}
        return stale

    async def stop(self) -> None:
        await self._tail.stop()

    def expire(self) -> None:
        """Remove workers whose lease has passed. Call it a few times a second.

        If it was not called for a while (disconnected, or this process was stopped), all leases start again: their
        renewals may be waiting to be read.
        """
        if not self._bus.connected:
            return
        now = self._clock()
        paused, self._checked = now - self._checked > PAUSE_S, now
        if paused or self._links != self._bus.reconnects:
            self._links = self._bus.reconnects
            self._stale_since = now
            for member in self.members.values():
                member.renewed_at = now
            return
        limit = now - fleet.LEASE_S
        for member in [m for m in self.members.values() if m.renewed_at < limit]:
            self.remove(member.registration.worker, EXPIRED)

    def remove(self, worker: str, reason: str) -> None:
        """Remove a worker from the table."""
        member = self.members.pop(worker, None)
        if member is not None:
            self._left(member, reason)

    def _on_entry(self, entry: Entry) -> None:
        worker = entry.subject.rpartition(".")[2]
        self.stale_keys.pop(worker, None)
        if "KV-Operation" in entry.headers or "Nats-Marker-Reason" in entry.headers or not entry.data:
            self.remove(worker, "unregistered" if entry.headers.get("KV-Operation") else EXPIRED)
            return
        try:
            registration = fleet.decode(entry.data)
        except msgspec.MsgspecError as error:
            log.warning("registration_unreadable", worker=worker, error=str(error))
            return
        member = self.members.get(worker)
        if member is not None and fleet.same_but_load(member.registration, registration):
            member.registration, member.revision, member.renewed_at = registration, entry.seq, self._clock()
            self._renewed(member)
            return
        if self._reading_ns and entry.time_ns < self._reading_ns - STALE_NS:
            self.stale_keys[worker] = entry.seq  # a live worker renews it within a second
            return
        now, joined_at = self._clock(), member.joined_at if member is not None else self._clock()
        member = self.members[worker] = RegisteredWorker(registration, entry.seq, now, joined_at)
        self._joined(member)
