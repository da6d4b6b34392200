"""The NATS API of a gateway: submissions, services and the table of tenants, opened and closed together."""

import asyncio

from penstock.gateway.nats.acceptor import RequestAcceptor
from penstock.gateway.nats.delivery import AnswerDelivery
from penstock.gateway.nats.services import Services
from penstock.gateway.nats.submissions import Submissions
from penstock.gateway.service.gateway import Gateway
from penstock.infra.bus.tasks import Tasks


class NatsApi:
    """
    Args:
        tasks: of the process; if one of the background tasks fails, the process shuts down.
    Attributes:
        submissions: requests from the tenants' streams.
        services: requests and questions that are answered at once.
    """

    def __init__(self, gateway: Gateway, tasks: Tasks) -> None:
        self._tasks = tasks.group("nats")
        delivery = AnswerDelivery(gateway)
        self._table = gateway.tenants
        self._table.on_joined, self._table.on_left = self._joined, self._left
        acceptor = RequestAcceptor(gateway, self._table, delivery)
        self.submissions = Submissions(gateway, acceptor, delivery, self._tasks)
        self.services = Services(gateway, self._table, acceptor, delivery, self._tasks)

    async def open(self) -> None:
        """
        Raises:
            ServingError: the tenants cannot be read.
        """
        await self.submissions.start()
        await self._table.start()
        await self.services.start()

    async def close(self, timeout: float) -> None:
        """Take nothing more and wait ``timeout`` seconds for open answers; the rest is left to other gateways."""
        await asyncio.gather(self.services.close(timeout), self.submissions.close(timeout))
        await self._table.stop()
        await self._tasks.aclose()

    def _joined(self, tenant: str) -> None:
        self.submissions.add_tenant(tenant)

    def _left(self, tenant: str) -> None:
        self.submissions.remove_tenant(tenant)
