"""Watches the workers that blocks move to and from: connects to new ones before they are used, forgets lost ones."""

import asyncio
import functools
from collections.abc import Callable
from contextlib import AsyncExitStack

import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.registry import RegisteredWorker, WorkerRegistry
from penstock.schemas.transfer import Endpoint
from penstock.workers.kv_transfer.base import Transport

log = structlog.get_logger("handoff")

PARTNERS = {
    "encode": {"prefill", "decode", "aggregated"},
    "prefill": {"encode", "decode"},
    "decode": {"encode", "prefill"},
    "aggregated": {"encode"},
}


class PeerWatcher:
    """Follows registrations. ``lost`` is called with the id of each worker that leaves."""

    def __init__(
        self, bus: Bus, transport: Transport, worker: str, model: str, role: str, lost: Callable[[str], None]
    ) -> None:
        self._transport = transport
        self._worker = worker
        self._model = model
        self._role = role
        self._lost = lost
        self._agents: dict[str, Endpoint] = {}
        self._watch = WorkerRegistry(bus, joined=self._joined, left=self._left)
        self._following = AsyncExitStack()

    async def start(self) -> None:
        """
        Raises:
            ServingError: the workers bucket cannot be read.
        """
        await self._following.enter_async_context(self._watch)

    async def stop(self) -> None:
        await self._following.aclose()

    def sweep(self) -> None:
        """Expire leases; called several times a second."""
        self._watch.expire()

    def _joined(self, member: RegisteredWorker) -> None:
        registration = member.registration
        endpoint = registration.transfer
        agent = self._agents.get(registration.worker)
        if endpoint is None or registration.worker == self._worker or registration.model != self._model:
            return
        if agent is not None and agent.agent == endpoint.agent:
            return  # a renewal
        if (
            registration.role not in PARTNERS.get(self._role, ())
            or endpoint.backend != self._transport.endpoint.backend
        ):
            return
        if agent is not None:
            self._transport.forget(agent.agent)
        self._agents[registration.worker] = endpoint
        connected = asyncio.wrap_future(self._transport.connect(endpoint))  # logged in the loop's thread
        connected.add_done_callback(functools.partial(_log_connected, registration.worker))

    def _left(self, member: RegisteredWorker, reason: str) -> None:
        worker = member.registration.worker
        endpoint = self._agents.pop(worker, None)
        if endpoint is not None:
            self._transport.forget(endpoint.agent)
        self._lost(worker)


def _log_connected(worker: str, future: "asyncio.Future[None]") -> None:
    error = None if future.cancelled() else future.exception()
    if error is None:
        log.info("peer_connected", worker=worker)
    else:
        log.warning("peer_connect_failed", worker=worker, error=str(error))
