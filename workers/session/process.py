"""A worker process: one broker connection, one backend, one session after another.

The backend (engine, thread, transport) is built before the first session and survives each of them. The first signal
drains the process within a bound, the second ends it at once. ``HURRY`` ends the drain: the supervisor's deadline for
all processes may come before this one's own.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

import structlog
from faststream import FastStream
from faststream.specification import AsyncAPI

from penstock.configs.settings import WorkerSettings
from penstock.infra.bus.connection import START_S, Bus, connect
from penstock.infra.bus.faststream_app import BusBroker, Subscriber
from penstock.infra.bus.publisher import Publisher
from penstock.infra.bus.tasks import StoppedEarly, count_tasks, unless
from penstock.infra.metrics.scope import loop_lag, process_scope, serve_page
from penstock.schemas import control, wire
from penstock.schemas.control import HURRY
from penstock.schemas.errors import ServingError
from penstock.schemas.subjects import Subjects
from penstock.workers.engines.engine_protocol import NodeLost
from penstock.workers.engines.external.engine_metrics import NativeSeries
from penstock.workers.metrics import user
from penstock.workers.metrics.multiprocess import VARIABLE, Merged
from penstock.workers.metrics.worker_metrics import WorkerMetrics
from penstock.workers.session.crash_journal import CrashJournal, End, returns, state_folder
from penstock.workers.session.request_runner import RequestRunner, ServedModel, SessionContext
from penstock.workers.session.session import WorkerSession, job_subscriber

log = structlog.get_logger("worker")

T = TypeVar("T")

GRACE_S = 4.5  # after the drain; supervisors wait a little longer
EXIT_LATE = 75  # EX_TEMPFAIL: it did not end in time

EndProcess = Callable[[int], Any]


class Stopping:
    """
    Args:
        drain_s: how long running requests may continue.
        end_process: ends the process at once, whatever its threads do.
        on_asked: called when the process is asked to stop.

    Attributes:
        hurried: the drain is over.
    """

    def __init__(
        self, drain_s: float, end_process: EndProcess = os._exit, on_asked: Callable[[], None] = lambda: None
    ) -> None:
        self._drain_s = drain_s
        self._end_process = end_process
        self._on_asked = on_asked
        self._asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self._signals = 0
        self._deadline = 0.0  # monotonic; 0: none
        self._timer: threading.Timer | None = None

    def on_signals(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal, signum)
        asyncio.get_running_loop().add_signal_handler(HURRY, self.hurry)

    def _on_signal(self, signum: int) -> None:
        self._signals += 1
        if self._signals > 1:
            log.warning("forced_exit", signal=signal.Signals(signum).name)
            self.end_now(128 + signum)
        self.ask()

    def ask(self) -> None:
        """Drain, and end the process ``GRACE_S`` after that at the latest."""
        if not self.asked:
            self._on_asked()
        self._asked.set()
        self.within(self._drain_s + GRACE_S)

    def hurry(self) -> None:
        """Drain no longer, and end the process ``GRACE_S`` from now at the latest."""
        log.info("drain_cut_short")
        self.ask()
        self.hurried.set()
        if self._deadline > time.monotonic() + GRACE_S:
            self.ended()
            self._timer = None
            self.within(GRACE_S)

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    async def wait(self) -> None:
        await self._asked.wait()

    def within(self, seconds: float) -> None:
        """End the process after this many seconds; only the first call counts. A thread: the event loop may hang."""
        if self._timer is None:
            self._deadline = time.monotonic() + seconds
            self._timer = threading.Timer(seconds, self._late)
            self._timer.daemon = True
            self._timer.start()

    def left(self, at_most: float) -> float:
        """Seconds until the process is ended, ``at_most`` at most."""
        return min(at_most, max(0.0, self._deadline - time.monotonic())) if self._deadline else at_most

    def ended(self) -> None:
        """The process ended in time: stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _late(self) -> None:
        log.error("stop_timeout", action="exiting although some work is unfinished")
        self.end_now(EXIT_LATE)

    def end_now(self, status: int) -> None:
        sys.stdout.flush()
        self._end_process(status)

    async def unless_asked(self, work: Coroutine[Any, Any, T]) -> T:
        """A step of the start. Raises what ``unless`` raises."""
        return await unless(self._asked, work)


MAX_CONTROL_REQUESTS = 64  # at once
MEMORY_NOTED_S = 1.0
FAIL_S = 15.0  # for requeueing everything after a failure
AGAIN_S, MOST_AGAIN_S = 1.0, 10.0  # between two tries to register again; the wait doubles

EXIT_OK = 0
EXIT_ENGINE = 70  # EX_SOFTWARE: the engine failed
EXIT_START = 69  # EX_UNAVAILABLE: the broker or its streams are not there (yet)
EXIT_CONFIG = 2  # a restart would not help


def cancel_subscriber(broker: BusBroker, subjects: Subjects) -> Subscriber:
    """Where cancellations arrive, of requests that run here or elsewhere."""
    return broker.orders(subjects.cancel, control.decode_cancel, payload=control.Cancel, title="Cancel")


def control_subscribers(broker: BusBroker, subjects: Subjects, worker: str) -> tuple[Subscriber, Subscriber]:
    """Where a worker is asked for anything; and for what operators may ask."""
    decode, several = control.decode_worker, MAX_CONTROL_REQUESTS  # a push of blocks takes as long as its transfer
    return (
        broker.orders(
            subjects.control(worker), decode, payload=control.WorkerControl, title="Control", at_once=several
        ),
        broker.orders(
            subjects.drain(worker),
            decode,
            payload=control.OperatorOrder,
            title="Drain",
            at_once=several,
        ),
    )


def application() -> FastStream:
    """What any worker reads from its broker, for ``faststream docs``; it cannot run."""
    broker, subjects = BusBroker(None), Subjects()

    async def handler(message: Any) -> None:
        raise NotImplementedError("this application is there for its documentation")

    for subscriber in (
        job_subscriber(broker, subjects, "{role}", "{worker}"),
        cancel_subscriber(broker, subjects),
        *control_subscribers(broker, subjects, "{worker}"),
    ):
        subscriber(handler)
    described = AsyncAPI(
        title="Penstock worker",
        version=version("penstock"),
        description="Bodies are MessagePack. Schemas describe them as JSON: byte strings are base64 there.",
    )
    return FastStream(broker, logger=None, specification=described)


class Backend(Protocol):
    """An engine, its thread, and the transport to its memory."""

    join_s: float  # for the engine to end in order
    load_seconds: float  # known after ``open``

    async def start(self) -> None:
        """Check the settings and start the engine's thread; may return before the engine is loaded.

        Raises:
            Exception: this configuration cannot be served.
        """

    async def open(self, connection: str) -> ServedModel:
        """Wait for the engine and open what it needs. ``connection``: name of the NATS connection.

        Raises:
            Exception: the engine or the transport cannot be opened.
        """

    def make_runner(self, context: SessionContext) -> RequestRunner: ...

    async def close(self) -> None:
        """Close everything except the thread; also after ``open`` failed."""

    def stop(self, timeout: float) -> bool:
        """End the engine and its thread (blocks); False: it still runs after ``timeout`` seconds."""


class ProcessEvents(Protocol):
    """What a backend reports to its process."""

    def engine_failed(self, error: BaseException) -> None:
        """In the event loop."""

    async def registration_changed(self) -> None: ...

    def stop(self) -> None:
        """Drain and end, as after SIGTERM. In the event loop."""


MakeBackend = Callable[[WorkerSettings, WorkerMetrics, ProcessEvents], Backend]


async def _result(task: "asyncio.Task[T]") -> T:
    return await task


class WorkerProcess:
    """Construct it in the event loop that serves it.

    Attributes:
        session: the present registration; None: there is none.
    """

    def __init__(self, settings: WorkerSettings, make_backend: MakeBackend, end_process: EndProcess = os._exit) -> None:
        self._settings = settings
        self._journal = CrashJournal(state_folder(settings), settings.name)
        self._stopping = Stopping(settings.drain_s, end_process, self._journal.stopping)
        labels = {"namespace": settings.namespace, "process": settings.name, "model": "", "role": settings.role}
        self._metrics = WorkerMetrics(process_scope("worker", labels))
        if shared := os.environ.get(VARIABLE):
            self._metrics.process.register(Merged(Path(shared)))
        else:
            self._metrics.process.register(NativeSeries(user.PREFIX))
        self._backend = make_backend(settings, self._metrics, self)
        self.session: WorkerSession | None = None
        self._failed = asyncio.Event()
        self._error: BaseException | None = None
        self._task_error = False  # a task failed, not the engine
        self._blameless = False  # no request can be the cause
        self._drained_status = EXIT_OK

    async def serve(self) -> int:
        """Serve until SIGTERM; returns the exit status."""
        self._stopping.on_signals()
        status, ended = EXIT_OK, True
        try:
            await self._stopping.unless_asked(self._backend.start())
            status = await self._serve_connected()
        except StoppedEarly:
            log.info("stopped_during_startup")
        finally:
            left_s = self._stopping.left(self._backend.join_s + 0.5) - 0.5
            ended = await asyncio.to_thread(self._backend.stop, left_s)
            self._stopping.ended()
            self._journal.close()
        if not ended:
            log.warning("engine_stop_timeout", action="the process ends without waiting for it")
            self._stopping.end_now(status)
        return status

    async def _serve_connected(self) -> int:
        """Serve, and close everything but the backend's thread.

        Raises:
            StoppedEarly: the process was asked to stop before it served.
        """
        settings = self._settings
        connection = f"worker:{settings.name}:{secrets.token_hex(4)}"
        opening = asyncio.create_task(self._backend.open(connection), name="open")
        connecting = connect(
            settings.nats_url,
            role="worker",
            name=connection,
            namespace=settings.namespace,
            wait_s=START_S,
            skip_subject_validation=True,
            on_fatal=self._task_failed,
        )
        try:
            bus = await self._step(opening, connecting)
        except BaseException:
            await self._close(opening)
            raise
        publisher = Publisher(bus)
        try:
            await self._step(opening, bus.await_streams(START_S))
            await publisher.open()
            await self._step(opening, bus.follow_clock())
            await self._step(opening, self._report_last_life(publisher, bus.subjects))
            model = await self._stopping.unless_asked(_result(opening))
            broker = BusBroker(bus)

            def make_session() -> WorkerSession:
                make_runner = self._backend.make_runner
                return WorkerSession(bus, broker, publisher, model, settings, self._metrics, make_runner, self._journal)

            return await self._run(bus, broker, make_session)
        finally:
            await self._close(opening)
            await publisher.close()
            await bus.close()

    async def _step(self, opening: "asyncio.Task[ServedModel]", work: Coroutine[Any, Any, T]) -> T:
        """A step of the start. An engine that fails meanwhile ends it: the broker may be waited for, for minutes."""

        async def unless_it_fails() -> T:
            task = asyncio.ensure_future(work)
            try:
                await asyncio.wait([task, opening], return_when=asyncio.FIRST_COMPLETED)
                if opening.done():
                    opening.result()
                return await task
            finally:
                task.cancel()

        return await self._stopping.unless_asked(unless_it_fails())

    async def _close(self, opening: "asyncio.Task[ServedModel]") -> None:
        opening.cancel()
        await asyncio.wait([opening])
        if not opening.cancelled():
            opening.exception()
        await self._backend.close()

    async def _report_last_life(self, publisher: Publisher, subjects: Subjects) -> None:
        """Return what this worker ran when its last process was killed, before it is registered again.

        Raises:
            ServingError: the broker did not store it.
        """
        last = self._journal.last
        if last is not None and last.end is not None:
            messages = returns(last, last.end, subjects)
            stores = (publisher.publish(each.subject, each.payload, each.id, headers=each.headers) for each in messages)
            await asyncio.gather(*stores)
        self._journal.begin()

    async def _note_memory(self) -> None:
        while True:
            self._journal.note_memory()
            await asyncio.sleep(MEMORY_NOTED_S)

    async def _run(self, bus: Bus, broker: BusBroker, make_session: Callable[[], WorkerSession]) -> int:
        """Serve metrics, control requests and sessions until asked to stop; closes the connection."""
        loop = asyncio.get_running_loop()
        self._metrics.load_time.set(self._backend.load_seconds)
        self._metrics.tasks.set_function(lambda: count_tasks(loop))
        if self._settings.engine not in ("mock", "openai"):  # which compute on no GPU of this machine
            self._metrics.watch_gpus()
        bus.tasks.spawn(loop_lag(self._metrics.scope).watch(), name="loop-lag")
        bus.tasks.spawn(self._note_memory(), name="crash-journal")
        if self._settings.publish_events_and_metrics:
            serve_page(self._settings.metrics_host, self._settings.metrics_port, self._metrics.registry)
        cancel_subscriber(broker, bus.subjects)(self._on_cancel)
        app = FastStream(broker, logger=None)
        await app.start()
        try:
            return await self._run_sessions(bus, broker, make_session)
        finally:
            self._metrics.close()
            bus.closing = True  # stopping FastStream closes the connection
            with contextlib.suppress(Exception):
                await asyncio.wait_for(app.stop(), 2)

    async def _run_sessions(self, bus: Bus, broker: BusBroker, make_session: Callable[[], WorkerSession]) -> int:
        """Run one session after another until asked to stop or until something fails.

        Only the first one has to open: a worker that has served waits until the broker has its streams again.
        """
        served, pause_s = False, AGAIN_S
        while True:
            session = self.session = make_session()
            controls = await self._subscribe_control(session, bus, broker)
            try:
                await self._stopping.unless_asked(session.open())
            except StoppedEarly:
                await session.fence()
                raise
            except ServingError as error:
                if not served:
                    raise
                action = "run 'penstock streams apply' if the broker has lost its streams"
                log.warning("registration_waits", error=error.message, next_s=pause_s, action=action)
                await session.fence()
                for subscriber in controls:
                    await broker.remove(subscriber)
                self.session = None
                await self._stopping.unless_asked(self._failed_within(pause_s))
                if self._failed.is_set():
                    return EXIT_ENGINE
                pause_s = min(2 * pause_s, MOST_AGAIN_S)
                continue
            served, pause_s = True, AGAIN_S
            await self._wait_for_end(session)
            try:
                if self._failed.is_set():
                    text = "a task of the worker failed" if self._task_error else "engine_error"
                    await session.fail(f"{text}: {self._error!r}"[:500], poison=not self._blameless)
                    return EXIT_ENGINE
                if self._stopping.asked:
                    log.info("draining", worker=session.id)
                    await session.drain(self._settings.drain_s, self._stopping.hurried)
                    return self._drained_status
                log.warning("session_lost", worker=session.id, action="registering again")
                await session.fence()
            finally:  # not earlier: other workers release and fetch blocks until the end
                for subscriber in controls:
                    await broker.remove(subscriber)

    async def _failed_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._failed.wait(), seconds)

    async def _wait_for_end(self, session: WorkerSession) -> None:
        """Wait until the process is asked to stop, something fails, or the session loses its lease."""
        waits = [
            asyncio.create_task(waiting, name=name)
            for name, waiting in (
                ("stop", self._stopping.wait()),
                ("failed", self._failed.wait()),
                ("lost", session.lost.wait()),
            )
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    # --- failures and changes ---

    def engine_failed(self, error: BaseException) -> None:
        if isinstance(error, NodeLost):
            self._blameless = self._error is None
            self._journal.failing(End(False, "a machine of the engine was lost"))
        else:
            self._journal.failing(End(True, f"crashed: the engine failed ({type(error).__name__})"))
        self._fail(error)

    def stop(self) -> None:
        self._stopping.ask()

    def _task_failed(self, error: BaseException) -> None:
        self._task_error = self._blameless = self._error is None
        self._journal.failing(End(False, "a task of the worker failed"))
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._failed.set()
        self._stopping.within(FAIL_S)

    async def registration_changed(self) -> None:
        if self.session is not None:
            await self.session.update_registration()

    # --- control requests ---

    async def _on_cancel(self, order: control.Cancel) -> None:
        if self.session is not None:
            await self.session.on_cancel(order.request, order.reason)

    async def _subscribe_control(self, session: WorkerSession, bus: Bus, broker: BusBroker) -> list[Subscriber]:
        requests, drains = control_subscribers(broker, bus.subjects, session.id)

        @requests
        async def on_request(order: control.WorkerControl) -> bytes:
            return await self._control(session, order)

        @drains
        async def on_drain(order: control.WorkerControl) -> bytes:
            if not isinstance(order, control.OperatorOrder):  # it may not have them say, pin or move blocks
                return wire.encode(control.Ok("only drain, sleep, wake and profile"))
            return await self._control(session, order)

        for subscriber in (requests, drains):
            await subscriber.start()
        return [requests, drains]

    async def _control(self, session: WorkerSession, order: control.WorkerControl) -> bytes:
        if isinstance(order, control.DumpKv):
            return wire.encode(await session.runner.dump(order.page))
        if isinstance(order, control.Drain):
            self._drained_status = control.DRAINED if order.stay_down else EXIT_OK
            self._stopping.ask()
            return wire.encode(control.Ok())
        if isinstance(order, control.Sleep | control.Wake):
            return wire.encode(await session.runner.rest(order))
        if isinstance(order, control.RecordTrace):
            return wire.encode(await session.runner.profile(order))
        if isinstance(order, control.Push):
            return wire.encode(await session.runner.push(order))
        if isinstance(order, control.PinPrefix):
            return wire.encode(session.runner.pin_prefix(order))
        if isinstance(order, control.Reserve | control.Fetch):  # which ``DisaggCoordinator`` reads itself
            return b""
        return wire.encode(session.runner.release(order))
