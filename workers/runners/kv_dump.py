"""Dumps the names in the prefix cache for routers that missed events: one snapshot, in pages that fit a message."""

import asyncio
from typing import Any, NamedTuple

from penstock.schemas import kv
from penstock.workers.engine_loop.loop import EngineLoop
from penstock.workers.engine_loop.sequence_state import CacheSnapshot

ANSWER_S = 5.0
EVENT_BYTES = 64  # of an event without its digests


class Page(NamedTuple):
    rank: int
    seq: int
    events: list[kv.KvEvent]


class Dumper:
    """Page 0 takes a snapshot of all ranks at once; later pages are the rest of it, rank by rank."""

    def __init__(self, engine: EngineLoop, worker: str, epoch: int) -> None:
        self._engine = engine
        self._worker = worker
        self._epoch = epoch
        self._pages: list[Page] = []

    async def page(self, number: int, limit_bytes: int) -> kv.KvDump:
        """
        Raises:
            TimeoutError: the engine did not answer in time.
        """
        if number == 0:
            names = await self._ask()
            self._pages = [
                Page(rank, seq, page)
                for rank, (events, seq) in enumerate(names)
                for page in in_pages(events, limit_bytes)
            ]
        rank, seq, events = self._pages[number] if number < len(self._pages) else Page(0, -1, [])
        more = number + 1 if number + 1 < len(self._pages) else 0
        return kv.KvDump(self._worker, self._epoch, seq, tuple(events), rank, more)

    async def _ask(self) -> list[CacheSnapshot]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[CacheSnapshot]] = loop.create_future()

        def answer(names: list[CacheSnapshot]) -> None:
            loop.call_soon_threadsafe(_resolve, future, names)

        self._engine.dump(answer)
        return await asyncio.wait_for(future, ANSWER_S)


def _resolve(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():
        future.set_result(value)


def in_pages(events: list[kv.KvEvent], limit_bytes: int) -> list[list[kv.KvEvent]]:
    """Events in pages of about ``limit_bytes`` each, in order; at least one."""
    pages: list[list[kv.KvEvent]] = [[]]
    size = 0
    for event in events:
        cost = EVENT_BYTES + len(getattr(event, "digests", b""))
        if size + cost > limit_bytes and pages[-1]:
            pages.append([])
            size = 0
        pages[-1].append(event)
        size += cost
    return pages
