"""Event-loop lag: measured as a gauge of every process, and kept short by slicing long work."""

import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable

from infra.metrics.scope import MetricScope

EVERY_S = 0.1  # each measurement costs 30 to 60 CPU-µs
WINDOW_S = 30.0
SLICE_S = 0.002
TURN_S = 0.016  # 0.004 costs the pipeline 7 % more CPU per request at 64 connections: smaller batches for all behind
# Garbage collection of a process that serves: new objects between two collections of the young ones (Python's default),
# how many of these between two of the middle generation (1 ms each), and how many of those between two of everything
# (20 to 40 ms with 2,500 open streams; with Python's default, several in a burst of requests).
SERVING_OBJECTS, SERVING_YOUNG, SERVING_MIDDLE = 700, 5, 2_000


class TimeSlice:
    """For work in many small parts that never await: call ``yield_if_spent`` after each.

    A slice begins with its first part. What is published within one slice leaves in one write and arrives in one read,
    so to yield earlier costs every process behind this one a wake-up.
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
    """For many tasks that become ready together, each with a short part that never awaits: ``enter`` before each part.

    The parts of one turn of the event loop take ``TURN_S`` and one part more at most. The others wait for later turns,
    first come, first served, and what else is due runs in between. Otherwise a thousand requests that arrive at once
    stop the loop until all of them are prepared. Processor time counts: while other processes have the core, nothing is
    gained by smaller portions.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._late: list[asyncio.Future[None]] = []  # released, but their turn's time was over
        self._at_once = 1  # how many of those that wait are released in one turn
        self._began: float | None = None  # the first part of this turn; None: none has
        self._scheduled = False

    async def enter(self) -> None:
        """Return in this turn if there is time left, else in a later one."""
        loop = asyncio.get_running_loop()
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._next_turn)
        queue: deque[asyncio.Future[None]] | list[asyncio.Future[None]] = self._waiting
        while queue or not self._has_time():
            turn = loop.create_future()
            queue.append(turn)
            await turn
            queue = self._late

    def _has_time(self) -> bool:
        now = self._clock()
        if self._began is None:
            self._began = now
        return now - self._began <= TURN_S

    def _next_turn(self) -> None:
        """Behind the parts of a turn."""
        took = 0.0 if self._began is None else self._clock() - self._began
        self._began = None
        waiting = self._waiting
        waiting.extendleft(reversed(self._late))
        self._late.clear()
        if not waiting:
            self._scheduled, self._at_once = False, 1
            return
        if took > TURN_S:
            self._at_once = max(1, self._at_once // 2)
        elif took < TURN_S / 2:
            self._at_once = min(2 * self._at_once, len(waiting))
        for _ in range(min(self._at_once, len(waiting))):
            turn = waiting.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
        asyncio.get_running_loop().call_soon(self._next_turn)


def freeze_loaded() -> None:
    """Exempt everything that is loaded by now from garbage collection, once a process is ready to serve.

    A full collection of a gateway's or worker's modules stops it for 30 to 50 ms (a model's for 200 ms), once in a few
    thousand requests. From here on only young objects are collected often, so what is made for each request must not be
    left behind in reference cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(SERVING_OBJECTS, SERVING_YOUNG, SERVING_MIDDLE)


class LoopLag:
    """The lag of this event loop. Run ``watch`` in the background.

    ``worst_s`` is the maximum of the last 30 to 60 s, so that no scrape misses it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._worst = self._before = 0.0

    @property
    def worst_s(self) -> float:
        self._turn()
        return max(self._worst, self._before)

    def late(self, seconds: float) -> None:
        """Something ran this many seconds after it was due."""
        self._turn()
        self._worst = max(self._worst, seconds)

    async def watch(self) -> None:
        while True:
            due = self._clock() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self.late(self._clock() - due)

    def _turn(self) -> None:
        now = self._clock()
        windows = int((now - self._began) / WINDOW_S)
        if windows:
            self._before, self._worst = (self._worst if windows == 1 else 0.0), 0.0
            self._began += windows * WINDOW_S


def gauge(scope: MetricScope) -> LoopLag:
    """Add a process's gauge to its metrics. Run ``watch`` of the result."""
    lag = LoopLag()
    about = "longest delay of a due callback by the event loop, in the last 30 to 60 s"
    scope.gauge("loop_lag_seconds", about).set_function(lambda: lag.worst_s)
    return lag
