"""What the targets cache: the prefix index, followed from KV, and predictions for caches that send no events.

This is the shell around ``PrefixIndex`` and ``ApproximateIndex``.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import structlog

from penstock.configs.settings import RouterSettings
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.bus.tasks import Tasks
from penstock.router.state.approximate import ApproximateIndex
from penstock.router.state.depths import TargetId, as_dict
from penstock.router.state.loader import IndexLoader, IndexSnapshots
from penstock.router.state.prefix_index import PrefixIndex
from penstock.schemas import kv
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
        subject = bus.subjects.all("kv")
        self._tail = LogTail(bus, bus.subjects.stream("KV"), subject, bus.subjects.live(subject), self._on_entry)
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
        return {**as_dict(overlaps), **predicted} if predicted else overlaps

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
