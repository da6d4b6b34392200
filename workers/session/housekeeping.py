"""Several times a second: deadlines, in-progress signs of running jobs, unacknowledged output."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.puller import IN_PROGRESS
from penstock.schemas.errors import Code
from penstock.workers.session.outbox import Outbox
from penstock.workers.session.request_table import RequestTable
from penstock.workers.session.requests import RunningRequest

ACK_WAIT_S = 30.0  # of the session's consumer
INTERVAL_S = 0.1


class Housekeeping:
    """
    Args:
        stop_early: ends a running request with a code and a message.
        each_time: the runner's own upkeep, given the monotonic time.
    """

    def __init__(
        self,
        bus: Bus,
        outbox: Outbox,
        requests: RequestTable,
        stop_early: Callable[[RunningRequest, Code, str], None],
        each_time: Callable[[float], None],
    ) -> None:
        self._bus = bus
        self._outbox = outbox
        self._requests = requests
        self._stop_early = stop_early
        self._each_time = each_time

    async def run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self._enforce_deadlines(self._bus.clock.now_ns())
            now = time.monotonic()
            await self._signal_progress(now)
            with contextlib.suppress(NatsError):  # the connection broke; the outbox resends on the next one
                await self._outbox.confirm()
            self._each_time(now)

    def _enforce_deadlines(self, now_ns: int) -> None:
        for running in list(self._requests.running.values()):
            if now_ns >= running.request.deadline_ns:
                self._stop_early(running, Code.deadline_exceeded, "the deadline passed while the request ran")

    async def _signal_progress(self, now: float) -> None:
        """Keep the broker from delivering running and ending jobs again."""
        for running in (*self._requests.running.values(), *self._requests.ending.values()):
            if now - running.progress_signalled > ACK_WAIT_S / 3 and self._bus.connected:
                running.progress_signalled = now
                with contextlib.suppress(NatsError):
                    await self._bus.nc.publish(running.delivery.reply, IN_PROGRESS)
