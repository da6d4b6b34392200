"""Errors of request bodies, and decoding that raises them. Each names the field at fault and the limit.

Errors about a chat that was made of another API's body: under the names that its client used. Pure.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.schemas.errors import Code, ServingError

_FIELD = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `(\w+)`")
_LONGEST = 400  # characters of a decoder's message, which may quote the client's text


def invalid(field: str | None, message: str) -> ServingError:
    """A value that the API does not allow."""
    return ServingError(Code.invalid_request, message, param=field)


def unsupported(field: str, message: str) -> ServingError:
    """A valid value that this server does not implement."""
    return ServingError(Code.unsupported, message, param=field)


def prompt_too_long(amount: str, max_model_len: int) -> ServingError:
    """``amount`` is the prompt's length with its unit, as in "at least 5000 tokens"."""
    return ServingError(
        Code.context_length_exceeded,
        f"the prompt has {amount}; this model's context length is {max_model_len} tokens, prompt and output together. "
        "Shorten the prompt.",
    )


def model_not_found(model: str, served: Sequence[str], path: str = "") -> ServingError:
    """
    Args:
        path: where this model is asked instead; "": nowhere.
    """
    names = ", ".join(map(repr, served)) or "no model that generates text"
    if not model:
        return ServingError(Code.model_not_found, f"model is missing, and there is {names} for you", param="model")
    instead = f"generates no text; use POST {path}" if path else "is not served here"
    return ServingError(Code.model_not_found, f"model {model[:200]!r} {instead}; served: {names}", param="model")


def model_missing(served: Sequence[str]) -> ServingError:
    """A body names no model where several are served."""
    names = ", ".join(map(repr, served))
    return ServingError(Code.invalid_request, f"model is missing; name one of {names}", param="model")


def decode_body(decode: Any, data: bytes) -> Any:
    """Decode JSON with a typed msgspec decoder.

    Raises:
        ServingError: invalid_request: not JSON in UTF-8, or a field of another type or beyond its limit.
    """
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        raise _violation(str(error)) from None
    except RecursionError:
        raise invalid(None, "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(None, f"the body is not valid JSON in UTF-8: {error}"[:_LONGEST]) from None


def _violation(text: str) -> ServingError:
    """msgspec writes ``Expected `float` <= 2.0 - at `$.temperature```; put the field first."""
    match = _FIELD.search(text)
    if match is None or not match[1]:
        missing = _MISSING.search(text)
        return invalid(missing[1] if missing else None, text[:_LONGEST])
    return invalid(match[1], f"{match[1]}: {text[: match.start()]}"[:_LONGEST])


def rename(field: str, places: Mapping[str, str]) -> str:
    """A field of the chat as the client wrote it: by the longest beginning that ``places`` has."""
    for end in range(len(field), 0, -1):
        if (end == len(field) or field[end] in ".[") and (place := places.get(field[:end])) is not None:
            return place + field[end:]
    return field


def renamed(error: ServingError, places: Mapping[str, str]) -> ServingError:
    """The error with the client's name for the field, in its text too."""
    if error.param is None:
        return error
    param = rename(error.param, places)
    if param == error.param:
        return error
    message = error.message.replace(error.param, param)
    return ServingError(error.code, message, param=param, retry_after=error.retry_after)
