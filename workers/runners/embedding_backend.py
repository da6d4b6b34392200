"""The backend of a worker that makes embeddings: an engine in the pipeline thread."""

import asyncio

import structlog

from penstock.configs.settings import WorkerSettings, served_names
from penstock.infra.model import modeldir, servable
from penstock.workers.engines.embed.base import EmbeddingEngine
from penstock.workers.metrics.worker import Metrics
from penstock.workers.runners.embedding_runner import EmbeddingRunner
from penstock.workers.runners.pipeline_thread import PipelineThread
from penstock.workers.session.process import ProcessEvents
from penstock.workers.session.request_runner import ServedModel, SessionContext

log = structlog.get_logger("worker")

JOIN_S = 5.0


class EmbeddingBackend:
    def __init__(self, settings: WorkerSettings, metrics: Metrics, events: ProcessEvents) -> None:
        self.join_s = JOIN_S
        self.load_seconds = 0.0
        self._settings = settings
        self._metrics = metrics
        self._events = events
        self._thread = PipelineThread()
        self._engine: EmbeddingEngine | None = None

    async def start(self) -> None:
        """Build the engine: a model that cannot be served is reported before the broker is needed.

        Raises:
            ModelError, EngineError, ValueError: the model or the engine cannot be served.
        """
        self._engine = await asyncio.wrap_future(self._thread.call(lambda: build_engine(self._settings)))
        self.load_seconds = self._engine.load_seconds

    async def open(self, connection: str) -> ServedModel:
        assert self._engine is not None
        settings = self._settings
        names = served_names(settings.served_model_name) or (self._engine.model,)
        self._metrics.process.set_label("model", names[0])
        self._metrics.max_sequences.set(settings.max_running)
        self._metrics.max_batched_tokens.set(settings.max_batched_tokens)
        self._metrics.max_model_len.set(self._engine.embedder.max_tokens)
        return ServedModel(names[0], names[1:], self._engine.revision, None, connection)

    def make_runner(self, context: SessionContext) -> EmbeddingRunner:
        assert self._engine is not None
        return EmbeddingRunner(context, self._thread, self._engine, self._events.engine_failed)

    async def close(self) -> None:
        if self._engine is not None:
            self._thread.call(self._engine.close)

    def stop(self, timeout: float) -> bool:
        return self._thread.stop(timeout)


def build_engine(settings: WorkerSettings) -> EmbeddingEngine:
    """The engine that the settings name, built in the thread that will run it.

    Raises:
        ModelError: the model cannot be served.
        EngineError: it does not fit into memory.
        ValueError: the engine makes no embeddings.
    """
    engine: EmbeddingEngine
    if settings.engine == "native":
        from penstock.workers.engines.budgets import wait_passively

        path = modeldir.resolve(settings.model, weights=True)
        if reason := servable.problem(path, "native"):  # before what takes seconds to import
            raise modeldir.ModelError(reason)
        wait_passively()
        from penstock.workers.engines.embed import native

        engine = native.from_settings(settings, path)
    elif settings.engine == "mock":
        from penstock.workers.engines.embed import mock

        engine = mock.from_settings(settings, modeldir.resolve(settings.model or str(modeldir.TINY)))
    else:
        raise ValueError(f"--role embed runs with --engine native or mock, not {settings.engine}")
    known = engine.embedder
    log.info(
        "engine_ready",
        engine=engine.name,
        dimensions=known.dimensions,
        max_tokens=known.max_tokens,
        pooling=known.pooling,
        seconds=round(engine.load_seconds, 2),
    )
    return engine
