"""Loads the prefix index with the KV caches of workers: asks for a dump after a gap, or when a worker joins.

What a router knows, in the object store: a restart reads the tail of the logs instead of their last hour.

Snapshots are made in parts, and the event loop runs in between. Each part is stored after its length.
"""

import asyncio
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.object_store import get, replace
from penstock.infra.bus.tasks import Tasks
from penstock.infra.process.turns import TurnBudget
from penstock.router.state.load import LoadState, merge
from penstock.router.state.prefix_index import PrefixIndex, encoding, read_head, restoring
from penstock.schemas import control, kv, wire
from penstock.schemas.errors import Code, ServingError

log = structlog.get_logger("router")

RETRY_S = 1.0
TIMEOUT_S = 5.0  # for one page
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
            reply = await self._bus.nc.request(subject, wire.encode(control.DumpKv(page)), timeout=TIMEOUT_S)
            pages.append(kv.decode_dump(reply.data))
            page = pages[-1].next_page
        return pages


def by_rank(pages: Sequence[kv.KvDump]) -> list[list[kv.KvDump]]:
    """The pages of each rank; a worker sends those of one rank after those of another."""
    pages_of: dict[int, list[kv.KvDump]] = {}
    for page in pages:
        pages_of.setdefault(page.rank, []).append(page)
    return list(pages_of.values())


async def run_in_steps(steps: Generator[None, None, bool]) -> bool:
    """Run a generator to its end, and everything else that is due after each of its steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bool(end.value)
        await asyncio.sleep(0)


_TIMEOUT_S = 5.0
_INDEX_TIMEOUT_S = 30.0  # it has 8 bytes a block
_MOST_BYTES = 1 << 30  # as much as the bucket holds
_LENGTH = 4  # bytes


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True):
    """The head of a snapshot: the fold of WORK and DONE up to these sequences, and perhaps somewhat further."""

    taken_ns: int
    work_seq: int
    done_seq: int
    returned_seq: int


_decode_part = wire.decoder(LoadState)
_decode = wire.decoder(Snapshot)


class Snapshots:
    """One object per router name, replaced by newer ones. Losing it only makes the next start slower."""

    def __init__(self, bus: Bus, router: str) -> None:
        self._bus = bus
        self._name = f"fleet-{router or 'router'}"

    async def load(self) -> tuple[Snapshot, LoadState] | None:
        try:
            stored = await get(self._bus, "snapshots", self._name, limit=_MOST_BYTES, newest=True, timeout=_TIMEOUT_S)
            head, *parts = _split(stored)
            return _decode(head), merge(map(_decode_part, parts))
        except (ServingError, msgspec.MsgspecError, ValueError) as error:
            log.info("no_snapshot", reason=repr(error)[:200])
            return None

    async def save(self, head: Snapshot, state: Iterable[LoadState]) -> None:
        """
        Args:
            state: ``LoadTracker.parts``.
        """
        parts = [_prefixed(wire.encode(head))]
        for part in state:
            parts.append(_prefixed(wire.encode(only_logged(part))))
            await asyncio.sleep(0)
        try:
            await replace(self._bus, "snapshots", self._name, parts, timeout=_TIMEOUT_S)
        except ServingError as error:
            log.warning("snapshot_not_saved", error=error.message)


class IndexSnapshots:
    """The prefix index, one object per router name. Losing it only makes the next start ask all workers for dumps."""

    def __init__(self, bus: Bus, router: str) -> None:
        self._bus = bus
        self._name = f"index-{router or 'router'}"

    async def load(self, max_blocks: int) -> tuple[PrefixIndex, int] | None:
        """The stored index and the KV sequence up to which it was folded.

        None: there is none, or it is damaged, or the stream does not have everything after it any more.
        """
        began = time.monotonic()
        try:
            data = await get(
                self._bus, "snapshots", self._name, limit=_MOST_BYTES, newest=True, timeout=_INDEX_TIMEOUT_S
            )
            parts = _split(data)
            head = read_head(next(parts))
            await self._check_stream(head.kv_seq)
            index = PrefixIndex(max_blocks)
            if await run_in_steps(restoring(index, head, parts)):
                log.info("index_restored", kv_seq=head.kv_seq, blocks=index.blocks, seconds=time.monotonic() - began)
                return index, head.kv_seq
            log.warning("index_snapshot_wrong", kv_seq=head.kv_seq, expected=head.checksum, found=index.checksum())
        except (ServingError, msgspec.MsgspecError, ValueError, LookupError) as error:
            log.info("no_index_snapshot", reason=repr(error)[:200])
        return None

    async def save(self, index: PrefixIndex, kv_seq: int) -> None:
        parts = []
        for part in encoding(index, kv_seq, time.time_ns()):
            parts.append(_prefixed(part))
            await asyncio.sleep(0)
        try:
            await replace(self._bus, "snapshots", self._name, parts, timeout=_INDEX_TIMEOUT_S)
        except ServingError as error:
            log.warning("index_snapshot_not_saved", error=error.message)

    async def _check_stream(self, kv_seq: int) -> None:
        """
        Raises:
            ServingError: the KV stream cannot be read, or does not go on where the snapshot ends.
        """
        try:
            state = (await self._bus.js.stream_info(self._bus.subjects.stream("KV"))).state
        except Exception as error:
            raise ServingError(Code.broker_unavailable, f"the KV stream cannot be read: {error!r}") from error
        if not state.first_seq <= kv_seq + 1 <= state.last_seq + 1:
            raise ValueError(f"the KV stream has {state.first_seq} to {state.last_seq}, the snapshot ends at {kv_seq}")


def _prefixed(part: bytes) -> bytes:
    return len(part).to_bytes(_LENGTH, "little") + part


def _split(data: bytes) -> Iterator[bytes]:
    """
    Raises:
        ValueError: the data is truncated, or no snapshot.
    """
    at = 0
    while at < len(data) or not at:
        size = int.from_bytes(data[at : at + _LENGTH], "little")
        at += _LENGTH + size
        if not size or at > len(data):
            raise ValueError(f"no snapshot: {len(data)} bytes, a part ends at {at}")
        yield data[at - size : at]


def only_logged(part: LoadState) -> LoadState:
    """Without decisions of this router that were not read from the log: their jobs may never be stored."""
    if all(entry.echoed for entry in part.unfinished):
        return part
    return msgspec.structs.replace(part, unfinished=tuple(entry for entry in part.unfinished if entry.echoed))
