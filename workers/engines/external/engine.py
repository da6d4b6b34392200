"""The engine thread's half of an adapter: sequences, counts, and facts told step by step.

Two threads. The engine's (the caller of all methods) owns what is told. The loop's asks the engine and follows its
answers. Between them is one queue of facts; ``step`` waits for the first of them, briefly, and returns all there are.

What goes wrong with one request is a ``Failure`` of it. Whatever else goes wrong is kept and raised at the next call,
as an EngineError: the worker gives its requests back and ends.
"""

import asyncio
import contextlib
import queue
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
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
    Measured,
    Output,
    RequestError,
    Reservation,
    Scored,
    SequenceRequest,
    Started,
    StepResult,
)
from workers.engines.external.answer import Ending, Token
from workers.engines.loop import LoopThread
from workers.engines.scores import scores

log = structlog.get_logger("engine")

WAIT_S = 0.005  # longest ``step``: commands of the worker wait behind it
CLOSE_S = 5.0
SILENT_S = 60.0  # sequences run and nothing comes: said in the log


class Live:
    """One sequence. ``started`` is the engine thread's, the rest the loop's; ``cancelled`` is set once, by either."""

    __slots__ = (
        "cancelled",
        "heard",
        "hold",
        "key",
        "prompt",
        "prompt_len",
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
        self.started = False  # the worker was told that it was admitted
        self.heard = False  # the engine has said something of it
        self.cancelled = False  # nobody listens any more
        self.task: asyncio.Task[None] | None = None

    def scored(self, entries: Seq[Any] | None) -> Scored | None:
        """The prompt's log-probabilities, once they are there: an entry for each token but the first."""
        if not self.score or not entries:
            return None
        first, self.score = self.score, 0
        found = scores(entries, self.prompt, first, self.scored_top)
        if not found:
            log.warning("prompt_logprobs_incomplete", entries=len(entries), tokens=self.prompt_len)
            return None
        return Scored(self.key, first, found)


class Heard(NamedTuple):
    """News of one sequence. ``cached``: with the first; ``opaque``: what the next worker's engine needs.

    ``measured``: of a traced one, with its end.
    """

    live: Live
    cached: int | None = None
    tokens: Seq[Token] = ()
    ending: Ending | None = None
    opaque: bytes | None = None
    scored: Scored | None = None
    measured: Mapping[str, float] | None = None


class Broken(NamedTuple):
    """The engine, or what follows it, has failed."""

    error: BaseException


L = TypeVar("L", bound=Live)
L_contra = TypeVar("L_contra", bound=Live, contravariant=True)


class Follower(Protocol[L_contra]):
    """Asks for sequences and follows them, in the loop's thread."""

    def launch(self, live: L_contra, /) -> None:
        """Ask for a sequence."""

    def abort(self, live: L_contra, /) -> None:
        """Have it end."""


class ForeignEngine(Generic[L]):
    """What ``workers.engines.base.Engine`` asks for, but ``stats``, ``dump`` and ``memory``.

    Args:
        title: of the package, for errors.
        facts: ``Heard``, ``Broken``, and what the adapter takes by ``_take``.
        resources: what ends with it; ``loop`` last.

    KV moves by the engine's own connector: hand-overs are ``opaque``.
    """

    _follower: Follower[L]

    def __init__(
        self,
        title: str,
        info: EngineInfo,
        loop: LoopThread,
        resources: contextlib.ExitStack,
        facts: "queue.SimpleQueue[Any] | None" = None,
    ) -> None:
        self.info = info
        self._title = title
        self._loop = loop
        self._resources = resources
        self._facts: queue.SimpleQueue[Any] = queue.SimpleQueue() if facts is None else facts
        self._live: dict[object, L] = {}
        self._running = 0  # of them: those that have started
        self._held: dict[object, int] = {}  # key -> blocks of its prompt
        self._broken: BaseException | None = None
        self._hit = self._prompt = 0
        self._closed = False
        self._heard_at = self._ended_at = float("-inf")

    def _arrived(self, fact: Any) -> None:
        """In the loop's thread."""
        if isinstance(fact, Broken):
            self._broken = self._broken or fact.error
        self._facts.put(fact)

    def _accept(self, request: SequenceRequest) -> L:
        """Check and prepare a sequence.

        Raises:
            RequestError: it can never run here.
        """
        raise NotImplementedError

    def _take(self, fact: Any, events: list[KvEvent], others: dict[int, list[KvEvent]]) -> None:
        """A fact that is not of one sequence.

        Args:
            events, others: where KV events of rank 0 and of the others go.
        """
        raise NotImplementedError

    # --- in ---

    def submit(self, request: SequenceRequest) -> None:
        """Queue one sequence.

        Raises:
            RequestError: it can never run here.
            EngineError: the engine, or what follows it, is broken.
        """
        self._raise_broken()
        if request.key in self._live:
            raise RequestError(Code.invalid_request, f"sequence {request.key!r} was submitted already")
        live = self._accept(request)
        if not self._live:
            self._heard_at = time.monotonic()
        self._live[request.key] = live
        self._loop.post(self._follower.launch, live)

    def cancel(self, key: object) -> bool:
        """Forget a sequence at once; the engine is told, and what it still says of it goes nowhere."""
        live = self._live.get(key)
        if live is None:
            return False
        self._forget(live)
        live.cancelled = True
        self._loop.post(self._follower.abort, live)
        return True

    def _forget(self, live: Live) -> None:
        del self._live[live.key]
        self._running -= live.started
        if not self._live:
            self._ended_at = time.monotonic()

    def has_work(self) -> bool:
        return bool(self._live) or not self._facts.empty()

    @property
    def blocked(self) -> bool:
        return False

    # --- out ---

    def step(self) -> StepResult:
        """What has arrived; waits ``WAIT_S`` if nothing has.

        Raises:
            EngineError: the engine is broken.
        """
        held: list[Held] = []
        scored: list[Scored] = []
        measured: list[Measured] = []
        others: dict[int, list[KvEvent]] = {}
        result = StepResult([], [], [], [], 0, held, scored, others, measured)
        computed = 0
        fact = self._next(WAIT_S)
        while fact is not None and not isinstance(fact, Broken):
            if isinstance(fact, Heard):
                computed += self._told(fact, result, held, scored, measured)
            else:
                self._take(fact, result.events, others)
            fact = self._next(0)
        self._raise_broken()
        return result._replace(computed_tokens=computed)

    def _next(self, wait: float) -> Any:
        try:
            return self._facts.get(timeout=wait) if wait else self._facts.get_nowait()
        except queue.Empty:
            if wait:
                self._silence()
            return None

    def _told(
        self,
        heard: Heard,
        result: StepResult,
        held: list[Held],
        told: list[Scored],
        measured: list[Measured],
    ) -> int:
        """Add the news of one sequence, unless nobody listens; the tokens that were computed for it."""
        live, cached, tokens, ending, opaque, scored, values = heard
        if self._live.get(live.key) is not live:
            return 0
        self._heard_at = time.monotonic()
        computed = len(tokens)
        if cached is not None:
            live.started = True
            self._running += 1
            self._hit += cached
            self._prompt += live.prompt_len
            computed += live.prompt_len - cached
            result.started.append(Started(live.key, cached))
        if scored is not None:
            told.append(scored)
        if values:
            measured.append(Measured(live.key, values))
        result.outputs.extend(Output(live.key, *token) for token in tokens)
        if opaque is not None:
            self._held[live.key] = -(-live.prompt_len // self.info.block_size)
            held.append(Held(live.key, [], [], opaque))
        if ending is not None:
            result.failures.append(Failure(live.key, ending.code, ending.message))
        if ending is not None or (tokens and tokens[-1].finish):
            self._forget(live)
        return computed

    def _silence(self) -> None:
        now = time.monotonic()
        if self._live and now - self._heard_at > SILENT_S:
            self._heard_at = now
            log.warning("engine_silent", seconds=SILENT_S, sequences=len(self._live), running=self._running)

    def _raise_broken(self) -> None:
        if self._broken is not None:
            raise EngineError(f"{self._title} failed: {self._broken!r}") from self._broken

    # --- hand-over ---

    def memory(self) -> dict[str, Memory]:
        return {}

    def drop(self, key: object) -> bool:
        """Forget a ``Held``. Its KV goes when it was fetched, or when the engine's own lease of it has run out: what
        may be under way cannot be called back safely."""
        return self._held.pop(key, None) is not None

    def reserve(self, digests: Seq[bytes], tails: int, users: int) -> Reservation | None:
        return None

    def adopt(self, reservation: Reservation) -> None:
        """There is nothing to adopt: ``reserve`` gives nothing."""

    def let_go(self, reservation: Reservation) -> None:
        """There is nothing to let go of: ``reserve`` gives nothing."""

    def close(self) -> None:
        """End all threads and the engine; may be called twice. Bounded, except for the engine's own shutdown."""
        if self._closed:
            return
        self._closed = True
        for key in list(self._live):
            self.cancel(key)
        if not self._loop.cancel_all(CLOSE_S):
            log.warning("engine_tasks_hang")
        self._resources.close()


def shut_down(llm: Any) -> None:
    """End an engine; its own errors are only told."""
    try:
        llm.shutdown()
    except Exception as error:
        log.error("engine_shutdown_failed", error=repr(error))
