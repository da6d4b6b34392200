"""Following a stream: everything stored on some subjects, once, in order, from a chosen point on.

Live messages come from the server's republished subject, which carries only what was stored, with the previous
sequence of its subject: a gap shows at once and is read from the stream before going on. After a reconnect the
tail is read in any case, since a burst may have passed unseen.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import structlog
from nats.errors import Error as NatsError

from configs.bus.connection import Bus
from configs.bus.read import Entry, read
from schemas.errors import ServingError

log = structlog.get_logger("bus")

RETRY_S = 0.25


class LogTail:
    """Calls ``handle`` for each entry. ``handle`` is synchronous and must not raise.

    Args:
        stream: its name.
        subject: which messages, wildcards allowed.
        live: where the server republishes them.
    """

    def __init__(self, bus: Bus, stream: str, subject: str, live: str, handle: Callable[[Entry], None]) -> None:
        self._bus = bus
        self._stream = stream
        self._subject = subject
        self._live = live
        self._handle = handle
        self._seen: dict[str, int] = {}  # subject -> last sequence handled
        self._complete = 0  # everything up to this sequence was handled
        self._held: list[Entry] = []
        self._repair: asyncio.Task[None] | None = None
        self._sub: Any = None
        self._starting = True
        self.position = 0  # sequence of the last entry handled
        self.repairs = 0

    async def start(self, *, after: int = 0, since_ns: int = 0) -> None:
        """Handle what is stored behind ``after`` (or since a time), then follow; returns when the past is done.

        Raises:
            ServingError: the stream cannot be read.
        """
        self._sub = await self._bus.nc.subscribe(self._live, cb=self._on_live)
        await self._bus.nc.flush()
        self.position = self._complete = after
        self._repair = asyncio.create_task(self._catch_up(since_ns, first=True), name=f"log-{self._stream}")
        self._starting = False
        await self._repair
        self._bus.on_reconnect.append(self.catch_up)

    async def stop(self) -> None:
        if self.catch_up in self._bus.on_reconnect:
            self._bus.on_reconnect.remove(self.catch_up)
        if self._repair is not None:
            self._repair.cancel()
            with contextlib.suppress(asyncio.CancelledError, ServingError):
                await self._repair
        if self._sub is not None and not self._bus.nc.is_closed:
            await self._sub.unsubscribe()

    async def catch_up(self) -> None:
        """Read the stream from the last handled entry on; a repair under way is waited for first."""
        if self._repair is not None and not self._repair.done():
            await asyncio.wait([self._repair])
        self._begin_repair()
        if self._repair is not None:
            await asyncio.wait([self._repair])

    async def _on_live(self, message: Any) -> None:
        headers = message.headers
        if headers is None:
            return  # not republished by the server: somebody published to the live subject
        try:
            entry = Entry(
                headers["Nats-Subject"],
                int(headers["Nats-Sequence"]),
                message.data,
                headers,
                int(headers["Nats-Last-Sequence"]),
            )
        except (KeyError, ValueError):
            return
        if self._starting or (self._repair is not None and not self._repair.done()):
            self._held.append(entry)
        else:
            self._take(entry)

    def _take(self, entry: Entry) -> None:
        if entry.seq <= self.position:
            return
        if entry.previous > max(self._seen.get(entry.subject, 0), self._complete):
            self._held.append(entry)
            self._begin_repair()
            return
        self._deliver(entry)

    def _deliver(self, entry: Entry) -> None:
        self._seen[entry.subject] = self.position = entry.seq
        try:
            self._handle(entry)
        except Exception:
            log.exception("log_handler_failed", stream=self._stream, seq=entry.seq)

    def _begin_repair(self) -> None:
        if self._repair is None or self._repair.done():
            self.repairs += 1
            self._repair = asyncio.create_task(self._catch_up(0), name=f"log-{self._stream}")

    async def _catch_up(self, since_ns: int, first: bool = False) -> None:
        end = 0
        while True:
            try:
                if since_ns:  # what lies before the start counts as handled
                    end = (await self._bus.js.stream_info(self._stream)).state.last_seq
                async for entry in read(
                    self._bus, self._stream, self._subject, after=self.position, since_ns=since_ns
                ):
                    if entry.seq > self.position:
                        self._deliver(entry)
                break
            except (ServingError, NatsError, TimeoutError) as error:
                if first:
                    raise
                log.warning("log_repair_failed", stream=self._stream, error=repr(error))
                await asyncio.sleep(RETRY_S)
        self._complete = self.position = max(self.position, end)
        self._seen.clear()
        held, self._held = self._held, []
        for index, entry in enumerate(held):
            if entry.seq <= self.position:
                continue
            if entry.previous > max(self._seen.get(entry.subject, 0), self._complete):
                self._held = held[index:] + self._held
                # Still a gap: the missing entries may be stored but not yet readable; look again shortly.
                await asyncio.sleep(0.01)
                return await self._catch_up(0)
            self._deliver(entry)
        return None
