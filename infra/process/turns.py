"""Long work in short turns of an event loop, so that nothing that is due waits for all of it.

``TimeSlice`` is for one task with many small parts, ``TurnBudget`` for thousands of tasks that become ready together.
``LoopLag`` measures how long what is due waits all the same.
"""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Callable
from io import FileIO

# Of work in small parts, such as a router's decisions. Without it, if others run after each part, a request takes 14 %
# more CPU at 64 connections (``penstock bench http --concurrency 64``, 40 alternating pairs on two cores).
SLICE_S = 0.002
# Reading the broker's messages and collecting garbage come on top. While 300 requests of 0.3 ms come in, what else is
# due waits for 3.4 instead of 91 ms (``python -m tests.perf.tuning burst``).
TURN_S = 0.003
# Tasks woken in one turn: their parts take 0.05 to 0.3 ms. Of 2,000 that take 0.01 ms, what else is due waits for 3.2
# instead of 6.3 ms (likewise).
AT_ONCE = 64
# Requests read from their connections in one turn: about as many as can be prepared in ``TURN_S``. With 600
# connections, the p99 between two tokens is 1.05 instead of 1.57 s (``penstock bench http --concurrency 600``, ten
# pairs on two cores).
READS = 16

LAG_EVERY_S = 0.1  # each measurement costs 30 to 60 CPU-µs
LAG_WINDOW_S = 30.0
LATE_S = 0.005


class TimeSlice:
    """For work in many small parts that never await: call ``yield_if_spent`` after each.

    A slice begins with its first part. What is published within one slice leaves in one write and arrives in one read,
    so to yield earlier costs every process after this one a wake-up.
    """

    def __init__(self) -> None:
        self._began = 0.0  # of this slice; 0: none has begun

    async def yield_if_spent(self) -> None:
        """Let other tasks run if this slice has lasted for ``SLICE_S``."""
        if not self._began:
            self._began = time.monotonic()
            asyncio.get_running_loop().call_soon(self._end)
        elif time.monotonic() - self._began > SLICE_S:
            await asyncio.sleep(0)

    def _end(self) -> None:
        """The event loop has run other tasks."""
        self._began = 0.0


class TurnBudget:
    """Shares the turns of an event loop among thousands of tasks that may become ready together.

    What runs in one turn takes about ``TURN_S``, and at most one part more; a part is what a task does between two
    waits. The others wait for later turns, and what else is due runs in between. Otherwise a
    thousand requests that arrive at once stop the loop until all of them are prepared. Running answers and new requests
    wait in lines of their own, first come, first served, and take turns. Processor time counts: while other processes
    have the core, nothing is gained by smaller portions.

    Args:
        at_once: how many tasks are woken in one turn at most; fewer if their parts take long.
    """

    def __init__(
        self, clock: Callable[[], float] = time.thread_time, *, at_once: int = AT_ONCE, turn_s: float = TURN_S
    ) -> None:
        self._clock = clock
        self._running: deque[asyncio.Future[None]] = deque()
        self._new: deque[asyncio.Future[None]] = deque()
        self._late: list[tuple[deque[asyncio.Future[None]], asyncio.Future[None]]] = []  # woken, but the time was over
        self._lines = [self._running, self._new]
        self._unread: deque[Callable[[], None]] = deque()
        self._turn_s = turn_s
        self._most_at_once = self._at_once = at_once
        self._woken = 0  # in this turn
        self._read = 0
        self._entering = 0  # new requests that waited for this turn
        self._until = 0.0  # when the time of this turn is over; 0: it begins with the first part
        self._part = False  # whether one has run in this turn
        self._scheduled = False

    def wake(self, waiter: "asyncio.Future[None]") -> None:
        """Complete the future that a running answer awaits, in this turn or a later one. ``resume`` follows it."""
        if not self._scheduled:
            self._begin()
        if self._running or self._woken >= self._at_once:
            self._running.append(waiter)
        else:
            self._woken += 1
            waiter.set_result(None)

    async def resume(self) -> None:
        """Return before the next part of a running answer, in a turn that has time for it."""
        while not self.has_time():
            await self._later(self._running)

    async def enter(self) -> None:
        """Return before the next part of a new request, in a turn that has time for it."""
        if not self._scheduled:
            self._begin()
        if self._new or self._woken >= self._at_once:
            waiter = asyncio.get_running_loop().create_future()
            self._new.append(waiter)
            await waiter
        else:
            self._woken += 1
        while not self.has_time():
            await self._later(self._new)

    def may_read(self, read: Callable[[], None]) -> bool:
        """Whether another request may be read in this turn. Else ``read`` is called in a later one."""
        if not self._scheduled:
            self._begin()
        if self._unread or self._read >= READS:
            self._unread.append(read)
            return False
        self._read += 1
        return True

    def expects_new(self) -> bool:
        """Whether new requests wait for a later turn."""
        return bool(self._entering or self._new or self._unread)

    def _later(self, line: "deque[asyncio.Future[None]]") -> "asyncio.Future[None]":
        waiter = asyncio.get_running_loop().create_future()
        self._late.append((line, waiter))
        return waiter

    def has_time(self) -> bool:
        """Whether this turn has time for the next part. Else ``resume`` waits for one that has."""
        if not self._scheduled:
            self._begin()
        now = self._clock()
        if not self._part:  # however long other things took
            self._part, self._until = True, max(self._until or now + self._turn_s, now + self._turn_s / 4)
        return now <= self._until

    def _begin(self) -> None:
        self._scheduled, self._until = True, 0.0
        asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """After the parts of a turn."""
        late = self._late
        if late:
            self._at_once = max(1, self._at_once // 2)
        elif self._at_once < self._most_at_once and self._until - self._clock() > self._turn_s / 2:
            self._at_once = min(2 * self._at_once, self._most_at_once)
        for line, waiter in reversed(late):
            line.appendleft(waiter)
        late.clear()
        self._part, self._woken, self._read, self._entering = False, 0, 0, 0
        if not (self._running or self._new or self._unread):
            self._scheduled = False
            return
        self._until = self._clock() + self._turn_s
        asyncio.get_running_loop().call_soon(self._next_turn)
        first, second = self._lines
        share = max((self._at_once + 1) // 2, self._at_once - len(second))
        self._release(first, share)
        self._release(second, self._at_once - self._woken)
        self._lines.reverse()  # one of two, if there is time for one only
        while self._unread and self._read < READS:
            self._read += 1
            self._unread.popleft()()

    def _release(self, line: "deque[asyncio.Future[None]]", count: int) -> None:
        """Wake the first ``count``. Each line has parts of one kind, which take less time one after the other."""
        while line and count:
            waiter = line.popleft()
            if not waiter.done():  # else it was cancelled
                count -= 1
                self._woken += 1
                self._entering += line is self._new
                waiter.set_result(None)


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
        windows = int((now - self._began) / LAG_WINDOW_S)
        if windows:
            self._before, self._now = (self._now if windows == 1 else 0.0), 0.0
            self._began += windows * LAG_WINDOW_S


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
                due = self._clock() + LAG_EVERY_S
                await asyncio.sleep(LAG_EVERY_S)
                self.measured(self._clock() - due, *times.lap())
