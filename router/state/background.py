"""Tasks for single requests. A failure is logged and ends nothing else: the request comes again.

Its message is delivered again after ack_wait, and the scan for orphans finds a request that was placed.
"""

from collections.abc import Coroutine
from typing import Any

import structlog

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.tasks import Tasks

log = structlog.get_logger("router")


class BackgroundTasks:
    def __init__(self, bus: Bus, tasks: Tasks) -> None:
        self._bus = bus
        self._tasks = tasks

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        def failed(error: BaseException) -> None:
            log.error("router_task_failed", task=name, error=repr(error), exc_info=error)

        self._tasks.spawn(work, name=name, on_failure=failed)

    def acknowledge(self, reply: str, verdict: bytes) -> None:
        """Send the verdict on a message, without waiting for it."""
        if not self._bus.nc.post(reply, verdict, later=True):
            self.spawn(self._bus.nc.publish(reply, verdict), "verdict")
