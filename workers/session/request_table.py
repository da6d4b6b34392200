"""The requests of one session by state: running, ending, ended, cancelled before their job arrived. Pure.

Several times a second: deadlines, in-progress signs of running jobs, unacknowledged output.
"""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from nats.errors import Error as NatsError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.puller import IN_PROGRESS
from penstock.schemas.errors import Code
from penstock.workers.session.outbox import Outbox
from penstock.workers.session.requests import RunningRequest

LONGEST_REASON = 200  # characters of why a request was cancelled
REMEMBERED = 20_000  # ended and cancelled requests each


class Admission(Enum):
    """What to do with a delivered job."""

    RUN = auto()
    OVER = auto()  # ended, revoked or overtaken by a later attempt: acknowledge it
    PENDING = auto()  # redelivered: the request keeps this delivery and acknowledges it when it ends


class RequestTable:
    """``ending`` holds requests whose terminal event or return is not stored yet; until it is, they are not over.

    Args:
        on_removed: called when this worker has no more to do with a request; True: it may still be computed here.
    """

    def __init__(self, on_removed: Callable[[RunningRequest, bool], None]) -> None:
        self.running: dict[str, RunningRequest] = {}
        self.ending: dict[str, RunningRequest] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()  # request -> last attempt that ended or was revoked here
        self._cancelled: OrderedDict[str, str] = OrderedDict()  # request -> reason
        self._on_removed = on_removed

    def admission(self, request_id: str, attempt: int, delivery: Any) -> Admission:
        if self._ended.get(request_id, -1) >= attempt:
            return Admission.OVER
        for other in (self.ending.get(request_id), self.running.get(request_id)):
            if other is None or other.attempt < attempt:
                continue
            if other.attempt > attempt:
                return Admission.OVER
            other.delivery = delivery
            return Admission.PENDING
        return Admission.RUN

    def owns(self, running: RunningRequest) -> bool:
        """Whether it is still this worker's, to run or to end."""
        return self.running.get(running.request.id) is running

    def is_current(self, running: RunningRequest) -> bool:
        """Whether it is still this worker's to run."""
        return self.owns(running) and running.cancelled is None

    def remove(self, running: RunningRequest, *, cancel: bool = True) -> None:
        """This worker has no more to do with it. ``cancel``: the runner may still be computing it."""
        if self.owns(running):
            del self.running[running.request.id]
        running.detach_sequences()
        self._on_removed(running, cancel)

    def begin_ending(self, running: RunningRequest) -> None:
        self.ending[running.request.id] = running

    def stop_ending(self, running: RunningRequest) -> None:
        if self.ending.get(running.request.id) is running:
            del self.ending[running.request.id]

    def mark_ended(self, request_id: str, attempt: int) -> None:
        """This attempt and earlier ones are over."""
        self._ended[request_id] = attempt
        self._cancelled.pop(request_id, None)
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def remember_cancel(self, request_id: str, reason: str) -> None:
        """The client cancelled before the job arrived here."""
        if request_id in self._ended or request_id in self.ending:
            return
        self._cancelled[request_id] = reason[:LONGEST_REASON]
        if len(self._cancelled) > REMEMBERED:
            self._cancelled.popitem(last=False)

    def early_cancel(self, request_id: str) -> str | None:
        """The reason, if the request was cancelled before its job came."""
        return self._cancelled.get(request_id)


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
