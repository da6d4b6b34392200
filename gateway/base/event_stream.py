"""Server-sent events of the OpenAI API (data in JSON, ended by ``[DONE]``), and large lists as JSON in slices.

One call of the encoder, or one copy of a large string, holds the interpreter until it returns, also in a thread: 10 MB
of log-probabilities in one call block the event loop for 50 to 100 ms. So slices are never joined, and the event loop
runs between two of them.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec

from penstock.gateway.base.chat_objects import error_body
from penstock.schemas.errors import Code, ServingError

DONE = b"data: [DONE]\n\n"
COMMENT = b": still working\n\n"  # no event, and without an id: for proxies, which cut streams that send nothing
_MAX_DIGITS = 15

_json = msgspec.json.encode

# Line ends of ``str.splitlines``, httpx's ``iter_lines`` or Node's ``readline`` that JSON does not have to escape.
_ESCAPED = {b"\xe2\x80\xa8": rb"\u2028", b"\xe2\x80\xa9": rb"\u2029", b"\xc2\x85": rb"\u0085"}
_LINE_ENDS = re.compile(b"|".join(_ESCAPED))


def within_lines(data: bytes) -> bytes:
    """Escape characters in JSON, or in events of JSON, that some clients take for the end of a line."""
    return _LINE_ENDS.sub(lambda found: _ESCAPED[found[0]], data)


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


class EventWriter:
    """Collects the events of one push.

    Attributes:
        number: of the next event, from 0.
    """

    def __init__(self) -> None:
        self.number = 0
        self._first = 0
        self._out: list[bytes] = []

    def resume(self, last_event_id: str) -> None:
        """Skip everything up to this event; then write all of them.

        Raises:
            ServingError: not the id of an event of such an answer.
        """
        text = last_event_id.strip()
        if not text:
            raise invalid_event_id(last_event_id)
        self._first = parse_position(text, last_event_id) + 1

    @property
    def wanted(self) -> bool:
        """Whether the next event is one that the client has not seen."""
        return self.number >= self._first

    def write(self, kind: bytes, data: bytes) -> None:
        if self.wanted:
            self._out.append(b"id: %d\nevent: %b\ndata: %b\n\n" % (self.number, kind, data))
        self.number += 1

    def write_apart(self, kind: bytes, data: bytes) -> None:
        """An event without a number: the stream continues elsewhere, with another event in its place."""
        self._out.append(b"event: %b\ndata: %b\n\n" % (kind, data))

    def take(self) -> bytes:
        out, self._out = self._out, []
        return b"".join(out)


SLICE = 32  # values; with 20 alternatives each they take 40 KB of JSON and 0.5 ms

# Stands for slices in the JSON around them. No other JSON has this byte: strings have it escaped.
_MARK = b"\0"
PLACEHOLDER = msgspec.Raw(_MARK)

_encoded = msgspec.json.Encoder().encode


def encode_list(values: Iterable[Any]) -> list[bytes]:
    """A JSON array in slices. ``values`` may be an iterator that makes each value when asked."""
    rest = iter(values)
    slices = [b"["]
    while part := list(islice(rest, SLICE)):
        if len(slices) > 1:
            slices.append(b",")
        slices.append(_encoded(part)[1:-1])
    slices.append(b"]")
    return slices


def encode_fields(struct: msgspec.Struct) -> list[bytes]:
    """A struct whose fields are lists, as a JSON object in slices."""
    slices = []
    for number, name in enumerate(struct.__struct_fields__):
        slices.append(b'%b"%b":' % (b"," if number else b"{", name.encode()))
        slices += encode_list(getattr(struct, name))
    slices.append(b"}")
    return slices


def fill(shell: bytes, lists: Sequence[list[bytes]]) -> list[bytes]:
    """The JSON of ``shell``, with the slices in the place of its placeholders, in order."""
    first, *rest = shell.split(_MARK)
    parts = [first]
    for slices, behind in zip(lists, rest, strict=True):
        parts += slices
        parts.append(behind)
    return parts
