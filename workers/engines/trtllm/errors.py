"""Which of the engine's exceptions end one request, and which the engine. Pure: classes are given by the caller."""

import re

from schemas.errors import Code

_TOO_LONG = re.compile(
    r"max_num_tokens|max_seq_len|max_input_len|too long|exceed\w*.{0,40}(?:length|limit|tokens)", re.I
)
_TRANSFER = re.compile(r"transceiver|kv[ _-]?cache transfer|context (?:phase|request)|disagg", re.I)


def own_fault(error: BaseException, request_error: type[BaseException] | None, *, at_call: bool) -> bool:
    """Whether only this request failed. RequestError is a RuntimeError, so it has to be asked for first.

    At the call, values and types are checked; while iterating nothing but a RequestError is the request's own.
    """
    if request_error is not None and isinstance(error, request_error):
        return True
    return at_call and isinstance(error, ValueError | TypeError | NotImplementedError)


def code_of(error: BaseException, *, at_call: bool, adopted: bool) -> Code:
    """The code of an error of one request.

    Args:
        adopted: its prompt was computed by another engine; what goes wrong with that can be computed again.
    """
    text = str(error)
    if adopted and _TRANSFER.search(text):
        return Code.transfer_failed
    if _TOO_LONG.search(text):
        return Code.context_length_exceeded
    if isinstance(error, NotImplementedError):
        return Code.unsupported
    return Code.invalid_request if at_call else Code.engine_error
