"""Collects what the steps of an engine return, sequence by sequence, until it is flushed to the event loop. Pure."""

from typing import Any

from penstock.schemas import kv
from penstock.schemas.errors import Code
from penstock.schemas.tokens import Finish
from penstock.workers.engine_loop.sequence_state import Flush, RankEvents, SequenceState, prompt_items, token_item
from penstock.workers.engines.base import Engine, HeldPrompt, Scored, StepResult


class StepOutput:
    """The output of one or more steps. Used by the engine's thread only.

    Args:
        first_batch: number of each rank's first batch of KV events. A reader that has all from 0 on assumes the whole
            cache, so it is 1 if the cache is not empty.
    Attributes:
        ended: sequences that ended, or are handed off, since the last ``take``.
    """

    def __init__(self, *, first_batch: int = 0) -> None:
        self.ended: list[SequenceState] = []
        self._dirty: list[SequenceState] = []  # with new tokens or a new end
        self._started: list[SequenceState] = []
        self._held: list[HeldPrompt] = []
        self._scored: list[Scored] = []
        self._events: list[kv.KvEvent] = []  # of rank 0
        self._other_events: dict[int, list[kv.KvEvent]] = {}  # of the other ranks
        self._kv_seqs: dict[int, int] = {}  # of the next batch, by rank
        self._kv_first = first_batch
        self._kept = False  # KV events were kept by the last ``take``

    def __bool__(self) -> bool:
        """Whether there is something to flush."""
        from_step = self._dirty or self.ended or self._started or self._held or self._scored
        return bool(from_step or self._events or self._other_events)

    def add(self, engine: Engine, result: StepResult, began_ns: int) -> bool:
        """Collect the results of a step; all per-token work is here. False: the step did nothing.

        Args:
            engine: sequences that a stop string completed are cancelled there.
            began_ns: when the step began; Unix time.
        """
        sequence: Any
        self._events += result.events
        self._held += result.held
        self._scored += result.scored
        if result.others:
            for rank, rank_events in result.others.items():
                self._other_events.setdefault(rank, []).extend(rank_events)
        for sequence, cached in result.started:
            sequence.cached = cached if sequence.adopted_cached < 0 else sequence.adopted_cached
            sequence.started_ns = began_ns
            self._started.append(sequence)
        for each in result.measured:
            sequence = each.key
            sequence.measurements = [*(sequence.measurements or ()), each]
        dirty = self._dirty
        for output in result.outputs:
            sequence, token, finish, logprob = output.key, output.token, output.finish, output.logprob
            if sequence.finish is not None:  # an earlier token of this step completed a stop string
                continue
            sequence.buffer.append(token)
            if not sequence.dirty:
                sequence.dirty = True
                dirty.append(sequence)
            if logprob is not None:
                sequence.logprobs.append(logprob)
            if sequence.stream is not None and self._stops(engine, sequence, token, finish):
                continue
            if finish:
                # Else the decode worker continues; the session hands off once it has this token.
                if finish != "length" or len(sequence.tokens) + len(sequence.buffer) >= sequence.max_tokens:
                    sequence.finish = Finish(finish, output.stop_token, sequence.cached)
                self.ended.append(sequence)
        for sequence, code, message in result.failures:
            if sequence.finish is not None:  # its last token completed a stop string
                continue
            if code == Code.transfer_failed:  # not the request's fault: another worker can continue
                sequence.lost_input = message
                self.ended.append(sequence)
                continue
            sequence.finish = Finish("error", None, sequence.cached, code, message)
            self.ended.append(sequence)
            if not sequence.dirty:
                sequence.dirty = True
                dirty.append(sequence)
        for sequence in result.handed:
            self.ended.append(sequence)
        return not result.empty

    def take(self, *, keep_events: bool = False) -> Flush:
        """What was collected since the last call.

        Args:
            keep_events: KV events may wait for the next call, but for no other, and not if a sequence has ended.
        """
        flush = Flush()
        if self._scored:  # before the tokens: a reader of a sequence's first token has all of its prompt logprobs
            self._add_prompt_logprobs(flush)
        for sequence in self._dirty:
            flush.items.setdefault(sequence.gateway, []).append(token_item(sequence))
        flush.ended, self.ended = self.ended, []
        flush.started, self._started = self._started, []
        flush.held, self._held = self._held, []
        self._dirty.clear()
        self._kept = keep_events and not self._kept and bool(flush.items) and not (flush.ended or flush.held)
        if self._kept:
            return flush
        if self._events:
            flush.batches.append(self._batch(0, self._events))
            self._events = []
        if self._other_events:
            flush.batches += [self._batch(rank, events) for rank, events in self._other_events.items() if events]
            self._other_events = {}
        return flush

    def kv_seq(self, rank: int) -> int:
        """The number of a rank's next batch of KV events."""
        return self._kv_seqs.get(rank, self._kv_first)

    def _stops(self, engine: Engine, sequence: SequenceState, token: int, finish: str) -> bool:
        """Whether this token completed a stop string; if so the sequence ends here."""
        assert sequence.stream is not None
        sequence.stream.push(token)
        matched = sequence.stream.stop
        if matched is None:
            return False
        if not finish:
            engine.cancel(sequence)
        sequence.finish = Finish("stop", matched, sequence.cached)
        self.ended.append(sequence)
        return True

    def _batch(self, rank: int, events: list[kv.KvEvent]) -> RankEvents:
        seq = self.kv_seq(rank)
        self._kv_seqs[rank] = seq + 1
        return RankEvents(rank, seq, events)

    def _add_prompt_logprobs(self, flush: Flush) -> None:
        sequence: Any
        for sequence, first, logprobs in self._scored:
            flush.items.setdefault(sequence.gateway, []).extend(prompt_items(sequence, first, logprobs))
            sequence.scored_tokens = first + len(logprobs)
            sequence.prompt_logprobs += logprobs
        self._scored.clear()
