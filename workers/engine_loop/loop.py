"""Drives an engine in its thread: commands, steps, and flushes of the steps' output (``step_output``), in turn.

No NATS here. All per-token work happens in the engine's thread (``EngineThread``), which calls ``advance``: a step may
take long. The worker's session sees one ``Flush`` for one or more steps (``step_output``). While it has not consumed
the last one, up to ``MAX_AHEAD`` steps are batched; then the engine waits, so that neither memory nor latency grows
when the broker is slow.

Waits for blocks or slots of the engine are served first come, first served in each pool: the first is tried again when
something has come free, and the others only after it has succeeded. They have no timeout here: the caller cancels.
"""

import concurrent.futures
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import structlog

from penstock.infra.bus.clock import steady_ns
from penstock.workers.engine_loop.step_output import CacheSnapshot, Flush, SequenceState, StepOutput
from penstock.workers.engines.engine_protocol import Engine, EngineError, RequestError, SequenceRequest

T = TypeVar("T")


log = structlog.get_logger("engine")


class BlockWait(Generic[T]):
    """A wait for blocks or slots of a pool.

    ``answer`` becomes what ``take`` returned, None if it was cancelled, or the RequestError that ``take`` raised.
    """

    __slots__ = ("answer", "pool", "take")

    def __init__(self, pool: str, take: Callable[[Engine], T | None]) -> None:
        self.pool = pool
        self.take = take
        self.answer: Future[T | None] = Future()

    def failed(self, asked: "Future[None]") -> None:
        """The wait could not be queued: the engine has ended."""
        error = asked.exception()
        if error is not None and not self.answer.done():
            self.answer.set_exception(error)


class BlockWaitQueue:
    """The waits of each pool, first come, first served."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[BlockWait[Any]]] = {}

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._queues)

    def add(self, wait: BlockWait[Any], engine: Engine) -> None:
        """Queue a wait; it is answered immediately if it is first and there is enough."""
        self._queues.setdefault(wait.pool, deque()).append(wait)
        self._serve(wait.pool, engine)

    def cancel_wait(self, wait: BlockWait[Any], engine: Engine) -> None:
        """Answer with None, unless it was answered."""
        queue = self._queues.get(wait.pool, ())
        if wait in queue:
            self._queues[wait.pool].remove(wait)
            wait.answer.set_result(None)
            self._serve(wait.pool, engine)  # the next wait may need less

    def serve(self, engine: Engine) -> None:
        """Try the waits again: something may have come free."""
        for pool in list(self._queues):
            self._serve(pool, engine)

    def fail(self, error: BaseException) -> None:
        """Fail all waits, as the engine has ended."""
        for waits in self._queues.values():
            for wait in waits:
                wait.answer.set_exception(error)
        self._queues.clear()

    def _serve(self, pool: str, engine: Engine) -> None:
        queue = self._queues[pool]
        while queue:
            wait = queue[0]
            try:
                reserved = wait.take(engine)
            except RequestError as error:
                queue.popleft()
                wait.answer.set_exception(error)
                continue
            if reserved is None:
                return
            queue.popleft()
            wait.answer.set_result(reserved)
        del self._queues[pool]


MAX_AHEAD = 64
BLOCKED_S = 0.005  # pause between steps of an engine that waits for blocks pinned for other workers
# Between two flushes: each costs the gateway a wake-up per request, and its client one. From 20 sequences on it is the
# latter, which saves 8 % of the CPU at 64 connections (``penstock bench http --concurrency 64``, four alternating pairs
# with a mock engine on two cores). Engines with longer steps flush every step.
MIN_FLUSH_S, MAX_FLUSH_S = 0.002, 0.004
ITEMS_PER_S = 5_000  # token items that a worker publishes, within these bounds
# After a step this short, KV events wait for the next flush, which saves 3 % of the CPU at 64 connections
# (``penstock bench http --concurrency 64``, 40 alternating pairs with a mock engine on two cores).
FAST_STEP_S = 0.0005
# How long such an engine waits, after a flush with first tokens, until they are written. It holds the interpreter, so
# they would wait for its next steps, or for ``sys.setswitchinterval``. One that runs ahead waits after every flush, at
# most for a share of a step's time: to launch one takes milliseconds of Python. A flush is written 0.2 ms after its
# step instead of 1.2 (``python -m tests.perf.tuning writes``).
WRITE_S = 0.002
WRITE_SHARE = 1 / 3
PACE_WINDOW_S = 30.0
# An engine that runs ahead has a step in flight when it returns the previous one. The next step is planned shortly
# before the end of the step in flight, so that it includes sequences which arrive until then. It should be launched
# ``AHEAD_S`` before that end. Planning begins ``LEAD_S`` before the end at first; the lead adapts to how early the last
# launches were, and grows after each one that was so late that the device was idle.
AHEAD_S, LEAD_S, MOST_LEAD_S = 0.0003, 0.002, 0.05
LEAD_SHARE, LATE_S = 0.1, 0.0005
LEAST_WAIT_S = 0.001  # below, it is not worth a wait
# How long the device may be idle for a request that is expected, before it is launched, and how late that may be.
# Otherwise the request would wait for a whole step: never for longer than that takes.
MOST_IDLE_S, EXPECTED_LATE_S = 0.004, 0.0015
MOST_STEP_S = 0.25  # above, the process or the device was stalled


def flush_pause(items: int) -> float:
    """Seconds from a flush with this many token items to the next."""
    return min(max(MIN_FLUSH_S, items / ITEMS_PER_S), MAX_FLUSH_S)


class StepPace:
    """How long steps take, and since when none did anything. Written in the engine thread, read in any.

    A process that is stopped and resumes has a step that took as long, unless it was stopped between two.

    Attributes:
        busy_s: spent in steps, since the start.
        decodes: steps that computed no prompt, a token of each sequence; since the start.
        decode_s: spent in these.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._longest = (0.0, 0.0)  # of this window, and of the one before it
        self._since = clock()  # of this window
        self._progress = clock()
        self._waits = True  # there is nothing to do, or it waits for the consumer
        self.busy_s = self.decode_s = 0.0
        self.decodes = 0

    def waits(self) -> None:
        self._waits = True

    def begins(self, now: float) -> None:
        """A step begins; to be called at least for the first one after ``waits``."""
        if self._waits:
            self._waits, self._progress = False, now

    def stepped(self, began: float, ended: float, *, computed: bool, decoded: bool = False) -> None:
        """A step has ended; both times are by the clock."""
        took = ended - began
        self.busy_s += took
        if computed:
            self._progress = ended
        if decoded:
            self.decodes += 1
            self.decode_s += took
        if ended - self._since > PACE_WINDOW_S:
            recent = ended - self._since < 2 * PACE_WINDOW_S
            self._longest, self._since = (0.0, self._longest[0] if recent else 0.0), ended
        if took > self._longest[0]:
            self._longest = took, self._longest[1]

    @property
    def slowest_s(self) -> float:
        """The longest step of the last one or two windows."""
        return max(self._longest) if self._clock() - self._since < 2 * PACE_WINDOW_S else 0.0

    @property
    def quiet_s(self) -> float:
        """Since the engine did something, while it has something to do."""
        return 0.0 if self._waits else max(0.0, self._clock() - self._progress)


class EngineLoop:
    """Runs an engine's steps between commands, and delivers their output to the current session (``begin_session``).

    Attributes:
        stopped: ``stop`` was called, and the last step has ended.
    """

    def __init__(
        self,
        wall_ns: Callable[[], int] = steady_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stopped = False
        self._deliver: Callable[[Flush], None] | None = None  # to the session; None: there was none yet
        self._wall_ns = wall_ns
        self._clock = clock
        self.flush_due = 0.0  # by the clock; until then the output of short steps is gathered
        self._commands: queue.SimpleQueue[Callable[[Engine], None]] = queue.SimpleQueue()
        self.steps = 0  # that were not empty
        self.pace = StepPace(clock)
        self._lock = threading.Lock()  # held while the fields of output and flushes change
        self._output = StepOutput()
        self._waits_for_consumer = False  # there is something to do once a flush was consumed
        self._in_flight = 1  # flushes delivered and not yet consumed; without a session, none can leave
        self._ahead = 0  # steps since the last flush
        self._returned_at = 0.0  # when the last step returned, by the clock; 0: none was in flight after it
        self._step_s = 0.0  # that the last step without prompts took
        self._lead_s = LEAD_S  # from planning a step to the end of the one in flight
        self._lead_is_all = False  # the step in flight is no longer than that: the next is planned immediately
        self._writes_until = 0.0  # no step before, by the clock, unless the last flush was consumed
        self._waits_from = self._plan_at = 0.0  # the next step is planned then, by the clock
        self._expected: dict[str, float] = {}  # requests that are submitted about then, by the clock
        self._ends_at = 0.0  # the step in flight probably ends then, by the clock; 0: unknown
        self._held = False  # the next step is planned later for a request that is expected
        self._block_waits = BlockWaitQueue()  # used in the engine thread only
        self._calls: set[concurrent.futures.Future[Any]] = set()  # not yet answered
        self._ended_error: EngineError | None = None  # ``end`` was called

    # --- commands, from any thread ---

    def begin_session(self, deliver: Callable[[Flush], None]) -> None:
        """Deliver the output of later steps to another session. What the last one has not consumed is void.

        Args:
            deliver: called in the engine thread with each Flush; its consumer calls ``flush_consumed``.
        """

        def run(engine: Engine) -> None:
            with self._lock:
                if self._deliver is not None:
                    self._output = StepOutput(first_batch=1)
                self._deliver = deliver
                self._in_flight = 0

        self._commands.put(run)

    def submit(
        self, requests: list[SequenceRequest], refused: Callable[[RequestError], None], expected: str = ""
    ) -> None:
        """Submit all sequences of a request. If the engine refuses one, none runs, and ``refused`` is called.

        Args:
            expected: the request, if ``expect`` was called for it.
        """

        def run(engine: Engine) -> None:
            self._expected.pop(expected, None)
            done: list[SequenceRequest] = []
            try:
                for request in requests:
                    engine.submit(request)
                    done.append(request)
            except RequestError as error:
                for request in done:
                    engine.cancel(request.key)
                if requests[0].reservation is not None and engine.kv_transfer is not None:  # the others shared it
                    engine.kv_transfer.release(requests[0].reservation)
                refused(error)

        self._commands.put(run)

    def cancel(self, sequences: list[SequenceState], done: Callable[[], None] | None = None) -> None:
        """Cancel sequences before the next step. ``done`` is called when their output was flushed."""

        def run(engine: Engine) -> None:
            for sequence in sequences:
                engine.cancel(sequence)
            if done is not None:
                self._flush()
                done()

        self._commands.put(run)

    def cancel_unstarted(self, groups: Sequence[list[SequenceState]]) -> "concurrent.futures.Future[list[bool]]":
        """Cancel each group of sequences of which the engine has started none; True: the group was cancelled."""

        def run(engine: Engine) -> list[bool]:
            cancelled = [not any(sequence.started_ns for sequence in sequences) for sequences in groups]
            for sequences, unstarted in zip(groups, cancelled, strict=True):
                for sequence in sequences if unstarted else ():
                    engine.cancel(sequence)
            return cancelled

        return self.call(run)

    def ask(self, question: Callable[[Engine], Any], answer: Callable[[Any], None]) -> None:
        """Run ``question`` between two steps and call ``answer`` with its result, in the engine thread."""
        self._commands.put(lambda engine: answer(question(engine)))

    def call(self, question: Callable[[Engine], T]) -> "concurrent.futures.Future[T]":
        """Run ``question`` between two steps.

        The future fails with the RequestError that ``question`` raised, or with EngineError if the engine ended first.
        Any other exception fails the future and ends the engine.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run(engine: Engine) -> None:
            self._calls.discard(future)
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(question(engine))
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, RequestError):
                    raise

        self._calls.add(future)
        self._commands.put(run)
        if self._ended_error is not None:
            self._fail_calls(self._ended_error)
        return future

    def wait(self, pool: str, take: Callable[[Engine], T | None]) -> BlockWait[T]:
        """Wait for blocks or slots of a pool, in turn. ``take`` is tried now and when some come free."""
        wait = BlockWait(pool, take)
        self.call(lambda engine: self._block_waits.add(wait, engine)).add_done_callback(wait.failed)
        return wait

    def cancel_wait(self, wait: BlockWait[Any]) -> None:
        """Answer with None, unless it was answered."""
        self._commands.put(lambda engine: self._block_waits.cancel_wait(wait, engine))

    def dump(self, answer: Callable[[list[CacheSnapshot]], None]) -> None:
        """Call ``answer`` with the cached block names of each rank, all as of one moment."""

        def run(engine: Engine) -> None:
            self._flush()
            ranks = range(engine.info.dp_size)
            answer([CacheSnapshot(engine.dump(rank), self._output.kv_seq(rank) - 1) for rank in ranks])

        self._commands.put(run)

    def expect(self, request: str, within_s: float) -> None:
        """A request is probably submitted then: a step planned just before may wait for it."""
        at = self._clock() + within_s

        def run(engine: Engine) -> None:
            now = self._clock() - EXPECTED_LATE_S
            self._expected = {each: when for each, when in self._expected.items() if when > now}
            self._expected[request] = at

        self._commands.put(run)

    def wake(self) -> None:
        """Check whether the engine has work."""
        self._commands.put(lambda engine: None)

    def flush_consumed(self) -> None:
        """A flush was consumed. Its consumer calls ``flush_late`` soon after ``flush_due``."""
        with self._lock:
            self._in_flight = max(0, self._in_flight - 1)
        if self._waits_for_consumer:
            self.wake()

    def flush_late(self) -> None:
        """Deliver, during a long step, the output of steps that ended before ``flush_due``."""
        if not self._in_flight and self._clock() >= self.flush_due:
            self._flush()

    def stop(self) -> None:
        """End after the current step."""

        def run(engine: Engine) -> None:
            self.stopped = True

        self._commands.put(run)

    # --- in the engine thread ---

    def advance(self, engine: Engine) -> float | None:
        """Run a command, a step or a flush.

        Returns: for how many seconds a command is to be awaited before the next call; None: until there is one.
        """
        if not self._commands.empty():
            self.run_command(engine)
            return 0.0
        working = engine.has_work()
        self._waits_for_consumer = working or bool(self._output)  # before ``_in_flight`` is read
        if self._writes_until and self._in_flight and (writes_s := self._writes_until - self._clock()) > 0:
            return writes_s
        if working and self._ahead < MAX_AHEAD:
            wait_s = self._until_planning_s()
            return wait_s if wait_s > 0 else self._step(engine)
        self.pace.waits()
        self._plan_late(0.0, None, prompts=False)
        if self._in_flight or not (working or self._output):
            return None
        self._flush()
        return 0.0

    def run_command(self, engine: Engine, timeout: float | None = None) -> None:
        """Wait for a command and run it. One comes when a flush was consumed."""
        try:
            command = self._commands.get(timeout=timeout)
        except queue.Empty:
            return
        command(engine)
        if self._block_waits:
            self._block_waits.serve(engine)

    def end(self) -> None:
        """Fail all that waits: nothing more is done with the engine."""
        self._ended_error = EngineError("the engine has ended")
        self._fail_calls(self._ended_error)
        self._block_waits.fail(self._ended_error)

    def _fail_calls(self, error: EngineError) -> None:
        while self._calls:
            with contextlib.suppress(KeyError, concurrent.futures.InvalidStateError):  # both threads may get here
                self._calls.pop().set_exception(error)

    def _step(self, engine: Engine) -> float:
        """One step; for how many seconds a command is to be awaited after it."""
        pause = 0.0
        began_ns, began = self._wall_ns(), self._clock()
        busy_from = self._waits_from or began  # the device computes while it waits to plan
        self.pace.begins(busy_from)
        result = engine.step()
        with self._lock:
            ended = len(self._output.ended)
            computed = self._output.add(engine, result, began_ns)
            freed = len(self._output.ended) > ended
            self._ahead += 1
        now = self._clock()
        decoded = bool(computed) and not result.started and result.computed_tokens == len(result.outputs)
        self.pace.stepped(busy_from, now, computed=bool(computed), decoded=decoded)
        self._plan_late(now, result.ahead_s, prompts=result.computed_tokens != len(result.outputs))
        if computed:
            self.steps += 1
        elif engine.blocked:
            pause = BLOCKED_S
        if self._block_waits and freed:
            self._block_waits.serve(engine)
        if not self._in_flight and now >= self.flush_due:
            # Another flush follows soon: one message with KV events costs the broker and routers less than two.
            continues = now - began < FAST_STEP_S and engine.has_work()
            flush = self._flush(keep_events=continues)
            if flush is not None and continues and flush.started:
                pause = WRITE_S
            elif flush is not None and result.ahead_s and (now - began) * WRITE_SHARE > LEAST_WAIT_S:
                pause = min(WRITE_S, (now - began) * WRITE_SHARE)  # the device computes meanwhile
                self._waits_from = self._waits_from or now
            self._writes_until = now + pause if pause else 0.0
        return pause

    def _until_planning_s(self) -> float:
        """For how long the next step is not planned yet."""
        now = self._clock()
        if now < self._plan_at:
            return self._plan_at - now
        if self._ends_at and self._expected:
            idle_s = min(MOST_IDLE_S, self._step_s)
            latest = self._ends_at + idle_s + (EXPECTED_LATE_S if self._held else 0.0)
            until = max((at for at in self._expected.values() if at <= latest), default=0.0) + EXPECTED_LATE_S
            if now < until:
                self._held, self._waits_from = True, self._waits_from or now
                return until - now
        return 0.0

    def _plan_late(self, now: float, ahead_s: float | None, *, prompts: bool) -> None:
        """Set when the next step is planned.

        Args:
            ahead_s: of ``StepResult``, for the step that has returned.
            prompts: that step computed prompts, so its duration predicts nothing.
        """
        held, self._held = self._held, False
        waited, self._waits_from, self._plan_at, self._ends_at = self._plan_at and not held, 0.0, 0.0, 0.0
        before, self._returned_at = self._returned_at, now if ahead_s is not None else 0.0
        if ahead_s is None:
            return
        lead_is_all, self._lead_is_all = self._lead_is_all, False
        if waited:
            more_s = max(LEAD_SHARE * (AHEAD_S - ahead_s), -LATE_S / 4) if ahead_s else LATE_S
            self._lead_s = min(max(0.0, self._lead_s + more_s), MOST_LEAD_S)
        elif lead_is_all and not held and ahead_s > AHEAD_S + LEAST_WAIT_S:
            # It was learned when steps or launches took longer; or from steps that vary, which must seldom be late.
            self._lead_s -= LATE_S / 40
        step_s, known = self._step_s, not prompts and before
        if known and ahead_s:  # else unknown is how long a step took that had already ended
            self._step_s = now - before
        least_s = min(step_s or self._step_s, self._step_s, MOST_STEP_S)  # the longer one may have been late
        self._ends_at = now + least_s if least_s else 0.0
        if known and (ahead_s or held):
            wait_s = least_s - self._lead_s
            self._lead_is_all = wait_s <= LEAST_WAIT_S
            if not self._lead_is_all:
                self._waits_from, self._plan_at = now, now + wait_s

    def _flush(self, *, keep_events: bool = False) -> Flush | None:
        """Deliver the collected output; None: there is none."""
        with self._lock:
            if not self._in_flight:
                self._ahead = 0
            if not self._output or self._deliver is None:
                return None
            flush = self._output.take(keep_events=keep_events)
            self.flush_due = self._clock() + flush_pause(sum(map(len, flush.items.values())))
            self._in_flight += 1
            self._deliver(flush)
            return flush


class EngineThread:
    """Owns an engine from its construction to its end.

    Args:
        build: makes the engine, in a separate thread.
        engine_loop: what is done with the engine.
        failed: called in the engine thread, once, when the engine is broken.

    Attributes:
        built: the engine, or what ``build`` raised. It cannot be cancelled.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        engine_loop: EngineLoop,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._build = build
        self._engine_loop = engine_loop
        self._failed = failed
        self.built: concurrent.futures.Future[Engine] = concurrent.futures.Future()
        self.built.set_running_or_notify_cancel()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait_ready(self, timeout: float | None = None) -> Engine:
        """Block until the engine is built; not in the event loop. Raises what ``build`` raised."""
        return self.built.result(timeout)

    def join(self, timeout: float) -> bool:
        """Block until the engine is closed, after ``EngineLoop.stop``; not in the event loop. False: it is not yet."""
        return self._ended.wait(timeout)

    def _run(self) -> None:
        try:
            engine = self._build()
        except BaseException as error:
            self._ended.set()
            self.built.set_exception(error)
            return
        self.built.set_result(engine)
        try:
            while not self._engine_loop.stopped:
                pause = self._engine_loop.advance(engine)
                if pause != 0:
                    self._engine_loop.run_command(engine, pause)
        except BaseException as error:
            log.error("engine_failed", error=repr(error), exc_info=True)
            self._failed(error)
        finally:
            self._engine_loop.end()
            engine.close()
            self._ended.set()
