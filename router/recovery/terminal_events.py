"""Terminal events that a router makes: of requests that no worker will run, or whose terminal event is missing."""

from collections.abc import Sequence

from penstock.schemas import done
from penstock.schemas.errors import Code
from penstock.schemas.reassembly import Progress
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import WHOLE_REQUEST, Finish, Logprob, TokenItem

_FAILED = ("error", "cancelled")


def last_item(request: GenerateRequest, attempt: int, code: Code, message: str) -> TokenItem:
    """The token item that the gateway reads in place of further tokens."""
    finish = Finish(_reason(code), None, 0, code.value, message)
    return TokenItem(request.id, attempt, WHOLE_REQUEST, 0, b"", finish)


def refused(
    request: GenerateRequest,
    raw: bytes,
    attempt: int,
    streamed: Sequence[bytes],
    *,
    code: Code,
    message: str,
    now_ns: int,
    streamed_ns: int = 0,
) -> done.Done:
    """The terminal event of a request that gets no worker, or no further one.

    Args:
        raw: the request as it was stored.
        streamed: tokens per choice, packed u32.
        streamed_ns: when the first of them was stored.
    """
    return done.Done(
        request=request.id,
        model=request.model,
        attempt=attempt,
        choices=tuple(done.Outcome(tokens, _reason(code)) for tokens in streamed),
        usage=done.usage_of(request, streamed),
        timings=done.Timings(created_ns=request.created_ns, ended_ns=now_ns, streamed_ns=streamed_ns),
        code=code.value,
        message=message,
        user=request.user,
        submitted=raw,
        left_out=("logprobs",) if request.sampling.logprobs is not None and any(streamed) else (),
    )


def completed(
    request: GenerateRequest,
    raw: bytes,
    attempt: int,
    worker: str,
    *,
    progress: Sequence[Progress],
    scores: Sequence[Logprob],
    now_ns: int,
    streamed_ns: int = 0,
) -> done.Done:
    """The terminal event that a lost worker did not publish: all choices had finished in the token log."""
    finishes = [part.finish or Finish("") for part in progress]
    failed = next((finish for finish in finishes if finish.reason in _FAILED), Finish(""))
    return done.Done(
        request=request.id,
        model=request.model,
        attempt=attempt,
        worker=worker,
        choices=tuple(
            done.Outcome(part.tokens, finish.reason, finish.stop, finish.files, part.logprobs)
            for part, finish in zip(progress, finishes, strict=True)
        ),
        usage=done.usage_of(
            request,
            [part.tokens for part in progress],
            max((finish.cached_tokens for finish in finishes), default=0),
        ),
        timings=done.Timings(created_ns=request.created_ns, ended_ns=now_ns, streamed_ns=streamed_ns),
        code=failed.code,
        message=failed.message,
        user=request.user,
        submitted=raw,
        scores=tuple(scores),
    )


def _reason(code: Code) -> str:
    return "cancelled" if code is Code.cancelled else "error"
