"""A worker that makes pictures: its process, and its life. One request at a time, in a thread of its own.

What a request streams are its denoising steps, each a "token" whose value is the milliseconds it took. So progress is
ordered, counted once and found again like any answer; another attempt begins at step 0 and is heard again once it has
passed what was told before. The pictures go into the object store and their names into the last item.
"""

import asyncio
import os
import queue
import secrets
import socket
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import structlog

from configs.settings import WorkerSettings
from infra.bus.connection import Bus, connect
from infra.bus.object_store import put
from infra.bus.publisher import Publisher
from infra.bus.tasks import end
from schemas import done, fleet, jobs, requests
from schemas.errors import Code, ServingError
from schemas.requests import Diffusion
from schemas.tokens import File, Finish, TokenItem
from workers.engines.base import RequestError
from workers.engines.diffusion.base import DiffusionEngine, Stopped
from workers.engines.diffusion.encode import encode, media_type
from workers.life import Life, Model, StageInput
from workers.metrics import Metrics
from workers.process import EXIT_OK, WorkerProcess
from workers.requests import RunningRequest, admit
from workers.sequence_state import SequenceState
from workers.stopping import StoppedEarly

log = structlog.get_logger("worker")

T = TypeVar("T")

PROGRESS_S = 0.1  # between two messages of one request
STORE_S = 120.0  # for one picture; its request's deadline holds all the same
TRUST_AGAIN_S = 0.02
BUCKET = "results"
JOIN_S = 5.0  # for an engine to end in order


class PipelineThread:
    """The thread that an engine of pictures lives in, from its construction to its end.

    A daemon: a computation that cannot be stopped does not keep the process.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="thread", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], T]) -> "Future[T]":
        """Run ``work`` behind what was given before."""
        future: Future[T] = Future()

        def one() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)

        self._calls.put(one)
        return future

    def stop(self, timeout: float) -> bool:
        """Whether the thread has ended."""
        self._calls.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._calls.get()) is not None:
            work()


class EncodedOutput(NamedTuple):
    """One picture as a file, not yet stored."""

    data: bytes
    width: int
    height: int
    frames: int
    frame_rate: float


class _PipelineFailed(Exception):
    """The engine is."""

    def __init__(self, error: Exception) -> None:
        super().__init__(repr(error))
        self.error = error


class _PipelineRun:
    """A request that is computed. ``advance`` in the event loop, all else also in the thread."""

    def __init__(self, active: RunningRequest, ask: Diffusion) -> None:
        self.active = active
        self.ask = ask
        self.steps = ask.steps * ask.images
        self.stop = threading.Event()
        self.news = asyncio.Event()
        self.said = 0
        self._last = time.monotonic()
        self.choice.tokens = array("I")

    @property
    def choice(self) -> SequenceState:
        return self.active.choices[0]

    def advance(self, done_steps: int, total: int, now: float) -> None:
        """Count steps; a pipeline may take more or fewer than it was asked for."""
        tokens = self.choice.tokens
        new = min(self.steps, done_steps * self.steps // max(1, total)) - len(tokens)
        if new > 0:
            tokens.extend([int((now - self._last) * 1000 / new)] * new)
            self._last = now
            self.news.set()


class DiffusionSession(Life):
    """
    Args:
        broke: called once when the engine is broken.
    """

    def __init__(
        self,
        bus: Bus,
        publisher: Publisher,
        thread: PipelineThread,
        engine: DiffusionEngine,
        model: Model,
        settings: WorkerSettings,
        metrics: Metrics,
        broke: Callable[[BaseException], None],
    ) -> None:
        # One more is taken, not asked for: two routers may place at once, and its cancellation is heard here.
        super().__init__(bus, publisher, model, settings, metrics, slots=1, queue=1)
        self._thread = thread
        self._engine = engine
        self._broke = broke
        self._waiting: asyncio.Queue[RunningRequest] = asyncio.Queue()
        self._running: _PipelineRun | None = None

    def _background(self) -> None:
        self._tasks.spawn(self._work(), name="pictures")

    def _registration(self) -> fleet.Registration:
        return fleet.Registration(
            worker=self.id,
            model=self._model.name,
            role=self._settings.role,
            engine=self._engine.name,
            epoch=self.epoch,
            block_size=self._settings.block_size,
            total_blocks=0,
            slots=1,
            max_model_len=0,
            state=self._state,
            aliases=self._model.aliases,
            revision=self._model.revision,
            kv_events=False,
            load=fleet.Load(running=int(self._running is not None), waiting=self._waiting.qsize()),
            host=socket.gethostname(),
            pid=os.getpid(),
            name=self._settings.name,
            connection=self._model.connection,
            diffusion=self._engine.diffuser,
        )

    # --- work in ---

    def _admit(self, job: jobs.Job, request: requests.GenerateRequest, delivery: Any) -> RunningRequest:
        if request.diffusion is None or request.diffusion.kind != self._engine.diffuser.kind or request.n != 1:
            raise ValueError(
                f"this worker makes one {self._engine.diffuser.kind} per choice, and that is not asked for"
            )
        return admit(job, request, delivery, None)

    async def _take(self, active: RunningRequest, arrived: StageInput | None) -> None:
        self._waiting.put_nowait(active)

    def _stop_early(self, active: RunningRequest, code: Code, message: str) -> None:
        if active.cancelled is not None:
            return
        active.cancelled = (code, message)
        run = self._running
        if run is not None and run.active is active:
            run.stop.set()
            if self._engine.stoppable:
                return  # it ends at the next step, and tells then
        self._spawn(self._end_early(active))

    def _remove(self, active: RunningRequest, *, cancel: bool = True) -> None:
        super()._remove(active, cancel=cancel)
        if cancel and self._running is not None and self._running.active is active:
            self._running.stop.set()

    # --- one after another ---

    async def _work(self) -> None:
        while True:
            active = await self._waiting.get()
            ask = active.request.diffusion
            if not self.current(active) or ask is None:
                continue
            run = self._running = _PipelineRun(active, ask)
            try:
                await self._one(run)
            except _PipelineFailed as broken:  # whoever is told ends this life; nothing more may begin
                log.error("engine_failed", error=repr(broken.error), exc_info=broken.error)
                self._broke(broken.error)
                return
            except ServingError as error:  # its pictures cannot be stored
                await self.end(active, error.code, error.message)
            except Exception as error:
                log.exception("diffusion_request_failed", request=active.request.id)
                await self.end(active, Code.internal, f"the pictures could not be handed over: {error!r}"[:500])
            finally:
                self._running = None

    async def _one(self, run: _PipelineRun) -> None:
        """From text to stored files and the terminal event.

        Raises:
            ServingError: the files cannot be stored.
            _PipelineFailed: the engine failed, and not only this request.
        """
        active = run.active
        active.started_ns = time.time_ns()
        telling = self._tasks.spawn(self._tell(run), name="progress", on_failure=_not_told)
        try:
            made = await asyncio.wrap_future(self._thread.call(lambda: self._make(run)))
        except Stopped:
            await self._end_early(active)
            return
        except RequestError as error:
            await self.end(active, Code(error.code), error.message)
            return
        except Exception as error:
            raise _PipelineFailed(error) from error
        finally:
            await end([telling])
        seconds = round((time.time_ns() - active.started_ns) / 1e9, 3)
        files = [await self._store(run, index, each, seconds) for index, each in enumerate(made)]
        while not self.trusted() and self.current(active):  # noqa: ASYNC110 - told to others before this life is over, or not at all
            await asyncio.sleep(TRUST_AGAIN_S)
        if not self.current(active):
            await self._end_early(active)
            return
        run.advance(1, 1, time.monotonic())
        finish = run.choice.finish = Finish("stop", files=tuple(files))
        active.outcomes[0] = done.Outcome(run.choice.tokens.tobytes(), finish.reason, None, finish.files)
        await self._say(run, finish)
        self._metrics.pictures.labels(run.ask.kind).inc(len(files))
        self._finish(active)

    def _make(self, run: _PipelineRun) -> list[EncodedOutput]:
        """In the thread."""

        def progress(done_steps: int, total: int) -> None:
            if run.stop.is_set():
                raise Stopped
            self._loop.call_soon_threadsafe(run.advance, done_steps, total, time.monotonic())

        if run.stop.is_set():
            raise Stopped
        made = []
        for picture in self._engine.generate(run.ask, progress):
            if run.stop.is_set():
                raise Stopped
            frames, height, width, _ = picture.frames.shape
            try:
                data = encode(picture, run.ask.format, run.ask.quality)
            except Exception as error:  # what was computed is whole, and so is the engine
                what = f"{frames} frames of {width}x{height} could not be written as {run.ask.format}: {error!r}"
                raise RequestError(Code.engine_error, what[:500]) from error
            made.append(EncodedOutput(data, width, height, frames, picture.frame_rate))
        return made

    async def _store(self, run: _PipelineRun, index: int, made: EncodedOutput, seconds: float) -> File:
        """
        Raises:
            ServingError: the broker does not take it.
        """
        request, extension = run.active.request, "jpg" if run.ask.format == "jpeg" else run.ask.format
        name = f"{request.id}-{run.active.attempt}-{index}.{extension}"
        left_s = max(1.0, (request.deadline_ns - time.time_ns()) / 1e9)
        await put(self._bus, BUCKET, name, made.data, timeout=min(STORE_S, left_s))
        kind = media_type(run.ask.format)
        return File(name, kind, len(made.data), made.width, made.height, made.frames, made.frame_rate, seconds)

    # --- progress out ---

    async def _tell(self, run: _PipelineRun) -> None:
        while True:
            await run.news.wait()
            run.news.clear()
            await self._say(run)
            await asyncio.sleep(PROGRESS_S)

    async def _say(self, run: _PipelineRun, finish: Finish | None = None) -> None:
        active, tokens = run.active, run.choice.tokens
        upto = len(tokens)
        if finish is None and not self.current(active):
            return
        if upto and not active.first_token_ns:
            active.first_token_ns = time.time_ns()
        request = active.request
        item = TokenItem(request.id, active.attempt, 0, run.said, tokens[run.said : upto].tobytes(), finish)
        await self._report.items(request.gateway, (item,))
        run.said = upto  # not before: what was not sent would be missed for ever, and twice does not matter


class DiffusionWorker(WorkerProcess[DiffusionSession]):
    """``penstock worker --role diffusion``."""

    async def serve(self) -> int:
        self._stopping.on_signals()
        thread = PipelineThread()
        status, ended = EXIT_OK, True
        try:
            status = await self._with(thread)
        except StoppedEarly:
            log.info("stopped_during_startup")
        finally:
            ended = await asyncio.to_thread(thread.stop, self._stopping.left(JOIN_S + 0.5) - 0.5)
            self._stopping.over()
        if not ended:
            log.warning("engine_stop_timeout", action="the process ends without waiting for it")
            self._stopping.end_now(status)
        return status

    async def _with(self, thread: PipelineThread) -> int:
        """Serve, and close everything but the thread.

        Raises:
            StoppedEarly: the process was asked to stop before that.
        """
        settings = self._settings
        engine = await self._stopping.unless_asked(_built(thread, settings))
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
        names = tuple(n for n in settings.served_model_name.split(",") if n) or (_name(settings.model),)
        model = Model(names[0], names[1:], "", None, connection)

        def make() -> DiffusionSession:
            return DiffusionSession(bus, publisher, thread, engine, model, settings, self._metrics, self._broke)

        try:
            await publisher.open()
            return await self._live(bus, make, engine.load_seconds)
        finally:
            thread.call(engine.close)
            await publisher.close()
            await bus.close()


async def _built(thread: PipelineThread, settings: WorkerSettings) -> DiffusionEngine:
    return await asyncio.wrap_future(thread.call(lambda: build_engine(settings)))


def _not_told(error: BaseException) -> None:
    """The next message has all that was not said."""
    log.warning("progress_publish_failed", error=repr(error))


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
        from workers.engines.diffusion import pipeline

        engine = pipeline.from_settings(settings, pipeline.resolve(settings.model))
    elif settings.engine == "trtllm":
        from workers.engines.trtllm import visual_gen

        engine = visual_gen.from_settings(settings)
    else:
        raise ValueError(f"--role diffusion runs with --engine native (diffusers) or trtllm, not {settings.engine}")
    made = engine.diffuser
    log.info(
        "engine_ready",
        engine=engine.name,
        pipeline=made.pipeline,
        makes=made.kind,
        seconds=round(engine.load_seconds, 2),
    )
    return engine


__all__ = ["DiffusionSession", "DiffusionWorker", "PipelineThread", "build_engine"]
