"""The state of the cluster as a router sees it: what its workers cache (``caches``) and have to do (``LoadTracker``).

This is the shell around the load tracker: it follows WORK, DONE and the workers bucket, and calls the router back
(``ClusterListener``) when the cluster changes.
"""

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Sequence
from contextlib import AsyncExitStack
from itertools import chain
from typing import NamedTuple

import msgspec
import structlog

from penstock.configs.settings import RouterSettings
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.bus.worker_leases import EXPIRED, UNREGISTERED, RegisteredWorker, WorkerRegistry
from penstock.infra.process.turns import TimeSlice
from penstock.router.state.attempts import (
    ActiveRequest,
    Positions,
    ReturnedAttempts,
    Unfolded,
    UnownedRequests,
    read_revoked,
    read_sent,
)
from penstock.router.state.caches import SWEEP_BLOCKS, Caches
from penstock.router.state.holders import TargetId, keys_view
from penstock.router.state.load_tracker import LoadState, LoadTracker
from penstock.router.state.lost_workers import BROKE, DRAINED, ENDED, DisconnectWatch, LeaseLosses, RegistrationRemoval
from penstock.router.state.snapshots import Snapshot, Snapshots
from penstock.router.state.target_loads import ENCODE
from penstock.schemas import done, fleet, kv
from penstock.schemas.jobs import LoadHeader, Stage
from penstock.schemas.streams import LONGEST_DEADLINE_S
from penstock.schemas.subjects import HEADER_CRASHED, HEADER_GONE, HEADER_RETURNED, request_of


class ClusterListener(NamedTuple):
    """The callbacks, by change.

    Attributes:
        capacity_changed: a worker may have capacity again.
        attempt_returned: a worker returned an attempt: request, attempt, reason.
        worker_lost: a worker left: its id, why, its active requests. Requests of models that another router owns are
            not among them.
        request_stranded: a request was sent to a worker that had left, or will be by an earlier stage.
    """

    capacity_changed: Callable[[], None]
    attempt_returned: Callable[[str, int, str], None]
    worker_lost: Callable[[str, str, list[ActiveRequest]], None]
    request_stranded: Callable[[ActiveRequest], None]


log = structlog.get_logger("router")

SETTLE_S = fleet.LEASE_S + 0.5  # after a (re)connect, for workers to renew their leases
RELINKED_S = 10.0  # after a reconnect: leases that run out meanwhile did so through the broker
EXPIRE_REQUESTS = 2_000
ENDED_KEPT = 20_000  # what ends within a second is counted together
LEFT_REMEMBERED = 1024  # workers that left
REPORTED_S = 0.5  # until what was stored before a registration is read, too
OVERDUE_NS = 30_000_000_000  # after its deadline; the terminal event of such a request was missed


class ClusterState:
    """Everything that a decision depends on. ``start`` it with a listener.

    Args:
        deleted: requests whose jobs do not count, since they were deleted.
        came_back: called with stream, sequence and request of their messages.
    Attributes:
        cut_off: the jobs that were active each time that WORK had lost its end, also before the start: request,
            attempt, sequence.
        ended: records of requests as they are read, for counting usage; a full one has lost some.
        registry: the workers that are registered.
        removal: removes the registrations of those that are lost.
    """

    def __init__(
        self,
        bus: Bus,
        settings: RouterSettings,
        deleted: Container[str] = (),
        came_back: Callable[[str, int, str], None] = lambda stream, seq, request: None,
    ) -> None:
        self._bus = bus
        self._deleted = deleted
        self._came_back = came_back
        self._settings = settings
        self._listener: ClusterListener
        self.tasks = bus.tasks.group("cluster")
        self.tracker = LoadTracker(kv_events=settings.kv_events)
        self.caches = Caches(
            bus, settings, self.tasks, is_registered=self._is_registered, folded=self._on_kv, loaded=self._on_loaded
        )
        self.registry = WorkerRegistry(bus, joined=self._on_joined, left=self._on_left, renewed=self._on_renewed)
        self.removal = RegistrationRemoval(bus, self.registry, self.tasks)
        self.disconnects = DisconnectWatch(self._is_worker_connection)
        self.cut_off: list[list[tuple[str, int, int]]] = []
        self._work = self._tail("WORK", "work", self._on_work)
        self._done = self._tail("DONE", "done", self._on_done)
        self.ended: deque[Entry] = deque(maxlen=ENDED_KEPT)
        self.returned = ReturnedAttempts()
        self.losses = LeaseLosses()
        self._returned = self._tail("DONE", "returned", self._on_returned)
        self._following = AsyncExitStack()
        self.stalled: frozenset[str] = frozenset()  # workers whose engines make no steps; set by the watchdog
        self.late: frozenset[str] = frozenset()  # workers whose requests are placed again; set by ``resteer``
        self._left: OrderedDict[str, str] = OrderedDict()  # workers that left, the most recent last -> model
        self._connected_since = time.monotonic()
        self._relinked = -math.inf  # monotonic; when the link was last made again
        self._snapshots = Snapshots(bus, settings.name)
        self._saved = (0, 0, 0)
        self.owns: Callable[[str], bool] = lambda model: True  # call ``owners_changed`` if it changes
        self._owned: dict[str, bool] = {}  # by worker
        self._unowned = UnownedRequests()
        self._folding: asyncio.Task[None] | None = None

    def _tail(self, stream: str, kind: str, handle: Callable[[Entry], None]) -> LogTail:
        subjects = self._bus.subjects

        def start_over() -> None:
            tail.since_ns = self._oldest_ns()  # instead of days of messages
            if kind == "work":
                self._on_truncated()

        tail = LogTail(self._bus, subjects.stream(stream), subjects.all(kind), handle, start_over)
        return tail

    def _oldest_ns(self) -> int:
        return self._bus.clock.now_ns() - int(LONGEST_DEADLINE_S * 1e9)

    def _on_truncated(self) -> None:
        for unfolded in self._unowned.take():
            self._fold_kept(unfolded)
        self.cut_off.append(self.stored_jobs())

    def stored_jobs(self) -> list[tuple[str, int, int]]:
        """The active jobs: request, attempt and sequence in WORK."""
        return [(entry.request, entry.attempt, entry.seq) for entry in self.tracker.active() if entry.seq]

    async def start(self, listener: ClusterListener) -> None:
        """
        Raises:
            ServingError: a stream or the bucket cannot be read.
        """
        self._listener = listener
        now_ns = self._bus.clock.now_ns()
        past = self._oldest_ns()
        saved = await self._snapshots.load()
        starts = {}
        if saved is not None and saved[0].taken_ns > past:
            at, state = saved
            self.tracker.restore(state)
            self.returned.update(state.returned)
            self.losses.update(state.losses, state.losses_together)
            for entry in self.tracker.active():
                if entry.request in self._deleted:
                    self.forget(entry.request)
                elif entry.attempt in self.returned.of(entry.request):  # read, and not acted on before the snapshot
                    listener.attempt_returned(entry.request, entry.attempt, "its worker gave it back")
            if not at.work_seq:
                self.cut_off.append(self.stored_jobs())
            starts = {"done": at.done_seq, "returned": at.returned_seq, "work": at.work_seq}
        # Workers before jobs: jobs are counted in blocks of their worker's size.
        await self.caches.start(now_ns)
        await self._following.enter_async_context(self.registry)
        self.caches.forget_unregistered()
        # Ends before beginnings: a request that is known to be over never counts as active.
        for name, tail in (("done", self._done), ("returned", self._returned), ("work", self._work)):
            after = starts.get(name, 0)
            await self._following.enter_async_context(tail.following(after=after, since_ns=0 if after else past))
        self._bus.on_reconnect.append(self._on_reconnect)
        self._connected_since = time.monotonic()
        if self._settings.sys_nats_url:
            await self.disconnects.start(self._settings.sys_nats_url)

    async def stop(self) -> None:
        await self.caches.stop()
        await self._following.aclose()
        await self.disconnects.stop()

    async def _on_reconnect(self) -> None:
        self._connected_since = self._relinked = time.monotonic()

    async def save(self) -> None:
        """Store the loads for the next start, and less often the index, if they have changed since the last time."""
        positions = (self._work.position, self._done.position, self._returned.position)
        if positions != self._saved and self._bus.connected:
            self._saved, head = positions, Snapshot(self._bus.clock.now_ns(), *positions)
            await self.fold_unowned()
            returned = (LoadState(returned=part) for part in self.returned.parts())
            own, together = self.losses.part()
            losses = LoadState(losses=own, losses_together=together)
            await self._snapshots.save(head, chain(self.tracker.parts(), returned, [losses]))
        await self.caches.save_sometimes()

    def forget(self, request: str) -> None:
        """A request was deleted, so it had ended. Its terminal event may be gone before it was read here."""
        self._unowned.end(request)
        self.returned.end(request)
        if self.tracker.finish(request) is not None:
            self._listener.capacity_changed()

    async def maintain(self, now_ns: int) -> None:
        """Expire leases, broken connections and overdue requests, and clean up; a few times a second."""
        self.registry.expire()
        self.removal.purge_ended()
        if expired := self.disconnects.expired(time.monotonic()):
            self.removal.remove_connections(frozenset(expired))
        self.tracker.expire(now_ns - OVERDUE_NS, EXPIRE_REQUESTS)
        await self.caches.maintain(now_ns / 1e9)
        self.tracker.loads.sweep(SWEEP_BLOCKS)

    # Decisions

    def suspects(self) -> frozenset[str]:
        """Workers whose connection is broken at the moment, whose engine is stalled, or that are late."""
        broken = self.disconnects.broken
        slow = self.stalled | self.late
        if not broken:
            return slow
        workers = self.registry.members.items()
        return slow | {name for name, worker in workers if worker.registration.connection in broken}

    def steps(self) -> dict[str, tuple[int, int]]:
        """Of workers with requests, and stalled ones: epoch, and steps of the engine by its last renewal (-1: unknown,
        or it makes none for now).

        Thousands may have none, and engines without work make no steps.
        """
        found = map(self.registry.members.get, self.tracker.busy() | self.stalled)
        members = (member.registration for member in found if member is not None)
        return {each.worker: (each.epoch, -1 if each.rests else each.load.steps) for each in members}

    def registrations(self) -> list[fleet.Registration]:
        """All workers, with their load as of the last renewal."""
        return [member.registration for member in self.registry.members.values()]

    def is_back(self, worker: str) -> bool:
        """Whether a worker that was lost is registered again, with nothing to report of its previous process.

        A crash is reported before, but in another stream.
        """
        name, before = worker.rpartition("-")[0], time.monotonic() - REPORTED_S
        return any(
            each.registration.name == name and id != worker and each.joined_at < before
            for id, each in self.registry.members.items()
        )

    def admit(
        self,
        request: str,
        attempt: int,
        route: Sequence[Stage],
        load: LoadHeader,
        keys: Sequence[int],
        now_ns: int,
        *,
        suspect: str = "",
    ) -> None:
        """Count a decision of this router, at all stages of its route, before it is read from the log.

        Args:
            load: as it is sent with the job.
            keys: of the prompt's full blocks.
            suspect: as in ``Job``.
        """
        first = route[0]
        self.tracker.admit(
            request, attempt, first.worker, load, now_ns=now_ns, role=first.role, keys=keys, suspect=suspect
        )
        for stage in route:
            worker = self.tracker.worker(stage.worker)
            if worker is not None and stage.role != ENCODE:
                self.caches.sent(worker, stage.rank, keys, now_ns)

    def model_of(self, worker: str) -> str:
        """The model of a worker that is registered, or left not long ago; "": unknown."""
        registration = self.tracker.worker(worker)
        return registration.model if registration is not None else self._left.get(worker, "")

    def orphans(self) -> list[ActiveRequest]:
        """Requests with a stage left at an unregistered worker, once all workers have had time to register."""
        settled = time.monotonic() - self._connected_since > SETTLE_S
        return self.tracker.orphans() if settled and self._bus.connected else []

    def positions(self) -> Positions:
        """The stream sequences that the present state was folded from."""
        return Positions(self.caches.position, self._work.position, self._done.position)

    # Logs

    def owners_changed(self) -> None:
        """Fold messages that were left to other routers: this one may have to decide for their models now.

        Decisions await ``folded``, since other tasks run in between. One that does not may choose a worse worker.
        """
        self._owned.clear()
        if len(self._unowned):
            self._folding = self.tasks.spawn(self.fold_unowned(), name="fold-unowned")

    async def folded(self) -> None:
        """Wait until what was left to other routers is folded, if their models are this router's now."""
        if self._folding is not None:
            await asyncio.wait([self._folding])
            self._folding = None

    async def fold_unowned(self) -> None:
        """Before a decision for a model of another router."""
        time_slice = TimeSlice()
        for unfolded in self._unowned.take():
            self._fold_kept(unfolded)
            await time_slice.yield_if_spent()

    def fold_of(self, request: str) -> None:
        """Fold what was kept of a request, before a decision on it: another router may have placed it meanwhile."""
        for unfolded in self._unowned.take_of(request):
            self._fold_kept(unfolded)

    def _on_work(self, entry: Entry) -> None:
        if (request := request_of(entry.headers)) in self._deleted:
            self._came_back(self._bus.subjects.stream("WORK"), entry.seq, request)
            return
        read_ns, worker = self._bus.clock.now_ns(), entry.subject.rpartition(".")[2]
        owned = self._owned.get(worker)
        if owned is None and (registration := self.tracker.worker(worker)) is not None:
            owned = self._owned[worker] = self.owns(registration.model)
        if owned is False and not self._unowned.full and self.tracker.request(request) is None:
            if not self.tracker.ended(request):
                self._unowned.add(request, entry, read_ns)
            return
        self._fold_work(entry, read_ns)

    def _fold_kept(self, unfolded: Unfolded) -> None:
        try:
            self._fold_work(*unfolded)
        except Exception:  # the others are folded nevertheless, as when they are read
            log.exception("log_handler_failed", stream="WORK", seq=unfolded.entry.seq)

    def _fold_work(self, entry: Entry, read_ns: int) -> None:
        try:
            sent = read_sent(entry)
        except ValueError:
            log.warning("work_header_unreadable", seq=entry.seq)
            return
        if sent is None:
            self._on_revoked(entry)
            return
        if sent.is_copy and self.tracker.set_seq(sent.request, sent.attempt, entry.seq):
            return
        self.tracker.admit(
            sent.request,
            sent.attempt,
            sent.worker,
            sent.load,
            now_ns=read_ns,
            role=sent.role,
            echoed=True,
            seq=entry.seq,
            handed=sent.handed,
            suspect=sent.suspect,
        )
        active = self.tracker.request(sent.request)
        if active is None or active.seq != entry.seq or not self._bus.connected:
            return
        if any(stage.worker in self._left for stage in active.stages):
            self._listener.request_stranded(active)

    def stored(self, request: str, attempt: int, seq: int) -> None:
        """The broker has stored the job of a decision of this router at ``seq`` of WORK (0: unknown).

        If the tail has passed that sequence, it read another message there, which the broker has lost since.
        """
        self.fold_of(request)
        active = self.tracker.request(request)
        if active is not None and active.attempt == attempt and not active.echoed and 0 < seq <= self._work.position:
            self._work.rewind(seq)

    def _on_revoked(self, entry: Entry) -> None:
        """A router took an attempt from its worker, and may have ended before it could place the request again."""
        request, attempt = read_revoked(entry)
        active = self.tracker.request(request)
        if active is not None and active.attempt == attempt:
            self._listener.attempt_returned(request, attempt, "it was revoked")

    def _on_done(self, entry: Entry) -> None:
        request = request_of(entry.headers)
        if request in self._deleted:
            self._came_back(self._bus.subjects.stream("DONE"), entry.seq, request)
        else:
            # Read from the log it has its body, too, and after a start there may be thousands.
            self.ended.append(msgspec.structs.replace(entry, data=b"") if entry.data else entry)
        kept = self._unowned.end(request)
        self.returned.end(request)
        if self.tracker.finish(request, self._bus.clock.now_ns()) is not None or not kept:
            self._listener.capacity_changed()

    def _on_returned(self, entry: Entry) -> None:
        """An attempt was given back: by its worker, or for one whose process has ended."""
        request = request_of(entry.headers)
        try:
            attempt, reason = done.read_returned_header(entry.headers.get(HEADER_RETURNED, ""))
        except ValueError as error:
            log.warning("return_unreadable", seq=entry.seq, error=str(error))
            return
        if not self.tracker.ended(request):
            self.returned.add(request, attempt, entry.headers.get(HEADER_CRASHED, ""))
        self._listener.attempt_returned(request, attempt, reason)
        if worker := entry.headers.get(HEADER_GONE):
            self.removal.remove_ended(worker)

    def _on_kv(self, batch: kv.KvBatch) -> None:
        target_id, computed = (batch.worker, batch.rank), False
        if self.tracker.loads.is_computing(target_id):
            now_ns = self._bus.clock.now_ns()
            for event in batch.events:
                if isinstance(event, kv.Stored) and not event.tier and not event.group:
                    computed |= self.tracker.stored(target_id, keys_view(event.digests), now_ns)
        if computed:
            self._listener.capacity_changed()

    def _find_computed(self, target_id: TargetId, key: int) -> None:
        """Prompts that end with this block are computed if the index has it: no event will report them any more."""
        if self.caches.holds(target_id, key):
            self.tracker.stored(target_id, (key,), 0)

    def _on_loaded(self, worker: str) -> None:
        """The events that a dump replaces are not read."""
        registration = self.tracker.worker(worker)
        for rank in range(registration.dp_size if registration is not None else 0):
            for task in self.tracker.loads.uncomputed((worker, rank)):
                self._find_computed(task.target, task.keys[-1])
        self._listener.capacity_changed()

    # Workers

    def _is_registered(self, worker: str) -> bool:
        return self.tracker.worker(worker) is not None

    def _is_worker_connection(self, connection: str) -> bool:
        return any(worker.registration.connection == connection for worker in self.registry.members.values())

    def _on_joined(self, worker: RegisteredWorker) -> None:
        registration = worker.registration
        self.tracker.put_worker(registration)
        self._owned.pop(registration.worker, None)
        self._left.pop(registration.worker, None)
        self.disconnects.restored(registration.connection)
        self.caches.joined(registration)
        self._listener.capacity_changed()

    def _on_renewed(self, worker: RegisteredWorker) -> None:
        if self.disconnects.broken:
            self.disconnects.restored(worker.registration.connection)

    def _on_left(self, worker: RegisteredWorker, why: str) -> None:
        registration, name = worker.registration, worker.registration.worker
        if why in (EXPIRED, BROKE, ENDED):
            self.losses.add(
                registration.lasting_name,
                registration.role,
                registration.model,
                self._bus.clock.now_ns(),
                worker=name,
                workers=(each.worker for each in self.tracker.workers()),
                link_broke=time.monotonic() - self._relinked < RELINKED_S,
            )
        self._owned.pop(name, None)
        requests = self.tracker.remove_worker(name)
        if why == UNREGISTERED and registration.state is fleet.WorkerState.draining:
            why = DRAINED
        self._left[name] = worker.registration.model
        if len(self._left) > LEFT_REMEMBERED:
            self._left.popitem(last=False)
        self.caches.left(name)
        self._listener.worker_lost(name, why, requests)
