"""A request without a worker, and what routing derives from it. Pure."""

from collections.abc import Sequence

import msgspec

from penstock.router.placement.routing import RoutingRequest
from penstock.router.state.suspects import Standing
from penstock.schemas.fleet import Revisions
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import Finish, Logprob

_NONE: frozenset[str] = frozenset()


class PendingRequest(msgspec.Struct, eq=False):
    """A request that is to be placed, for the first time or again.

    Attributes:
        raw: the request as it was stored.
        reply: where to acknowledge its message; "": a later attempt, whose message was acknowledged.
        since_ns: when this router got it.
        resume, finished, endings, scored, logprobs, scores, streamed_ns: as in ``Job``, from earlier attempts.
        reason: why it is placed: "new", "worker_lost", "worker_lost: ..." (how its process ended), "returned: ...".
        claimed: monotonic time of the last extension of its message's ack_wait.
        revision: of the model that earlier attempts ran in.
        share: the share of its class's space that it counts in, while it is held.
        lost: attempts that were lost with their worker, and that worker.
        suspect: how it may run, as of the last look.
        gone: the worker of the attempt before, if its process has ended and it may be registered yet.
        missing_since: monotonic time since when its revision has had no worker; 0: it has one.
    """

    request: GenerateRequest
    raw: bytes
    reply: str
    since_ns: int
    attempt: int = 1
    resume: tuple[bytes, ...] = ()
    finished: tuple[int, ...] = ()
    endings: tuple[Finish, ...] = ()
    reason: str = "new"
    claimed: float = 0.0
    scored: int = 0
    revision: str = ""
    logprobs: tuple[tuple[Logprob, ...], ...] = ()
    scores: tuple[Logprob, ...] = ()
    share: str = ""
    missing_since: float = 0.0
    streamed_ns: int = 0
    lost: tuple[tuple[int, str], ...] = ()
    suspect: Standing = Standing.free
    gone: str = ""

    @property
    def prompt_tokens(self) -> int:
        return self.request.prompt_tokens

    @property
    def streaming(self) -> bool:
        """The client has tokens, which only the same revision can continue. Images and vectors start over instead."""
        return not self.request.output and (self.scored > 0 or any(self.resume) or bool(self.finished))

    @property
    def pinned_revision(self) -> str:
        """The revision of earlier attempts, or else the requested one; "": any."""
        return self.revision or self.request.revision

    @property
    def resumed_tokens(self) -> int:
        """Tokens streamed for the choices that have not finished."""
        if not self.resume:
            return 0
        return sum(len(part) // 4 for i, part in enumerate(self.resume) if i not in self.finished)

    @property
    def computes_whole_prompt(self) -> bool:
        """Prompt log-probabilities are missing: cached blocks have none."""
        return self.request.sampling.prompt_logprobs is not None and self.scored < self.prompt_tokens

    @property
    def processors(self) -> frozenset[str]:
        """Names of the logits processors that its worker must have."""
        processors = self.request.sampling.logits_processors
        return frozenset(each.name for each in processors) if processors else _NONE


def routing_request(
    pending: PendingRequest, keys: Sequence[int], *, avoid: frozenset[str], revision: str | None
) -> RoutingRequest:
    """
    Args:
        keys: of the prompt's full blocks.
        avoid: workers to use only if no other is left.
        revision: as ``required_revision`` returned it.
    """
    request = pending.request
    return RoutingRequest(
        request.model,
        request.prompt_tokens,
        request.stop.max_tokens,
        prompt_blocks=len(keys),
        n=request.n,
        worker=request.worker,
        avoid=avoid,
        resumed_tokens=pending.resumed_tokens,
        medium=request.media[0].digest if request.media else b"",
        output=request.output,
        processors=pending.processors,
        revision=revision,
        tokenizer=request.tokenizer,
    )


def required_revision(pending: PendingRequest, registered: Revisions) -> str | None:
    """The revision that must run the request; None: any.

    Before its first token, a request whose revision has no ready worker moves to the serving revision.
    """
    if pending.request.embedding is not None:
        return None  # its workers may serve the name of a language model, whose revisions are not theirs
    pinned = pending.pinned_revision
    if pending.streaming and pinned:
        return pinned
    if pending.request.worker:
        return None
    if pinned and (pinned in registered.present or registered.serving is None):
        return pinned
    return registered.serving


def lane(pending: PendingRequest, local_prefill_tokens: int) -> str:
    """Requests of one lane wait for the same workers; requests of other lanes do not wait behind them."""
    request = pending.request
    long = pending.prompt_tokens > local_prefill_tokens
    kind = "media" if request.media else "long" if long else "short"
    parts = (request.model, request.worker, request.output or kind, pending.pinned_revision, request.tokenizer)
    return " ".join(
        (
            *parts,
            *sorted(pending.processors),
            *([pending.suspect] if pending.suspect else ()),
        )
    )
