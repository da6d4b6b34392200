"""What a router sees: the logs and the bucket, folded into index, loads and members. The shell around those cores."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import structlog
from nats.errors import Error as NatsError

from configs.settings import RouterSettings
from infra.bus.connection import Bus, connect
from infra.bus.direct_get import Entry
from infra.bus.log_tail import LogTail
from infra.bus.registry import RegisteredWorker, WorkerRegistry
from router.approximate import ApproximateIndex
from router.holders import TargetId
from router.index import PrefixIndex
from router.job_retention import stages
from router.load import ENCODE, ActiveRequest, LoadState
from router.load_tracker import LoadTracker
from router.snapshot import Snapshot, Snapshots, encode_part
from schemas import control, done, fleet, jobs, kv, wire
from schemas.errors import ServingError
from schemas.jobs import LoadHeader, Stage
from schemas.requests import GenerateRequest
from schemas.streams import LONGEST_DEADLINE_S
from schemas.subjects import HEADER_LOAD, HEADER_MSG_ID, HEADER_RETURNED

log = structlog.get_logger("router")

SUSPECT_S = 0.4  # a worker whose connection broke has this long to come back
SETTLE_S = fleet.LEASE_S + 0.5
DUMP_AGAIN_S = 1.0
SWEEP_BLOCKS = 2_000  # at once: 2 ms
SWEEP_STEPS = 5
EXPIRE_REQUESTS = 2_000
REMEMBERED = 1024  # workers that left
OVERDUE_NS = 30_000_000_000  # a request this long past its deadline ended without our hearing of it


class ClusterState:
    """Follows everything a decision depends on.

    Args:
        on_change: room may have come free.
        on_returned: a worker gave an attempt back: request, attempt, reason.
        on_lost: a member is gone, and leaves these requests.
        on_stranded: a request came to a worker, or goes to one, that is gone.
    """

    def __init__(
        self,
        bus: Bus,
        settings: RouterSettings,
        *,
        on_change: Callable[[], None],
        on_returned: Callable[[str, int, str], None],
        on_lost: Callable[[str, str, list[ActiveRequest]], None],
        on_stranded: Callable[[ActiveRequest], None],
    ) -> None:
        subjects = bus.subjects
        self._bus = bus
        self._settings = settings
        self._on_change = on_change
        self._on_returned_attempt = on_returned
        self._on_member_lost = on_lost
        self._on_stranded = on_stranded
        self.tracker = LoadTracker()
        self.index: PrefixIndex | None = PrefixIndex(settings.max_index_blocks) if settings.kv_events else None
        self._guess = None if settings.kv_events else ApproximateIndex(settings.max_index_blocks)
        self._registry = WorkerRegistry(bus, joined=self._joined, left=self._left, renewed=self._renewed)

        def tail(stream: str, kind: str, handle: Callable[[Entry], None]) -> LogTail:
            subject = subjects.all(kind)
            return LogTail(bus, subjects.stream(stream), subject, subjects.live(subject), handle)

        self._kv = tail("KV", "kv", self._on_kv)
        self._work = tail("WORK", "work", self._on_work)
        self._done = tail("DONE", "done", self._on_done)
        self._returned = tail("DONE", "returned", self._on_returned)
        self._suspects: dict[str, float] = {}  # connection name -> when it broke
        self.tasks = bus.tasks.group("view")
        self._stale_keys: asyncio.Task[None] | None = None
        self._dumps: dict[str, asyncio.Task[None]] = {}
        self._fetching: set[asyncio.Future[None]] = set()
        self._loaded: set[str] = set()  # workers whose cache the index knows
        self._gone: OrderedDict[str, None] = OrderedDict()  # workers that were registered, the last to leave last
        self._sys: Bus | None = None
        self._quiet_since = time.monotonic()
        self._snapshots = Snapshots(bus, settings.name)
        self._saved = (0, 0, 0)

    # --- life ---

    async def start(self) -> None:
        """
        Raises:
            ServingError: a stream or the bucket cannot be read.
        """
        now_ns = time.time_ns()
        past = now_ns - int(LONGEST_DEADLINE_S * 1e9)
        saved = await self._snapshots.load()
        if saved is not None and saved[0].taken_ns > past:
            at, state = saved
            self.tracker = LoadTracker.restore(state)
            starts = {"done": at.done_seq, "returned": at.returned_seq, "work": at.work_seq}
        else:
            starts = {}
        # Members before jobs: these are counted in the block size of their worker.
        if self.index is not None:
            await self._kv.start(since_ns=now_ns)
        await self._registry.start()
        # Ends before beginnings: a request that is known to be over never counts as unfinished work.
        for name, tail in (("done", self._done), ("returned", self._returned), ("work", self._work)):
            if starts.get(name):
                await tail.start(after=starts[name])
            else:
                await tail.start(since_ns=past)
        self._bus.on_reconnect.append(self._on_reconnect)
        self._quiet_since = time.monotonic()
        if self._settings.sys_nats_url:
            await self._listen_to_the_server()

    async def stop(self) -> None:
        running = [*self._dumps.values(), *self._fetching]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._registry.stop()
        for tail in (self._kv, self._work, self._done, self._returned):
            await tail.stop()
        if self._sys is not None:
            await self._sys.close()

    async def _on_reconnect(self) -> None:
        self._quiet_since = time.monotonic()

    async def save(self) -> None:
        """Store the loads for the next start, if they changed since the last time."""
        positions = (self._work.position, self._done.position, self._returned.position)
        if positions != self._saved and self._bus.connected:
            self._saved, taken_ns, parts = positions, time.time_ns(), []
            for part in self.tracker.parts():
                parts.append(encode_part(_logged(part)))
                await asyncio.sleep(0)
            await self._snapshots.save(Snapshot(taken_ns, *positions), parts)

    async def upkeep(self, now_ns: int) -> None:
        """A few times a second: leases, suspects, deadlines, index cleaning."""
        now = time.monotonic()
        self._registry.expire()
        if self._stale_keys is None or self._stale_keys.done():
            self._stale_keys = self.tasks.spawn(
                self._remove_stale_keys(), name="stale-keys", on_failure=_stale_keys_not_removed
            )
        for connection, since in list(self._suspects.items()):
            if now - since > SUSPECT_S:
                del self._suspects[connection]
                self._condemn(connection)
        self.tracker.expire(now_ns, OVERDUE_NS, EXPIRE_REQUESTS)
        index = self.index or self._guess
        assert index is not None
        for _ in range(SWEEP_STEPS):
            if index.sweep(SWEEP_BLOCKS):
                break
            await asyncio.sleep(0)
        if self._guess is not None:
            self._guess.expire(now_ns / 1e9)

    # --- for decisions ---

    def overlaps(self, keys: Sequence[int]) -> Mapping[TargetId, int]:
        """Leading prompt blocks held, by place."""
        if self.index is not None:
            return self.index.match(keys)
        assert self._guess is not None
        return self._guess.match(keys)

    def suspects(self) -> frozenset[str]:
        """Workers whose connection is broken for the moment."""
        if not self._suspects:
            return frozenset()
        return frozenset(
            worker
            for worker, member in self._registry.members.items()
            if member.registration.connection in self._suspects
        )

    def placed(
        self,
        request: GenerateRequest,
        attempt: int,
        route: Sequence[Stage],
        load: LoadHeader,
        keys: Sequence[int],
        now_ns: int,
    ) -> None:
        """Count a decision, at all stages of its route, before its echo from the log arrives."""
        first = route[0]
        self.tracker.admit(request.id, attempt, first.worker, load, now_ns=now_ns, role=first.role)
        if self._guess is not None:
            for stage in route:
                if stage.role != ENCODE:
                    self._guess.record((stage.worker, stage.rank), keys, now_ns / 1e9)

    def has_capacity(self) -> bool:
        return self.tracker.has_capacity()

    def orphans(self) -> list[ActiveRequest]:
        """Requests with a stage left at an unregistered worker, once all workers had time to register."""
        settled = time.monotonic() - self._quiet_since > SETTLE_S
        return self.tracker.orphans() if settled and self._bus.connected else []

    def positions(self) -> tuple[int, int, int]:
        """Stream sequences of KV, WORK and DONE that the present state stands at."""
        return self._kv.position, self._work.position, self._done.position

    # --- folds ---

    def _on_work(self, entry: Entry) -> None:
        header = entry.headers.get(HEADER_LOAD)
        if header is None:
            return  # a revocation
        role, worker = entry.subject.split(".")[-2:]
        try:
            load = jobs.read_load_header(header)
            request_id, number, *rest = entry.headers.get(HEADER_MSG_ID, "").split(":")
            attempt = int(number)
            stage, copy = stages(rest)
            if copy and self.tracker.set_seq(request_id, attempt, entry.seq):
                return
            if load.route and load.route[0].worker != worker:
                raise ValueError("another worker's route")
        except ValueError:
            log.warning("work_header_unreadable", seq=entry.seq)
            return
        moved = self.tracker.admit(
            request_id,
            attempt,
            worker,
            load,
            now_ns=time.time_ns(),
            role=role,
            echoed=True,
            seq=entry.seq,
            handed=stage == ["decode"],  # only prefill workers hand over to decode workers, but for a few tokens
        )
        if moved and any(stage.worker in self._gone for stage in load.route or (Stage(role, worker),)):
            stranded = self.tracker.request(request_id)
            if stranded is not None and self._bus.connected:
                self._on_stranded(stranded)

    def _on_done(self, entry: Entry) -> None:
        self.tracker.finish(entry.headers.get(HEADER_MSG_ID, ""))
        self._on_change()

    def _on_returned(self, entry: Entry) -> None:
        header = entry.headers.get(HEADER_RETURNED)
        try:
            if header is not None:
                request = entry.headers.get(HEADER_MSG_ID, "").partition(":")[0]
                self._on_returned_attempt(request, *done.read_returned_header(header))
            elif entry.data:
                self._on_returned_body(entry.data)
            else:  # of a worker of an older release; only its body tells
                task = asyncio.ensure_future(self._fetch_returned(entry.seq))
                self._fetching.add(task)
                task.add_done_callback(self._fetched)
        except (msgspec.MsgspecError, ValueError) as error:
            log.warning("return_unreadable", seq=entry.seq, error=str(error))

    def _on_returned_body(self, data: bytes) -> None:
        event = done.decode(data)
        if isinstance(event, done.Returned):
            self._on_returned_attempt(event.request, event.attempt, event.reason)

    async def _fetch_returned(self, seq: int) -> None:
        message = await self._bus.js.get_msg(self._bus.subjects.stream("DONE"), seq, direct=True)
        self._on_returned_body(message.data or b"")

    def _fetched(self, task: "asyncio.Future[None]") -> None:
        self._fetching.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.warning("return_unreadable", error=repr(task.exception()))

    def _on_kv(self, entry: Entry) -> None:
        assert self.index is not None
        try:
            batch = kv.decode(entry.data)
        except msgspec.MsgspecError as error:
            log.warning("kv_batch_unreadable", seq=entry.seq, error=str(error))
            return
        if not self.index.apply(batch):
            self._loaded.discard(batch.worker)
            self._ask_for_dump(batch.worker)

    # --- members ---

    def _joined(self, member: RegisteredWorker) -> None:
        registration = member.registration
        self.tracker.put_worker(registration)
        self._gone.pop(registration.worker, None)
        self._suspects.pop(registration.connection, None)
        if self.index is not None and registration.kv_events and registration.worker not in self._loaded:
            self._ask_for_dump(registration.worker)
        self._on_change()

    def _renewed(self, member: RegisteredWorker) -> None:
        if self._suspects:
            self._suspects.pop(member.registration.connection, None)

    def _left(self, member: RegisteredWorker, why: str) -> None:
        worker = member.registration.worker
        orphans = self.tracker.remove_worker(worker)
        self._gone[worker] = None
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
        if self.index is not None:
            self.index.forget(worker)
            self._loaded.discard(worker)
        if self._guess is not None:
            self._guess.forget(worker)
        self._on_member_lost(worker, why, orphans)

    def _condemn(self, connection: str) -> None:
        """A connection stayed away: its worker is dead. Removing its key tells it so, should it live."""
        for worker, member in list(self._registry.members.items()):
            if member.registration.connection == connection:
                self.tasks.spawn(self._remove_key(worker, member.revision), name=f"remove-{worker}")
                self._registry.drop(worker, "its connection broke")

    async def _remove_stale_keys(self) -> None:
        """Registrations that a killed broker brought back."""
        await self._registry.find_stale_keys()
        for worker, revision in self._registry.take_stale_keys().items():
            await self._remove_key(worker, revision)
            log.info("stale_registration_removed", worker=worker)

    async def _remove_key(self, worker: str, revision: int) -> None:
        headers = fleet.removal_headers(revision)
        with_retry = 3
        while with_retry:
            try:
                await self._bus.nc.request(self._bus.subjects.lease(worker), b"", timeout=1.0, headers=headers)
                return
            except (NatsError, TimeoutError) as error:
                with_retry -= 1
                log.debug("key_not_removed", worker=worker, error=repr(error))

    async def _listen_to_the_server(self) -> None:
        """Disconnect events of the system account: a killed worker is heard of within milliseconds."""
        try:
            self._sys = await connect(
                self._settings.sys_nats_url, role="sys", name="router-sys", end_process=_never_mind
            )
            await self._sys.nc.subscribe("$SYS.ACCOUNT.*.DISCONNECT", cb=self._on_disconnect)
            await self._sys.nc.subscribe("$SYS.ACCOUNT.*.CONNECT", cb=self._on_connect)
        except ServingError as error:
            log.warning("no_disconnect_events", error=error.message, action="leases alone tell of dead workers")

    async def _on_disconnect(self, message: Any) -> None:
        connection = _client_name(message.data)
        if any(m.registration.connection == connection for m in self._registry.members.values()):
            self._suspects[connection] = time.monotonic()

    async def _on_connect(self, message: Any) -> None:
        self._suspects.pop(_client_name(message.data), None)

    # --- dumps ---

    def _ask_for_dump(self, worker: str) -> None:
        if worker not in self._dumps:
            task = self.tasks.spawn(self._dump(worker), name=f"dump-{worker}", on_failure=_logged_failure(worker))
            self._dumps[worker] = task
            task.add_done_callback(lambda _: self._dumps.pop(worker, None))

    async def _load(self, pages: Sequence[kv.KvDump]) -> bool:
        """A worker's dump has the pages of one rank after those of another; False: some rank needs a newer one."""
        assert self.index is not None
        whole = True
        for part in _by_rank(pages):
            loading = self.index.loading(part)
            try:
                while True:
                    next(loading)
                    await asyncio.sleep(0)
            except StopIteration as end:
                whole &= end.value
        return whole

    async def _dump(self, worker: str) -> None:
        """Ask until the worker's cache is known, or it is gone."""
        assert self.index is not None
        subject = self._bus.subjects.control(worker)
        while self.tracker.worker(worker) is not None:
            try:
                pages: list[kv.KvDump] = []
                page = 0
                while True:
                    reply = await self._bus.nc.request(subject, wire.encode(control.DumpKv(page)), timeout=5.0)
                    pages.append(kv.decode_dump(reply.data))
                    page = pages[-1].next_page
                    if not page:
                        break
                if await self._load(pages):
                    self._loaded.add(worker)
                    log.info("index_loaded", worker=worker, seq=pages[0].seq)
                    return
            except (NatsError, TimeoutError, msgspec.MsgspecError) as error:
                log.debug("dump_failed", worker=worker, error=repr(error))
            await asyncio.sleep(DUMP_AGAIN_S)


def _by_rank(pages: Sequence[kv.KvDump]) -> list[list[kv.KvDump]]:
    found: dict[int, list[kv.KvDump]] = {}
    for page in pages:
        found.setdefault(page.rank, []).append(page)
    return list(found.values())


def _logged(part: LoadState) -> LoadState:
    """Without decisions of this router whose jobs may never be stored."""
    if all(entry.echoed for entry in part.unfinished):
        return part
    return msgspec.structs.replace(part, unfinished=tuple(entry for entry in part.unfinished if entry.echoed))


def _stale_keys_not_removed(error: BaseException) -> None:
    log.debug("stale_registrations_not_read", error=repr(error))  # the next look is a moment later


def _logged_failure(worker: str) -> Callable[[BaseException], None]:
    """What went wrong with one worker concerns no other: without its dump, its cache is not known."""

    def failed(error: BaseException) -> None:
        log.error("worker_task_failed", worker=worker, error=repr(error), exc_info=error)

    return failed


class _Client(msgspec.Struct, frozen=True):
    name: str = ""


class _Event(msgspec.Struct, frozen=True):
    client: _Client = _Client()


_decode_event = msgspec.json.Decoder(_Event).decode


def _client_name(data: bytes) -> str:
    try:
        return _decode_event(data).client.name
    except msgspec.MsgspecError:
        return ""


def _never_mind(code: int) -> Any:
    log.warning("system_connection_closed", action="leases alone tell of dead workers")
