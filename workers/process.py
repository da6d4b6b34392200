"""The shell of a worker process: its broker connection, a FastStream application, one life after another.

What computes is built before the first life and outlives each of them.
"""

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog
from faststream import FastStream
from faststream.nats import NatsMessage
from prometheus_client import CollectorRegistry, start_http_server

from configs.settings import WorkerSettings
from infra.bus import loop_lag
from infra.bus.connection import Bus
from infra.bus.faststream_app import OwnConnection, raw
from schemas import control, wire
from schemas.subjects import Subjects
from workers.life import Life
from workers.metrics import Metrics
from workers.multiprocess_metrics import VARIABLE, Merged
from workers.stopping import EndProcess, StoppedEarly, Stopping

log = structlog.get_logger("worker")

MAX_ORDERS = 64
FAIL_S = 15.0  # for giving everything back after a failure

EXIT_OK = 0
EXIT_ENGINE = 70  # EX_SOFTWARE: the engine failed
EXIT_START = 69  # EX_UNAVAILABLE: the broker or its streams are not there (yet)
EXIT_CONFIG = 2  # starting again would not help

L = TypeVar("L", bound=Life)


class WorkerProcess(ABC, Generic[L]):
    """Made in the event loop that serves it."""

    def __init__(self, settings: WorkerSettings, end_process: EndProcess = os._exit) -> None:
        self._settings = settings
        self._stopping = Stopping(settings.drain_s, end_process)
        self._metrics = Metrics(CollectorRegistry())
        if shared := os.environ.get(VARIABLE):
            self._metrics.registry.register(Merged(Path(shared)))
        self._session: L | None = None
        self._broken = asyncio.Event()
        self._error: BaseException | None = None
        self._innocent = False

    @abstractmethod
    async def serve(self) -> int:
        """Until SIGTERM; the exit code."""

    def _broke(self, error: BaseException) -> None:
        """What computes is broken, and the process with it."""
        self._error = self._error or error
        self._broken.set()
        self._stopping.within(FAIL_S)

    def _task_failed(self, error: BaseException) -> None:
        """A background task is, and the process with it; through no fault of what is computed."""
        self._innocent = self._error is None
        self._broke(error)

    async def _live(self, bus: Bus, make: Callable[[], L], load_seconds: float) -> int:
        """Measure, obey and live, until told to stop; closes the connection."""
        loop = asyncio.get_running_loop()
        self._metrics.load_time.set(load_seconds)
        self._metrics.tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
        bus.tasks.spawn(loop_lag.gauge(self._metrics.registry, "worker").watch(), name="loop-lag")
        if self._settings.metrics_port and self._settings.publish_events_and_metrics:
            start_http_server(self._settings.metrics_port, self._settings.metrics_host, registry=self._metrics.registry)
        app = self._application(bus)
        await app.start()
        try:
            return await self._sessions(bus, make)
        finally:
            bus.closing = True  # stopping FastStream closes the connection
            with contextlib.suppress(Exception):
                await asyncio.wait_for(app.stop(), 2)

    async def _sessions(self, bus: Bus, make: Callable[[], L]) -> int:
        """Live one session after another until told to stop or the engine breaks."""
        while True:
            session = self._session = make()
            control_subject = await self._controlled(session, bus)
            try:
                await self._stopping.unless_asked(session.open())
            except StoppedEarly:
                await session.fence()
                raise
            await self._interrupted(session)
            try:
                if self._broken.is_set():
                    what = "a task of the worker failed" if self._innocent else "engine_error"
                    await session.fail(f"{what}: {self._error!r}"[:500], poison=not self._innocent)
                    return EXIT_ENGINE
                if self._stopping.asked:
                    log.info("draining", worker=session.id)
                    await session.drain(self._settings.drain_s)
                    return EXIT_OK
                log.warning("session_lost", worker=session.id, action="registering anew")
                await session.fence()
            finally:  # not before: others release and fetch blocks until the end
                await control_subject.stop()

    async def _interrupted(self, session: L) -> None:
        """Until the process is asked to stop, something is broken, or the session has lost its lease."""
        waits = [
            asyncio.create_task(waiting, name=name)
            for name, waiting in (
                ("stop", self._stopping.wait()),
                ("broken", self._broken.wait()),
                ("lost", session.lost.wait()),
            )
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _application(self, bus: Bus) -> FastStream:
        """Control messages: FastStream subscribers on our connection."""
        broker = OwnConnection(bus)
        subjects = Subjects(self._settings.namespace)

        @broker.subscriber(subjects.cancel, decoder=raw)
        async def cancel(message: NatsMessage) -> None:
            order = control.decode_cancel(message.body)
            if self._session is not None:
                await self._session.on_cancel(order.request, order.reason)

        self._broker = broker
        return FastStream(broker, logger=None)

    async def _controlled(self, session: L, bus: Bus) -> Any:
        """Subscribe to the session's control subject."""

        async def order(message: NatsMessage) -> bytes:
            return await self._obey(session, message.body)

        # Several at once: a push of blocks takes as long as its transfer.
        subscriber = self._broker.subscriber(bus.subjects.control(session.id), decoder=raw, max_workers=MAX_ORDERS)
        subscriber(order)
        await subscriber.start()
        return subscriber

    async def _obey(self, session: L, body: bytes) -> bytes:
        order = control.decode_worker(body)
        if isinstance(order, control.DumpKv):
            return wire.encode(await session.dump(order.page))
        if isinstance(order, control.Drain):
            self._stopping.ask()
            return wire.encode(control.Ok())
        if isinstance(order, control.Push):
            return wire.encode(await session.push(order))
        return wire.encode(session.release(order))
