"""Reads which attempts workers returned, from the messages in DONE about them."""

import asyncio
from collections.abc import Callable

import msgspec
import structlog

from infra.bus.connection import Bus
from infra.bus.direct_get import Entry
from schemas import done
from schemas.subjects import HEADER_CRASHED, HEADER_GONE, HEADER_RETURNED, request_of

log = structlog.get_logger("router")


class ReturnReader:
    """
    Args:
        returned: called with request, attempt, reason of each, and whether it crashed (``Returned.crashed``).
        gone: called with a worker whose process has ended, as its supervisor or its next life says, after that.
    """

    def __init__(self, bus: Bus, returned: Callable[[str, int, str, str], None], gone: Callable[[str], None]) -> None:
        self._bus = bus
        self._returned = returned
        self._gone = gone
        self._fetching: set[asyncio.Future[None]] = set()

    def on_entry(self, entry: Entry) -> None:
        """Handle one message; a message that cannot be read is logged."""
        header = entry.headers.get(HEADER_RETURNED)
        try:
            if header is not None:
                request = request_of(entry.headers)
                crashed = entry.headers.get(HEADER_CRASHED, "")
                self._returned(request, *done.read_returned_header(header), crashed)
                if worker := entry.headers.get(HEADER_GONE):
                    self._gone(worker)
            elif entry.data:
                self._on_body(entry.data)
            else:  # from a worker of an older release: only the body has the attempt
                task = asyncio.ensure_future(self._fetch(entry.seq))
                self._fetching.add(task)
                task.add_done_callback(self._on_fetched)
        except (msgspec.MsgspecError, ValueError) as error:
            log.warning("return_unreadable", seq=entry.seq, error=str(error))

    async def stop(self) -> None:
        for task in self._fetching:
            task.cancel()
        await asyncio.gather(*self._fetching, return_exceptions=True)

    def _on_body(self, data: bytes) -> None:
        event = done.decode(data)
        if isinstance(event, done.Returned):
            self._returned(event.request, event.attempt, event.reason, event.crashed)

    async def _fetch(self, seq: int) -> None:
        message = await self._bus.js.get_msg(self._bus.subjects.stream("DONE"), seq, direct=True)
        self._on_body(message.data or b"")

    def _on_fetched(self, task: "asyncio.Future[None]") -> None:
        self._fetching.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.warning("return_unreadable", error=repr(task.exception()))
