"""All token streams that a gateway reads: its own, and those of other gateways whose requests are re-attached here."""

import asyncio
import time
from collections.abc import Iterable

from gateway.log.inflight import InflightRequest
from gateway.log.subscription import TokenSubscription
from infra.bus.connection import Bus
from infra.bus.tasks import Tasks


class TokenSubscriptions:
    """``own``: of this gateway, open as long as it is; others are opened when needed and closed when unused."""

    def __init__(self, bus: Bus, gateway: str, tasks: Tasks) -> None:
        self.own = TokenSubscription(bus, gateway, tasks)
        self._bus = bus
        self._gateway = gateway
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

    async def open(self, gateway: str) -> TokenSubscription:
        """The token stream of any gateway.

        Raises:
            ServingError: the stream cannot be read.
        """
        if gateway == self._gateway:
            return self.own
        async with self._opening:
            subscription = self._others.get(gateway)
            if subscription is None:
                subscription = TokenSubscription(self._bus, gateway, self._tasks)
                await subscription.start(since_ns=time.time_ns())
                self._others[gateway] = subscription
            return subscription

    def unsubscribe(self, inflight: InflightRequest) -> None:
        self._others.get(inflight.request.gateway, self.own).unsubscribe(inflight)

    async def close_unused(self) -> None:
        for gateway, subscription in list(self._others.items()):
            if not subscription:
                del self._others[gateway]
                await subscription.close()
