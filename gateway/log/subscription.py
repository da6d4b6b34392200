"""The token stream of one gateway, ours or a dead one's, for the exchanges that watch it."""

import contextlib
from collections.abc import Sequence

from gateway.log.catch_up import CatchUp
from gateway.log.inflight import Exchange
from infra.bus.connection import Bus
from infra.bus.direct_get import Entry
from infra.bus.log_tail import LogTail
from infra.bus.tasks import Tasks
from schemas import tokens


class TokenFeed:
    """Follows one gateway's token subject. Close it after its last exchange."""

    def __init__(self, bus: Bus, gateway: str, tasks: Tasks) -> None:
        self.gateway = gateway
        self._tasks = tasks.group(f"tokens-{gateway}")
        self._watched: dict[str, list[Exchange]] = {}
        stream, subject = bus.subjects.stream("TOKENS"), bus.subjects.tokens(gateway)
        self.tail = LogTail(bus, stream, subject, bus.subjects.live(subject), self._on_entry)
        self.catch_up = CatchUp(bus, stream, subject, self._tasks, lambda: self.tail.position)

    async def start(self, since_ns: int) -> None:
        """
        Raises:
            ServingError: the stream cannot be read.
        """
        await self.tail.start(since_ns=since_ns)

    async def close(self) -> None:
        await self._tasks.aclose()
        await self.tail.stop()

    @property
    def exchanges(self) -> list[Exchange]:
        return [exchange for watchers in self._watched.values() for exchange in watchers]

    def __len__(self) -> int:
        return len(self._watched)

    def watching(self, request_id: str) -> Sequence[Exchange]:
        return self._watched.get(request_id, ())

    def watch(self, exchange: Exchange) -> None:
        """Feed it from the next live entry on."""
        exchange.on_behind = self.catch_up.add
        self._watched.setdefault(exchange.request.id, []).append(exchange)

    def unwatch(self, exchange: Exchange) -> None:
        if exchange.behind:
            self.catch_up.remove(exchange)
        watchers = self._watched.get(exchange.request.id)
        if watchers is not None:
            with contextlib.suppress(ValueError):
                watchers.remove(exchange)
            if not watchers:
                del self._watched[exchange.request.id]

    def attach(self, exchange: Exchange) -> None:
        """Feed it everything said of its request so far, then go on live."""
        exchange.fall_behind()
        self.watch(exchange)
        self.catch_up.add(exchange)

    def _on_entry(self, entry: Entry) -> None:
        watched, seq = self._watched, entry.seq
        for item in tokens.decode(entry.data).items:
            watchers = watched.get(item.request)
            if watchers is not None:
                for exchange in watchers:
                    exchange.feed(item, seq)
