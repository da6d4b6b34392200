"""An engine of another package behind our engine protocol: tracks sequences and turns its events into step results.

Two threads are involved. The engine thread (the caller of all methods) owns the bookkeeping. The loop thread submits
requests to the engine and follows its outputs. They are connected by one queue of events: ``step`` waits briefly for
the first event and returns everything that has arrived. What differs between packages is an ``EngineAdapter``.

An engine gets as many sequences as it runs at once. The others wait here, where tenants share by weight
(``StartQueue``): in its own queue the first would be the first. What it has, it computes in its own order.

An error of one request becomes its ``Failure``. Any other error is kept and raised by the next call as an EngineError:
the worker then requeues its requests and exits.

Sequences that stand still, because weights change, are aborted in the engine. Then each is submitted again, with its
tokens so far as part of the prompt: no KV of the old weights is left, and an engine's own pause is not relied upon.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import structlog
from prometheus_client.registry import Collector

from penstock.infra.model.adapter import AdapterError, AdapterFolder
from penstock.infra.process.class_queue import StartQueue
from penstock.schemas.errors import Code
from penstock.schemas.fleet import GpuUse
from penstock.schemas.kv import KvEvent
from penstock.schemas.transfer import Memory
from penstock.workers.engines.constraints.compiler import ConstraintCompiler
from penstock.workers.engines.core.embeddings import EmbeddingPool
from penstock.workers.engines.engine_protocol import (
    EngineError,
    EngineInfo,
    EngineStats,
    Failure,
    Grammars,
    KvTransfer,
    NodeLost,
    Output,
    PinnedPrompt,
    RequestError,
    Scored,
    SequenceCounts,
    SequenceMeasurements,
    SequenceRequest,
    Started,
    StepResult,
    VisionEngine,
    WeightsEngine,
    adapter_missing,
)
from penstock.workers.engines.external.constrained import ConstrainedOutputs, PreparedGrammars
from penstock.workers.engines.external.runtime import CLOSE_S, EngineFailed, EngineRuntime
from penstock.workers.engines.external.sequences import ActiveSequence, Follower, SequenceFailure, SequenceUpdate

log = structlog.get_logger("engine")

WAIT_S = 0.005  # longest ``step``: the worker's commands wait for it
SILENT_S = 60.0  # log a warning when sequences run and nothing arrives for this long
LORA_S = 60.0  # for an engine to read a LoRA adapter
DROP_S = 1.0  # from the last sequence with a LoRA adapter to its end in the engine, which may still abort that one
CHANGE_S = 1800.0  # for an engine to load weights, sleep or wake up
IDLE_S = 30.0  # for it to end what was aborted
LOOK_S = 0.02  # between two looks whether it has

C = TypeVar("C")  # what an adapter keeps of its call for a sequence


class Slots(NamedTuple):
    """An event: the engine takes another number of sequences at once from now on."""

    most: int


class BlockCounts(NamedTuple):
    """The engine's KV pool, in blocks; fields as in ``EngineStats``."""

    used: int
    cached: int
    free: int
    pinned: int
    preemptions: int = 0


class KnownBlocks(Protocol):
    """The blocks of an engine's KV cache, as far as it reports them. Used in the engine thread."""

    def take(self, event: Any) -> dict[int, list[KvEvent]]:
        """Take an event of the queue that belongs to no sequence; returns the KV events in it by rank."""

    def counts(self, *, active: bool, pinned: int) -> BlockCounts:
        """
        Args:
            active: there are sequences.
            pinned: blocks of prompts that wait to be fetched.
        """

    def dump(self, rank: int) -> list[KvEvent]:
        """All names in a rank's prefix cache, parents before children."""


@dataclass(frozen=True)
class EngineAdapter(Generic[C]):
    """What differs between the packages.

    Attributes:
        title: name of the package, for error messages.
        accept: checks and prepares a sequence, given the handle of its LoRA adapter (None: it has none). Called in the
            engine thread; raises RequestError if the sequence can never run here.
        vision: of engines that take images.
        collectors: the engine's own metrics, for the worker's registry.
        linger_s: how long KV events may follow the last output.
    """

    title: str
    accept: Callable[[SequenceRequest, Any], ActiveSequence[C]]
    follower: Follower[Any, C]
    blocks: KnownBlocks
    vision: EmbeddingPool | None = None
    collectors: Seq[Collector] = ()
    linger_s: float = 0.0


def unreadable(title: str, folder: AdapterFolder, error: object) -> AdapterError:
    """An engine does not read an adapter."""
    reason = str(error) or type(error).__name__
    return AdapterError(f"{title} cannot load the adapter in {folder.path}: {reason}")


class _Lora:
    """A LoRA adapter that the engine has read.

    Attributes:
        handle: what requests with it bring.
        keys: of the sequences with it.
        served: requests may name it.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.keys: set[object] = set()
        self.served = False


class EngineLoras:
    """Implements ``engine_protocol.AdapterEngine``: the engine reads the adapters, and brings them to the device.

    What was read keeps its content until no sequence has it: an engine that must look for an adapter it has dropped
    reads the folder again, which may have changed. Each is read once, and again only after it was dropped.

    Args:
        slots, max_rank: as passed to the engine.
        runtime: whose loop drops adapters.
        read: has the engine read an adapter, of this id and folder, and returns its handle; in any thread. Raises
            AdapterError.
        drop: has the engine forget one, of this id and handle; in the loop thread.
    """

    def __init__(
        self,
        slots: int,
        max_rank: int,
        runtime: EngineRuntime[Any],
        read: Callable[[str, AdapterFolder], Any],
        drop: Callable[[str, Any], None],
    ) -> None:
        self.slots, self.max_rank = slots, max_rank
        self._loop = runtime.loop
        self._read = read
        self._drop = drop
        self._lock = threading.Lock()
        self._known: dict[str, _Lora] = {}
        self._users: dict[object, str] = {}  # by the key of a sequence
        self._unserved = ""  # the last that was prepared, until it is added

    @property
    def loaded(self) -> tuple[str, ...]:
        """All: engines do not say which are on the device."""
        with self._lock:
            return tuple(identity for identity, lora in self._known.items() if lora.served)

    def prepare(self, folder: AdapterFolder, identity: str) -> object:
        """Have the engine read it now: from then on it keeps it in host memory."""
        with self._lock:
            before, self._unserved = self._unserved, identity
            known = self._known.get(identity)
        if before and before != identity:  # it was refused after it had been read
            self._release(before)
        if known is not None:
            return known
        lora = _Lora(self._read(identity, folder))
        with self._lock:
            self._known[identity] = lora
        return lora

    def add(self, identity: str, prepared: object) -> None:
        assert isinstance(prepared, _Lora)
        with self._lock:
            prepared.served = True
            self._known[identity] = prepared
            self._unserved = ""

    def remove(self, identity: str) -> None:
        """The engine drops it when its last sequence has ended."""
        with self._lock:
            if (lora := self._known.get(identity)) is not None:
                lora.served = False
        self._release(identity)

    def hold(self, request: SequenceRequest) -> Any:
        """The adapter's handle for a sequence, which keeps the adapter loaded until ``release``.

        Raises:
            RequestError: the adapter was never added, or was removed.
        """
        with self._lock:
            lora = self._known.get(request.adapter)
            if lora is None or not lora.served:
                raise RequestError(Code.revision_unavailable, adapter_missing(request.adapter))
            lora.keys.add(request.key)
            self._users[request.key] = request.adapter
            return lora.handle

    def handle(self, identity: str) -> Any:
        """The handle of an adapter that a sequence holds."""
        with self._lock:
            return self._known[identity].handle

    def release(self, key: object) -> None:
        """A sequence has ended."""
        with self._lock:
            identity = self._users.pop(key, "")
            if not identity:
                return
            lora = self._known[identity]
            lora.keys.discard(key)
            used = lora.served or lora.keys
        if not used:
            self._release(identity)

    def _release(self, identity: str) -> None:
        self._loop.post(self._loop.later, DROP_S, self._drop_unused, identity)

    def _drop_unused(self, identity: str) -> None:
        with self._lock:
            lora = self._known.get(identity)
            if lora is None or lora.served or lora.keys or self._unserved == identity:
                return
            del self._known[identity]
        self._drop(identity, lora.handle)


@dataclass(frozen=True)
class WeightCommands:
    """How an engine's weights change. The coroutines run in the loop thread, while the engine has no sequences.

    Attributes:
        path: of the model's folder.
        idle: whether it has ended all that was aborted; then it has also emptied its prefix cache.
        load: computes with the weights of a folder from now on. Raises RequestError if the present ones stay.
        sleep: moves the weights to host memory, and frees the KV cache.
        wake: brings the weights back.
        emptied: an event that says that nothing is cached. vLLM says so in its next step, which may be much later.
        fixed: why they are not replaced; "": they are.
        stays: as in ``WeightsEngine``.
    """

    path: Path
    idle: Callable[[], Awaitable[bool]]
    load: Callable[[Path], Awaitable[None]]
    sleep: Callable[[], Awaitable[None]]
    wake: Callable[[], Awaitable[None]]
    emptied: object
    fixed: str = ""
    stays: str = ""


class EngineWeights:
    """Implements ``engine_protocol.WeightsEngine``."""

    def __init__(self, engine: "ExternalEngine[Any]", commands: WeightCommands) -> None:
        self._engine = engine
        self._commands = commands
        self._title = engine.adapter.title
        self.stays = commands.stays

    def hold(self) -> None:
        self._engine.suspend()

    def proceed(self) -> None:
        self._engine.resume()

    @property
    def settled(self) -> bool:
        return self._engine.settled

    def read(self, folder: Path) -> Path:
        """Check a folder's configuration and tensors. Engines that fail in mid-load have no weights to go back to."""
        from penstock.workers.engines.native.model.loading import check_alike
        from penstock.workers.engines.native.model.model import UnsupportedModel

        if self._commands.fixed:
            raise RequestError(Code.unsupported, self._commands.fixed)
        try:
            check_alike(self._commands.path, folder)
        except (UnsupportedModel, OSError) as error:
            raise RequestError(Code.invalid_request, str(error)) from error
        return folder

    def replace(self, read: Path, root_of: Callable[[object, int], bytes]) -> None:
        self._run(self._load(read), f"load the weights of {read}")
        self._engine.rename(root_of)

    def sleep(self) -> None:
        if self.stays:
            raise RequestError(Code.unsupported, f"{self.stays}, so this worker does not sleep")
        self._run(self._sleep(), "sleep")

    def wake(self) -> None:
        self._run(self._commands.wake(), "wake up")

    async def _load(self, folder: Path) -> None:
        await self._rest()
        await self._commands.load(folder)
        self._engine.runtime.inbox.put(self._commands.emptied)

    async def _sleep(self) -> None:
        await self._rest()
        await self._commands.sleep()
        self._engine.runtime.inbox.put(self._commands.emptied)

    async def _rest(self) -> None:
        until = time.monotonic() + IDLE_S
        while not await self._commands.idle():
            if time.monotonic() > until:
                raise EngineError(f"{self._title} still computes {IDLE_S:g} s after its last request was aborted")
            await asyncio.sleep(LOOK_S)

    def _run(self, work: Awaitable[None], what: str) -> None:
        """
        Raises:
            RequestError: nothing has changed.
            EngineError: it failed, was lost meanwhile, or takes too long.
        """

        async def bounded() -> None:
            async with asyncio.timeout(CHANGE_S):
                await work

        self._engine.await_settled()
        answer = self._engine.runtime.loop.begin(bounded())
        try:
            while not concurrent.futures.wait([answer], LOOK_S).done:
                self._engine.raise_broken()  # an engine that has ended does not answer
            answer.result()
        except (RequestError, EngineError):
            raise
        except TimeoutError as error:
            raise EngineError(f"{self._title} did not {what} within {CHANGE_S:g} s") from error
        except Exception as error:
            raise EngineError(f"{self._title} cannot {what}: {error!r}") from error
        finally:
            answer.cancel()


@dataclass(slots=True)
class _Arrived:
    """What has arrived for one ``StepResult``. ``events``: by rank."""

    outputs: list[Output] = field(default_factory=list)
    events: dict[int, list[KvEvent]] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    pinned: list[PinnedPrompt] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    measured: list[SequenceMeasurements] = field(default_factory=list)
    handed: list[object] = field(default_factory=list)
    counted: list[SequenceCounts] = field(default_factory=list)
    computed: int = 0


class ExternalEngine(Generic[C]):
    """Implements ``penstock.workers.engines.engine_protocol.Engine``.

    KV moves through the engine's own connector: the handoff state is ``opaque``.

    Args:
        runtime: the engine, with its loop and its queue of events; closed with it.
        grammars: of the model, if ``info`` says that the engine applies constraints.
        adapters: LoRA adapters; None: the engine applies none.
        slots: sequences that it takes at once, until a ``Slots`` says otherwise; 0: as ``info`` says, always.
        gpus: of the engine's other machines.
        weights: how these change; None: they stay as they are.
    """

    def __init__(
        self,
        info: EngineInfo,
        runtime: EngineRuntime[Any],
        adapter: EngineAdapter[C],
        grammars: ConstraintCompiler | None = None,
        adapters: EngineLoras | None = None,
        slots: int = 0,
        gpus: Callable[[], tuple[GpuUse, ...]] = tuple,
        weights: WeightCommands | None = None,
    ) -> None:
        self.info = info
        self._gpus = gpus
        self.kv_transfer: KvTransfer | None = None  # the engine moves its KV itself
        self.grammars: Grammars | None = None if grammars is None else PreparedGrammars(grammars)
        self.adapters = adapters
        self.adapter = adapter
        self.runtime = runtime
        self.weights: WeightsEngine | None = None if weights is None else EngineWeights(self, weights)
        self._stopped: Future[None] | None = None  # while sequences stand still: done once the engine has none
        self._suspended_at = 0.0
        self._constrained = ConstrainedOutputs(grammars)
        self.active: dict[object, ActiveSequence[C]] = {}
        self._slots = slots or info.slots
        self._learns_slots = slots > 0
        self._launched: set[object] = set()  # of these, those that the engine has
        self._waiting: StartQueue[ActiveSequence[C]] = StartQueue()  # the others
        self._running = 0  # how many of them have started
        self._pinned: dict[object, int] = {}  # key -> blocks of its prompt
        self._handed: dict[object, ActiveSequence[C]] = {}  # pinned, and perhaps still computing
        self._hit = self._prompt = 0
        self._closed = False
        self._last_update = self._ended_at = float("-inf")

    @property
    def vision(self) -> VisionEngine | None:
        return self.adapter.vision

    # --- requests ---

    def submit(self, request: SequenceRequest) -> None:
        """Queue one sequence.

        Raises:
            RequestError: it can never run here.
            EngineError: the engine is broken.
        """
        self.raise_broken()
        if request.key in self.active:
            raise RequestError(Code.invalid_request, f"sequence {request.key!r} was submitted already")
        lora = self._lora(request)
        try:
            sequence = self.adapter.accept(request, lora)
            self._constrained.add(request)
        except BaseException:
            self._release_lora(request.key)
            raise
        if not self.active:
            self._last_update = time.monotonic()
        self.active[request.key] = sequence
        self._waiting.push(request.key, sequence, request.share, max(1, sequence.prompt_len))
        self._launch()

    def _lora(self, request: SequenceRequest) -> Any:
        """
        Raises:
            RequestError: its adapter is not served here.
        """
        if not request.adapter:
            return None
        if self.adapters is None:
            raise RequestError(Code.revision_unavailable, adapter_missing(request.adapter))
        return self.adapters.hold(request)

    def _release_lora(self, key: object) -> None:
        if self.adapters is not None:
            self.adapters.release(key)

    def cancel(self, key: object) -> bool:
        """Stop tracking a sequence at once and abort it in the engine; its late outputs are discarded."""
        sequence = self.active.get(key)
        if sequence is None:
            return False
        launched = key in self._launched
        sequence.cancelled = True
        self._forget(sequence)
        if launched:
            self.runtime.loop.post(self.adapter.follower.abort, sequence)
        return True

    def _launch(self) -> None:
        """Hand over those that are next, as many as there are slots."""
        while (
            self._stopped is None
            and len(self._launched) < self._slots
            and (sequence := self._waiting.first()) is not None
        ):
            self._waiting.take(sequence.key)
            self._launched.add(sequence.key)
            self._submit(sequence)

    def _submit(self, sequence: ActiveSequence[C]) -> None:
        if sequence.stale:
            try:
                sequence = self._renewed(sequence)
            except RequestError as error:
                failure = SequenceFailure(Code(error.code), error.message)
                self.runtime.inbox.put(SequenceUpdate(sequence, failure=failure))
                return
        self.runtime.loop.post(self.adapter.follower.launch, sequence)

    def _renewed(self, sequence: ActiveSequence[C]) -> ActiveSequence[C]:
        """A sequence that continues after its tokens so far.

        Raises:
            RequestError: it cannot be computed any more.
        """
        request = msgspec.structs.replace(
            sequence.request, generated=[*sequence.request.generated, *sequence.generated], digests=()
        )
        lora = None if self.adapters is None or not request.adapter else self.adapters.handle(request.adapter)
        renewed = self.adapter.accept(request, lora)
        if sequence.started:  # otherwise, what came first was not read, and is dropped
            renewed.started, renewed.responded, renewed.score = True, True, sequence.score
        self.active[sequence.key] = renewed
        return renewed

    # --- standing still ---

    def suspend(self) -> None:
        """Abort all sequences in the engine; they are submitted again by ``resume``."""
        if self._stopped is None:
            running = [self.active[key] for key in self._launched]
            self._suspended_at = time.monotonic()
            self._stopped = self.runtime.loop.begin(self.adapter.follower.stop(running))

    @property
    def settled(self) -> bool:
        """Whether the engine has no sequence, and nothing of theirs is to be returned yet.

        Raises:
            EngineError: it does not end them.
        """
        if self._stopped is None:
            return False
        if not self._stopped.done() and time.monotonic() > self._suspended_at + IDLE_S:
            raise self._not_aborted()
        return self._stopped.done() and not self.runtime.inbox

    def await_settled(self) -> None:
        """Wait until the engine has no sequence.

        Raises:
            EngineError: it does not end them.
        """
        assert self._stopped is not None, "hold it first"
        try:
            self._stopped.result(IDLE_S)
        except concurrent.futures.TimeoutError as error:
            raise self._not_aborted() from error

    def _not_aborted(self) -> EngineError:
        return EngineError(f"{self.adapter.title} did not abort its requests within {IDLE_S:g} s")

    def rename(self, root_of: Callable[[object, int], bytes]) -> None:
        """Give the blocks of all sequences other names."""
        for key, sequence in self.active.items():
            generated = len(sequence.request.generated) + len(sequence.generated)
            sequence.request = msgspec.structs.replace(sequence.request, root=root_of(key, generated))
            sequence.stale = True

    def resume(self) -> None:
        if self._stopped is None:
            return
        self._stopped = None
        for key in list(self._launched):
            sequence = self.active[key]
            sequence.stale = True
            self._submit(sequence)
        self._last_update = time.monotonic()
        self._launch()

    def _forget(self, sequence: ActiveSequence[C]) -> None:
        del self.active[sequence.key]
        self._constrained.remove(sequence.key)
        self._release_lora(sequence.key)
        if sequence.key in self._launched:
            self._launched.remove(sequence.key)
            self._launch()
        else:
            self._waiting.remove(sequence.key)
        self._running -= sequence.started
        if not self.active:
            self._ended_at = time.monotonic()

    def has_work(self) -> bool:
        if self.runtime.inbox or (self.active and self._stopped is None):
            return True
        return self.info.kv_events and time.monotonic() - self._ended_at < self.adapter.linger_s

    @property
    def blocked(self) -> bool:
        return False

    # --- results ---

    def step(self) -> StepResult:
        """Return the results that have arrived; waits up to ``WAIT_S`` for the first event.

        Raises:
            EngineError: the engine is broken.
        """
        found = _Arrived()
        event = self.runtime.inbox.get(WAIT_S)
        if event is None:
            self._check_silence()
        while event is not None and not isinstance(event, EngineFailed):
            if isinstance(event, SequenceUpdate):
                self._apply(event, found)
            elif isinstance(event, Slots):
                self._slots = event.most
                self._launch()
            else:
                for rank, events in self.adapter.blocks.take(event).items():
                    found.events.setdefault(rank, []).extend(events)
            event = self.runtime.inbox.get()
        self.raise_broken()
        return StepResult(
            found.outputs,
            found.events.pop(0, []),
            found.started,
            found.failures,
            found.computed,
            found.pinned,
            found.scored,
            found.events,
            found.measured,
            found.handed,
            found.counted,
        )

    def _apply(self, update: SequenceUpdate, found: "_Arrived") -> None:
        """Add an update to what has arrived, unless its sequence was cancelled."""
        sequence, cached, tokens, failure, opaque, scored, measured, handed, usage = update
        if self.active.get(sequence.key) is not sequence:
            return
        tokens, constrained = self._constrained.follow(sequence.key, tokens, failure)
        if constrained is not failure:
            failure, opaque, sequence.cancelled = constrained, None, True
            self.runtime.loop.post(self.adapter.follower.abort, sequence)
        self._last_update = time.monotonic()
        if handed:
            found.handed.append(sequence.key)
            self._forget(sequence)
            if opaque is not None:
                self._handed[sequence.key] = sequence
        found.computed += len(tokens)
        if cached is not None:
            sequence.started = True
            self._running += 1
            self._hit += cached
            self._prompt += sequence.prompt_len
            found.computed += sequence.prompt_len - cached
            found.started.append(Started(sequence.key, cached))
        if scored is not None:
            found.scored.append(scored)
        if usage is not None:
            found.counted.append(SequenceCounts(sequence.key, usage))
        if measured:
            found.measured.append(SequenceMeasurements(sequence.key, measured))
        found.outputs.extend(Output(sequence.key, *token) for token in tokens)
        sequence.generated.extend(token.token for token in tokens)
        if opaque is not None:
            self._pinned[sequence.key] = -(-sequence.prompt_len // self.info.block_size)
            found.pinned.append(PinnedPrompt(sequence.key, [], [], opaque))
        if failure is not None:
            found.failures.append(Failure(sequence.key, failure.code, failure.message))
        if failure is not None or (tokens and tokens[-1].finish):
            self._forget(sequence)

    def _check_silence(self) -> None:
        now = time.monotonic()
        if self.active and self._stopped is None and now - self._last_update > SILENT_S:
            self._last_update = now
            log.warning("engine_silent", seconds=SILENT_S, sequences=len(self.active), running=self._running)

    def raise_broken(self) -> None:
        """
        Raises:
            EngineError: the engine is broken.
        """
        error = self.runtime.inbox.failure
        if isinstance(error, NodeLost):
            raise error
        if error is not None:
            raise EngineError(f"{self.adapter.title} failed: {error!r}") from error

    def stats(self) -> EngineStats:
        pinned = sum(self._pinned.values())
        blocks = self.adapter.blocks.counts(active=bool(self.active), pinned=pinned)
        return EngineStats(
            running=self._running,
            waiting=len(self.active) - self._running,
            used_blocks=blocks.used,
            cached_blocks=blocks.cached,
            free_blocks=blocks.free,
            pinned_blocks=blocks.pinned,
            preemptions=blocks.preemptions,
            hit_tokens=self._hit,
            prompt_tokens=self._prompt,
            slots=self._slots if self._learns_slots else 0,
            gpus=self._gpus(),
        )

    def dump(self, rank: int = 0) -> list[KvEvent]:
        return self.adapter.blocks.dump(rank)

    def collectors(self) -> Seq[Collector]:
        """The engine's own metrics, for the worker's registry."""
        return self.adapter.collectors

    # --- handoff ---

    def memory(self) -> dict[str, Memory]:
        return {} if self.adapter.vision is None else self.adapter.vision.memory()

    def release_pinned(self, key: object) -> bool:
        """Stop counting a pinned prompt. The engine frees its KV once it was fetched or the engine's own lease expired:
        a transfer that may be in progress cannot be stopped safely. One that was handed over ahead is aborted."""
        sequence = self._handed.pop(key, None)
        if sequence is not None:
            self.runtime.loop.post(self.adapter.follower.abort, sequence)
        return self._pinned.pop(key, None) is not None

    def close(self) -> None:
        """End all threads and the engine; may be called twice. Bounded, except for the engine's own shutdown."""
        if self._closed:
            return
        self._closed = True
        for key in [*(self.active.keys() - self._launched), *self._launched]:
            self.cancel(key)
        if not self.runtime.loop.cancel_all(CLOSE_S):
            log.warning("engine_tasks_still_running")
        self.runtime.resources.close()
