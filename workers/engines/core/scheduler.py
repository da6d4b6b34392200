"""Which tokens the next step computes, and which sequences it ends. Pure: no clock, no device, no threads.

Continuous batching with chunked prefill: running sequences come first, in admission order, then waiting ones, first
come first served, within a budget of tokens per step. A sequence gets blocks for all its known tokens when it is
admitted, then one at a time. When no block is free, the newest running sequence is preempted: its blocks are freed and
it is requeued at the front with the tokens that it has generated, to be computed again (mostly from the prefix cache).
With ``no_evict``, a sequence waits until its longest output fits beside those of all running sequences, and is never
preempted.

``queue`` decides which waiting sequence is next, ``requests`` validates new ones, ``scoring`` plans prompt
log-probabilities, ``reservations`` keeps the blocks of handoffs, and ``report`` collects what a step reports besides
tokens.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import islice
from typing import TYPE_CHECKING

from schemas.errors import Code
from schemas.tokens import Logprob
from workers.engines.base import EngineStats, Output, RequestError, SequenceRequest, StepResult
from workers.engines.core.blocks import BlockManager
from workers.engines.core.config import SchedulerConfig, SequenceLimits
from workers.engines.core.drafts import DraftCounts, accepted
from workers.engines.core.naming import name_blocks
from workers.engines.core.queue import Queue
from workers.engines.core.report import StepReport
from workers.engines.core.requests import new_sequence
from workers.engines.core.reservations import HeldBlocks, Reservations
from workers.engines.core.scoring import PromptScoring, collect, wants_scores
from workers.engines.core.sequence import Sampled, Sequence, Slot
from workers.engines.core.windows import WindowRows

if TYPE_CHECKING:
    from workers.engines.logits.apply import Chain

NO_HANDOFF = "KV in two pools or in host memory is not handed off; use --hybrid-kv-cache off --kv-offloading-size 0"

_tuple = tuple.__new__  # a named tuple's own __new__ costs twice as much, and these are made per token


class Scheduler:
    """Call ``schedule`` and ``commit`` in turn; between those pairs ``submit`` and ``cancel`` at will.

    Steps may overlap: the next plan may be made before the last one is committed. It then includes tokens that are not
    known yet; a sequence that ends meanwhile keeps its blocks until its last plan is committed, and no sequence is
    preempted before that.

    Args:
        windows: rows of the sliding-window layers, if they have a pool of their own. Handoffs are refused then.

    Attributes:
        running: in admission order.
        reservations: blocks for prompts that arrive from other workers.
        drafts: what was proposed to sequences, and accepted.
        held: blocks of prompts that other workers fetch.
    """

    def __init__(self, blocks: BlockManager, config: SchedulerConfig, windows: WindowRows | None = None) -> None:
        block_size = config.block_size
        self.blocks = blocks
        self.windows = windows
        self.running: list[Sequence] = []
        self.limits = SequenceLimits(config, blocks.total_blocks)
        self.reservations = Reservations(blocks, lambda: len(self.running) + self._queue.head_claim())
        self.held = HeldBlocks(blocks, block_size)
        self.scoring = PromptScoring(config.max_scored_tokens)
        self._queue = Queue(blocks, block_size, self.reservations, no_evict=config.no_evict, windows=windows)
        self._by_key: dict[object, Sequence] = {}
        self._block_size = block_size
        self._max_running = config.max_running
        self.max_batched_tokens = config.max_batched_tokens
        self._report = StepReport()
        self._no_evict = config.no_evict
        self._admitted = 0
        self._plans = 0  # plans made so far, without empty ones
        self._commits = 0
        self._ending = 0  # sequences that have ended but are in a plan that is not committed
        self.drafts = DraftCounts()
        self._starved = False  # the last plan lacked a block; the next is made when no step is in flight

    @property
    def hands_over(self) -> bool:
        """Whether other workers may write and read blocks: all KV of a block is in one pool, and only there."""
        return self.windows is None and self.blocks.host is None

    # -- between steps ---------------------------------------------------------------------------------------

    def submit(self, request: SequenceRequest, processors: "Chain | None" = None) -> None:
        """Queue one sequence, with the processors of its logits.

        Raises:
            RequestError: it can never run here; the message names the limit.
        """
        if request.key in self._by_key:
            raise RequestError(Code.invalid_request, f"sequence {request.key!r} was submitted already")
        if not self.hands_over and (request.hold or request.reservation is not None):
            raise RequestError(Code.unsupported, NO_HANDOFF)
        sequence = new_sequence(request, self.limits, processors, prefix_cache=self.blocks.prefix_cache)
        self._by_key[request.key] = sequence
        self._queue.add(sequence)

    def cancel(self, key: object) -> bool:
        """Drop a sequence and free its blocks; False: unknown."""
        sequence = self._by_key.pop(key, None)
        if sequence is None:
            return False
        if sequence.blocks:
            self.running.remove(sequence)
            self._end(sequence)
        else:
            self._queue.remove(sequence)
        return True

    @property
    def blocked(self) -> bool:
        """Sequences wait and none runs: all blocks are held for handoffs, which must end first."""
        return bool(self._queue) and not self.running and not self._ending

    def has_work(self) -> bool:
        if self._plans > self._commits:
            return True
        return bool(self._by_key or self._report or self.held.has_new or self.blocks.has_events)

    def stats(self) -> EngineStats:
        report = self._report
        pool = self.windows if self.windows is not None and self.windows.only else self.blocks
        return EngineStats(
            running=len(self.running),
            waiting=len(self._queue),
            used_blocks=pool.used_blocks,
            cached_blocks=pool.cached_blocks,
            free_blocks=pool.free_blocks,
            pinned_blocks=self.reservations.reserved_blocks + self.held.block_count,
            preemptions=report.preemptions,
            hit_tokens=report.hit_tokens,
            prompt_tokens=report.prompt_tokens,
            drafts=self.drafts.drafts,
            draft_tokens=self.drafts.proposed,
            host_blocks=0 if self.blocks.host is None else self.blocks.host.used_slots,
            loaded_blocks=0 if self.blocks.host is None else self.blocks.host.loaded_blocks,
            accepted_tokens=self.drafts.accepted,
        )

    # -- schedule --------------------------------------------------------------------------------------------

    def schedule(self) -> list[Slot]:
        """The plan of the next step, in admission order. Blocks of every slot are allocated."""
        plan: list[Slot] = []
        budget = self.max_batched_tokens
        size = self._block_size
        number = self._plans + 1
        overlapped = self._plans > self._commits
        self.scoring.begin()
        if overlapped and self._starved:
            return plan
        self._starved = False
        for sequence in self.running:  # preemption removes from its end meanwhile
            if not budget or self._starved:
                break
            if overlapped and self._must_wait(sequence):
                continue
            start = sequence.computed
            count = sequence.length - start
            if count == 1:
                if not start % size and not self._allocate(sequence, start):
                    continue
                plan.append(_tuple(Slot, (sequence, start, 1, True)))
                sequence.computed = start + 1
                sequence.length += 1
                sequence.step = number
                budget -= 1
            else:
                budget -= self._plan_chunk(plan, sequence, budget)
        if self._queue and budget and not self._starved:
            self._admit(plan, budget)
        if plan:
            self._plans = number
        return plan

    def _must_wait(self, sequence: Sequence) -> bool:
        """With a step in flight: whether it may end the sequence, or decides what the next step computes of it."""
        if sequence.length >= sequence.limit:
            return True
        if not sequence.lockstep or sequence.step <= self._commits:
            return False
        return sequence.length > len(sequence.tokens) or wants_scores(sequence)

    def _plan_chunk(self, plan: list[Slot], sequence: Sequence, budget: int) -> int:
        """Plan the next chunk of a sequence's known tokens; returns its size, 0 if its scoring must wait."""
        start = sequence.computed
        count = sequence.length - start
        now = self.scoring.limit(sequence, min(count, budget))
        if now and self.windows is not None:
            now = self._cover(self.windows, sequence, start, now)
        if now:
            slot = Slot(sequence, start, now, now == count)
            plan.append(slot)
            sequence.computed = start + now
            sequence.length += slot.samples
            sequence.step = self._plans + 1
            self.scoring.add(slot)
        return now

    def _allocate(self, sequence: Sequence, start: int) -> bool:
        """Blocks for the token at ``start``, the first of a block; False: not now."""
        if start == len(sequence.blocks) * self._block_size and not self._grow(sequence):
            return False
        return self.windows is None or self._cover(self.windows, sequence, start, 1) > 0

    def _cover(self, windows: WindowRows, sequence: Sequence, start: int, count: int) -> int:
        """Allocate rows for some of ``count`` tokens, by preempting newer sequences if need be; 0: not now."""
        while not (now := windows.fit(sequence, start, count, fair=self._no_evict)):
            newest = self.running[-1]
            if newest is sequence:  # older ones run, and end
                return 0
            if self._plans > self._commits:
                self._starved = True
                return 0
            self.running.pop()
            self._preempt(newest)
        windows.cover(sequence, start + now)
        return now

    def _grow(self, sequence: Sequence) -> bool:
        """Allocate one block, if need be from reservations, then by preempting newer sequences; False: not now."""
        while not self.blocks.grow(sequence.blocks):
            if self._queue.reclaim():
                continue
            if self._plans > self._commits:
                self._starved = True
                return False
            newest = self.running.pop()  # if it is ``sequence`` itself, the rest of the pool is held for handoffs
            self._preempt(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._free(sequence)
        sequence.computed = sequence.named = 0
        self._queue.add(sequence, first=True)
        self._report.preempted(sequence)

    def _admit(self, plan: list[Slot], budget: int) -> None:
        while self._queue and budget and len(self.running) < self._max_running:
            admission = self._queue.next(self.running)
            if admission is None:  # until a running sequence or a handoff ends
                return
            sequence, cached, named = admission
            sequence.computed = cached
            sequence.named = named
            sequence.arrived = self._admitted
            self._admitted += 1
            self._report.admitted(sequence, cached)
            self.running.append(sequence)
            if self.windows is not None:
                self.windows.admit(sequence, cached)
            planned = self._plan_chunk(plan, sequence, budget)
            if not planned and self.windows is not None:
                return
            budget -= planned

    def draft_room(self, slot: Slot, wanted: int) -> int:
        """How many proposed tokens may be verified behind a planned slot; allocates their blocks, preempts nobody."""
        sequence, start, count, samples = slot
        if count != 1 or not samples or sequence.lockstep:
            return 0
        wanted = min(wanted, sequence.limit - start - 2)  # one more token is drawn than proposed
        size, blocks = self._block_size, sequence.blocks
        while wanted > 0 and start + 1 + wanted > len(blocks) * size and self.blocks.grow(blocks):
            pass
        room = min(wanted, len(blocks) * size - start - 1)
        if room > 0 and self.windows is not None:
            room = self.windows.fit(sequence, start, 1 + room, fair=self._no_evict) - 1
            self.windows.cover(sequence, start + 1 + room)
        return max(room, 0)

    def unplan(self, plan: list[Slot], slots: list[Slot]) -> list[Slot]:
        """Remove slots from the last plan and cancel their sequences."""
        for sequence, start, _, samples in slots:
            sequence.computed = start
            sequence.length -= samples
            sequence.step = self._plans - 1  # it may be in the previous plan, which may be in flight
        rest = [slot for slot in plan if slot not in slots]
        if not rest:
            self._plans -= 1
        for slot in slots:
            self.cancel(slot.sequence.key)
        return rest

    # -- commit ----------------------------------------------------------------------------------------------

    def commit(self, plan: list[Slot], sampled: Seq[Sampled], scoring: list[Slot] | None = None) -> StepResult:
        """Apply the results of a computed plan.

        Args:
            plan: the oldest plan that was not committed.
            sampled: one per slot with ``samples``, in plan order.
            scoring: ``scoring.slots`` of this plan; None: the current ones.
        """
        outputs: list[Output] = []
        total, ended = 0, False
        draws = iter(sampled)
        size = self._block_size
        naming = self.blocks.prefix_cache
        ending = self._ending
        if plan:
            self._commits += 1
        for sequence, start, count, samples in plan:
            total += count
            if ending and sequence.ended:
                if samples:
                    next(draws)
                self._free_ended(sequence)
                continue
            if sequence.draft:
                ended |= self._commit_drafts(sequence, draws, outputs)
                continue
            computed = start + count
            if naming and (count > 1 or not computed % size):
                name_blocks(self.blocks, sequence, computed, size)
            if not samples:
                continue
            token, logprob = next(draws)
            tokens = sequence.tokens
            tokens.append(token)
            length = len(tokens)
            if length >= sequence.limit or (length > sequence.stoppable and token in sequence.stops):
                outputs.append(self._finish(sequence, token, logprob))
                ended = True
            else:
                outputs.append(_tuple(Output, (sequence.key, token, "", logprob, None)))
        if ended:
            self.running = [sequence for sequence in self.running if sequence.blocks and not sequence.ended]
        started, failures, measured = self._report.take()
        slots = self.scoring.slots if scoring is None else scoring
        scored = collect(slots) if slots else ()
        events = self.blocks.take_events()
        held = self.held.take_new()
        return StepResult(outputs, events, started, failures, total, held, scored, measured=measured)

    def _commit_drafts(self, sequence: Sequence, draws: Iterator[Sampled], outputs: list[Output]) -> bool:
        """Take in the drawn tokens up to the first that was not proposed; True: the sequence has ended."""
        draft, sequence.draft = sequence.draft, ()
        drawn = list(islice(draws, len(draft) + 1))
        right = accepted(draft, [each.token for each in drawn])
        self.drafts.count(len(draft), right)
        sequence.computed = len(sequence.tokens) - 1
        for token, logprob in drawn[: right + 1]:
            sequence.tokens.append(token)
            sequence.computed += 1
            sequence.length = length = len(sequence.tokens)
            if length >= sequence.limit or (length > sequence.stoppable and token in sequence.stops):
                outputs.append(self._finish(sequence, token, logprob))
                return True
            outputs.append(Output(sequence.key, token, "", logprob))
        if self.blocks.prefix_cache:
            name_blocks(self.blocks, sequence, sequence.computed, self._block_size)
        return False

    def _finish(self, sequence: Sequence, token: int, logprob: Logprob | None) -> Output:
        """End a sequence with its last token."""
        output = self._report.ended(sequence, token, logprob, self.limits)
        del self._by_key[sequence.key]
        if sequence.hold:
            self.held.hold(sequence)
        self._end(sequence)
        return output

    def _end(self, sequence: Sequence) -> None:
        """Free its blocks once no step in flight uses them."""
        if sequence.step > self._commits:
            sequence.ended = True
            self._ending += 1
        else:
            self._free(sequence)

    def _free_ended(self, sequence: Sequence) -> None:
        """Free a sequence that ended in an earlier plan, if this was its last."""
        if sequence.step <= self._commits:
            self._ending -= 1
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        if self.blocks.prefix_cache:  # blocks in ``held`` stay in use after this release
            leaving = sequence.key not in self.held
            name_blocks(self.blocks, sequence, sequence.computed, self._block_size, leaving=leaving)
        if self.windows is not None:
            self.windows.release(sequence)
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
