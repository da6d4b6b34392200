"""TensorRT-LLM behind our engine protocol.

Two threads. The engine's (the caller of all methods) owns what is told: sequences, names of KV blocks, statistics. The
loop's (``Follower``) asks TensorRT-LLM and follows its answers. Between them is one queue of facts; ``step`` waits for
the first of them, briefly, and returns all there are.

What goes wrong with one request is a ``Failure`` of it. Whatever else goes wrong, also while KV events or statistics
are read, is kept and raised at the next call, as an EngineError: the worker gives its requests back and ends.
"""

import contextlib
import queue
import time
from collections.abc import Sequence as Seq
from typing import Any

import structlog
from prometheus_client.registry import Collector

from schemas.errors import Code
from schemas.kv import KvEvent
from schemas.transfer import Memory
from workers.engines.base import (
    EngineError,
    EngineInfo,
    EngineStats,
    Failure,
    Held,
    Measured,
    MediaReservation,
    Output,
    RequestError,
    Reservation,
    SequenceRequest,
    Started,
    StepResult,
)
from workers.engines.core.engine import Sighted
from workers.engines.loop import LoopThread
from workers.engines.trtllm import stats
from workers.engines.trtllm.api import Api
from workers.engines.trtllm.follow import Broken, Events, Fact, Follower, Heard, Live
from workers.engines.trtllm.kvevents import Roots, Translator, by_rank
from workers.engines.trtllm.metrics import NativeMetrics
from workers.engines.trtllm.prepare import Options, Used, check, prepare
from workers.engines.trtllm.sight import Album, slots_of

log = structlog.get_logger("engine")

WAIT_S = 0.005  # longest ``step``: commands of the worker wait behind it
CLOSE_S = 5.0
SILENT_S = 60.0  # sequences run and nothing comes: said in the log


class TrtllmEngine(Sighted):
    """Implements ``workers.engines.base.Engine``, and ``VisionEngine`` if it has an album.

    Args:
        resources: what ends with it: first ``llm``, then ``loop``.

    KV moves by TensorRT-LLM's own cache transceiver: hand-overs are ``opaque``; ``memory`` is of embeddings only.
    """

    def __init__(
        self,
        info: EngineInfo,
        llm: Any,
        api: Api,
        loop: LoopThread,
        options: Options,
        metrics: NativeMetrics,
        resources: contextlib.ExitStack,
        album: Album | None = None,
    ) -> None:
        super().__init__(album)
        self._album = album
        self.info = info
        self._options = options
        self._resources = resources
        self._loop = loop
        self._metrics = metrics
        self._facts: queue.SimpleQueue[Fact] = queue.SimpleQueue()
        self._follower = Follower(llm, api, loop, options, metrics, self._arrived)
        self._live: dict[object, Live] = {}
        self._running = 0  # of them: those that have started
        self._held: dict[object, int] = {}  # key -> blocks of its prompt
        self._broken: BaseException | None = None
        self._roots = Roots(info.block_size, options.root)
        self._translators = [Translator(info.block_size, self._roots) for _ in range(info.dp_size)]
        self._blocks = stats.Blocks(info.total_blocks, 0, info.total_blocks)
        self._used = Used()
        self._hit = self._prompt = 0
        self._followed = False
        self._closed = False
        self._heard_at = time.monotonic()

    def _arrived(self, fact: Fact) -> None:
        """In the loop's thread."""
        if isinstance(fact, Broken):
            self._broken = self._broken or fact.error
        self._facts.put(fact)

    # --- in ---

    def submit(self, request: SequenceRequest) -> None:
        """Queue one sequence.

        Raises:
            RequestError: it can never run here, or the state that came with it cannot be used.
            EngineError: the engine, or the reading of its events, is broken.
        """
        self._raise_broken()
        if request.key in self._live:
            raise RequestError(Code.invalid_request, f"sequence {request.key!r} was submitted already")
        check(request, self.info, self._options.prompt_limit)
        if request.media:
            self._check_media(request.media, len(request.prompt), bool(request.opaque))
        prepared = prepare(request, self.info, self._options, self._used)
        if not self._live:
            self._heard_at = time.monotonic()
        top = request.sampling.prompt_logprobs or 0
        live = self._live[request.key] = Live(
            request.key,
            len(request.prompt),
            prepared,
            hold=request.hold,
            score=request.score,
            top=top,
            traced=request.trace is not None,
        )
        self._roots.learn(request.prompt, request.root or self._options.root, (m.digest for m in request.media))
        self._loop.post(self._follower.launch, live)
        if not self._followed:
            self._followed = True
            self._loop.post(self._follow)

    def _follow(self) -> None:
        self._follower.start(events=self.info.kv_events, stats=self._options.publish)

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
        others: dict[int, list[KvEvent]] = {}
        result = StepResult([], [], [], [], 0, [], [], others, [])
        computed = 0
        fact = self._next(WAIT_S)
        while fact is not None:
            if isinstance(fact, Heard):
                computed += self._told(fact, result)
            elif isinstance(fact, Events):
                self._name(fact, result.events, others)
            elif isinstance(fact, Broken):
                break
            else:
                self._blocks = stats.blocks(fact.stat) or self._blocks
                self._metrics.observe(fact.stat)
            fact = self._next(0)
        self._raise_broken()
        return result._replace(computed_tokens=computed)

    def _next(self, wait: float) -> Fact | None:
        try:
            return self._facts.get(timeout=wait) if wait else self._facts.get_nowait()
        except queue.Empty:
            if wait:
                self._silence()
            return None

    def _name(self, fact: Events, first: list[KvEvent], others: dict[int, list[KvEvent]]) -> None:
        """Add the events of each rank, under our names."""
        for rank, told in by_rank(fact.events).items():
            if rank < len(self._translators):
                events = self._translators[rank].feed(told)
                if events:
                    (others.setdefault(rank, []) if rank else first).extend(events)

    def _told(self, heard: Heard, result: StepResult) -> int:
        """Add the news of one sequence, unless nobody listens; the tokens that were computed for it."""
        live, cached, tokens, ending, opaque, scored, measured = heard
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
            result.scored.append(scored)  # type: ignore[attr-defined]  # a list, made in ``step``
        if measured:
            result.measured.append(Measured(live.key, measured))  # type: ignore[attr-defined]  # as below
        result.outputs.extend(Output(live.key, *token) for token in tokens)
        if opaque is not None:
            self._held[live.key] = -(-live.prompt_len // self.info.block_size)
            result.held.append(Held(live.key, [], [], opaque))  # type: ignore[attr-defined]  # a list, made in ``step``
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
            raise EngineError(f"TensorRT-LLM failed: {self._broken!r}") from self._broken

    def stats(self) -> EngineStats:
        total, used, free = self._blocks
        if not self._live and not self._held:  # the engine counts while it computes: its last word may be too early
            used, free = 0, total
        cached = min(free, sum(translator.names for translator in self._translators))
        return EngineStats(
            running=self._running,
            waiting=len(self._live) - self._running,
            used_blocks=used,
            cached_blocks=cached,
            free_blocks=max(0, total - used - cached),
            pinned_blocks=sum(self._held.values()),
            hit_tokens=self._hit,
            prompt_tokens=self._prompt,
        )

    def dump(self, rank: int = 0) -> list[KvEvent]:
        return self._translators[rank].dump()

    def collectors(self) -> Seq[Collector]:
        """The engine's own metrics, for the worker's registry."""
        return [self._metrics]

    # --- hand-over ---

    def memory(self) -> dict[str, Memory]:
        return self._embeds()

    def media_adopt(self, reservation: MediaReservation) -> None:
        if self._album is not None:
            self._album.brought(slots_of(reservation))
        super().media_adopt(reservation)

    def drop(self, key: object) -> bool:
        """Forget a ``Held``. Its KV goes when it was fetched, or after the transceiver's timeout (``args.defaults``):
        what may be under way cannot be called back safely."""
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
    """End a TensorRT-LLM engine; its own errors are only told."""
    try:
        llm.shutdown()
    except Exception as error:
        log.error("engine_shutdown_failed", error=repr(error))
