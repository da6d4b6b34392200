"""Who is registered: the ``workers`` bucket as a live table, with each lease timed by this process's clock."""

import time
from collections.abc import Callable

import msgspec
import structlog

from infra.bus.connection import Bus
from infra.bus.direct_get import Entry, read
from infra.bus.log_tail import LogTail
from schemas import fleet

log = structlog.get_logger("fleet")

PAUSE_S = 1.0
GHOST_NS = int((fleet.LEASE_S + 2.0) * 1e9)  # a key that was not renewed for so long is nobody's registration


class RegisteredWorker(msgspec.Struct):
    registration: fleet.Registration
    revision: int  # of the key, for removing it
    heard: float  # monotonic


class FleetWatch:
    """``joined`` and ``left`` are called as keys come, change and go, ``renewed`` when a lease was renewed and nothing
    but the load may have changed: of 1,000 workers that is 1,300 times a second. Expiry is noticed by ``expire``.

    A bucket's own expiry marker comes up to 0.3 s late and not while the broker restarts; the local clock is
    the judge, and it starts anew after a reconnect, when silence says nothing about the workers.

    A server that was killed can bring back keys that had expired, and then never removes them (seen on 2.15.1). Keys
    that are too old when the table is read are kept apart in ``ghosts`` (worker -> revision) until they are renewed.
    """

    def __init__(
        self,
        bus: Bus,
        joined: Callable[[RegisteredWorker], None] = lambda member: None,
        left: Callable[[RegisteredWorker, str], None] = lambda member, why: None,
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
        self._checked = self._ghosts_since = clock()
        self._links = self._looked = bus.reconnects
        self._reading_ns = 0  # Unix time at which the table began to be read; 0: it was read
        self.members: dict[str, RegisteredWorker] = {}
        self.ghosts: dict[str, int] = {}

    async def start(self) -> None:
        """Read the table, then follow it.

        Raises:
            ServingError: the bucket cannot be read.
        """
        self._reading_ns = time.time_ns()
        try:
            await self._tail.start()
        finally:
            self._reading_ns = 0
        if self.ghosts:
            log.warning("stale_registrations_ignored", workers=sorted(self.ghosts))
        self._checked = self._ghosts_since = self._clock()

    async def look_for_ghosts(self) -> None:
        """Read the table once more, if the link broke since the last time: a broker may have brought keys back.

        Call it a few times a second; it does something two leases after a reconnect, when all who live have renewed.

        Raises:
            ServingError: the bucket cannot be read; it will be tried again.
        """
        if self._looked == self._links or self._clock() - self._ghosts_since < 2 * fleet.LEASE_S:
            return
        links, found = self._links, dict[str, int]()
        async for entry in read(self._bus, self._stream, self._subject):
            worker = entry.subject.rpartition(".")[2]
            if entry.data and "KV-Operation" not in entry.headers and worker not in self.members:
                found[worker] = entry.seq
        self._looked = links
        if found:
            self._ghosts_since = self._clock()
            self.ghosts = found

    def take_ghosts(self) -> dict[str, int]:
        """Keys (worker -> revision) that can be removed: too old when the table was read, and not renewed since.

        They get two leases for it: clocks of machines may differ, so age alone proves nothing.
        """
        if not self.ghosts or self._clock() - self._ghosts_since < 2 * fleet.LEASE_S or not self._bus.connected:
            return {}
        ghosts, self.ghosts = self.ghosts, {}
        return ghosts

    async def stop(self) -> None:
        await self._tail.stop()

    def expire(self) -> None:
        """Drop members whose lease has passed; call it a few times a second.

        If that was not possible for a while (disconnected, or this process slept), all leases start anew: their
        renewals may be waiting to be read.
        """
        if not self._bus.connected:
            return
        now = self._clock()
        paused, self._checked = now - self._checked > PAUSE_S, now
        if paused or self._links != self._bus.reconnects:
            self._links = self._bus.reconnects
            self._ghosts_since = now
            for member in self.members.values():
                member.heard = now
            return
        limit = now - fleet.LEASE_S
        for member in [m for m in self.members.values() if m.heard < limit]:
            self.drop(member.registration.worker, "lease expired")

    def drop(self, worker: str, why: str) -> None:
        """Treat a member as gone."""
        member = self.members.pop(worker, None)
        if member is not None:
            self._left(member, why)

    def _on_entry(self, entry: Entry) -> None:
        worker = entry.subject.rpartition(".")[2]
        self.ghosts.pop(worker, None)
        if "KV-Operation" in entry.headers or "Nats-Marker-Reason" in entry.headers or not entry.data:
            self.drop(worker, "unregistered" if entry.headers.get("KV-Operation") else "lease expired")
            return
        try:
            registration = fleet.decode(entry.data)
        except msgspec.MsgspecError as error:
            log.warning("registration_unreadable", worker=worker, error=str(error))
            return
        member = self.members.get(worker)
        if member is not None and fleet.same_but_load(member.registration, registration):
            member.registration, member.revision, member.heard = registration, entry.seq, self._clock()
            self._renewed(member)
            return
        if self._reading_ns and entry.time_ns < self._reading_ns - GHOST_NS:
            self.ghosts[worker] = entry.seq  # if it lives after all, its next renewal is less than a second away
            return
        member = self.members[worker] = RegisteredWorker(registration, entry.seq, self._clock())
        self._joined(member)
