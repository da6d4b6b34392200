"""The running sequences: how their blocks grow, which one is preempted for that, and when blocks are freed. Pure.

Plans that were made and not yet committed, and what must wait for them. Pure.

What a scheduler reports besides tokens: admissions, failures, measurements of single sequences, and totals. Pure.
"""

from collections.abc import Iterator

from penstock.schemas.errors import Code
from penstock.schemas.tokens import Logprob
from penstock.workers.engines.base import Failure, Output, SequenceMeasurements, Started
from penstock.workers.engines.core.config import SequenceLimits, wants_scores
from penstock.workers.engines.core.kv_cache import KvCacheManager
from penstock.workers.engines.core.queue import HeldBlocks, Queue
from penstock.workers.engines.core.sequence import Sequence


class InflightPlans:
    """Steps may overlap: while one is computed, the next is planned. True while a plan is not committed.

    Attributes:
        made: plans so far, without empty ones; ``Sequence.step`` is the number of the last one that a sequence is in.
        committed: of these.
    """

    def __init__(self) -> None:
        self.made = 0
        self.committed = 0

    def __bool__(self) -> bool:
        return self.made > self.committed

    def uses(self, sequence: Sequence) -> bool:
        """Whether a plan in flight reads or writes the blocks of a sequence."""
        return sequence.step > self.committed

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether the plan in flight may end a sequence, or decides what the next step computes of it."""
        if sequence.length >= sequence.limit:
            return True
        if not sequence.lockstep or sequence.step <= self.committed:
            return False
        return sequence.length > len(sequence.tokens) or wants_scores(sequence)


class StepReport:
    """Events of sequences since the last step was committed.

    Attributes:
        preemptions, hit_tokens, prompt_tokens: totals, see ``EngineStats``.
    """

    def __init__(self) -> None:
        self.preemptions = 0
        self.hit_tokens = 0
        self.prompt_tokens = 0
        self._started: list[Started] = []
        self._failures: list[Failure] = []
        self._measured: list[SequenceMeasurements] = []

    def __bool__(self) -> bool:
        """Whether there is something that the next commit must return."""
        return bool(self._started or self._failures)

    def admitted(self, sequence: Sequence, cached: int) -> None:
        """A sequence was admitted with this many cached tokens; only its first admission is reported."""
        if sequence.started:
            return
        sequence.started = True
        sequence.cached = min(cached, sequence.prompt_len)
        self.hit_tokens += sequence.cached
        self.prompt_tokens += sequence.prompt_len
        self._started.append(Started(sequence.key, sequence.cached))

    def preempted(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._measured.append(SequenceMeasurements(sequence.key, {}, preemptions=1))

    def ended(self, sequence: Sequence, token: int, logprob: Logprob | None, limits: SequenceLimits) -> Output:
        """The last output of a sequence. If the pool is too small for it to continue, it fails as well."""
        if token in sequence.stops and len(sequence.tokens) > sequence.stoppable:
            return Output(sequence.key, token, "stop", logprob, token)
        if len(sequence.tokens) >= min(sequence.prompt_len + sequence.stop.max_tokens, limits.max_model_len):
            return Output(sequence.key, token, "length", logprob)
        # Its next token needs more blocks than there are, even if it had the pool to itself.
        text = f"prompt and output outgrew the worker: {limits.pool_limit}"
        self._failures.append(Failure(sequence.key, Code.out_of_blocks, text))
        return Output(sequence.key, token, "", logprob)

    def take(self) -> tuple[list[Started], list[Failure], list[SequenceMeasurements]]:
        """All events since the last call."""
        taken = self._started, self._failures, self._measured
        self._started, self._failures, self._measured = [], [], []
        return taken


class RunningSequences:
    """Sequences that have blocks.

    When no block is free, reservations that wait are taken back, then the newest sequence is preempted. While a step is
    in flight nothing is preempted: its blocks are in use.

    Attributes:
        sequences: in admission order.
        starved: the plan being made lacks a block. The next is made when no step is in flight.
        ending: number of sequences that have ended but are in a plan that is not committed.
    """

    def __init__(
        self, block_size: int, kv_cache: KvCacheManager, queue: Queue, held: HeldBlocks, inflight: InflightPlans,
        report: StepReport,
    ) -> None:  # fmt: skip
        self.sequences: list[Sequence] = []
        self.starved = False
        self.ending = 0
        self._block_size = block_size
        self._kv_cache = kv_cache
        self._queue = queue
        self._held = held
        self._inflight = inflight
        self._report = report
        self._admitted = 0

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def admit(self, sequence: Sequence, cached: int, named: int) -> None:
        """Add a sequence whose blocks are allocated.

        Args:
            cached: leading tokens whose KV is in the blocks already.
            named: leading blocks that have names.
        """
        sequence.computed, sequence.named = cached, named
        sequence.arrived = self._admitted
        self._admitted += 1
        self._report.admitted(sequence, cached)
        self.sequences.append(sequence)
        self._kv_cache.admit(sequence, cached)

    # -- growing ---------------------------------------------------------------------------------------------

    def allocate(self, sequence: Sequence, start: int) -> bool:
        """Allocate for the token at ``start``, the first of a block; False: not now."""
        if start == len(sequence.blocks) * self._block_size and not self._grow(sequence):
            return False
        return self.cover(sequence, start, 1) > 0

    def cover(self, sequence: Sequence, start: int, count: int) -> int:
        """Allocate window rows for some of ``count`` tokens, if need be by preempting newer sequences; 0: not now."""
        while not (covered := self._kv_cache.cover(sequence, start, count)):
            newest = self.sequences[-1]
            if newest is sequence:  # older ones run, and end
                return 0
            if self._inflight:
                self.starved = True
                return 0
            self.sequences.pop()
            self._preempt(newest)
        return covered

    def _grow(self, sequence: Sequence) -> bool:
        while not self._kv_cache.grow(sequence):
            if self._queue.reclaim():
                continue
            if self._inflight:
                self.starved = True
                return False
            newest = self.sequences.pop()  # if it is ``sequence`` itself, the rest of the pool is held for handoffs
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._free(sequence)
        sequence.computed = sequence.named = 0
        self._queue.add(sequence, first=True)
        self._report.preempted(sequence)

    # -- ending ----------------------------------------------------------------------------------------------

    def end(self, sequence: Sequence) -> None:
        """Free its blocks once no step in flight uses them. ``remove_ended`` removes it from ``sequences``."""
        if self._inflight.uses(sequence):
            sequence.ended = True
            self.ending += 1
        else:
            self._free(sequence)

    def free_ended(self, sequence: Sequence) -> None:
        """Free a sequence that ended in an earlier plan, if this was its last."""
        if not self._inflight.uses(sequence):
            self.ending -= 1
            self._free(sequence)

    def remove_ended(self) -> None:
        self.sequences = [sequence for sequence in self.sequences if sequence.blocks and not sequence.ended]

    def _free(self, sequence: Sequence) -> None:
        self._kv_cache.free(sequence, held=sequence.key in self._held)
