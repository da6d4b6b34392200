"""State shared by the engine thread and the event loop: sequences, and what the steps of an engine return of them.

``StepOutput`` collects that, sequence by sequence, until it is flushed to the event loop. Pure.
"""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.infra.text.detokenizer import StopSearch
from penstock.schemas import kv, wire
from penstock.schemas.done import Usage, counted
from penstock.schemas.errors import FALLS_BACK, Code
from penstock.schemas.jobs import failed
from penstock.schemas.tokens import PROMPT, Finish, Logprob, TokenItem
from penstock.workers.engines.engine_protocol import Engine, PinnedPrompt, Scored, SequenceMeasurements, StepResult

PROMPT_ITEM_BYTES = 32_768  # of one item with prompt logprobs; below any broker's message limit


class SequenceState:
    """One sequence as its worker sees it; the engine's ``key``. Touched by the engine thread after submission."""

    __slots__ = (
        "adopted_cached",
        "attempt",
        "buffer",
        "cached",
        "dirty",
        "falls_back",
        "finish",
        "first",
        "handed_off",
        "index",
        "logprobs",
        "lost_input",
        "max_tokens",
        "measurements",
        "owner",
        "prompt_logprobs",
        "request_id",
        "scored_tokens",
        "seen_ns",
        "seen_tokens",
        "sent_logprobs",
        "started_ns",
        "stream",
        "token_address",
        "tokens",
        "usage",
        "want_logprobs",
    )

    def __init__(
        self,
        owner: object,
        request_id: str,
        attempt: int,
        index: int,
        token_address: str,
        tokens: "array[int]",
        want_logprobs: bool,
        stream: StopSearch | None = None,
    ) -> None:
        self.owner: object = owner  # None: its request is over, or handed off
        self.request_id = request_id
        self.attempt = attempt
        self.index = index
        self.token_address = token_address
        self.tokens = tokens  # all generated tokens, those of earlier attempts included
        self.first = len(tokens)  # index of the first token not yet flushed
        self.buffer: list[int] = []  # generated and not yet flushed
        self.logprobs: list[Logprob] | None = [] if want_logprobs else None
        self.want_logprobs = want_logprobs
        self.sent_logprobs: list[Logprob] = []  # of ``tokens``, if wanted; earlier attempts' may be missing
        self.prompt_logprobs: list[Logprob] = []  # likewise
        self.stream = stream  # only if the request has stop strings
        self.finish: Finish | None = None
        self.cached = 0
        self.dirty = False
        self.started_ns = 0
        self.max_tokens = 0  # the client's limit, in a prefill stage, whose engine stops after one token; else 0
        self.adopted_cached = -1  # cached prompt tokens at the prefill worker, if the KV came from there; else -1
        self.lost_input = ""  # why input from another worker is gone, so that this worker cannot continue
        self.falls_back = False  # another model may run its request if this one fails before its first token
        self.handed_off = False  # flushed, and another worker continues; set in the event loop
        self.scored_tokens = 0  # leading prompt tokens whose log-probabilities were flushed
        self.measurements: list[SequenceMeasurements] | None = None  # the engine's own timings
        self.usage: Usage | None = None  # as a server counted; None: tokens are counted
        self.seen_ns = 0  # when ``TokenPace`` looked at it last; 0: it had no token of this worker yet
        self.seen_tokens = self.first  # how many it had then


class RankEvents(NamedTuple):
    """KV events of one rank; ``seq`` counts the batches of that rank in this epoch."""

    rank: int
    seq: int
    events: list[kv.KvEvent]


class CacheSnapshot(NamedTuple):
    """Names in the cache of one rank, as of just after its batch ``seq`` (-1: none yet)."""

    events: list[kv.KvEvent]
    seq: int


class Flush:
    """Output of one or more steps: token items by address, started and ended sequences, KV batches."""

    __slots__ = ("batches", "ended", "items", "pinned", "started")

    def __init__(self) -> None:
        self.items: dict[str, list[TokenItem]] = {}
        self.ended: list[SequenceState] = []  # also those that are handed off
        self.started: list[SequenceState] = []
        self.pinned: list[PinnedPrompt] = []
        self.batches: list[RankEvents] = []


def prompt_items(sequence: SequenceState, first: int, logprobs: Sequence[Logprob]) -> list[TokenItem]:
    """Items of ``PROMPT_ITEM_BYTES`` at most; ``logprobs``: of the prompt's tokens ``first`` .."""
    bytes_each = 24 + 16 * max((len(each.top) for each in logprobs), default=0)
    step = max(1, PROMPT_ITEM_BYTES // bytes_each)
    return [
        TokenItem(sequence.request_id, sequence.attempt, PROMPT, first + at, b"", None, tuple(logprobs[at : at + step]))
        for at in range(0, len(logprobs), step)
    ]


def token_item(sequence: SequenceState) -> TokenItem:
    """An item with all tokens of the buffer, which is then empty."""
    tokens = array("I", sequence.buffer)
    item = TokenItem(
        sequence.request_id,
        sequence.attempt,
        sequence.index,
        sequence.first,
        wire.pack_tokens(tokens),
        sequence.finish,
        tuple(sequence.logprobs) if sequence.logprobs is not None else None,
    )
    sequence.tokens.extend(tokens)
    sequence.first += len(tokens)
    sequence.buffer.clear()
    if sequence.logprobs is not None:
        sequence.sent_logprobs += sequence.logprobs
        sequence.logprobs = []
    sequence.dirty = False
    return item


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
        self._pinned: list[PinnedPrompt] = []
        self._scored: list[Scored] = []
        self._events: list[kv.KvEvent] = []  # of rank 0
        self._other_events: dict[int, list[kv.KvEvent]] = {}  # of the other ranks
        self._kv_seqs: dict[int, int] = {}  # of the next batch, by rank
        self._kv_first = first_batch
        self._kept = False  # KV events were kept by the last ``take``

    def __bool__(self) -> bool:
        """Whether there is something to flush."""
        from_step = self._dirty or self.ended or self._started or self._pinned or self._scored
        return bool(from_step or self._events or self._other_events)

    def add(self, engine: Engine, result: StepResult, began_ns: int) -> bool:
        """Collect the results of a step; all per-token work is here. False: the step did nothing.

        Args:
            engine: sequences that a stop string completed are cancelled there.
            began_ns: when the step began; Unix time.
        """
        sequence: Any
        self._events += result.events
        self._pinned += result.pinned
        self._scored += result.scored
        if result.others:
            for rank, rank_events in result.others.items():
                self._other_events.setdefault(rank, []).extend(rank_events)
        for sequence, cached in result.started:
            sequence.cached = cached if sequence.adopted_cached < 0 else sequence.adopted_cached
            sequence.started_ns = began_ns
            self._started.append(sequence)
        for sequence, usage in result.counted:
            sequence.usage = usage
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
            if sequence.falls_back and code in FALLS_BACK and not (sequence.tokens or sequence.buffer):
                sequence.lost_input = failed(Code(code), message)  # a router decides
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
            items = flush.items.setdefault(sequence.token_address, [])
            if sequence.usage is not None and sequence.finish is not None:
                items.append(counted(sequence.request_id, sequence.attempt, sequence.index, sequence.usage))
            items.append(token_item(sequence))
        flush.ended, self.ended = self.ended, []
        flush.started, self._started = self._started, []
        flush.pinned, self._pinned = self._pinned, []
        self._dirty.clear()
        self._kept = keep_events and not self._kept and bool(flush.items) and not (flush.ended or flush.pinned)
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
            flush.items.setdefault(sequence.token_address, []).extend(prompt_items(sequence, first, logprobs))
            sequence.scored_tokens = first + len(logprobs)
            sequence.prompt_logprobs += logprobs
        self._scored.clear()
