"""The backend of a worker that makes images or videos: a diffusion engine in the pipeline thread."""

import asyncio
from pathlib import Path

import structlog

from penstock.configs.settings import WorkerSettings, served_names
from penstock.workers.engines.diffusion.base import DiffusionEngine
from penstock.workers.metrics.worker import Metrics
from penstock.workers.runners.pipeline_runner import PipelineRunner
from penstock.workers.runners.pipeline_thread import PipelineThread
from penstock.workers.session.process import ProcessEvents
from penstock.workers.session.request_runner import ServedModel, SessionContext

log = structlog.get_logger("worker")

JOIN_S = 5.0


class DiffusionBackend:
    def __init__(self, settings: WorkerSettings, metrics: Metrics, events: ProcessEvents) -> None:
        self.join_s = JOIN_S
        self.load_seconds = 0.0
        self._settings = settings
        self._events = events
        self._thread = PipelineThread()
        self._engine: DiffusionEngine | None = None

    async def start(self) -> None:
        """Build the engine: a model that cannot be served is reported before the broker is needed.

        Raises:
            ModelError, EngineError, ValueError: the model or the engine cannot be served.
        """
        built = self._thread.call(lambda: build_engine(self._settings))
        self._engine = await asyncio.wrap_future(built)
        self.load_seconds = self._engine.load_seconds

    async def open(self, connection: str) -> ServedModel:
        settings = self._settings
        names = served_names(settings.served_model_name) or (_name(settings.model),)
        return ServedModel(names[0], names[1:], "", None, connection)

    def make_runner(self, context: SessionContext) -> PipelineRunner:
        assert self._engine is not None
        return PipelineRunner(context, self._thread, self._engine, self._events.engine_failed)

    async def close(self) -> None:
        if self._engine is not None:
            self._thread.call(self._engine.close)

    def stop(self, timeout: float) -> bool:
        return self._thread.stop(timeout)


def _name(model: str) -> str:
    """The directory's name, or the Hugging Face id."""
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


def build_engine(settings: WorkerSettings) -> DiffusionEngine:
    """The engine that the settings name, built in the thread that will run it.

    Raises:
        ModelError: the model cannot be served.
        EngineError: the engine's library cannot.
    """
    engine: DiffusionEngine
    if settings.engine == "native":
        from penstock.workers.engines.diffusion import diffusers_engine

        engine = diffusers_engine.from_settings(settings, diffusers_engine.resolve(settings.model))
    elif settings.engine == "trtllm":
        from penstock.workers.engines.trtllm import visual_gen

        engine = visual_gen.from_settings(settings)
    else:
        raise ValueError(f"--role diffusion runs with --engine native (diffusers) or trtllm, not {settings.engine}")
    diffuser = engine.diffuser
    log.info(
        "engine_ready",
        engine=engine.name,
        pipeline=diffuser.pipeline,
        makes=diffuser.kind,
        seconds=round(engine.load_seconds, 2),
    )
    return engine
