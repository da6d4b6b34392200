"""JSON as a model writes it, read incrementally: values are passed on verbatim, never decoded and encoded again."""

import re
from collections.abc import Callable

import msgspec

from infra.model.parsers.reader import MalformedCall, Reader, Steps

_STRUCTURE = re.compile(r'["\[\]{}<]')
_IN_STRING = re.compile(r'["\\]')
_SCALAR = re.compile(r"[^\s,\]}<]*")

_text = msgspec.json.Decoder(str).decode
encode = msgspec.json.Encoder().encode


class Nesting:
    """Follows an object, array or string to its end. "<" outside of strings is not JSON: it ends there, broken."""

    __slots__ = ("_depth", "_escaped", "_string", "broken")

    def __init__(self) -> None:
        self._depth = 0
        self._string = self._escaped = False
        self.broken = False

    def __call__(self, text: str, at: int) -> tuple[int, bool]:
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_IN_STRING if self._string else _STRUCTURE).search(text, at)
            if match is None:
                return len(text), False
            at, what = match.end(), match.group()
            if what == '"':
                self._string = not self._string
            elif what == "\\":
                self._escaped = True
            elif what == "<":
                self.broken = True
                return at - 1, True
            else:
                self._depth += 1 if what in "[{" else -1
            if self._depth <= 0 and not self._string and not self._escaped:
                return at, True
        return at, False


def value(reader: Reader, emit: Callable[[str], object]) -> Steps[bool]:
    """Pass on one value verbatim. Returns: False: it is incomplete."""
    while not reader.peek() and not reader.ended:
        yield
    if reader.peek() not in ("{", "[", '"'):
        scalar = yield from reader.run(_SCALAR)
        emit(scalar)
        return bool(scalar)
    nesting = Nesting()
    over = yield from reader.scan(nesting, emit)
    return over and not nesting.broken


def string(reader: Reader) -> Steps[str]:
    """Read a string.

    Raises:
        MalformedCall: no string follows, or it is incomplete.
    """
    while not reader.peek() and not reader.ended:
        yield
    parts: list[str] = []
    if reader.peek() != '"' or not (yield from value(reader, parts.append)):
        raise MalformedCall
    try:
        return _text("".join(parts))
    except (msgspec.DecodeError, UnicodeDecodeError):  # a line break in it, or a lone surrogate
        raise MalformedCall from None
