"""What passes between the engine's thread and the event loop: sequences, flushes, and the token items they become."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from infra.model.detokenizer import TextStream
from schemas import kv, wire
from schemas.tokens import PROMPT, Finish, Logprob, TokenItem
from workers.engines.base import Held, Measured

SCORED_BYTES = 32_768  # of one item with log-probabilities of the prompt; any broker's messages hold that


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
        stream: TextStream | None = None,
    ) -> None:
        self.owner = owner
        self.request_id = request_id
        self.attempt = attempt
        self.index = index
        self.gateway = gateway
        self.tokens = tokens  # everything generated, earlier attempts included
        self.first = len(tokens)  # index of the first token not yet flushed
        self.buffer: list[int] = []
        self.logprobs: list[Logprob] | None = [] if want_logprobs else None
        self.want_logprobs = want_logprobs
        self.sent_logprobs: list[Logprob] = []  # of ``tokens``, if wanted; those of earlier attempts may be unknown
        self.prompt_logprobs: list[Logprob] = []  # of the prompt's tokens, likewise
        self.stream = stream  # only if the request has stop strings
        self.finish: Finish | None = None
        self.cached = 0
        self.dirty = False
        self.started_ns = 0
        self.max_tokens = 0  # of a prefill stage, whose engine stops earlier: what the client allows; 0: no such stage
        self.adopted_cached = -1  # its prompt came from elsewhere, where so many of its tokens had been cached
        self.lost_input = ""  # what came from elsewhere and is gone, so that this worker cannot go on
        self.handed_off = False  # the engine is done with it, all was said, and another worker goes on; set in the loop
        self.scored_tokens = 0  # leading prompt tokens whose log-probabilities were flushed
        self.measurements: list[Measured] | None = None  # by the engine


class RankEvents(NamedTuple):
    """KV events of one rank; ``seq`` counts the batches of that rank in this epoch."""

    rank: int
    seq: int
    events: list[kv.KvEvent]


class CacheSnapshot(NamedTuple):
    """What is in the cache of one rank, as of just after its batch ``seq`` (-1: none yet)."""

    events: list[kv.KvEvent]
    seq: int


class Flush:
    """What one or more steps brought: token items by gateway, ended sequences, KV batches."""

    __slots__ = ("batches", "ended", "held", "items", "started")

    def __init__(self) -> None:
        self.items: dict[str, list[TokenItem]] = {}
        self.ended: list[SequenceState] = []  # also those that are handed over
        self.started: list[SequenceState] = []
        self.held: list[Held] = []
        self.batches: list[RankEvents] = []


def prompt_items(sequence: SequenceState, first: int, logprobs: Sequence[Logprob]) -> list[TokenItem]:
    """Items of ``SCORED_BYTES`` at most; ``logprobs``: of the prompt's tokens ``first`` .."""
    bytes_each = 24 + 16 * max((len(each.top) for each in logprobs), default=0)
    step = max(1, SCORED_BYTES // bytes_each)
    return [
        TokenItem(sequence.request_id, sequence.attempt, PROMPT, first + at, b"", None, tuple(logprobs[at : at + step]))
        for at in range(0, len(logprobs), step)
    ]


def token_item(sequence: SequenceState) -> TokenItem:
    """What it has gathered, which begins anew."""
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
