"""A worker process: an engine in its thread, a FastStream application around it, one session after another."""

import asyncio
import contextlib
import functools
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from faststream import FastStream
from faststream.nats import NatsMessage
from prometheus_client import CollectorRegistry, start_http_server

from configs import logs, modeldir
from configs.bus.connection import Bus, connect
from configs.bus.publish import Publisher
from configs.bus.shell import OwnConnection, raw
from configs.settings import WorkerSettings
from schemas import control, wire
from schemas.errors import ServingError
from schemas.subjects import Subjects
from schemas.transfer import Endpoint
from workers.engines.base import Engine, EngineError, VisionEngine
from workers.metrics import Metrics
from workers.runner import EngineThread, Flush
from workers.session import Model, Session
from workers.transfer.base import Transport, TransportUnavailable

log = structlog.get_logger("worker")

MAX_ORDERS = 64

EXIT_OK = 0
EXIT_ENGINE = 70  # EX_SOFTWARE: the engine failed
EXIT_START = 69  # EX_UNAVAILABLE: the broker or its streams are not there (yet)
EXIT_CONFIG = 2  # starting again would not help


def run(settings: WorkerSettings) -> int:
    """Serve until SIGTERM; returns the exit code."""
    # The event loop must get its turn between two steps of an engine that computes in Python.
    sys.setswitchinterval(0.001)
    logs.setup(settings.log_format, settings.log_level, name=settings.name)
    import uvloop

    try:
        status: int = uvloop.run(_Worker(settings).serve())
        return status
    except (modeldir.ModelError, EngineError, TransportUnavailable, ValueError) as error:
        log.error("start_failed", error=str(error))
        return EXIT_CONFIG
    except ServingError as error:
        log.error("start_failed", error=error.message)
        return EXIT_START


class _Worker:
    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._metrics = Metrics(CollectorRegistry())
        self._session: Session | None = None
        self._stop = asyncio.Event()
        self._broken = asyncio.Event()
        self._error: BaseException | None = None

    async def serve(self) -> int:
        settings = self._settings
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop.set)
        _check(settings)
        path = modeldir.resolve(settings.model, weights=settings.engine == "native")
        described = modeldir.load(path, name=settings.served_model_name.split(",")[0])

        def failed(error: BaseException) -> None:
            self._error = error
            loop.call_soon_threadsafe(self._broken.set)

        engine = EngineThread(functools.partial(build_engine, settings, path), self._deliver, failed)
        engine.start()
        connection = f"worker:{settings.name}:{secrets.token_hex(4)}"
        bus = await connect(
            settings.nats_url,
            role="worker",
            name=connection,
            namespace=settings.namespace,
            skip_subject_validation=True,
        )
        publisher = Publisher(bus)
        transport: Transport | None = None
        try:
            await publisher.open()
            built = await asyncio.to_thread(engine.wait_ready)
            transport = await self._transport(engine, built, connection, loop)
            vision = _eyes(built)
            self._metrics.load_time.set(built.info.load_seconds)
            self._metrics.tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
            if settings.metrics_port and settings.publish_events_and_metrics:
                start_http_server(settings.metrics_port, "127.0.0.1", registry=self._metrics.registry)
            names = tuple(n for n in settings.served_model_name.split(",") if n) or (described.name,)
            model = Model(names[0], names[1:], described.revision, described.detokenizer, connection)
            app = self._application(bus)
            await app.start()
            try:
                return await self._sessions(
                    bus,
                    lambda: Session(
                        bus, publisher, engine, built.info, model, settings, self._metrics, transport, vision
                    ),
                )
            finally:
                bus.closing = True  # stopping FastStream closes the connection
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(app.stop(), 5)
        finally:
            if transport is not None:  # before the memory that it registered goes
                await asyncio.to_thread(transport.close)
            engine.stop()
            await asyncio.to_thread(engine.join, 10.0)
            await publisher.close()
            await bus.close()

    async def _transport(
        self, engine: EngineThread, built: Engine, name: str, loop: asyncio.AbstractEventLoop
    ) -> Transport | None:
        """How blocks move to and from other workers; None: this one works alone.

        Raises:
            TransportUnavailable: it is needed and cannot be opened.
        """
        settings = self._settings
        if settings.transfer == "none" or (settings.role == "aggregated" and _eyes(built) is None):
            return None

        def renewed(endpoint: Endpoint) -> None:
            log.warning("transfer_agent_renewed", agent=endpoint.agent)
            asyncio.run_coroutine_threadsafe(self._renewed(), loop)

        from workers.transfer import open_transport

        pools = await asyncio.wrap_future(engine.call(lambda engine: engine.memory()))
        try:
            return await asyncio.to_thread(
                open_transport, settings.transfer, name, pools, on_renewed=renewed, quarantine_s=settings.quarantine_s
            )
        except TransportUnavailable as error:
            if settings.role != "aggregated":
                raise
            log.warning("no_transfer", error=str(error), action="images are encoded here")
            return None

    async def _renewed(self) -> None:
        if self._session is not None:
            await self._session.renewed()

    async def _sessions(self, bus: Bus, make: Callable[[], Session]) -> int:
        """Live one session after another until told to stop or the engine breaks."""
        while True:
            session = self._session = make()
            control_subject = await self._controlled(session, bus)
            await session.open()
            waits = [
                asyncio.create_task(event.wait(), name=name)
                for name, event in (("stop", self._stop), ("broken", self._broken), ("lost", session.lost))
            ]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            await control_subject.stop()
            if self._broken.is_set():
                await session.fail(f"engine_error: {self._error!r}"[:500])
                return EXIT_ENGINE
            if self._stop.is_set():
                log.info("draining", worker=session.id)
                await session.drain(self._settings.drain_s)
                return EXIT_OK
            log.warning("session_lost", worker=session.id, action="registering anew")
            await session.abandon()

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

    async def _controlled(self, session: Session, bus: Bus) -> Any:
        """Subscribe to the session's control subject."""

        async def order(message: NatsMessage) -> bytes:
            return await self._obey(session, message.body)

        # Several at once: a push of blocks takes as long as its transfer.
        subscriber = self._broker.subscriber(bus.subjects.control(session.id), decoder=raw, max_workers=MAX_ORDERS)
        subscriber(order)
        await subscriber.start()
        return subscriber

    async def _obey(self, session: Session, body: bytes) -> bytes:
        order = control.decode_worker(body)
        if isinstance(order, control.DumpKv):
            return wire.encode(await session.dump(order.page))
        if isinstance(order, control.Drain):
            self._stop.set()
            return wire.encode(control.Ok())
        if isinstance(order, control.Push):
            return wire.encode(await session.push(order))
        return wire.encode(session.release(order))

    def _deliver(self, flush: Flush) -> None:
        session = self._session
        if session is not None:
            session.deliver(flush)


def _check(settings: WorkerSettings) -> None:
    """
    Raises:
        ValueError: settings that contradict each other.
    """
    if settings.role in ("prefill", "decode"):
        if not settings.prefix_cache:
            raise ValueError(f"--role {settings.role} hands KV over under the names of the prefix cache; leave it on")
        if settings.transfer == "none":
            raise ValueError(f"--role {settings.role} needs a transfer backend; use --transfer auto")
    elif settings.role == "encode" and settings.transfer == "none":
        raise ValueError("--role encode needs a transfer backend for its embeddings; use --transfer auto")


def _eyes(engine: Engine) -> VisionEngine | None:
    """The engine, if its model takes images."""
    return engine if getattr(engine, "slot_tokens", 0) else None  # type: ignore[return-value]


def build_engine(settings: WorkerSettings, path: Path) -> Engine:
    """The engine that the settings name, built in the thread that will run it."""
    began = time.monotonic()
    engine: Engine
    if settings.engine == "mock":
        from workers.engines import mock

        build = mock.encoder_from_settings if settings.role == "encode" else mock.from_settings
        engine = build(settings, path)
    else:
        from workers.engines import native

        make = native.encoder_from_settings if settings.role == "encode" else native.from_settings
        engine = make(settings, path)
    log.info("engine_ready", engine=settings.engine, seconds=round(time.monotonic() - began, 2))
    return engine


__all__ = ["EXIT_CONFIG", "EXIT_ENGINE", "EXIT_OK", "build_engine", "run"]
