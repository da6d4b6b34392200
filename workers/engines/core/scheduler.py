"""Which tokens the next step computes, and which sequences it ends. Pure: no clock, no device, no threads.

Continuous batching with chunked prefill: running sequences come first, in admission order, then waiting ones, in the
order of ``queue``, within a budget of tokens per step. A sequence gets blocks for all its known tokens when it is
admitted, then one at a time. When no block is free, the newest running sequence is preempted: its blocks are freed and
it is requeued at the front with the tokens that it has generated, to be computed again (mostly from the prefix cache).
With ``no_evict``, a sequence waits until its longest output fits beside those of all running sequences, and is never
preempted.

``queue`` decides which waiting sequence is next, ``requests`` validates new ones, ``running`` allocates blocks and
preempts, ``inflight`` says what must wait for steps in flight, ``scoring`` plans prompt log-probabilities, ``drafts``
accepts proposed tokens, ``reservations`` keeps the blocks of handoffs, and ``report`` collects what a step reports
besides tokens.
"""

from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from itertools import islice
from typing import TYPE_CHECKING

from penstock.schemas.block_hashes import chain, split
from penstock.schemas.errors import Code
from penstock.schemas.requests import Sampling
from penstock.schemas.tokens import Logprob
from penstock.schemas.wire import pack_tokens
from penstock.workers.engines.core.blocks import BlockManager
from penstock.workers.engines.core.drafts import DraftCounts
from penstock.workers.engines.core.queue import AdapterSlots, PinnedBlocks, Queue, Reservations
from penstock.workers.engines.core.running import (
    InflightPlans,
    KvCacheManager,
    PromptScoring,
    RunningSequences,
    SchedulerConfig,
    SequenceLimits,
    StepReport,
    block_digests,
    collect,
    name_blocks,
)
from penstock.workers.engines.core.sequence import LoadedAdapter, Sampled, ScheduledSequence, Sequence
from penstock.workers.engines.core.windows import WindowRows
from penstock.workers.engines.engine_protocol import Output, RequestError, SequenceRequest, StepResult

if TYPE_CHECKING:
    from penstock.workers.engines.constraints.token_mask import Matcher
    from penstock.workers.engines.logits.registry import Chain

# A step of prompts that are handed off takes no further one once it has this many tokens. More do not compute faster
# (an H200 computes 39 tokens a millisecond of an 8B model in steps of 500, and 41 in steps of 4,000), but all wait for
# the last one.
ENOUGH_HANDED_OFF_TOKENS = 1024
# Prompt tokens that a decode worker computes in a step beside answers, which then takes 30 instead of 5.7 ms (8B,
# H200). With 512 it takes 18 ms, but twice as many tokens of answers wait for such steps.
DECODE_ROLE_CHUNK_TOKENS = 1024


def new_sequence(
    request: SequenceRequest,
    limits: SequenceLimits,
    processors: "Chain | None" = None,
    constraint: "Matcher | None" = None,
    adapter: LoadedAdapter | None = None,
    *,
    prefix_cache: bool = True,
) -> Sequence:
    """
    Args:
        processors: of its logits.
        adapter: as ``request.adapter`` names it.
        constraint: on its output. It says where the output may end, so ``ignore_eos`` has no effect.
        prefix_cache: name the blocks.

    Raises:
        RequestError: it can never run here; the message names the limit.
    """
    prompt = _tokens(request.prompt)
    tokens = prompt.tolist()
    if request.generated:
        tokens += _tokens(request.generated)
    limits.check(request, len(prompt), len(tokens))
    stop = request.stop
    stops = frozenset() if stop.ignore_eos and constraint is None else limits.eos
    if stop.token_ids:
        stops = stops.union(stop.token_ids)
    return Sequence(
        key=request.key,
        tokens=tokens,
        prompt_len=len(prompt),
        sampling=request.sampling,
        stop=stop,
        choice=request.choice,
        digests=block_digests(request, prompt, tokens, limits.block_size) if prefix_cache else [],
        root=request.root,
        stops=stops,
        stoppable=len(prompt) + (stop.min_tokens if constraint is None else 0),
        limit=min(len(prompt) + stop.max_tokens, limits.max_model_len, limits.pool_tokens + 1),
        extra=request.extra,
        media=request.media,
        client_request_id=request.client_request_id,
        share=request.share,
        pin=request.pin,
        reservation=request.reservation,
        no_store=request.no_store,
        adapter=adapter,
        processors=processors,
        constraint=constraint,
        score=min(request.score or len(prompt), len(prompt)),
        length=len(tokens),
        lockstep=processors is not None or _penalised(request.sampling) or bool(request.score),
    )


def _penalised(sampling: Sampling) -> bool:
    s = sampling
    return s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0


def _tokens(tokens: Seq[int]) -> "array[int]":
    if isinstance(tokens, array) and tokens.typecode == "I":
        return tokens
    try:
        return array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise RequestError(Code.invalid_request, f"token ids are integers from 0 to 2**32 - 1: {error}") from None


class Scheduler:
    """Call ``schedule`` and ``commit`` in turn; ``submit`` and ``cancel`` may be called between such pairs.

    Steps may overlap: the next plan may be made before the last one is committed. It then includes tokens that are not
    known yet; a sequence that ends meanwhile keeps its blocks until its last plan is committed, and no sequence is
    preempted before that.

    Args:
        windows: rows of the sliding-window layers, if they have a pool of their own.
        adapters: the slots of LoRA adapters; None: there are none.

    Attributes:
        queue: sequences that wait.
        running: sequences that have blocks, in admission order.
        reservations: blocks for prompts that arrive from other workers.
        drafts: counts of proposed and accepted tokens.
        held: plan nothing; what is in flight may be committed.
        pinned: blocks of prompts that other workers fetch.
    """

    def __init__(
        self,
        blocks: BlockManager,
        config: SchedulerConfig,
        windows: WindowRows | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        block_size = config.block_size
        self.blocks = blocks
        self.kv_cache = KvCacheManager(blocks, block_size, windows, fair=config.no_evict)
        self.pinned = PinnedBlocks(blocks, block_size, windows)
        self.reservations = Reservations(
            blocks,
            self.pinned,
            lambda: len(self.running) + self.queue.head_claim(),
            windows,
            lambda: len(self.running) + self.queue.head_rows(),
        )
        self.queue = Queue(
            blocks, block_size, self.reservations, no_evict=config.no_evict, windows=windows, adapters=adapters
        )
        self.limits = SequenceLimits(config, blocks.total_blocks)
        self.max_batched_tokens = config.max_batched_tokens
        self.scoring = PromptScoring(config.max_scored_tokens)
        self.drafts = DraftCounts()
        self.report = StepReport()
        self._inflight = InflightPlans()
        self.running = RunningSequences(block_size, self.kv_cache, self.queue, self.pinned, self._inflight, self.report)
        self._block_size = block_size
        self._max_running = config.max_running
        self._mixed_chunk_tokens = config.mixed_chunk_tokens
        self._chunk_tokens = self.max_batched_tokens  # that the present step may still take
        self.held = False
        self.by_key: dict[object, Sequence] = {}

    # -- between steps ---------------------------------------------------------------------------------------

    def submit(
        self,
        request: SequenceRequest,
        processors: "Chain | None" = None,
        constraint: "Matcher | None" = None,
        adapter: LoadedAdapter | None = None,
    ) -> None:
        """Queue one sequence, with the processors of its logits, the constraint on its output, and its adapter.

        Raises:
            RequestError: it can never run here; the message names the limit.
        """
        if request.key in self.by_key:
            raise RequestError(Code.invalid_request, f"sequence {request.key!r} was submitted already")
        sequence = new_sequence(
            request, self.limits, processors, constraint, adapter, prefix_cache=self.blocks.prefix_cache
        )
        self.by_key[request.key] = sequence
        self.queue.add(sequence)
        self.queue.fetch(sequence)

    def cancel(self, key: object) -> bool:
        """Drop a sequence and free its blocks; False: unknown."""
        sequence = self.by_key.pop(key, None)
        if sequence is None:
            return False
        if sequence.blocks:
            self.running.sequences.remove(sequence)
            self.running.end(sequence)
        else:
            self.queue.remove(sequence)
        return True

    @property
    def blocked(self) -> bool:
        """Nothing runs, and sequences wait for blocks that are pinned for handoffs, or files are read or written."""
        waits = bool(self.queue and not self.held) or self.kv_cache.busy
        return waits and not self.running and not self.running.ending

    def has_work(self) -> bool:
        if self.by_key and not self.held:
            return True
        if self.kv_cache.busy:
            return True
        return bool(self._inflight or self.report or self.pinned.has_new or self.blocks.has_events)

    @property
    def settled(self) -> bool:
        """Whether the scheduler is held, and no plan is in flight."""
        return self.held and not self._inflight

    def reset(self, root_of: Callable[[object, int], bytes] | None = None) -> None:
        """Discard all computed KV and all block names. Running sequences compute it again, up to their last token.

        Args:
            root_of: the new parent of a sequence's first block, by its key and the number of its generated tokens;
                None: parents stay.
        """
        assert self.settled
        self.running.preempt_all()
        self.blocks.forget(files=root_of is not None)
        for sequence in self.by_key.values():
            self.queue.unreserve(sequence)
            if root_of is not None:
                sequence.root = root_of(sequence.key, sequence.output_len)
                if self.blocks.prefix_cache:
                    tokens = pack_tokens(sequence.tokens)
                    sequence.digests = split(chain(tokens, self._block_size, sequence.root, sequence.extra))

    # -- schedule --------------------------------------------------------------------------------------------

    def schedule(self) -> list[ScheduledSequence]:
        """The plan of the next step, in admission order. Blocks of each sequence are allocated."""
        plan: list[ScheduledSequence] = []
        self.scoring.begin()
        if self.held:
            return plan
        running, overlapped = self.running, bool(self._inflight)
        if overlapped and running.starved:
            return plan
        running.starved = False
        self._chunk_tokens = self.max_batched_tokens
        if self._mixed_chunk_tokens and any(each.length - each.computed == 1 for each in running.sequences):
            self._chunk_tokens = self._mixed_chunk_tokens
        budget = self._schedule_running(plan, self.max_batched_tokens, overlapped)
        if self.queue and budget and not running.starved:
            self._schedule_waiting(plan, budget)
        if plan:
            self._inflight.made += 1
        return plan

    def _schedule_running(self, plan: list[ScheduledSequence], budget: int, overlapped: bool) -> int:
        """Plan the running sequences. Returns the remaining ``budget`` (tokens)."""
        size, running = self._block_size, self.running
        number, must_wait = self._inflight.made + 1, self._inflight.must_wait
        for sequence in running.sequences:  # preemption removes from its end meanwhile
            if not budget or running.starved:
                break
            if overlapped and must_wait(sequence):
                continue
            start = sequence.computed
            if sequence.length - start == 1:
                if not start % size and not running.allocate(sequence, start):
                    continue
                plan.append(ScheduledSequence(sequence, start, 1, True))
                sequence.computed = start + 1
                sequence.length += 1
                sequence.step = number
                budget -= 1
            else:
                budget -= self._schedule_chunk(plan, sequence, budget)
        return budget

    def _schedule_waiting(self, plan: list[ScheduledSequence], budget: int) -> None:
        """Admit waiting sequences while there are tokens, slots and blocks for them.

        Without tokens for a chunk, only those with a reservation: the others would hold blocks and not be computed.
        """
        while self.queue and budget and len(self.running) < self._max_running and not self._enough(plan, budget):
            admission = self.queue.next(self.running.sequences, reserved=not self._chunk_tokens)
            if admission is None:  # until a running sequence or a handoff ends
                return
            sequence, cached, named = admission
            self.running.admit(sequence, cached, named)
            planned = self._schedule_chunk(plan, sequence, budget)
            if not planned and self.kv_cache.windows is not None:
                return
            budget -= planned

    def _enough(self, plan: list[ScheduledSequence], budget: int) -> bool:
        """Whether all of a plan is handed off after this step, and fills the device already."""
        planned = self.max_batched_tokens - budget
        return planned >= ENOUGH_HANDED_OFF_TOKENS and all(scheduled.sequence.pin for scheduled in plan)

    def _schedule_chunk(self, plan: list[ScheduledSequence], sequence: Sequence, budget: int) -> int:
        """Plan the next chunk of a sequence's known tokens; returns its size, 0 if it must wait."""
        start = sequence.computed
        count = sequence.length - start
        chunk = count > 1  # one token is what a prompt from another worker has left: it waits for no chunk of others
        now = self.scoring.limit(sequence, min(count, budget, self._chunk_tokens) if chunk else count)
        if now:
            now = self.running.cover(sequence, start, now)
        if now:
            scheduled = ScheduledSequence(sequence, start, now, now == count)
            plan.append(scheduled)
            if chunk:
                self._chunk_tokens -= now
            sequence.computed = start + now
            sequence.length += scheduled.samples
            sequence.step = self._inflight.made + 1
            self.scoring.add(scheduled)
        return now

    def unschedule(self, plan: list[ScheduledSequence], removed: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Remove sequences from the last plan and cancel them."""
        kept = self.postpone(plan, removed)
        for scheduled in removed:
            self.cancel(scheduled.sequence.key)
        return kept

    def postpone(self, plan: list[ScheduledSequence], removed: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Remove sequences from the last plan; they are in the next again."""
        left = set()
        for scheduled in removed:
            sequence = scheduled.sequence
            sequence.computed = scheduled.start
            sequence.length -= scheduled.samples
            sequence.step = self._inflight.made - 1  # it may be in the previous plan, which may be in flight
            left.add(id(sequence))
        kept = [scheduled for scheduled in plan if id(scheduled.sequence) not in left]
        if not kept:
            self._inflight.made -= 1
        return kept

    # -- commit ----------------------------------------------------------------------------------------------

    def commit(
        self, plan: list[ScheduledSequence], sampled: Seq[Sampled], scoring: list[ScheduledSequence] | None = None
    ) -> StepResult:
        """Apply the results of a computed plan.

        Args:
            plan: the oldest plan that was not committed.
            sampled: one per sequence with ``samples``, in plan order.
            scoring: ``scoring.sequences`` of this plan; None: the current ones.
        """
        outputs: list[Output] = []
        total, ended = 0, False
        draws = iter(sampled)
        size = self._block_size
        naming = self.blocks.prefix_cache
        ending = self.running.ending
        if plan:
            self._inflight.committed += 1
        for scheduled in plan:
            sequence, count = scheduled.sequence, scheduled.count
            total += count
            if ending and sequence.ended:
                if scheduled.samples:
                    next(draws)
                self.running.free_ended(sequence)
                continue
            if sequence.draft:
                ended |= self._commit_drafts(sequence, draws, outputs)
                continue
            computed = scheduled.start + count
            if naming and (count > 1 or not computed % size):
                name_blocks(self.blocks, sequence, computed, size)
            if not scheduled.samples:
                continue
            token, logprob = next(draws)
            tokens = sequence.tokens
            tokens.append(token)
            length = len(tokens)
            if length >= sequence.limit or (length > sequence.stoppable and token in sequence.stops):
                outputs.append(self._finish(sequence, token, logprob))
                ended = True
            else:
                outputs.append(Output(sequence.key, token, "", logprob))
        if ended:
            self.running.remove_ended()
        started, failures, measured = self.report.take()
        scoring = self.scoring.sequences if scoring is None else scoring
        scored = collect(scoring) if scoring else ()
        events = self.blocks.take_events()
        pinned = self.pinned.take_new()
        return StepResult(outputs, events, started, failures, total, pinned, scored, measured=measured)

    def _commit_drafts(self, sequence: Sequence, draws: Iterator[Sampled], outputs: list[Output]) -> bool:
        """Take in the drawn tokens up to the first that was not proposed; True: the sequence has ended."""
        drawn = list(islice(draws, 1 + len(sequence.draft)))
        sequence.computed = len(sequence.tokens) - 1
        for token, logprob in self.drafts.accept(sequence, drawn):
            sequence.tokens.append(token)
            sequence.computed += 1
            sequence.length = length = len(sequence.tokens)
            if length >= sequence.limit or (length > sequence.stoppable and token in sequence.stops):
                outputs.append(self._finish(sequence, token, logprob))
                return True
            outputs.append(Output(sequence.key, token, "", logprob))
        self.kv_cache.cache_blocks(sequence, sequence.computed)
        return False

    def _finish(self, sequence: Sequence, token: int, logprob: Logprob | None) -> Output:
        """End a sequence with its last token."""
        output = self.report.ended(sequence, token, logprob, self.limits)
        del self.by_key[sequence.key]
        if sequence.pin:
            self.pinned.pin(sequence)
        self.running.end(sequence)
        return output
