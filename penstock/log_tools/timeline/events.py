"""The typed events of a request's timeline. Plain data; ``penstock.log_tools.timeline.request_timeline`` makes them.

``at_ns`` is Unix time. It comes from the clock of the process that caused the event (gateway, router, worker), or from
the broker that stored the message if that has no time of its own. Each class says which.
"""

import msgspec

from penstock.schemas.done import Done
from penstock.schemas.jobs import Decision, LowerTiers
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.trace import Stamps
from penstock.schemas.transfer import Handoff


class RequestAccepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The gateway accepted the request (gateway clock).

    ``prompt_tokens``, ``prompt_blocks`` and ``media`` are counts of the original request; a compact timeline empties
    the prompt, its digests and the media of ``request``.
    """

    at_ns: int
    request: GenerateRequest
    prompt_tokens: int
    prompt_blocks: int  # full blocks of ``request.block_size`` tokens
    media: int


class RequestQueued(msgspec.Struct, frozen=True, tag="queued"):
    """A router began to look for a worker (router clock)."""

    at_ns: int
    attempt: int
    router: str


class RequestRouted(msgspec.Struct, frozen=True, tag="routed"):
    """A router chose a worker, or a route of several (router clock).

    A compact timeline empties ``decision.candidates``; the counts stay.
    """

    at_ns: int
    attempt: int
    decision: Decision
    resumed_tokens: int  # output tokens of earlier attempts that this attempt starts behind, all choices together
    candidates: int
    excluded: int  # candidates that could not be chosen
    overlap_blocks: int | None = None  # best of the chosen workers; None: the decision has no score table
    score: float | None = None  # of the same workers; lower is better
    lower_tiers: tuple[LowerTiers, ...] = ()  # of the candidates


class RequestContinued(msgspec.Struct, frozen=True, tag="continued"):
    """A later attempt continues at another worker (router clock)."""

    at_ns: int
    attempt: int
    worker: str
    previous_worker: str  # of the previous attempt; "": that attempt is not in the log
    reason: str  # "worker_lost", "worker_lost: ..." (how its process ended), "returned: ..."
    resumed_tokens: int


class StageAssigned(msgspec.Struct, frozen=True, tag="assigned"):
    """A message for one stage was stored in a worker's queue (broker clock)."""

    at_ns: int
    attempt: int
    role: str  # "aggregated", "encode", "prefill", "decode"
    worker: str


class MediaEncoded(msgspec.Struct, frozen=True, tag="encoded"):
    """An encode worker made the embeddings of the request's media (broker clock: when the result was stored)."""

    at_ns: int
    attempt: int
    worker: str
    started_ns: int  # worker clock; 0: unknown
    stamps: Stamps | None


class PromptPrefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    """A prefill worker computed the prompt and each choice's first token (broker clock: when the result was stored)."""

    at_ns: int
    attempt: int
    worker: str
    started_ns: int  # worker clock; 0: unknown
    first_token_ns: int  # worker clock; 0: unknown
    cached_tokens: int  # of the prompt, found in the worker's cache
    stamps: Stamps | None


class BlocksHandedOff(msgspec.Struct, frozen=True, tag="handed_off"):
    """A worker offered its blocks to the worker of the next stage, under a lease (broker clock)."""

    at_ns: int
    attempt: int
    source: str
    target: str
    target_role: str
    ticket: str
    pool: str  # "kv", "embeds"
    blocks: int
    bytes: int  # 0: the size of a block is unknown
    backend: str
    lease_ns: int  # Unix time at which the lease ends


class TransferReported(msgspec.Struct, frozen=True, tag="transfer"):
    """One line of the handoff ledger about one of the request's tickets (clock of the worker that wrote it)."""

    at_ns: int
    line: Handoff


class TokensStored(msgspec.Struct, frozen=True, tag="tokens"):
    """One item of a token batch was stored (broker clock). ``choice`` as in ``penstock.schemas.tokens``."""

    at_ns: int
    attempt: int
    worker: str
    choice: int
    first: int  # position of the first token
    count: int
    finish: str = ""  # why the choice ended; "": it did not end here


class AttemptReturned(msgspec.Struct, frozen=True, tag="returned"):
    """A worker returned the request, unstarted or unfinished (broker clock)."""

    at_ns: int
    attempt: int
    worker: str
    reason: str
    poison: bool = False  # the engine failed while it ran this request
    crashed: str = ""  # not "": somebody else reported it, since the worker's process or engine had ended


class AttemptRevoked(msgspec.Struct, frozen=True, tag="revoked"):
    """A router ordered a worker to stop this attempt and those before it (broker clock)."""

    at_ns: int
    attempt: int
    worker: str


class RequestDone(msgspec.Struct, frozen=True, tag="done"):
    """The terminal event was stored (broker clock). A compact timeline empties tokens and files of ``done``."""

    at_ns: int
    done: Done


TimelineEvent = (
    RequestAccepted
    | RequestQueued
    | RequestRouted
    | RequestContinued
    | StageAssigned
    | MediaEncoded
    | PromptPrefilled
    | BlocksHandedOff
    | TransferReported
    | TokensStored
    | AttemptReturned
    | AttemptRevoked
    | RequestDone
)
