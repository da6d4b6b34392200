"""All token streams that a gateway reads: its own, and others, each while it has readers.

Others belong to gateways whose requests are re-attached here, or carry the output of requests with ``no_store``: one of
each gateway, this one's too.

One token stream, of a gateway (ours or another) or of a single request, for its readers.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from penstock.gateway.request_log.catch_up import CatchUp
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get_last
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.bus.tasks import Tasks
from penstock.schemas import tokens
from penstock.schemas.subjects import MEMORY


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
        """Follow from the present end on, which is a place in the stream: a time would be by a clock of ours.

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
        """The stream was made anew: sequences mean nothing any more."""
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
