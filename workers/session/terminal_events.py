"""Ends requests: a terminal event or a return is stored, then the job is acknowledged.

A request is over only when that is stored. Until then a redelivered job is neither run nor acknowledged.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.publisher import Publisher
from penstock.infra.bus.puller import ACK
from penstock.infra.bus.tasks import Tasks, as_serving_error
from penstock.infra.process.turns import TurnBudget
from penstock.schemas import done, kv, requests, summary, wire
from penstock.schemas.errors import FALLS_BACK, Code
from penstock.schemas.jobs import failed
from penstock.schemas.tokens import WHOLE_REQUEST, Finish, TokenBatch, TokenItem
from penstock.workers.metrics.worker_metrics import WorkerMetrics
from penstock.workers.session.lease import Outbox
from penstock.workers.session.requests import RequestTable, RunningRequest, terminal

log = structlog.get_logger("worker")

MOST_ITEMS = 400  # of a message: a gateway takes 1 µs for each, and reads a message without a pause
OUTPUT_S = 30.0  # for the output of a request with ``no_store`` to be stored; an election takes 4 to 9 s
TERMINAL_S = 600.0  # how long storing a terminal event is tried; the broker may be away


class Reporter:
    """All output carries one worker id and epoch. ``made_with`` changes with the worker's weights."""

    def __init__(
        self,
        bus: Bus,
        publisher: Publisher,
        outbox: Outbox,
        worker: str,
        epoch: int,
        metrics: WorkerMetrics,
        made_with: done.MadeWith,
    ) -> None:
        self._bus = bus
        self._publisher = publisher
        self._outbox = outbox
        self._worker = worker
        self._epoch = epoch
        self._metrics = metrics
        self.made_with = made_with
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
        clock = self._bus.clock
        event = terminal(running, self._worker, clock.now_ns(), self.made_with, clock.offset_ns)
        self._metrics.ended(event, prefilled=running.prefilled)
        headers = summary.headers_of(event, request)
        if request.no_store:  # its record does not have its output
            if not await self._outbox.stored(OUTPUT_S):
                log.warning("output_unconfirmed", request=request.id)
            event = done.without_content(event, request)
        elif running.job is not None and requests.is_packed(bytes(running.job.request)):  # this build made the streams
            event = done.packed(event)
        payload = done.encode_within(event, self._bus.max_message)
        await self._publisher.publish(
            self._bus.subjects.done(request.tenant, request.recorded_under, request.id),
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


SETTLE_S = 2.0  # how long a closing session waits for messages under way


class TerminalEvents:
    """Ends and requeues requests.

    Args:
        on_settled: called when one more end has been stored or has failed.
    """

    def __init__(
        self, bus: Bus, reporter: Reporter, requests: RequestTable, tasks: Tasks, on_settled: Callable[[], None]
    ) -> None:
        self._bus = bus
        self._reporter = reporter
        self._requests = requests
        self._tasks = tasks
        self._on_settled = on_settled
        self._turns = TurnBudget()  # a thousand requests may end in one step
        self._pending: set[asyncio.Future[Any]] = set()
        self._storing: dict[RunningRequest, asyncio.Future[Any]] = {}

    @property
    def pending(self) -> bool:
        """Whether an end is being stored."""
        return bool(self._pending)

    # --- ends ---

    def finish(self, running: RunningRequest) -> None:
        """All choices have ended: store the terminal event, then acknowledge the job."""
        self._requests.remove(running, cancel=False)
        self._store(running, partial(self._reporter.done, running))

    def requeue(self, running: RunningRequest, reason: str, *, poison: bool = False, crashed: bool = False) -> None:
        """End this attempt; a router places the request again, after the tokens already streamed.

        Args:
            poison: the request may be what broke this worker.
            crashed: the engine ended while it ran this; routers count such attempts.
        """
        if self._requests.owns(running):
            self._requests.remove(running)
            self._store(running, partial(self._reporter.returned, running, reason, poison, crashed))

    async def end(self, running: RunningRequest, code: Code, message: str) -> None:
        """End a request with an error, if this worker still has it."""
        if self._requests.owns(running):
            await self.reject(running, code, message)

    async def end_cancelled(self, running: RunningRequest) -> None:
        """End a cancelled request with the reason of its cancellation."""
        if running.cancelled is not None:
            await self.end(running, *running.cancelled)

    async def reject(self, running: RunningRequest, code: Code, message: str) -> None:
        """End a request that does not run, or no longer runs, with an error; or return it, if another model may run it
        then."""
        request = running.request
        if code in FALLS_BACK and running.falls_back and self._requests.owns(running):
            self.requeue(running, failed(code, message))
            return
        reason = "cancelled" if code is Code.cancelled else "error"
        finish = Finish(reason, None, running.cached, code.value, message)
        item = TokenItem(request.id, running.attempt, WHOLE_REQUEST, 0, b"", finish)
        await self._reporter.items(request.token_address, (item,))
        running.cancelled = (code, message)
        self.finish(running)

    def fail(self, running: RunningRequest, action: str, error: BaseException) -> None:
        """Running a request failed on this worker: requeue a first attempt, end a later one with the error."""
        log.error("request_failed", request=running.request.id, attempt=running.attempt, what=action, exc_info=error)
        if not self._requests.owns(running):
            return
        if running.attempt == 1 and running.cancelled is None:
            self.requeue(running, f"{action} failed: {error!r}"[:300], poison=True)
            return
        reason = as_serving_error(error, action)
        running.cancelled = running.cancelled or (reason.code, reason.message)
        self._requests.remove(running)
        self.spawn(self._reject_anyway(running, *running.cancelled))

    async def _reject_anyway(self, running: RunningRequest, code: Code, message: str) -> None:
        try:
            await self.reject(running, code, message)
        except Exception as error:  # the terminal event carries the finish as well
            log.warning("finish_publish_failed", request=running.request.id, error=repr(error))
            self.finish(running)

    # --- storing ---

    def _store(self, running: RunningRequest, store: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._requests.begin_ending(running)
        self._storing[running] = self.spawn(self._stored(running, store))

    async def _stored(self, running: RunningRequest, store: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await self._turns.enter()
            await store()
            self._requests.mark_ended(running.request.id, running.attempt)
            if not self._bus.nc.post(running.delivery.reply, ACK, later=True):
                await self._bus.nc.publish(running.delivery.reply, ACK)
        finally:
            self._requests.stop_ending(running)
            self._storing.pop(running, None)

    def revoked(self, running: RunningRequest) -> None:
        """A router ended this attempt: store no end of it, if none is stored yet."""
        if (storing := self._storing.pop(running, None)) is not None:
            storing.cancel()
            self._requests.stop_ending(running)  # the task may not have begun

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Future[Any]":
        """Run something that ends a request; ``settle`` waits for it."""
        task = self._tasks.spawn(work, name="terminal-event", on_failure=_on_failure)
        self._pending.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Future[Any]") -> None:
        self._pending.discard(task)
        self._on_settled()

    async def settle(self) -> None:
        """Wait, bounded, until what is pending is stored."""
        if self._pending:
            await asyncio.wait(self._pending, timeout=SETTLE_S)

    def cancel(self) -> None:
        """The lease is lost: others have taken over, so nothing more is stored."""
        for task in self._pending:
            task.cancel()


def _on_failure(error: BaseException) -> None:
    """The job is not acknowledged, so it is delivered again."""
    log.error("terminal_event_failed", error=repr(error))
