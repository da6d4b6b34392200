"""The backend of a worker that generates tokens: an engine, where it runs, and the transport to other workers."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from penstock.configs.settings import WorkerSettings, served_names
from penstock.infra.model import modeldir, servable
from penstock.infra.model.embedding_model import is_encoder
from penstock.infra.model.weight_files import elsewhere
from penstock.infra.process.gc_policy import freeze_loaded
from penstock.infra.text.parsers import families
from penstock.infra.text.parsers.families import PARSED
from penstock.schemas import block_hashes
from penstock.schemas.fleet import AUTO, TensorSource
from penstock.schemas.requests import CARRIED_CHAT
from penstock.schemas.transfer import Endpoint
from penstock.workers.engine_loop.loop import EngineLoop, EngineThread
from penstock.workers.engines.engine_protocol import Engine, EngineError, EngineInfo, Grammars, VisionEngine
from penstock.workers.kv_transfer.transport_protocol import RANK, Transport, TransportUnavailable
from penstock.workers.metrics.worker_metrics import WorkerMetrics
from penstock.workers.runners.flush_publisher import TokenPace
from penstock.workers.runners.token_runner import TokenRunner
from penstock.workers.session.adapters import AdapterTable
from penstock.workers.session.process import ProcessEvents
from penstock.workers.session.request_runner import ServedModel, SessionContext
from penstock.workers.session.weights import DeviceTurn, WeightsError, WeightsTable

log = structlog.get_logger("worker")

JOIN_S = 10.0
TURN_POLL_S = 0.1


class TokenBackend:
    def __init__(self, settings: WorkerSettings, metrics: WorkerMetrics, events: ProcessEvents) -> None:
        self.join_s = JOIN_S
        self.load_seconds = 0.0
        self._settings = settings
        self._metrics = metrics
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._engine_loop = EngineLoop()
        self._pace = TokenPace(settings.role)
        pace = self._engine_loop.pace
        metrics.quiet.set_function(lambda: pace.quiet_s)
        metrics.slowest_step.set_function(lambda: pace.slowest_s)
        self._thread: EngineThread | None = None
        self._transport: Transport | None = None
        self._info: EngineInfo
        self._engine: Engine
        self._vision: VisionEngine | None = None
        self._grammars: Grammars | None = None
        self._adapters: AdapterTable | None = None
        self._weights: WeightsTable | None = None
        self._turn = DeviceTurn(settings.share_device) if settings.share_device else None

    async def start(self) -> None:
        """Load the model's description and begin to build the engine.

        Raises:
            ModelError: the model cannot be served.
        """
        settings = self._settings
        path = model_path(settings)
        described = self._described = modeldir.load(path, name="".join(served_names(settings.served_model_name)[:1]))

        def asked() -> None:
            self._loop.call_soon_threadsafe(self._events.stop)

        def build() -> Engine:
            if self._turn is not None:
                while not self._turn.take():
                    time.sleep(TURN_POLL_S)
            engine = build_engine(settings, path, asked, failed)
            if settings.event_plane == "nats":
                return engine
            from penstock.workers.engines.events.relay import start_relay

            return start_relay(engine, settings, block_hashes.root(described.revision), self._engine_loop.wake)

        def failed(error: BaseException) -> None:
            self._loop.call_soon_threadsafe(self._events.engine_failed, error)

        if settings.engine == "sglang" and threading.current_thread() is threading.main_thread():
            # SGLang's processes send it when they fail; unhandled, it ends this process with all its requests.
            self._loop.add_signal_handler(signal.SIGQUIT, self._on_quit)
        self._thread = EngineThread(build, self._engine_loop, failed)
        self._thread.start()

    def _on_quit(self) -> None:
        error = EngineError("a process of SGLang has failed; the log above has its error")
        log.error("engine_failed", error=str(error))
        self._events.engine_failed(error)

    async def open(self, connection: str) -> ServedModel:
        """
        Raises:
            EngineError: the engine cannot be built.
            AdapterError: an adapter that a flag names cannot be served.
            TransportUnavailable: a transport is needed and cannot be opened.
        """
        assert self._thread is not None
        settings = self._settings
        # Not in a thread, which would hold the end of a process up whose broker refuses it meanwhile.
        engine = self._engine = await asyncio.wrap_future(self._thread.built)
        self._info = engine.info
        self.load_seconds = engine.info.load_seconds
        for collector in getattr(engine, "collectors", tuple)():  # the engine's own metrics
            self._metrics.process.register(collector)
        self._vision = engine.vision
        self._grammars = engine.grammars
        self._transport = await self._open_transport(connection)
        freeze_loaded()
        served = self._served_model(connection)
        if engine.adapters is not None:
            self._adapters = AdapterTable(
                engine.adapters,
                self._engine_loop.call,
                self._settings,
                (served.name, *served.aliases),
                self._events.registration_changed,
            )
            await self._adapters.start()
        if engine.weights is not None and settings.event_plane == "nats":
            stays = "other workers reach its KV cache" if self._transport is not None else engine.weights.stays
            self._weights = WeightsTable(
                self._engine_loop.call,
                settings,
                self._described.path,
                served,
                self._events.registration_changed,
                stays=stays,
                turn=self._turn,
                receive=self._receive_tensors if settings.weights_staging else None,
            )
        self._metrics.engine_built(served.name, engine.info)
        return served

    def _receive_tensors(self, source: TensorSource, rank: int, folder: Path, stop: threading.Event) -> None:
        """
        Raises:
            WeightsError: they did not all arrive.
        """
        from penstock.workers.engines.native.build import find_device
        from penstock.workers.kv_transfer.tensors import TensorsLost, receive

        try:
            receive(source, rank, folder, self._described.path, find_device(self._settings.device), stop)
        except TensorsLost as error:
            raise WeightsError(str(error)) from error

    def _served_model(self, connection: str) -> ServedModel:
        settings, described = self._settings, self._described
        names = served_names(settings.served_model_name) or (described.name,)
        template = described.template.suited(tools=True).source if described.template is not None else ""
        parsers = [settings.reasoning_parser, settings.tool_call_parser]
        if CARRIED_CHAT in self._info.logits_processors:  # its server parses, by the template of the server's own
            parsers = [PARSED if each == AUTO else each for each in parsers]
        return ServedModel(
            names[0],
            names[1:],
            described.revision,
            described.detokenizer,
            connection,
            families.reasoning_parser(parsers[0], template),
            families.tool_call_parser(parsers[1], template),
            described.tokenizer_digest,
            modeldir.source_of(settings.model, described.path),
        )

    async def _open_transport(self, name: str) -> Transport | None:
        """How blocks move to and from other workers; None: this worker moves none.

        Raises:
            TransportUnavailable: it is needed and cannot be opened.
        """
        settings, backend = self._settings, self._settings.transfer
        alone = settings.role == "aggregated" and not (
            moves_prefixes(settings) and self._engine.kv_transfer is not None
        )
        no_kv = alone or bool(self._info.handoff_layout)
        if backend == "none" or (no_kv and self._vision is None):
            return None

        def renewed(endpoint: Endpoint) -> None:
            log.warning("transfer_agent_renewed", agent=endpoint.agent)
            asyncio.run_coroutine_threadsafe(self._events.registration_changed(), self._loop)

        from penstock.workers.kv_transfer.ranks import RankTransports, RemoteTransport
        from penstock.workers.kv_transfer.transport_thread import open_transport

        pools = await asyncio.wrap_future(self._engine_loop.call(lambda engine: engine.memory()))
        if no_kv and not pools:  # its engine embeds images itself
            return None
        ranks = getattr(self._engine, "transfers", ())  # of a model that is split over several

        def opened() -> Transport:
            quarantine_s = settings.quarantine_s
            others = [
                RemoteTransport(channel, f"{name}{RANK}{number}", renewed, quarantine_s)
                for number, channel in enumerate(ranks, 1)
            ]
            own = open_transport(backend, name, pools, on_renewed=renewed, quarantine_s=quarantine_s)
            return RankTransports(own, others)

        try:
            return await asyncio.to_thread(opened)
        except TransportUnavailable as error:
            if settings.role != "aggregated":
                raise
            action = "images are encoded here" if alone else "prefixes of other workers are computed here"
            log.warning("transfer_unavailable", error=str(error), action=action)
            return None

    def make_runner(self, context: SessionContext) -> TokenRunner:
        return TokenRunner(
            context,
            self._engine_loop,
            self._info,
            self._transport,
            self._vision,
            self._grammars,
            self._pace,
            self._adapters,
            self._weights,
            self._engine.kv_transfer if moves_prefixes(self._settings) else None,
        )

    async def close(self) -> None:
        if self._adapters is not None:
            self._adapters.close()
        if self._turn is not None:
            self._turn.leave()
        if self._transport is not None:  # before the memory that it registered is freed
            await asyncio.to_thread(self._transport.close)

    def stop(self, timeout: float) -> bool:
        if self._thread is None:
            return True
        self._engine_loop.stop()
        return self._thread.join(timeout)


def moves_prefixes(settings: WorkerSettings) -> bool:
    """Whether a worker is to read prefixes from others, and have them read its own."""
    if settings.move_prefixes == "auto":
        return settings.role in ("prefill", "decode")  # there blocks move anyway
    return settings.move_prefixes == "on" and settings.role in ("aggregated", "prefill", "decode")


def model_path(settings: WorkerSettings) -> Path:
    """The directory of the model, which has what the engine reads.

    Raises:
        ModelError: there is no such model, or the engine cannot read its weights.
    """
    weightless = settings.engine in ("mock", "openai")
    path = modeldir.resolve(settings.model, weights=not weightless)
    if settings.engine == "native" and is_encoder(path):
        raise modeldir.ModelError(f"{path} is an encoder, which generates no text; serve its embeddings: --role embed")
    if settings.engine in ("trtllm", "vllm", "sglang") and (unreadable := elsewhere(path)):
        raise modeldir.ModelError(
            f"{path} has weights in {min(unreadable)}, which only --engine native reads; write a copy that has all of "
            f"them: python -m tests.demo_model.shared_weights join {path} COPY"
        )
    if not weightless and (reason := servable.problem(path, settings.engine)):
        raise modeldir.ModelError(reason)
    return path


def build_engine(
    settings: WorkerSettings,
    path: Path,
    asked: Callable[[], None] = lambda: None,
    lost: Callable[[EngineError], None] = lambda error: None,
) -> Engine:
    """The engine that the settings name, built in the thread that will run it.

    Args:
        asked: called when another machine of the engine was asked to stop; from any thread.
        lost: called when a process of the engine has ended, which ends the engine; from any thread.
    """
    began = time.monotonic()
    engine: Engine
    if settings.engine == "mock":
        from penstock.workers.engines import mock

        build = mock.encoder_from_settings if settings.role == "encode" else mock.from_settings
        engine = build(settings, path)
    elif settings.engine == "trtllm":
        from penstock.workers.engines import trtllm

        if settings.role == "encode":
            engine = trtllm.encoder_from_settings(settings, path)
        else:
            from penstock.workers.engines.trtllm import logits_processors

            engine = trtllm.from_settings(settings, path, logits_processors.from_settings(settings, path))
    elif settings.engine == "vllm":
        from penstock.workers.engines.vllm.build import from_settings as vllm_engine

        engine = vllm_engine(settings, path, asked)
    elif settings.engine == "sglang":
        from penstock.workers.engines.sglang.build import from_settings as sglang_engine

        engine = sglang_engine(settings, path, asked)
    elif settings.engine == "openai":
        from penstock.workers.engines import openai

        engine = openai.from_settings(settings, path)
    else:
        from penstock.workers.engines import native

        if settings.role == "encode":
            engine = native.encoder_from_settings(settings, path)
        else:
            from penstock.workers.kv_transfer.staging import BUFFER_BYTES

            reads = settings.transfer != "none" and (settings.role == "decode" or moves_prefixes(settings))
            staged = BUFFER_BYTES if reads and settings.tensor_parallel_size > 1 else 0
            engine = native.from_settings(settings, path, lost, transfer_bytes=staged)
    log.info("engine_ready", engine=settings.engine, seconds=round(time.monotonic() - began, 2))
    return engine
