"""Runs requests for images and videos, one at a time, in the pipeline's thread.

A request streams its denoising steps: each is a "token" whose value is the milliseconds it took. So progress is
ordered, counted once and resumed like any answer; a later attempt begins at step 0 and streams again once it has passed
what was streamed before. The files go into the object store and their names into the last item.
"""

import asyncio
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from penstock.configs.settings import WorkerSettings, served_names
from penstock.infra.bus.clock import steady_ns
from penstock.infra.bus.memory_storage import put_file
from penstock.infra.bus.object_store import put
from penstock.infra.bus.tasks import end
from penstock.infra.process.gc_policy import loading
from penstock.schemas import done, fleet, jobs, requests
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Diffusion
from penstock.schemas.tokens import File, Finish, TokenItem
from penstock.workers.engine_loop.step_output import SequenceState
from penstock.workers.engines.diffusion.diffusion_protocol import DiffusionEngine, Interrupted, encode, media_type
from penstock.workers.engines.engine_protocol import RequestError
from penstock.workers.metrics.worker_metrics import WorkerMetrics
from penstock.workers.runners.pipeline_thread import PipelineBackend, PipelineRunnerBase, PipelineThread
from penstock.workers.session.process import ProcessEvents
from penstock.workers.session.request_runner import ServedModel, SessionContext, StageInput
from penstock.workers.session.requests import RunningRequest, admit

log = structlog.get_logger("worker")

PROGRESS_S = 0.1  # between two progress messages of one request
STORE_S = 120.0  # for one file; the request's deadline applies as well
TRUST_POLL_S = 0.02
BUCKET = "results"


class EncodedOutput(NamedTuple):
    """One image or video as a file, not yet stored."""

    data: bytes
    width: int
    height: int
    frames: int
    frame_rate: float


class _EngineFailed(Exception):
    """The engine is broken, and not only this request."""

    def __init__(self, error: Exception) -> None:
        super().__init__(repr(error))
        self.error = error


class _PipelineRun:
    """A request that is being computed. ``advance`` runs in the event loop, the rest also in the thread."""

    def __init__(self, running: RunningRequest, diffusion: Diffusion) -> None:
        self.running = running
        self.diffusion = diffusion
        self.steps = diffusion.steps * diffusion.images
        self.stop = threading.Event()
        self.progressed = asyncio.Event()
        self.sent = 0  # steps published
        self._last = time.monotonic()
        self.sequence.tokens = array("I")

    @property
    def sequence(self) -> SequenceState:
        return self.running.sequences[0]

    def advance(self, done_steps: int, total: int, now: float) -> None:
        """Count steps; a pipeline may take more or fewer than requested."""
        tokens = self.sequence.tokens
        new = min(self.steps, done_steps * self.steps // max(1, total)) - len(tokens)
        if new > 0:
            tokens.extend([int((now - self._last) * 1000 / new)] * new)
            self._last = now
            self.progressed.set()


class PipelineRunner(PipelineRunnerBase[DiffusionEngine]):
    slots = 1
    queue = 1  # taken, but not advertised: two routers may place at once, and a cancellation must be received here

    def __init__(
        self,
        context: SessionContext,
        thread: PipelineThread,
        engine: DiffusionEngine,
        engine_failed: Callable[[BaseException], None],
    ) -> None:
        super().__init__(context, thread, engine, engine_failed)
        self._reporter = context.reporter
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Queue[RunningRequest] = asyncio.Queue()
        self._current: _PipelineRun | None = None

    # --- requests ---

    def admit(self, job: jobs.Job, request: requests.GenerateRequest, delivery: Any) -> RunningRequest:
        kind = self._engine.diffuser.kind
        if request.diffusion is None or request.diffusion.kind != kind or request.n != 1:
            raise ValueError(f"this worker makes one {kind} per choice; the request asks for something else")
        return admit(job, request, delivery, None)

    async def run(self, running: RunningRequest, stage_input: StageInput | None) -> None:
        self._waiting.put_nowait(running)

    async def _run_all(self) -> None:
        while True:
            running = await self._waiting.get()
            diffusion = running.request.diffusion
            if not self._requests.is_current(running) or diffusion is None:
                continue
            run = self._current = _PipelineRun(running, diffusion)
            try:
                await self._run_one(run)
            except _EngineFailed as failed:
                log.error("engine_failed", error=repr(failed.error), exc_info=failed.error)
                self._engine_failed(failed.error)
                return
            except ServingError as error:  # its files cannot be stored
                await self._terminal.end(running, error.code, error.message)
            except Exception as error:
                log.exception("diffusion_request_failed", request=running.request.id)
                message = f"the images could not be stored: {error!r}"[:500]
                await self._terminal.end(running, Code.internal, message)
            finally:
                self._current = None

    async def _run_one(self, run: _PipelineRun) -> None:
        """From the prompt to stored files and the terminal event.

        Raises:
            ServingError: the files cannot be stored.
            _EngineFailed: the engine is broken.
        """
        running = run.running
        running.started_ns = steady_ns()
        progress = self._context.tasks.spawn(self._publish_progress(run), name="progress", on_failure=_progress_failed)
        try:
            outputs = await asyncio.wrap_future(self._thread.call(lambda: self._generate(run)))
        except Interrupted:
            await self._terminal.end_cancelled(running)
            return
        except RequestError as error:
            await self._terminal.end(running, Code(error.code), error.message)
            return
        except Exception as error:
            raise _EngineFailed(error) from error
        finally:
            await end([progress])
        seconds = round((steady_ns() - running.started_ns) / 1e9, 3)
        files = [await self._store(run, index, output, seconds) for index, output in enumerate(outputs)]
        lease = self._context.lease
        while not lease.trusted() and self._requests.is_current(running):  # noqa: ASYNC110 - ends with the lease
            await asyncio.sleep(TRUST_POLL_S)
        if not self._requests.is_current(running):
            await self._terminal.end_cancelled(running)
            return
        run.advance(1, 1, time.monotonic())
        finish = run.sequence.finish = Finish("stop", files=tuple(files))
        running.outcomes[0] = done.Outcome(run.sequence.tokens.tobytes(), finish.reason, None, finish.files)
        await self._publish(run, finish)
        self._context.metrics.pictures.labels(run.diffusion.kind).inc(len(files))
        self._terminal.finish(running)

    def _generate(self, run: _PipelineRun) -> list[EncodedOutput]:
        """In the thread."""

        def progress(done_steps: int, total: int) -> None:
            if run.stop.is_set():
                raise Interrupted
            self._loop.call_soon_threadsafe(run.advance, done_steps, total, time.monotonic())

        if run.stop.is_set():
            raise Interrupted
        outputs = []
        for picture in self._engine.generate(run.diffusion, progress):
            if run.stop.is_set():
                raise Interrupted
            frames, height, width, _ = picture.frames.shape
            file_format = run.diffusion.format
            try:
                data = encode(picture, file_format, run.diffusion.quality)
            except Exception as error:  # only this request fails: the engine's output is complete
                text = f"{frames} frames of {width}x{height} could not be written as {file_format}: {error!r}"
                raise RequestError(Code.engine_error, text[:500]) from error
            outputs.append(EncodedOutput(data, width, height, frames, picture.frame_rate))
        return outputs

    async def _store(self, run: _PipelineRun, index: int, output: EncodedOutput, seconds: float) -> File:
        """
        Raises:
            ServingError: the object store does not accept it.
        """
        request, file_format = run.running.request, run.diffusion.format
        extension = "jpg" if file_format == "jpeg" else file_format
        name = f"{request.id}-{run.running.attempt}-{index}.{extension}"
        left_s = max(1.0, (request.deadline_ns - self._context.bus.clock.now_ns()) / 1e9)
        if request.no_store:
            context = self._context
            await put_file(
                context.bus, context.publisher, request.gateway, request.id, name, output.data, keep_s=left_s
            )
        else:
            await put(self._context.bus, BUCKET, name, output.data, timeout=min(STORE_S, left_s))
        kind, size = media_type(file_format), len(output.data)
        return File(name, kind, size, output.width, output.height, output.frames, output.frame_rate, seconds)

    # --- progress ---

    async def _publish_progress(self, run: _PipelineRun) -> None:
        while True:
            await run.progressed.wait()
            run.progressed.clear()
            await self._publish(run)
            await asyncio.sleep(PROGRESS_S)

    async def _publish(self, run: _PipelineRun, finish: Finish | None = None) -> None:
        running, tokens = run.running, run.sequence.tokens
        count = len(tokens)
        if finish is None and not self._requests.is_current(running):
            return
        if count and not running.first_token_ns:
            running.first_token_ns = steady_ns()
        request = running.request
        item = TokenItem(request.id, running.attempt, 0, run.sent, tokens[run.sent : count].tobytes(), finish)
        await self._reporter.items(request.token_address, (item,))
        run.sent = count  # only now: a step that was not sent would stay missing, while one sent twice counts once

    # --- early ends ---

    def stop_early(self, running: RunningRequest) -> None:
        run = self._current
        if run is not None and run.running is running:
            run.stop.set()
            if self._engine.interruptible:
                return  # it ends at the next step
        self._terminal.spawn(self._terminal.end_cancelled(running))

    def free(self, running: RunningRequest, cancel: bool) -> None:
        if cancel and self._current is not None and self._current.running is running:
            self._current.stop.set()

    # --- start and stop ---

    async def open(self) -> None:
        self._context.tasks.spawn(self._run_all(), name="pipeline")

    async def fence(self) -> None:
        """Nothing to do: removed requests publish nothing more."""

    def registration(self, state: fleet.WorkerState) -> fleet.Registration:
        load = fleet.Load(running=int(self._current is not None), waiting=self._waiting.qsize())
        return self._registration(state, self.slots, load, diffusion=self._engine.diffuser)

    def housekeeping(self, now: float) -> None:
        """Nothing to do."""


def _progress_failed(error: BaseException) -> None:
    """The next message has all steps that were not sent."""
    log.warning("progress_publish_failed", error=repr(error))


class DiffusionBackend(PipelineBackend[DiffusionEngine]):
    def __init__(self, settings: WorkerSettings, metrics: WorkerMetrics, events: ProcessEvents) -> None:
        super().__init__(settings, events, lambda: build_engine(settings))

    async def open(self, connection: str) -> ServedModel:
        names = served_names(self._settings.served_model_name) or (_name(self._settings.model),)
        return ServedModel(names[0], names[1:], "", None, connection)

    def make_runner(self, context: SessionContext) -> PipelineRunner:
        return PipelineRunner(context, self._thread, self._engine, self._events.engine_failed)


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
        with loading("penstock.workers.engines.diffusion.diffusers_engine"):
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
