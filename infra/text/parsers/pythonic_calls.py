"""Tool calls as Python writes calls: ``[get_weather(city="Oslo", days=3), ...]``, or one to a line.

A call is emitted when it is complete: only then are its values known to be literals.
"""

import ast
import math
import re
import warnings
from typing import Any

from penstock.infra.text.parsers.delta_builder import DeltaBuilder
from penstock.infra.text.parsers.families import CallFormat
from penstock.infra.text.parsers.json_calls import listed_calls
from penstock.infra.text.parsers.json_text import PYTHON, Nesting, encode
from penstock.infra.text.parsers.reader import EmptySection, MalformedCall, Marks, Reader, Steps
from penstock.infra.text.parsers.tool_formats import CallReader, Offered, end_call, parse_name, read_closing

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
    """A reader of the calls of a row, with the marks of one vocabulary. In a list, calls may also be JSON objects."""
    close = marks.within(form.section[1].strip())
    separators = (",", "]") if form.list else tuple(filter(None, (close, ",", ";")))
    objects = listed_calls(form)

    def calls(reader: Reader, deltas: DeltaBuilder, offered: Offered, opener: str) -> Steps[None]:
        yield from reader.space()
        if opener and close and (yield from reader.literal(close)):
            raise EmptySection
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
