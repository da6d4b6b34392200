"""Publishes a session's output: tokens and KV events without waiting; terminal events and returns until stored."""

import time

import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.publisher import Publisher
from penstock.schemas import done, kv, summary, wire
from penstock.schemas.subjects import HEADER_NO_STORE, HEADER_SUMMARY
from penstock.schemas.tokens import TokenBatch, TokenItem
from penstock.workers.metrics.worker import Metrics
from penstock.workers.session.outbox import Outbox
from penstock.workers.session.requests import RunningRequest, terminal

log = structlog.get_logger("worker")

MOST_ITEMS = 400  # of a message: a gateway takes 1 µs for each, and reads a message without a pause
TERMINAL_S = 600.0  # how long storing a terminal event is tried; the broker may be away


class Reporter:
    """All output carries one worker id and epoch."""

    def __init__(
        self, bus: Bus, publisher: Publisher, outbox: Outbox, worker: str, epoch: int, metrics: Metrics
    ) -> None:
        self._bus = bus
        self._publisher = publisher
        self._outbox = outbox
        self._worker = worker
        self._epoch = epoch
        self._metrics = metrics
        self._next_batch = 0

    async def items(self, address: str, items: tuple[TokenItem, ...]) -> None:
        """Publish token items, in several messages if they are too many or too large for one."""
        payload = b""
        if len(items) <= MOST_ITEMS:
            payload = wire.encode(TokenBatch(self._worker, self._epoch, self._next_batch, items))
        if not payload or (len(payload) > self._bus.max_message and len(items) > 1):
            half = len(items) // 2
            await self.items(address, items[:half])
            await self.items(address, items[half:])
            return
        seq, self._next_batch = self._next_batch, self._next_batch + 1
        await self._outbox.send(self._bus.subjects.tokens(address), payload, f"{self._worker}:{seq}")

    async def events(self, model: str, rank: int, seq: int, events: tuple[kv.KvEvent, ...]) -> None:
        """Publish one KV batch."""
        batch = kv.KvBatch(self._worker, self._epoch, seq, events, rank)
        await self._outbox.send(
            self._bus.subjects.kv(model, self._worker), wire.encode(batch), f"{self._worker}:kv:{rank}:{seq}"
        )

    async def done(self, running: RunningRequest) -> None:
        """Store the terminal event of a request: after its tokens, and only while the lease is trusted.

        Raises:
            ServingError: it could not be stored for ten minutes.
        """
        request = running.request
        event = terminal(running, self._worker, time.time_ns())
        self._metrics.ended(event, prefilled=running.prefilled)
        headers = {HEADER_SUMMARY: summary.header_of(event, request)}
        if request.no_store:
            event = done.without_content(event, request)
            headers[HEADER_NO_STORE] = "1"
        payload = done.encode_within(event, self._bus.max_message)
        await self._publisher.publish(
            self._bus.subjects.done(request.tenant, request.model, request.id),
            payload,
            request.id,
            headers=headers,
            timeout=TERMINAL_S,
            once=True,
            gate=self._outbox.open,
        )
        log.debug("request_done", request=event.request, code=event.code, tokens=event.usage.completion)

    async def returned(self, running: RunningRequest, reason: str, poison: bool, crashed: bool = False) -> None:
        """Store that this attempt is returned to the routers.

        Args:
            crashed: the engine ended while it ran this.
        Raises:
            ServingError: it could not be stored for ten minutes.
        """
        request = running.request
        if request.no_store:
            reason = reason.partition(":")[0]  # an exception's text may quote the prompt
        died = ("alone" if running.alone else "shared") if crashed else ""
        event = done.Returned(request.id, request.model, running.attempt, self._worker, reason, poison, died)
        await self._publisher.publish(
            self._bus.subjects.returned(request.model),
            wire.encode(event),
            done.returned_id(event),
            headers=done.returned_headers(event),
            timeout=TERMINAL_S,
            gate=self._outbox.open,
        )
