"""Following a stream: everything stored on some subjects, once, in stream order, from a chosen point on.

Live messages come from the server's republished subject, which carries only what was stored, with its sequence
and the previous one of its subject: a gap shows at once and is read from the stream before going on. After a
reconnect the tail is read in any case, since a burst may have passed unseen. In a cluster the last message before a
silence may be stored without being republished (its leader died in between), and a subscription takes a moment to be
known everywhere: so a silent tail compares its position with the leader's, a second after the last message and each
five seconds.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import structlog

from infra.bus.connection import Bus
from infra.bus.direct_get import Entry, get_last, read

log = structlog.get_logger("bus")

RETRY_S = 0.25
LOOK_AGAIN_S = 0.05  # a replica may lag behind what was republished
LOOKS = 20
IDLE_S = 1.0  # of silence before a first look, in a cluster
IDLE_AGAIN_S = 5.0
MAX_HELD = 10_000  # live entries kept during a repair; beyond it they are read from the stream


class LogTail:
    """Calls ``handle`` for each entry. ``handle`` is synchronous and must not raise.

    Follow one subject, or all of a stream: of a filter that leaves some out every omission looks like a gap, and
    costs a read.

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
        self._single = "*" not in subject and ">" not in subject
        self._since_ns = 0
        self._held: deque[Entry] = deque()
        self._starting = True
        self._stale = False  # something may be stored that was not seen live
        self._repair: asyncio.Task[None] | None = None
        self._sub: Any = None
        self._idle: asyncio.Task[None] | None = None
        self.position = 0  # everything up to this sequence was handled
        self.repairs = 0

    async def start(self, *, after: int = 0, since_ns: int = 0) -> None:
        """Handle what is stored behind ``after`` (or since a time), then follow; returns when the past is done.

        Raises:
            ServingError: the stream cannot be read.
        """
        self._since_ns = since_ns
        self.position = after
        self._bus.on_reconnect.append(self._reconnected)
        try:
            # On one connection: the server knows the subscription before it answers the read.
            self._sub = await self._bus.nc.subscribe(self._live, cb=self._on_live)
            await self._read()
        except BaseException:
            await self.stop()
            raise
        self._starting = False
        self._take_held()
        if self._held or self._stale:
            self._begin_repair()
        self._idle = asyncio.create_task(self._look_when_idle(), name=f"log-idle-{self._stream}")

    async def stop(self) -> None:
        if self._reconnected in self._bus.on_reconnect:
            self._bus.on_reconnect.remove(self._reconnected)
        if self._idle is not None:
            self._idle.cancel()
            await asyncio.wait([self._idle])
        await self._stop_repair()
        if self._sub is not None and not self._bus.nc.is_closed:
            await self._sub.unsubscribe()

    async def catch_up(self) -> None:
        """Read the stream from the last handled entry to its end."""
        self._begin_repair()
        assert self._repair is not None
        await asyncio.wait([self._repair])

    async def _reconnected(self) -> None:
        """Not waited for: other hooks must not stand behind a stream that cannot be read."""
        self._stale = True
        if not self._starting:
            await self._stop_repair()  # the answer that it waits for was lost with the connection
            self._begin_repair()

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
            if len(self._held) >= MAX_HELD:
                self._held.clear()
                self._stale = True
            self._held.append(entry)
        elif self._follows(entry):
            self._deliver(entry)
        elif entry.seq > self.position:
            self._held.append(entry)
            self._begin_repair()

    def _follows(self, entry: Entry) -> bool:
        """Whether nothing that concerns us lies between the last entry and this one."""
        position = self.position
        return entry.seq == position + 1 or (self._single and entry.previous <= position < entry.seq)

    def _deliver(self, entry: Entry) -> None:
        self.position = entry.seq
        try:
            self._handle(entry)
        except Exception:
            log.exception("log_handler_failed", stream=self._stream, seq=entry.seq)

    def _take_held(self) -> None:
        """Handle held entries up to the first gap."""
        held = self._held
        while held:
            if self._follows(held[0]):
                self._deliver(held.popleft())
            elif held[0].seq <= self.position:
                held.popleft()
            else:
                return

    def _begin_repair(self) -> None:
        self._stale = True
        if self._repair is None or self._repair.done():
            self.repairs += 1
            self._repair = asyncio.create_task(self._catch_up(), name=f"log-{self._stream}")

    async def _stop_repair(self) -> None:
        if self._repair is not None:
            self._repair.cancel()
            await asyncio.wait([self._repair])

    async def _catch_up(self) -> None:
        looks = 0
        while self._stale or self._held:
            before = self.position
            self._stale = False
            try:
                await self._check_end()
                await self._read()
            except Exception as error:
                log.warning("log_repair_failed", stream=self._stream, error=repr(error))
                self._stale = True
                await asyncio.sleep(RETRY_S)
                continue
            self._take_held()
            if not self._held or self.position != before:
                looks = 0
            elif looks < LOOKS:
                looks += 1
                await asyncio.sleep(LOOK_AGAIN_S)
            else:  # stored, but removed again before it could be read (a key that was overwritten or expired)
                looks = 0
                self._deliver(self._held.popleft())
                self._take_held()

    async def _look_when_idle(self) -> None:
        pause, seen = IDLE_S, self.position
        while True:
            await asyncio.sleep(pause)
            repairing = self._repair is not None and not self._repair.done()
            if not self._bus.clustered or not self._bus.connected or repairing or self.position != seen:
                pause, seen = IDLE_S, self.position
                continue
            pause = IDLE_AGAIN_S
            try:
                entry = await get_last(self._bus, self._stream, self._subject, newest=True)
            except Exception as error:
                log.warning("log_end_unknown", stream=self._stream, error=repr(error))
                continue
            if entry is not None and entry.seq > self.position == seen:
                log.info("log_fell_behind", stream=self._stream, position=seen, end=entry.seq)
                self._begin_repair()
            seen = self.position

    async def _check_end(self) -> None:
        """Go back with a stream that was made anew or lost its end, or everything in it would look old."""
        end = (await self._bus.js.stream_info(self._stream)).state.last_seq
        if end < self.position:
            log.error("stream_truncated", stream=self._stream, position=self.position, end=end)
            self.position = 0

    async def _read(self) -> None:
        async for entry in read(self._bus, self._stream, self._subject, after=self.position, since_ns=self._since_ns):
            if entry.seq > self.position:
                self._deliver(entry)
