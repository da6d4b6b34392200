"""All token streams that a gateway reads: its own, and others, each while it has readers.

Others belong to gateways whose requests are re-attached here, or carry the output of requests with ``no_store``: one of
each gateway, this one's too.
"""

import asyncio
from collections.abc import Iterable, Sequence

from penstock.gateway.log.inflight import InflightRequest
from penstock.gateway.log.subscription import TokenSubscription
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.tasks import Tasks
from penstock.schemas.subjects import MEMORY


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
