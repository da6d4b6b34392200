"""All requests, newest first, page by page: those in REQUESTS by their acceptance, then older records.

REQUESTS keeps a day and has every request, whatever became of it; records are kept longer. A page reads a bounded part
of the log, so it may hold fewer requests than were asked for, even none, and still not be the last. The progress of a
running request comes from the gateway that follows it: the more the log has, the longer reading it takes.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, NamedTuple

import msgspec
import structlog
from nats.errors import Error as NatsError

from penstock.gateway.request_log.inflight import InflightRequest
from penstock.gateway.request_log.lookup import Records
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get_next, read, read_backwards
from penstock.schemas import control, done, requests
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.streams import CLOCK_SKEW_NS, LONGEST_DEADLINE_S
from penstock.schemas.summary import (
    QUEUED,
    RUNNING,
    UNKNOWN,
    Criteria,
    RequestSummary,
    of_done,
    of_request,
    record_is_lost,
)
from penstock.schemas.wire import encode

log = structlog.get_logger("gateway")

ASK_S = 0.25

ReadersOf = Callable[[str], Sequence[InflightRequest]]


def progress_of(inflight: InflightRequest) -> control.Progress:
    fold = inflight.fold
    tokens = sum(fold.position(choice) for choice in range(inflight.request.n))
    return control.Progress(fold.attempt, tokens, inflight.worker, inflight.earlier_workers)


class ProgressReader:
    """``readers_of``: this gateway's open answers of a request."""

    def __init__(self, bus: Bus, gateway: str, readers_of: ReadersOf) -> None:
        self._bus = bus
        self._gateway = gateway
        self._readers = readers_of

    async def open(self) -> None:
        await self._bus.nc.subscribe(self._bus.subjects.progress(self._gateway), cb=self._answer)

    async def _answer(self, message: Any) -> None:
        progress = self.here(message.data.decode("ascii", "replace"))
        if message.reply:
            await self._bus.nc.publish(message.reply, encode(progress) if progress is not None else b"")

    def here(self, request_id: str) -> control.Progress | None:
        """The progress known to this gateway; None: it does not follow the request."""
        positions = [progress_of(inflight) for inflight in self._readers(request_id) if not inflight.behind]
        return max(positions, key=lambda each: (each.attempt, each.tokens), default=None)

    async def ask(self, gateway: str, request_id: str) -> control.Progress | None:
        """The progress known to another gateway; None: it is gone, or does not follow the request (any more)."""
        try:
            subject = self._bus.subjects.progress(gateway)
            reply = await self._bus.nc.request(subject, request_id.encode(), timeout=ASK_S)
        except (NatsError, TimeoutError) as error:
            log.debug("progress_unknown", gateway=gateway, error=repr(error))
            return None
        return control.decode_progress(reply.data) if reply.data else None


FromLog = Callable[[GenerateRequest], Awaitable[control.Progress]]

MAX_READ = 2_000  # requests that one page reads
TOGETHER = 100  # whose ends are looked up together


class Page(NamedTuple):
    """``after``: where the next page begins; "": this is the last."""

    found: list[RequestSummary]
    after: str


class _Cursor(NamedTuple):
    """After a request in REQUESTS, or after a record. ``before``: its sequence; 0: at the end of the stream.

    ``oldest_ns``: of records, when the oldest request was stored that REQUESTS had: only older ones follow.
    """

    stream: str = "REQUESTS"
    before: int = 0
    oldest_ns: int = 0

    def __str__(self) -> str:
        return f"r{self.before}" if self.stream == "REQUESTS" else f"d{self.before}.{self.oldest_ns}"

    @classmethod
    def parse(cls, text: str) -> "_Cursor":
        kind, numbers = text[:1], text[1:].split(".")
        try:
            if not text:
                return cls()
            if kind == "r":
                return cls("REQUESTS", int(numbers[0]))
            if kind == "d":
                return cls("DONE", int(numbers[0]), int(numbers[1]))
        except (ValueError, IndexError):
            pass
        raise _no_position(text)


class _Listed(NamedTuple):
    """``after``: the position after it."""

    summary: RequestSummary
    after: str


class RequestListing:
    """``from_log``: the progress of a request that no gateway follows, from its tokens in the log."""

    def __init__(self, bus: Bus, records: Records, progress: ProgressReader, from_log: FromLog) -> None:
        self._bus = bus
        self._records = records
        self._progress = progress
        self._from_log = from_log

    async def read(self, criteria: Criteria, together: int, after: str = "") -> AsyncGenerator[_Listed]:
        """All requests from the newest on or after ``after``, with those that do not meet the criteria.

        Args:
            together: this many are read at a time.
        Raises:
            ServingError: invalid_request: not a position; broker_unavailable.
        """
        async with aclosing(self._read(_Cursor.parse(after), criteria, together)) as parts:
            async for position, summaries in parts:
                for place, summary in summaries:
                    yield _Listed(summary, str(position._replace(before=place)))

    async def _read(
        self, cursor: _Cursor, criteria: Criteria, together: int
    ) -> AsyncGenerator[tuple[_Cursor, list[tuple[int, RequestSummary]]], None]:
        """Parts of the log with their sequences, and the position after each."""
        subjects = self._bus.subjects
        stored_since = criteria.since_ns - CLOCK_SKEW_NS
        if cursor.stream == "REQUESTS":
            first = await get_next(self._bus, subjects.stream("REQUESTS"), subjects.all("request"), 0)
            async for group in self._backwards("REQUESTS", subjects.all("request"), cursor.before, together):
                yield cursor._replace(before=group[-1].seq), await self._accepted(group)
                if criteria.since_ns and group[-1].time_ns < stored_since:
                    return
            cursor = _Cursor("DONE", await self._end_of_older(first), first.time_ns if first is not None else 1 << 62)
        async for group in self._backwards("DONE", subjects.all("done"), cursor.before, together):
            older = [(entry.seq, of_done(event)) for entry in group if (event := _record(entry)) is not None]
            older = [(seq, each) for seq, each in older if each.created_ns < cursor.oldest_ns - CLOCK_SKEW_NS]
            yield cursor._replace(before=group[-1].seq), older
            if criteria.since_ns and group[-1].time_ns < criteria.since_ns:
                return

    async def _backwards(
        self, name: str, subject: str, before: int, together: int
    ) -> AsyncGenerator[list[Entry], None]:
        group: list[Entry] = []
        stream = self._bus.subjects.stream(name)
        async with aclosing(read_backwards(self._bus, stream, subject, before=before, window=together)) as entries:
            async for entry in entries:
                group.append(entry)
                if len(group) == together:
                    yield group
                    group = []
        if group:
            yield group

    async def _end_of_older(self, first: Entry | None) -> int:
        """A sequence of DONE before which all requests ended that were accepted before ``first``; 0: its end."""
        if first is None:
            return 0
        stream, subject = self._bus.subjects.stream("DONE"), self._bus.subjects.all("done")
        since = first.time_ns + int(LONGEST_DEADLINE_S * 1e9)
        async with aclosing(read(self._bus, stream, subject, since_ns=since, batch=1)) as entries:
            async for entry in entries:
                return entry.seq
        return 0

    async def _accepted(self, group: Sequence[Entry]) -> list[tuple[int, RequestSummary]]:
        """The states of requests: from their records, from the gateways that follow them, or from their tokens."""
        accepted = [(entry.seq, request) for entry in group if (request := _request(entry)) is not None]
        ended = {event.request: of_done(event) for event in await self._records.ends([each for _, each in accepted])}
        running = [request for _, request in accepted if request.id not in ended]
        summaries = await asyncio.gather(*map(self._running, running))
        by_id = {each.id: each for each in summaries}
        return [(seq, ended.get(request.id) or by_id[request.id]) for seq, request in accepted]

    async def _running(self, request: GenerateRequest) -> RequestSummary:
        progress = self._progress.here(request.id) or await self._progress.ask(request.gateway, request.id)
        if progress is None:  # in the background, its client has left, or its gateway is gone
            progress = await self._from_log(request)
        lost = record_is_lost(request, self._bus.clock.now_ns())
        if progress.attempt < 1:
            return of_request(request, state=UNKNOWN if lost else QUEUED)
        summary = of_request(
            request,
            state=UNKNOWN if lost else RUNNING,
            attempt=progress.attempt,
            worker=progress.worker,
            earlier_workers=progress.earlier_workers,
        )
        return msgspec.structs.replace(summary, completion_tokens=progress.tokens)


OF_CELLS = "_"  # between the positions of several cells
ENDED = "e"  # the position of a cell that has no further requests


async def page_of(listings: Sequence[RequestListing], criteria: Criteria, limit: int, after: str = "") -> Page:
    """Up to ``limit`` requests of all cells, from the newest on or after ``after``.

    Raises:
        ServingError: invalid_request: not a position; broker_unavailable.
    """
    positions = after.split(OF_CELLS) if after else [""] * len(listings)
    if len(positions) != len(listings):
        raise _no_position(after)
    by_id: dict[str, RequestSummary] = {}
    async with AsyncExitStack() as stack:
        readers: list[AsyncGenerator[_Listed]] = []
        for listing, position in zip(listings, positions, strict=True):
            reader = listing.read(criteria, min(limit, TOGETHER), "" if position == ENDED else position)
            readers.append(await stack.enter_async_context(aclosing(reader)))
        left = [index for index, position in enumerate(positions) if position != ENDED]
        firsts = await asyncio.gather(*(anext(readers[index], None) for index in left))
        heads = {index: first for index, first in zip(left, firsts, strict=True) if first is not None}
        positions = [positions[index] if index in heads else ENDED for index in range(len(listings))]
        count = 0
        while heads:
            index = max(heads, key=lambda each: heads[each].summary.created_ns)
            summary, positions[index] = heads[index]
            count += 1
            if criteria.accepts(summary):
                by_id[summary.id] = summary  # a router may have stored it again
            if len(by_id) == limit or count == MAX_READ:
                return Page(list(by_id.values()), OF_CELLS.join(positions))
            following = await anext(readers[index], None)
            if following is None:
                positions[index] = ENDED
                del heads[index]
            else:
                heads[index] = following
    return Page(list(by_id.values()), "")


def _no_position(text: str) -> ServingError:
    return ServingError(
        Code.invalid_request, f"{text[:80]!r} is not a position: give the last page's `next_after`", param="after"
    )


def _request(entry: Entry) -> GenerateRequest | None:
    """None: of a later release."""
    try:
        return requests.decode_head(entry.data)
    except msgspec.MsgspecError:
        return None


def _record(entry: Entry) -> done.Done | None:
    try:
        event = done.decode(entry.data)
    except msgspec.MsgspecError:
        return None
    return event if isinstance(event, done.Done) else None
