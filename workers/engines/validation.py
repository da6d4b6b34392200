"""Checks of a request that hold for every engine. Pure."""

from penstock.schemas.errors import Code
from penstock.workers.engines.base import RequestError, SequenceRequest


def check_vocabulary(request: SequenceRequest, vocab_size: int) -> None:
    """
    Raises:
        RequestError: a token id is outside the vocabulary.
    """
    highest = max(max(request.prompt, default=0), max(request.generated, default=0))
    if highest >= vocab_size:
        raise RequestError(Code.invalid_request, f"token id {highest} is outside the vocabulary of {vocab_size}")


def check_length(prompt_len: int, generated: int, *, max_tokens: int, max_model_len: int) -> None:
    """Check that at least one more token can be generated. All sizes are in tokens.

    Args:
        generated: tokens of earlier attempts.

    Raises:
        RequestError: the prompt is empty or too long, or nothing is left to generate.
    """
    if not prompt_len:
        raise RequestError(Code.invalid_request, "the prompt has no tokens; give at least one")
    if max_tokens <= generated:
        raise RequestError(
            Code.invalid_request, f"max_tokens is {max_tokens} and {generated} are generated already: nothing to do"
        )
    length = prompt_len + generated
    if length >= max_model_len:
        raise RequestError(
            Code.context_length_exceeded,
            f"{length} tokens leave no room for a new one: this model takes {max_model_len}, output included",
        )
