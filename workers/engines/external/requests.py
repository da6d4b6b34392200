"""Checks of a request that hold for all external engines. Pure."""

from penstock.schemas.errors import Code
from penstock.workers.engines.base import EngineInfo, RequestError, SequenceRequest
from penstock.workers.engines.constraints.running import NO_CONSTRAINTS
from penstock.workers.engines.validation import check_length, check_vocabulary


def check(request: SequenceRequest, info: EngineInfo) -> None:
    """
    Raises:
        RequestError: it can never run here; the message names the limit.
    """
    prompt_len, generated = len(request.prompt), len(request.generated)
    check_length(prompt_len, generated, max_tokens=request.stop.max_tokens, max_model_len=info.max_model_len)
    check_vocabulary(request, info.vocab_size)
    if any(not 0 <= token < info.vocab_size for token in request.sampling.logit_bias):
        raise RequestError(Code.invalid_request, f"logit_bias names tokens outside the vocabulary of {info.vocab_size}")
    if request.constraint is not None and not info.constraints:
        raise RequestError(Code.unsupported, NO_CONSTRAINTS)
    if request.reservation is not None:
        raise RequestError(Code.transfer_failed, "this engine fetches KV itself; it cannot adopt transferred blocks")
