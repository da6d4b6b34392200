"""A worker's weights while it runs: replaced by those of another folder, or in host memory while it sleeps.

An operator's command is stored as an entry of a bucket on the broker, so that every worker of the model follows it. A
worker that was down loads the entry's weights before it registers, or does not start. When weights are replaced,
running requests end first, or continue with the new weights. Cached blocks are not found again, since their names
include the revision.

Workers that share a device take turns: one is awake, and holds a lock on a file of the machine. A worker that waits for
the device holds a second lock, which shows the first one that it must yield. Locks end with their processes.
"""

import asyncio
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog

from penstock.configs.settings import WorkerSettings
from penstock.infra.bus.direct_get import Entry
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.model import modeldir, text_files
from penstock.infra.process.user_folder import locked, user_folder
from penstock.schemas import block_hashes, done, fleet
from penstock.schemas.control import Ok, Sleep, Wake
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.fleet import CONTINUE, FINISH, TensorSource, WeightsEntry, WeightsState
from penstock.schemas.subjects import token, weights_key
from penstock.workers.engine_loop.step_output import SequenceState
from penstock.workers.engines.engine_protocol import Engine, EngineError, RequestError, WeightsEngine
from penstock.workers.session.request_runner import ServedModel, SessionContext
from penstock.workers.session.requests import RunningRequest

log = structlog.get_logger("weights")

BUCKET = "weights"
LOOK_S = 0.02  # between checks whether running requests have ended, or the device is free
MOST_REASON = 500  # characters of an error in a registration
READS = 3  # of a folder that changes meanwhile
TURN_S = 2.0  # shortest time that a worker with requests is awake before it makes room for another,
TURN_SHARE = 4.0  # and this many times the duration of a change: a fifth of the device's time at most
GAP_S = 0.5  # without requests, after which it makes room; sequential clients leave shorter gaps
AFTER_S = 0.1  # for which a worker that just fell asleep leaves the device to waiting ones
ROOM_S = 600.0  # for its running requests to finish before that


class WeightsError(Exception):
    """A command cannot be carried out; nothing has changed."""


class DeviceTurn:
    """Which of several workers of one machine and user is awake.

    Args:
        name: of the device; equal for those that share it.
    Raises:
        FolderTaken, OSError: their locks have no folder.
    """

    def __init__(self, name: str) -> None:
        folder = user_folder() / "devices"
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._folder, fcntl.LOCK_SH)  # so that programs that delete old temporary files leave it alone
        self._files = [folder / f"{token(name)}.{part}" for part in ("awake", "next")]
        self._awake, self._next = -1, -1

    @property
    def held(self) -> bool:
        return self._awake >= 0

    @property
    def wanted(self) -> bool:
        """Whether another worker waits for its turn."""
        descriptor = locked(self._files[1])
        if descriptor < 0:
            return True
        os.close(descriptor)
        return False

    def take(self) -> bool:
        """Wake up if the device is free; False: its holder was asked to sleep, try again soon."""
        if self._awake < 0:
            if self._next < 0:
                self._next = locked(self._files[1])
            self._awake = locked(self._files[0]) if self._next >= 0 else -1
        if self._awake >= 0 and self._next >= 0:
            os.close(self._next)
            self._next = -1
        return self._awake >= 0

    def leave(self) -> None:
        """Release the device, and stop waiting for it."""
        for descriptor in (self._awake, self._next):
            if descriptor >= 0:
                os.close(descriptor)
        self._awake = self._next = -1


class RequestHolder(Protocol):
    """The interface of the request runner that replacing weights needs."""

    def begun(self) -> int:
        """Requests that have begun to be computed, and whose end is not stored."""

    async def park_waiting(self) -> None:
        """Take sequences that have not started back from the engine, and keep them until ``submit_parked``."""

    @property
    def parked(self) -> int: ...

    def submit_parked(self) -> None: ...


class WeightsTable:
    """Used in the event loop; one for all sessions of a worker.

    Args:
        call: runs a function in the engine thread.
        folder: of the weights that the flags name.
        served: the served model; its revision and source follow the weights.
        changed: publishes the registration again.
        stays: why the KV cache cannot leave the device; "": it can.
        turn: of a shared device, which this worker holds; None: it shares none.
        receive: receives a trainer's tensors, as of a rank, into a folder, until the event is set, or raises
            ``WeightsError``; None: none are taken.
    Attributes:
        holds: the runner must not submit requests, and parks them.
        frozen: nothing is computed, either.
        shown: the registered state.
        watches: whether ``look`` must be called.
    """

    def __init__(
        self,
        call: Callable[[Callable[[Engine], Any]], "Future[Any]"],
        settings: WorkerSettings,
        folder: Path,
        served: ServedModel,
        changed: Callable[[], Coroutine[Any, Any, None]],
        *,
        stays: str = "",
        turn: DeviceTurn | None = None,
        receive: Callable[[TensorSource, int, Path, threading.Event], None] | None = None,
    ) -> None:
        self._call = call
        self._settings = settings
        self._folder = folder
        self._served = served
        self._changed = changed
        self._stays = stays
        self._turn = turn
        self._roots = [Path(each).expanduser().resolve() for each in settings.weights_folder]
        self._receive = receive
        self._staging = Path(settings.weights_staging).expanduser() / token(settings.name or f"pid-{os.getpid()}")
        self._source: TensorSource | None = None  # that was received last
        self._ahead: tuple[str, Any] | None = None  # what was read of a received revision
        self._paused = False
        self._lacking = False  # tensors of the last update, which cannot be had again
        self.shown = WeightsState(base=served.revision, receives=receive is not None)
        self._entry: tuple[WeightsEntry, int] | None = None
        self.holds = self.frozen = False
        self.watches = turn is not None or settings.sleep_after_s > 0
        self._registered = False
        self._tail: LogTail | None = None
        self._news = asyncio.Event()
        self._lock = asyncio.Lock()
        self._context: SessionContext | None = None
        self._holder: RequestHolder | None = None
        self._task: asyncio.Task[Any] | None = None  # falls asleep or wakes up
        self._awake_since = self._busy_at = time.monotonic()
        self._slept_at = 0.0
        self._change_s = 0.0  # that the last sleep and the last wake took together

    def _show(self, **changes: Any) -> None:
        shown = msgspec.structs.replace(self.shown, **changes)
        self.shown = msgspec.structs.replace(shown, paused=self._stopped or (self.holds and not shown.asleep))
        self.watches = self.watches or shown.asleep

    @property
    def _stopped(self) -> bool:
        return self._paused or self._lacking

    async def _register(self) -> None:
        if self._registered:
            await self._changed()

    # --- sessions ---

    async def follow(self, context: SessionContext, holder: RequestHolder) -> None:
        """Load the weights that operators requested, before the worker is registered, and follow their commands.

        Raises:
            ServingError: the weights cannot be loaded.
        """
        self._context, self._holder, self._registered = context, holder, False
        self._entry = None
        self._show(entry=0, error="")
        bus = context.bus
        subject = f"$KV.{bus.subjects.bucket(BUCKET)}.{weights_key(self._served.name)}"
        self._tail = LogTail.of_bucket(bus, BUCKET, lambda entry: self._on_entry(subject, entry))
        try:
            await self._tail.start()
        except ServingError as error:
            self._tail = None
            if self._roots:
                raise
            action = "run 'penstock streams apply', and give the broker's users their new rights"
            log.warning("weights_not_followed", error=error.message, effect="it cannot be paused", action=action)
        await self._reconcile()
        if self.shown.error:
            raise ServingError(
                Code.model_unavailable,
                f"the weights that an operator asked for cannot be served: {self.shown.error}; put them there, or "
                "update the model's weights while another worker runs",
            )

    async def keep(self) -> None:
        """Carry out entries as they arrive, until cancelled."""
        self._registered = True
        while True:
            await self._news.wait()
            if await self._reconcile():
                await self._register()

    async def unfollow(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._tail is not None:
            await self._tail.stop()
            self._tail = None

    def close(self) -> None:
        if self._turn is not None:
            self._turn.leave()

    def _on_entry(self, subject: str, entry: Entry) -> None:
        if entry.subject != subject or not entry.data:
            return
        try:
            self._entry = fleet.decode_weights(entry.data), entry.seq
        except msgspec.MsgspecError as error:
            log.warning("weights_entry_unreadable", error=str(error))
            return
        self._news.set()

    # --- operators' commands ---

    async def _reconcile(self) -> bool:
        """Carry out an entry; True: something changed."""
        async with self._lock:
            self._news.clear()
            if self._entry is None or self._entry[1] == self.shown.entry:
                return False
            entry, number = self._entry
            if entry.base != self.shown.base:
                log.warning(
                    "weights_entry_ignored",
                    update=entry.update,
                    base=entry.base,
                    own=self.shown.base,
                    reason="this worker was started with other weights than those that were updated",
                )
                return False
            reason = ""
            try:
                await self._take(entry.source)
                if entry.update != self.shown.update or entry.revision not in ("", self._served.revision):
                    await self._update(entry)
                await self._pause(entry)
                if entry.source is None:
                    await self._tidy()
            except (WeightsError, RequestError) as error:
                reason = str(error)[:MOST_REASON]
                log.error("weights_failed", update=entry.update, folder=entry.path, error=reason)
            self._show(entry=number, error=reason)
        return True

    async def _update(self, entry: WeightsEntry) -> None:
        """
        Raises:
            WeightsError, RequestError: the weights cannot be replaced, and stay.
        """
        folder = self._within(entry.path) if entry.path else self._folder
        if entry.received:
            folder = self._staging / entry.revision
            if not folder.is_dir():
                self._lacking = self.holds = True
                self._show()
                log.warning(
                    "weights_missing",
                    update=entry.update,
                    revision=entry.revision,
                    reason="a trainer sent them while this worker was not there",
                    action="it takes requests from the next update on: send the weights again",
                )
                return
        revision = await asyncio.to_thread(self._revision, folder)
        if entry.revision not in ("", revision):
            raise WeightsError(
                f"{folder} has revision {revision} by now, and update {entry.update} is of {entry.revision}"
            )
        began = time.monotonic()
        if revision != self._served.revision:
            ahead, self._ahead = self._ahead, None
            read = ahead[1] if ahead is not None and ahead[0] == revision else await self._read(folder)
            if self.shown.asleep:
                await self._wake_now()
            await self._quiet(entry.running, entry.within_s)
            try:
                began = time.monotonic()
                revision = await self._replace(folder, revision, read)
                if entry.revision not in ("", revision):
                    raise EngineError(f"{folder} changed while it was read, and the weights before are gone")
                self._lacking = False
            finally:
                if not self._stopped:
                    await self._release()
        elif self._lacking:
            self._lacking = False
            if not self._paused:
                await self._release()
        took = time.monotonic() - began
        self._show(update=entry.update, before=entry.before if entry.running == CONTINUE else "", seconds=took)
        log.info("weights_updated", update=entry.update, revision=revision, folder=str(folder), seconds=round(took, 3))

    async def _take(self, source: TensorSource | None) -> None:
        """Receive a trainer's tensors, and keep them beside the weights that are served.

        Raises:
            WeightsError: they did not all arrive, or are not of this model.
        """
        assert self._context is not None
        if source == self._source:
            return
        self._source = source
        if source is None or self._context.id not in source.ranks:
            return
        if self._receive is None:
            raise WeightsError("this worker has no --weights-staging, where tensors are received")
        await self._tidy()
        began, folder, stop = time.monotonic(), self._staging / f"next-{time.time_ns()}", threading.Event()
        try:
            await asyncio.to_thread(self._receive, source, source.ranks[self._context.id], folder, stop)
        finally:  # if this session ends, so does the thread
            stop.set()
        revision = await asyncio.to_thread(self._revision, folder)
        place = self._staging / revision
        if revision != self._served.revision or not place.is_dir():
            await asyncio.to_thread(_replace_folder, folder, place)
            try:
                self._ahead = revision, await self._read(place)
            except RequestError:
                await asyncio.to_thread(shutil.rmtree, place, True)
                raise
        took = round(time.monotonic() - began, 3)
        self._show(received=revision)
        log.info("tensors_received", update=source.number, revision=revision, backend=source.backend, seconds=took)

    async def _tidy(self) -> None:
        """Delete received weights except those that are served, which a restart needs."""
        self._show(received="")
        self._ahead = None
        if self._receive is not None and self._staging.is_dir():
            for each in await asyncio.to_thread(lambda: list(self._staging.iterdir())):
                if each.name != self._served.revision:
                    await asyncio.to_thread(shutil.rmtree, each, True)

    async def _read(self, folder: Path) -> Any:
        """
        Raises:
            RequestError: the weights cannot be used.
        """
        weights = await asyncio.wrap_future(self._call(_weights_of))
        return await asyncio.to_thread(weights.read, folder)

    async def _replace(self, folder: Path, revision: str, read: Any) -> str:
        """The revision of what was read: a trainer may still write.

        Raises:
            RequestError: the weights cannot be used; the present ones stay.
            EngineError: the folder keeps changing.
        """
        old, served = self._served.revision, self._served
        for _ in range(READS):

            def replace(engine: Engine, read: Any = read, old: str = old, revision: str = revision) -> None:
                _weights_of(engine).replace(read, lambda key, generated: _renamed(key, generated, old, revision))

            await asyncio.wrap_future(self._call(replace))
            again = await asyncio.to_thread(self._revision, folder)
            if again == revision:
                served.revision = revision
                if self._context is not None:
                    reporter = self._context.reporter
                    reporter.made_with = msgspec.structs.replace(reporter.made_with, revision=revision)
                return revision
            revision, old = again, ""
            try:
                read = await self._read(folder)
            except RequestError as error:  # those before are gone
                raise EngineError(f"{folder} changed while it was read: {error}") from error
        raise EngineError(f"{folder} changed {READS} times while it was read; write weights to a folder of their own")

    def _within(self, path: str) -> Path:
        """
        Raises:
            WeightsError: the path is in no folder in which weights are allowed.
        """
        if not self._roots:
            raise WeightsError("this worker has no --weights-folder, within which weights are read while it runs")
        folders = [(root / path).resolve() for root in self._roots]
        allowed = [each for root, each in zip(self._roots, folders, strict=True) if each.is_relative_to(root)]
        if not allowed:
            raise WeightsError(f"{path!r} is not within --weights-folder {', '.join(map(str, self._roots))}")
        return next((each for each in allowed if each.is_dir()), allowed[0])

    def _revision(self, folder: Path) -> str:
        """
        Raises:
            WeightsError: the folder has no model, or one with another tokenizer.
        """
        try:
            has_tokenizer = text_files.file_of(folder) is not None
            if has_tokenizer and self._served.tokenizer not in ("", modeldir.tokenizer_digest(folder)):
                raise WeightsError(f"{folder} has another tokenizer than this model")
            if not (folder / "config.json").is_file():
                raise WeightsError(f"there is no model in {folder}: it has no config.json")
            return modeldir.revision(folder)
        except (OSError, modeldir.ModelError) as error:
            raise WeightsError(f"{folder} cannot be read: {error}") from error

    async def _pause(self, entry: WeightsEntry) -> None:
        """
        Raises:
            WeightsError: requests still run after their time limit.
        """
        if entry.paused and not self._paused:
            if not self.shown.asleep:
                await self._quiet(entry.paused, entry.within_s)
            self._paused = True
            self._show()
            log.info("weights_paused", running=entry.paused)
        elif not entry.paused and self._paused:
            self._paused = False
            if not (self.shown.asleep or self._lacking):
                await self._release()
            self._show()
            log.info("weights_resumed")

    # --- pause and resume ---

    async def _quiet(self, running: str, within_s: float) -> None:
        """Stop submitting, and finish or pause running requests. Then nothing is computed until ``_release``.

        Raises:
            WeightsError: requests still run after ``within_s`` seconds; they continue.
        """
        assert self._holder is not None
        holder, was_held = self._holder, self.holds
        self.holds = True
        self._show()
        await self._register()
        try:
            if running == FINISH:
                if self.frozen:
                    self.frozen = False
                    await asyncio.wrap_future(self._call(lambda engine: _weights_of(engine).proceed()))
                until = time.monotonic() + within_s
                await holder.park_waiting()
                while left := holder.begun():
                    if time.monotonic() > until:
                        raise WeightsError(f"{left} requests still run after {within_s:g} s; allow more, or 'continue'")
                    await asyncio.sleep(LOOK_S)
            await asyncio.wrap_future(self._call(lambda engine: _weights_of(engine).hold()))
            self.frozen = True
            settled = lambda engine: _weights_of(engine).settled  # noqa: E731
            while not await asyncio.wrap_future(self._call(settled)):  # noqa: ASYNC110 - a step ends, or its engine
                await asyncio.sleep(LOOK_S)
        except WeightsError:
            if not was_held:
                await self._release()
            raise

    async def _release(self) -> None:
        """Resume computing, and submit parked requests."""
        assert self._holder is not None
        self.holds = self.frozen = False
        self._show()
        await asyncio.wrap_future(self._call(lambda engine: _weights_of(engine).proceed()))
        self._holder.submit_parked()
        self._awake_since = self._busy_at = time.monotonic()

    # --- sleep and wake ---

    async def rest(self, order: Sleep | Wake) -> Ok:
        if isinstance(order, Wake):
            self.wake()
            return Ok()
        return Ok(await self._fall_asleep(order.within_s))

    def wake(self) -> None:
        """Begin to wake up, unless the worker is awake or waking up."""
        if self.shown.asleep and (self._task is None or self._task.done()):
            self._spawn(self._wake_up())

    def look(self, now: float) -> None:
        """Called several times a second: make room for another worker, or sleep because there is nothing to do."""
        assert self._holder is not None
        if self.shown.asleep:
            if self._holder.parked and not self._stopped:
                self.wake()
            return
        busy = bool(self._holder.begun() or self._holder.parked)
        self._busy_at = now if busy else self._busy_at
        idle_s = self._settings.sleep_after_s
        tired = bool(idle_s) and now - self._busy_at > idle_s
        still = self._stopped and not self._holder.begun()  # paused, and nothing stands still in mid-answer
        if (still or not self.holds) and (self._task is None or self._task.done()):
            due = now - self._awake_since > max(TURN_S, TURN_SHARE * self._change_s) or now - self._busy_at > GAP_S
            make_room = self._turn is not None and due and self._turn.wanted
            if tired or make_room:
                self._spawn(self._fall_asleep(ROOM_S))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        assert self._context is not None
        self._task = self._context.tasks.spawn(work, name="sleep")

    async def _fall_asleep(self, within_s: float) -> str:
        """Fall asleep. Returns why this is impossible; "": the worker sleeps."""
        async with self._lock:
            if self.shown.asleep:
                return ""
            if self._stays:
                return f"{self._stays}, so this worker does not sleep"
            try:
                await self._quiet(FINISH, within_s)
                began = time.monotonic()
                try:
                    await asyncio.wrap_future(self._call(lambda engine: _weights_of(engine).sleep()))
                except RequestError:
                    if not self._stopped:
                        await self._release()
                    raise
            except (WeightsError, RequestError) as error:
                log.warning("sleep_refused", error=str(error))
                await self._register()
                return str(error)
            took = time.monotonic() - began
            self._show(asleep=True, seconds=took)
            self._change_s, self._slept_at = took, time.monotonic()
            if self._turn is not None:
                self._turn.leave()
            log.info("worker_asleep", seconds=round(took, 3))
        await self._register()
        return ""

    async def _wake_up(self) -> None:
        async with self._lock:
            if self.shown.asleep:
                await self._wake_now()
                if not self._stopped:
                    await self._release()
        await self._register()

    async def _wake_now(self) -> None:
        """Bring the weights back. The scheduler stays held."""
        if self._turn is not None:
            await asyncio.sleep(max(0.0, self._slept_at + AFTER_S - time.monotonic()))
            while not self._turn.take():  # noqa: ASYNC110 - another process
                await asyncio.sleep(LOOK_S)
        began = time.monotonic()
        await asyncio.wrap_future(self._call(lambda engine: _weights_of(engine).wake()))
        took = time.monotonic() - began
        self._show(asleep=False, seconds=took)
        self._change_s += took
        log.info("worker_awake", seconds=round(took, 3))


def _replace_folder(new: Path, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    new.rename(place)


def _weights_of(engine: Engine) -> WeightsEngine:
    assert engine.weights is not None
    return engine.weights


def _renamed(key: object, generated: int, old: str, revision: str) -> bytes:
    """The root of a sequence's blocks by the new revision. In the engine thread. Notes where the old one ended.

    Args:
        old: revision that the sequence's tokens came from; "": it has been noted.
    """
    running = key.owner if isinstance(key, SequenceState) else None
    if not isinstance(running, RunningRequest):
        return block_hashes.root(revision)
    if old and generated:
        assert isinstance(key, SequenceState)
        tokens = [0] * len(running.sequences)
        if running.revisions and running.revisions[-1].revision == old:
            tokens = list(running.revisions[-1].tokens)
            running.revisions = running.revisions[:-1]
        tokens[key.index] = generated
        running.revisions += (done.EarlierRevision(old, tuple(tokens)),)
    return block_hashes.root(revision, running.request.lora, running.request.salt)
