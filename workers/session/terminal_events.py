"""Ends requests: a terminal event or a return is stored, then the job is acknowledged.

A request is over only when that is stored. Until then a redelivered job is neither run nor acknowledged.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.loop_lag import TurnBudget
from penstock.infra.bus.puller import ACK
from penstock.infra.bus.tasks import Tasks, as_serving_error
from penstock.schemas.errors import Code
from penstock.schemas.tokens import WHOLE_REQUEST, Finish, TokenItem
from penstock.workers.session.reporter import Reporter
from penstock.workers.session.request_table import RequestTable
from penstock.workers.session.requests import RunningRequest

log = structlog.get_logger("worker")

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
        """End this attempt; a router places the request again, behind the tokens already streamed.

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
        """End a request that does not run, or no longer runs, with an error."""
        request = running.request
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
        self.spawn(self._stored(running, store))

    async def _stored(self, running: RunningRequest, store: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await self._turns.enter()
            await store()
            self._requests.mark_ended(running.request.id, running.attempt)
            if not self._bus.nc.post(running.delivery.reply, ACK, later=True):
                await self._bus.nc.publish(running.delivery.reply, ACK)
        finally:
            self._requests.stop_ending(running)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something that ends a request; ``settle`` waits for it."""
        task = self._tasks.spawn(work, name="terminal-event", on_failure=_on_failure)
        self._pending.add(task)
        task.add_done_callback(self._done)

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
