"""Keeping one child process alive: started again when it ends, never twice at once, stopped in bounded time."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

log = structlog.get_logger("up")


class Child(Protocol):
    """Something that runs, ends and can be started again."""

    name: str
    role: str

    @property
    def pid(self) -> int:
        """0: not running."""

    async def start(self) -> None: ...

    async def wait(self) -> int:
        """Wait for its end; the exit status, negative for a signal."""

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(slots=True)
class Backoff:
    """How long to wait before the next start: doubling, from the first again once a run lasted."""

    first_s: float = 0.2
    most_s: float = 10.0
    lasting_s: float = 30.0
    _next_s: float = 0.0

    def after(self, alive_s: float) -> float:
        """The pause after a run of ``alive_s`` seconds."""
        if alive_s >= self.lasting_s or self._next_s == 0.0:
            self._next_s = self.first_s
        pause = self._next_s
        self._next_s = min(self.most_s, 2 * pause)
        return pause


class Keeper:
    """Owns one child from ``start`` to ``stop``.

    Args:
        changed: called after each start and each end.
    """

    def __init__(self, child: Child, changed: Callable[["Keeper"], None] | None = None) -> None:
        self.child = child
        self.exits = 0
        self.last_status: int | None = None
        self._changed = changed or (lambda _: None)
        self._backoff = Backoff()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._began = 0.0

    async def start(self) -> None:
        """Start the child; from then on it is kept. What the first start raises is raised here."""
        self._began = time.monotonic()
        await self.child.start()
        self._changed(self)
        self._task = asyncio.create_task(self._keep(), name=f"keep-{self.child.name}")

    async def stop(self, patience_s: float) -> None:
        """End the child: asked first, killed after ``patience_s``."""
        self._stopping.set()
        self.child.terminate()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=patience_s)
            if not self._task.done():
                log.warning("process_killed", name=self.child.name, reason=f"did not end within {patience_s:g} s")
                self.child.kill()
            await self._task

    def kill(self) -> None:
        """End the child at once; ``stop`` still has to be awaited."""
        self._stopping.set()
        self.child.kill()

    async def _keep(self) -> None:
        running = True
        while True:
            if running:
                self.last_status = await self.child.wait()
            if self._stopping.is_set():
                return
            self.exits += 1
            pause = self._backoff.after(time.monotonic() - self._began)
            log.warning("process_ended", name=self.child.name, status=self.last_status, restart_in_s=pause)
            self._changed(self)
            try:
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
                return
            except TimeoutError:
                pass
            running = await self._restart()

    async def _restart(self) -> bool:
        self._began = time.monotonic()
        try:
            await self.child.start()
        except Exception as error:  # a port still taken, no memory to fork: tried again later
            log.error("restart_failed", name=self.child.name, error=str(error))
            return False
        if self._stopping.is_set():  # asked while it was starting, when there was nobody to tell
            self.child.terminate()
        self._changed(self)
        return True
