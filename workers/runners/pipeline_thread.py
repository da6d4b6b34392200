"""The thread in which an engine without KV blocks is built, runs and is closed, and what its users share.

Engines of images, videos and embeddings are used in it. Their runners have no stage before or after them.
"""

import asyncio
import os
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from penstock.configs.settings import WorkerSettings
from penstock.schemas import control, fleet
from penstock.schemas.kv import KvDump
from penstock.workers.session.process import ProcessEvents
from penstock.workers.session.request_runner import SessionContext, StageInput
from penstock.workers.session.requests import RunningRequest

JOIN_S = 5.0

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


class PipelineEngine(Protocol):
    """What any engine in the thread has."""

    name: str
    load_seconds: float

    def close(self) -> None: ...


Engine = TypeVar("Engine", bound=PipelineEngine)


class PipelineBackend(Generic[Engine]):
    """Builds an engine in the thread, and closes it there.

    Args:
        build: makes the engine. Its errors are those of a model that cannot be served, reported before the broker is
            needed.
    """

    def __init__(self, settings: WorkerSettings, events: ProcessEvents, build: Callable[[], Engine]) -> None:
        self.join_s = JOIN_S
        self.load_seconds = 0.0
        self._settings = settings
        self._events = events
        self._build = build
        self._thread = PipelineThread()
        self._built: Engine | None = None

    @property
    def _engine(self) -> Engine:
        assert self._built is not None
        return self._built

    async def start(self) -> None:
        self._built = await asyncio.wrap_future(self._thread.call(self._build))
        self.load_seconds = self._built.load_seconds

    async def close(self) -> None:
        if self._built is not None:
            self._thread.call(self._built.close)

    def stop(self, timeout: float) -> bool:
        return self._thread.stop(timeout)


class PipelineRunnerBase(Generic[Engine]):
    """What a runner in the thread does as every other one: it holds no blocks, and each request is one stage.

    Args:
        engine_failed: called once when the engine is broken; nothing more begins then.
    """

    def __init__(
        self,
        context: SessionContext,
        thread: PipelineThread,
        engine: Engine,
        engine_failed: Callable[[BaseException], None],
    ) -> None:
        self._context = context
        self._requests = context.requests
        self._terminal = context.terminal
        self._thread = thread
        self._engine = engine
        self._engine_failed = engine_failed

    def accepts_stop(self, running: RunningRequest) -> bool:
        return True

    def release_input(self, stage_input: StageInput) -> None:
        """No stage comes before this one."""

    async def not_begun(self) -> list[RunningRequest]:
        return [running for running in self._requests.running.values() if not running.started_ns]

    async def close(self) -> None:
        """Nothing to do: there are only the session's tasks."""

    def _registration(
        self, state: fleet.WorkerState, slots: int, load: fleet.Load, max_tokens: int = 0, **made: Any
    ) -> fleet.Registration:
        """
        Args:
            max_tokens: of one input.
            made: what the engine makes, as fields of ``Registration``.
        """
        context, settings, model = self._context, self._context.settings, self._context.model
        return fleet.Registration(
            worker=context.id,
            model=model.name,
            role=settings.role,
            engine=self._engine.name,
            epoch=context.epoch,
            block_size=settings.block_size,
            total_blocks=0,
            slots=slots,
            max_model_len=max_tokens,
            state=state,
            aliases=model.aliases,
            revision=model.revision,
            kv_events=False,
            load=load,
            host=socket.gethostname(),
            pid=os.getpid(),
            name=settings.name,
            connection=model.connection,
            **made,
        )

    @property
    def holds_leases(self) -> bool:
        return False

    async def dump(self, page: int) -> KvDump:
        return KvDump(self._context.id, self._context.epoch, 0, ())

    def release(self, order: control.Release) -> control.Ok:
        return control.Ok(error="this worker pins no blocks")

    async def push(self, order: control.Push) -> control.Pushed:
        return control.Pushed("refused", "this worker holds no blocks")

    def pin_prefix(self, order: control.PinPrefix) -> control.PrefixPinned:
        return control.PrefixPinned(cause="this worker holds no blocks")

    async def rest(self, order: control.Sleep | control.Wake) -> control.Ok:
        return control.Ok("a worker of this role does not sleep")

    async def profile(self, order: control.RecordTrace) -> control.RecordedTrace:
        return control.RecordedTrace(error="a worker of this role records no trace; ask one that computes tokens")
