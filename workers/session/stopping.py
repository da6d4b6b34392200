"""Stops a worker process: the first signal drains it within a bound, the second ends it at once.

``HURRY`` ends the drain: the supervisor's deadline for all processes may come before this one's own.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

from penstock.schemas.control import HURRY

log = structlog.get_logger("worker")

T = TypeVar("T")

GRACE_S = 4.5  # after the drain; supervisors wait a little longer
EXIT_LATE = 75  # EX_TEMPFAIL: it did not end in time

EndProcess = Callable[[int], Any]


class StoppedEarly(Exception):
    """The process was asked to stop before it served."""


class Stopping:
    """
    Args:
        drain_s: how long running requests may continue.
        end_process: ends the process at once, whatever its threads do.
        on_asked: called when the process is asked to stop.

    Attributes:
        hurried: the drain is over.
    """

    def __init__(
        self, drain_s: float, end_process: EndProcess = os._exit, on_asked: Callable[[], None] = lambda: None
    ) -> None:
        self._drain_s = drain_s
        self._end_process = end_process
        self._on_asked = on_asked
        self._asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self._signals = 0
        self._deadline = 0.0  # monotonic; 0: none
        self._timer: threading.Timer | None = None

    def on_signals(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal, signum)
        asyncio.get_running_loop().add_signal_handler(HURRY, self.hurry)

    def _on_signal(self, signum: int) -> None:
        self._signals += 1
        if self._signals > 1:
            log.warning("forced_exit", signal=signal.Signals(signum).name)
            self.end_now(128 + signum)
        self.ask()

    def ask(self) -> None:
        """Drain, and end the process ``GRACE_S`` after that at the latest."""
        if not self.asked:
            self._on_asked()
        self._asked.set()
        self.within(self._drain_s + GRACE_S)

    def hurry(self) -> None:
        """Drain no longer, and end the process ``GRACE_S`` from now at the latest."""
        log.info("drain_cut_short")
        self.ask()
        self.hurried.set()
        if self._deadline > time.monotonic() + GRACE_S:
            self.ended()
            self._timer = None
            self.within(GRACE_S)

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    async def wait(self) -> None:
        await self._asked.wait()

    def within(self, seconds: float) -> None:
        """End the process after this many seconds; only the first call counts. A thread: the event loop may hang."""
        if self._timer is None:
            self._deadline = time.monotonic() + seconds
            self._timer = threading.Timer(seconds, self._late)
            self._timer.daemon = True
            self._timer.start()

    def left(self, at_most: float) -> float:
        """Seconds until the process is ended, ``at_most`` at most."""
        return min(at_most, max(0.0, self._deadline - time.monotonic())) if self._deadline else at_most

    def ended(self) -> None:
        """The process ended in time: stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _late(self) -> None:
        log.error("stop_timeout", action="exiting although some work is unfinished")
        self.end_now(EXIT_LATE)

    def end_now(self, status: int) -> None:
        sys.stdout.flush()
        self._end_process(status)

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` and return its result.

        Raises:
            StoppedEarly: the process was asked to stop first; ``work`` was cancelled.
        """
        task, stopped = asyncio.create_task(work, name="start"), asyncio.create_task(self.wait(), name="asked")
        try:
            await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise StoppedEarly
            return task.result()
        finally:
            stopped.cancel()
            task.cancel()
