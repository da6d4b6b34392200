"""An event loop in a thread of its own, open as long as its engine.

Asynchronous engines (TensorRT-LLM, vLLM, SGLang) bind their results, events and statistics to the loop that runs when
they are requested, and their threads refuse to deliver to a loop that has stopped. One loop therefore serves all of it.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger("engine")


class LoopThread:
    """Starts at once; ``close`` cancels what still runs and joins the thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the loop, after those posted before."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def run(self, work: Coroutine[Any, Any, Any], timeout: float) -> Any:
        """Run in the loop and wait for it.

        Raises:
            TimeoutError: it took longer, and was cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout), self._loop)
        return future.result(timeout + 5.0)

    def task(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Start a task; call this in the loop."""
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def later(self, seconds: float, function: Callable[..., object], *arguments: object) -> None:
        """Call a function after ``seconds``; call this in the loop."""
        self._loop.call_later(seconds, function, *arguments)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:  # those that matter report it themselves
            log.error("engine_task_failed", task=task.get_name(), error=repr(task.exception()))

    def cancel_all(self, timeout: float) -> bool:
        """Cancel all tasks and wait for their ends; False: some did not end in time."""

        async def cancel() -> None:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        try:
            self.run(cancel(), timeout)
        except TimeoutError:
            return False
        return True

    def close(self, timeout: float = 5.0) -> bool:
        """End the thread; False: it still hangs. May be called twice."""
        if self._loop.is_closed():
            return True
        ended = self.cancel_all(timeout)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout)
        return ended and not self._thread.is_alive()
