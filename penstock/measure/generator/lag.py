"""Whether the load generator is itself the bottleneck: how late its event loop runs, and its CPU time."""

import asyncio
import os
import time
from collections.abc import Callable


def own_seconds() -> float:
    times = os.times()
    return times.user + times.system


_EVERY_S = 0.02


class LagMeter:
    """A context manager that measures while it is entered.

    Attributes:
        late_s: how much later than asked a timer of the event loop ran, each time.
        cpu_share: of one core that this process used, over ``seconds``.
    """

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self.cpu_share = 0.0
        self.seconds = 0.0
        self._task: asyncio.Task[None] | None = None
        self._began = self._cpu = 0.0

    async def __aenter__(self) -> "LagMeter":
        self._began, self._cpu = time.perf_counter(), own_seconds()
        self._task = asyncio.create_task(self._measure(), name="lag meter")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.seconds = max(1e-9, time.perf_counter() - self._began)
        self.cpu_share = (own_seconds() - self._cpu) / self.seconds

    async def _measure(self) -> None:
        while True:
            due = time.perf_counter() + _EVERY_S
            await asyncio.sleep(_EVERY_S)
            self.late_s.append(max(0.0, time.perf_counter() - due))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's event loop. asyncio's own runs late at a few thousand requests per second."""
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
