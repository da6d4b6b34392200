"""One open answer inside a gateway, and the token stream that feeds all of them.

An ``Exchange`` is fed by the log and emptied by whoever answers the client. It holds no task: waiting is a
future, and the gateway's one sweep ends what is overdue.
"""

import asyncio
import contextlib

import structlog

from configs.bus.connection import Bus
from configs.bus.log import LogTail
from configs.bus.read import Entry, read
from configs.fold import Fold
from schemas import tokens
from schemas.errors import ServingError
from schemas.requests import GenerateRequest
from schemas.tokens import TokenItem

log = structlog.get_logger("gateway")

CLOCK_SKEW_NS = 2_000_000_000


class Exchange:
    """Items of one request, in order, each once."""

    __slots__ = ("_error", "_held", "_items", "_waiter", "abandoned", "cancel_sent", "fed", "fold", "request")

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.fold = Fold(request.n)
        self.abandoned = False  # the client is gone; kept until the terminal event is seen
        self.cancel_sent = 0.0
        self.fed = 0.0
        self._items: list[TokenItem] = []
        self._held: list[TokenItem] | None = None  # live items, while the past is being read
        self._waiter: asyncio.Future[None] | None = None
        self._error: ServingError | None = None

    @property
    def ended(self) -> bool:
        return not self.fold.open

    def feed(self, item: TokenItem) -> None:
        """A live item, in stream order."""
        if self._held is not None:
            self._held.append(item)
            return
        self._push(item)

    def _push(self, item: TokenItem) -> None:
        due = self.fold.push(item)
        if due and not self.abandoned:
            self._items += due
            waiter = self._waiter
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def hold(self) -> None:
        self._held = []

    def feed_past(self, item: TokenItem) -> None:
        self._push(item)

    def release(self) -> None:
        held, self._held = self._held or [], None
        for item in held:
            self._push(item)

    def fail(self, error: ServingError) -> None:
        """Whoever waits gets this error, after the items that are already here."""
        self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def available(self) -> list[TokenItem]:
        """What is here already, without waiting."""
        items, self._items = self._items, []
        return items

    async def take(self) -> list[TokenItem]:
        """The items since the last call; waits for at least one.

        Raises:
            ServingError: nothing more will come (deadline, broker).
        """
        while not self._items:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        items, self._items = self._items, []
        return items


class TokenFeed:
    """Follows one gateway's token subject, ours or a dead one's, for the exchanges that watch it."""

    def __init__(self, bus: Bus, gateway: str) -> None:
        self._bus = bus
        self._stream = bus.subjects.stream("TOKENS")
        self._subject = bus.subjects.tokens(gateway)
        self._watched: dict[str, list[Exchange]] = {}
        self.gateway = gateway
        self.tail = LogTail(bus, self._stream, self._subject, bus.subjects.live(self._subject), self._on_entry)

    async def start(self, since_ns: int) -> None:
        await self.tail.start(since_ns=since_ns)

    @property
    def exchanges(self) -> list[Exchange]:
        return [exchange for watchers in self._watched.values() for exchange in watchers]

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, exchange: Exchange) -> None:
        self._watched.setdefault(exchange.request.id, []).append(exchange)

    def unwatch(self, exchange: Exchange) -> None:
        watchers = self._watched.get(exchange.request.id)
        if watchers is not None:
            with contextlib.suppress(ValueError):
                watchers.remove(exchange)
            if not watchers:
                del self._watched[exchange.request.id]

    async def attach(self, exchange: Exchange) -> None:
        """Feed everything said of a request so far, then go on live.

        Raises:
            ServingError: the stream cannot be read.
        """
        exchange.hold()
        self.watch(exchange)
        try:
            # To the present end, which may be past the first items held: the fold drops what it has seen.
            since = exchange.request.created_ns - CLOCK_SKEW_NS
            async for entry in read(self._bus, self._stream, self._subject, since_ns=since):
                for item in tokens.decode(entry.data).items:
                    if item.request == exchange.request.id:
                        exchange.feed_past(item)
        except BaseException:
            self.unwatch(exchange)
            raise
        exchange.release()

    def _on_entry(self, entry: Entry) -> None:
        watched = self._watched
        for item in tokens.decode(entry.data).items:
            watchers = watched.get(item.request)
            if watchers is not None:
                for exchange in watchers:
                    exchange.feed(item)
