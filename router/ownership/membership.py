"""The running routers, by a bucket of leases, and the models that each owns.

Only the owner of a model reads, holds and places its requests, so that they are ordered in one place; the other routers
of its cell stand by. Ownership improves decisions, but it is not a lock: two routers that both believe that they own a
model, or do not know of each other, are still correct, because message ids keep each attempt stored once. So routers of
earlier builds, which all place the requests of a busy owner, may run beside those of this one.

A lost router is noticed within milliseconds by the broker's event that its connection ended, or else ``LEASE_S`` after
its last renewal, by this process's clock. One that stops in order removes its key.

Who owns what is a pure function of the routers' registrations and the models that have workers (``assign``). All
routers compute it from the same bucket, so they agree without asking each other, a moment after every change.

The broker's own election, a pull consumer with ``priority_policy: pinned_client``, is per consumer and not per model,
refuses pulls without its group (status 400), and took 1.95 s after a kill (nats-server 2.15.1).
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.bus.tasks import Tasks
from penstock.router.state.lost_workers import BrokerConnection
from penstock.schemas import routers, wire
from penstock.schemas.errors import ServingError
from penstock.schemas.routers import HeldByModel, HeldByTenant, LostLeases, Member


def assign(models: Collection[str], members: Iterable[Member]) -> dict[str, str]:
    """The owner of each model.

    A router keeps the models that it owns, up to its share: the numbers of models of two routers differ by at most one.
    Where several claim a model, the earliest keeps it. Other models go to the routers that own fewest, earliest first.
    """
    by_age = _by_age(members)
    if not by_age:
        return {}
    share, larger_shares = divmod(len(models), len(by_age))
    owners: dict[str, str] = {}
    counts = {member.router: 0 for member in by_age}
    for member in by_age:
        for model in sorted(member.models):
            if model not in models or model in owners or counts[member.router] > share:
                continue
            if counts[member.router] == share:
                if not larger_shares:
                    continue
                larger_shares -= 1
            owners[model] = member.router
            counts[member.router] += 1
    for model in sorted(set(models) - set(owners)):
        router = min(counts, key=counts.__getitem__)
        owners[model] = router
        counts[router] += 1
    return owners


def default_owner(owners: dict[str, str], members: Iterable[Member]) -> str:
    """The owner of all models without workers: one that reads requests anyway; "": there is no router."""
    by_age = [member.router for member in _by_age(members)]
    busy = set(owners.values())
    return next((router for router in by_age if router in busy), by_age[0] if by_age else "")


def _by_age(members: Iterable[Member]) -> list[Member]:
    return sorted(members, key=lambda member: (member.since_ns, member.router))


log = structlog.get_logger("router")

TICK_S = 0.1
PAUSE_S = 0.5  # if leases were not checked for so long, renewals may be waiting to be read
STALE_NS = 600_000_000  # a key that was older when this router started belongs to a lost router
BROKEN_REMEMBERED = 256
STORE_S = 2.0
JOIN_S = 5.0  # between two tries to use the bucket

ROUNDS = 3
REST = ""  # stands for all models without workers


class _Seen(NamedTuple):
    member: Member
    renewed_at: float  # monotonic
    stored_ns: int


class Membership:
    """Call ``start``, and ``stop`` before anything that owned requests need.

    Args:
        router: its id, as a subject token.
        models: the names (as subject tokens) of models with workers: each name and alias, and the model's own name.
        held, queued: what this router holds, for operators and gateways.
        lost_leases: of workers, for operators.
        gained: called with False when this router owns more than before, with True when another one was lost while this
            one owns something: what that one had read is read again.
        lost: called when this router owns less.

    Attributes:
        own: the models that this router owns; ``REST`` is one.
        owners: the router of each model with workers, as this one sees it.
        others: the other routers, and when each was last seen.
        shared: the bucket exists; without it every router works for itself.
    """

    def __init__(
        self,
        bus: Bus,
        router: str,
        *,
        models: Callable[[], Mapping[str, str]],
        held: Callable[[], tuple[HeldByTenant, ...]],
        queued: Callable[[], HeldByModel],
        lost_leases: Callable[[], tuple[LostLeases, ...]],
        gained: Callable[[bool], None],
        lost: Callable[[], None],
    ) -> None:
        self._bus = bus
        self._id = router
        self._models = models
        self._held = held
        self._queued = queued
        self._lost_leases = lost_leases
        self._gained = gained
        self._lost = lost
        self._key = f"$KV.{bus.subjects.bucket('routers')}.{router}"
        self.tail = LogTail.of_bucket(bus, "routers", self._on_entry)
        self._since_ns = self._bus.clock.now_ns()
        self.others: dict[str, _Seen] = {}
        self._broken: dict[BrokerConnection, None] = {}
        self._names: Mapping[str, str] = {}
        self.owners: dict[str, str] = {}
        self.own: frozenset[str] = frozenset({REST})
        self._stored_ns = 0  # when the broker stored this router's key, by its clock
        self._renewed = self._checked = time.monotonic()
        self._links = bus.reconnects
        self._changed = False  # the models that this router owns, since the last renewal
        self._stopped = False
        self.shared = False

    # Queries

    @property
    def reads(self) -> bool:
        """Whether this router reads requests from the log."""
        return bool(self.own)

    @property
    def alone(self) -> bool:
        """Whether no other router runs, as far as the bucket shows."""
        return self.shared and not self.others

    def owner(self, name: str) -> str:
        """
        Args:
            name: of a model, as a subject token.
        """
        if not self.shared or not self.others:
            return self._id
        return self.owners.get(self._names.get(name, REST), self._id)

    def owns(self, name: str) -> bool:
        return self.owner(name) == self._id

    # The lease

    async def start(self, tasks: Tasks) -> None:
        if await self._join():
            tasks.spawn(self._keep(), name="membership")
        else:
            log.warning("routers_not_coordinated", action="run `penstock streams apply`")
            tasks.spawn(self._join_later(), name="membership")

    async def _join(self) -> bool:
        """Register and read the other registrations. False: the bucket cannot be used."""
        try:
            await self._store()
            await self.tail.start()
        except (ServingError, NatsError, TimeoutError) as error:
            log.info("routers_unknown", error=str(error))
            return False
        self.shared = True
        oldest = self._stored_ns - STALE_NS
        self.others = {name: seen for name, seen in self.others.items() if seen.stored_ns >= oldest}
        self.assign()
        self._bus.on_reconnect.append(self._renew)
        return True

    async def _join_later(self) -> None:
        while not await self._join():  # noqa: ASYNC110 - the far end is the operator
            await asyncio.sleep(JOIN_S)
        log.info("routers_coordinated")
        await self._keep()

    async def stop(self) -> None:
        """Remove the lease; the other routers take over at once."""
        self._stopped = True
        if not self.shared:
            return
        if self._renew in self._bus.on_reconnect:
            self._bus.on_reconnect.remove(self._renew)
        await self.tail.stop()
        if self._bus.connected:
            headers = {"KV-Operation": "PURGE", "Nats-Rollup": "sub", "Nats-TTL": "5"}
            await self._bus.nc.publish(self._key, b"", headers=headers)

    def link_broke(self, link: BrokerConnection) -> None:
        """Handle the end of a connection to the broker, which may be a router's."""
        if len(self._broken) >= BROKEN_REMEMBERED:
            del self._broken[next(iter(self._broken))]
        self._broken[link] = None  # a renewal that was stored before may be read after this
        disconnected = [name for name, seen in self.others.items() if _link(seen.member) == link]
        self._drop(disconnected, "its connection ended")

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._expire(now)
            if self._models() is not self._names:
                self.assign()
            if self._changed or now - self._renewed >= routers.RENEW_S:
                await self._renew()

    async def _renew(self) -> None:
        if self._stopped or not self._bus.connected:
            return
        now = time.monotonic()
        if now - self._renewed > routers.LEASE_S:  # others may have taken over, and keep the models that they claim
            self._since_ns = self._bus.clock.now_ns()
            self.assign()
        self._renewed, self._changed = now, False
        member = msgspec.structs.replace(
            self._member(), held=self._held(), lost=self._lost_leases(), queued=self._queued()
        )
        await self._bus.nc.publish(self._key, wire.encode(member), headers={"Nats-TTL": str(routers.TTL_S)})

    async def _store(self) -> None:
        """Store the first registration: only a stored key can be followed."""
        headers = {"Nats-TTL": str(routers.TTL_S)}
        await self._bus.js.publish(self._key, wire.encode(self._member()), timeout=STORE_S, headers=headers)

    def _member(self) -> Member:
        nc = self._bus.nc
        models = tuple(sorted(self.own - {REST}))
        return Member(self._id, self._since_ns, models, self._bus.server, int(nc.client_id), reads_packed=True)

    # The table

    def _on_entry(self, entry: Entry) -> None:
        name = entry.subject.rpartition(".")[2]
        if name == self._id:
            self._stored_ns = entry.time_ns
            return
        if "KV-Operation" in entry.headers or "Nats-Marker-Reason" in entry.headers or not entry.data:
            left = "KV-Operation" in entry.headers
            self._drop([name] if name in self.others else [], "" if left else "its lease expired")
            return
        try:
            member = routers.decode(entry.data)
        except msgspec.MsgspecError as error:
            log.warning("router_unreadable", router=name, error=str(error))
            return
        if _link(member) in self._broken:
            return
        old = self.others.get(name)
        self.others[name] = _Seen(member, time.monotonic(), entry.time_ns)
        if self.shared and (old is None or _claims(old.member) != _claims(member)):
            self.assign()

    def _expire(self, now: float) -> None:
        paused, self._checked = now - self._checked > PAUSE_S, now
        if not self._bus.connected:
            return
        if paused or self._links != self._bus.reconnects:  # renewals were not received, so their absence means nothing
            self._links = self._bus.reconnects
            self.others = {name: seen._replace(renewed_at=now) for name, seen in self.others.items()}
            return
        limit = now - routers.LEASE_S
        self._drop([name for name, seen in self.others.items() if seen.renewed_at < limit], "its lease expired")

    def _drop(self, names: Iterable[str], why: str) -> None:
        """
        Args:
            why: the routers are lost; "": they stopped in order.
        """
        for name in names:
            member = self.others.pop(name).member
            log.info("router_left", router=name, models=member.models, why=why or "it stopped")
            self.assign(after_loss=bool(why))

    def assign(self, *, after_loss: bool = False) -> None:
        """Assign the models again, and report changes for this router."""
        if self._stopped:
            return
        self._names = self._models()
        before = self.own
        for _ in range(ROUNDS):  # the models that this router owns are an input, too
            members = [seen.member for seen in self.others.values()] + [self._member()]
            owners = assign(frozenset(self._names.values()), members)
            owners[REST] = default_owner(owners, members)
            self.owners, own = owners, frozenset(model for model, router in owners.items() if router == self._id)
            if own == self.own:
                break
            self.own = own
        own = self.own
        if own != before:
            self._changed = True
            log.info("models_owned", models=sorted(own - {REST}), rest=REST in own, routers=len(self.others) + 1)
        if own - before or (after_loss and own):  # what it owned no longer, or helped with, a lost router may hold, too
            self._gained(after_loss)
        if before - own:
            self._lost()


def _claims(member: Member) -> tuple[int, tuple[str, ...]]:
    return member.since_ns, member.models


def _link(member: Member) -> BrokerConnection:
    return BrokerConnection(member.server, member.connection)
