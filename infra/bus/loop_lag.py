"""The lag of an event loop: a gauge of every process."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from io import FileIO

from penstock.infra.metrics.scope import MetricScope

EVERY_S = 0.1  # each measurement costs 30 to 60 CPU-µs
WINDOW_S = 30.0
LATE_S = 0.005


class ThreadTimes:
    """For how long this thread ran and for how long it waited for a core, both since the last ``lap``.

    Only Linux counts waits (``schedstat``); elsewhere there are none. What a hypervisor takes may count as run.
    """

    def __init__(self) -> None:
        self._file: FileIO | None = None
        with contextlib.suppress(OSError):
            self._file = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: SIM115 - until ``close``
        self._ran, self._waited = time.thread_time(), self._wait()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def lap(self) -> tuple[float, float]:
        ran, waited = self._ran, self._waited
        self._ran, self._waited = time.thread_time(), self._wait()
        return self._ran - ran, self._waited - waited

    def _wait(self) -> float:
        if self._file is None:
            return 0.0
        return int(os.pread(self._file.fileno(), 64, 0).split()[1]) / 1e9


class Worst:
    """The maximum of the last 30 to 60 s, so that no scrape misses it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._now = self._before = 0.0

    @property
    def value(self) -> float:
        self._turn()
        return max(self._now, self._before)

    def add(self, value: float) -> None:
        self._turn()
        self._now = max(self._now, value)

    def _turn(self) -> None:
        now = self._clock()
        windows = int((now - self._began) / WINDOW_S)
        if windows:
            self._before, self._now = (self._now if windows == 1 else 0.0), 0.0
            self._began += windows * WINDOW_S


class LoopLag:
    """The lag of this event loop. Run ``watch`` in the background once the process is ready: its start is not a lag.

    Args:
        late: called for each measurement that was late by more than ``LATE_S``.

    Attributes:
        worst: seconds.
        worst_cpu: the same without the thread's waits for a core since the measurement before. Those of the time before
            the callback was due count, too, so on a crowded machine it is too small.
    """

    def __init__(self, late: Callable[[], object] = lambda: None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._late = late
        self.worst, self.worst_cpu = Worst(clock), Worst(clock)

    def measured(self, late: float, ran: float, waited: float) -> None:
        """Something ran this many seconds after it was due.

        Args:
            ran: seconds for which the thread ran since the measurement before.
            waited: for a core, likewise.
        """
        self.worst.add(late)
        self.worst_cpu.add(max(0.0, min(late - waited, ran)))
        if late > LATE_S:
            self._late()

    async def watch(self) -> None:
        times = ThreadTimes()
        with contextlib.closing(times):
            while True:
                due = self._clock() + EVERY_S
                await asyncio.sleep(EVERY_S)
                self.measured(self._clock() - due, *times.lap())


def gauge(scope: MetricScope) -> LoopLag:
    """Add a process's measurements to its metrics. Run ``watch`` of the result."""
    about = "longest delay of a due callback by the event loop, in the last 30 to 60 s"
    worst = scope.gauge("loop_lag_seconds", about)
    about = "the same without the time for which the loop's thread waited for a core (Linux)"
    worst_cpu = scope.gauge("loop_lag_cpu_seconds", about)
    about = f"measurements of that delay (ten a second) above {LATE_S * 1e3:g} ms"
    lag = LoopLag(scope.counter("loop_late", about).inc)
    worst.set_function(lambda: lag.worst.value)
    worst_cpu.set_function(lambda: lag.worst_cpu.value)
    return lag
