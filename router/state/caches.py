"""What the targets cache: the prefix index, followed from KV, and predictions for caches that send no events.

This is the shell around ``PrefixIndex`` and ``ApproximateIndex``. After a gap in a worker's events, or when it joins,
``IndexLoader`` asks it for a dump of its cache.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.configs.settings import RouterSettings
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.bus.tasks import Tasks
from penstock.infra.process.turns import TurnBudget
from penstock.router.state.holders import TargetId, TierDepths, as_dict
from penstock.router.state.prefix_index import ApproximateIndex, PrefixIndex
from penstock.router.state.snapshots import IndexSnapshots, run_in_steps
from penstock.schemas import control, kv, wire
from penstock.schemas.fleet import Registration

log = structlog.get_logger("router")

SWEEP_BLOCKS = 1_000  # of an index, at once: 1 ms
SWEEP_STEPS = 10
SNAPSHOT_S = 60.0  # between two: each has 8 bytes a block
CHECK_EVERY = 4096  # messages of the KV stream: where all routers note the index's checksum


class IndexCheck(NamedTuple):
    """The index's checksum after a message of the KV stream: equal in all routers that noted that sequence."""

    kv_seq: int
    checksum: int


class Caches:
    """
    Args:
        is_registered: whether a worker is registered.
        folded: called with each batch of KV events after the index has folded it.
        loaded: called with each worker whose whole cache was read: events before that are not.

    Attributes:
        index: None: the router does not follow KV events.
    """

    def __init__(
        self,
        bus: Bus,
        settings: RouterSettings,
        tasks: Tasks,
        *,
        is_registered: Callable[[str], bool],
        folded: Callable[[kv.KvBatch], None],
        loaded: Callable[[str], None],
    ) -> None:
        self._bus = bus
        self._tasks = tasks
        self._max_blocks = settings.max_index_blocks
        self._is_registered = is_registered
        self._on_folded = folded
        self._on_loaded = loaded
        self._predicted = ApproximateIndex(settings.max_index_blocks, settings.predicted_ttl_s)
        self.index: PrefixIndex | None = None
        self.loader: IndexLoader | None = None
        if settings.kv_events:
            self._use(PrefixIndex(settings.max_index_blocks))
        self._tail = LogTail(bus, bus.subjects.stream("KV"), bus.subjects.all("kv"), self._on_entry)
        self._snapshots = IndexSnapshots(bus, settings.name)
        self._saved = (time.monotonic(), 0)  # when, and up to which sequence
        self._seen = 0  # position of the tail, as of the last ``maintain``
        self.check = IndexCheck(0, 0)

    def _use(self, index: PrefixIndex) -> None:
        self.index = index
        self.loader = IndexLoader(self._bus, index, self._tasks, self._is_registered, self._on_loaded)

    async def start(self, now_ns: int) -> None:
        """Take the index from a snapshot if there is one, and follow KV from there; otherwise from ``now_ns`` on.

        Raises:
            ServingError: the stream cannot be read.
        """
        if self.index is None:
            return
        after = 0
        if (restored := await self._snapshots.load(self._max_blocks)) is not None:
            index, after = restored
            self._use(index)
        await self._tail.start(after=after, since_ns=0 if after else now_ns)

    async def stop(self) -> None:
        if self.loader is not None:
            await self.loader.stop()
            await self._tail.stop()

    @property
    def position(self) -> int:
        """The sequence of KV up to which the index is folded."""
        return self._tail.position

    # Decisions

    def overlaps(self, keys: Sequence[int]) -> Mapping[TargetId, int]:
        """Leading prompt blocks cached, or predicted to be, by target."""
        return self._with_predicted({} if self.index is None else self.index.match(keys), keys)

    def depths(self, keys: Sequence[int]) -> Mapping[TargetId, int]:
        """``overlaps`` for a decision that is made at once."""
        return self._with_predicted({} if self.index is None else self.index.depths(keys), keys)

    def _with_predicted(self, overlaps: Mapping[TargetId, int], keys: Sequence[int]) -> Mapping[TargetId, int]:
        predicted = self._predicted.match(keys) if len(self._predicted) else None
        if not predicted:
            return overlaps
        if isinstance(overlaps, TierDepths):
            return TierDepths({**as_dict(overlaps.device), **predicted}, overlaps.lower)
        return {**as_dict(overlaps), **predicted}

    def sent(self, worker: Registration, rank: int, keys: Sequence[int], now_ns: int) -> None:
        """A prompt was sent to a worker, which will cache it: this is a prediction if no event will say so."""
        if self.index is None or worker.silent_cache:
            self._predicted.record((worker.worker, rank), keys, now_ns / 1e9, worker.total_blocks)

    def holds(self, target_id: TargetId, key: int) -> bool:
        """Whether a target is known to hold a block."""
        return self.index is not None and self.index.holds(target_id, key)

    # Workers

    def forget_unregistered(self) -> None:
        """Workers that are in the snapshot or the tail, and left before this router started."""
        if self.index is None or self.loader is None:
            return
        for worker in self.index.workers():
            if not self._is_registered(worker):
                self.loader.forget(worker)

    def joined(self, registration: Registration) -> None:
        """A worker registered: its caches are asked for, unless they are known."""
        if self.loader is not None and registration.kv_events:
            self.loader.ensure(registration.worker, registration.dp_size)

    def left(self, worker: str) -> None:
        if self.loader is not None:
            self.loader.forget(worker)
        self._predicted.forget(worker)

    # Upkeep

    async def maintain(self, now_s: float) -> None:
        """Remove what is forgotten, and note the checksum at rest; a few times a second."""
        for index in (self.index, self._predicted):
            for _ in range(SWEEP_STEPS):
                if index is None or index.sweep(SWEEP_BLOCKS):
                    break
                await asyncio.sleep(0)
        self._predicted.expire(now_s)
        if self.position == self._seen != self.check.kv_seq:  # at rest: all routers come to the same sequence
            self._note_checksum()
        self._seen = self.position

    async def save_sometimes(self) -> None:
        """``save``, once a minute."""
        if time.monotonic() - self._saved[0] >= SNAPSHOT_S:
            await self.save()

    async def save(self) -> None:
        """Store the index for the next start, if it has changed since the last time."""
        position = self.position
        if self.index is not None and position != self._saved[1] and self._bus.connected:
            self._saved = (time.monotonic(), position)
            await self._snapshots.save(self.index, position)

    def _note_checksum(self) -> None:
        if self.index is not None:
            self.check = IndexCheck(self.position, self.index.checksum())

    def _on_entry(self, entry: Entry) -> None:
        assert self.index is not None
        assert self.loader is not None
        try:
            batch = kv.decode(entry.data)
        except msgspec.MsgspecError as error:
            log.warning("kv_batch_unreadable", seq=entry.seq, error=str(error))
            return
        if not self.index.apply(batch):
            self.loader.reload(batch.worker)
        if entry.seq % CHECK_EVERY == 0:
            self._note_checksum()
        self._on_folded(batch)


RETRY_S = 1.0
DUMP_TIMEOUT_S = 5.0  # for one page
AT_ONCE = 16  # workers asked in one turn of the event loop; about as many answer in a later one: 0.8 ms
TURN_S = 0.0015  # for asking and loading; reading the answers comes on top


class IndexLoader:
    """
    Args:
        is_registered: whether to keep asking a worker.
        loaded: called with each worker whose dump was loaded.
    """

    def __init__(
        self,
        bus: Bus,
        index: PrefixIndex,
        tasks: Tasks,
        is_registered: Callable[[str], bool],
        loaded: Callable[[str], None],
    ) -> None:
        self._bus = bus
        self._index = index
        self._tasks = tasks
        self._is_registered = is_registered
        self._on_loaded = loaded
        self._loaded: set[str] = set()  # workers whose whole cache is indexed
        self._running: dict[str, asyncio.Task[None]] = {}
        self._turns = TurnBudget(at_once=AT_ONCE, turn_s=TURN_S)  # a whole fleet may join at once

    def reload(self, worker: str) -> None:
        """Request a dump: events of the worker are missing."""
        self._loaded.discard(worker)
        self._request(worker)

    def ensure(self, worker: str, ranks: int) -> None:
        """Request a dump of a worker unless the caches of all its ranks are indexed."""
        if worker not in self._loaded and not self._index.is_complete(worker, ranks):
            self._request(worker)

    def forget(self, worker: str) -> None:
        self._index.forget(worker)
        self._loaded.discard(worker)

    async def stop(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def load(self, pages: Sequence[kv.KvDump]) -> bool:
        """Load the pages of a dump, rank by rank; False: a rank needs a newer dump."""
        complete = True
        for part in by_rank(pages):
            complete &= await run_in_steps(self._index.loading(part))
        return complete

    def _request(self, worker: str) -> None:
        if worker in self._running:
            return

        def failed(error: BaseException) -> None:  # concerns this worker only: its cache stays unknown
            log.error("worker_task_failed", worker=worker, error=repr(error), exc_info=error)

        task = self._tasks.spawn(self._load_until_known(worker), name=f"dump-{worker}", on_failure=failed)
        self._running[worker] = task
        task.add_done_callback(lambda _: self._running.pop(worker, None))

    async def _load_until_known(self, worker: str) -> None:
        await self._turns.enter()
        while self._is_registered(worker):
            try:
                pages = await self._read_pages(worker)
                await self._turns.resume()  # hundreds may answer together
                if await self.load(pages):
                    self._loaded.add(worker)
                    log.info("index_loaded", worker=worker, seq=pages[0].seq)
                    self._on_loaded(worker)
                    return
            except (NatsError, TimeoutError, msgspec.MsgspecError) as error:
                log.debug("dump_failed", worker=worker, error=repr(error))
            await asyncio.sleep(RETRY_S)
            await self._turns.enter()

    async def _read_pages(self, worker: str) -> list[kv.KvDump]:
        subject = self._bus.subjects.control(worker)
        pages: list[kv.KvDump] = []
        page = 0
        while not pages or page:
            reply = await self._bus.nc.request(subject, wire.encode(control.DumpKv(page)), timeout=DUMP_TIMEOUT_S)
            pages.append(kv.decode_dump(reply.data))
            page = pages[-1].next_page
        return pages


def by_rank(pages: Sequence[kv.KvDump]) -> list[list[kv.KvDump]]:
    """The pages of each rank; a worker sends those of one rank after those of another."""
    pages_of: dict[int, list[kv.KvDump]] = {}
    for page in pages:
        pages_of.setdefault(page.rank, []).append(page)
    return list(pages_of.values())
