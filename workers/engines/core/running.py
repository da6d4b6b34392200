"""The running sequences: their limits, how their blocks grow, which one is preempted for that, and when they are freed.

Pure. With them: the plans that were made and not yet committed (``InflightPlans``), what is reported of sequences
besides tokens (``StepReport``), their KV (``KvCacheManager``), and the names (digests) of their blocks, under which the
prefix cache finds them again.

A sequence may ask for log-probabilities of its prompt, from position ``score`` on. Each scored token is a row of logits
as wide as the vocabulary, so their number per step is bounded (``PromptScoring``).
"""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import msgspec

from penstock.schemas.block_hashes import chain, extend, split
from penstock.schemas.errors import Code
from penstock.schemas.tokens import Logprob
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.core.blocks import BlockManager, HostCache
from penstock.workers.engines.core.queue import PinnedBlocks, Queue
from penstock.workers.engines.core.sequence import ScheduledSequence, Sequence
from penstock.workers.engines.core.windows import WindowRows
from penstock.workers.engines.engine_protocol import (
    Failure,
    Output,
    RequestError,
    Scored,
    SequenceMeasurements,
    SequenceRequest,
    Started,
    check_length,
)

MAX_SCORED_TOKENS = 512  # per step


def wants_scores(sequence: Sequence) -> bool:
    """Whether prompt tokens remain to be scored."""
    return sequence.score < sequence.prompt_len


class PromptScoring:
    """The sequences to be scored in the step that is being planned.

    Args:
        max_tokens: prompt tokens per step of sequences whose prompts are scored.
    """

    def __init__(self, max_tokens: int = MAX_SCORED_TOKENS) -> None:
        self.max_tokens = max_tokens
        self.sequences: list[ScheduledSequence] = []

    def begin(self) -> None:
        """Start planning a step; those of the last one stay with their plan."""
        self.sequences = []

    def limit(self, sequence: Sequence, count: int) -> int:
        """How many of ``count`` tokens may be computed in this step; 0: wait for the next."""
        if not wants_scores(sequence):
            return count
        return min(count, self.max_tokens - sum(scheduled.count for scheduled in self.sequences))

    def add(self, scheduled: ScheduledSequence) -> None:
        if wants_scores(scheduled.sequence):
            self.sequences.append(scheduled)


def collect(sequences: Seq[ScheduledSequence]) -> list[Scored]:
    """Take the scores that the executor has stored in the sequences of a step."""
    scores = []
    for scheduled in sequences:
        sequence = scheduled.sequence
        if sequence.scores:
            scores.append(Scored(sequence.key, sequence.score, sequence.scores))
            sequence.score += len(sequence.scores)
            sequence.scores = []
    return scores


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        block_size: tokens per KV block.
        max_running: sequences that run at once.
        max_batched_tokens: tokens computed per step, prompt and decode.
        max_model_len: prompt + output of one sequence, tokens.
        eos_token_ids: end a sequence, unless it ignores them.
        max_scored_tokens: prompt tokens per step of sequences whose prompts are scored.
        mixed_chunk_tokens: prompt tokens per step in which sequences decode, too; 0: no limit of their own.
        no_evict: admit a sequence only if all blocks that it may need are available. Sequences with a reservation are
            exempt: it was made without knowing their output.

    Raises:
        ValueError: a size is below 1.
    """

    block_size: int
    max_running: int
    max_batched_tokens: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    max_scored_tokens: int = MAX_SCORED_TOKENS
    mixed_chunk_tokens: int = 0
    no_evict: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "max_running", "max_batched_tokens", "max_model_len", "max_scored_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


class SequenceLimits:
    """How long a sequence may become on one engine.

    Args:
        total_blocks: of the KV pool.
    """

    def __init__(self, config: SchedulerConfig, total_blocks: int) -> None:
        self.block_size = config.block_size
        self.max_model_len = config.max_model_len
        self.eos = frozenset(config.eos_token_ids)
        self.pool_tokens = total_blocks * config.block_size
        self.pool_limit = (
            f"this worker's KV pool holds {self.pool_tokens} tokens ({total_blocks} blocks of {config.block_size})"
        )

    def check(self, request: SequenceRequest, prompt_len: int, known: int) -> None:
        """
        Args:
            known: tokens of the prompt and of earlier attempts.

        Raises:
            RequestError: it can never run here; the message names the limit.
        """
        generated, max_tokens = known - prompt_len, request.stop.max_tokens
        check_length(prompt_len, generated, max_tokens=max_tokens, max_model_len=self.max_model_len)
        if known >= self.pool_tokens:
            raise RequestError(
                Code.out_of_blocks, f"{known} tokens leave no room for a new one: {self.pool_limit}, output included"
            )


def block_digests(request: SequenceRequest, prompt: "array[int]", tokens: list[int], size: int) -> list[bytes]:
    """Names of all full blocks of ``tokens``; the prompt's own are taken from the request if it has them."""
    digests = list(request.digests)
    if len(digests) != len(prompt) // size:  # none given, or of another block size
        digests = split(chain(pack_tokens(prompt), size, request.root, request.extra))
    if len(tokens) // size > len(digests):
        parent = digests[-1] if digests else request.root
        done = len(digests)  # the prompt's last block, not full, may end with a medium
        extra = {block - done: media for block, media in request.extra.items() if block >= done}
        digests += split(chain(pack_tokens(tokens[done * size :]), size, parent, extra))
    return digests


def name_blocks(blocks: BlockManager, sequence: Sequence, computed: int, size: int, *, leaving: bool = False) -> None:
    """Enter a sequence's complete blocks, those of ``computed`` leading tokens, into the prefix cache.

    Args:
        leaving: see ``BlockManager.name``.
    """
    full = computed // size
    if full <= sequence.named:
        return
    digests = sequence.digests
    while len(digests) < full:
        done = len(digests)
        parent = digests[-1] if digests else sequence.root
        tokens = pack_tokens(sequence.tokens[done * size : (done + 1) * size])
        digests.append(extend(parent, tokens, sequence.extra.get(done, b"")))
    before = sequence.named
    sequence.named = blocks.name(sequence.blocks, digests, before, full, leaving=leaving)
    if sequence.no_store:
        blocks.memory_only.update(sequence.blocks[before : sequence.named])


class KvCacheManager:
    """Allocates blocks and rows for sequences as they grow, names full blocks, frees all at the end. Never preempts.

    Args:
        windows: rows of the sliding-window layers; None: they have no pool of their own.
        fair: no sequence gets more rows than it needs to decode.
    """

    def __init__(self, blocks: BlockManager, block_size: int, windows: WindowRows | None, *, fair: bool) -> None:
        self.blocks = blocks
        self.windows = windows
        self._block_size = block_size
        self._fair = fair

    @property
    def hosts(self) -> list[HostCache]:
        """The host caches of the blocks and of the rows of sliding-window layers, as far as there are any."""
        behind = self.blocks.host, None if self.windows is None else self.windows.host
        return [host for host in behind if host is not None]

    @property
    def busy(self) -> bool:
        """Whether files are written or read."""
        return self.blocks.host is not None and any(host.busy for host in self.hosts)

    @property
    def pool(self) -> BlockManager | WindowRows:
        """The pool that limits how many tokens are held."""
        return self.windows if self.windows is not None and self.windows.only else self.blocks

    def admit(self, sequence: Sequence, computed: int) -> None:
        """A sequence starts after ``computed`` cached tokens; its blocks are allocated."""
        if self.windows is not None:
            self.windows.admit(sequence, computed)

    def grow(self, sequence: Sequence) -> bool:
        """Allocate one more block; False: all are held."""
        return self.blocks.grow(sequence.blocks)

    def cover(self, sequence: Sequence, start: int, count: int) -> int:
        """Allocate rows for as many of ``count`` tokens from ``start`` on as possible; returns how many.

        Without ``windows`` that is all of them.
        """
        if self.windows is None:
            return count
        covered = self.windows.fit(sequence, start, count, fair=self._fair)
        if covered:
            self.windows.cover(sequence, start + covered)
        return covered

    def draft_room(self, scheduled: ScheduledSequence, wanted: int) -> int:
        """Allocate for up to ``wanted`` proposed tokens after a planned one; returns for how many."""
        sequence, start = scheduled.sequence, scheduled.start
        if scheduled.count != 1 or not scheduled.samples or sequence.lockstep:
            return 0
        wanted = min(wanted, sequence.limit - start - 2)  # one more token is drawn than proposed
        size, blocks = self._block_size, sequence.blocks
        while wanted > 0 and start + 1 + wanted > len(blocks) * size and self.blocks.grow(blocks):
            pass
        room = min(wanted, len(blocks) * size - start - 1)
        return max(self.cover(sequence, start, 1 + room) - 1, 0) if room > 0 else 0

    def cache_blocks(self, sequence: Sequence, computed: int) -> None:
        """Enter the full blocks of ``computed`` leading tokens into the prefix cache."""
        if self.blocks.prefix_cache:
            name_blocks(self.blocks, sequence, computed, self._block_size)

    def free(self, sequence: Sequence, *, pinned: bool) -> None:
        """Free the blocks of a sequence. Computed blocks stay in the prefix cache while there is room.

        Args:
            pinned: another table of the same blocks stays in use.
        """
        if self.blocks.prefix_cache:
            name_blocks(self.blocks, sequence, sequence.computed, self._block_size, leaving=not pinned)
        if self.windows is not None:
            self.windows.release(sequence)
        self.blocks.release(sequence.blocks)
        sequence.blocks = []


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
        self, block_size: int, kv_cache: KvCacheManager, queue: Queue, pinned: PinnedBlocks, inflight: InflightPlans,
        report: StepReport,
    ) -> None:  # fmt: skip
        self.sequences: list[Sequence] = []
        self.starved = False
        self.ending = 0
        self._block_size = block_size
        self._kv_cache = kv_cache
        self._queue = queue
        self._pinned = pinned
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
            if newest is sequence and len(self.sequences) > 1:  # older ones run, and end
                return 0
            if self._queue.reclaim():
                continue
            if self._inflight:
                self.starved = True
                return 0
            self._preempt(self.sequences.pop())
            if newest is sequence:  # the rest of the rows are held for handoffs
                return 0
        return covered

    def _grow(self, sequence: Sequence) -> bool:
        while not self._kv_cache.grow(sequence):
            if self._queue.reclaim():
                continue
            if self._inflight:
                self.starved = True
                return False
            newest = self.sequences.pop()  # if it is ``sequence`` itself, the rest of the pool is pinned for handoffs
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def preempt_all(self) -> None:
        """While no step is in flight."""
        while self.sequences:
            self._preempt(self.sequences.pop())

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
        self._queue.adapters.release(sequence)
        self._kv_cache.free(sequence, pinned=sequence.key in self._pinned)
