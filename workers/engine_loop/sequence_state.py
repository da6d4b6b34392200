"""State shared by the engine thread and the event loop: sequences, flushes, and their token items."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from penstock.infra.text.detokenizer import StopSearch
from penstock.schemas import kv, wire
from penstock.schemas.tokens import PROMPT, Finish, Logprob, TokenItem
from penstock.workers.engines.base import HeldPrompt, SequenceMeasurements

PROMPT_ITEM_BYTES = 32_768  # of one item with prompt logprobs; below any broker's message limit


class SequenceState:
    """One sequence as its worker sees it; the engine's ``key``. Touched by the engine thread after submission."""

    __slots__ = (
        "adopted_cached",
        "attempt",
        "buffer",
        "cached",
        "dirty",
        "finish",
        "first",
        "gateway",
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
        "tokens",
        "want_logprobs",
    )

    def __init__(
        self,
        owner: object,
        request_id: str,
        attempt: int,
        index: int,
        gateway: str,
        tokens: "array[int]",
        want_logprobs: bool,
        stream: StopSearch | None = None,
    ) -> None:
        self.owner: object = owner  # None: its request is over, or handed off
        self.request_id = request_id
        self.attempt = attempt
        self.index = index
        self.gateway = gateway
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
        self.handed_off = False  # flushed, and another worker continues; set in the event loop
        self.scored_tokens = 0  # leading prompt tokens whose log-probabilities were flushed
        self.measurements: list[SequenceMeasurements] | None = None  # the engine's own timings
        self.seen_ns = 0  # when ``token_pace`` looked at it last; 0: it had no token of this worker yet
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
    """Output of one or more steps: token items by gateway, started and ended sequences, KV batches."""

    __slots__ = ("batches", "ended", "held", "items", "started")

    def __init__(self) -> None:
        self.items: dict[str, list[TokenItem]] = {}
        self.ended: list[SequenceState] = []  # also those that are handed off
        self.started: list[SequenceState] = []
        self.held: list[HeldPrompt] = []
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
