"""Validation of requests that is common to all external engines. Pure."""

from schemas.errors import Code
from workers.engines.base import EngineInfo, RequestError, SequenceRequest


def check(request: SequenceRequest, info: EngineInfo) -> None:
    """
    Raises:
        RequestError: it can never run here; the message names the limit.
    """
    prompt, generated = len(request.prompt), len(request.generated)
    if not prompt:
        raise RequestError(Code.invalid_request, "the prompt has no tokens; give at least one")
    highest = max(max(request.prompt), max(request.generated, default=0))
    if highest >= info.vocab_size:
        raise RequestError(Code.invalid_request, f"token id {highest} is outside the vocabulary of {info.vocab_size}")
    if request.stop.max_tokens <= generated:
        raise RequestError(
            Code.invalid_request,
            f"max_tokens is {request.stop.max_tokens} and {generated} are generated already: nothing to do",
        )
    known = prompt + generated
    if known >= info.max_model_len:
        raise RequestError(
            Code.context_length_exceeded,
            f"prompt and output have {known} tokens; this model takes {info.max_model_len}, at least one new token "
            "included",
        )
    if any(not 0 <= token < info.vocab_size for token in request.sampling.logit_bias):
        raise RequestError(Code.invalid_request, f"logit_bias names tokens outside the vocabulary of {info.vocab_size}")
    if request.reservation is not None:
        raise RequestError(Code.transfer_failed, "this engine fetches KV itself; it cannot adopt transferred blocks")
