"""How families of models write thoughts and calls: a table of rows, in ``families.toml``.

A row is a description. It has no code of its own: a few readers (``json_calls``, ``markup_calls``, ``notation_calls``,
``harmony``) read what it describes, and ``penstock.gateway.grammars.calls`` writes constraints from it.
"""

import difflib
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from penstock.schemas.fleet import AUTO, NONE

PACKAGED = Path(__file__).with_name("families.toml")
PARSED = "parsed"  # the family in whose marks workers write what a server has parsed
CHANNELS = "channels"  # thoughts, content and calls are messages of one format (harmony)


class UnknownFamily(ValueError):
    """A name that no row has; the text lists the nearest."""


class Thoughts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reasoning at the beginning of an answer, between two marks.

    Attributes:
        opening, closing: marks, of which any counts. The first ones are what constraints ask for.
        implied: an answer begins within reasoning unless the prompt has closed it.
        again: there may be more of it after content, if the marks are tokens. A mark without its other is dropped.
        channels: it is messages of the harmony format, which has no other marks.
        template: what a chat template has of it, so that it is detected, a list within the list being one of several;
            empty: it is never detected.
        unless: what such a template does not have.
    """

    opening: tuple[str, ...] = ("<think>",)
    closing: tuple[str, ...] = ("</think>",)
    implied: bool = False
    again: bool = False
    channels: bool = False
    template: tuple[str | tuple[str, ...], ...] = ()
    unless: tuple[str, ...] = ()

    def begun(self, prompt_end: str, *, begins: bool = True) -> bool:
        """Whether an answer to a prompt that ends so begins within reasoning.

        Args:
            begins: the prompt ends with the beginning of an answer.
        """
        if self.channels:
            return False
        end = prompt_end.rstrip()
        opened = any(end.endswith(mark.rstrip()) for mark in self.opening if not mark.strip().isalpha())
        return opened or (self.implied and begins and not end.endswith(self.closing))

    def open_thought(self, prefilled: str) -> str | None:
        """The thought in which the beginning of an answer ends; None: it ends in the content."""
        text = prefilled.lstrip()
        opening = next((mark for mark in self.opening if text.startswith(mark)), None)
        if self.channels or opening is None or any(mark in text for mark in self.closing):
            return None
        return text[len(opening) :]


class CallFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How calls are written: exactly so by constraints. Readers ignore white space at the ends of each text.

    Attributes:
        reader: which one reads them.
        section: what stands before the first call and after the last one.
        each: each call has a section of its own.
        call: what stands before each call and after it. Of "markup", before its name, and after its arguments.
        between: calls.
        also: other texts with which models begin a section, beside the first of ``section``, or of ``call``.
        starts: characters that also begin calls, but only as the first of an answer.
        list: calls are in square brackets.
        template, unless: as of thoughts.

        name_key, arguments_key: json: of the object of a call.
        keyed: json: a call is ``{"name": {...}}``.
        head: json: a call is this, with the name in place of ``{name}``, and the bare arguments after it.
        call_id: json: a mark in the head, before an id of the model's.
        ids: how ids are written. "kimi": ``functions.name:number`` is name and id. "short": nine characters.

        name_end: markup: after the name.
        key: markup: before the name of an argument, and after it.
        value_end: markup: after the value of an argument. With a line break before it, values are on their own lines.
        types: markup: what says whether a value is text: the tool's schema, or an attribute ``string`` or ``type``.
        entities: markup: names are escaped as in XML.
        cdata: markup: a value may be a CDATA section.
        elements: markup: an argument's own name is its element's, and values may be elements in turn.

        quote: notation: a mark at both ends of texts.
    """

    reader: Literal["json", "markup", "pythonic", "notation", "channels"]
    section: tuple[str, str] = ("", "")
    each: bool = False
    call: tuple[str, str] = ("", "")
    between: str = ""
    also: tuple[str, ...] = ()
    starts: str = ""
    list: bool = False
    template: tuple[str | tuple[str, ...], ...] = ()
    unless: tuple[str, ...] = ()
    name_key: str = "name"
    arguments_key: str = "arguments"
    keyed: bool = False
    head: str = ""
    call_id: str = ""
    ids: Literal["", "kimi", "short"] = ""
    name_end: str = ""
    key: tuple[str, str] = ("", "")
    value_end: str = ""
    types: Literal["schema", "string", "type"] = "schema"
    entities: bool = False
    cdata: bool = False
    elements: bool = False
    quote: str = ""

    @property
    def needs_texts(self) -> bool:
        """The format does not distinguish text from numbers, or models do not, so the tools' schemas must."""
        return self.reader == "notation" or (self.reader == "markup" and self.types in ("schema", "string"))

    @property
    def needs_names(self) -> bool:
        """Whether a text is a name, or what of it is, follows from the names of the tools."""
        return self.ids == "kimi" or bool(self.call_id) or self.reader == CHANNELS

    @property
    def openers(self) -> tuple[str, ...]:
        """What stands before calls, anywhere in the text."""
        first = self.section[0].strip() or self.call[0].strip()
        return tuple(filter(None, (first, *(each.strip() for each in self.also))))


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True, eq=False):  # a key of caches, by identity
    """
    Attributes:
        name: by which users ask for it.
        models: that write so.
        aliases: other names, most of them other servers'.
        frame: marks around the content, at its two ends.
        layout: marks in the content that are no part of it, wherever they stand.
        header: those of them with which each message begins, and behind its recipient. Without the second, the message
            of a call has the name once more.
        checked: the version of the family that the row was compared with, and how.
    """

    name: str
    models: str
    checked: str
    aliases: tuple[str, ...] = ()
    thoughts: Thoughts | None = None
    calls: CallFormat | None = None
    frame: tuple[str, str] = ("", "")
    layout: tuple[str, ...] = ()
    header: tuple[str, str] = ("", "")

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts of the format in which tokens may be."""
        found = [*self.frame, *self.layout]
        if self.thoughts is not None and not self.thoughts.channels:
            found += [*self.thoughts.opening, *self.thoughts.closing]
        if (calls := self.calls) is not None:
            found += [*calls.openers, *calls.section, *calls.call, *calls.key, calls.value_end, calls.name_end]
            found += [calls.head, calls.call_id, calls.quote, calls.between]
        if CHANNELS in (self.calls and self.calls.reader, self.thoughts and self.thoughts.channels and CHANNELS):
            found += HARMONY_MARKS
        return tuple(filter(None, found))


HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    family: tuple[Family, ...]


def read_rows(path: Path) -> tuple[Family, ...]:
    """The rows of a file in TOML or JSON.

    Raises:
        ValueError: it cannot be read, or a row is not of the form; the text names the file and the place.
    """
    try:
        data = path.read_bytes()
        found = msgspec.json.decode(data) if path.suffix == ".json" else tomllib.loads(data.decode())
        rows = msgspec.convert(found, _File).family
        for row in rows:
            _check(row)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    return rows


def _check(row: Family) -> None:
    if row.thoughts is None and row.calls is None:
        raise ValueError(f"family {row.name!r} has neither thoughts nor calls")
    thoughts, calls = row.thoughts, row.calls
    if thoughts is not None and not thoughts.channels and not (all(thoughts.opening) and all(thoughts.closing)):
        raise ValueError(f"family {row.name!r}: a mark of its thoughts is empty")
    if calls is None or calls.reader == CHANNELS:
        return
    if not calls.openers and not calls.starts:
        raise ValueError(f"family {row.name!r}: nothing stands before its calls; set section, call, also or starts")
    openers = calls.openers
    if any(a is not b and a in b for a in openers for b in openers):
        raise ValueError(f"family {row.name!r}: of the texts before its calls, one contains another")
    if calls.reader == "json" and calls.head.count("{name}") != bool(calls.head):
        raise ValueError(f"family {row.name!r}: its head must have {{name}} once")
    if calls.reader == "markup" and not (calls.key[0].strip() and calls.value_end.strip()):
        raise ValueError(f"family {row.name!r}: markup needs key and value_end")
    if calls.reader == "notation" and not calls.call[0].strip():
        raise ValueError(f"family {row.name!r}: a notation needs what stands before a call's name")


class Table:
    """Rows by name, and by each alias.

    Attributes:
        rows: in the order in which they are looked for in a template.
    """

    def __init__(self, rows: Iterable[Family]) -> None:
        """
        Raises:
            ValueError: two rows have a name in common.
        """
        self.rows: list[Family] = []
        self._by_name: dict[str, Family] = {}
        self.add(rows)

    def add(self, rows: Iterable[Family]) -> None:
        """Add rows, before those that are there: a template that fits several is the first one's."""
        new = list(rows)
        names = [name for row in new for name in (row.name, *row.aliases)]
        taken = sorted({name for name in names if name in self._by_name or names.count(name) > 1})
        if taken:
            raise ValueError(f"two rows of the table of model families are called {taken[0]!r}")
        self.rows[:0] = new
        self._by_name.update({name: row for row in new for name in (row.name, *row.aliases)})

    def find(self, name: str) -> Family | None:
        return self._by_name.get(name)

    def thoughts(self, name: str) -> Thoughts | None:
        """Of the family of that name or alias; None: it has none, or there is no such family."""
        row = self._by_name.get(name)
        return row.thoughts if row is not None else None

    def calls(self, name: str) -> CallFormat | None:
        """As ``thoughts``."""
        row = self._by_name.get(name)
        return row.calls if row is not None else None

    def canonical(self, name: str, part: Literal["thoughts", "calls"]) -> str:
        """The name of the row that an alias stands for.

        Raises:
            UnknownFamily: no row of that name has this part.
        """
        row = self._by_name.get(name)
        if row is not None and getattr(row, part) is not None:
            return row.name
        what = "a format of reasoning" if part == "thoughts" else "a format of tool calls"
        known = sorted(key for key, each in self._by_name.items() if getattr(each, part) is not None)
        near = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
        hint = f"the nearest: {', '.join(near)}" if near else f"there are: {', '.join(sorted(self.names(part)))}"
        raise UnknownFamily(f"{name!r} is not {what}; {hint}")

    def names(self, part: Literal["thoughts", "calls"]) -> list[str]:
        """Of the rows that have this part."""
        return [row.name for row in self.rows if getattr(row, part) is not None]

    def detected(self, template: str, part: Literal["thoughts", "calls"]) -> str:
        """The name of the row whose marks a chat template has; "": none."""
        for row in self.rows:
            found: Thoughts | CallFormat | None = getattr(row, part)
            if found is not None and found.template and _fits(template, found.template, found.unless):
                return row.name
        return ""


def _fits(template: str, needed: Sequence[str | tuple[str, ...]], unwanted: Sequence[str]) -> bool:
    alternatives = ((each,) if isinstance(each, str) else each for each in needed)
    return all(any(text in template for text in texts) for texts in alternatives) and not any(
        text in template for text in unwanted
    )


TABLE = Table(read_rows(PACKAGED))


def reasoning_parser(requested: str, template: str) -> str:
    """The parser that a worker registers: the requested one, or the detected one; "": none, or not certain.

    Raises:
        UnknownFamily: no row of the table has the requested name.
    """
    return _resolved(requested, template, "thoughts")


def tool_call_parser(requested: str, template: str) -> str:
    """As ``reasoning_parser``, for tool calls."""
    return _resolved(requested, template, "calls")


def prepare(families: str, reasoning: str = AUTO, tool_calls: str = AUTO, table: Table = TABLE) -> None:
    """Take in a user's file of families, and check the names that were asked for. Once, when a process starts.

    Args:
        table: of this process; another one, if they are only to be checked.
    Raises:
        ValueError: the file or a name is wrong; the text says which flag.
    """
    try:
        table.add(read_rows(Path(families)) if families else ())
    except ValueError as error:
        raise ValueError(f"--parser-families {error}") from None
    named: tuple[tuple[str, str, Literal["thoughts", "calls"]], ...] = (
        ("--reasoning-parser", reasoning, "thoughts"),
        ("--tool-call-parser", tool_calls, "calls"),
    )
    for flag, name, part in named:
        try:
            if name not in (AUTO, NONE):
                table.canonical(name, part)
        except UnknownFamily as error:
            raise ValueError(f"{flag} {error}") from None


def _resolved(requested: str, template: str, part: Literal["thoughts", "calls"]) -> str:
    if requested == AUTO:
        return TABLE.detected(template, part)
    return "" if requested == NONE else TABLE.canonical(requested, part)
