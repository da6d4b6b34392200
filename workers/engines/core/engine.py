"""The engine made of a scheduler and an executor: each step is planned, computed and committed.

With speculative decoding, the target computes the last token and ``n`` proposed ones in one step and draws a token
after each, exactly as it would have drawn them one by one: a draw depends on (seed, choice, position) and the logits
only. Proposals are accepted as long as they equal the drawn tokens, so the output is that of the target alone, greedy
and seeded.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import structlog
from msgspec.structs import replace

from penstock.infra.model.adapter import AdapterFolder
from penstock.schemas.errors import Code
from penstock.schemas.kv import KvEvent
from penstock.schemas.transfer import KV, WINDOWS, Memory
from penstock.workers.engines.constraints.compiler import ConstraintCompiler, RunningConstraints, matcher_of
from penstock.workers.engines.core.blocks import MOST_WRITES, BlockCopier, DiskCache
from penstock.workers.engines.core.embeddings import MISSING_EMBEDDINGS, TEXT_ONLY, EmbeddingPool, VisionEncoder
from penstock.workers.engines.core.queue import AdapterSlots
from penstock.workers.engines.core.scheduler import Scheduler
from penstock.workers.engines.core.sequence import (
    Executor,
    LoadedAdapter,
    OverlapExecutor,
    PendingStep,
    Sampled,
    ScheduledSequence,
)
from penstock.workers.engines.engine_protocol import (
    EngineError,
    EngineInfo,
    EngineStats,
    Failure,
    KvTransfer,
    PinnedPrompt,
    RequestError,
    SequenceRequest,
    StepResult,
    adapter_missing,
    check_vocabulary,
)
from penstock.workers.engines.logits.registry import Registry

LEAST_PROMPT_TOKENS = 256  # of a step, whose time is mostly theirs
PROMPT_SHARE = 0.1  # of a step in the mean time
ENDED_S = 0.0001  # a step whose result comes sooner had ended before the next one was launched
SPILL_S = 8.0  # of an engine's end
SPILL_PAUSE_S = 0.001

log = structlog.get_logger("engine")


class Drafter(Protocol):
    """Proposes tokens that are likely to come next. Called once per step, with all sequences of its plan."""

    def propose(self, plan: list[ScheduledSequence], limits: Seq[int]) -> list[list[int]]:
        """Up to ``limits[i]`` tokens after the known ones of ``plan[i]``; their blocks are allocated.

        Raises:
            EngineError: the device is lost.
        """

    def close(self) -> None: ...


class Speculator:
    """Adds proposals to plans.

    Args:
        tokens: proposed per sequence and step, at most.
    """

    def __init__(self, drafter: Drafter, tokens: int) -> None:
        if tokens < 1:
            raise ValueError(f"num_speculative_tokens must be at least 1, not {tokens}")
        self.drafter = drafter
        self._tokens = tokens

    def extend(self, plan: list[ScheduledSequence], scheduler: Scheduler) -> list[ScheduledSequence]:
        """The plan with proposed tokens after single ones; they are in ``sequence.draft`` until it is committed."""
        budget = scheduler.max_batched_tokens - sum(scheduled.count for scheduled in plan)
        limits = []
        for scheduled in plan:
            # What a constraint allows after a proposed token is known only once that token is.
            most = 0 if scheduled.sequence.constraint is not None else min(self._tokens, budget)
            limits.append(scheduler.kv_cache.draft_room(scheduled, most))
            budget -= limits[-1]
        extended = []
        for scheduled, draft in zip(plan, self.drafter.propose(plan, limits), strict=True):
            scheduled.sequence.draft = draft
            extended.append(replace(scheduled, count=scheduled.count + len(draft)) if draft else scheduled)
        return extended


def scheduler_stats(scheduler: Scheduler) -> EngineStats:
    report, drafts = scheduler.report, scheduler.drafts
    pool = scheduler.kv_cache.pool
    host = pool.host
    return EngineStats(
        running=len(scheduler.running),
        waiting=len(scheduler.queue),
        used_blocks=pool.used_blocks,
        cached_blocks=pool.cached_blocks,
        free_blocks=pool.free_blocks,
        pinned_blocks=scheduler.reservations.reserved_blocks + scheduler.pinned.block_count,
        reserved_blocks=scheduler.reservations.reserved_blocks,
        preemptions=report.preemptions,
        hit_tokens=report.hit_tokens,
        prompt_tokens=report.prompt_tokens,
        drafts=drafts.drafts,
        draft_tokens=drafts.proposed,
        accepted_tokens=drafts.accepted,
        host_blocks=0 if host is None else host.used_slots,
        loaded_blocks=0 if host is None else host.loaded_blocks,
        compute_s=0.0 if host is None else host.compute_s,
        **({} if host is None or host.disk is None else disk_stats(host.disk)),
    )


def disk_stats(disk: DiskCache) -> dict[str, Any]:
    return {
        "disk_blocks": len(disk.names),
        "disk_read_blocks": disk.read_blocks,
        "disk_written_blocks": disk.written_blocks,
        "disk_lost_blocks": disk.lost_blocks,
        "disk_read_s": disk.files.read_s,
    }


class Adapters:
    """Implements ``engine_protocol.AdapterEngine`` over the slots of a scheduler.

    Args:
        matrices: reads an adapter into host memory, as the executor copies it into a slot; raises ``AdapterError``.
    """

    def __init__(self, slots: AdapterSlots, max_rank: int, matrices: Callable[[AdapterFolder], object]) -> None:
        self.slots, self.max_rank = slots.slots, max_rank
        self._slots = slots
        self._matrices = matrices
        self._added: dict[str, LoadedAdapter] = {}

    @property
    def loaded(self) -> tuple[str, ...]:
        return self._slots.loaded

    def prepare(self, folder: AdapterFolder, identity: str) -> object:
        return LoadedAdapter(identity, self._matrices(folder))

    def add(self, identity: str, prepared: object) -> None:
        assert isinstance(prepared, LoadedAdapter)
        self._added[identity] = prepared
        self._slots.fill(prepared)

    def remove(self, identity: str) -> None:
        self._added.pop(identity, None)

    def find(self, identity: str) -> LoadedAdapter:
        """
        Raises:
            RequestError: it was not added, or removed.
        """
        found = self._added.get(identity)
        if found is None:
            raise RequestError(Code.revision_unavailable, adapter_missing(identity))
        return found


class WeightStore(Protocol):
    """Where the weights and the KV cache of an engine are. Nothing is computed meanwhile, except while it reads.

    Attributes:
        stays: why the KV cache or other memory cannot leave the device; "": all of it can.
    """

    stays: str

    def read(self, folder: Path) -> Any:
        """A folder's weights in host memory, checked; from any thread.

        Raises:
            RequestError: they cannot be used.
        """

    def replace(self, read: Any) -> Executor | OverlapExecutor | None:
        """Put what was read in the place of the present weights; what computes from now on, None: as before.

        Raises:
            RequestError: they cannot be used; the present ones stay.
            EngineError: the device is lost.
        """

    def sleep(self) -> None:
        """Move the weights to host memory, and free the pools and what computes with them.

        Raises:
            RequestError: this engine cannot.
        """

    def wake(self) -> Executor | OverlapExecutor:
        """Bring them back; what computes from now on.

        Raises:
            EngineError: they no longer fit.
        """


class ReplaceableWeights:
    """Implements ``engine_protocol.WeightsEngine``."""

    def __init__(self, engine: "ScheduledEngine", store: WeightStore) -> None:
        self._engine, self._scheduler = engine, engine.scheduler
        self.store = store

    stays = ""

    def hold(self) -> None:
        self._scheduler.held = True

    def proceed(self) -> None:
        self._scheduler.held = False

    @property
    def settled(self) -> bool:
        return self._scheduler.settled

    def read(self, folder: Path) -> Any:
        if self._engine.vision is not None:
            raise RequestError(Code.unsupported, "weights of models that take images are not replaced; restart workers")
        return self.store.read(folder)

    def replace(self, read: Any, root_of: Callable[[object, int], bytes]) -> None:
        executor = self.store.replace(read)
        if executor is not None:
            self._engine.compute_with(executor)
        self._scheduler.reset(root_of)

    def sleep(self) -> None:
        if self._engine.vision is not None:
            raise RequestError(Code.unsupported, "a worker whose model takes images does not sleep")
        self.store.sleep()
        self._scheduler.reset()

    def wake(self) -> None:
        self._engine.compute_with(self.store.wake())


class InflightStep(NamedTuple):
    """A step that was launched and not yet committed.

    Attributes:
        ending: prompts that end in this step and are handed off.
        began: when its launch began.
    """

    plan: list[ScheduledSequence]
    scoring: list[ScheduledSequence]
    failures: list[Failure]
    launched: PendingStep
    ending: list[PinnedPrompt]
    began: float


class ScheduledEngine:
    """Implements ``engine_protocol.Engine``; owns the executor and ``encoder`` and closes them.

    Args:
        executor: computes one plan at a time; None if ``ahead`` is given.
        encoder: of the model's images; None: it takes none.
        processors: logits processors that requests may name; None: none.
        ahead: takes the next plan while it computes one. A step's outputs are returned by the next call of ``step``,
            which launches its own step before it waits for them.
        speculation: proposes tokens to ``executor``; not with ``ahead``, where the next plan is made too early.
        grammars: compiles constraints; None: requests with one are refused.
        adapters: LoRA adapters, in the scheduler's slots; None: requests with one are refused.
        copier, row_copier: of blocks, and of rows of sliding-window layers, to and from host memory, if the scheduler's
            ``blocks.host`` and ``windows.host`` plan copies.
        store: of the weights; None: they stay as they are.
    Attributes:
        hold: which sequences of a plan are to wait for a later step; None: none. Not with ``ahead``.
        executor, scheduler: as given.
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        executor: Executor | None,
        encoder: VisionEncoder | None = None,
        processors: Registry | None = None,
        ahead: OverlapExecutor | None = None,
        speculation: Speculator | None = None,
        copier: BlockCopier | None = None,
        *,
        row_copier: BlockCopier | None = None,
        grammars: ConstraintCompiler | None = None,
        adapters: Adapters | None = None,
        store: WeightStore | None = None,
    ) -> None:
        assert speculation is None or executor is not None
        assert len(scheduler.kv_cache.hosts) == (copier is not None) + (row_copier is not None)
        self.hold: Callable[[list[ScheduledSequence]], list[ScheduledSequence]] | None = None
        self._speculation = speculation
        self._copier, self._row_copier = copier, row_copier
        scheduler.reservations.copy = self._copy
        if copier is not None:
            scheduler.reservations.settle = copier.settle
        if row_copier is not None:
            scheduler.reservations.settle_rows = row_copier.settle
        self.info = info
        self.grammars: ConstraintCompiler | None = grammars
        self.adapters = adapters
        self._constrained = RunningConstraints()
        self.kv_transfer: KvTransfer | None = scheduler.reservations
        self.vision = None if encoder is None else EmbeddingPool(encoder)
        self.scheduler = scheduler
        self._processors = processors or Registry()
        self.ahead = ahead
        self.inflight: InflightStep | None = None
        self._computes_since = self._computed_at = 0.0  # the step that returned last, and its result
        self.executor = executor
        owned = executor if executor is not None else ahead
        assert owned is not None
        self._owned: Executor | OverlapExecutor = owned
        self.weights = ReplaceableWeights(self, store) if store is not None else None
        self._ending: list[PinnedPrompt] = []  # of the step in flight
        self._may_lack_embeddings = False  # a sequence was accepted without its embeddings

    def submit(self, request: SequenceRequest) -> None:
        """Queue one sequence.

        Raises:
            RequestError: it can never run here (too long, token ids outside the vocabulary, nothing to generate, media
                without embeddings, a logits processor that is not registered or refuses its arguments, a constraint
                that cannot be compiled, an adapter that was not added).
        """
        if request.reservation is None:  # a prefill worker has already checked it, which takes 0.07 ms
            check_vocabulary(request, self.info.vocab_size)
        if request.media:
            if self.vision is None:
                raise RequestError(Code.invalid_request, TEXT_ONLY)
            self.vision.check(request.media, len(request.prompt), adopted=request.reservation is not None)
            self._may_lack_embeddings = self._may_lack_embeddings or not all(span.slots for span in request.media)
        matcher = matcher_of(request, self.grammars) if request.constraint is not None else None
        named = self._processors.defaults or request.sampling.logits_processors
        adapter = None
        if request.adapter:
            if self.adapters is None:
                raise RequestError(Code.revision_unavailable, adapter_missing(request.adapter))
            adapter = self.adapters.find(request.adapter)
        self.scheduler.submit(request, self._processors.chain(request) if named else None, matcher, adapter)
        if matcher is not None:
            self._constrained.add(request.key, matcher)

    def cancel(self, key: object) -> bool:
        self._constrained.remove(key)
        return self.scheduler.cancel(key)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> StepResult:
        """Plan, compute and commit one batch.

        Raises:
            EngineError: the executor is broken; so is this engine.
        """
        hosts = self.scheduler.kv_cache.hosts
        if not hosts:
            return self._step()
        began = time.perf_counter()
        for host in hosts:
            host.poll()
        self.scheduler.blocks.save_ahead()
        result = self._step()
        tokens = result.computed_tokens - len(result.outputs)
        if tokens >= LEAST_PROMPT_TOKENS:
            if self.ahead is not None:  # the step before launched it, and this one may have launched another
                began, ended = self._computes_since, self._computed_at
            else:
                ended = time.perf_counter()
            took = (ended - began) / tokens * self.info.block_size
            for host in hosts:
                host.compute_s += (took - host.compute_s) * (PROMPT_SHARE if host.compute_s else 1.0)
        return result

    def _step(self) -> StepResult:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        failures: list[Failure] = []
        scoring = scheduler.scoring.sequences
        if self._may_lack_embeddings and (missing := [scheduled for scheduled in plan if _lacks_embeddings(scheduled)]):
            plan = scheduler.unschedule(plan, missing)
            scoring = [scheduled for scheduled in scoring if scheduled not in missing]
            failures = [
                Failure(scheduled.sequence.key, Code.transfer_failed, MISSING_EMBEDDINGS) for scheduled in missing
            ]
        if self.hold is not None and plan and (waiting := self.hold(plan)):
            plan = scheduler.postpone(plan, waiting)
            scoring = [scheduled for scheduled in scoring if scheduled not in waiting]
        ending = self._ending_prompts(plan)
        if ending and (prompts_end := scheduler.reservations.prompts_end) is not None:
            prompts_end([prompt.key for prompt in ending])
        if self._speculation is not None and plan:  # proposals also take blocks, whose content must be saved first
            plan = self._speculation.extend(plan, scheduler)
        if self._copier is not None and plan:
            self._copy()
        if self.executor is None:
            return self._step_overlapped(plan, scoring, failures, ending)
        self._ending = ending
        sampled: list[Sampled] = self.executor.execute(plan, scoring) if plan else []
        self.written(0)
        return self._result(scheduler.commit(plan, sampled, scoring), failures)

    def _ending_prompts(self, plan: list[ScheduledSequence]) -> list[PinnedPrompt]:
        """Prompts that end in this step and are handed off, with the blocks that it writes."""
        reservations, generations = self.scheduler.reservations, self.scheduler.blocks.generations
        if reservations.prompts_end is None and reservations.prompts_written is None:
            return []
        ending = []
        for scheduled in plan:
            sequence = scheduled.sequence
            if scheduled.samples and sequence.pin:
                table = sequence.blocks[: -(-sequence.prompt_len // self.info.block_size)]
                ending.append(PinnedPrompt(sequence.key, table, [generations[block] for block in table]))
        return ending

    def written(self, layers: int) -> None:
        """The step in flight has written the KV of this many leading layers; 0: of all."""
        report, ending, whole = self.scheduler.reservations.prompts_written, self._ending, not layers
        if whole:
            self._ending = []
        if ending and report is not None and not (whole and self.scheduler.kv_cache.windows is not None):
            report(ending, layers)  # rows of windows are known once a prompt is pinned

    def _result(self, result: StepResult, failures: list[Failure]) -> StepResult:
        """The result of a step, with further failures, among them of sequences that cannot match their constraint."""
        if self._constrained.matchers:
            unmatched = self._constrained.ended(result)
            for failure in unmatched:
                self.scheduler.cancel(failure.key)
            if unmatched:
                failed = {failure.key for failure in unmatched}
                result.outputs = [output for output in result.outputs if output.key not in failed]
                failures = failures + unmatched
        if failures:
            result.failures += failures
        return result

    def _copy(self) -> None:
        """Copy blocks and rows that this plan reassigns to the host, and those that it needs from the host."""
        copiers = self._copier, self._row_copier
        for host, copier in zip(self.scheduler.kv_cache.hosts, copiers, strict=False):
            copies = host.take_copies()
            if copies is not None and copier is not None:
                copier.copy(copies)

    def _spill(self, disks: list[DiskCache]) -> None:
        """Write what is cached to files, for the next start, as far as that goes within ``SPILL_S``."""
        blocks, hosts, deadline = self.scheduler.blocks, self.scheduler.kv_cache.hosts, time.monotonic() + SPILL_S
        left = [(name, block) for name, block in blocks.cache.items() if block not in blocks.memory_only]
        left = [each for each in left if not all(host.has(each[0], files=True) for host in hosts)][::-1]
        try:
            self._copy()
            while time.monotonic() < deadline and (left or any(host.unwritten for host in hosts) or _writing(disks)):
                for host in hosts:
                    host.poll()
                if not _writing(disks) and any(host.unwritten for host in hosts):  # the disk takes no more
                    break
                while left and all(len(host.unwritten) < MOST_WRITES for host in hosts):
                    name, block = left.pop()
                    blocks.save(block, name)
                self._copy()
                time.sleep(SPILL_PAUSE_S)
        except EngineError as error:
            log.warning("kv_not_spilled", error=str(error))
        for disk in disks:
            disk.files.close()

    def _step_overlapped(
        self,
        plan: list[ScheduledSequence],
        scoring: list[ScheduledSequence],
        failures: list[Failure],
        ending: list[PinnedPrompt],
    ) -> StepResult:
        """Launch this plan, then wait for the previous one and commit it."""
        assert self.ahead is not None
        done, self.inflight, began = self.inflight, None, time.perf_counter()
        if plan:
            self.inflight = InflightStep(plan, scoring, failures, self.ahead.launch(plan, scoring), ending, began)
            failures = []
        launched = time.perf_counter()
        if done is None:
            result = self.scheduler.commit([], [], [])
        else:
            if done.ending:
                self._ending = done.ending
                for waypoint in done.launched.waypoints:
                    waypoint.wait()
                    self.written(waypoint.layers)
            sampled = done.launched.result()
            self.written(0)
            now = time.perf_counter()
            ahead_s = now - launched
            self._computes_since, self._computed_at = max(done.began, self._computed_at), now
            result = self.scheduler.commit(done.plan, sampled, done.scoring)
            failures = done.failures + failures
            if plan:
                result.ahead_s = ahead_s if ahead_s > ENDED_S else 0.0
        return self._result(result, failures)

    def compute_with(self, executor: Executor | OverlapExecutor) -> None:
        """Compute the next steps with another executor of the same kind; none is in flight."""
        assert self.inflight is None
        self._owned = executor
        if self.executor is not None:
            self.executor = executor  # type: ignore[assignment]
        else:
            self.ahead = executor  # type: ignore[assignment]

    def stats(self) -> EngineStats:
        copier = self._copier if self.scheduler.kv_cache.pool is self.scheduler.blocks else self._row_copier
        load_s = copier.load_s if copier is not None else 0.0
        stats, errors = scheduler_stats(self.scheduler), self._processors.errors.count
        return msgspec.structs.replace(stats, logits_errors=errors, load_s=load_s)

    def dump(self, rank: int = 0) -> list[KvEvent]:
        return self.scheduler.blocks.dump()

    @property
    def blocked(self) -> bool:
        return self.scheduler.blocked

    def memory(self) -> dict[str, Memory]:
        """The executor's pools and the embedding pool, each with its generations.

        They stay where they are from now on, since other workers read from these addresses and write to them.
        """
        windows = self.scheduler.kv_cache.windows
        of = {KV: self.scheduler.blocks.generations} | ({} if windows is None else {WINDOWS: windows.generations})
        kv = {
            name: msgspec.structs.replace(pool, generations=of[name].buffer_info()[0])
            for name, pool in self._owned.memory().items()
        }
        if kv and self.weights is not None:
            self.weights.store.stays = self.weights.store.stays or "a KV cache that other workers reach"
        return kv if self.vision is None else kv | self.vision.memory()

    @property
    def transfers(self) -> tuple[Any, ...]:
        """Channels to the other ranks of a model that is split, over which they are asked to move blocks."""
        return getattr(self._owned, "transfers", ())

    def release_pinned(self, key: object) -> bool:
        return self.scheduler.pinned.release(key)

    def close(self) -> None:
        self.inflight = None
        if disks := [host.disk for host in self.scheduler.kv_cache.hosts if host.disk is not None]:
            self._spill(disks)
        self._owned.close()
        if self._speculation is not None:
            self._speculation.drafter.close()
        for copier in (self._copier, self._row_copier):
            if copier is not None:
                copier.close()
        if self.vision is not None:
            self.vision.close()


def _writing(disks: list[DiskCache]) -> bool:
    return any(disk.writing for disk in disks)


def _lacks_embeddings(scheduled: ScheduledSequence) -> bool:
    """Whether the KV of its media came from elsewhere and was lost to a preemption: it cannot be computed here."""
    end = scheduled.start + scheduled.count
    return any(
        not span.slots and span.position < end and span.position + span.tokens > scheduled.start
        for span in scheduled.sequence.media
    )
