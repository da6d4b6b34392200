"""Tool calls whose arguments are JSON, streamed as the model writes them.

Sources: the models' chat templates (Qwen, Hermes, Mistral, Llama 3, Nemotron, DeepSeek V3 and V3.1, Kimi K2).
"""

import re
from collections.abc import Callable

from infra.model.parsers.delta_builder import DeltaBuilder
from infra.model.parsers.json_text import string, value
from infra.model.parsers.reader import MalformedCall, Markers, Reader, Steps
from infra.model.parsers.tool_formats import FUNCTION_NAME_CHARS, TextParameters, ToolFormat, parse_name, read_closing

_ARGUMENTS = ("arguments", "parameters")
_KIMI_ID = re.compile(r"(?:functions\.)?(.+):\d+", re.S)
_KIMI_VARIANT = re.compile(r"functions_(.+?)(?:[_:]\d+)?", re.S)
_IDENTIFIER = re.compile(r"[A-Za-z0-9]*")


def _arguments(reader: Reader, deltas: DeltaBuilder) -> Steps[None]:
    """The value of "arguments": an object as it is; some models write it as a string, or null."""
    while not reader.peek() and not reader.ended:
        yield
    if reader.peek() == '"':
        parts: list[str] = []
        if (yield from value(reader, parts.append)):
            deltas.arguments(_unquoted("".join(parts)).strip() or "{}")
        else:
            deltas.arguments("".join(parts))
    elif reader.peek() == "n" and (yield from reader.literal("null")):
        deltas.arguments("{}")
    else:
        yield from value(reader, deltas.arguments)


def _unquoted(text: str) -> str:
    inner = Reader()
    inner.feed(text)
    inner.ended = True
    try:
        next(steps := string(inner))
    except StopIteration as found:
        return str(found.value)
    except MalformedCall:
        return text
    steps.close()
    return text


def _object(reader: Reader, deltas: DeltaBuilder, *, needs_arguments: bool = False) -> Steps[None]:
    """One call, ``{"name": ..., "arguments": {...}}``, behind its "{". Streams once the name is known.

    Raises:
        MalformedCall: not a call, and nothing of it has been emitted.
    """
    name = ""
    early: list[str] | None = None  # arguments that precede the name
    begun = False
    while True:
        yield from reader.space()
        if not begun and (yield from reader.literal("}")):
            break
        try:
            key = yield from string(reader)
            yield from reader.space()
            if not (yield from reader.literal(":")):
                raise MalformedCall
            yield from reader.space()
            if key == "name" and not name:
                name = parse_name((yield from string(reader)))
            elif key in _ARGUMENTS and name and not begun:
                begun = True
                deltas.begin_call(name)
                reader.commit()
                yield from _arguments(reader, deltas)
            else:
                parts: list[str] = []
                if not (yield from value(reader, parts.append)):
                    raise MalformedCall
                if key in _ARGUMENTS and early is None and not begun:
                    early = parts
        except MalformedCall:
            if not begun:
                raise
            deltas.content(reader.rollback())
            return
        if begun:
            reader.commit()
        yield from reader.space()
        if not (end := (yield from reader.literal(",", "}"))):
            if begun:
                return
            raise MalformedCall
        if end == "}":
            break
        if begun:
            reader.checkpoint(end)
    if begun:
        return
    if not name or (early is None and needs_arguments):
        raise MalformedCall
    deltas.begin_call(name)
    reader.commit()
    deltas.arguments("{}" if early is None else "".join(early))


def _listed(reader: Reader, deltas: DeltaBuilder) -> Steps[None]:
    """Calls ``{...}, {...}]`` behind their "[".

    Raises:
        MalformedCall: what follows is not a call.
    """
    while True:
        yield from reader.space()
        if not (yield from reader.literal("{")):
            raise MalformedCall
        yield from _object(reader, deltas)
        if (yield from read_closing(reader, deltas, ",", "]")) != ",":
            return
        reader.checkpoint(",")


def _hermes(reader: Reader, deltas: DeltaBuilder, texts: TextParameters) -> Steps[None]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``"""
    yield from reader.space()
    if not (yield from reader.literal("{")):
        raise MalformedCall
    while True:
        yield from _object(reader, deltas)
        if (yield from read_closing(reader, deltas, "</tool_call>", "{")) != "{":
            return
        reader.checkpoint("{")


def _nemotron(reader: Reader, deltas: DeltaBuilder, texts: TextParameters) -> Steps[None]:
    """``<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>``"""
    yield from reader.space()
    if not (yield from reader.literal("[")):
        raise MalformedCall
    yield from _listed(reader, deltas)
    yield from read_closing(reader, deltas, "</TOOLCALL>")


def _mistral(reader: Reader, deltas: DeltaBuilder, texts: TextParameters) -> Steps[None]:
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}`` (newer)."""
    yield from reader.space()
    if (yield from reader.literal("[")):
        yield from _listed(reader, deltas)
        return
    name = parse_name((yield from reader.run(FUNCTION_NAME_CHARS)))
    call_id = ""
    mark = yield from reader.literal("[CALL_ID]", "[ARGS]")
    if mark == "[CALL_ID]":
        call_id = yield from reader.run(_IDENTIFIER)
        mark = yield from reader.literal("[ARGS]")
    yield from reader.space()
    following = reader.peek()
    nothing = following == "[" or (not following and not reader.limited)  # the next call, or the end
    if following != "{" and not (mark and (nothing or following == '"')):
        raise MalformedCall
    deltas.begin_call(name, call_id)
    reader.commit()
    if not nothing:
        yield from _arguments(reader, deltas)


def _llama3(reader: Reader, deltas: DeltaBuilder, texts: TextParameters) -> Steps[None]:
    """The whole answer is ``{"name": ..., "parameters": {...}}``, several with ";" between, perhaps behind
    ``<|python_tag|>``. Other JSON is content."""
    yield from reader.space()
    while True:
        if not (yield from reader.literal("{")):
            raise MalformedCall
        yield from _object(reader, deltas, needs_arguments=True)
        if not (yield from read_closing(reader, deltas, ";")):
            return
        reader.checkpoint(";")
        yield from reader.space()


def _section(
    begin: str, separator: str, end: str, section_end: str, head: Callable[[str, int], tuple[str, str]], *, fenced: bool
) -> Callable[[Reader, DeltaBuilder, TextParameters], Steps[None]]:
    """Calls ``begin head separator {...} end``, one after the other, then ``section_end``.

    Args:
        head: from the text before the separator, and the number of calls before, to (name, id); id "": none.
        fenced: the name follows the separator, and the arguments are a block of Markdown.
    """
    before = Markers(separator)
    line = Markers("\n")

    def calls(reader: Reader, deltas: DeltaBuilder, texts: TextParameters) -> Steps[None]:
        space = yield from reader.space()
        if not (yield from reader.literal(begin)):
            raise MalformedCall
        while True:
            parts: list[str] = []
            if not (yield from reader.until(before, parts.append)):
                raise MalformedCall
            if fenced:
                parts = []
                yield from reader.until(line, parts.append)
                yield from reader.space()
                if not (yield from reader.literal("```json")):
                    raise MalformedCall
            name, call_id = head("".join(parts), deltas.calls)
            name = parse_name(name)
            space = yield from reader.space()
            if not reader.peek():
                raise MalformedCall
            deltas.begin_call(name, call_id)
            reader.commit()
            if not fenced:
                yield from _arguments(reader, deltas)
            elif not (yield from reader.literal("```")):
                yield from _arguments(reader, deltas)
                yield from read_closing(reader, deltas, "```")
            yield from read_closing(reader, deltas, end)
            space = yield from reader.space()
            mark = yield from reader.literal(begin, section_end)
            if mark != begin:
                deltas.skip() if mark else deltas.content(space)
                return
            reader.checkpoint(space + mark)

    return calls


def _kimi_head(text: str, index: int) -> tuple[str, str]:
    """``functions.get_weather:0`` is the call's id, which the model expects to be sent back.

    Some answers lack the number, or have "_" for both separators: their calls get the id that they should have had.
    """
    given = text.strip()
    if found := _KIMI_ID.fullmatch(given):
        return found[1], given
    found = _KIMI_VARIANT.fullmatch(given)
    name = found[1] if found else given.removeprefix("functions.").removesuffix(":")
    return name, f"functions.{name}:{index}"


def _deepseek_head(text: str, index: int) -> tuple[str, str]:
    return text, ""


_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_BEGIN = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_SPECIAL = (_DEEPSEEK_BEGIN, *_DEEPSEEK)
_KIMI = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>")
_KIMI_BEGIN = "<|tool_calls_section_begin|>"
_HERMES = ("<tool_call>", "</tool_call>")

HERMES = ToolFormat(_hermes, _HERMES[:1], special=_HERMES)
NEMOTRON = ToolFormat(_nemotron, ("<TOOLCALL>",), special=("<TOOLCALL>", "</TOOLCALL>"))
MISTRAL = ToolFormat(_mistral, ("[TOOL_CALLS]",), special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), id_chars=9)
LLAMA3 = ToolFormat(_llama3, ("<|python_tag|>",), starts="{", special=("<|python_tag|>",))
DEEPSEEK_V3 = ToolFormat(
    _section(*_DEEPSEEK, _deepseek_head, fenced=True), (_DEEPSEEK_BEGIN,), special=_DEEPSEEK_SPECIAL
)
DEEPSEEK_V31 = ToolFormat(
    _section(*_DEEPSEEK, _deepseek_head, fenced=False), (_DEEPSEEK_BEGIN,), special=_DEEPSEEK_SPECIAL
)
KIMI_K2 = ToolFormat(_section(*_KIMI, _kimi_head, fenced=False), (_KIMI_BEGIN,), special=(_KIMI_BEGIN, *_KIMI))
