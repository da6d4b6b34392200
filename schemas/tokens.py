"""Token output: worker → gateway, one batch per engine step and gateway.

Encoded as arrays, because these are most of the messages. New fields go last.

Every reader applies one rule, in stream order: an item whose attempt is below the highest seen for its request is void.
A fence is an item of the next attempt without tokens. A router publishes it before it reads what the attempt before had
streamed; after it, the old worker's output is void for every reader.
"""

from collections.abc import Sequence

import msgspec

from penstock.schemas.wire import decoder

WHOLE_REQUEST = -1  # as ``choice``: the item is about all choices
ANOTHER_MODEL = -3  # as ``choice``: the attempt runs as fallback ``first`` of its request (see ``GenerateRequest``)
COUNTS = -4  # as ``choice``: what a server counted of choice ``first``, see ``done.counted``
PROMPT = -2  # as ``choice``: ``logprobs`` of the prompt's tokens ``first`` (at least 1) ..; ``tokens`` is empty


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms. ``top`` is best first: (token id, logprob). ``rank``: of the token, from 1; 0: unknown."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


CARRIED_BYTES = 1 << 20  # of log-probabilities in a job, for the record of its request


def carried(logprobs: Sequence[Logprob]) -> tuple[Logprob, ...]:
    """The log-probabilities that a job can carry: all, or none if they are too many."""
    size = sum(16 + 16 * len(each.top) for each in logprobs)
    return tuple(logprobs) if size <= CARRIED_BYTES else ()


class File(msgspec.Struct, frozen=True, array_like=True):
    """One image or video in the object store, bucket "results"."""

    name: str
    type: str  # "image/png", "video/mp4", ...
    bytes: int
    width: int = 0  # pixels
    height: int = 0
    frames: int = 1
    frame_rate: float = 0.0
    seconds: float = 0.0  # the worker's time for the whole request


FAILURES = ("error", "cancelled")  # reasons of a Finish that ended the request without its whole output


class Finish(msgspec.Struct, frozen=True, array_like=True):
    """Why a choice (or the whole request) ended."""

    reason: str  # "stop", "length", "cancelled", "error"
    stop: str | int | None = None  # the stop string or stop token that ended it
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    code: str = ""  # penstock.schemas.errors.Code, when reason is "error" or "cancelled"
    message: str = ""
    files: tuple[File, ...] = ()  # of an image or video request


class TokenItem(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens ``first`` .. of one choice; ``tokens`` is packed u32, ``logprobs`` one per token if asked for.

    Thousands are under way in a process, so garbage collection passes over them: they are part of no cycle.
    """

    request: str
    attempt: int
    choice: int
    first: int
    tokens: bytes = b""
    finish: Finish | None = None
    logprobs: tuple[Logprob, ...] | None = None


class TokenBatch(msgspec.Struct, frozen=True, array_like=True):
    """(worker, epoch, seq) names the batch, also as its Nats-Msg-Id, so a resent one is stored once."""

    worker: str
    epoch: int
    seq: int
    items: tuple[TokenItem, ...]


decode = decoder(TokenBatch)
