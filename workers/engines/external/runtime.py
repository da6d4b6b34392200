"""A started engine of another package: its event loop, and the queue from that loop to the engine thread."""

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import structlog

from penstock.workers.engines.external.loop import LoopThread

log = structlog.get_logger("engine")

CLOSE_S = 5.0
SHUT_DOWN_S = 60.0

R = TypeVar("R")
A = TypeVar("A", covariant=True)


class EngineFailed(NamedTuple):
    """The engine, or a task that reads from it, has failed."""

    error: BaseException


class Inbox:
    """Events from the loop thread (and others) to the engine thread, in order.

    Attributes:
        failure: the first error of the engine; set before its event is read.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, event: Any) -> None:
        """Queue a ``SequenceUpdate``, an ``EngineFailed``, or an event of the adapter's own. From any thread."""
        if isinstance(event, EngineFailed):
            self.failure = self.failure or event.error
        self._queue.put(event)

    def get(self, timeout: float = 0.0) -> Any:
        """The next event; None: none arrived within ``timeout`` seconds."""
        try:
            return self._queue.get(timeout=timeout) if timeout else self._queue.get_nowait()
        except queue.Empty:
            return None

    def __bool__(self) -> bool:
        return not self._queue.empty()


@dataclass(frozen=True)
class EngineRuntime(Generic[A]):
    """A started engine and what it needs to run.

    Attributes:
        llm: the engine.
        api: the parts of its package that the adapter uses.
        loop: where its outputs are followed.
        resources: closed with the engine, ``loop`` last.
    """

    llm: Any
    api: A
    loop: LoopThread
    resources: contextlib.ExitStack
    inbox: Inbox = field(default_factory=Inbox)


def bounded(function: Callable[..., R], *arguments: Any, seconds: float, **more: Any) -> R:
    """Call a function that may never return, for example of an engine that hangs.

    Raises:
        TimeoutError: it has not returned in time; it goes on in a thread of its own.
        Exception: its own.
    """
    answer: Future[R] = Future()

    def call() -> None:
        try:
            answer.set_result(function(*arguments, **more))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=call, name="bounded-call", daemon=True).start()
    return answer.result(seconds)


def shut_down(llm: Any, seconds: float = SHUT_DOWN_S) -> None:
    """Shut an engine down, within a bound; errors are logged only."""
    try:
        bounded(llm.shutdown, seconds=seconds)
    except Exception as error:
        log.error("engine_shutdown_failed", error=repr(error))
