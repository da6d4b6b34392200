"""Owners of background tasks: a group handles the failure of each task, and ends its tasks when it closes.

A process has one group; its components have groups within it (``Tasks.group``). A task that fails either fails what it
worked for (``on_failure``), or shuts the process down so that its supervisor restarts it. No task stops silently.
"""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import structlog

from penstock.schemas.errors import Code, ServingError

log = structlog.get_logger("tasks")

EXIT_OK = 0
EXIT_FAILED = 70  # EX_SOFTWARE: a supervisor should start the process again
EXIT_STUCK = 71  # EX_OSERR: asked to stop, it did not within its bound
CLOSE_S = 3.0
CANCEL_AGAIN_S = 0.1  # a cancellation can get lost: asyncio.wait_for before Python 3.12, handlers that suppress it

Failed = Callable[[BaseException], None]
T = TypeVar("T")


EXACT_TASKS = 1000  # above it, tasks that have ended and were not yet collected as garbage count, too


def count_tasks(loop: asyncio.AbstractEventLoop) -> int:
    """The tasks of the process's event loop. Any thread may call it.

    ``asyncio.all_tasks`` visits each, which takes 3 ms for 7,500, and begins again if one is added meanwhile. So above
    ``EXACT_TASKS`` the size of asyncio's own set is returned.
    """
    known = getattr(asyncio.tasks, "_all_tasks", None)  # Python 3.11
    if known is None and sys.version_info < (3, 14):
        known = getattr(asyncio.tasks, "_scheduled_tasks", None)
    return len(known) if known is not None and len(known) > EXACT_TASKS else len(asyncio.all_tasks(loop))


class StoppedEarly(Exception):
    """The process was asked to stop before it served."""


async def unless(asked: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` and return its result.

    Raises:
        StoppedEarly: the event was set first; ``work`` was cancelled.
    """
    task, stopped = asyncio.create_task(work, name="start"), asyncio.create_task(asked.wait(), name="asked")
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise StoppedEarly
        return task.result()
    finally:
        stopped.cancel()
        task.cancel()


class ProcessStop:
    """When and why a process ends: on SIGTERM or SIGINT, or because one of its tasks failed.

    Args:
        bound_s: the process ends this many seconds later in any case, even if a thread hangs or a cancellation was
            lost; None: no bound.
    """

    def __init__(self, *, bound_s: float | None = None, end_process: Callable[[int], object] = os._exit) -> None:
        self._event = asyncio.Event()
        self._bound_s = bound_s
        self._end_process = end_process
        self.error: BaseException | None = None  # the first one

    def on_signals(self) -> None:
        """End on SIGTERM and SIGINT."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self.ask)

    def ask(self) -> None:
        if self._bound_s is not None and not self._event.is_set():
            # A thread, because the event loop itself may hang.
            threading.Thread(target=self._end, args=(self._bound_s,), name="stop-bound", daemon=True).start()
        self._event.set()

    def failed(self, error: BaseException) -> None:
        """End because of an error: the ``on_fatal`` of the process's ``Tasks``."""
        self.error = self.error or error
        self.ask()

    def _end(self, bound_s: float) -> None:
        time.sleep(bound_s)
        log.error("stop_timeout", seconds=bound_s, action="exiting")
        self._end_process(self.status or EXIT_STUCK)

    async def wait(self) -> None:
        await self._event.wait()

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T:
        """A step of the start, which takes long where the broker is not there yet. Raises what ``unless`` raises."""
        return await unless(self._event, work)

    @property
    def is_asked(self) -> bool:
        return self._event.is_set()

    @property
    def status(self) -> int:
        """The process's exit status."""
        return EXIT_OK if self.error is None else EXIT_FAILED


class Tasks:
    """Background tasks of one process or component. Close it before what its tasks use.

    Guarantees: no task fails unnoticed: its failure goes to its own handler, or to ``on_fatal``. No task outlives its
    group by more than the bound of ``aclose``.

    Args:
        name: of the owner, for the log.
        on_fatal: ends the process in order; called with the failure of a task that has no handler of its own. Default:
            the process sends itself a SIGTERM.
    """

    def __init__(self, name: str, on_fatal: Failed | None = None) -> None:
        self.name = name
        self._on_fatal = on_fatal or _terminate
        self._tasks: dict[asyncio.Task[Any], Failed | None] = {}
        self._groups: set[Tasks] = set()
        self._parent: Tasks | None = None
        self._closed = False

    def __len__(self) -> int:
        """Running tasks, including those of its groups."""
        return len(self._tasks) + sum(map(len, self._groups))

    def group(self, name: str) -> "Tasks":
        """A group for a component: the same ``on_fatal``; closed with this group at the latest."""
        child = Tasks(f"{self.name}.{name}", self._on_fatal)
        child._parent = self
        child._closed = self._closed
        self._groups.add(child)
        return child

    def spawn(
        self, coroutine: Coroutine[Any, Any, Any], *, name: str, on_failure: Failed | None = None
    ) -> "asyncio.Task[Any]":
        """Run a coroutine in the background. In a closed group it is cancelled before its first step.

        Args:
            on_failure: called with what the coroutine raised. Without it, a failure ends the process.
        """
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks[task] = on_failure
        task.add_done_callback(self._ended)
        if self._closed:
            task.cancel()
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        on_failure = self._tasks.pop(task, None)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if on_failure is not None:
            try:
                on_failure(error)
                return
            except Exception as second:
                error = second
        log.error("task_failed", owner=self.name, task=task.get_name(), exc_info=error)
        if not self._closed:
            self._on_fatal(error)

    async def aclose(self, within_s: float = CLOSE_S) -> bool:
        """Cancel all tasks and wait for their end; False: one ignored it, which was logged. May be called again."""
        self._closed = True
        if self._parent is not None:
            self._parent._groups.discard(self)
        return await end(self._all(), within_s=within_s)

    def _all(self) -> "list[asyncio.Task[Any]]":
        self._closed = True
        tasks = list(self._tasks)
        for group in self._groups:
            tasks += group._all()
        return tasks


async def end(tasks: "Iterable[asyncio.Task[Any] | None]", *, within_s: float = CLOSE_S) -> bool:
    """Cancel tasks and wait at most ``within_s`` for their end; False: one still runs, which is logged.

    Raises nothing that a task raised. The calling task itself is left out.
    """
    current = asyncio.current_task()
    left = {task for task in tasks if task is not None and not task.done() and task is not current}
    deadline = time.monotonic() + within_s
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=min(CANCEL_AGAIN_S, max(0.0, deadline - time.monotonic())))
        if left and time.monotonic() >= deadline:
            log.error("tasks_still_running", tasks={task.get_name(): repr(task.get_coro()) for task in left})
            return False
    return True


def as_serving_error(error: BaseException, action: str) -> ServingError:
    """A task's failure as the error that its request ends with."""
    if isinstance(error, ServingError):
        return error
    return ServingError(Code.internal, f"{action} failed ({type(error).__name__}); the process's log has the details")


def _terminate(error: BaseException) -> None:
    """Send this process a SIGTERM, if it handles that; else call the event loop's exception handler."""
    if callable(signal.getsignal(signal.SIGTERM)):
        signal.raise_signal(signal.SIGTERM)
    else:
        asyncio.get_running_loop().call_exception_handler({"message": "a background task failed", "exception": error})
