"""Counts the usage of ended requests: folds the records of a cell's log into its ledger (``penstock.schemas.usage``).

The router that owns the models without workers counts for its cell. Two that count at the same time are harmless: the
broker refuses a write that is based on an old part of the ledger, and its router then reads the newest part and
continues after it. So a crash, or a lost answer of the broker, costs a second read of the records since the last write.

Records are counted by their headers, which every router receives anyway. Records that arrived while no router counted
are read from the log.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, before_time, get, get_last, get_next, lifetime, read, server_ns
from penstock.infra.bus.jetstream import compare_and_set
from penstock.infra.process.turns import TimeSlice
from penstock.schemas import usage
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import HEADER_SUMMARY
from penstock.schemas.summary import SUMMARY_WORDS, RequestSummary, of_encoded_done, of_headers
from penstock.schemas.usage import CountedEnd, UsagePart, following, grown, resumed
from penstock.schemas.wire import encode

log = structlog.get_logger("router")

COUNT_S = 1.0  # between two writes of the ledger
WRITE_S = 5.0
TOGETHER = 500  # records that are read and counted at a time
REPORT_S = 60.0


class UsageLedger:
    """
    Args:
        ended: records as they are read, in the log's order. It is bounded: when it is full, records were lost.
        leads: whether this router counts for its cell.
    """

    def __init__(self, bus: Bus, ended: "deque[Entry]", leads: Callable[[], bool]) -> None:
        self._bus = bus
        self._ended = ended
        self._leads = leads
        self._records = bus.subjects.stream("DONE")
        self._part: UsagePart | None = None  # the open part; None: it has to be read
        self._stale = False  # read the part again before the next count
        self._revision = 0  # of that part in the stream; 0: not stored yet
        self._reported = 0.0
        self._time_slice = TimeSlice()

    async def run(self) -> None:
        """Count until cancelled."""
        self._bus.on_reconnect.append(self._read_again)
        try:
            while True:
                await asyncio.sleep(COUNT_S)
                try:
                    await self.count()
                except (ServingError, NatsError, OSError, TimeoutError, msgspec.MsgspecError) as error:
                    self._part = None
                    self._report(str(error) or repr(error))
                except Exception:  # the router places requests without the ledger
                    self._part = None
                    log.exception("usage_count_failed")
        finally:
            self._bus.on_reconnect.remove(self._read_again)

    async def count(self) -> None:
        """Count the records since the last call.

        Raises:
            ServingError, NatsError, OSError, TimeoutError, msgspec.MsgspecError: the write was not confirmed.
        """
        entries, missed = list(self._ended), len(self._ended) == self._ended.maxlen
        self._ended.clear()
        stale, self._stale = self._stale, False
        if not self._leads():
            self._part = None
        elif stale or self._part is None or missed or (entries and entries[-1].seq <= self._part.last):
            # ``_resume`` reads these entries, too. If they are older than the counted ones, the log was recreated, or
            # ``_resume`` has read them before.
            await self._resume()
        elif entries:
            counted = []
            for entry in entries:
                counted.append(await self._counted(entry))
                await self._time_slice.yield_if_spent()
            await self._store(counted)

    async def _read_again(self) -> None:
        """Read the ledger again before the next count: after a reconnect, the log may have changed."""
        self._stale = True

    async def _resume(self) -> None:
        """Find the end of the ledger, and count the records in the log after it."""
        bus, subjects = self._bus, self._bus.subjects
        newest = await get_last(bus, subjects.stream("USAGE"), subjects.all("usage"), newest=True)
        part = usage.decode(newest.data) if newest is not None else None
        there = await lifetime(bus, self._records)
        first = await get_next(bus, self._records, ">", 0) if there.first <= there.end else None
        position = await self._position(part, there.end, first is None) if part is not None else 0
        closed, after = resumed(part, position, there.first, server_ns(first) if first is not None else 0)
        revision = newest.seq if newest is not None else 0
        if closed is not None:
            await self._write(closed, revision)
        self._revision = revision if part is not None and after.number == part.number else 0
        if after.gap is not None:
            log.warning("usage_missed", messages=after.gap.messages, since_ns=after.gap.since_ns)
        self._part = after
        if after.gap is not None or part is None:
            await self._write(after, self._revision)
        portion: list[CountedEnd] = []
        began = time.monotonic()
        async for entry in read(bus, self._records, subjects.all("done"), after=after.last, batch=TOGETHER):
            portion.append(await self._counted(entry))
            await self._time_slice.yield_if_spent()
            if len(portion) == TOGETHER:
                await self._store(portion)
                portion = []
                await asyncio.sleep(time.monotonic() - began)  # leave half of the time to requests
                began = time.monotonic()
        await self._store(portion)

    async def _position(self, part: UsagePart, end: int, empty: bool) -> int:
        """The last sequence that was counted and is still in the log, which may have lost its end or been recreated."""
        if empty or not part.last:
            return min(part.last, end)
        last = await get(self._bus, self._records, part.last)
        if last is not None and server_ns(last) == part.counted_ns:
            return part.last
        return min(part.last, await before_time(self._bus, self._records, part.counted_ns + 1))

    async def _counted(self, entry: Entry) -> CountedEnd:
        return usage.count(entry.seq, server_ns(entry), entry.headers, await self._summary(entry))

    async def _summary(self, entry: Entry) -> RequestSummary | None:
        """The summary of a record; read from the body for records of earlier releases, whose headers have less."""
        found = of_headers(entry.subject, entry.headers)
        if found is not None and entry.headers[HEADER_SUMMARY].count(" ") + 1 >= SUMMARY_WORDS:
            return found
        stored = entry if entry.data else await get(self._bus, self._records, entry.seq)
        try:
            return of_encoded_done(stored.data, RequestSummary) if stored is not None else found
        except msgspec.MsgspecError:  # of a later release
            return found

    async def _store(self, counted: Iterable[CountedEnd]) -> None:
        assert self._part is not None
        part, left = grown(self._part, counted)
        if part != self._part:
            await self._write(part, self._revision)
        while left:
            part, left = grown(following(part), left)
            await self._write(part, 0)

    async def _write(self, part: UsagePart, revision: int) -> None:
        """Store a part that replaces a revision (0: a new part).

        Raises:
            ServingError: ``broker_unavailable``; it was not stored, for example because another router stored one.
        """
        reply = await compare_and_set(
            self._bus.nc, self._bus.subjects.usage(part.number), encode(part), revision, WRITE_S
        )
        if reply.error is not None:
            raise ServingError(Code.broker_unavailable, f"the ledger of usage was not stored: {reply.error}")
        self._part, self._revision = part, reply.seq

    def _report(self, error: str) -> None:
        if time.monotonic() - self._reported > REPORT_S:
            self._reported = time.monotonic()
            log.warning("usage_not_counted", error=error, action="run `penstock streams apply`")
