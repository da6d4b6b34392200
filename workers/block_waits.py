"""Who waits for blocks or slots of the engine's, first come, first served in each pool. Pure; lives in its thread.

Whoever is first is asked again when something has come free, and only then those behind it. How long one waits is the
asker's matter: it gives up, and is answered with nothing.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from workers.engines.base import Engine, RequestError

T = TypeVar("T")


class BlockWait(Generic[T]):
    """``answer`` gets what ``take`` gave, None if it was given up, or the RequestError that ``take`` raised."""

    __slots__ = ("answer", "pool", "take")

    def __init__(self, pool: str, take: Callable[[Engine], T | None]) -> None:
        self.pool = pool
        self.take = take
        self.answer: Future[T | None] = Future()

    def failed(self, asked: "Future[None]") -> None:
        """It could not even be asked."""
        error = asked.exception()
        if error is not None and not self.answer.done():
            self.answer.set_exception(error)


class BlockWaitQueue:
    def __init__(self) -> None:
        self._queues: dict[str, deque[BlockWait[Any]]] = {}

    def __bool__(self) -> bool:
        """Somebody waits."""
        return bool(self._queues)

    def add(self, wait: BlockWait[Any], engine: Engine) -> None:
        """Answered at once if nobody is before it and there is room."""
        self._queues.setdefault(wait.pool, deque()).append(wait)
        self._serve(wait.pool, engine)

    def cancel_wait(self, wait: BlockWait[Any], engine: Engine) -> None:
        """Answer with nothing, unless it was answered."""
        queue = self._queues.get(wait.pool, ())
        if wait in queue:
            self._queues[wait.pool].remove(wait)
            wait.answer.set_result(None)
            self._serve(wait.pool, engine)  # the next one may need less

    def serve(self, engine: Engine) -> None:
        """Something may have come free."""
        for pool in list(self._queues):
            self._serve(pool, engine)

    def fail(self, error: BaseException) -> None:
        """There is no engine any more."""
        for queue in self._queues.values():
            for wait in queue:
                wait.answer.set_exception(error)
        self._queues.clear()

    def _serve(self, pool: str, engine: Engine) -> None:
        queue = self._queues[pool]
        while queue:
            wait = queue[0]
            try:
                found = wait.take(engine)
            except RequestError as error:
                queue.popleft()
                wait.answer.set_exception(error)
                continue
            if found is None:
                return
            queue.popleft()
            wait.answer.set_result(found)
        del self._queues[pool]
