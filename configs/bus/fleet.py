"""Who is registered: the ``workers`` bucket as a live table, with each lease timed by this process's clock."""

import time
from collections.abc import Callable

import msgspec
import structlog

from configs.bus.connection import Bus
from configs.bus.log import LogTail
from configs.bus.read import Entry
from schemas import fleet

log = structlog.get_logger("fleet")

PAUSE_S = 1.0


class Member(msgspec.Struct):
    registration: fleet.Registration
    revision: int  # of the key, for removing it
    heard: float  # monotonic


class FleetWatch:
    """``joined`` and ``left`` are called as keys come, change and go. Expiry is noticed by ``expire``.

    A bucket's own expiry marker comes up to 0.3 s late and not while the broker restarts; the local clock is
    the judge, and it starts anew after a reconnect, when silence says nothing about the workers.
    """

    def __init__(
        self,
        bus: Bus,
        joined: Callable[[Member], None] = lambda member: None,
        left: Callable[[Member, str], None] = lambda member, why: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        bucket = bus.subjects.bucket("workers")
        subject = f"$KV.{bucket}.>"
        self._tail = LogTail(bus, f"KV_{bucket}", subject, bus.subjects.live(subject), self._on_entry)
        self._bus = bus
        self._joined = joined
        self._left = left
        self._clock = clock
        self._checked = clock()
        self._links = bus.reconnects
        self.members: dict[str, Member] = {}

    async def start(self) -> None:
        """Read the table, then follow it.

        Raises:
            ServingError: the bucket cannot be read.
        """
        await self._tail.start()
        self._checked = self._clock()

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
        if "KV-Operation" in entry.headers or "Nats-Marker-Reason" in entry.headers or not entry.data:
            self.drop(worker, "unregistered" if entry.headers.get("KV-Operation") else "lease expired")
            return
        try:
            registration = fleet.decode(entry.data)
        except msgspec.MsgspecError as error:
            log.warning("registration_unreadable", worker=worker, error=str(error))
            return
        member = self.members[worker] = Member(registration, entry.seq, self._clock())
        self._joined(member)
