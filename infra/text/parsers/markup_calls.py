"""Tool calls as XML-like markup, one element per argument, turned into JSON as the model writes them.

Whether ``5`` is a number or a text is not in most of these formats; the tool's schema decides.
"""

import ast
import html
import re
from collections.abc import Callable, Set
from typing import Any, NamedTuple

import msgspec

from penstock.infra.text.parsers.delta_builder import DeltaBuilder
from penstock.infra.text.parsers.families import CallFormat
from penstock.infra.text.parsers.json_calls import one_call
from penstock.infra.text.parsers.json_text import ControlsEscaped, encode, value
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
from penstock.infra.text.parsers.tool_formats import CallReader, Offered, end_call, parse_name, read_closing

_TAG = re.compile("[^<>\n\ud800-\udfff]*")  # a name and attributes
_MARKS = re.compile(r"[^\s>]+>?|>")
_NAME_RUN = re.compile("[^<>\\s\ud800-\udfff]*")
_ATTRIBUTE = re.compile(r'([\w\-]+)="([^"]*)"')
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*", re.S)
_WRAPPERS = ("arguments", "input")  # in which models write all arguments as one
_DEEPEST = 64  # elements within elements; deeper ones could not be written as JSON
_objects = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode  # numbers stay as they are written
_WORDS = {"true": b"true", "false": b"false", "null": b"null", "none": b"null"}


def markup_calls(form: CallFormat, marks: Marks) -> CallReader:
    """A reader of the calls of a row, with the marks of one vocabulary."""
    return _Markup(form, marks).read


class _Markup:
    def __init__(self, form: CallFormat, marks: Marks) -> None:
        self._types = form.types
        self._close = marks.within(form.section[1].strip())
        self._object = one_call(form)
        self._begin, self._end = (marks.within(each.strip()) for each in form.call)
        self._key_begin = marks.within(form.key[0].strip())
        # Where only the marks of a section are tokens and each call has its own, what looks like a second call is part
        # of the first, for instance of a file that the model writes.
        one = form.each and TOKEN.search(self._close) is not None and TOKEN.search(self._begin) is None
        # What is opened in another way may be closed in that way.
        closings = (marks.within("</" + each[1:]) for each in form.also if each.endswith(">"))
        self._closings = (*filter(None, (self._close,)), *closings)
        self._following = self._closings if one else (self._begin, *self._closings)
        self._call_tag = _Tag(form.call[0], form.name_end, marks, entities=form.entities)
        self._key_tag = _Tag(*form.key, marks, entities=form.entities)
        self._values = _Values(form, marks, (self._key_begin, self._end, self._close), self._key_tag)

    def read(self, reader: Reader, deltas: DeltaBuilder, offered: Offered, opener: str) -> Steps[None]:
        begin, close = self._begin, self._close
        if opener != begin:
            yield from reader.space()
            if self._closings and (yield from reader.literal(*self._closings)):
                raise EmptySection
            if begin and reader.peek() != "{" and not (yield from reader.literal(begin)):
                raise MalformedCall
        elif begin and TOKEN.match(close) and not TOKEN.search(begin):
            yield from self._bare(reader, deltas, offered, opener)
            return
        while True:
            mark = yield from self._one(reader, deltas, offered, in_section=opener != begin)
            if not begin or mark == close or (yield from read_closing(reader, deltas, *self._following)) != begin:
                return
            reader.checkpoint_call(begin)

    def _bare(self, reader: Reader, deltas: DeltaBuilder, offered: Offered, opener: str) -> Steps[None]:
        """A call whose section has no beginning. It is spelled, so only the token at its end shows that it is meant."""
        reader.pin()
        mark = yield from self._one(reader, deltas.probe(), offered)
        if mark != self._close:
            yield from reader.space()
            if not (yield from reader.literal(self._close)):
                raise NotACall
        text = reader.unpin()
        yield from self._one(reader.within(text.removeprefix(opener)), deltas, offered)
        reader.commit()
        end_call(reader, deltas)

    def _one(self, reader: Reader, deltas: DeltaBuilder, offered: Offered, *, in_section: bool = False) -> Steps[str]:
        """Read a call after what stands before its name; returns the last mark that was read.

        Args:
            in_section: it may also be written as JSON.
        """
        if in_section:
            yield from reader.space()
            if (yield from reader.literal("{")):
                yield from self._object(reader, deltas)
                return (yield from read_closing(reader, deltas, self._end, self._close))
        tag = yield from self._call_tag.read(reader)
        if tag is None:
            raise MalformedCall
        name, key, mark = parse_name(tag.name), None, ""
        if not tag.empty:
            yield from reader.space()
            mark = yield from reader.literal(*self._values.following)
            if not mark and self._call_tag.closed and reader.peek() == "{":  # all arguments as one object
                deltas.begin_call(name)
                reader.commit()
                if (yield from value(reader, ControlsEscaped(deltas.arguments))) or not reader.cut_short:
                    mark = yield from read_closing(reader, deltas, self._end, self._close)
                    end_call(reader, deltas)
                return mark
            if mark == self._key_begin:
                key = yield from self._key_tag.read(reader)
            if not mark or (mark == self._key_begin and (key is None or not key.name)):
                raise MalformedCall
        deltas.begin_call(name)
        reader.commit()
        arguments = _Arguments(deltas)
        texts = offered.texts.get(name, {})
        while mark == self._key_begin:
            key = key or (yield from self._key_tag.read(reader))
            if key is None or not key.name:
                if reader.cut_short:
                    return ""
                deltas.content(self._key_begin)
                break
            text = texts.get(key.name) if self._types == "schema" else None
            wrapped = False
            if self._types in key.attributes:
                text = False if key.attributes[self._types] in ("true", "string") else None
                if self._types == "string" and texts:  # the tool's schema is right where the model is not
                    text = text if texts.get(key.name, True) else None
                    wrapped = key.name in _WRAPPERS and key.name not in texts and not arguments.begun
            if wrapped:
                complete, mark, whole = yield from self._values.whole(reader, deltas, key.name)
                arguments.unwrap(key.name, whole, texts.keys(), text=text is False)
            else:
                arguments.key(key.name)
                complete, mark = yield from self._values.read(reader, deltas, text, key.name)
            if not complete:
                return ""
            key = None
        if mark or not reader.cut_short:
            arguments.end()
            end_call(reader, deltas)
        return mark


class _Element(NamedTuple):
    name: str
    attributes: dict[str, str]
    empty: bool  # <name/>


class _Tag:
    """An opening mark after which a name stands, perhaps attributes, and what closes it.

    Attributes:
        closed: something does.
    """

    def __init__(self, before: str, after: str, marks: Marks, *, entities: bool) -> None:
        self._quoted = before.endswith('"')
        closers = after.rpartition('"')[2] if self._quoted else after
        self._closers = [marks.within(each) for each in _MARKS.findall(closers)]
        self._entities = entities
        self.closed = bool(self._closers)

    def follows(self, reader: Reader) -> Steps[bool]:
        """Whether such a tag seems to come next, which is not read."""
        return (yield from reader.follows(_TAG, self._closers[0][0] if self.closed else ""))

    def read(self, reader: Reader) -> Steps[_Element | None]:
        """None: what follows is no such tag."""
        if not self.closed:
            return _Element((yield from reader.run(_NAME_RUN)), {}, False)
        yield from reader.space()
        text = yield from reader.run(_TAG)
        for closer in self._closers:
            yield from reader.space()
            if not (yield from reader.literal(closer)):
                return None
        attributes: dict[str, str] = {}
        empty = False
        if self._quoted:
            text, _, rest = text.partition('"')
            attributes = dict(_ATTRIBUTE.findall(rest))
            empty = rest.rstrip().endswith("/")
        name = text.strip()
        return _Element(html.unescape(name) if self._entities else name, attributes, empty)


class _Values:
    """Reads the values of arguments.

    Attributes:
        following: what may come after an argument.
    """

    def __init__(self, form: CallFormat, marks: Marks, following: tuple[str, str, str], key_tag: _Tag) -> None:
        self._key_begin, end, close = following
        self._key_tag = key_tag
        self.following = tuple(dict.fromkeys(filter(None, following)))
        self._end = marks.within(form.value_end.strip())
        self._lines = form.value_end.startswith("\n")
        # Models forget to close an argument. It ends before the next one, or before the end of the call: at a mark that
        # has a token, or begins a line and is of no other markup.
        self._unclosed: dict[str, str] = {}
        for each in filter(None, ("" if form.elements else self._key_begin, end)):
            if TOKEN.search(each) or self._lines or form.key[0].endswith("="):
                self._unclosed[each if TOKEN.search(each) else "\n" + each] = each
        if form.each and close and not end:
            self._unclosed[close] = close
        self._close = close
        self._markers = Markers(self._end, *self._unclosed)
        self._cdata = form.cdata
        self._elements = marks.within(form.key[0].strip()) if form.elements else ""

    def read(self, reader: Reader, deltas: DeltaBuilder, text: bool | None, key: str) -> Steps[tuple[bool, str]]:
        """Read one value to its end, and what follows it.

        Args:
            text: None: JSON if it is valid, else text; False: text; True: text or null.
        Returns: whether it is complete, and what followed: one of ``following``, or "".
        """
        parts: list[str] = []
        streamed = text is False and not self._cdata
        if streamed:
            deltas.arguments('"')
            emit: Callable[[str], object] = (
                _Lines(deltas) if self._lines else lambda part: deltas.arguments(_in(deltas.shown(part)))
            )
        else:
            emit = parts.append
        complete, mark = yield from self._to_end(reader, emit, key)
        if streamed:
            deltas.arguments('"' if complete else "")
            return complete, mark
        whole = "".join(parts)
        if self._cdata and (section := _CDATA.fullmatch(whole)):
            whole = section[1]
        if text is False:
            content = _in(deltas.shown(whole))
            deltas.arguments(f'"{content}"' if complete else f'"{content}')
            return complete, mark
        if self._lines:
            whole = whole.removeprefix("\n").removesuffix("\n")
        if (
            self._elements
            and self._elements in whole
            and (nested := _nested(whole, self._elements, deltas)) is not None
        ):
            deltas.arguments(encode(nested).decode())
        elif complete:
            deltas.arguments(_guessed(deltas.shown(whole), text))
        else:
            deltas.arguments(_in(deltas.shown(whole)))
        return complete, mark

    def whole(self, reader: Reader, deltas: DeltaBuilder, key: str) -> Steps[tuple[bool, str, str]]:
        """As ``read``, with the text of the value, which is not passed on."""
        parts: list[str] = []
        complete, mark = yield from self._to_end(reader, parts.append, key)
        return complete, mark, deltas.shown("".join(parts))

    def _to_end(self, reader: Reader, emit: Callable[[str], object], key: str) -> Steps[tuple[bool, str]]:
        value_end = self._end.replace("{key}", key)
        markers = self._markers if value_end == self._end else Markers(value_end, *self._unclosed)
        while stop := (yield from reader.until(markers, emit)):
            if self._unclosed.get(stop) == self._key_begin:
                if stop != self._key_begin or (yield from self._key_tag.follows(reader)):
                    return True, self._key_begin
                emit(stop)
                continue
            space = yield from reader.space()
            expected = self.following if stop == value_end else tuple({self._close} - {stop, ""})
            mark = (yield from reader.literal(*expected)) if expected else ""
            # A mark with anything else after it is a part of the value, which has it as its text.
            if mark or (reader.ended and (not reader.peek() or (expected and reader.cut_off(*expected)))):
                return True, mark or self._unclosed.get(stop, "")
            emit(stop + space)
        return False, ""


class _Lines:
    """Escapes text for a JSON string without the line breaks at its two ends."""

    def __init__(self, deltas: DeltaBuilder) -> None:
        self._deltas = deltas
        self._begun = False
        self._break = ""

    def __call__(self, part: str) -> None:
        if not part:
            return
        if not self._begun:
            self._begun = True
            part = part.removeprefix("\n")
        part = self._break + part
        kept = part.removesuffix("\n")
        self._break = part[len(kept) :]
        self._deltas.arguments(_in(self._deltas.shown(kept)))


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


def _nested(text: str, opening: str, deltas: DeltaBuilder) -> Any:
    """The value of elements: an object by name, or a list if all are called "item". None: it is too deep.

    Elements of one name are a list.
    """
    root: list[tuple[str, Any]] = []
    stack: list[tuple[str, list[tuple[str, Any]], list[str]]] = [("", root, [])]
    for chunk in text.split(opening):
        tag, closed, rest = chunk.partition(">")
        if not closed:
            continue
        if not tag.startswith("/"):
            if len(stack) > _DEEPEST:
                return None
            stack.append((deltas.shown(tag).strip(), [], [rest]))
        elif len(stack) > 1:
            name, children, texts = stack.pop()
            leaf = deltas.shown("".join(texts))
            stack[-1][1].append((name, _built(children) if children else msgspec.json.decode(_guessed(leaf, None))))
    while len(stack) > 1:  # it was cut off
        name, children, _ = stack.pop()
        stack[-1][1].append((name, _built(children)))
    return _built(root)


def _built(children: list[tuple[str, Any]]) -> Any:
    if children and all(name == "item" for name, _ in children):
        return [each for _, each in children]
    made: dict[str, list[Any]] = {}
    for name, each in children:
        made.setdefault(name, []).append(each)
    return {name: values[0] if len(values) == 1 else values for name, values in made.items()}


class _Arguments:
    """Writes the object around the values.

    Attributes:
        begun: it has members.
    """

    def __init__(self, deltas: DeltaBuilder) -> None:
        self._sink = deltas
        self.begun = False

    def key(self, key: str) -> None:
        """Begin an argument; its value follows."""
        self._sink.arguments((", " if self.begun else "{") + encode(key).decode() + ": ")
        self.begun = True

    def unwrap(self, key: str, whole: str, named: Set[str], *, text: bool) -> None:
        """Write an argument; if its value is an object of arguments that are ``named``, these in its place."""
        try:
            made = _objects(whole.encode())
        except (msgspec.DecodeError, RecursionError):
            made = None
        if made is not None and made.keys() <= named:
            for name, value in made.items():
                self.key(name)
                self._sink.arguments(bytes(value).decode())
        else:
            self.key(key)
            self._sink.arguments(encode(whole).decode() if text else _guessed(whole, None))

    def end(self) -> None:
        self._sink.arguments("}" if self.begun else "{}")
