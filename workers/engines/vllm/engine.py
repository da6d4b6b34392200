"""vLLM behind our engine protocol.

Three threads. The engine's (the caller of all methods) owns what is told: sequences, names of KV blocks, counts. The
loop's asks vLLM and follows its answers. One per rank reads its KV events. Between them is one queue of facts; ``step``
waits for the first of them, briefly, and returns all there are.
"""

import contextlib
import queue
import time
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
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
    Output,
    RequestError,
    Reservation,
    SequenceRequest,
    Started,
    StepResult,
)
from workers.engines.events import wire
from workers.engines.loop import LoopThread
from workers.engines.vllm.api import Api
from workers.engines.vllm.follow import Broken, Events, Fact, Follower, Heard, Live
from workers.engines.vllm.handoff import Used
from workers.engines.vllm.kvevents import Translator
from workers.engines.vllm.metrics import NativeMetrics, Scheduler
from workers.engines.vllm.prepare import Options, check, prepare

log = structlog.get_logger("engine")

WAIT_S = 0.005  # longest ``step``: commands of the worker wait behind it
LINGER_S = 0.1  # KV events of an answer come after it, by another way
CLOSE_S = 5.0
SILENT_S = 60.0  # sequences run and nothing comes: said in the log


class VllmEngine:
    """Implements ``workers.engines.base.Engine``.

    Args:
        resources: what ends with it: the subscribers, then ``llm``, then ``loop``.

    KV moves by vLLM's own NIXL connector: there is no ``memory`` of ours, hand-overs are ``opaque``.
    """

    slot_tokens = 0  # takes no embeddings of ours

    def __init__(
        self,
        info: EngineInfo,
        llm: Any,
        api: Api,
        loop: LoopThread,
        options: Options,
        scheduler: Scheduler,
        facts: "queue.SimpleQueue[Fact]",
        resources: contextlib.ExitStack,
    ) -> None:
        self.info = info
        self._options = options
        self._resources = resources
        self._loop = loop
        self._scheduler = scheduler
        self._facts = facts
        self._follower = Follower(llm, api, loop, options.layout, self._arrived)
        self._live: dict[object, Live] = {}
        self._running = 0  # of them: those that have started
        self._held: dict[object, int] = {}  # key -> blocks of its prompt
        self._broken: BaseException | None = None
        self._translators = [Translator(info.block_size, options.root) for _ in range(info.dp_size)]
        self._used = Used()
        self._hit = self._prompt = 0
        self._closed = False
        self._heard_at = self._ended_at = float("-inf")
        loop.post(lambda: loop.task(self._follower.watch(), "health"))

    def _arrived(self, fact: Fact) -> None:
        """In the loop's thread."""
        if isinstance(fact, Broken):
            self._broken = self._broken or fact.error
        self._facts.put(fact)

    # --- in ---

    def submit(self, request: SequenceRequest) -> None:
        """Queue one sequence.

        Raises:
            RequestError: it can never run here.
            EngineError: the engine is broken.
        """
        self._raise_broken()
        if request.key in self._live:
            raise RequestError(Code.invalid_request, f"sequence {request.key!r} was submitted already")
        check(request, self.info, self._options)
        prepared = prepare(request, self.info, self._options, self._used)
        if not self._live:
            self._heard_at = time.monotonic()

        def again() -> Any:
            return prepare(msgspec.structs.replace(request, opaque=b""), self.info, self._options, self._used)

        live = self._live[request.key] = Live(request, prepared, again)
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
        if self._live or not self._facts.empty():
            return True
        return self.info.kv_events and time.monotonic() - self._ended_at < LINGER_S

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
        others: dict[int, list[KvEvent]] = {}
        result = StepResult([], [], [], [], 0, held, [], others)
        computed = 0
        fact = self._next(WAIT_S)
        while fact is not None:
            if isinstance(fact, Heard):
                computed += self._told(fact, result, held)
            elif isinstance(fact, Events) and (events := self._named(fact)):
                (others.setdefault(fact.rank, []) if fact.rank else result.events).extend(events)
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

    def _told(self, heard: Heard, result: StepResult, held: list[Held]) -> int:
        """Add the news of one sequence, unless nobody listens; the tokens that were computed for it."""
        live, cached, tokens, ending, opaque, scored = heard
        if self._live.get(live.key) is not live:
            return 0
        self._heard_at = time.monotonic()
        computed = len(tokens)
        if cached is not None and tokens:
            live.started = True
            self._running += 1
            self._hit += cached
            self._prompt += live.prompt_len
            computed += live.prompt_len - cached
            result.started.append(Started(live.key, cached))
        if scored is not None:
            result.scored.append(scored)  # type: ignore[attr-defined]  # a list, made in ``step``
        result.outputs.extend(Output(live.key, *token) for token in tokens)
        if opaque is not None:
            self._held[live.key] = -(-live.prompt_len // self.info.block_size)
            held.append(Held(live.key, [], [], opaque))
        if ending is not None:
            result.failures.append(Failure(live.key, ending.code, ending.message))
        if ending is not None or (tokens and tokens[-1].finish):
            self._forget(live)
        return computed

    def _named(self, fact: Events) -> list[KvEvent]:
        translator = self._translators[fact.rank]
        events = translator.forget() if fact.lost else []
        for payload in fact.payloads:
            try:
                events += translator.feed(wire.decode_any(payload))
            except ValueError as error:
                translator.counts.malformed += 1
                log.warning("kv_events_malformed", error=str(error), action="forgetting this rank's blocks")
                events += translator.forget()
        return events

    def _silence(self) -> None:
        now = time.monotonic()
        if self._live and now - self._heard_at > SILENT_S:
            self._heard_at = now
            log.warning("engine_silent", seconds=SILENT_S, sequences=len(self._live), running=self._running)

    def _raise_broken(self) -> None:
        if self._broken is not None:
            raise EngineError(f"vLLM failed: {self._broken!r}") from self._broken

    def stats(self) -> EngineStats:
        total = self.info.total_blocks
        pinned = min(total, sum(self._held.values()))
        used = pinned
        if self._live:  # what the scheduler last said is old once nothing runs
            used = min(total, max(used, round(self._scheduler.used * total)))
        cached = min(total - used, sum(translator.names for translator in self._translators))
        return EngineStats(
            running=self._running,
            waiting=len(self._live) - self._running,
            used_blocks=used,
            cached_blocks=cached,
            free_blocks=total - used - cached,
            pinned_blocks=pinned,
            preemptions=self._scheduler.preemptions,
            hit_tokens=self._hit,
            prompt_tokens=self._prompt,
        )

    def dump(self, rank: int = 0) -> list[KvEvent]:
        return self._translators[rank].dump()

    def collectors(self) -> Seq[Collector]:
        """The engine's own metrics, for the worker's registry."""
        return [NativeMetrics()]

    # --- hand-over ---

    def memory(self) -> dict[str, Memory]:
        return {}

    def drop(self, key: object) -> bool:
        """Forget a ``Held``. Its KV goes when it was fetched, or when vLLM's lease of it has run out (``args``)."""
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
    """End a vLLM engine; its own errors are only told."""
    try:
        llm.shutdown()
    except Exception as error:
        log.error("engine_shutdown_failed", error=repr(error))
