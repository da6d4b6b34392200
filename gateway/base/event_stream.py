"""Server-sent events of the OpenAI API: data in JSON, ended by ``[DONE]``."""

import msgspec

from penstock.gateway.base.chat_objects import error_body
from penstock.schemas.errors import Code, ServingError

DONE = b"data: [DONE]\n\n"
COMMENT = b": still working\n\n"  # no event, and without an id: for proxies, which cut streams that send nothing
_MAX_DIGITS = 15

_json = msgspec.json.encode


def error_event(error: ServingError, *, finished: bool) -> bytes:
    """The last event of a stream that failed.

    Args:
        finished: the request has ended too, so that ``[DONE]`` follows; otherwise clients may read on elsewhere.
    """
    return b"data: " + _json(error_body(error)) + b"\n\n" + (DONE if finished else b"")


def parse_position(text: str, event_id: str) -> int:
    """A number within an event id.

    Raises:
        ServingError: not a number.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise invalid_event_id(event_id)
    return int(text)


def invalid_event_id(event_id: str) -> ServingError:
    message = f"{event_id[:200]!r} is not an event id of this answer"
    return ServingError(Code.invalid_request, message, param="Last-Event-ID")
