"""What is computed in the next step, and which sequences that ends. Pure: no clock, no device, no threads.

Continuous batching with chunked prefill: running sequences first, in admission order, then waiting ones first
come first served, within a budget of tokens. A sequence gets blocks for all it knows when it is admitted, then
one at a time; when there is none, the newest running one is preempted: it gives its blocks back, waits at the
front with the tokens it has generated, and is computed again (mostly from the cache). With ``no_evict`` it waits
until there is room for its longest answer beside those of all that run, and is never preempted.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from schemas.blocks import chain, extend, split
from schemas.errors import Code
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
from workers.engines.core.sequence import Sampled, Sequence, Slot

if TYPE_CHECKING:
    from workers.engines.logits.apply import Chain

MAX_SCORED_TOKENS = 512  # of a step: each is a row of logits as wide as the vocabulary

_tuple = tuple.__new__  # a named tuple's own __new__ costs twice as much, and these are made per token


class Scheduler:
    """Alternate ``schedule`` and ``commit``; between those pairs ``submit`` and ``cancel`` at will.

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
        self._waiting: OrderedDict[object, Sequence] = OrderedDict()  # next first
        self._by_key: dict[object, Sequence] = {}
        self._block_size = block_size
        self._max_running = max_running
        self._max_batched_tokens = max_batched_tokens
        self._max_model_len = max_model_len
        self._max_scored_tokens = max_scored_tokens
        self._no_evict = no_evict
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
        self._reserved = 0  # blocks in reservations

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
        self._by_key[request.key] = self._waiting[request.key] = Sequence(
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
        )

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
            self._let_go(sequence)
        else:
            del self._waiting[key]
            self._unreserve(sequence)
        return True

    def _unreserve(self, sequence: Sequence) -> None:
        reservation, sequence.reservation = sequence.reservation, None
        if reservation is not None:
            reservation.users -= 1
            if not reservation.users:
                self.let_go(reservation)

    def drop(self, key: object) -> bool:
        """Let go of the blocks that an ended sequence left held."""
        table = self._holds.pop(key, None)
        if table is None:
            return False
        self.blocks.release(table)
        return True

    def reserve(self, digests: Seq[bytes], tails: int, users: int) -> Reservation | None:
        """Hold the blocks of a prompt whose KV comes from elsewhere; None: there is no room.

        Room means: what runs can still grow by a block each. A reservation cannot be preempted.
        """
        hits = self.blocks.match(digests, len(digests))
        fresh = len(digests) - len(hits) + tails
        if fresh + len(self.running) > self.blocks.available:
            return None
        table = self.blocks.take(hits, fresh)
        if table is None:
            return None
        full = len(digests)
        self._reserved += len(table)
        return Reservation(list(digests), table[:full], len(hits), table[full:], users)

    def adopt(self, reservation: Reservation) -> None:
        """The blocks of a reservation are filled; sequences with this prompt find them."""
        if self.blocks.prefix_cache:
            self.blocks.name(reservation.blocks, reservation.digests, reservation.have, len(reservation.blocks))

    def let_go(self, reservation: Reservation) -> None:
        table = reservation.blocks + reservation.tails
        self._reserved -= len(table)
        self.blocks.release(table)
        reservation.blocks, reservation.tails = [], []

    @property
    def blocked(self) -> bool:
        """Sequences wait, none runs: every other block is held for a hand-over. Only its end helps."""
        return bool(self._waiting) and not self.running

    def has_work(self) -> bool:
        return bool(self._by_key or self._failures or self._started or self._held or self.blocks.has_events)

    def stats(self) -> EngineStats:
        blocks = self.blocks
        return EngineStats(
            running=len(self.running),
            waiting=len(self._waiting),
            used_blocks=blocks.used_blocks,
            cached_blocks=blocks.cached_blocks,
            free_blocks=blocks.free_blocks,
            pinned_blocks=self._reserved + sum(map(len, self._holds.values())),
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
        self.scoring = []
        for sequence in self.running:  # may shrink from its end while we walk
            if not budget:
                break
            start = sequence.computed
            count = len(sequence.tokens) - start
            if count == 1:
                if start == len(sequence.blocks) * size and not self._grow(sequence):
                    continue
                plan.append(_tuple(Slot, (sequence, start, 1, True)))
                budget -= 1
            else:
                now = self._chunk(sequence, count, budget)
                if now:
                    self._plan(plan, Slot(sequence, start, now, now == count))
                    budget -= now
        if self._waiting and budget:
            self._admit(plan, budget)
        return plan

    def _chunk(self, sequence: Sequence, count: int, budget: int) -> int:
        """How many of ``count`` tokens are computed now; 0: it waits for its turn to be scored."""
        if sequence.score < sequence.prompt_len:
            budget = min(budget, self._max_scored_tokens - sum(slot.count for slot in self.scoring))
        return min(count, budget)

    def _plan(self, plan: list[Slot], slot: Slot) -> None:
        plan.append(slot)
        if slot.sequence.score < slot.sequence.prompt_len:
            self.scoring.append(slot)

    def _grow(self, sequence: Sequence) -> bool:
        """One more block, at the cost of newer sequences; False: this one had to go itself."""
        while not self.blocks.grow(sequence.blocks):
            newest = self.running.pop()  # the last one is ``sequence`` itself: then the rest of the pool is pinned
            self._let_go(newest)
            newest.computed = newest.named = 0
            self._waiting[newest.key] = newest
            self._waiting.move_to_end(newest.key, last=False)
            self._preemptions += 1
            self._measured.append(Measured(newest.key, {}, preemptions=1))
            if newest is sequence:
                return False
        return True

    def _admit(self, plan: list[Slot], budget: int) -> None:
        size, blocks, waiting = self._block_size, self.blocks, self._waiting
        while waiting and budget and len(self.running) < self._max_running:
            key, sequence = next(iter(waiting.items()))
            known = len(sequence.tokens)
            # Never all that is known: the last token must be computed, for its logits; so must be what is scored.
            fresh = sequence.score if sequence.score < sequence.prompt_len else known
            hits = blocks.match(sequence.digests, (fresh - 1) // size)
            tail = self._tail(sequence, hits)
            new = -(-known // size) - len(hits) - len(tail)
            if self._no_evict and sequence.reservation is None and not self._sure(sequence, hits, new):
                return
            table = blocks.take(hits, new)
            if table is None:  # what runs ends and makes room, or a hand-over does
                return
            del waiting[key]
            cached = len(hits) * size
            if tail:
                assert sequence.reservation is not None
                table[len(hits) : len(hits)] = tail
                sequence.reservation.tails.pop()
                self._reserved -= 1
                cached = sequence.prompt_len
            sequence.blocks = table
            self._unreserve(sequence)
            sequence.computed = cached
            sequence.named = len(hits)
            sequence.arrived = self._admitted
            self._admitted += 1
            if not sequence.started:
                sequence.started = True
                sequence.cached = min(cached, sequence.prompt_len)
                self._hit_tokens += sequence.cached
                self._prompt_tokens += sequence.prompt_len
                self._started.append(Started(key, sequence.cached))
            self.running.append(sequence)
            now = self._chunk(sequence, known - cached, budget)
            if now:
                self._plan(plan, Slot(sequence, cached, now, cached + now == known))
                budget -= now

    def _sure(self, sequence: Sequence, hits: list[int], new: int) -> bool:
        """Room for all that a sequence may become, beside all that those that run may."""
        size = self._block_size
        rest = -(-(sequence.limit - 1) // size) - len(hits) - new  # the last token is never computed
        for other in self.running:
            rest += max(0, -(-(other.limit - 1) // size) - len(other.blocks))
        return self.blocks.left(hits, new) >= rest

    @staticmethod
    def _tail(sequence: Sequence, hits: list[int]) -> list[int]:
        """The prompt's last block as it was handed over; of use only behind all blocks before it."""
        reservation = sequence.reservation
        if reservation is None or len(hits) != len(reservation.blocks) or sequence.score < sequence.prompt_len:
            return []
        return reservation.tails[-1:]

    def commit(self, plan: list[Slot], sampled: Seq[Sampled]) -> StepResult:
        """Take in what was computed. ``sampled``: one per slot with ``samples``, in plan order."""
        outputs: list[Output] = []
        ended = False
        size = self._block_size
        naming = self.blocks.prefix_cache
        draws = iter(sampled)
        total = 0
        for sequence, start, count, samples in plan:
            total += count
            sequence.computed = computed = start + count
            if naming and (count > 1 or not computed % size):
                self._name(sequence, leaving=False)
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
            self._let_go(sequence)
        if ended:
            self.running = [sequence for sequence in self.running if sequence.blocks]
        started, self._started = self._started, []
        failures, self._failures = self._failures, []
        held, self._held = self._held, []
        scored = self._scored() if self.scoring else ()
        measured, self._measured = self._measured, []
        return StepResult(outputs, self.blocks.take_events(), started, failures, total, held, scored, measured=measured)

    def _scored(self) -> list[Scored]:
        """What the executor has left with the sequences of this step."""
        found = []
        for slot in self.scoring:
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

    def _name(self, sequence: Sequence, *, leaving: bool) -> None:
        """Name the blocks whose KV is complete."""
        size = self._block_size
        full = sequence.computed // size
        if full <= sequence.named:
            return
        digests = sequence.digests
        while len(digests) < full:
            done = len(digests)
            parent = digests[-1] if digests else sequence.root
            tokens = pack_tokens(sequence.tokens[done * size : (done + 1) * size])
            digests.append(extend(parent, tokens, sequence.extra.get(done, b"")))
        sequence.named = self.blocks.name(sequence.blocks, digests, sequence.named, full, leaving=leaving)

    def _let_go(self, sequence: Sequence) -> None:
        if self.blocks.prefix_cache:
            self._name(sequence, leaving=sequence.key not in self._holds)  # held blocks stay longer than their release
        self.blocks.release(sequence.blocks)
        sequence.blocks = []


def _tokens(tokens: Seq[int]) -> "array[int]":
    if isinstance(tokens, array) and tokens.typecode == "I":
        return tokens
    try:
        return array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise RequestError(Code.invalid_request, f"token ids are integers from 0 to 2**32 - 1: {error}") from None
