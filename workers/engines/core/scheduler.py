"""What is computed in the next step, and which sequences that ends. Pure: no clock, no device, no threads.

Continuous batching with chunked prefill: running sequences first, in admission order, then waiting ones first
come first served, within a budget of tokens. A sequence gets blocks for all it knows when it is admitted, then
one at a time; when there is none, the newest running one is preempted: it gives its blocks back, waits at the
front with the tokens it has generated, and is computed again (mostly from the cache). With ``no_evict`` it waits
until there is room for its longest answer beside those of all that run, and is never preempted. Who is next among
those that wait is ``workers.engines.core.queue``'s matter.
"""

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from schemas.blocks import chain, extend, split
from schemas.errors import Code
from schemas.requests import Sampling
from schemas.tokens import Logprob
from schemas.wire import pack_tokens
from workers.engines.base import (
    EngineStats,
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
from workers.engines.core.blocks import BlockManager
from workers.engines.core.queue import Queue
from workers.engines.core.sequence import Sampled, Sequence, Slot

if TYPE_CHECKING:
    from workers.engines.logits.apply import Chain

MAX_SCORED_TOKENS = 512  # of a step: each is a row of logits as wide as the vocabulary

_tuple = tuple.__new__  # a named tuple's own __new__ costs twice as much, and these are made per token


class Scheduler:
    """Alternate ``schedule`` and ``commit``; between those pairs ``submit`` and ``cancel`` at will.

    Or run ahead: plan once more before the last plan is committed. Then tokens that are not known yet are counted, a
    sequence that ends meanwhile keeps its blocks until its last plan is committed, and nobody is preempted before.

    Args:
        max_running: sequences that run at once.
        max_batched_tokens: tokens computed per step, prompt and decode.
        max_model_len: prompt + output of one sequence, tokens.
        max_scored_tokens: prompt tokens per step of sequences whose prompts are scored.
        no_evict: whoever runs is sure of all blocks it may need. Not of sequences with a reservation, which was made
            without knowing them.

    Attributes:
        scoring: slots of the last plan whose sequences get ``scores``.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        block_size: int,
        max_running: int,
        max_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        max_scored_tokens: int = MAX_SCORED_TOKENS,
        no_evict: bool = False,
    ) -> None:
        for name, value in (
            ("block_size", block_size),
            ("max_running", max_running),
            ("max_batched_tokens", max_batched_tokens),
            ("max_model_len", max_model_len),
            ("max_scored_tokens", max_scored_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.blocks = blocks
        self.running: list[Sequence] = []  # in admission order
        self._queue = Queue(blocks, block_size, no_evict=no_evict)
        self._by_key: dict[object, Sequence] = {}
        self._block_size = block_size
        self._max_running = max_running
        self._max_batched_tokens = max_batched_tokens
        self._max_model_len = max_model_len
        self._max_scored_tokens = max_scored_tokens
        self.scoring: list[Slot] = []
        self._pool_tokens = blocks.total_blocks * block_size
        self._eos = frozenset(eos_token_ids)
        self._admitted = 0
        self._preemptions = 0
        self._hit_tokens = 0
        self._prompt_tokens = 0
        self._started: list[Started] = []
        self._failures: list[Failure] = []
        self._measured: list[Measured] = []
        self._held: list[Held] = []  # not yet told
        self._holds: dict[object, list[int]] = {}  # blocks of ended sequences, kept for a hand-over
        self._plans = 0  # that were made, if not empty
        self._commits = 0
        self._ended_in_flight = 0  # sequences that have ended, but not their last plan
        self._starved = False  # the last plan lacked a block; the next one is made when nothing is under way

    # -- between steps ---------------------------------------------------------------------------------------

    def submit(self, request: SequenceRequest, processors: "Chain | None" = None) -> None:
        """Queue one sequence, with what edits its logits.

        Raises:
            RequestError: it can never run here; the message names the limit.
        """
        prompt = _tokens(request.prompt)
        tokens = prompt.tolist()
        if request.generated:
            tokens += _tokens(request.generated)
        self._check(request, len(prompt), len(tokens))
        stop = request.stop
        stops = frozenset() if stop.ignore_eos else self._eos
        if stop.token_ids:
            stops = stops.union(stop.token_ids)
        self._by_key[request.key] = sequence = Sequence(
            key=request.key,
            tokens=tokens,
            prompt_len=len(prompt),
            sampling=request.sampling,
            stop=stop,
            choice=request.choice,
            digests=self._digests(request, prompt, tokens) if self.blocks.prefix_cache else [],
            root=request.root,
            stops=stops,
            stoppable=len(prompt) + stop.min_tokens,
            limit=min(len(prompt) + stop.max_tokens, self._max_model_len, self._pool_tokens + 1),
            extra=request.extra,
            media=request.media,
            hold=request.hold,
            reservation=request.reservation,
            processors=processors,
            score=min(request.score or len(prompt), len(prompt)),
            length=len(tokens),
            lockstep=processors is not None or _penalised(request.sampling) or bool(request.score),
        )
        self._queue.add(sequence)

    def _check(self, request: SequenceRequest, prompt_len: int, known: int) -> None:
        if request.key in self._by_key:
            raise RequestError(Code.invalid_request, f"sequence {request.key!r} was submitted already")
        if not prompt_len:
            raise RequestError(Code.invalid_request, "the prompt has no tokens; give at least one")
        generated, wanted = known - prompt_len, request.stop.max_tokens
        if wanted <= generated:
            raise RequestError(
                Code.invalid_request, f"max_tokens is {wanted} and {generated} are generated already: nothing to do"
            )
        if known >= self._max_model_len:
            raise RequestError(
                Code.context_length_exceeded,
                f"{known} tokens leave no room for a new one: this model takes {self._max_model_len}, output included",
            )
        if known >= self._pool_tokens:
            raise RequestError(
                Code.out_of_blocks, f"{known} tokens leave no room for a new one: {self._pool_limit()}, output included"
            )

    def _pool_limit(self) -> str:
        blocks = self.blocks.total_blocks
        return f"this worker's KV pool holds {self._pool_tokens} tokens ({blocks} blocks of {self._block_size})"

    def _digests(self, request: SequenceRequest, prompt: "array[int]", tokens: list[int]) -> list[bytes]:
        """Names of every full block known at the start."""
        size = self._block_size
        digests = list(request.digests)
        if len(digests) != len(prompt) // size:  # none given, or of another block size
            digests = split(chain(pack_tokens(prompt), size, request.root, request.extra))
        if len(tokens) // size > len(digests):
            parent = digests[-1] if digests else request.root
            done = len(digests)  # the prompt's last block, not full, may end with a medium
            extra = {block - done: media for block, media in request.extra.items() if block >= done}
            digests += split(chain(pack_tokens(tokens[done * size :]), size, parent, extra))
        return digests

    def cancel(self, key: object) -> bool:
        """Drop a sequence and free its blocks; False: it is not here."""
        sequence = self._by_key.pop(key, None)
        if sequence is None:
            return False
        if sequence.blocks:
            self.running.remove(sequence)
            self._end(sequence)
        else:
            self._queue.remove(sequence)
        return True

    def release_held(self, key: object) -> bool:
        """Let go of the blocks that an ended sequence left held."""
        table = self._holds.pop(key, None)
        if table is None:
            return False
        self.blocks.release(table)
        return True

    def reserve(self, digests: Seq[bytes], tails: int, users: int) -> Reservation | None:
        """Hold the blocks of a prompt whose KV comes from elsewhere; None: there is no room."""
        return self._queue.reserve(digests, tails, users, len(self.running))

    def adopt(self, reservation: Reservation) -> None:
        """The blocks of a reservation are filled; sequences with this prompt find them."""
        self._queue.adopt(reservation)

    def release(self, reservation: Reservation) -> None:
        self._queue.release(reservation)

    @property
    def blocked(self) -> bool:
        """Sequences wait, none runs: every other block is held for a hand-over. Only its end helps."""
        return bool(self._queue) and not self.running and not self._ended_in_flight

    def has_work(self) -> bool:
        if self._plans > self._commits:
            return True
        return bool(self._by_key or self._failures or self._started or self._held or self.blocks.has_events)

    def stats(self) -> EngineStats:
        blocks = self.blocks
        return EngineStats(
            running=len(self.running),
            waiting=len(self._queue),
            used_blocks=blocks.used_blocks,
            cached_blocks=blocks.cached_blocks,
            free_blocks=blocks.free_blocks,
            pinned_blocks=self._queue.reserved_blocks + sum(map(len, self._holds.values())),
            preemptions=self._preemptions,
            hit_tokens=self._hit_tokens,
            prompt_tokens=self._prompt_tokens,
        )

    # -- one step --------------------------------------------------------------------------------------------

    def schedule(self) -> list[Slot]:
        """The plan of the next step, in admission order. Blocks of every slot are allocated."""
        plan: list[Slot] = []
        budget = self._max_batched_tokens
        size = self._block_size
        number = self._plans + 1
        ahead = self._plans > self._commits
        self.scoring = []
        if ahead and self._starved:
            return plan
        self._starved = False
        for sequence in self.running:  # may shrink from its end while we walk
            if not budget or self._starved:
                break
            if ahead and self._must_wait(sequence):
                continue
            start = sequence.computed
            count = sequence.length - start
            if count == 1:
                if start == len(sequence.blocks) * size and not self._grow(sequence):
                    continue
                plan.append(_tuple(Slot, (sequence, start, 1, True)))
                sequence.computed = start + 1
                sequence.length += 1
                sequence.step = number
                budget -= 1
            else:
                now = self._chunk(sequence, count, budget)
                if now:
                    self._plan(plan, Slot(sequence, start, now, now == count))
                    budget -= now
        if self._queue and budget and not self._starved:
            self._admit(plan, budget)
        if plan:
            self._plans = number
        return plan

    def _must_wait(self, sequence: Sequence) -> bool:
        """With a step under way: whether the next token of a sequence is its last, or the next step depends on it."""
        if sequence.length >= sequence.limit:
            return True
        if not sequence.lockstep or sequence.step <= self._commits:
            return False
        return sequence.length > len(sequence.tokens) or sequence.score < sequence.prompt_len

    def unplan(self, plan: list[Slot], slots: list[Slot]) -> list[Slot]:
        """The last plan without some of its slots, whose sequences are cancelled."""
        for sequence, start, _, samples in slots:
            sequence.computed = start
            sequence.length -= samples
            sequence.step = self._plans - 1  # it may be in the plan before, which may be under way
        rest = [slot for slot in plan if slot not in slots]
        if not rest:
            self._plans -= 1
        for slot in slots:
            self.cancel(slot.sequence.key)
        return rest

    def _chunk(self, sequence: Sequence, count: int, budget: int) -> int:
        """How many of ``count`` tokens are computed now; 0: it waits for its turn to be scored."""
        if sequence.score < sequence.prompt_len:
            budget = min(budget, self._max_scored_tokens - sum(slot.count for slot in self.scoring))
        return min(count, budget)

    def _plan(self, plan: list[Slot], slot: Slot) -> None:
        plan.append(slot)
        sequence, start, count, samples = slot
        sequence.computed = start + count
        sequence.length += samples
        sequence.step = self._plans + 1
        if sequence.score < sequence.prompt_len:
            self.scoring.append(slot)

    def _grow(self, sequence: Sequence) -> bool:
        """One more block, at the cost of those that wait, then of newer sequences; False: it goes itself, or waits."""
        while not self.blocks.grow(sequence.blocks):
            if self._queue.reclaim():
                continue
            if self._plans > self._commits:
                self._starved = True
                return False
            newest = self.running.pop()  # the last one is ``sequence`` itself: then the rest of the pool is pinned
            self._free(newest)
            newest.computed = newest.named = 0
            self._queue.add(newest, first=True)
            self._preemptions += 1
            self._measured.append(Measured(newest.key, {}, preemptions=1))
            if newest is sequence:
                return False
        return True

    def _admit(self, plan: list[Slot], budget: int) -> None:
        while self._queue and budget and len(self.running) < self._max_running:
            admission = self._queue.next(self.running)
            if admission is None:  # what runs ends and makes room, or a hand-over does
                return
            sequence, cached, named = admission
            sequence.computed = cached
            sequence.named = named
            sequence.arrived = self._admitted
            self._admitted += 1
            if not sequence.started:
                sequence.started = True
                sequence.cached = min(cached, sequence.prompt_len)
                self._hit_tokens += sequence.cached
                self._prompt_tokens += sequence.prompt_len
                self._started.append(Started(sequence.key, sequence.cached))
            self.running.append(sequence)
            count = len(sequence.tokens) - cached
            now = self._chunk(sequence, count, budget)
            if now:
                self._plan(plan, Slot(sequence, cached, now, now == count))
                budget -= now

    def commit(self, plan: list[Slot], sampled: Seq[Sampled], scoring: list[Slot] | None = None) -> StepResult:
        """Take in what was computed.

        Args:
            plan: the oldest that was not committed.
            sampled: one per slot with ``samples``, in plan order.
            scoring: ``scoring`` as it was with this plan; None: as it is.
        """
        outputs: list[Output] = []
        ended = False
        size = self._block_size
        naming = self.blocks.prefix_cache
        draws = iter(sampled)
        total = 0
        late = self._ended_in_flight
        if plan:
            self._commits += 1
        for sequence, start, count, samples in plan:
            total += count
            if late and sequence.ended:
                if samples:
                    next(draws)
                self._settle(sequence)
                continue
            computed = start + count
            if naming and (count > 1 or not computed % size):
                self._name(sequence, computed, leaving=False)
            if not samples:
                continue
            token, logprob = next(draws)
            tokens = sequence.tokens
            tokens.append(token)
            length = len(tokens)
            if token in sequence.stops and length > sequence.stoppable:
                outputs.append(Output(sequence.key, token, "stop", logprob, token))
            elif length >= sequence.limit:
                outputs.append(self._at_limit(sequence, token, logprob))
            else:
                outputs.append(_tuple(Output, (sequence.key, token, "", logprob, None)))
                continue
            ended = True
            del self._by_key[sequence.key]
            if sequence.hold:
                self._hold(sequence)
            self._end(sequence)
        if ended:
            self.running = [sequence for sequence in self.running if sequence.blocks and not sequence.ended]
        started, self._started = self._started, []
        failures, self._failures = self._failures, []
        held, self._held = self._held, []
        scoring = self.scoring if scoring is None else scoring
        scored = self._scored(scoring) if scoring else ()
        measured, self._measured = self._measured, []
        return StepResult(outputs, self.blocks.take_events(), started, failures, total, held, scored, measured=measured)

    def _scored(self, scoring: list[Slot]) -> list[Scored]:
        """What the executor has left with the sequences of a step."""
        found = []
        for slot in scoring:
            sequence = slot.sequence
            if sequence.scores:
                found.append(Scored(sequence.key, sequence.score, sequence.scores))
                sequence.score += len(sequence.scores)
                sequence.scores = []
        return found

    def _hold(self, sequence: Sequence) -> None:
        """Keep the prompt's blocks beyond the sequence's end."""
        table = self.blocks.share(sequence.blocks[: -(-sequence.prompt_len // self._block_size)])
        self._holds[sequence.key] = table
        generations = self.blocks.generations
        self._held.append(Held(sequence.key, table, [generations[block] for block in table]))

    def _at_limit(self, sequence: Sequence, token: int, logprob: Logprob | None) -> Output:
        length = len(sequence.tokens)
        if length >= min(sequence.prompt_len + sequence.stop.max_tokens, self._max_model_len):
            return Output(sequence.key, token, "length", logprob)
        # Its next token needs more blocks than there are, even if it had the pool to itself.
        text = f"prompt and answer outgrew the worker: {self._pool_limit()}"
        self._failures.append(Failure(sequence.key, Code.out_of_blocks, text))
        return Output(sequence.key, token, "", logprob)

    def _name(self, sequence: Sequence, computed: int, *, leaving: bool) -> None:
        """Name the blocks whose KV is complete: that of so many leading tokens."""
        size = self._block_size
        full = computed // size
        if full <= sequence.named:
            return
        digests = sequence.digests
        while len(digests) < full:
            done = len(digests)
            parent = digests[-1] if digests else sequence.root
            tokens = pack_tokens(sequence.tokens[done * size : (done + 1) * size])
            digests.append(extend(parent, tokens, sequence.extra.get(done, b"")))
        sequence.named = self.blocks.name(sequence.blocks, digests, sequence.named, full, leaving=leaving)

    def _end(self, sequence: Sequence) -> None:
        """Give its blocks back, as soon as no step that is under way uses them."""
        if sequence.step > self._commits:
            sequence.ended = True
            self._ended_in_flight += 1
        else:
            self._free(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """A plan with a sequence that has ended is committed."""
        if sequence.step <= self._commits:
            self._ended_in_flight -= 1
            self._free(sequence)

    def _free(self, sequence: Sequence) -> None:
        if self.blocks.prefix_cache:
            self._name(
                sequence, sequence.computed, leaving=sequence.key not in self._holds
            )  # held blocks stay longer than their release
        self.blocks.release(sequence.blocks)
        sequence.blocks = []


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
