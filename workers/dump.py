"""The cache's names for a router that missed some, as one picture shown in pages that fit a message."""

import asyncio
from typing import Any

from schemas import kv
from workers.runner import EngineThread

ANSWER_S = 5.0
EVENT_BYTES = 64  # what an event takes besides its digests

Picture = tuple[list[list[kv.KvEvent]], int]


class Dumper:
    """Page 0 takes the picture, the others show the rest of it."""

    def __init__(self, engine: EngineThread, worker: str, epoch: int) -> None:
        self._engine = engine
        self._worker = worker
        self._epoch = epoch
        self._picture: Picture = ([[]], -1)

    async def page(self, number: int, limit_bytes: int) -> kv.KvDump:
        """
        Raises:
            TimeoutError: the engine did not get round to it.
        """
        if number == 0:
            events, seq = await self._ask()
            self._picture = (in_pages(events, limit_bytes), seq)
        pages, seq = self._picture
        shown = tuple(pages[number]) if number < len(pages) else ()
        more = number + 1 if number + 1 < len(pages) else 0
        return kv.KvDump(self._worker, self._epoch, seq, shown, next_page=more)

    async def _ask(self) -> tuple[list[kv.KvEvent], int]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[list[kv.KvEvent], int]] = loop.create_future()

        def answer(events: list[kv.KvEvent], seq: int) -> None:
            loop.call_soon_threadsafe(_resolve, future, (events, seq))

        self._engine.dump(answer)
        return await asyncio.wait_for(future, ANSWER_S)


def _resolve(future: "asyncio.Future[Any]", value: Any) -> None:
    if not future.done():
        future.set_result(value)


def in_pages(events: list[kv.KvEvent], limit_bytes: int) -> list[list[kv.KvEvent]]:
    """Events in pages of about ``limit_bytes`` each, in order."""
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
