"""One simulated engine: continuous batching with chunked prefill, a prefix cache and preemption.

A pass computes at most ``max_batched_tokens``. Running sequences come first, in the order of admission; then waiting
ones, as at a worker: tenants of a class share by weight. All tokens of a pass appear at its end. If a block cannot be
had, the newest running sequence is preempted: it releases its blocks and waits at the head of the queue.

Between two changes of the batch, decode passes differ only by the growing context. ``form`` therefore plans a run of
them at once, up to the next one that fills or takes a block or ends a sequence. The result is the same as pass by pass.

A decoding sequence is kept by the pass ("tick") in which it had no output yet: at tick t it has t - origin tokens of
output. So a pass costs nothing for sequences that neither need a block nor end.

The two polynomials are the timing model of the mock engine of NVIDIA Dynamo 1.6.1 (vLLM-like, "polynomial").
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.infra.process.class_queue import StartQueue, StartShare
from penstock.measure.simulation.cache import BlockCache, LowerChanges, StoredRun


class PassTimes(Protocol):
    """What passes take in other engines than the mock's, in ns."""

    def prefill_ns(self, sequences: int, mean_tokens: int, mean_before: int) -> int:
        """As the function of this name."""

    def decode_run_ns(self, context_tokens: int, growth: int, passes: int) -> list[int]:
        """``decode_ns`` of successive passes, each with ``growth`` more tokens of context than the one before."""


def prefill_ns(sequences: int, mean_tokens: int, mean_before: int) -> int:
    """The prefill part of a pass.

    Args:
        sequences: that compute prompt tokens in this pass.
        mean_tokens: mean over them of the prompt tokens computed before and in this pass, rounded down.
        mean_before: mean of the prompt tokens computed or cached before, rounded down.
    """
    tokens = sequences * max(0, mean_tokens - mean_before)
    if tokens == 0:
        return 0
    return round((4.209989e-7 * tokens * tokens + 1.518344e-2 * tokens + 16.50142) * 1e6)


def decode_ns(context_tokens: int, pool_tokens: int) -> int:
    """The decode part of a pass; ``context_tokens`` is the sum over the decoding sequences."""
    used = min(1.0, context_tokens / pool_tokens)
    return round(max(1.0, -25.74 * used * used + 54.01 * used + 5.74) * 1e6)


class MockTimes:
    """The mock's, for a pool of this many tokens."""

    def __init__(self, pool_tokens: int) -> None:
        self._pool_tokens = pool_tokens

    def prefill_ns(self, sequences: int, mean_tokens: int, mean_before: int) -> int:
        return prefill_ns(sequences, mean_tokens, mean_before)

    def decode_run_ns(self, context_tokens: int, growth: int, passes: int) -> list[int]:
        return [decode_ns(context_tokens + growth * n, self._pool_tokens) for n in range(passes)]


TOKEN_NS = 20_600  # that a prompt's token takes in a whole pass of the mock's
MAX_SEQUENCES = 256
MAX_BATCHED_TOKENS = 8192
_RUN = 512  # passes planned at once at most
_GENERATED = 1 << 59  # keys of blocks with generated tokens lie above; the router keeps 60 bits of a key


@dataclass(slots=True, eq=False)
class EngineSequence:
    """A request at one engine.

    Attributes:
        index: of the request; no two of an engine have the same.
        keys: of the full blocks of the prompt.
        handed: another engine computed the prompt. Prompt tokens computed here cost no time then, and all its tokens
            come from decode.
        generated: tokens of output, while it is not decoding.
        cached_tokens: of the prompt, at the first admission.
    """

    index: int
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[int]
    handed: bool = False
    order: int = 0  # of handoff
    share: StartShare = field(default_factory=StartShare)
    generated: int = 0
    computed: int = 0
    origin: int = 0
    running: bool = False
    admissions: int = 0
    cached_tokens: int = 0
    blocks: list[int] = field(default_factory=list)  # copies of full blocks
    private: int = 0  # blocks that are not full

    @property
    def known_tokens(self) -> int:
        return self.prompt_tokens + self.generated

    def key(self, block: int) -> int:
        return self.keys[block] if block < len(self.keys) else _GENERATED | self.index << 24 | block

    def keys_between(self, start: int, end: int) -> Sequence[int]:
        full = len(self.keys)
        if end <= full:
            return self.keys[start:end]
        generated = [_GENERATED | self.index << 24 | block for block in range(max(start, full), end)]
        return [*self.keys[start:full], *generated]


@dataclass(slots=True)
class PassOutcome:
    """The result of a run of passes. ``first`` are the sequences that got their first token."""

    first: list[EngineSequence]
    ended: list[EngineSequence]
    rejected: list[EngineSequence]
    stored: list[StoredRun]
    removed: list[int]
    lower: list[LowerChanges]


def _is_new(sequence: EngineSequence) -> bool:
    """Whether it was neither preempted nor taken over with its prompt."""
    return not sequence.admissions and not sequence.handed


class SimulatedEngine:
    """
    Args:
        holds: blocks of ended sequences stay in use until ``release`` (a prefill worker).
        slowness: factor on the duration of every pass; 2 is half the speed.
        decode_slowness: a further factor on its decode part.
        times: of its passes; None: the mock's.
        lower: as in ``BlockCache``.
        lower_ns: to bring a block back from each lower tier; the pass takes so much longer.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int = 64,
        *,
        max_sequences: int = MAX_SEQUENCES,
        max_batched_tokens: int = MAX_BATCHED_TOKENS,
        holds: bool = False,
        slowness: float = 1.0,
        decode_slowness: float = 1.0,
        times: PassTimes | None = None,
        lower: Sequence[int] = (),
        lower_ns: Sequence[int] = (),
    ) -> None:
        self.cache = BlockCache(blocks, lower)
        self._lower_ns = [each for each, size in zip(lower_ns, lower, strict=True) if size]
        self.block_size = block_size
        self.preemptions = 0
        self._max_sequences = max_sequences
        self._max_batched_tokens = max_batched_tokens
        self._holds = holds
        self._slowness = slowness
        self._decode_slowness = slowness * decode_slowness
        self._times = times or MockTimes(blocks * block_size)
        self._waiting: deque[EngineSequence] = deque()
        self._fair: StartQueue[EngineSequence] | None = (
            None  # of these, those that are new, once there is a second tenant or class
        )
        self._handing: deque[tuple[EngineSequence, Callable[[], None]]] = deque()
        self._decoding: list[EngineSequence] = []  # in the order of admission
        self._partial: EngineSequence | None = None  # the newest running one, if its context is not computed yet
        self._phases: list[list[EngineSequence]] = [[] for _ in range(block_size)]
        self._context = 0  # sum over the decoding ones of prompt tokens - origin
        self._tick = 0
        self._end_tick = 0  # the earliest tick in which a decoding one ends; 0: unknown
        self._blocked = False  # the head of the queue was found not to fit, and nothing was released since
        self._first: list[EngineSequence] = []
        self._rejected: list[EngineSequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._decoding or self._partial)

    @property
    def running(self) -> int:
        return len(self._decoding) + (self._partial is not None)

    @property
    def takes_more(self) -> bool:
        """Whether a sequence that comes now could join the next pass, so that a planned run must end early."""
        return not self._blocked and self.running < self._max_sequences

    @property
    def takes_prompts(self) -> bool:
        """Whether a computed prompt that comes now could be taken over after the present pass."""
        return self.running < self._max_sequences

    def add(self, sequence: EngineSequence) -> None:
        """Queue a sequence."""
        if self._fair is not None:
            self._share(self._fair, sequence)
        elif self._waiting and self._waiting[-1].share != sequence.share:
            self._fair = StartQueue()
            for each in (*self._waiting, sequence):
                if _is_new(each):
                    self._share(self._fair, each)
        self._waiting.append(sequence)

    def _share(self, fair: StartQueue[EngineSequence], sequence: EngineSequence) -> None:
        size = sequence.known_tokens - self._lookup(sequence)[0] * self.block_size
        fair.push(sequence.index, sequence, sequence.share, size)

    def _leave_queue(self, sequence: EngineSequence) -> None:
        self._waiting.remove(sequence)
        if self._fair is not None and _is_new(sequence):
            self._fair.take(sequence.index)
        if not self._waiting:
            self._fair = None

    def bring(self, keys: Sequence[int]) -> int:
        """Blocks of these keys have been read from another engine; returns how many were new, 0: there is no room."""
        held, _active = self.cache.match(keys)
        blocks = self.cache.take(keys[:held], len(keys) - held)
        if blocks is None:
            return 0
        self.cache.release(blocks + self.cache.publish(keys[held:], blocks), 0)
        return len(keys) - held

    def hand_off(self, sequence: EngineSequence, taken: Callable[[], None]) -> None:
        """Queue a computed prompt; ``taken`` is called once its blocks are here. See ``take_handed``."""
        sequence.handed = True
        self._handing.append((sequence, taken))
        self._blocked = False  # prompts that were taken over go before what the queue's head waits for

    def take_handed(self) -> None:
        """Between passes: take over the prompts that fit, first come, first served."""
        cache = self.cache
        while self._handing and self.running < self._max_sequences:
            sequence, taken = self._handing[0]
            held, _active = cache.match(sequence.keys)
            prefix = sequence.keys[:held]
            blocks = cache.take(prefix, -(-sequence.prompt_tokens // self.block_size) - held)
            if blocks is None:
                return
            self._handing.popleft()
            sequence.blocks = blocks + cache.publish(sequence.keys[held:], blocks)
            sequence.private = -(-sequence.prompt_tokens // self.block_size) - len(sequence.blocks)
            sequence.computed = sequence.prompt_tokens
            taken()
            at = next((n for n, other in enumerate(self._waiting) if other.order > sequence.order), len(self._waiting))
            self._waiting.insert(at, sequence)
            self._blocked = False

    def release(self, sequence: EngineSequence) -> None:
        """Release the blocks of a sequence."""
        self.cache.release(sequence.blocks, sequence.private)
        sequence.blocks, sequence.private = [], 0
        self._blocked = False

    def form(self) -> list[int]:
        """Form the next pass, or a run of equal ones: their durations in ns. Empty: there is nothing to do now."""
        preempted = self._grow()
        decoding = len(self._decoding)
        budget = self._max_batched_tokens - decoding
        work = _PrefillWork()
        context = self._context + decoding * self._tick
        tokens = 0
        if self._partial is not None:
            partial, self._partial = self._partial, None
            tokens = self._compute(partial, 0, budget, work)
            if not tokens:
                self._partial = partial
                self._preempt_newest()
                preempted = True
        admitted = not preempted and self._admit(budget - tokens, work)
        for sequence in self._decoding[decoding:]:
            if sequence.handed or sequence.generated:
                context += sequence.known_tokens
                decoding += 1
        if not (self._decoding or work.sequences):
            if tokens or admitted or preempted:
                return self.form()  # tokens computed again after a preemption cost no time alone
            return [0] if self._rejected else []
        duration = _scaled(work.duration_ns(self._times), self._slowness) + work.brought_ns
        if not decoding:
            return [duration]
        if admitted or preempted or tokens or (self._waiting and self.takes_more):
            self._blocked = False
            return [duration + _scaled(self._times.decode_run_ns(context, decoding, 1)[0], self._decode_slowness)]
        durations = self._times.decode_run_ns(context, decoding, self._equal_passes())
        slowness = self._decode_slowness
        return durations if slowness == 1.0 else [_scaled(each, slowness) for each in durations]

    def finish(self, passes: int) -> PassOutcome:
        """Apply the first ``passes`` of the run that ``form`` returned."""
        self._tick += passes
        ended: list[EngineSequence] = []
        if self._decoding:
            if not self._end_tick:
                self._end_tick = min(each.origin + each.output_tokens for each in self._decoding)
            if self._tick >= self._end_tick:
                ended = [each for each in self._decoding if self._tick >= each.origin + each.output_tokens]
                for sequence in ended:
                    self._leave(sequence)
                    sequence.generated = sequence.output_tokens
                    if not self._holds:
                        self.release(sequence)
                self._decoding = [each for each in self._decoding if each.running]
        stored, removed = self.cache.drain()
        lower = self.cache.drain_lower(stored)
        outcome = PassOutcome(self._first, ended, self._rejected, stored, removed, lower)
        self._first, self._rejected = [], []
        return outcome

    def _grow(self) -> bool:
        """Make room for one more token of every decoding sequence; True: a sequence was preempted."""
        tick, size = self._tick, self.block_size
        before = self.preemptions
        for sequence in self._phases[(1 - tick) % size][:]:
            while sequence.running and self.cache.take((), 1) is None:
                self._preempt_newest()
            if sequence.running:
                sequence.private += 1
        for sequence in self._phases[-tick % size]:
            block = (sequence.prompt_tokens + tick - sequence.origin) // size - 1
            sequence.blocks += self.cache.publish((sequence.key(block),), sequence.blocks)
            sequence.private -= 1
        return self.preemptions != before

    def _compute(
        self, sequence: EngineSequence, cached_blocks: int, budget: int, work: "_PrefillWork", brought: int = 0
    ) -> int:
        """Schedule the next chunk of a context, after cached blocks; its tokens, 0: there are no blocks for it.

        Args:
            brought: further blocks that come from lower tiers.
        """
        size, cache = self.block_size, self.cache
        before = sequence.computed + (cached_blocks + brought) * size
        after = min(sequence.known_tokens, before + budget)
        have = len(sequence.blocks) + sequence.private + cached_blocks
        taken = cache.take(sequence.keys_between(0, cached_blocks), max(0, -(-after // size) - have))
        if taken is None:
            return 0
        sequence.blocks += taken
        full = sequence.keys_between(len(sequence.blocks), after // size)
        sequence.blocks += cache.publish(full, sequence.blocks)
        sequence.private = -(-after // size) - len(sequence.blocks)
        sequence.computed = after
        if not sequence.handed:
            work.add(min(before, sequence.prompt_tokens), min(after, sequence.prompt_tokens))
        if after < sequence.known_tokens:
            self._partial = sequence
            sequence.running = True
        else:
            self._join(sequence)
        return after - before

    def _admit(self, budget: int, work: "_PrefillWork") -> bool:
        """Admit waiting sequences while there is room; True: at least one."""
        admitted = False
        while self._waiting and not self._blocked and self.running < self._max_sequences:
            sequence = self._next_waiting()
            if sequence is None:
                break
            if sequence.handed and sequence.computed:
                self._leave_queue(sequence)
                self._join(sequence)
                admitted = True
                continue
            known_blocks = -(-sequence.known_tokens // self.block_size)
            if known_blocks > self.cache.capacity and not sequence.admissions and not sequence.handed:
                self._leave_queue(sequence)
                self._rejected.append(sequence)
                continue
            cached, active = self._lookup(sequence)
            if known_blocks - active > self.cache.capacity - self.cache.active:
                self._blocked = True
                break
            limit = (sequence.known_tokens - 1) // self.block_size
            lower = self.cache.match_lower(sequence.keys_between(cached, limit)) if self._lower_ns else []
            tokens = self._compute(sequence, cached, budget, work, sum(lower)) if budget > 0 else 0
            if not tokens:
                break
            work.brought_ns += sum(count * each for count, each in zip(lower, self._lower_ns, strict=True))
            cached += sum(lower)
            self._leave_queue(sequence)
            budget -= tokens
            admitted = True
            if not sequence.admissions and not sequence.handed:
                sequence.cached_tokens = cached * self.block_size
            sequence.admissions += 1
        return admitted

    def _next_waiting(self) -> EngineSequence | None:
        """The sequence to admit next. While prompts wait to be taken over, preempted sequences are not recomputed."""
        if self._handing:
            return next((each for each in self._waiting if each.handed and each.computed), None)
        head = self._waiting[0]
        if self._fair is None or not _is_new(head):
            return head
        return self._fair.first() or head

    def _lookup(self, sequence: EngineSequence) -> tuple[int, int]:
        """Cached blocks of a sequence's context, never all of it, and how many of these are in use."""
        known_tokens, size = sequence.known_tokens, self.block_size
        keys = sequence.keys
        if sequence.generated:
            keys = sequence.keys_between(0, known_tokens // size)
        held, active = self.cache.match(keys)
        limit = (known_tokens - 1) // size
        return min(held, limit), min(active, limit)

    def _join(self, sequence: EngineSequence) -> None:
        """Add a sequence whose context is computed: it gets a token at the end of this pass."""
        sequence.running = True
        sequence.origin = self._tick - sequence.generated
        if not sequence.generated:
            self._first.append(sequence)
        self._decoding.append(sequence)
        self._phases[(sequence.prompt_tokens - sequence.origin) % self.block_size].append(sequence)
        self._context += sequence.prompt_tokens - sequence.origin
        self._end_tick = 0

    def _leave(self, sequence: EngineSequence) -> None:
        sequence.running = False
        self._phases[(sequence.prompt_tokens - sequence.origin) % self.block_size].remove(sequence)
        self._context -= sequence.prompt_tokens - sequence.origin
        self._end_tick = 0

    def _preempt_newest(self) -> None:
        if self._partial is not None:
            sequence, self._partial = self._partial, None
            sequence.running = False
        else:
            sequence = self._decoding.pop()
            sequence.generated = self._tick - sequence.origin
            self._leave(sequence)
        self.preemptions += 1
        sequence.computed = 0
        self.release(sequence)
        self._waiting.appendleft(sequence)

    def _equal_passes(self) -> int:
        """The number of passes from now on that neither take nor fill a block, with no end before the last."""
        if not self._end_tick:
            self._end_tick = min(each.origin + each.output_tokens for each in self._decoding)
        phases, size, tick = self._phases, self.block_size, self._tick
        limit = min(_RUN, self._end_tick - tick)
        passes = 1
        while passes < limit and not phases[-(tick + passes) % size] and not phases[(1 - tick - passes) % size]:
            passes += 1
        return passes


@dataclass(slots=True)
class _PrefillWork:
    """Prompt tokens of one pass."""

    sequences: int = 0
    before: int = 0
    total: int = 0
    brought_ns: int = 0  # for blocks from lower tiers

    def add(self, before: int, after: int) -> None:
        """A sequence computes the prompt tokens from ``before`` to ``after``."""
        if after > before:
            self.sequences += 1
            self.before += before
            self.total += after

    def duration_ns(self, times: PassTimes) -> int:
        if not self.sequences:
            return 0
        return times.prefill_ns(self.sequences, self.total // self.sequences, self.before // self.sequences)


def _scaled(duration_ns: int, factor: float) -> int:
    return duration_ns if factor == 1.0 else round(duration_ns * factor)
