"""The thread in which a diffusion engine is built, runs and is closed."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class PipelineThread:
    """A daemon thread: a computation that cannot be stopped does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pipeline", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], T]) -> "Future[T]":
        """Run ``work`` after everything submitted before."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)

        self._calls.put(run)
        return future

    def stop(self, timeout: float) -> bool:
        """End the thread after the calls submitted; False: it still runs after ``timeout`` seconds."""
        self._calls.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._calls.get()) is not None:
            work()
