"""Which of the engine's exceptions end one request, and which the engine. Pure: the caller passes the classes."""

import re

from penstock.schemas.errors import Code

_TOO_LONG = re.compile(
    r"max_num_tokens|max_seq_len|max_input_len|too long|exceed\w*.{0,40}(?:length|limit|tokens)", re.I
)
_TRANSFER = re.compile(r"transceiver|kv[ _-]?cache transfer|context (?:phase|request)|disagg", re.I)


def is_request_error(error: BaseException, request_error: type[BaseException] | None, *, at_call: bool) -> bool:
    """Whether only this request failed.

    The call itself validates values and types. While its outputs are iterated, only a RequestError is the request's
    own.

    Args:
        request_error: TensorRT-LLM's RequestError; a RuntimeError, so it is checked first.
        at_call: raised by the call, not while iterating.
    """
    if request_error is not None and isinstance(error, request_error):
        return True
    return at_call and isinstance(error, ValueError | TypeError | NotImplementedError)


def code_of(error: BaseException, *, at_call: bool, adopted: bool) -> Code:
    """The code of an error of one request.

    Args:
        adopted: its KV was computed by another engine; if its transfer fails, the prompt can be computed again.
    """
    text = str(error)
    if adopted and _TRANSFER.search(text):
        return Code.transfer_failed
    if _TOO_LONG.search(text):
        return Code.context_length_exceeded
    if isinstance(error, NotImplementedError):
        return Code.unsupported
    return Code.invalid_request if at_call else Code.engine_error
