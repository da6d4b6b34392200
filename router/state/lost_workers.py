"""Lost workers: detects them, removes their registrations, and counts recently lost leases.

``DisconnectWatch`` follows broken connections in the events of the broker's system account. They report a killed
worker within milliseconds; its lease would take seconds to expire.

``LeaseLosses`` counts, pure, by the names that workers keep over restarts. A broker that stops, or elects a leader
for the workers bucket, lets leases run out whose workers are well. Such losses are counted apart: those of a router
whose own link broke just before, and those of all workers at once.

``RegistrationRemoval`` removes the registrations of dead workers: after a broken connection, when their process is
reported to have ended, and those that a killed broker brought back.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus, connect
from penstock.infra.bus.jetstream import ApiError
from penstock.infra.bus.tasks import Tasks
from penstock.infra.bus.worker_leases import WorkerRegistry
from penstock.schemas import fleet
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.routers import LostLeases


class BrokerConnection(NamedTuple):
    """A connection to the broker: id of the server, and of the connection there."""

    server: str
    connection: int


log = structlog.get_logger("router")

GRACE_S = 0.4  # for a broken connection to come back


class DisconnectWatch:
    """``broken`` maps the name of each broken connection to the monotonic time when it broke.

    Args:
        is_worker: whether a connection of this name belongs to a worker; others are not in ``broken``.

    Attributes:
        link_broke: called with every connection that broke.
    """

    def __init__(self, is_worker: Callable[[str], bool]) -> None:
        self._is_worker = is_worker
        self.link_broke: Callable[[BrokerConnection], None] = lambda link: None
        self.broken: dict[str, float] = {}
        self._system: Bus | None = None

    async def start(self, url: str) -> None:
        """Without the system account, only leases report dead workers."""
        try:
            self._system = await connect(url, role="sys", name="router-sys", end_process=_on_closed)
            await self._system.nc.subscribe("$SYS.ACCOUNT.*.DISCONNECT", cb=self._on_disconnect)
            await self._system.nc.subscribe("$SYS.ACCOUNT.*.CONNECT", cb=self._on_connect)
        except ServingError as error:
            log.warning("no_disconnect_events", error=error.message, action="only leases report dead workers")

    async def stop(self) -> None:
        if self._system is not None:
            await self._system.close()

    def restored(self, connection: str) -> None:
        """The connection works: its worker has registered or renewed its lease."""
        self.broken.pop(connection, None)

    def expired(self, now: float) -> list[str]:
        """Remove and return connections that did not come back in time."""
        if not self.broken:
            return []
        late = [connection for connection, since in self.broken.items() if now - since > GRACE_S]
        for connection in late:
            del self.broken[connection]
        return late

    async def _on_disconnect(self, message: Any) -> None:
        event = _read(message.data)
        self.link_broke(BrokerConnection(event.server.id, event.client.id))
        if self._is_worker(event.client.name):
            self.broken[event.client.name] = time.monotonic()

    async def _on_connect(self, message: Any) -> None:
        self.broken.pop(_read(message.data).client.name, None)


class _Client(msgspec.Struct, frozen=True):
    name: str = ""
    id: int = 0


class _Server(msgspec.Struct, frozen=True):
    id: str = ""


class _Event(msgspec.Struct, frozen=True):
    client: _Client = _Client()
    server: _Server = _Server()


_decode_event = msgspec.json.Decoder(_Event).decode


def _read(data: bytes) -> _Event:
    try:
        return _decode_event(data)
    except msgspec.MsgspecError:
        return _Event()


def _on_closed(code: int) -> Any:
    log.warning("system_connection_closed", action="only leases report dead workers")


WINDOW_NS = 600_000_000_000
TOGETHER_NS = 3_000_000_000  # within which all workers lose their leases, if it is not theirs: one lease
NAMES = 16  # in a router's lease, which stays small
REMEMBERED = 10_000  # losses

Loss = tuple[str, str, str, int]  # name, role and model of the worker; Unix time, ns


class LeaseLosses:
    """Of the last ten minutes. A worker that leaves in order has lost nothing."""

    def __init__(self) -> None:
        self._own: list[Loss] = []  # oldest first
        self._together: list[Loss] = []
        self._burst_ns = -TOGETHER_NS  # when the last burst of losses began
        self._burst_of: frozenset[str] = frozenset()  # the workers of then, by their ids, and which have lost theirs
        self._burst_lost: set[str] = set()

    def add(
        self,
        name: str,
        role: str,
        model: str,
        at_ns: int,
        *,
        worker: str,
        workers: Iterable[str],
        link_broke: bool = False,
    ) -> None:
        """
        Args:
            name: several workers may have the same, by mistake.
            worker: its id.
            workers: ids of those that were registered before this loss.
            link_broke: this router had lost the broker, too.
        """
        loss = (name, role, model, at_ns)
        if link_broke:
            self._together.append(loss)
        else:
            self._own.append(loss)
            self._find_burst(worker, at_ns, workers)
        del self._own[:-REMEMBERED]
        del self._together[:-REMEMBERED]

    def _find_burst(self, worker: str, at_ns: int, workers: Iterable[str]) -> None:
        if at_ns - self._burst_ns > TOGETHER_NS:
            self._burst_ns, self._burst_of, self._burst_lost = at_ns, frozenset(workers), set()
        self._burst_lost.add(worker)
        if len(self._burst_of) > 1 and self._burst_lost >= self._burst_of:
            self._together += [loss for loss in self._own if loss[3] >= self._burst_ns]
            self._own = [loss for loss in self._own if loss[3] < self._burst_ns]

    def recent(self, now_ns: int) -> tuple[LostLeases, ...]:
        """Workers by their losses, most first."""
        since = now_ns - WINDOW_NS
        self._own = [loss for loss in self._own if loss[3] > since]
        self._together = [loss for loss in self._together if loss[3] > since]
        found: dict[str, LostLeases] = {}
        for losses, own in ((self._together, 0), (self._own, 1)):
            for name, role, model, at_ns in losses:
                before = found.get(name, LostLeases(name, role, model, 0, 0))
                count, together = before.count + own, before.together + 1 - own
                found[name] = LostLeases(name, role, model, count, at_ns, together)  # the last of its own, if any
        return tuple(sorted(found.values(), key=lambda each: (-each.count, -each.together, each.worker))[:NAMES])

    def part(self) -> tuple[tuple[Loss, ...], tuple[Loss, ...]]:
        """For a snapshot: workers' own losses, and those of all together."""
        return tuple(self._own), tuple(self._together)

    def update(self, own: Iterable[Loss], together: Iterable[Loss]) -> None:
        """Continue from a snapshot."""
        self._own = sorted({*own, *self._own}, key=lambda loss: loss[3])
        self._together = sorted({*together, *self._together}, key=lambda loss: loss[3])


TRIES = 3
PURGE_S = 5.0
BROKE = "its connection broke"
ENDED = "its process ended"
DRAINED = "drained"


class _Purged(msgspec.Struct, frozen=True):
    purged: int = 0  # from the leader's store
    error: ApiError | None = None


_decode_purged = msgspec.json.Decoder(_Purged).decode


class RegistrationRemoval:
    def __init__(self, bus: Bus, registry: WorkerRegistry, tasks: Tasks) -> None:
        self._bus = bus
        self._registry = registry
        self._tasks = tasks
        self._purging: asyncio.Task[None] | None = None
        self._purged = 0

    def remove_connections(self, connections: frozenset[str]) -> None:
        """The workers of these connections are dead. A worker that is not stops when its key is removed."""
        for name, worker in list(self._registry.members.items()):
            if worker.registration.connection in connections:
                self._tasks.spawn(self._remove_key(name, worker.revision), name=f"remove-{name}")
                self._registry.remove(name, BROKE)

    def remove_ended(self, name: str) -> None:
        """The process of this worker has ended. Otherwise it would be given requests until its lease expires."""
        if (worker := self._registry.members.get(name)) is not None:
            self._tasks.spawn(self._remove_key(name, worker.revision), name=f"remove-{name}")
            self._registry.remove(name, ENDED)

    def purge_ended(self) -> None:
        """Have every server forget the registrations that a killed one brought back, in a task; one runs at a time."""
        if (before := self._registry.ended_before()) != self._purged and self.idle:
            self._purging = self._tasks.spawn(self._purge(before), name="purge-registrations", on_failure=_not_purged)

    @property
    def idle(self) -> bool:
        return self._purging is None or self._purging.done()

    async def _purge(self, before: int) -> None:
        """Purge by sequence, which each replica does for itself.

        The leader of a cluster does not have what a follower brought back, so it refuses to remove that by key.
        """
        if before:
            subject = f"$JS.API.STREAM.PURGE.KV_{self._bus.subjects.bucket('workers')}"
            reply = await self._bus.nc.request(subject, msgspec.json.encode({"seq": before}), timeout=PURGE_S)
            answer = _decode_purged(reply.data)
            if answer.error is not None:
                raise ServingError(Code.broker_unavailable, str(answer.error))
            if answer.purged:
                log.info("stale_registrations_removed", count=answer.purged)
        self._purged = before

    async def _remove_key(self, worker: str, revision: int) -> None:
        headers = fleet.removal_headers(revision)
        for _ in range(TRIES):
            try:
                await self._bus.nc.request(self._bus.subjects.lease(worker), b"", timeout=1.0, headers=headers)
                return
            except (NatsError, TimeoutError) as error:
                log.debug("key_not_removed", worker=worker, error=repr(error))


def _not_purged(error: BaseException) -> None:
    log.debug("stale_registrations_not_removed", error=repr(error))  # tried again a moment later
