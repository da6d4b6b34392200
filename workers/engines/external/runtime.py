"""A started engine of another package: its event loop, and the queue from that loop to the engine thread."""

import contextlib
import queue
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import structlog

from workers.engines.loop import LoopThread

log = structlog.get_logger("engine")

CLOSE_S = 5.0

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


def shut_down(llm: Any) -> None:
    """Shut an engine down; errors are logged only."""
    try:
        llm.shutdown()
    except Exception as error:
        log.error("engine_shutdown_failed", error=repr(error))
