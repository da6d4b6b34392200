"""The synchronous half of an adapter: tracks sequences and turns the engine's events into step results.

Two threads are involved. The engine thread (the caller of all methods) owns the bookkeeping. The loop thread submits
requests to the engine and follows its outputs. They are connected by one queue of events: ``step`` waits briefly for
the first event and returns everything that has arrived.

An error of one request becomes its ``Failure``. Any other error is kept and raised by the next call as an EngineError:
the worker then requeues its requests and exits.
"""

import asyncio
import contextlib
import queue
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import structlog

from schemas.errors import Code
from schemas.kv import KvEvent
from schemas.transfer import Memory
from workers.engines.base import (
    EngineError,
    EngineInfo,
    Failure,
    Held,
    KvTransfer,
    Measured,
    Output,
    RequestError,
    Scored,
    SequenceRequest,
    Started,
    StepResult,
    VisionEngine,
)
from workers.engines.external.outputs import SequenceFailure, Token
from workers.engines.external.prompt_logprobs import scores
from workers.engines.loop import LoopThread

log = structlog.get_logger("engine")

WAIT_S = 0.005  # longest ``step``: the worker's commands wait for it
CLOSE_S = 5.0
SILENT_S = 60.0  # log a warning when sequences run and nothing arrives for this long


class ActiveSequence:
    """One sequence.

    ``started`` belongs to the engine thread, the rest to the loop thread; ``cancelled`` is set once, by either.
    """

    __slots__ = (
        "cancelled",
        "hold",
        "key",
        "prompt",
        "prompt_len",
        "responded",
        "score",
        "scored_top",
        "started",
        "task",
        "trace",
    )

    def __init__(self, request: SequenceRequest) -> None:
        self.key = request.key
        self.prompt = request.prompt
        self.prompt_len = len(request.prompt)
        self.score = request.score if request.score < len(request.prompt) else 0  # 0: nothing (more) to score
        self.scored_top = request.sampling.prompt_logprobs or 0
        self.hold = request.hold
        self.trace = request.trace
        self.started = False  # its ``Started`` has been returned
        self.responded = False  # the engine has produced a first output
        self.cancelled = False  # its outputs are discarded
        self.task: asyncio.Task[None] | None = None

    def scored(self, entries: Seq[Any] | None) -> Scored | None:
        """The prompt's log-probabilities, once: ``entries`` has one for each token but the first."""
        if not self.score or not entries:
            return None
        first, self.score = self.score, 0
        found = scores(entries, self.prompt, first, self.scored_top)
        if not found:
            log.warning("prompt_logprobs_incomplete", entries=len(entries), tokens=self.prompt_len)
            return None
        return Scored(self.key, first, found)


class SequenceUpdate(NamedTuple):
    """New outputs of one sequence. ``cached``: set on the first; ``opaque``: state for the next worker's engine.

    ``measured``: set on the last, if the request is traced.
    """

    sequence: ActiveSequence
    cached: int | None = None
    tokens: Seq[Token] = ()
    failure: SequenceFailure | None = None
    opaque: bytes | None = None
    scored: Scored | None = None
    measured: Mapping[str, float] | None = None


class EngineFailed(NamedTuple):
    """The engine, or a task that reads from it, has failed."""

    error: BaseException


A = TypeVar("A", covariant=True)
L = TypeVar("L", bound=ActiveSequence)
L_contra = TypeVar("L_contra", bound=ActiveSequence, contravariant=True)


class Follower(Protocol[L_contra]):
    """Submits sequences to the engine and follows their outputs, in the loop thread."""

    def launch(self, sequence: L_contra, /) -> None:
        """Submit a sequence."""

    def abort(self, sequence: L_contra, /) -> None:
        """Abort a sequence."""


@dataclass(frozen=True)
class EngineRuntime(Generic[A]):
    """A started engine and what it needs to run.

    Attributes:
        llm: the engine.
        api: the parts of its package that the adapter uses.
        loop: where its outputs are followed.
        resources: closed with the engine, ``loop`` last.
        inbox: queue of ``SequenceUpdate``, ``EngineFailed`` and events that ``_on_event`` handles.
    """

    llm: Any
    api: A
    loop: LoopThread
    resources: contextlib.ExitStack
    inbox: "queue.SimpleQueue[Any]" = field(default_factory=queue.SimpleQueue)


class ExternalEngine(Generic[L]):
    """Base of the adapters, which add ``stats``, ``dump`` and the two abstract methods.

    KV moves through the engine's own connector: the handoff state is ``opaque``.

    Args:
        title: name of the package, for error messages.
        runtime: closed with the adapter.
    """

    _follower: Follower[L]

    def __init__(self, title: str, info: EngineInfo, runtime: EngineRuntime[Any]) -> None:
        self.info = info
        self.kv_transfer: KvTransfer | None = None  # the engine moves its KV itself
        self.vision: VisionEngine | None = None
        self._title = title
        self._loop = runtime.loop
        self._resources = runtime.resources
        self._inbox = runtime.inbox
        self._active: dict[object, L] = {}
        self._running = 0  # how many of them have started
        self._held: dict[object, int] = {}  # key -> blocks of its prompt
        self._broken: BaseException | None = None
        self._hit = self._prompt = 0
        self._closed = False
        self._last_update = self._ended_at = float("-inf")

    def _enqueue(self, event: Any) -> None:
        """Queue an event; called in the loop thread."""
        if isinstance(event, EngineFailed):
            self._broken = self._broken or event.error
        self._inbox.put(event)

    def _accept(self, request: SequenceRequest) -> L:
        """Check and prepare a sequence.

        Raises:
            RequestError: it can never run here.
        """
        raise NotImplementedError

    def _on_event(self, event: Any, events: list[KvEvent], others: dict[int, list[KvEvent]]) -> None:
        """Handle an event that belongs to no sequence.

        Args:
            events, others: receive the KV events of rank 0 and of the other ranks.
        """
        raise NotImplementedError

    # --- requests ---

    def submit(self, request: SequenceRequest) -> None:
        """Queue one sequence.

        Raises:
            RequestError: it can never run here.
            EngineError: the engine is broken.
        """
        self._raise_broken()
        if request.key in self._active:
            raise RequestError(Code.invalid_request, f"sequence {request.key!r} was submitted already")
        sequence = self._accept(request)
        if not self._active:
            self._last_update = time.monotonic()
        self._active[request.key] = sequence
        self._loop.post(self._follower.launch, sequence)

    def cancel(self, key: object) -> bool:
        """Stop tracking a sequence at once and abort it in the engine; its late outputs are discarded."""
        sequence = self._active.get(key)
        if sequence is None:
            return False
        self._forget(sequence)
        sequence.cancelled = True
        self._loop.post(self._follower.abort, sequence)
        return True

    def _forget(self, sequence: ActiveSequence) -> None:
        del self._active[sequence.key]
        self._running -= sequence.started
        if not self._active:
            self._ended_at = time.monotonic()

    def has_work(self) -> bool:
        return bool(self._active) or not self._inbox.empty()

    @property
    def blocked(self) -> bool:
        return False

    # --- results ---

    def step(self) -> StepResult:
        """Return the results that have arrived; waits up to ``WAIT_S`` for the first event.

        Raises:
            EngineError: the engine is broken.
        """
        held: list[Held] = []
        scored: list[Scored] = []
        measured: list[Measured] = []
        others: dict[int, list[KvEvent]] = {}
        result = StepResult([], [], [], [], 0, held, scored, others, measured)
        computed = 0
        event = self._next(WAIT_S)
        while event is not None and not isinstance(event, EngineFailed):
            if isinstance(event, SequenceUpdate):
                computed += self._apply(event, result, held, scored, measured)
            else:
                self._on_event(event, result.events, others)
            event = self._next(0)
        self._raise_broken()
        return result._replace(computed_tokens=computed)

    def _next(self, wait: float) -> Any:
        try:
            return self._inbox.get(timeout=wait) if wait else self._inbox.get_nowait()
        except queue.Empty:
            if wait:
                self._check_silence()
            return None

    def _apply(
        self,
        update: SequenceUpdate,
        result: StepResult,
        held: list[Held],
        scores: list[Scored],
        measured: list[Measured],
    ) -> int:
        """Add an update to the results, unless its sequence was cancelled; returns the number of computed tokens."""
        sequence, cached, tokens, failure, opaque, scored, values = update
        if self._active.get(sequence.key) is not sequence:
            return 0
        self._last_update = time.monotonic()
        computed = len(tokens)
        if cached is not None:
            sequence.started = True
            self._running += 1
            self._hit += cached
            self._prompt += sequence.prompt_len
            computed += sequence.prompt_len - cached
            result.started.append(Started(sequence.key, cached))
        if scored is not None:
            scores.append(scored)
        if values:
            measured.append(Measured(sequence.key, values))
        result.outputs.extend(Output(sequence.key, *token) for token in tokens)
        if opaque is not None:
            self._held[sequence.key] = -(-sequence.prompt_len // self.info.block_size)
            held.append(Held(sequence.key, [], [], opaque))
        if failure is not None:
            result.failures.append(Failure(sequence.key, failure.code, failure.message))
        if failure is not None or (tokens and tokens[-1].finish):
            self._forget(sequence)
        return computed

    def _check_silence(self) -> None:
        now = time.monotonic()
        if self._active and now - self._last_update > SILENT_S:
            self._last_update = now
            log.warning("engine_silent", seconds=SILENT_S, sequences=len(self._active), running=self._running)

    def _raise_broken(self) -> None:
        if self._broken is not None:
            raise EngineError(f"{self._title} failed: {self._broken!r}") from self._broken

    # --- handoff ---

    def memory(self) -> dict[str, Memory]:
        return {}

    def release_held(self, key: object) -> bool:
        """Stop counting a held prompt. The engine frees its KV once it was fetched or the engine's own lease expired: a
        transfer that may be in progress cannot be stopped safely."""
        return self._held.pop(key, None) is not None

    def close(self) -> None:
        """End all threads and the engine; may be called twice. Bounded, except for the engine's own shutdown."""
        if self._closed:
            return
        self._closed = True
        for key in list(self._active):
            self.cancel(key)
        if not self._loop.cancel_all(CLOSE_S):
            log.warning("engine_tasks_hang")
        self._resources.close()


def shut_down(llm: Any) -> None:
    """Shut an engine down; errors are logged only."""
    try:
        llm.shutdown()
    except Exception as error:
        log.error("engine_shutdown_failed", error=repr(error))
