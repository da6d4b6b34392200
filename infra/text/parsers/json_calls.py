"""Tool calls whose arguments are JSON, streamed as the model writes them.

``{"name": ..., "arguments": {...}}``, one or a list, or a head with the name in front of the bare arguments.
"""

import re
from collections.abc import Callable

from penstock.infra.text.parsers.delta_builder import DeltaBuilder
from penstock.infra.text.parsers.families import CallFormat
from penstock.infra.text.parsers.json_text import ControlsEscaped, string, value
from penstock.infra.text.parsers.reader import (
    TOKEN,
    EmptySection,
    MalformedCall,
    Markers,
    Marks,
    NotACall,
    Reader,
    Steps,
)
from penstock.infra.text.parsers.tool_formats import (
    FUNCTION_NAME_CHARS,
    CallReader,
    Offered,
    end_call,
    parse_name,
    read_closing,
)

_ARGUMENTS = ("arguments", "parameters")
_ALSO_ARGUMENTS = ("args", "input")  # only between marks, where any object with a name is a call
_KIMI_ID = re.compile(r"(?:functions\.)?(.+):\d+", re.S)
_KIMI_VARIANT = re.compile(r"functions_(.+?)(?:[_:]\d+)?", re.S)
_KIMI_NUMBER = re.compile(r"[._:\-]*\d*$")
_KIMI_CHARS = re.compile(r"[A-Za-z0-9_.\-/:]*")
_ELEMENT = re.compile(r"<(\w+)>")
_IDENTIFIER = re.compile(r"[A-Za-z0-9_\-]*")


def json_calls(form: CallFormat, marks: Marks) -> CallReader:
    """A reader of the calls of a row, with the marks of one vocabulary."""
    close = marks.within(form.section[1].strip())
    begin, end = (marks.within(each.strip()) for each in form.call)
    head = _Head(form, marks) if form.head else None
    if head is not None:
        end = end.removeprefix(head.fence).strip()  # which the head's reader reads
    objects = head is None or form.list
    following = begin or ("" if form.list else form.between.strip()) or ("{" if objects and not form.starts else "")
    another = "{" if objects and form.starts and following != "{" else ""  # a call without its opening text
    one, listed = one_call(form), listed_calls(form)

    def calls(reader: Reader, deltas: DeltaBuilder, offered: Offered, opener: str) -> Steps[None]:
        if begin and opener != begin:
            yield from _to_first(reader, begin, close)
        bracket = ""
        ending = close or _ending(marks.text(opener))
        empty = bool(opener)  # so far
        while True:
            yield from reader.space()
            if empty and ending and (yield from reader.literal(ending)):
                raise EmptySection
            if objects and not bracket:
                bracket = yield from reader.literal("[", "{")
            if bracket == "[":
                yield from reader.space()
                if empty and (yield from reader.literal("]")):
                    yield from read_closing(reader, deltas.probe(), ending)
                    raise EmptySection
                yield from listed(reader, deltas)
            elif bracket == "{":
                yield from one(reader, deltas)
            elif head is not None:
                yield from head.read(reader, deltas, offered)
            else:
                raise MalformedCall
            if end:
                yield from read_closing(reader, deltas, end)
            empty = False
            mark = yield from read_closing(reader, deltas, ending, following, another)
            if not mark or mark == ending:
                return
            reader.checkpoint_call(mark)
            bracket = "{" if mark == "{" else ""

    return calls


def _ending(opener: str) -> str:
    """What stands after calls that begin with an element, or with a fence."""
    if found := _ELEMENT.fullmatch(opener):
        return f"</{found[1]}>"
    return "```" if opener.startswith("```") else ""


def listed_calls(form: CallFormat) -> Callable[[Reader, DeltaBuilder], Steps[None]]:
    """A reader of ``{...}, {...}]`` after its "[". It raises MalformedCall where what follows is not a call."""
    one = one_call(form)

    def listed(reader: Reader, deltas: DeltaBuilder) -> Steps[None]:
        while True:
            yield from reader.space()
            if not (yield from reader.literal("{")):
                raise MalformedCall
            yield from one(reader, deltas)
            if (yield from read_closing(reader, deltas, ",", "]")) != ",":
                return
            reader.checkpoint_call(",")

    return listed


def one_call(form: CallFormat) -> Callable[[Reader, DeltaBuilder], Steps[None]]:
    """A reader of a call after its "{"."""
    keys = tuple(dict.fromkeys((form.arguments_key, *_ARGUMENTS, *(() if form.starts else _ALSO_ARGUMENTS))))

    def one(reader: Reader, deltas: DeltaBuilder) -> Steps[None]:
        if form.keyed:
            yield from _keyed(reader, deltas)
        else:
            yield from _object(reader, deltas, form.name_key, keys, needs_arguments=bool(form.starts))

    return one


def _to_first(reader: Reader, begin: str, close: str) -> Steps[None]:
    """Read to the first call of a section. Models write other text there, which is part of nothing.

    Raises:
        MalformedCall: the section has no call.
    """
    parts: list[str] = []
    mark = yield from reader.until(Markers(*filter(None, (begin, close))), parts.append)
    noise = "".join(parts).strip()
    if mark == begin:
        return
    if mark and not noise:
        raise EmptySection
    raise MalformedCall if not mark and begin.startswith(noise) else NotACall


def _arguments(reader: Reader, deltas: DeltaBuilder) -> Steps[None]:
    """The value of "arguments": an object as it is; some models write it as a string, or null."""
    while not reader.peek() and not reader.ended:
        yield
    if reader.peek() == '"':
        parts: list[str] = []
        if (yield from value(reader, parts.append)):
            deltas.arguments(_unquoted(deltas.shown("".join(parts))).strip() or "{}")
        else:
            deltas.arguments("".join(parts))
    elif reader.peek() == "n" and (yield from reader.literal("null")):
        deltas.arguments("{}")
    else:
        yield from value(reader, ControlsEscaped(deltas.arguments))


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


def _object(
    reader: Reader, deltas: DeltaBuilder, name_key: str, arguments_keys: tuple[str, ...], *, needs_arguments: bool
) -> Steps[None]:
    """One call, ``{"name": ..., "arguments": {...}}``, after its "{". Streams once the name is known."""
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
            if key in (name_key, "name") and not name:
                name = parse_name((yield from string(reader)))
            elif key in arguments_keys and name and not begun:
                begun = True
                deltas.begin_call(name)
                reader.commit()
                yield from _arguments(reader, deltas)
            else:
                parts: list[str] = []
                if not (yield from value(reader, parts.append)):
                    raise MalformedCall
                if key in arguments_keys and early is None and not begun:
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
                if not reader.cut_short:
                    end_call(reader, deltas)
                return
            raise MalformedCall
        if end == "}":
            break
        if begun:
            reader.checkpoint(end)
    if not begun:
        if not name or (early is None and needs_arguments):
            raise MalformedCall
        deltas.begin_call(name)
        reader.commit()
        ControlsEscaped(deltas.arguments)("{}" if early is None else "".join(early))
    end_call(reader, deltas)


def _keyed(reader: Reader, deltas: DeltaBuilder) -> Steps[None]:
    """One call, ``{"name": {...}}``, after its "{"."""
    yield from reader.space()
    name = parse_name((yield from string(reader)))
    yield from reader.space()
    if not (yield from reader.literal(":")):
        raise MalformedCall
    yield from reader.space()
    if reader.peek() not in ("{", '"', "n"):
        raise MalformedCall
    deltas.begin_call(name)
    reader.commit()
    yield from _arguments(reader, deltas)
    yield from reader.space()
    if (yield from reader.literal("}")):
        end_call(reader, deltas)


class _Head:
    """The head of a call: the name, perhaps an id, then the bare arguments.

    DeepSeek's models use each other's formats: V3.1 writes the fence of V3 and R1, which sometimes omit it.

    Attributes:
        fence: what else stands around the arguments; "": nothing.
    """

    def __init__(self, form: CallFormat, marks: Marks) -> None:
        before, _, after = form.head.partition("{name}")
        self._lead = marks.within(before).strip().lstrip("abcdefghijklmnopqrstuvwxyz.")  # its words are not certain
        self._after = marks.within(after.partition("{number}")[2] if "{number}" in after else after).strip()
        self._call_id = marks.within(form.call_id)
        self._ids = form.ids
        self.fence = "```" if self._after.startswith("```") else ""
        self._may_fence = bool(self._after) and not (self.fence or self._lead or self._ids or self._call_id)

    def read(self, reader: Reader, deltas: DeltaBuilder, offered: Offered) -> Steps[None]:
        """
        Raises:
            MalformedCall: not a call.
        """
        yield from reader.space()
        written = yield from reader.run(_KIMI_CHARS if self._ids == "kimi" else FUNCTION_NAME_CHARS)
        if self._lead:  # what was read is a word before the mark
            if not (yield from reader.literal(self._lead)):
                raise MalformedCall
            yield from reader.space()
            if reader.peek() != "{":
                written = yield from reader.run(FUNCTION_NAME_CHARS)
        yield from reader.space()
        call_id = ""
        options = tuple(filter(None, (self._after, self._call_id)))
        mark = (yield from reader.literal(*options)) if options else ""
        if mark and mark == self._call_id:
            call_id = yield from reader.run(_IDENTIFIER)
            mark = yield from reader.literal(self._after)
        fence = self.fence if mark else ""
        if self._after and not mark and not self._call_id and not (self.fence and reader.peek() == "{"):
            raise MalformedCall
        if mark and self._may_fence:
            yield from reader.space()
            if written == "function" and FUNCTION_NAME_CHARS.match(reader.peek())[0]:  # type: ignore[index]
                written = yield from reader.run(FUNCTION_NAME_CHARS)
                yield from reader.space()
            if (yield from reader.literal("```")):
                fence = "```"
                yield from reader.literal("json")
                yield from reader.space()
                if reader.peek() not in ("{", "`"):
                    raise MalformedCall
        if self._ids == "kimi":
            written, call_id = _kimi_head(written, deltas.calls, offered.names)
        name = parse_name(written)
        yield from reader.space()
        following = reader.peek()
        if self._call_id:  # arguments may be left out, also with the mark before them
            nothing = following == "[" or bool(TOKEN.match(following)) or (not following and not reader.limited)
            certain = bool(mark) or not offered.names or name in offered.names
            if following != "{" and not (mark and following == '"') and not (nothing and certain):
                raise MalformedCall
        else:
            nothing = bool(fence) and bool((yield from reader.literal(fence)))
            if not following:
                raise MalformedCall
        deltas.begin_call(name, call_id)
        reader.commit()
        if not nothing:
            yield from _arguments(reader, deltas)
            if fence:
                yield from read_closing(reader, deltas, fence)
        if not reader.cut_short:
            end_call(reader, deltas)


def _kimi_head(text: str, index: int, names: frozenset[str]) -> tuple[str, str]:
    """``functions.get_weather:0`` is the call's id, which the model expects to be sent back.

    Some answers lack the number or a separator, or have "_" for both: their calls get the id that they should have had.
    """
    given = text.strip()
    if found := _KIMI_ID.fullmatch(given):
        return found[1], given
    if given.isdigit() and len(names) == 1:  # the number alone
        return (name := next(iter(names))), f"functions.{name}:{index}"
    for bare in (given, given.removeprefix("functions.").removeprefix("functions_"), given.removeprefix("functions")):
        for name in (bare, _KIMI_NUMBER.sub("", bare)):
            if name in names:
                return name, f"functions.{name}:{index}"
    found = _KIMI_VARIANT.fullmatch(given)
    name = found[1] if found else given.removeprefix("functions.").removesuffix(":")
    return name, f"functions.{name}:{index}"
