"""Supervises one child process: restarts it when it exits, never twice at once, and stops it in bounded time.

Ctrl-C and SIGTERM are events (``StopSignals``): the first stops in order, the second at once. SIGUSR1 resumes.
"""

import asyncio
import contextlib
import os
import signal
import stat
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import structlog

from penstock.schemas.control import DRAINED

log = structlog.get_logger("up")

USAGE = 2  # a child's exit status for settings that it cannot use: a restart would not help
CANCEL_AGAIN_S = 0.1  # a cancellation can get lost: asyncio.wait_for before Python 3.12
LOOK_S = 0.25  # between two checks of a child that must not be stopped
RESUME = signal.SIGUSR1
_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Child(Protocol):
    """Something that runs, ends and can be started again."""

    name: str
    role: str

    @property
    def pid(self) -> int | None:
        """None: not running."""

    async def start(self) -> None: ...

    async def wait(self) -> int:
        """Wait for its end; the exit status, negative for a signal."""

    def terminate(self) -> None: ...

    def hurry(self) -> None:
        """It was asked to end, and is to finish no work any more, if it has such."""

    def kill(self) -> None: ...


@dataclass(slots=True)
class RestartBackoff:
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
        standstill_s: how long the child may be stopped (SIGSTOP, a debugger's break) before it is killed and
            restarted; None: no limit.
        give_up: asked after each exit; True: the child is not started again.
        ended: awaited after each exit that was not asked for, before the next start.
        restarted: runs beside the child after each start but the first, and is cancelled when the child ends.
    """

    def __init__(
        self,
        child: Child,
        changed: Callable[["Keeper"], None] | None = None,
        *,
        standstill_s: float | None = None,
        give_up: Callable[["Keeper"], bool] | None = None,
        ended: Callable[["Keeper"], Awaitable[None]] | None = None,
        restarted: Callable[[], Coroutine[object, object, None]] | None = None,
    ) -> None:
        self.child = child
        self._standstill_s = standstill_s
        self.exits = 0
        self.drained = False  # it ended by `penstock drain` and is not started again until ``resume``
        self.last_status: int | None = None
        self._changed = changed or (lambda _: None)
        self._give_up = give_up or (lambda _: False)
        self._on_ended = ended
        self._on_restarted = restarted
        self._backoff = RestartBackoff()
        self._stopping = self._asked = False
        self._wake = asyncio.Event()  # ends the pause before the next start
        self._task: asyncio.Task[None] | None = None
        self._began = 0.0

    async def start(self) -> None:
        """Start the child, and supervise it from then on. Raises what the first start raises."""
        self._began = time.monotonic()
        await self.child.start()
        self._changed(self)
        self._task = asyncio.create_task(self._keep(), name=f"keep-{self.child.name}")

    async def stop(self, timeout_s: float) -> None:
        """End the child: asked first, killed after ``timeout_s``."""
        self._end()
        self.child.terminate()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=timeout_s)
            if not self._task.done():
                log.warning("process_killed", name=self.child.name, reason=f"did not end within {timeout_s:g} s")
                self.child.kill()
            await self._task

    def restart(self) -> None:
        """Have the child end, and start it again soon: an end that was asked for says nothing about the next run."""
        self._asked = True
        self.child.terminate()

    async def ended(self, within_s: float) -> None:
        """Wait until the child has ended, for ``within_s`` at most. From now on it is not started again."""
        self._end()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=within_s)

    def hurry(self) -> None:
        """While it is being stopped: it finishes no work any more."""
        self.child.hurry()

    def resume(self) -> None:
        """Start the child again if it was drained; else nothing happens."""
        if self.drained:
            self.drained = False
            self._wake.set()

    def kill(self) -> None:
        """End the child at once; ``stop`` still has to be awaited."""
        self._end()
        self.child.kill()

    def _end(self) -> None:
        self._stopping = True
        self._wake.set()

    async def _keep(self) -> None:
        running = True
        while True:
            if running:
                self.last_status = await (self._ended_again() if self.exits else self._ended())
            if self._stopping:
                return
            self.exits += 1
            if running and self._on_ended is not None:
                await self._on_ended(self)
            if self._give_up(self):
                self._changed(self)
                return
            self.drained = running and self.last_status == DRAINED
            if self.drained:
                pause = None
                log.info("process_drained", name=self.child.name, action="starts again after `penstock restart`")
            else:
                alive_s = time.monotonic() - self._began
                pause = self._backoff.first_s if running and self._asked else self._backoff.after(alive_s)
                self._asked = False
                log.warning("process_ended", name=self.child.name, status=self.last_status, restart_in_s=pause)
            self._changed(self)
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            if self._stopping:
                return
            running = await self._restart()

    async def _ended_again(self) -> int:
        """As ``_ended``, of a child that was started again."""
        if self._on_restarted is None:
            return await self._ended()
        beside = asyncio.create_task(self._on_restarted(), name=f"restarted-{self.child.name}")
        try:
            return await self._ended()
        finally:
            while not beside.done():
                beside.cancel()
                await asyncio.wait([beside], timeout=CANCEL_AGAIN_S)
            await asyncio.gather(beside, return_exceptions=True)

    async def _ended(self) -> int:
        """The child's exit status, once it has one; a child at a standstill is killed.

        A standstill is measured in checks: when this process was stopped, too, its clock says nothing about the child.
        """
        ended = asyncio.ensure_future(self.child.wait())
        stood_s = 0.0
        while True:
            await asyncio.wait([ended], timeout=LOOK_S if self._standstill_s is not None else None)
            if ended.done():
                return ended.result()
            pid = self.child.pid
            stood_s = stood_s + LOOK_S if pid is not None and is_stopped(pid) else 0.0
            if self._standstill_s is not None and stood_s > self._standstill_s:
                log.warning(
                    "process_at_a_standstill", name=self.child.name, seconds=self._standstill_s, action="killed"
                )
                self.child.kill()
                stood_s = 0.0

    async def _restart(self) -> bool:
        self._began = time.monotonic()
        self.drained = False
        try:
            await self.child.start()
        except Exception as error:  # a port still taken, no memory to fork: tried again later
            log.error("restart_failed", name=self.child.name, error=str(error))
            return False
        if self._stopping:  # asked while the child was starting and could not be signalled
            self.child.terminate()
        self._changed(self)
        return True


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a debugger (Linux; elsewhere never)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


class StopSignals:
    """Within ``with StopSignals() as stop``, signals set ``stop.asked``, then ``stop.insisted``.

    Args:
        resume: called on SIGUSR1.
    """

    def __init__(self, resume: Callable[[], None] | None = None) -> None:
        self._resume = resume
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()

    def __enter__(self) -> "StopSignals":
        loop = asyncio.get_running_loop()
        for number in _ALL:
            loop.add_signal_handler(number, self._on_signal)
        if self._resume is not None:
            loop.add_signal_handler(RESUME, self._resume)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        loop = asyncio.get_running_loop()
        for number in _ALL:
            loop.remove_signal_handler(number)
        if self._resume is not None:
            loop.remove_signal_handler(RESUME)

    def _on_signal(self) -> None:
        leave_closed_terminal()
        (self.insisted if self.asked.is_set() else self.asked).set()


def leave_closed_terminal() -> None:
    """If the terminal was closed, discard output: each line would raise and interrupt the stop."""
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(fd).st_mode) and not os.isatty(fd):  # a device, but no terminal any more
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, fd)
                os.close(nowhere)
