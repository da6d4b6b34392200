"""JSON as a model writes it, read incrementally: values are passed on verbatim, never decoded and encoded again."""

import re
from collections.abc import Callable

import msgspec

from penstock.infra.text.parsers.reader import MalformedCall, Reader, Steps

_MATTERS = re.compile(r'\\[^\x00-\x1f]|["\\\x00-\x1f]')
_SCALAR = re.compile("[^\\s,\\]}<\ud800-\udfff]*")

_text = msgspec.json.Decoder(str).decode
encode = msgspec.json.Encoder().encode


class Syntax:
    """
    Attributes:
        structure: what counts outside of strings; what is neither a quote nor a bracket breaks the value.
        in_string: what counts in a string, by its quote.
    """

    __slots__ = ("in_string", "structure")

    def __init__(self, brackets: str, quotes: str, breaks: str = "") -> None:
        self.structure = re.compile(f"[{re.escape(brackets + quotes)}{breaks}]")
        self.in_string = {quote: re.compile(f"[{quote}\\\\]") for quote in quotes}


_JSON = Syntax("[]{}", '"', "<\ud800-\udfff")  # "<" or a mark that is a token ends JSON that lacks a bracket
PYTHON = Syntax("()[]{}", "\"'")


class Nesting:
    """Follows what is in brackets or quotes to its end.

    Attributes:
        broken: it ended without.
    """

    __slots__ = ("_depth", "_escaped", "_quote", "_syntax", "broken")

    def __init__(self, syntax: Syntax = _JSON, depth: int = 0) -> None:
        """
        Args:
            depth: brackets that were read.
        """
        self._syntax = syntax
        self._depth = depth
        self._quote = ""
        self._escaped = self.broken = False

    def __call__(self, text: str, at: int) -> tuple[int, bool]:
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            searched = self._syntax.in_string[self._quote] if self._quote else self._syntax.structure
            match = searched.search(text, at)
            if match is None:
                return len(text), False
            at, what = match.end(), match.group()
            if what == "\\":
                self._escaped = True
            elif what in self._syntax.in_string:
                self._quote = "" if self._quote else what
            elif what in "([{":
                self._depth += 1
            elif what in ")]}":
                self._depth -= 1
            else:
                self.broken = True
                return at - 1, True
            if self._depth <= 0 and not self._quote and not self._escaped:
                return at, True
        return at, False


class ControlsEscaped:
    """Passes on JSON, and escapes control characters in its strings: models write unescaped line breaks."""

    __slots__ = ("_emit", "_escaped", "_quoted")

    def __init__(self, emit: Callable[[str], object]) -> None:
        self._emit = emit
        self._quoted = self._escaped = False

    def __call__(self, part: str) -> None:
        begins = 1 if self._escaped and part >= " " else 0  # keep the character that a backslash escapes
        self._escaped = False
        self._emit(part[:begins] + _MATTERS.sub(self._one, part[begins:]))

    def _one(self, found: re.Match[str]) -> str:
        what = found[0]
        if what == '"':
            self._quoted = not self._quoted
        elif what < " " and self._quoted:
            self._escaped = False
            return encode(what)[1:-1].decode()
        self._escaped = what == "\\"
        return what


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
    except (msgspec.DecodeError, UnicodeError):  # a line break in it, a lone surrogate, or a mark that is a token
        raise MalformedCall from None
