"""All token streams that a gateway reads: its own, and others, each while it has readers.

Others belong to gateways whose requests are re-attached here, or carry the output of requests with ``no_store``: one of
each gateway, this one's too.

Readers that have fallen behind read the log. A client that attaches to a request, or continues after a pause, needs
entries that are no longer sent live. A pass begins at the earliest entry that one of its readers needs, feeds all of
them, and ends when they are live again. Later readers join it unless it has passed their first entry; then they wait
for the next. So the log is read a few times, however many clients attach.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing

import structlog

from penstock.gateway.request_log.inflight import InflightRequest
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get_last, read
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.bus.tasks import Tasks, as_serving_error
from penstock.infra.process.turns import TimeSlice
from penstock.schemas import tokens
from penstock.schemas.errors import ServingError
from penstock.schemas.streams import CLOCK_SKEW_NS
from penstock.schemas.subjects import MEMORY

log = structlog.get_logger("gateway")

MAX_PASSES = 3  # at a time, of one gateway's tokens
GATHER_S = 0.01  # before a pass begins, so that readers that arrive together share it
LOOK_AGAIN_S = 0.05  # a replica may lag behind the republished messages
LOOKS = 20
RETRY_S = 0.25
GIVE_UP_S = 15.0


class _Pass:
    """One read of the log, from the earliest entry that one of its readers needs."""

    def __init__(self, readers: Iterable[InflightRequest]) -> None:
        self.by_request: dict[str, list[InflightRequest]] = {}
        for inflight in readers:
            self.add(inflight)
        self.seq = min(inflight.seq for inflight in self.readers)  # everything up to here was read, or is not needed
        self.since_ns = min(map(_since, self.readers))  # where it begins, if ``seq`` does not say it
        self.last: Entry | None = None  # that was read
        self.ending = False  # readers can no longer join

    @property
    def readers(self) -> list[InflightRequest]:
        return [inflight for readers in self.by_request.values() for inflight in readers]

    def serves(self, inflight: InflightRequest) -> bool:
        """Whether everything that the in-flight request needs is still to be read."""
        if self.ending:
            return False
        if inflight.seq:
            return 0 < self.seq <= inflight.seq
        if self.last is not None:
            return _since(inflight) > self.last.time_ns > 0
        return not self.seq and _since(inflight) >= self.since_ns

    def add(self, inflight: InflightRequest) -> None:
        self.by_request.setdefault(inflight.request.id, []).append(inflight)

    def remove(self, inflight: InflightRequest) -> None:
        readers = self.by_request.get(inflight.request.id, [])
        if inflight in readers:
            readers.remove(inflight)
            if not readers:
                del self.by_request[inflight.request.id]

    def feed(self, entry: Entry) -> None:
        """Feed one entry to the readers that need it."""
        seq, subscribed = entry.seq, self.by_request
        batch = tokens.decode(entry.data)
        for item in batch.items:
            readers = subscribed.get(item.request)
            if readers is not None:
                for inflight in list(readers):
                    if item.tokens and batch.worker != inflight.worker and seq > inflight.seq:
                        inflight.note_worker(batch.worker, item.attempt)
                    if item.finish is not None:
                        inflight.end = entry
                    if seq > inflight.seq and not inflight.feed_past(item, seq):
                        self.remove(inflight)
        self.seq, self.last = seq, entry


class CatchUp:
    """Of one gateway's tokens.

    Args:
        position: up to which sequence of the stream everything was fed live.
    """

    def __init__(self, bus: Bus, stream: str, subject: str, tasks: Tasks, position: Callable[[], int]) -> None:
        self._bus = bus
        self._stream = stream
        self._subject = subject
        self._tasks = tasks
        self._position = position
        self._waiting: list[InflightRequest] = []
        self._passes: set[_Pass] = set()
        self._running = 0
        self._gathering = False
        self.read_entries = 0

    def add(self, inflight: InflightRequest) -> None:
        """Feed a reader the items that it has missed, until it is live again. It fails if the log cannot be read."""
        for running in self._passes:
            if running.serves(inflight):
                running.add(inflight)
                return
        self._waiting.append(inflight)
        self._begin()

    def remove(self, inflight: InflightRequest) -> None:
        if inflight in self._waiting:
            self._waiting.remove(inflight)
        for running in self._passes:
            running.remove(inflight)

    def start_over(self) -> None:
        """The stream was recreated."""
        for running in self._passes:
            running.seq, running.last = 0, None

    def _begin(self) -> None:
        if self._waiting and not self._gathering and self._running < MAX_PASSES:
            self._gathering = True
            self._running += 1
            self._tasks.spawn(self._gather(), name="catch-up", on_failure=self._failed)

    def _failed(self, error: BaseException) -> None:
        """A pass failed unexpectedly: its requests fail, the gateway keeps running."""
        log.error("catch_up_failed", exc_info=error)
        self._fail(self._waiting, error)

    async def _gather(self) -> None:
        try:
            await asyncio.sleep(GATHER_S)
            self._gathering = False
            # Positions in time and in the stream cannot be compared: one kind at a time, the larger one first.
            placed = [inflight for inflight in self._waiting if inflight.seq]
            others = [inflight for inflight in self._waiting if not inflight.seq]
            first, self._waiting = (placed, others) if len(placed) > len(others) else (others, placed)
            self._begin()
            if first:
                await self._run(_Pass(first))
        finally:
            self._gathering = False
            self._running -= 1
            self._begin()

    async def _run(self, one: _Pass) -> None:
        self._passes.add(one)
        try:
            await self._read(one)
        except Exception as error:
            if not isinstance(error, ServingError):
                log.exception("catch_up_failed", subject=self._subject)
            self._fail(one.readers, error)
        finally:
            self._passes.discard(one)

    def _fail(self, readers: Iterable[InflightRequest], error: BaseException) -> None:
        for inflight in list(readers):
            inflight.fail(as_serving_error(error, "reading the token log"))

    async def _read(self, one: _Pass) -> None:
        """Read up to the present end, until all readers are live.

        Raises:
            ServingError: the log cannot be read for longer than a broker takes to come back.
        """
        failing_since, looks, target = 0.0, 0, -1
        while one.by_request:
            try:
                await self._read_once(one)
                failing_since = 0.0
            except ServingError:
                now = time.monotonic()
                failing_since = failing_since or now
                if now - failing_since > GIVE_UP_S:
                    raise
                await asyncio.sleep(RETRY_S)
                continue
            if not one.ending:
                # From here on live items are kept. Earlier items that were not read yet are read once more.
                one.ending, target = True, self._position()
                for inflight in one.readers:
                    inflight.hold()
            if one.seq >= target or looks >= LOOKS:  # what cannot be read by now was removed
                self._join(one)
                return
            looks += 1
            if looks > 1:
                await asyncio.sleep(LOOK_AGAIN_S)

    async def _read_once(self, one: _Pass) -> None:
        time_slice = TimeSlice()
        stored = read(self._bus, self._stream, self._subject, after=one.seq, since_ns=one.since_ns)
        async with aclosing(stored) as entries:
            async for entry in entries:
                one.feed(entry)
                self.read_entries += 1
                if not one.by_request:
                    return
                await time_slice.yield_if_spent()

    def _join(self, one: _Pass) -> None:
        for inflight in one.readers:
            inflight.seq = max(inflight.seq, one.seq)
            if not inflight.join():
                self._waiting.append(inflight)
        self._begin()


def _since(inflight: InflightRequest) -> int:
    return inflight.request.created_ns - CLOCK_SKEW_NS


class TokenSubscription:
    """Follows one token subject. Close it after its last reader."""

    def __init__(self, bus: Bus, address: str, tasks: Tasks) -> None:
        self._bus = bus
        self._tasks = tasks.group(f"tokens-{address}")
        self._readers: dict[str, list[InflightRequest]] = {}
        stream, subject = bus.subjects.tokens_stream(address), bus.subjects.tokens(address)
        self._stream, self._subject = stream, subject
        self._in_memory = stream != bus.subjects.stream("TOKENS")
        self.on_read: Callable[[int], None] | None = None  # called with the sequence of each message
        self.tail = LogTail(bus, stream, subject, self._on_entry, self._start_over)
        self.catch_up = CatchUp(bus, stream, subject, self._tasks, lambda: self.tail.position)

    async def start(self, *, new: bool = False) -> None:
        """Follow from the present end on, which is a place in the stream: a time would be by this gateway's clock.

        Args:
            new: nothing was stored yet on this subject.
        Raises:
            ServingError: the stream cannot be read.
        """
        last = None if new else await get_last(self._bus, self._stream, self._subject)
        after = last.seq if last is not None else 0
        await self.tail.start(after=after, memory_storage=self._in_memory)

    async def close(self) -> None:
        await self._tasks.aclose()
        await self.tail.stop()

    @property
    def readers(self) -> list[InflightRequest]:
        return [inflight for readers in self._readers.values() for inflight in readers]

    def __len__(self) -> int:
        return len(self._readers)

    def readers_of(self, request_id: str) -> Sequence[InflightRequest]:
        return self._readers.get(request_id, ())

    def subscribe(self, inflight: InflightRequest) -> None:
        """Feed a reader from the next live entry on."""
        inflight.on_behind = self.catch_up.add
        self._readers.setdefault(inflight.request.id, []).append(inflight)

    def unsubscribe(self, inflight: InflightRequest) -> None:
        if inflight.behind:
            self.catch_up.remove(inflight)
        readers = self._readers.get(inflight.request.id)
        if readers is not None:
            with contextlib.suppress(ValueError):
                readers.remove(inflight)
            if not readers:
                del self._readers[inflight.request.id]

    def _start_over(self) -> None:
        """The stream was recreated or has lost its end: known sequences are void."""
        self.tail.since_ns = min(map(_since, self.readers), default=self._bus.clock.now_ns() - CLOCK_SKEW_NS)
        for inflight in self.readers:
            inflight.seq = 0
        self.catch_up.start_over()

    def subscribe_from_start(self, inflight: InflightRequest) -> None:
        """Feed a reader all past entries of its request, then live ones."""
        inflight.fall_behind()
        self.subscribe(inflight)
        self.catch_up.add(inflight)

    def _on_entry(self, entry: Entry) -> None:
        readers_of, seq = self._readers, entry.seq
        if self.on_read is not None:
            self.on_read(seq)
        batch = tokens.decode(entry.data)
        worker = batch.worker
        for item in batch.items:
            readers = readers_of.get(item.request)
            if readers is not None:
                for inflight in readers:
                    if item.tokens and worker != inflight.worker:
                        inflight.note_worker(worker, item.attempt)
                    if item.finish is not None:
                        inflight.end = entry
                    inflight.feed(item, seq)


class TokenSubscriptions:
    """``own``: of this gateway, open as long as it is; others are opened when needed and closed when unused."""

    def __init__(self, bus: Bus, gateway: str, tasks: Tasks) -> None:
        self.own = TokenSubscription(bus, gateway, tasks)
        self._bus = bus
        self._gateway = gateway
        self._unstored = f"{MEMORY}.{gateway}"
        self._tasks = tasks
        self._others: dict[str, TokenSubscription] = {}
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        for subscription in self.all:
            await subscription.close()

    @property
    def all(self) -> tuple[TokenSubscription, ...]:
        return (self.own, *self._others.values())

    @property
    def readers(self) -> Iterable[InflightRequest]:
        return [inflight for subscription in self.all for inflight in subscription.readers]

    def __len__(self) -> int:
        """Open requests."""
        return sum(map(len, self.all))

    def readers_of(self, request_id: str) -> Sequence[InflightRequest]:
        """This gateway's own open answers of a request."""
        readers = self.own.readers_of(request_id)
        if not readers and (unstored := self._others.get(self._unstored)) is not None:
            return unstored.readers_of(request_id)
        return readers

    @property
    def own_readers(self) -> Iterable[InflightRequest]:
        """All open answers of requests that this gateway accepted."""
        unstored = self._others.get(self._unstored)
        return [*self.own.readers, *(unstored.readers if unstored is not None else ())]

    async def open(self, address: str) -> TokenSubscription:
        """A token stream by the address of its requests (``GenerateRequest.token_address``).

        It stays open as long as it has readers; subscribe to it before anything else is awaited.

        Raises:
            ServingError: the stream cannot be read.
        """
        if address == self._gateway:
            return self.own
        async with self._opening:
            subscription = self._others.get(address)
            if subscription is None:
                subscription = TokenSubscription(self._bus, address, self._tasks)
                await subscription.start(new=address == self._unstored)
                self._others[address] = subscription
            return subscription

    def unsubscribe(self, inflight: InflightRequest) -> None:
        self._others.get(inflight.request.token_address, self.own).unsubscribe(inflight)

    async def close_unused(self) -> None:
        for address, subscription in list(self._others.items()):
            if not subscription and address != self._unstored:
                del self._others[address]
                await subscription.close()
