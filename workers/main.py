"""A worker process that computes tokens: an engine in its thread inside the shell of ``workers.process``."""

import asyncio
import secrets
import sys
import time
from pathlib import Path

import structlog

from configs import logs
from configs.settings import WorkerSettings
from infra.bus import loop_lag
from infra.bus.connection import connect
from infra.bus.publisher import Publisher
from infra.model import modeldir, parser_detection
from schemas import blocks
from schemas.errors import ServingError
from schemas.transfer import Endpoint
from workers.engine_thread import EngineThread
from workers.engines.base import Engine, EngineError, VisionEngine
from workers.engines.support import SUPPORT, able
from workers.extras import install_hint
from workers.kv_transfer.base import Transport, TransportUnavailable
from workers.multiprocess_metrics import own_directory
from workers.process import EXIT_CONFIG, EXIT_ENGINE, EXIT_OK, EXIT_START, WorkerProcess
from workers.sequence_state import Flush
from workers.session import Model, Session
from workers.stopping import StoppedEarly

log = structlog.get_logger("worker")

JOIN_S = 10.0  # for an engine to end in order


def run(settings: WorkerSettings) -> int:
    """Serve until SIGTERM; returns the exit code."""
    # The event loop must get its turn between two steps of an engine that computes in Python.
    sys.setswitchinterval(0.001)
    logs.setup(settings.log_format, settings.log_level, name=settings.name)
    import uvloop

    try:
        with own_directory():
            status: int = uvloop.run(_serve(settings))
        return status
    except (modeldir.ModelError, EngineError, TransportUnavailable, ValueError) as error:
        log.error("start_failed", error=str(error))
        return EXIT_CONFIG
    except ModuleNotFoundError as error:
        log.error("start_failed", error=install_hint(error, settings.engine, settings.role))
        return EXIT_CONFIG
    except ServingError as error:
        log.error("start_failed", error=error.message)
        return EXIT_START


async def _serve(settings: WorkerSettings) -> int:
    if settings.role == "diffusion":
        from workers.diffusion import DiffusionWorker

        return await DiffusionWorker(settings).serve()
    return await _Worker(settings).serve()


class _Worker(WorkerProcess[Session]):
    async def serve(self) -> int:
        settings = self._settings
        loop = asyncio.get_running_loop()
        self._stopping.on_signals()
        _check(settings)
        path = modeldir.resolve(settings.model, weights=settings.engine in ("native", "trtllm", "vllm"))
        described = modeldir.load(path, name=settings.served_model_name.split(",")[0])

        def failed(error: BaseException) -> None:
            loop.call_soon_threadsafe(self._broke, error)

        def build() -> Engine:
            built = build_engine(settings, path)
            if settings.event_plane == "nats":
                return built
            from workers.engines.events.relay import relayed

            return relayed(built, settings, blocks.root(described.revision), engine.wake)

        engine = EngineThread(build, self._deliver, failed)
        engine.start()
        status, ended = EXIT_OK, True
        try:
            status = await self._with(engine, described)
        except StoppedEarly:
            log.info("stopped_during_startup")
        finally:
            engine.stop()
            ended = await asyncio.to_thread(engine.join, self._stopping.left(JOIN_S + 0.5) - 0.5)
            self._stopping.over()
        if not ended:
            log.warning("engine_stop_timeout", action="the process ends without waiting for it")
            self._stopping.end_now(status)
        return status

    async def _with(self, engine: EngineThread, described: modeldir.ModelDir) -> int:
        """Serve with an engine that may still be loading; everything else is closed in the end.

        Raises:
            StoppedEarly: the process was asked to stop before that.
        """
        settings, loop = self._settings, asyncio.get_running_loop()
        connection = f"worker:{settings.name}:{secrets.token_hex(4)}"
        bus = await self._stopping.unless_asked(
            connect(
                settings.nats_url,
                role="worker",
                name=connection,
                namespace=settings.namespace,
                skip_subject_validation=True,
                on_fatal=self._task_failed,
            )
        )
        publisher = Publisher(bus)
        transport: Transport | None = None
        try:
            await publisher.open()
            built = await self._stopping.unless_asked(asyncio.to_thread(engine.wait_ready))
            for collector in getattr(built, "collectors", tuple)():  # the engine's own metrics
                self._metrics.registry.register(collector)
            transport = await self._transport(engine, built, connection, loop)
            loop_lag.freeze_loaded()
            vision = _encoder(built)
            names = tuple(n for n in settings.served_model_name.split(",") if n) or (described.name,)
            template = described.template.source if described.template is not None else ""
            model = Model(
                names[0],
                names[1:],
                described.revision,
                described.detokenizer,
                connection,
                parser_detection.reasoning_parser(settings.reasoning_parser, template),
                parser_detection.tool_call_parser(settings.tool_call_parser, template),
                described.tokenizer_digest,
            )

            def make() -> Session:
                return Session(bus, publisher, engine, built.info, model, settings, self._metrics, transport, vision)

            return await self._live(bus, make, built.info.load_seconds)
        finally:
            if transport is not None:  # before the memory that it registered goes
                await asyncio.to_thread(transport.close)
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
        alone = settings.role == "aggregated" or bool(built.info.handover)  # as far as KV goes
        if settings.transfer == "none" or (alone and _encoder(built) is None):
            return None

        def renewed(endpoint: Endpoint) -> None:
            log.warning("transfer_agent_renewed", agent=endpoint.agent)
            asyncio.run_coroutine_threadsafe(self._renewed(), loop)

        from workers.kv_transfer.opening import open_transport

        pools = await asyncio.wrap_future(engine.call(lambda engine: engine.memory()))
        try:
            return await asyncio.to_thread(
                open_transport, settings.transfer, name, pools, on_renewed=renewed, quarantine_s=settings.quarantine_s
            )
        except TransportUnavailable as error:
            if settings.role != "aggregated":
                raise
            log.warning("transfer_unavailable", error=str(error), action="images are encoded here")
            return None

    async def _renewed(self) -> None:
        if self._session is not None:
            await self._session.renewed()

    def _deliver(self, flush: Flush) -> None:
        session = self._session
        if session is not None:
            session.deliver(flush)


def _check(settings: WorkerSettings) -> None:
    """
    Raises:
        ValueError: settings that contradict each other.
    """
    if settings.role in ("prefill", "decode") and settings.engine in ("native", "mock"):  # others move KV themselves
        if not settings.prefix_cache:
            raise ValueError(f"--role {settings.role} hands KV over under the names of the prefix cache; leave it on")
        if settings.transfer == "none":
            raise ValueError(f"--role {settings.role} needs a transfer backend; use --transfer auto")
    elif settings.role == "encode" and settings.transfer == "none":
        raise ValueError("--role encode needs a transfer backend for its embeddings; use --transfer auto")
    if settings.scheduler_policy != "max_utilization":
        if settings.engine not in ("native", "mock"):
            raise ValueError(
                f"--scheduler-policy is of the native engine and the mock; {settings.engine} takes it from "
                "--extra-engine-args"
            )
        if settings.role == "decode":
            raise ValueError(
                f"--scheduler-policy {settings.scheduler_policy}: a decode worker takes blocks in before it knows the "
                "longest answer; use it with --role aggregated or prefill"
            )
    support = SUPPORT[settings.engine]
    if settings.role == "encode" and not support.encode:
        raise ValueError(
            f"--engine {settings.engine} takes text only; --role encode runs on {', '.join(able('encode'))}"
        )
    if settings.kv_events_from and settings.event_plane != "zmq":
        raise ValueError("--kv-events-from: other publishers are read over ZMQ; add --event-plane zmq")
    if settings.event_plane == "zmq" and not (
        settings.prefix_cache and settings.publish_events_and_metrics and settings.role != "encode"
    ):
        raise ValueError("--event-plane zmq: this worker has no KV events; leave the prefix cache and publishing on")
    edits = settings.logits_processor or settings.default_logits_processors
    if edits and (settings.role == "encode" or not support.logits_processors):
        raise ValueError(
            f"--engine {settings.engine} --role {settings.role} has no logits to edit; leave out --logits-processor "
            "and --default-logits-processors"
        )


def _encoder(engine: Engine) -> VisionEngine | None:
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
    elif settings.engine == "trtllm":
        from workers.engines import trtllm

        if settings.role == "encode":
            engine = trtllm.encoder_from_settings(settings, path)
        else:
            from workers.engines.logits import trtllm_form

            engine = trtllm.from_settings(settings, path, trtllm_form.from_settings(settings, path))
    elif settings.engine == "vllm":
        from workers.engines import vllm

        engine = vllm.from_settings(settings, path)
    else:
        from workers.engines import native

        make = native.encoder_from_settings if settings.role == "encode" else native.from_settings
        engine = make(settings, path)
    log.info("engine_ready", engine=settings.engine, seconds=round(time.monotonic() - began, 2))
    return engine


__all__ = ["EXIT_CONFIG", "EXIT_ENGINE", "EXIT_OK", "build_engine", "run"]
