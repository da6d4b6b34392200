"""Follows a stream: passes on each message of some subjects once, in stream order, from a chosen point on.

Live messages come from the server's republished subject. It has only stored messages, each with its sequence and the
previous sequence of its subject. The tail therefore detects each gap, and reads the missing messages from the stream
before it continues. After a reconnect, it always reads the stream, since it may have missed a burst.

In a cluster, the last message before a silence may be stored but not republished, if its leader was lost in between,
and a subscription takes a moment to reach every server. So a silent tail compares its position with the leader's one
second after the last message, and then every five seconds.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.client import Frame, Headers, read_republished
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get, get_last, is_replaced, read, server_ns, stream_end
from penstock.schemas.errors import ServingError

log = structlog.get_logger("bus")

RETRY_S = 0.25
REPORT_S = 60.0  # between two reports of a repair that fails for the same reason
REREAD_S = 0.05  # a replica may lag behind the republished messages
REREADS = 20
IDLE_S = 1.0  # of silence before the first comparison, in a cluster
IDLE_AGAIN_S = 5.0
MAX_HELD = 10_000  # live entries kept during a repair; more are read from the stream instead


class LogTail:
    """Calls ``handle`` for each entry.

    Guarantees: every entry that the stream keeps is handled, once and in stream order, through reconnects, restarts of
    the broker and changes of leader. Entries that the stream discards before they are read are skipped. If the stream
    was recreated or lost its end, everything in it is handled again (``stream_truncated`` in the log), also if other
    messages have taken the sequences of the lost ones.

    Follow one subject, or all of a stream: a filter that leaves out part of a stream makes every omission look like a
    gap, which costs a read.

    Args:
        handle: synchronous; an exception is logged, and the entry counts as handled.
        stream: its name.
        subject: which messages, wildcards allowed.
        on_recreated: called before everything is handled again; it may set ``since_ns``.
        live: subject to which the server republishes them; "": that of our streams.

    Attributes:
        subscription: to the republished messages, at ``live_subject``; None: it is not started.
        created: when the stream was made, as of the first check of its end; "": there was none yet.
        since_ns: messages stored before this Unix time are not handled, even when the tail starts over.
    """

    def __init__(
        self,
        bus: Bus,
        stream: str,
        subject: str,
        handle: Callable[[Entry], None],
        on_recreated: Callable[[], None] = lambda: None,
        *,
        live: str = "",
    ) -> None:
        self._bus = bus
        self._stream = stream
        self._subject = subject
        self.live_subject = live or bus.subjects.live(subject)
        self._handle = handle
        self._single = "*" not in subject and ">" not in subject
        self._on_recreated = on_recreated
        self.created = ""
        self.since_ns = 0
        self._held: deque[Entry] = deque()
        self._starting = True
        self._stopped = False
        self._stale = False  # stored entries may have been missed live
        self._rewound = 0  # the sequence from which on everything is handled again; 0: none
        self._repair: asyncio.Task[None] | None = None
        self.subscription: Any = None
        self._idle: asyncio.Task[None] | None = None
        self.position = 0  # everything up to this sequence was handled
        self._newest: Entry | None = None  # the newest handled entry
        self.repairs = 0

    @classmethod
    def of_bucket(
        cls, bus: Bus, bucket: str, handle: Callable[[Entry], None], on_recreated: Callable[[], None] = lambda: None
    ) -> Self:
        """A tail of all keys of a bucket, named as in the streams (without the namespace)."""
        name = bus.subjects.bucket(bucket)
        return cls(bus, f"KV_{name}", f"$KV.{name}.>", handle, on_recreated)

    @asynccontextmanager
    async def following(
        self, *, after: int = 0, since_ns: int = 0, memory_storage: bool = False
    ) -> AsyncIterator[Self]:
        """A context that calls ``start``, and ``stop`` at its end."""
        await self.start(after=after, since_ns=since_ns, memory_storage=memory_storage)
        try:
            yield self
        finally:
            await self.stop()

    async def start(self, *, after: int = 0, since_ns: int = 0, memory_storage: bool = False) -> None:
        """Handle the messages stored after a sequence, or since a time; then follow. Returns when those are handled.

        If it fails, it can be called again.

        Args:
            memory_storage: the stream may be lost and recreated.
        Raises:
            ServingError: the stream cannot be read.
        """
        self._stopped, self._stale = False, False
        self._held.clear()
        self.since_ns = since_ns
        self.position, self._newest = after, None
        self._bus.on_reconnect.append(self.reconnected)
        try:
            # On one connection: the server registers the subscription before it answers the read.
            self.subscription = await self._bus.nc.subscribe_direct(self.live_subject, self.on_live)
            await self._read()
            if memory_storage:
                self.created = (await stream_end(self._bus, self._stream))[1]
        except BaseException:
            await self.stop()
            raise
        self._starting = False
        self._take_held()
        if self._held or self._stale:
            self._begin_repair()
        self._idle = asyncio.create_task(self._compare_when_idle(), name=f"log-idle-{self._stream}")

    async def stop(self) -> None:
        """May be called twice, and without ``start``."""
        self._stopped = True
        if self.reconnected in self._bus.on_reconnect:
            self._bus.on_reconnect.remove(self.reconnected)
        if self._idle is not None:
            self._idle.cancel()
            await asyncio.wait([self._idle])
        await self._stop_repair()
        sub, self.subscription = self.subscription, None
        if sub is not None and not self._bus.nc.is_closed:
            await sub.unsubscribe()

    async def catch_up(self) -> None:
        """Read the stream from the last handled entry to its end."""
        self._begin_repair()
        assert self._repair is not None
        await asyncio.wait([self._repair])

    def rewind(self, seq: int) -> None:
        """Handle entries from an earlier sequence on again."""
        if seq <= self.position:
            log.error("log_rewound", stream=self._stream, position=self.position, to=seq)
            self._rewound = min(seq, self._rewound or seq)
            self._begin_repair()

    async def reconnected(self) -> None:
        """Starts a repair without waiting for it: a stream that cannot be read must not delay other hooks."""
        self._stale = True
        if not self._starting:
            await self._stop_repair()  # the answer that it awaits was lost with the connection
            self._begin_repair()

    def on_live(self, frame: Frame) -> None:
        stored = read_republished(frame.headers)
        if stored is None:
            return  # published to the live subject by a client, not republished by the server
        subject, seq, previous = stored
        entry = Entry(subject, seq, frame.data, Headers(frame.headers), previous)
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
        elif not entry.previous or self._is_newer(entry):  # the stream may have been recreated, or lost its end
            self._begin_repair()

    def _follows(self, entry: Entry) -> bool:
        """Whether no entry is missing between the last one and this one."""
        position = self.position
        return entry.seq == position + 1 or (self._single and entry.previous <= position < entry.seq)

    def _is_newer(self, entry: Entry) -> bool:
        """Whether an entry was stored after all handled ones, whatever its sequence."""
        return self._newest is not None and server_ns(entry) > server_ns(self._newest)

    def _deliver(self, entry: Entry) -> None:
        self.position, self._newest = entry.seq, entry
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
                self._stale |= self._is_newer(held.popleft())
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
        rereads = 0
        reported, since = "", 0.0
        while self._stale or self._held:
            before = self.position
            self._stale = False
            if self._rewound:
                self.position, self._rewound = min(self.position, self._rewound - 1), 0
            try:
                await self._check_end()
                await self._read()
            except Exception as error:
                if repr(error) != reported or time.monotonic() - since > REPORT_S:
                    reported, since = repr(error), time.monotonic()
                    log.warning("log_repair_failed", stream=self._stream, error=reported)
                self._stale = True
                await asyncio.sleep(RETRY_S)
                continue
            if reported:
                log.info("log_repaired", stream=self._stream)
                reported = ""
            self._take_held()
            if not self._held or self.position != before:
                rereads = 0
            elif rereads < REREADS:
                rereads += 1
                await asyncio.sleep(REREAD_S)
            else:  # removed before it could be read (a key that was overwritten or expired)
                rereads = 0
                self._deliver(self._held.popleft())
                self._take_held()

    async def _compare_when_idle(self) -> None:
        pause, seen = IDLE_S, self.position
        with contextlib.suppress(NatsError, TimeoutError, OSError, ServingError):  # not needed to start
            self.created = self.created or (await stream_end(self._bus, self._stream))[1]
            if seen and self._newest is None:
                first = await get(self._bus, self._stream, seen)
                self._newest = self._newest or first
        while not self._stopped:  # before Python 3.12, a cancellation can get lost within a request
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
        """Start over with a stream that was recreated or lost its end: otherwise, all messages would look old."""
        end, created = await stream_end(self._bus, self._stream)
        recreated = bool(self.created) and created != self.created
        self.created = created
        cut = recreated or end < self.position
        if cut or (self._newest is not None and await is_replaced(self._bus, self._stream, self._newest)):
            log.error("stream_truncated", stream=self._stream, position=self.position, end=end, recreated=recreated)
            self.position, self._newest = 0, None
            self._on_recreated()

    async def _read(self) -> None:
        async for entry in read(self._bus, self._stream, self._subject, after=self.position, since_ns=self.since_ns):
            if entry.seq > self.position:
                self._deliver(entry)
