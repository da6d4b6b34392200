"""Tries to compile constraints within limits, in processes that can be ended.

llguidance cannot be stopped while it compiles, some schemas take minutes, and a long chain of references overflows its
stack, which ends the process. So each constraint is first compiled in a fork of a small process, under limits of CPU
time, memory and stack that the kernel keeps.

There are two lanes of one process each. A constraint that takes longer than ``QUICK_S`` is tried again in the second,
so that it delays only others of its kind. In each, tenants take turns.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3

from penstock.infra.bounded import FairQueue, QueueLimits
from penstock.infra.constraints.constraint_process import PREFIX, QUICK_S, TrialAnswer, TrialJob, framed
from penstock.schemas.requests import Constraint

CPU_S = 5.0  # of a compilation
WAIT_S = 30.0  # in the queue
STUCK_S = 60.0  # without an answer: the process gets no processor
LIMITS = QueueLimits()
MOST_BYTES = 64 << 20  # of a compiled grammar
_THREAD_STACK_BYTES = 16 << 20  # of ``then``: what passes in the process does not overflow there
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG", "HOME")

TOO_LONG = "it takes more than {:.0f} s of CPU time to compile; make it simpler"
CRASHED = "it is nested too deeply or too large for the grammar compiler; make it simpler"


class Trial(NamedTuple):
    """
    Attributes:
        reason: why the constraint cannot be compiled; "": it can.
        lasting: it is the constraint's own fault or merit, and not a limit of time, memory or stack.
        size_bytes: of the compiled grammar.
        made: what ``then`` returned.
    """

    reason: str = ""
    lasting: bool = True
    size_bytes: int = 0
    made: object = None


Then = Callable[[Trial], object]


class TrialsBusy(Exception):
    """The constraint was not tried: too many wait. ``retry_after``: seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(eq=False)
class _Entry:
    """A constraint that was asked for, by ``waiters`` callers of one tenant."""

    tenant: str
    constraint: Constraint
    then: Then | None
    future: "asyncio.Future[Trial]"
    waiters: int = 0


@dataclass(eq=False)
class _Lane:
    cpu_s: float
    queue: FairQueue[_Entry]
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    process: "_Process" = field(default_factory=lambda: _Process())
    thread: ThreadPoolExecutor | None = None
    task: "asyncio.Task[None] | None" = None


class ConstraintTrials:
    """Owns the processes, which begin with the first constraint; ``close`` it. Used from one event loop.

    Args:
        cpu_s, quick_s: limits of CPU time, see the module.
        wait_s: of a constraint in the queue.
    """

    def __init__(
        self,
        *,
        cpu_s: float = CPU_S,
        quick_s: float = QUICK_S,
        wait_s: float = WAIT_S,
        limits: QueueLimits = LIMITS,
    ) -> None:
        self._cpu_s = cpu_s
        self._wait_s = wait_s
        self._open: dict[tuple[str, bytes], _Entry] = {}
        self.quick, self._slow = (_Lane(each, FairQueue(limits)) for each in (min(quick_s, cpu_s), cpu_s))
        self._closed = False

    @property
    def waiting(self) -> int:
        return len(self.quick.queue) + len(self._slow.queue)

    async def of(self, constraint: Constraint, tenant: str, then: Then | None = None) -> Trial:
        """Try a constraint; equal ones of a tenant are tried once.

        Args:
            then: called in a thread of the lane if the constraint can be compiled, before the next has its turn.
                Callers with equal constraints pass equal work.
        Raises:
            TrialsBusy: the queue is full, or the turn did not come in time.
            Exception: what ``then`` raises.
        """
        key = tenant, digest_of(constraint)
        entry = self._open.get(key)
        if entry is None:
            entry = self._submit(key, constraint, then)
        entry.waiters += 1
        try:
            async with asyncio.timeout(self._wait_s + STUCK_S):
                return await asyncio.shield(entry.future)
        except TimeoutError:
            raise TrialsBusy("constraints take too long to be compiled here at present", 5.0) from None
        finally:
            entry.waiters -= 1
            if not entry.waiters and not entry.future.done():
                self._drop(key, entry)

    async def close(self) -> None:
        self._closed = True
        for lane in (self.quick, self._slow):
            if lane.task is not None:
                lane.task.cancel()
                await asyncio.wait([lane.task])
            await lane.process.stop()
            if lane.thread is not None:
                lane.thread.shutdown(wait=False, cancel_futures=True)
        for key, entry in list(self._open.items()):
            self._fail(key, entry, "this process is stopping", 1.0)

    def _submit(self, key: tuple[str, bytes], constraint: Constraint, then: Then | None) -> _Entry:
        if self._closed:
            raise TrialsBusy("this process is stopping", 1.0)
        entry = _Entry(key[0], constraint, then, asyncio.get_running_loop().create_future())
        if not self._enqueue(self.quick, key, entry):
            raise TrialsBusy("too many constraints wait to be compiled", 1.0)
        self._open[key] = entry
        asyncio.get_running_loop().call_later(self._wait_s, self._give_up, key, entry)
        return entry

    def _enqueue(self, lane: _Lane, key: tuple[str, bytes], entry: _Entry) -> bool:
        if not lane.queue.add(entry.tenant, key, entry, len(entry.constraint.text)):
            return False
        lane.wake.set()
        if lane.task is None or lane.task.done():
            lane.task = asyncio.create_task(self._run(lane), name="constraint-trials")
        return True

    def _give_up(self, key: tuple[str, bytes], entry: _Entry) -> None:
        """The wait timed out; the trial itself continues."""
        if self._open.get(key) is entry and self._drop(key, entry) and not entry.future.done():
            message = f"other constraints were compiled for {self._wait_s:.0f} s, and this one's turn did not come"
            entry.future.set_exception(TrialsBusy(message, 5.0))
            entry.future.exception()  # retrieved, so that asyncio does not warn

    def _drop(self, key: tuple[str, bytes], entry: _Entry) -> bool:
        """Take an entry out of the queues; False: it is in none."""
        before = self.waiting
        for lane in (self.quick, self._slow):
            lane.queue.drop(entry.tenant, key)
        dropped = self.waiting < before
        if dropped and self._open.get(key) is entry:
            del self._open[key]
        return dropped

    async def _run(self, lane: _Lane) -> None:
        while True:
            entry = lane.queue.take()
            if entry is None:
                lane.wake.clear()
                await lane.wake.wait()
                continue
            key = entry.tenant, digest_of(entry.constraint)
            try:
                await self._try(lane, key, entry)
            except Exception as error:  # a lane never ends: others wait in it
                await lane.process.stop()
                self._fail(key, entry, f"the process that compiles constraints failed: {str(error)[:200]}", 5.0)
            except asyncio.CancelledError:
                self._fail(key, entry, "this process is stopping", 1.0)
                raise

    async def _try(self, lane: _Lane, key: tuple[str, bytes], entry: _Entry) -> None:
        job = TrialJob(entry.constraint.kind, entry.constraint.text, lane.cpu_s)
        answer = await lane.process.ask(job)
        if answer.ended == "cpu" and lane is self.quick and lane.cpu_s < self._cpu_s:
            if not self._enqueue(self._slow, key, entry):
                self._fail(key, entry, "too many constraints that take long wait to be compiled", 5.0)
            return
        trial = _verdict(answer, lane.cpu_s)
        if not trial.reason and entry.then is not None and entry.waiters:
            if lane.thread is None:
                lane.thread = _thread()
            try:
                made = await asyncio.get_running_loop().run_in_executor(lane.thread, entry.then, trial)
            except Exception as error:  # the callers', whatever it is
                self._end(key, entry, error)
                return
            trial = trial._replace(made=made)
        self._end(key, entry, trial)

    def _fail(self, key: tuple[str, bytes], entry: _Entry, message: str, retry_after: float) -> None:
        self._end(key, entry, TrialsBusy(message, retry_after))

    def _end(self, key: tuple[str, bytes], entry: _Entry, result: Trial | Exception) -> None:
        if self._open.get(key) is entry:
            del self._open[key]
        if entry.future.done():
            return
        if isinstance(result, Trial):
            entry.future.set_result(result)
        else:
            entry.future.set_exception(result)
            entry.future.exception()


def _thread() -> ThreadPoolExecutor:
    before = threading.stack_size(_THREAD_STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(1, "compile")
        pool.submit(int)  # so that the thread begins now
    finally:
        threading.stack_size(before)
    return pool


def digest_of(constraint: Constraint) -> bytes:
    return blake3(f"{constraint.kind}\0{constraint.text}".encode()).digest()


def _verdict(answer: TrialAnswer, cpu_s: float) -> Trial:
    if answer.ended:
        return Trial(TOO_LONG.format(cpu_s) if answer.ended == "cpu" else CRASHED, lasting=False)
    if not answer.reason and answer.size_bytes > MOST_BYTES:
        mib = answer.size_bytes / (1 << 20)
        return Trial(f"it takes {mib:.0f} MiB of memory; the limit is {MOST_BYTES >> 20} MiB. Make it simpler")
    return Trial(answer.reason, size_bytes=answer.size_bytes)


class _Process:
    """The process of a lane, started when it is first asked and after it was stopped."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, job: TrialJob) -> TrialAnswer:
        """
        Raises:
            OSError, EOFError, TimeoutError: the process cannot start, or has failed.
        """
        async with asyncio.timeout(STUCK_S):
            if self._process is None or self._process.returncode is not None:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "penstock.infra.constraints.constraint_process"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,  # of crashes, with parts of clients' texts
                    env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                    start_new_session=True,
                )
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(framed(msgspec.msgpack.encode(job)))
            await self._process.stdin.drain()
            size = int.from_bytes(await self._process.stdout.readexactly(PREFIX), "big")
            return msgspec.msgpack.decode(await self._process.stdout.readexactly(size), type=TrialAnswer)

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the fork that compiles
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        transport: Any = getattr(process, "_transport", None)
        if transport is not None:
            transport.close()
