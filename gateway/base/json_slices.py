"""JSON of large lists, encoded in slices that are never joined.

One call of the encoder, or one copy of a large string, holds the interpreter until it returns, also in a thread: 10 MB
of log-probabilities in one call block the event loop for 50 to 100 ms. Between two slices the event loop runs.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import msgspec

SLICE = 32  # values; with 20 alternatives each they take 40 KB of JSON and 0.5 ms

# Stands for slices in the JSON around them. No other JSON has this byte: strings have it escaped.
_MARK = b"\0"
PLACEHOLDER = msgspec.Raw(_MARK)

_json = msgspec.json.Encoder().encode


def encode_list(values: Iterable[Any]) -> list[bytes]:
    """A JSON array in slices. ``values`` may be an iterator that makes each value when asked."""
    rest = iter(values)
    slices = [b"["]
    while part := list(islice(rest, SLICE)):
        if len(slices) > 1:
            slices.append(b",")
        slices.append(_json(part)[1:-1])
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
