"""The models that a gateway has in memory: tokenizers, chat templates and settings of their folders, without weights.

A model is read once, in a thread, for all requests that wait for it; requests of other models continue. If reading
fails, it is repeated later; until then, requests are refused with the reason. Models that the operator named with
``--model`` stay in memory. Others are unloaded when they were not used for a while, or when another one needs the room,
but never while they have open requests.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import structlog

from penstock.infra.bus.tasks import Tasks
from penstock.infra.model import modeldir
from penstock.infra.model.modeldir import ModelDir, ModelError
from penstock.infra.text.detokenizer import Detokenizer
from penstock.infra.text.parsers.registry import forget_marks
from penstock.schemas.errors import Code, ServingError

log = structlog.get_logger("gateway")

THREADS = 2  # threads that read models; a slow disk or a download occupies one
WAIT_S = 60.0  # wait for a model that is being read
AGAIN_S = 10.0  # from a failure until reading is tried again


class Source(NamedTuple):
    """Where a model is read from.

    Attributes:
        name: its canonical name.
        folder: a folder, the name of a bundled model, or a Hugging Face id.
        tokenizer: digest that the tokenizer must have; "": any.
        host: of the worker that named the folder; "": the operator named it.
    """

    name: str
    folder: str
    tokenizer: str = ""
    host: str = ""
    chat_template: str = ""


class Loaded:
    """A model in memory. ``used``: time of the last use, by the clock; not updated for a ``pinned`` model."""

    __slots__ = ("model", "pinned", "used")

    def __init__(self, model: ModelDir, pinned: bool, used: float) -> None:
        self.model = model
        self.pinned = pinned
        self.used = used


class _Failure(NamedTuple):
    at: float
    error: ServingError


Load = Callable[[Source], ModelDir]


def report_ignored(model: ModelDir) -> None:
    """Log the settings of a model's generation_config.json that are not applied."""
    for key, value in model.defaults.ignored:
        log.warning("generation_default_ignored", file=str(model.path / "generation_config.json"), key=key, value=value)


def read_model(source: Source) -> ModelDir:
    """
    Raises:
        ModelError: the model cannot be read, or is not the one that the worker serves; the text says what to do.
    """
    path = modeldir.resolve(source.folder)
    model = modeldir.load(path, name=source.name, chat_template=source.chat_template)
    report_ignored(model)
    if source.tokenizer and model.tokenizer_digest != source.tokenizer:
        raise ModelError(
            f"{path} has another tokenizer ({model.tokenizer_digest}) than the worker registered ({source.tokenizer})"
        )
    return model


class ModelStore:
    """
    Args:
        limit: models in memory.
        idle_s: a model that was not used for this long is unloaded; 0: never.
        in_use: names of the models that have open requests.
        loaded: called with the source of a model that was read, and the seconds that it took.
        unloaded: called with the source of a model that was unloaded.

    Attributes:
        detokenizers: of the models in memory, by the digest of their tokenizers.
    """

    def __init__(
        self,
        limit: int,
        idle_s: float,
        tasks: Tasks,
        *,
        in_use: Callable[[], Collection[str]],
        loaded: Callable[[Source, float], None] = lambda source, seconds: None,
        unloaded: Callable[[Source], None] = lambda source: None,
        load: Load = read_model,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._idle_s = idle_s
        self._tasks = tasks
        self._in_use = in_use
        self._on_loaded = loaded
        self._on_unloaded = unloaded
        self._load = load
        self.clock = clock
        self.detokenizers: dict[str, Detokenizer] = {}
        self._models: dict[Source, Loaded] = {}
        self._loading: dict[Source, asyncio.Future[ModelDir]] = {}
        self._failed: dict[Source, _Failure] = {}
        self._threads: ThreadPoolExecutor | None = None

    def add(self, source: Source, model: ModelDir) -> None:
        """Keep a model that the operator named."""
        self._models[source] = Loaded(model, True, self.clock())
        self._index()

    def get(self, source: Source) -> Loaded | None:
        """A model in memory, for a request, which counts as a use."""
        entry = self._models.get(source)
        if entry is not None:
            entry.used = self.clock()
        return entry

    def peek(self, source: Source) -> ModelDir | None:
        """A model in memory. Does not count as a use."""
        entry = self._models.get(source)
        return None if entry is None else entry.model

    def _index(self) -> None:
        models = (each.model for each in self._models.values())
        self.detokenizers = {each.tokenizer_digest: each.detokenizer for each in models}

    def why_not(self, source: Source) -> str:
        """Why the last attempt to read a model failed; "": it did not, or there was none."""
        failure = self._failed.get(source)
        return failure.error.message if failure is not None else ""

    @property
    def has_room(self) -> bool:
        """Whether a model can be read without unloading another one."""
        return len(self._models) + len(self._loading) < self._limit

    async def load(self, source: Source) -> ModelDir:
        """A model; it is read if necessary.

        Raises:
            ServingError: model_unavailable: reading fails or takes too long, or there is no room for it.
        """
        pending: asyncio.Future[ModelDir] | None = None
        try:
            async with asyncio.timeout(WAIT_S):
                while (found := self.get(source)) is None:
                    pending = self._loading.get(source)
                    if pending is None and self._loading and not self.has_room and not self._idle():
                        # What is being read has the last place, and can be unloaded once it is there.
                        loading = tuple(self._loading.values())
                        ended, _ = await asyncio.wait(loading, return_when=asyncio.FIRST_COMPLETED)
                        if (pending := ended.pop()).cancelled():
                            raise asyncio.CancelledError
                        continue
                    # Shielded: reading serves all waiting requests, so a client that leaves must not cancel it.
                    return await asyncio.shield(pending := pending or self._start(source))
                return found.model
        except TimeoutError:
            raise _unavailable(
                source.name, f"it is not read from {source.folder} within {WAIT_S:g} s; try again", 5.0
            ) from None
        except asyncio.CancelledError:
            if pending is None or not pending.cancelled():
                raise
            raise _unavailable(source.name, "this gateway is stopping", 1.0) from None

    def prefetch(self, source: Source) -> None:
        """Begin to read a model that requests are likely to name, if there is room."""
        if self.peek(source) is None and source not in self._loading and self.has_room:
            try:
                self._start(source)
            except ServingError:
                pass  # reading failed a moment ago

    def _start(self, source: Source) -> asyncio.Future[ModelDir]:
        """
        Raises:
            ServingError: there is no room, or reading failed a moment ago.
        """
        now = self.clock()
        failure = self._failed.get(source)
        if failure is not None and now - failure.at < AGAIN_S:
            raise failure.error.with_traceback(None)
        while not self.has_room:
            self._make_room(source)
        done: asyncio.Future[ModelDir] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_retrieve)
        self._loading[source] = done
        self._tasks.spawn(self._read(source, done), name="load-model")
        return done

    def _idle(self) -> list[Source]:
        """Models that may be unloaded."""
        busy = self._in_use()
        return [each for each, entry in self._models.items() if not entry.pinned and each.name not in busy]

    def _make_room(self, source: Source) -> None:
        """
        Raises:
            ServingError: every other model is in use.
        """
        idle = self._idle()
        if not idle:
            raise _unavailable(
                source.name,
                f"this gateway has {self._limit} models in memory (--max-models), all of them named with --model or "
                "with open requests; try again later, or raise it",
                5.0,
            )
        self._drop(min(idle, key=lambda each: self._models[each].used), "another model needs its place")

    async def _read(self, source: Source, done: asyncio.Future[ModelDir]) -> None:
        began = self.clock()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "load-model")
        try:
            model = await asyncio.get_running_loop().run_in_executor(self._threads, self._load, source)
        except asyncio.CancelledError:
            done.cancel()
            raise
        except Exception as error:
            self._on_failed(source, error, done)
        else:
            seconds = self.clock() - began
            self._failed.pop(source, None)
            self._models[source] = Loaded(model, False, self.clock())
            self._index()
            log.info("model_loaded", model=source.name, folder=str(model.path), seconds=round(seconds, 3))
            self._on_loaded(source, seconds)
            if not done.done():
                done.set_result(model)
        finally:
            self._loading.pop(source, None)

    def _on_failed(self, source: Source, error: Exception, done: asyncio.Future[ModelDir]) -> None:
        log.warning("model_not_loaded", model=source.name, folder=source.folder, error=str(error), again_s=AGAIN_S)
        where = f" (as the worker on host {source.host} names it)" if source.host else ""
        failure = _unavailable(
            source.name,
            f"its tokenizer and chat template cannot be read here{where}: {error}. Have the folder at the same path on "
            f"this machine, or start the gateway with --model {source.name}=FOLDER",
            AGAIN_S,
        )
        self._failed[source] = _Failure(self.clock(), failure)
        while len(self._failed) > 4 * self._limit:
            del self._failed[next(iter(self._failed))]
        if not done.done():
            done.set_exception(failure)

    def unload_idle(self) -> None:
        """Unload models that were not used for a while."""
        if not self._idle_s:
            return
        before = self.clock() - self._idle_s
        idle = [each for each, entry in self._models.items() if not entry.pinned and entry.used < before]
        if not idle:
            return
        busy = self._in_use()
        for source in idle:
            if source.name in busy:
                self.get(source)
            else:
                self._drop(source, "it was not used")

    def _drop(self, source: Source, why: str) -> None:
        del self._models[source]
        self._index()
        forget_marks()
        log.info("model_unloaded", model=source.name, why=why)
        self._on_unloaded(source)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _unavailable(name: str, why: str, retry_after: float) -> ServingError:
    message = f"model {name[:200]!r} cannot be served at the moment: {why}"
    return ServingError(Code.model_unavailable, message, param="model", retry_after=retry_after)


def _retrieve(done: "asyncio.Future[ModelDir]") -> None:
    if not done.cancelled():
        done.exception()  # mark the error as seen: no request may be waiting any more
