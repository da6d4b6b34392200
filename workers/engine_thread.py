"""The engine's thread: submits sequences, steps the engine, and batches its output into few flushes.

No NATS here. All per-token work happens in this thread; the event loop sees one ``Flush`` for one or more steps. While
the loop has not consumed the last flush, up to ``MAX_AHEAD`` steps are batched; then the engine waits, so that neither
memory nor latency grows when the broker is slow.
"""

import concurrent.futures
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import structlog

from schemas import kv
from schemas.errors import Code
from schemas.tokens import Finish
from workers.block_waits import BlockWait, BlockWaitQueue
from workers.engines.base import Engine, EngineError, Held, RequestError, Scored, SequenceRequest
from workers.sequence_state import CacheSnapshot, Flush, RankEvents, SequenceState, prompt_items, token_item

log = structlog.get_logger("engine")

T = TypeVar("T")

MAX_AHEAD = 64
BLOCKED_S = 0.005  # an engine that waits for blocks held for other workers checks again after this
MIN_FLUSH_S = 0.002  # only mock engines step faster; each message costs the gateway a wake-up per request


class EngineThread:
    """Owns an engine from its construction to its end.

    Args:
        build: makes the engine, in the thread.
        deliver: called in the thread with each Flush; whoever consumes it calls ``flush_consumed``.
        failed: called in the thread, once, when the engine is broken.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        deliver: Callable[[Flush], None],
        failed: Callable[[BaseException], None],
        wall_ns: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._build = build
        self._deliver = deliver
        self._failed = failed
        self._wall_ns = wall_ns
        self._clock = clock
        self._flush_due = 0.0
        self._commands: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self.steps = 0  # that did something
        self._engine: Engine | None = None
        self._dirty: list[SequenceState] = []
        self._ended: list[SequenceState] = []
        self._started: list[SequenceState] = []
        self._held: list[Held] = []
        self._scored: list[Scored] = []
        self._events: list[kv.KvEvent] = []  # of rank 0
        self._other_events: dict[int, list[kv.KvEvent]] = {}  # of the other ranks
        self._kv_seqs: dict[int, int] = {}  # of the next batch, by rank
        self._kv_first = 0
        self._in_flight = 0  # flushes delivered and not yet consumed
        self._ahead = 0  # steps since the last flush
        self._wake = threading.Condition()  # a flush was consumed, or a command was put
        self._block_waits = BlockWaitQueue()  # used in the thread only
        self._calls: set[concurrent.futures.Future[Any]] = set()  # not yet answered
        self._ended_error: EngineError | None = None  # the thread has ended
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- called from the event loop ---

    def start(self) -> None:
        self._thread.start()

    def wait_ready(self, timeout: float | None = None) -> Engine:
        """Block until the engine is built; not in the event loop. Raises what ``build`` raised."""
        if not self._ready.wait(timeout):
            raise TimeoutError("the engine is still loading")
        if self._error is not None:
            raise self._error
        assert self._engine is not None
        return self._engine

    def submit(self, requests: list[SequenceRequest], refused: Callable[[RequestError], None]) -> None:
        """Submit all sequences of a request. If the engine refuses one, none runs and the thread calls ``refused``."""

        def run(engine: Engine) -> None:
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

        self._put(run)

    def cancel(self, sequences: list[SequenceState], done: Callable[[], None] | None = None) -> None:
        """Cancel sequences before the next step. ``done`` is called in the thread when their output was flushed."""

        def run(engine: Engine) -> None:
            for sequence in sequences:
                engine.cancel(sequence)
            if done is not None:
                self._flush()
                done()

        self._put(run)

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
        """Run ``question`` between two steps and call ``answer`` with its result, in the thread."""
        self._put(lambda engine: answer(question(engine)))

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
        self._put(run)
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
        self._put(lambda engine: self._block_waits.cancel_wait(wait, engine))

    def dump(self, answer: Callable[[list[CacheSnapshot]], None]) -> None:
        """Call ``answer`` with the cached block names of each rank, all as of one moment."""

        def run(engine: Engine) -> None:
            self._flush()
            ranks = range(engine.info.dp_size)
            answer([CacheSnapshot(engine.dump(rank), self._kv_seqs.get(rank, self._kv_first) - 1) for rank in ranks])

        self._put(run)

    def new_epoch(self) -> None:
        """Restart the numbers of KV batches, for a worker that registers under a new id.

        They start at 1: a reader that has all batches from 0 on assumes the whole cache, which is not empty now.
        """

        def run(engine: Engine) -> None:
            self._events.clear()
            self._other_events.clear()
            self._kv_seqs.clear()
            self._kv_first = 1

        self._put(run)

    def wake(self) -> None:
        """Have the thread check whether the engine has work; from any thread."""
        self._put(lambda engine: None)

    def flush_consumed(self) -> None:
        """A flush was consumed."""
        with self._wake:
            self._in_flight = max(0, self._in_flight - 1)
            self._wake.notify()

    def stop(self) -> None:
        """End the thread after the current step; the engine is closed in it."""
        self._put(None)

    def _put(self, command: Callable[[Engine], None] | None) -> None:
        self._commands.put(command)
        with self._wake:
            self._wake.notify()

    def join(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # --- the thread ---

    def _run(self) -> None:
        try:
            engine = self._engine = self._build()
        except BaseException as error:
            self._error = error
            self._ready.set()
            return
        self._ready.set()
        try:
            self._loop(engine)
        except BaseException as error:
            log.error("engine_failed", error=repr(error), exc_info=True)
            self._failed(error)
        finally:
            self._ended_error = EngineError("the engine has ended")
            self._fail_calls(self._ended_error)
            self._block_waits.fail(self._ended_error)
            engine.close()

    def _fail_calls(self, error: EngineError) -> None:
        """Fail all unanswered calls: the thread has ended."""
        while self._calls:
            with contextlib.suppress(KeyError, concurrent.futures.InvalidStateError):  # both threads may get here
                self._calls.pop().set_exception(error)

    def _loop(self, engine: Engine) -> None:
        commands = self._commands
        while True:
            working = engine.has_work()
            if not commands.empty() or not (working or self._has_output()):
                command = commands.get()
                if command is None:
                    return
                command(engine)
                if self._block_waits:
                    self._block_waits.serve(engine)
            elif working and self._ahead < MAX_AHEAD:
                ended = len(self._ended)
                self._step(engine)
                self._ahead += 1
                if self._block_waits and len(self._ended) > ended:
                    self._block_waits.serve(engine)
                if engine.blocked:
                    self._pause()
                if not self._in_flight and self._clock() >= self._flush_due:
                    self._flush()
            elif self._in_flight:
                self._wait()
            else:
                self._flush()

    def _pause(self) -> None:
        with self._wake:
            if self._commands.empty():
                self._wake.wait(BLOCKED_S)

    def _wait(self) -> None:
        """Until all flushes were consumed or a command came; commands must not wait for a broker that is away."""
        with self._wake:
            while self._in_flight and self._commands.empty():
                self._wake.wait()

    def _step(self, engine: Engine) -> None:
        """Run one step and collect its output; all per-token work is here."""
        sequence: Any
        began = self._wall_ns()
        outputs, events, started, failures, computed, held, scored, others, measured = engine.step()
        if computed or outputs or events or started or failures or held or scored or others or measured:
            self.steps += 1
        if events:
            self._events += events
        if others:
            for rank, events in others.items():
                self._other_events.setdefault(rank, []).extend(events)
        if held:
            self._held += held
        if scored:
            self._scored += scored
        if started:
            for sequence, cached in started:
                sequence.cached = cached if sequence.adopted_cached < 0 else sequence.adopted_cached
                sequence.started_ns = began
                self._started.append(sequence)
        for each in measured:
            sequence = each.key
            sequence.measurements = [*(sequence.measurements or ()), each]
        dirty = self._dirty
        for sequence, token, finish, logprob, stop_token in outputs:
            if sequence.finish is not None:  # an earlier token of this step completed a stop string
                continue
            sequence.buffer.append(token)
            if not sequence.dirty:
                sequence.dirty = True
                dirty.append(sequence)
            if logprob is not None:
                sequence.logprobs.append(logprob)
            if sequence.stream is not None and self._stops(engine, sequence, token, finish):
                continue
            if finish:
                # Else the decode worker continues; the session hands off once it has this token.
                if finish != "length" or len(sequence.tokens) + len(sequence.buffer) >= sequence.max_tokens:
                    sequence.finish = Finish(finish, stop_token, sequence.cached)
                self._ended.append(sequence)
        for sequence, code, message in failures:
            if sequence.finish is not None:  # its last token completed a stop string
                continue
            if code == Code.transfer_failed:  # not the request's fault: another worker can continue
                sequence.lost_input = message
                self._ended.append(sequence)
                continue
            sequence.finish = Finish("error", None, sequence.cached, code, message)
            self._ended.append(sequence)
            if not sequence.dirty:
                sequence.dirty = True
                dirty.append(sequence)

    def _stops(self, engine: Engine, sequence: SequenceState, token: int, finish: str) -> bool:
        """Whether this token completed a stop string; if so the sequence ends here."""
        assert sequence.stream is not None
        sequence.stream.push(token)
        matched = sequence.stream.stop
        if matched is None:
            return False
        if not finish:
            engine.cancel(sequence)
        sequence.finish = Finish("stop", matched, sequence.cached)
        self._ended.append(sequence)
        return True

    def _has_output(self) -> bool:
        from_step = self._dirty or self._ended or self._started or self._held or self._scored
        return bool(from_step or self._events or self._other_events)

    def _flush(self) -> None:
        """Deliver the collected output."""
        if not self._in_flight:
            self._ahead = 0
        if not self._has_output():
            return
        self._flush_due = self._clock() + MIN_FLUSH_S
        flush = Flush()
        if self._scored:  # before the tokens: a reader of a sequence's first token has all of its prompt logprobs
            self._flush_prompt_logprobs(flush)
        for sequence in self._dirty:
            flush.items.setdefault(sequence.gateway, []).append(token_item(sequence))
        flush.ended, self._ended = self._ended, []
        flush.started, self._started = self._started, []
        flush.held, self._held = self._held, []
        self._dirty.clear()
        if self._events:
            flush.batches.append(self._batch(0, self._events))
            self._events = []
        if self._other_events:
            flush.batches += [self._batch(rank, events) for rank, events in self._other_events.items() if events]
            self._other_events = {}
        with self._wake:
            self._in_flight += 1
        self._deliver(flush)

    def _batch(self, rank: int, events: list[kv.KvEvent]) -> RankEvents:
        seq = self._kv_seqs.get(rank, self._kv_first)
        self._kv_seqs[rank] = seq + 1
        return RankEvents(rank, seq, events)

    def _flush_prompt_logprobs(self, flush: Flush) -> None:
        sequence: Any
        for sequence, first, logprobs in self._scored:
            flush.items.setdefault(sequence.gateway, []).extend(prompt_items(sequence, first, logprobs))
            sequence.scored_tokens = first + len(logprobs)
            sequence.prompt_logprobs += logprobs
        self._scored.clear()
