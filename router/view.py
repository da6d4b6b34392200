"""What a router sees: the logs and the bucket, folded into index, loads and members. The shell around those cores."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import structlog
from nats.errors import Error as NatsError

from configs.bus.connection import Bus, connect
from configs.bus.fleet import FleetWatch, Member
from configs.bus.log import LogTail
from configs.bus.read import Entry
from configs.settings import RouterSettings
from router.guess import Guess
from router.index import PrefixIndex
from router.loads import Loads
from router.policy import Candidate
from schemas import control, done, fleet, jobs, kv, wire
from schemas.errors import ServingError
from schemas.requests import GenerateRequest
from schemas.streams import LONGEST_DEADLINE_S
from schemas.subjects import HEADER_LOAD, HEADER_MSG_ID

log = structlog.get_logger("router")

SUSPECT_S = 0.4  # a worker whose connection broke has this long to come back
SETTLE_S = fleet.LEASE_S + 0.5
DUMP_AGAIN_S = 1.0
SWEEP_BLOCKS = 20_000
SNAPSHOT_S = 5.0


class View:
    """Follows everything a decision depends on.

    Args:
        on_change: room may have come free.
        on_returned: a worker gave an attempt back.
        on_lost: a member is gone.
    """

    def __init__(
        self,
        bus: Bus,
        settings: RouterSettings,
        *,
        on_change: Callable[[], None],
        on_returned: Callable[[done.Returned], None],
        on_lost: Callable[[Member, str], None],
    ) -> None:
        subjects = bus.subjects
        self._bus = bus
        self._settings = settings
        self._on_change = on_change
        self._on_returned_attempt = on_returned
        self._on_member_lost = on_lost
        self.loads = Loads()
        self.index: PrefixIndex | None = PrefixIndex(settings.max_index_blocks) if settings.kv_events else None
        self._guess = None if settings.kv_events else Guess()
        self._members = FleetWatch(bus, joined=self._joined, left=self._left)

        def tail(stream: str, kind: str, handle: Callable[[Entry], None]) -> LogTail:
            subject = subjects.all(kind)
            return LogTail(bus, subjects.stream(stream), subject, subjects.live(subject), handle)

        self._kv = tail("KV", "kv", self._on_kv)
        self._work = tail("WORK", "work", self._on_work)
        self._done = tail("DONE", "done", self._on_done)
        self._returned = tail("DONE", "returned", self._on_returned)
        self._suspects: dict[str, float] = {}  # connection name -> when it broke
        self._dumps: dict[str, asyncio.Task[None]] = {}
        self._loaded: set[str] = set()  # workers whose cache the index knows
        self._sys: Bus | None = None
        self._quiet_since = time.monotonic()

    # --- life ---

    async def start(self) -> None:
        """
        Raises:
            ServingError: a stream or the bucket cannot be read.
        """
        now_ns = time.time_ns()
        past = now_ns - int(LONGEST_DEADLINE_S * 1e9)
        # Ends before beginnings: a request that is known to be over never counts as unfinished work.
        await self._done.start(since_ns=past)
        await self._returned.start(since_ns=past)
        await self._work.start(since_ns=past)
        if self.index is not None:
            await self._kv.start(since_ns=now_ns)
        await self._members.start()
        self._bus.on_reconnect.append(self._on_reconnect)
        self._quiet_since = time.monotonic()
        if self._settings.sys_nats_url:
            await self._listen_to_the_server()

    async def stop(self) -> None:
        for task in self._dumps.values():
            task.cancel()
        await asyncio.gather(*self._dumps.values(), return_exceptions=True)
        for tail in (self._kv, self._work, self._done, self._returned):
            await tail.stop()
        if self._sys is not None:
            await self._sys.close()

    async def _on_reconnect(self) -> None:
        self._quiet_since = time.monotonic()

    def settled(self) -> bool:
        """Whether a missing registration means a dead worker: all had the time to register (again)."""
        return time.monotonic() - self._quiet_since > SETTLE_S

    def upkeep(self, now_ns: int) -> None:
        """A few times a second: leases, suspects, deadlines, index cleaning."""
        now = time.monotonic()
        self._members.expire()
        for connection, since in list(self._suspects.items()):
            if now - since > SUSPECT_S:
                del self._suspects[connection]
                self._condemn(connection)
        self.loads.expire(now_ns)
        if self.index is not None:
            self.index.sweep(SWEEP_BLOCKS)

    # --- for decisions ---

    def candidates(self, request: GenerateRequest, keys: Sequence[int], now_ns: int) -> list[Candidate]:
        """Every member as the policy sees it for this request."""
        held = self._match(keys, now_ns)
        suspects = self._suspects
        return [
            Candidate(
                member.registration,
                self.loads.load(worker),
                held.get((worker, 0), 0),
                suspect=member.registration.connection in suspects,
            )
            for worker, member in self._members.members.items()
        ]

    def _match(self, keys: Sequence[int], now_ns: int) -> dict[Any, int]:
        if self.index is not None:
            return self.index.match(keys)
        assert self._guess is not None
        return self._guess.match(keys, now_ns)

    def placed(
        self, request: GenerateRequest, attempt: int, worker: str, cached: int, keys: Sequence[int], now_ns: int
    ) -> None:
        """Count a decision before its echo from the log arrives."""
        self.loads.admitted(
            request.id,
            attempt,
            worker,
            prompt_tokens=len(request.prompt) // 4,
            cached_tokens=cached,
            n=request.n,
            gateway=request.gateway,
            deadline_ns=request.deadline_ns,
            now_ns=now_ns,
        )
        if self._guess is not None:
            self._guess.record(worker, keys, now_ns)

    def has_room(self, model: str) -> bool:
        return any(
            self.loads.room(m.registration) > 0
            for m in self._members.members.values()
            if m.registration.model == model and m.registration.state is fleet.State.ready
        )

    def any_room(self) -> bool:
        return any(self.loads.room(m.registration) > 0 for m in self._members.members.values())

    def is_member(self, worker: str) -> bool:
        return worker in self._members.members

    def members(self) -> list[fleet.Registration]:
        return [member.registration for member in self._members.members.values()]

    def positions(self) -> tuple[int, int, int]:
        """Stream sequences of KV, WORK and DONE that the present state stands at."""
        return self._kv.position, self._work.position, self._done.position

    # --- folds ---

    def _on_work(self, entry: Entry) -> None:
        header = entry.headers.get(HEADER_LOAD)
        if header is None:
            return  # a revocation, or a later stage's message
        try:
            load = jobs.read_load_header(header)
            request_id, _, attempt = entry.headers.get(HEADER_MSG_ID, "").rpartition(":")
            number = int(attempt)
        except ValueError:
            log.warning("work_header_unreadable", seq=entry.seq)
            return
        self.loads.admitted(
            request_id,
            number,
            entry.subject.rpartition(".")[2],
            prompt_tokens=load.prompt_tokens,
            cached_tokens=load.cached_tokens,
            n=load.n,
            gateway=load.gateway,
            deadline_ns=load.deadline_ns,
            seq=entry.seq,
            now_ns=time.time_ns(),
        )

    def _on_done(self, entry: Entry) -> None:
        self.loads.finished(entry.headers.get(HEADER_MSG_ID, ""))
        self._on_change()

    def _on_returned(self, entry: Entry) -> None:
        try:
            event = done.decode(entry.data)
        except msgspec.MsgspecError as error:
            log.warning("return_unreadable", seq=entry.seq, error=str(error))
            return
        if isinstance(event, done.Returned):
            self._on_returned_attempt(event)

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

    def _joined(self, member: Member) -> None:
        registration = member.registration
        self._suspects.pop(registration.connection, None)
        if self.index is not None and registration.kv_events and registration.worker not in self._loaded:
            self._ask_for_dump(registration.worker)
        self._on_change()

    def _left(self, member: Member, why: str) -> None:
        worker = member.registration.worker
        if self.index is not None:
            self.index.forget(worker)
            self._loaded.discard(worker)
        if self._guess is not None:
            self._guess.forget(worker)
        self._on_member_lost(member, why)

    def _condemn(self, connection: str) -> None:
        """A connection stayed away: its worker is dead. Removing its key tells it so, should it live."""
        for worker, member in list(self._members.members.items()):
            if member.registration.connection == connection:
                task = asyncio.ensure_future(self._remove_key(worker, member.revision))
                task.add_done_callback(lambda t: t.cancelled() or t.exception())
                self._members.drop(worker, "its connection broke")

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
        if any(m.registration.connection == connection for m in self._members.members.values()):
            self._suspects[connection] = time.monotonic()

    async def _on_connect(self, message: Any) -> None:
        self._suspects.pop(_client_name(message.data), None)

    # --- dumps ---

    def _ask_for_dump(self, worker: str) -> None:
        if worker not in self._dumps:
            task = asyncio.create_task(self._dump(worker), name=f"dump-{worker}")
            self._dumps[worker] = task
            task.add_done_callback(lambda _: self._dumps.pop(worker, None))

    async def _dump(self, worker: str) -> None:
        """Ask until the worker's cache is known, or it is gone."""
        assert self.index is not None
        subject = self._bus.subjects.control(worker)
        while self.is_member(worker) or not self.settled():
            try:
                pages: list[kv.KvDump] = []
                page = 0
                while True:
                    reply = await self._bus.nc.request(subject, wire.encode(control.DumpKv(page)), timeout=5.0)
                    pages.append(kv.decode_dump(reply.data))
                    page = pages[-1].next_page
                    if not page:
                        break
                if self.index.load_dump(pages):
                    self._loaded.add(worker)
                    log.info("index_loaded", worker=worker, seq=pages[0].seq)
                    return
            except (NatsError, TimeoutError, msgspec.MsgspecError) as error:
                log.debug("dump_failed", worker=worker, error=repr(error))
            await asyncio.sleep(DUMP_AGAIN_S)


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
