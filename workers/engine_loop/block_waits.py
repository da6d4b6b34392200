"""Waits for blocks or slots of the engine, first come, first served in each pool. Pure; used in the engine thread.

The first wait is tried again when something has come free, and those behind it only after it succeeded. Waits have no
timeout here: the caller cancels.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from penstock.workers.engines.base import Engine, RequestError

T = TypeVar("T")


class BlockWait(Generic[T]):
    """``answer`` becomes what ``take`` returned, None if it was cancelled, or the RequestError that ``take`` raised."""

    __slots__ = ("answer", "pool", "take")

    def __init__(self, pool: str, take: Callable[[Engine], T | None]) -> None:
        self.pool = pool
        self.take = take
        self.answer: Future[T | None] = Future()

    def failed(self, asked: "Future[None]") -> None:
        """The wait could not be queued: the engine has ended."""
        error = asked.exception()
        if error is not None and not self.answer.done():
            self.answer.set_exception(error)


class BlockWaitQueue:
    def __init__(self) -> None:
        self._queues: dict[str, deque[BlockWait[Any]]] = {}

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._queues)

    def add(self, wait: BlockWait[Any], engine: Engine) -> None:
        """Queue a wait; answered at once if it is first and there is enough."""
        self._queues.setdefault(wait.pool, deque()).append(wait)
        self._serve(wait.pool, engine)

    def cancel_wait(self, wait: BlockWait[Any], engine: Engine) -> None:
        """Answer with None, unless it was answered."""
        queue = self._queues.get(wait.pool, ())
        if wait in queue:
            self._queues[wait.pool].remove(wait)
            wait.answer.set_result(None)
            self._serve(wait.pool, engine)  # the next wait may need less

    def serve(self, engine: Engine) -> None:
        """Try the waits again: something may have come free."""
        for pool in list(self._queues):
            self._serve(pool, engine)

    def fail(self, error: BaseException) -> None:
        """The engine has ended."""
        for queue in self._queues.values():
            for wait in queue:
                wait.answer.set_exception(error)
        self._queues.clear()

    def _serve(self, pool: str, engine: Engine) -> None:
        queue = self._queues[pool]
        while queue:
            wait = queue[0]
            try:
                reserved = wait.take(engine)
            except RequestError as error:
                queue.popleft()
                wait.answer.set_exception(error)
                continue
            if reserved is None:
                return
            queue.popleft()
            wait.answer.set_result(reserved)
        del self._queues[pool]
