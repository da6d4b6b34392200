"""Loads the prefix index with the KV caches of workers: asks for a dump after a gap, or when a worker joins."""

import asyncio
from collections.abc import Callable, Generator, Sequence

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.loop_lag import TurnBudget
from penstock.infra.bus.tasks import Tasks
from penstock.router.state.prefix_index import PrefixIndex
from penstock.schemas import control, kv, wire

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
