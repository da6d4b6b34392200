"""Tool calls as XML-like markup, one element per argument (Qwen3-Coder, GLM-4.5), turned into JSON incrementally.

Whether ``5`` is a number or a text is not in the markup; the tool's schema decides.
"""

import ast
import re
from collections.abc import Callable

import msgspec

from infra.model.parsers.delta_builder import DeltaBuilder
from infra.model.parsers.json_text import encode
from infra.model.parsers.reader import MalformedCall, Markers, Reader, Steps
from infra.model.parsers.tool_formats import TextParameters, ToolFormat, parse_name, read_closing

_KEY = re.compile(r"[^<>\n]*")
_NAME_RUN = re.compile(r"[^<>\s]*")
_WORDS = {"true": b"true", "false": b"false", "null": b"null", "none": b"null"}


def _value(reader: Reader, deltas: DeltaBuilder, end: Markers, text: bool | None, *, lines: bool) -> Steps[bool]:
    """Read one argument's value, behind its opening mark, to its end.

    Args:
        text: None: JSON if it is valid, else text; False: text; True: text or null.
        lines: the value is on lines of its own.
    Returns: False: it is incomplete.
    """
    if text is False:
        deltas.arguments('"')
        over = yield from reader.until(
            end, _Lines(deltas.arguments) if lines else lambda part: deltas.arguments(_in(part))
        )
        deltas.arguments('"' if over else "")
        return bool(over)
    parts: list[str] = []
    over = yield from reader.until(end, parts.append)
    whole = "".join(parts)
    if lines:
        whole = whole.removeprefix("\n").removesuffix("\n")
    deltas.arguments(_guessed(whole, text) if over else _in(whole))
    return bool(over)


class _Lines:
    """Escapes text for a JSON string without the line breaks at its two ends."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._begun = False
        self._break = ""

    def __call__(self, part: str) -> None:
        if not self._begun:
            self._begun = True
            part = part.removeprefix("\n")
        part = self._break + part
        kept = part.removesuffix("\n")
        self._break = part[len(kept) :]
        self._emit(_in(kept))


def _in(text: str) -> str:
    """Escaped for the inside of a JSON string."""
    return encode(text)[1:-1].decode()


def _guessed(text: str, may_be_null: bool | None) -> str:
    """The JSON of a value that is written without quotes."""
    word = _WORDS.get(text.strip().lower())
    if may_be_null:
        return "null" if word == b"null" else encode(text).decode()
    if word is not None:
        return word.decode()
    try:
        msgspec.json.decode(text.encode())
        return text.strip()
    except (msgspec.DecodeError, RecursionError):
        return _from_python(text) or encode(text).decode()


def _from_python(text: str) -> str:
    """The JSON of an object or a list as Python writes it, ``{'a': True}``; "": it is none."""
    if text.strip()[:1] not in ("{", "["):
        return ""
    try:
        return encode(ast.literal_eval(text.strip())).decode()
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # of several kinds, by Python's release
        return ""


class _Arguments:
    """Writes the object around the values."""

    def __init__(self, deltas: DeltaBuilder, texts: dict[str, bool]) -> None:
        self._sink = deltas
        self._texts = texts
        self._begun = False

    def key(self, key: str) -> bool | None:
        """Begin an argument; returns its ``text`` for ``_value``."""
        self._sink.arguments((", " if self._begun else "{") + encode(key).decode() + ": ")
        self._begun = True
        return self._texts.get(key)

    def end(self) -> None:
        self._sink.arguments("}" if self._begun else "{}")


_PARAMETER_END = Markers("</parameter>")
_VALUE_END = Markers("</arg_value>")
_NEXT = ("<parameter=", "</function>")  # behind a parameter
_NEXT_KEY = ("<arg_key>", "</tool_call>")


def _qwen3_coder(reader: Reader, deltas: DeltaBuilder, texts: TextParameters) -> Steps[None]:
    """``<tool_call><function=FUNCTION_NAME><parameter=KEY>\\nVALUE\\n</parameter>...</function></tool_call>``"""
    yield from reader.space()
    if not (yield from reader.literal("<function=")):
        raise MalformedCall
    name = parse_name((yield from reader.run(_NAME_RUN)))
    if not (yield from reader.literal(">")):
        raise MalformedCall
    deltas.begin_call(name)
    reader.commit()
    arguments = _Arguments(deltas, texts.get(name, {}))
    while (mark := (yield from read_closing(reader, deltas, *_NEXT))) == _NEXT[0]:
        key = (yield from reader.run(_KEY)).strip()
        if not (yield from reader.literal(">")) or not key:
            deltas.content(mark + key)
            break
        if not (yield from _value(reader, deltas, _PARAMETER_END, arguments.key(key), lines=True)):
            return
    if mark or not reader.cut_off(*_NEXT):
        arguments.end()
    yield from read_closing(reader, deltas, "</tool_call>")


def _glm45(reader: Reader, deltas: DeltaBuilder, texts: TextParameters) -> Steps[None]:
    """``<tool_call>FUNCTION_NAME\\n<arg_key>KEY</arg_key>\\n<arg_value>VALUE</arg_value>...</tool_call>``"""
    yield from reader.space()
    name = parse_name((yield from reader.run(_NAME_RUN)))
    yield from reader.space()
    mark = yield from reader.literal(*_NEXT_KEY)
    if not mark:
        raise MalformedCall
    deltas.begin_call(name)
    reader.commit()
    arguments = _Arguments(deltas, texts.get(name, {}))
    while mark == "<arg_key>":
        key = (yield from reader.run(_KEY)).strip()
        if not key or not (yield from reader.literal("</arg_key>")):
            deltas.content(mark + key)
            break
        if not (yield from read_closing(reader, deltas, "<arg_value>")):
            return
        if not (yield from _value(reader, deltas, _VALUE_END, arguments.key(key), lines=False)):
            return
        mark = yield from read_closing(reader, deltas, *_NEXT_KEY)
    if mark or not reader.cut_off(*_NEXT_KEY):
        arguments.end()


_TAGS = ("<tool_call>", "</tool_call>")

QWEN3_CODER = ToolFormat(_qwen3_coder, _TAGS[:1], special=_TAGS, needs_texts=True)
GLM45 = ToolFormat(
    _glm45, _TAGS[:1], special=(*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"), needs_texts=True
)
