"""This worker's part of the handoff ledger: lines are batched for a moment, then published."""

import asyncio
import time
from typing import Any

import structlog
from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.schemas import wire
from penstock.schemas.errors import ServingError
from penstock.schemas.transfer import Handoff, Handoffs, Ticket
from penstock.workers.metrics.worker_metrics import WorkerMetrics
from penstock.workers.session.lease import Outbox

log = structlog.get_logger("handoff")

BATCH_S = 0.01


class TransferLedger:
    """``record`` from the event loop; ``close`` publishes the remaining lines."""

    def __init__(self, bus: Bus, outbox: Outbox, worker: str, metrics: WorkerMetrics) -> None:
        self._bus = bus
        self._outbox = outbox
        self._worker = worker
        self._metrics = metrics
        self._lines: list[Handoff] = []
        self._seq = 0
        self._task: asyncio.Task[None] | None = None

    def record(
        self,
        ticket: Ticket,
        state: str,
        target: str,
        *,
        blocks: int = 0,
        bytes: int = 0,
        seconds: float = 0.0,
        cause: str = "",
        message: str = "",
    ) -> None:
        """Write a line about what happened to a ticket just now."""
        lease_ns = ticket.lease_ns if state == "offered" else 0
        now = time.time_ns()
        self.write(
            Handoff(
                ticket.id,
                state,
                ticket.worker,
                target,
                now,
                blocks,
                bytes,
                seconds,
                cause,
                message[:300],
                lease_ns,
                ticket.pool,
            )
        )

    def write(self, line: Handoff) -> None:
        self._metrics.handoff.recorded(line)
        self._lines.append(line)
        if self._task is None:
            self._task = self._bus.tasks.spawn(self._publish_soon(), name="ledger", on_failure=_not_published)

    async def _publish_soon(self) -> None:
        try:
            await asyncio.sleep(BATCH_S)
        finally:
            self._task = None
        await self.flush()

    async def flush(self) -> None:
        lines, self._lines = self._lines, []
        if not lines:
            return
        seq, self._seq = self._seq, self._seq + 1
        payload = wire.encode(Handoffs(self._worker, tuple(lines)))
        try:
            await self._outbox.send(self._bus.subjects.handoff(self._worker), payload, f"{self._worker}:handoff:{seq}")
        except (ServingError, NatsError) as error:  # the ledger describes transfers; it must not fail them
            log.warning("ledger_publish_failed", lines=len(lines), error=repr(error))

    async def close(self) -> None:
        task: Any = self._task
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self.flush()


def _not_published(error: BaseException) -> None:
    log.warning("ledger_publish_failed", error=repr(error))
