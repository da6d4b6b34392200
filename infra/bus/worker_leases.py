"""The registered workers: the ``workers`` bucket as a live table. Each lease is timed by this process's clock.

They are read once with ``registrations``, routers with ``routers``: by the broker's clock.
"""

import re
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, read
from penstock.infra.bus.log_tail import LogTail
from penstock.schemas import fleet
from penstock.schemas.routers import Member
from penstock.schemas.routers import decode as decode_router

log = structlog.get_logger("fleet")

T = TypeVar("T")

PAUSE_S = 1.0
EXPIRED = "lease expired"  # why a worker left, if it did not remove its key
UNREGISTERED = "unregistered"  # if it did, or another that saw its process end
STALE_NS = int((fleet.LEASE_S + 2.0) * 1e9)  # an older key is not a registration
# A live worker renews its key within so long, also over an election for the bucket, which takes up to 9 s.
RENEWED_S = 15.0


class RegisteredWorker(msgspec.Struct):
    registration: fleet.Registration
    revision: int  # of the key, for removing it
    renewed_at: float  # monotonic
    joined_at: float = 0.0  # monotonic; when it was first read


async def registrations(bus: Bus) -> list[fleet.Registration]:
    """Workers with a live lease, in the order of ``by_name``, read once.

    One that cannot be read, of a later build, is left out.

    Raises:
        ServingError: the bucket cannot be read.
    """
    found = await _live(bus, "workers", fleet.decode)
    return sorted(found, key=lambda each: by_name(each.name, each.worker))


async def routers(bus: Bus) -> list[Member]:
    """Routers with a live lease, by id, likewise."""
    return sorted(await _live(bus, "routers", decode_router), key=lambda each: each.router)


async def _live(bus: Bus, bucket: str, decode: Callable[[bytes], T]) -> list[T]:
    await bus.clock.ask(bus.nc, bus.subjects.awaited)  # by this machine's, if it is ahead, all leases would be over
    name, now_ns, found = bus.subjects.bucket(bucket), bus.clock.now_ns(), []
    async for entry in read(bus, f"KV_{name}", f"$KV.{name}.>"):
        if entry.data and now_ns - entry.time_ns < STALE_NS:  # else the marker of a lease that ended
            try:
                found.append(decode(entry.data))
            except msgspec.MsgspecError as error:
                log.warning("lease_unreadable", lease=entry.subject, error=str(error))
    return found


def by_name(name: str, worker: str) -> tuple[list[tuple[str, int]], str]:
    """The key that sorts workers as people do: worker-2 before worker-10."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)], worker


class WorkerRegistry:
    """The table, and callbacks for its changes; ``async with`` starts and stops it.

    Guarantees: a worker that renews its lease is in ``members`` once ``start`` has returned. One that does not is
    removed after ``LEASE_S``, by the first ``expire`` while connected. This process's clock decides, not the bucket's
    expiry marker, which comes up to 0.3 s late and not at all while the broker restarts. After a reconnect all leases
    start again: until then, silence meant nothing.

    A server that was killed can bring back keys that had expired, and then never removes them (seen on 2.15.1; in a
    cluster, on this server only). Keys that are too old when the table is read stay apart in ``stale_keys`` until they
    are renewed.

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
        self._tail = LogTail.of_bucket(bus, "workers", self.on_entry)
        self._bus = bus
        self._joined = joined
        self._left = left
        self._renewed = renewed
        self._clock = clock
        self._checked = clock()
        self._links = bus.reconnects
        self._mark = (self._checked, 0)  # a position, and when it was noted
        self._renewed_behind = 0  # position after which every live worker has renewed its key; 0: not known yet
        self._reading_ns = 0  # Unix time at which reading of the table began; 0: it is complete
        self.members: dict[str, RegisteredWorker] = {}
        self.stale_keys: set[str] = set()

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
        self._checked = self._clock()
        self._mark = (self._checked, self._tail.position)

    def ended_before(self) -> int:
        """A sequence of the bucket's stream: older keys are of workers that ended. 0: not known yet.

        Clocks of machines differ, so the age of a key proves nothing. A worker has ended if its key was not renewed for
        ``RENEWED_S`` while this process ran and was connected.
        """
        if not self._renewed_behind:
            return 0
        revisions = (member.revision for member in self.members.values())
        return min(self._renewed_behind + 1, self._tail.position + 1, *revisions)

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
            self._mark, self._renewed_behind = (now, self._tail.position), 0
            for member in self.members.values():
                member.renewed_at = now
            return
        if now - self._mark[0] >= RENEWED_S:
            self._mark, self._renewed_behind = (now, self._tail.position), self._mark[1]
        limit = now - fleet.LEASE_S
        for member in [m for m in self.members.values() if m.renewed_at < limit]:
            self.remove(member.registration.worker, EXPIRED)

    def remove(self, worker: str, reason: str) -> None:
        """Remove a worker from the table."""
        member = self.members.pop(worker, None)
        if member is not None:
            self._left(member, reason)

    def on_entry(self, entry: Entry) -> None:
        worker = entry.subject.rpartition(".")[2]
        self.stale_keys.discard(worker)
        if "KV-Operation" in entry.headers or "Nats-Marker-Reason" in entry.headers or not entry.data:
            self.remove(worker, UNREGISTERED if entry.headers.get("KV-Operation") else EXPIRED)
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
            self.stale_keys.add(worker)  # a live worker renews it within a second
            return
        now, joined_at = self._clock(), member.joined_at if member is not None else self._clock()
        member = self.members[worker] = RegisteredWorker(registration, entry.seq, now, joined_at)
        self._joined(member)
