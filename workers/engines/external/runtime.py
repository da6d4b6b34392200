"""A started engine of another package: its event loop, and the queue from that loop to the engine thread.

Asynchronous engines (TensorRT-LLM, vLLM, SGLang) bind their results, events and statistics to the loop that runs when
they are requested, and their threads refuse to deliver to a loop that has stopped. One loop therefore serves all of it.

vLLM's core process does not watch its parent: after a SIGKILL of the worker it would keep the device and its memory. So
``ProcessGuard`` ends an engine's child processes when the worker dies (Linux): a shell blocks on a pipe from the
worker; when the pipe closes it terminates them.
"""

import asyncio
import contextlib
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import structlog

from penstock.infra.engine_args.tree import BadArguments
from penstock.workers.engines.engine_protocol import EngineError

log = structlog.get_logger("engine")

R = TypeVar("R")
A = TypeVar("A", covariant=True)


class LoopThread:
    """Starts at once; ``close`` cancels what still runs and joins the thread.

    Attributes:
        tasks: those that have not ended.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function in the loop, after those posted before."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def run(self, work: Coroutine[Any, Any, Any], timeout: float) -> Any:
        """Run in the loop and wait for it.

        Raises:
            TimeoutError: it took longer, and was cancelled.
        """
        return self.begin(asyncio.wait_for(work, timeout)).result(timeout + 5.0)

    def begin(self, work: Coroutine[Any, Any, R]) -> "Future[R]":
        """Run in the loop, after what was posted before."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def task(self, work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
        """Start a task; call this in the loop."""
        task = self._loop.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def later(self, seconds: float, function: Callable[..., object], *arguments: object) -> None:
        """Call a function after ``seconds``; call this in the loop."""
        self._loop.call_later(seconds, function, *arguments)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:  # those that matter report it themselves
            log.error("engine_task_failed", task=task.get_name(), error=repr(task.exception()))

    def cancel_all(self, timeout: float) -> bool:
        """Cancel all tasks and wait for their ends; False: some did not end in time."""

        async def cancel() -> None:
            tasks = list(self.tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        try:
            self.run(cancel(), timeout)
        except TimeoutError:
            return False
        return True

    def close(self, timeout: float = 5.0) -> bool:
        """End the thread; False: it still hangs. May be called twice."""
        if self._loop.is_closed():
            return True
        ended = self.cancel_all(timeout)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout)
        return ended and not self._thread.is_alive()


START_S = 3600.0  # weights of the largest models
WARM_UP_S = 600.0  # the first request compiles and captures
CLOSE_S = 5.0
SHUT_DOWN_S = 60.0


class EngineFailed(NamedTuple):
    """The engine, or a task that reads from it, has failed."""

    error: BaseException


class Inbox:
    """Events from the loop thread (and others) to the engine thread, in order.

    Attributes:
        failure: the first error of the engine; set before its event is read.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, event: Any) -> None:
        """Queue a ``SequenceUpdate``, an ``EngineFailed``, or an event of the adapter's own. From any thread."""
        if isinstance(event, EngineFailed):
            self.failure = self.failure or event.error
        self._queue.put(event)

    def get(self, timeout: float = 0.0) -> Any:
        """The next event; None: none arrived within ``timeout`` seconds."""
        try:
            return self._queue.get(timeout=timeout) if timeout else self._queue.get_nowait()
        except queue.Empty:
            return None

    def __bool__(self) -> bool:
        return not self._queue.empty()


@dataclass(frozen=True)
class EngineRuntime(Generic[A]):
    """A started engine and what it needs to run.

    Attributes:
        llm: the engine.
        api: the parts of its package that the adapter uses.
        loop: where its outputs are followed.
        resources: closed with the engine, ``loop`` last.
    """

    llm: Any
    api: A
    loop: LoopThread
    resources: contextlib.ExitStack
    inbox: Inbox = field(default_factory=Inbox)


def in_thread(function: Callable[[], R], name: str) -> "Future[R]":
    """Call a function that may never return in a thread of its own, which the process's end does not wait for."""
    answer: Future[R] = Future()
    answer.set_running_or_notify_cancel()  # it cannot be cancelled from here on, so its result can always be set

    def call() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return answer


def bounded(function: Callable[..., R], *arguments: Any, seconds: float, **more: Any) -> R:
    """Call a function that may never return, for example of an engine that hangs.

    Raises:
        TimeoutError: it has not returned in time; it continues in its own thread.
        Exception: its own.
    """
    return in_thread(lambda: function(*arguments, **more), "bounded-call").result(seconds)


def shut_down(llm: Any, seconds: float = SHUT_DOWN_S) -> None:
    """Shut an engine down, within a bound; errors are logged only."""
    try:
        bounded(llm.shutdown, seconds=seconds)
    except Exception as error:
        log.error("engine_shutdown_failed", error=repr(error))


def first_request(title: str, loop: LoopThread, work: Coroutine[Any, Any, R]) -> R:
    """Compute an engine's first request.

    Raises:
        EngineError: it failed.
    """
    try:
        answer: R = loop.run(work, WARM_UP_S)
        return answer
    except Exception as error:
        raise EngineError(f"{title} started but failed its first request: {error!r}") from error


def construct(title: str, version: str, loop: LoopThread, make: Callable[[], Any]) -> Any:
    """Construct an engine that takes the running event loop as its own.

    Raises:
        BadArguments: it refuses an argument.
        EngineError: it does not start.
    """

    async def made() -> Any:
        return make()

    with starting(title, version):
        return loop.run(made(), START_S)


def close(llm: Any, loop: LoopThread, readers: Callable[[], Iterable["asyncio.Task[Any]"]]) -> None:
    """Shut an engine down. Its tasks that read from its processes are cancelled first: they would report a failure."""

    async def cancel_readers() -> None:
        for task in readers():
            task.cancel()

    with contextlib.suppress(TimeoutError):
        loop.run(cancel_readers(), CLOSE_S)
    shut_down(llm)


@contextlib.contextmanager
def starting(title: str, version: str) -> Iterator[None]:
    """Where an engine is constructed.

    Raises:
        BadArguments: it refuses an argument.
        EngineError: it does not start.
    """
    try:
        yield
    except EngineError:
        raise
    except (ValueError, TypeError) as error:  # pydantic's errors are ValueErrors
        raise BadArguments([f"{title} {version} refuses its arguments: {error}"]) from error
    except (Exception, SystemExit) as error:
        raise EngineError(f"{title} {version} did not start: {error!r}") from error


GRACE_S = 5  # from SIGTERM to SIGKILL
_SCRIPT = f'read -r _; kill "$@"; sleep {GRACE_S}; kill -KILL "$@"'


class ProcessGuard:
    """
    Args:
        pids: processes to terminate if this process dies before ``close``.
    """

    def __init__(self, pids: Collection[int]) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        if not pids:
            return
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "engine-guard", *map(str, sorted(pids))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def close(self) -> None:
        """Stop guarding: the processes end on their own."""
        shell, self._shell = self._shell, None
        if shell is None:
            return
        shell.kill()
        shell.wait()
        if shell.stdin is not None:
            shell.stdin.close()


def children() -> frozenset[int]:
    """Ids of running child processes of this process; empty without ``/proc``."""
    return frozenset(children_of(os.getpid()))


def children_of(parent: int) -> Iterator[int]:
    """Ids of the processes that this one has started, and that have not ended (Linux)."""
    for folder in Path("/proc").glob("[0-9]*"):
        state, above = _state(folder)
        if above == parent and state != "Z":
            yield int(folder.name)


def runs(pid: int) -> bool:
    """Whether a process runs (Linux). A zombie does not."""
    return _state(Path(f"/proc/{pid}"))[0] not in ("", "Z", "X")


def _state(folder: Path) -> tuple[str, int]:
    """State and parent of a process; ("", 0): it has ended."""
    try:
        text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        state, parent = text.rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return "", 0
    return state, int(parent)
