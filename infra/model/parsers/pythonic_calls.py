"""Tool calls as a Python list of calls: the whole answer is ``[get_weather(city="Oslo", days=3), ...]`` (Llama 4).

A call is emitted when it is complete: only then are its values known to be literals.
"""

import ast
import math
import re
import warnings
from typing import Any

from infra.model.parsers.delta_builder import DeltaBuilder
from infra.model.parsers.json_text import encode
from infra.model.parsers.reader import MalformedCall, Reader, Steps
from infra.model.parsers.tool_formats import TextParameters, ToolFormat, parse_name, read_closing

_NAME_RUN = re.compile(r"[A-Za-z0-9_.\-]*")
_STRUCTURE = re.compile(r"[\"'()\[\]{}]")
_IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_WORDS = {"true": True, "false": False, "null": None}


class _Parentheses:
    """Follows a call's arguments to the closing parenthesis; the opening one has been read."""

    __slots__ = ("_depth", "_escaped", "_quote")

    def __init__(self) -> None:
        self._depth = 1
        self._quote = ""
        self._escaped = False

    def __call__(self, text: str, at: int) -> tuple[int, bool]:
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_IN_STRING[self._quote] if self._quote else _STRUCTURE).search(text, at)
            if match is None:
                return len(text), False
            at, what = match.end(), match.group()
            if what == "\\":
                self._escaped = True
            elif what in "\"'":
                self._quote = "" if self._quote else what
            else:
                self._depth += 1 if what in "([{" else -1
                if not self._depth:
                    return at, True
        return at, False


def _parse_arguments(text: str) -> dict[str, Any]:
    """Keyword arguments from their text without the parentheses.

    Raises:
        MalformedCall: not keyword arguments of literals.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of "\d" in a string
            call = ast.parse(f"f({text})", mode="eval").body
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
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(_literal(key)): _literal(item) for key, item in zip(keys, values, strict=True)}
    raise MalformedCall


def _pythonic(reader: Reader, deltas: DeltaBuilder, texts: TextParameters) -> Steps[None]:
    yield from reader.space()
    if not (yield from reader.literal("[")):
        raise MalformedCall
    while True:
        yield from reader.space()
        name = parse_name((yield from reader.run(_NAME_RUN)))
        if not (yield from reader.literal("(")):
            raise MalformedCall
        parts: list[str] = []
        if not (yield from reader.scan(_Parentheses(), parts.append)):
            raise MalformedCall
        try:
            arguments = encode(_parse_arguments("".join(parts)[:-1])).decode()
        except UnicodeEncodeError:  # a lone surrogate
            raise MalformedCall from None
        yield from reader.space()
        mark = yield from reader.literal(",", "]")
        if not mark:
            raise MalformedCall
        deltas.begin_call(name)
        deltas.arguments(arguments)
        reader.commit()
        if mark == "]":
            yield from read_closing(reader, deltas, "<|python_end|>")
            return
        reader.checkpoint(mark)


PYTHONIC = ToolFormat(_pythonic, ("<|python_start|>",), starts="[", special=("<|python_start|>", "<|python_end|>"))
