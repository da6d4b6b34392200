"""Tool calls in notations other than JSON and markup; each is emitted when it is complete.

- a notation with a mark around texts: ``call:NAME{key:<|"|>text<|"|>,number:3}`` (Gemma 4). Only a whole one is
  known to be a call;
- as Python writes calls: ``[get_weather(city="Oslo", days=3), ...]``, or one to a line. Only then are the values known
  to be literals.
"""

import ast
import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.infra.text.parsers.delta_builder import DeltaBuilder
from penstock.infra.text.parsers.families import CallFormat
from penstock.infra.text.parsers.json_calls import listed_calls, one_call
from penstock.infra.text.parsers.json_text import PYTHON, Nesting, encode
from penstock.infra.text.parsers.reader import EmptySection, MalformedCall, Markers, Marks, Reader, Steps
from penstock.infra.text.parsers.tool_formats import (
    FUNCTION_NAME_CHARS,
    CallReader,
    Offered,
    end_call,
    parse_name,
    read_closing,
)

_DEEPEST = 64  # objects within objects
_SCALAR = re.compile(r"[^,\[\]{}]*")
_KEY = re.compile(r"[^:,\[\]{}]*")


def notation_calls(form: CallFormat, marks: Marks) -> CallReader:
    """A reader of the calls of a row, with the marks of one vocabulary."""
    close = marks.within(form.section[1].strip())
    begin = marks.within(form.call[0].strip())
    quote = marks.within(form.quote)
    outside, inside = Markers(quote, "{", "}"), Markers(quote)

    def calls(reader: Reader, deltas: DeltaBuilder, offered: Offered, opener: str) -> Steps[None]:
        yield from reader.space()
        mark = yield from reader.literal(begin, ":", *filter(None, (close,)))  # models omit the word
        if mark == close:
            raise EmptySection if mark else MalformedCall
        while True:
            name = parse_name((yield from reader.run(FUNCTION_NAME_CHARS)))
            yield from reader.space()
            if not (yield from reader.literal("{")):
                raise MalformedCall
            parts, depth = ["{"], 1
            while depth:
                if not (mark := (yield from reader.until(outside, parts.append))):
                    raise MalformedCall
                parts.append(mark)
                depth += {"{": 1, "}": -1}.get(mark, 0)
                if mark == quote:
                    if not (yield from reader.until(inside, parts.append)):
                        raise MalformedCall
                    parts.append(quote)
            arguments = encode(_Notation("".join(parts), quote, deltas).whole(offered.texts.get(name, {}))).decode()
            deltas.begin_call(name)
            deltas.arguments(arguments)
            reader.commit()
            end_call(reader, deltas)
            mark = yield from read_closing(reader, deltas, close, begin)
            if mark != begin:
                return
            reader.checkpoint_call(mark)

    return calls


class _Notation:
    """Decodes the arguments of one call."""

    def __init__(self, text: str, quote: str, deltas: DeltaBuilder) -> None:
        self._text, self._quote, self._deltas = text, quote, deltas
        self._texts: Mapping[str, bool] = {}
        self._at = 0

    def whole(self, texts: Mapping[str, bool]) -> Any:
        """
        Args:
            texts: parameters that are text, also where the mark around it is left out; whether they may be null.
        Raises:
            MalformedCall: it is not an object of this notation.
        """
        self._texts = texts
        made = self._value(0)
        if self._at != len(self._text):
            raise MalformedCall
        return made

    def _value(self, depth: int, text: bool | None = None) -> Any:
        if depth > _DEEPEST:
            raise MalformedCall
        self._space()
        if self._takes(self._quote):
            return self._quoted()
        if self._takes("{"):
            return self._object(depth)
        if self._takes("["):
            return self._array(depth)
        return self._scalar(text)

    def _object(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        while not self._closed("}"):
            self._space()
            key = self._quoted() if self._takes(self._quote) else self._bare()
            self._space()
            if not key or not self._takes(":"):
                raise MalformedCall
            made[key] = self._value(depth + 1, None if depth else self._texts.get(key))
            self._separated("}")
        return made

    def _bare(self) -> str:
        """A key without its marks."""
        return self._deltas.shown(self._run(_KEY)).strip().strip('"')

    def _array(self, depth: int) -> list[Any]:
        made: list[Any] = []
        while not self._closed("]"):
            made.append(self._value(depth + 1))
            self._separated("]")
        return made

    def _quoted(self) -> str:
        end = self._text.find(self._quote, self._at)
        if end < 0:
            raise MalformedCall
        text, self._at = self._text[self._at : end], end + len(self._quote)
        return self._deltas.shown(text)

    def _scalar(self, may_be_null: bool | None) -> Any:
        """A number, a word, or a text without its marks: always a text unless ``may_be_null`` is None."""
        text = self._deltas.shown(self._run(_SCALAR)).strip()
        if not text:
            raise MalformedCall
        word = {"true": True, "false": False, "null": None, "none": None}
        if may_be_null is not None and not (may_be_null and word.get(text.lower(), text) is None):
            return text
        if text.lower() in word:
            return word[text.lower()]
        try:
            return msgspec.json.decode(text.encode())
        except (msgspec.DecodeError, UnicodeError):
            return text

    def _separated(self, end: str) -> None:
        self._space()
        if not self._takes(",") and self._text[self._at : self._at + 1] != end:
            raise MalformedCall

    def _closed(self, end: str) -> bool:
        self._space()
        return self._takes(end)

    def _takes(self, mark: str) -> bool:
        taken = self._text.startswith(mark, self._at)
        self._at += len(mark) if taken else 0
        return taken

    def _space(self) -> None:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1

    def _run(self, pattern: "re.Pattern[str]") -> str:
        found = pattern.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        return found.group()


_NAME_RUN = re.compile(r"[A-Za-z0-9_.\-]*")
_ESCAPED = {"\n": r"\n", "\0": r"\x00"}
_WORDS = {"true": True, "false": False, "null": None}
# Strings, and zeros before a number, which models write in dates and Python refuses.
_REPAIRED = re.compile(r"(\"\"\"|'''|[\"'])(?:\\.|(?!\1)[^\\])*\1|(?<![\w.])0+(?=[1-9])", re.S)


def _repaired(found: re.Match[str]) -> str:
    """A string with its line breaks and null characters escaped: models write them as they are. Of zeros, nothing."""
    if not found[1]:
        return ""
    return re.sub(r"\\.|[\n\0]", lambda each: _ESCAPED.get(each[0], each[0]), found[0], flags=re.S)


def _parse_arguments(text: str) -> dict[str, Any]:
    """Keyword arguments from their text without the parentheses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of "\d" in a string
            call = ast.parse(f"f({_REPAIRED.sub(_repaired, text)})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise MalformedCall
        return {_keyword(word.arg): _literal(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise MalformedCall from None


def _keyword(key: str | None) -> str:
    if key is None:  # **{...}
        raise MalformedCall
    return key


def _literal(node: ast.expr | None) -> Any:
    match node:
        case ast.Constant(value=str() | int() | None):
            return node.value
        case ast.Constant(value=float() as number) if math.isfinite(number):  # JSON has no 1e999
            return number
        case ast.Name(id=word) if word in _WORDS:  # as in JSON
            return _WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float()) as operand):
            return -_literal(operand)
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(_literal(key)): _literal(item) for key, item in zip(keys, values, strict=True)}
    raise MalformedCall


def pythonic_calls(form: CallFormat, marks: Marks) -> CallReader:
    """A reader of the calls of a row, with the marks of one vocabulary. JSON is read in a list or between marks."""
    close = marks.within(form.section[1].strip())
    separators = (",", "]") if form.list else tuple(filter(None, (close, ",", ";")))
    objects, one_object = listed_calls(form), one_call(form)

    def calls(reader: Reader, deltas: DeltaBuilder, offered: Offered, opener: str) -> Steps[None]:
        yield from reader.space()
        if opener and close and (yield from reader.literal(close)):
            raise EmptySection
        if opener and close and (yield from reader.literal("{")):
            mark = "{"
            while mark == "{":  # one or more, with or without something between them
                yield from one_object(reader, deltas)
                mark = yield from read_closing(reader, deltas, close, ",", ";", "{")
                if mark in (",", ";"):
                    reader.checkpoint_call(mark)
                    yield from reader.space()
                    if not (mark := (yield from reader.literal(close, "{"))):
                        raise MalformedCall
                elif mark == "{":
                    reader.checkpoint_call(mark)
            return
        if form.list:
            if not (yield from reader.literal("[")):
                raise MalformedCall
            yield from reader.space()
            if opener and (yield from reader.literal("]")):
                yield from read_closing(reader, deltas.probe(), close)
                raise EmptySection
            if reader.peek() == "{":
                yield from objects(reader, deltas)
                yield from read_closing(reader, deltas, close)
                return
        while True:
            yield from reader.space()
            name = parse_name((yield from reader.run(_NAME_RUN)))
            if not (yield from reader.literal("(")):
                raise MalformedCall
            parts: list[str] = []
            if not (yield from reader.scan(Nesting(PYTHON, depth=1), parts.append)):
                raise MalformedCall
            try:
                arguments = encode(_parse_arguments(deltas.shown("".join(parts))[:-1])).decode()
            except UnicodeEncodeError:  # a lone surrogate
                raise MalformedCall from None
            space = yield from reader.space()
            mark = yield from reader.literal(*separators)
            if not mark and (form.list or reader.cut_short):
                raise MalformedCall
            deltas.begin_call(name)
            deltas.arguments(arguments)
            reader.commit()
            end_call(reader, deltas)
            if mark == "]" and form.list:
                yield from read_closing(reader, deltas, close)
                return
            if mark == close and close:
                return
            if not mark and not reader.peek():
                return
            reader.checkpoint_call(space + mark)

    return calls
