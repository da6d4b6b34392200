"""A row's format of calls, as one vocabulary writes it, and how text is searched for its calls."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.infra.text.parsers.delta_builder import DeltaBuilder
from penstock.infra.text.parsers.reader import EmptySection, MalformedCall, Markers, NotACall, Reader, Steps

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.\-/]{1,256}")
FUNCTION_NAME_CHARS = re.compile(r"[A-Za-z0-9_.\-/]*")

TextParameters = dict[str, dict[str, bool]]
"""Function -> parameter whose value is text even if it looks like JSON -> whether it may be null.

Where a format says what is text: function -> parameter -> whether it may be text.
"""


@dataclass(frozen=True)
class Offered:
    """The tools of a request, as far as formats need them.

    Attributes:
        texts: for formats that do not distinguish text from numbers.
        names: of all functions, for formats in which a name is not marked as one; empty: not known.
    """

    texts: TextParameters = field(default_factory=dict)
    names: frozenset[str] = frozenset()


CallReader = Callable[[Reader, DeltaBuilder, Offered, str], Steps[None]]


@dataclass(frozen=True)
class ToolFormat:
    """Marks that are tokens of the vocabulary are their characters here (``marks``).

    Attributes:
        calls: reads the calls after an opener, as ``(reader, deltas, offered, opener)``. It may raise MalformedCall
            until it commits what it has read; after each call it sets a new checkpoint.
        openers: marks in front of calls, anywhere in the text.
        firsts: texts in front of calls, but only as the first of an answer.
        starts: characters that also begin a call, but only as the first of an answer. ``calls`` reads them itself.
    """

    calls: CallReader
    openers: tuple[str, ...] = ()
    firsts: tuple[str, ...] = ()
    starts: str = ""


LONGEST_NAME = 256  # characters, as requests may have them
_HEADER = re.compile(r"(assistant *)?(to=)?[A-Za-z0-9_.\-/]*")


@dataclass(frozen=True)
class ContentMarks:
    """Marks around the content, and in it, that are no part of it.

    Attributes:
        frame: at its two ends.
        layout: wherever they stand.
        thoughts: after these, there is no content but reasoning.
        header: of these, with which a message begins, and behind its recipient; "" at the end: there is none, but a
            name before a call.
    """

    frame: tuple[str, str] = ("", "")
    layout: tuple[str, ...] = ()
    thoughts: tuple[str, ...] = ()
    header: tuple[str, str] = ("", "")


def parse_name(text: str) -> str:
    """A function's name.

    Raises:
        MalformedCall: not a valid name.
    """
    if not FUNCTION_NAME.fullmatch(text := text.strip()):
        raise MalformedCall
    return text


def end_call(reader: Reader, deltas: DeltaBuilder) -> None:
    """The last call is complete: whatever follows, it is shown."""
    reader.end_call()
    deltas.end_call()


def try_calls(
    reader: Reader,
    deltas: DeltaBuilder,
    tools: ToolFormat,
    offered: Offered,
    opener: str,
    otherwise: Callable[[str], None],
) -> Steps[bool]:
    """Read calls after an opener. Text that is not a call goes to ``otherwise``. Returns: whether there was a call.

    The beginning of a call whose rest a limit cut off is neither.
    """
    before = deltas.calls
    reader.checkpoint_call(opener)
    deltas.source = reader
    try:
        yield from tools.calls(reader, deltas, offered, opener)
        reader.commit()
    except EmptySection:
        reader.rollback()
        deltas.skip()
    except MalformedCall as malformed:
        read = reader.rollback()
        begun = opener or deltas.calls > before
        if isinstance(malformed, NotACall) or not (begun and reader.cut_short):
            otherwise(read)
    return deltas.calls > before


def read_content(
    reader: Reader,
    deltas: DeltaBuilder,
    tools: ToolFormat | None,
    offered: Offered,
    *,
    marks: ContentMarks,
    begun: bool = False,
) -> Steps[bool]:
    """Read content with calls in it. If it returns before the end of the text, the rest is content.

    Args:
        begun: it is no beginning of an answer.
    Returns: it ends with a mark after which there is reasoning.
    """
    opening, closing = marks.frame
    framed = begun
    if opening and not begun:
        space = yield from reader.space()
        framed = bool((yield from reader.literal(opening)))
        deltas.skip() if framed else deltas.content(space)
    if tools is not None and (tools.starts or tools.firsts) and not begun:
        deltas.content((yield from reader.space()))
        if tools.firsts and (first := (yield from reader.literal(*tools.firsts))):
            yield from try_calls(reader, deltas, tools, offered, first, deltas.content)
        elif reader.peek() and reader.peek() in tools.starts:
            yield from try_calls(reader, deltas, tools, offered, "", deltas.content)
    openers = tools.openers if tools is not None else ()
    dropped = (*marks.layout, *marks.thoughts, *filter(None, (closing, opening)))
    searched = Markers(*openers, *dropped) if openers or dropped else None
    headed = bool(marks.header[0]) and not begun  # the prompt ends within a header
    while searched is not None:
        names = (marks.header[1],) if marks.header[1] else openers
        mark = yield from (
            _to_kind(reader, deltas, searched, names) if headed else reader.until(searched, deltas.content)
        )
        if not mark:
            break
        headed = mark == marks.header[0]
        if mark in marks.thoughts:
            return True
        if mark in openers:
            assert tools is not None
            yield from try_calls(reader, deltas, tools, offered, mark, deltas.content)
        elif mark == opening and not framed and not deltas.has_content:  # after a call
            framed = True
            deltas.skip()
        elif mark == opening or (mark == closing and not framed):
            deltas.content(mark)
        elif mark == closing:
            space = yield from reader.space()
            if reader.peek() and not _any_next(reader, openers):
                deltas.content(mark + space)
            else:
                deltas.skip()
        else:
            deltas.skip()
    return False


def _to_kind(reader: Reader, deltas: DeltaBuilder, searched: Markers, ends: tuple[str, ...]) -> Steps[str]:
    """Read from the beginning of a header to the next mark. If that is one of ``ends``, words between them are a
    recipient, or the name of a call.
    """
    held: list[str] = []
    size = 0

    def take(part: str) -> None:
        nonlocal size
        size += len(part)
        held.append(part)
        if size > LONGEST_NAME:  # content without its mark
            deltas.content("".join(held))
            held.clear()

    mark = yield from reader.until(searched, take)
    text = "".join(held)
    if mark not in ends or not _HEADER.fullmatch(text.strip()):
        deltas.content(text)
    return mark


def _any_next(reader: Reader, openers: tuple[str, ...]) -> bool:
    return any(reader.peek() == opener[0] for opener in openers)


def read_closing(reader: Reader, deltas: DeltaBuilder, *marks: str) -> Steps[str]:
    """After a call: read one of ``marks`` with the white space before it; returns "" if none comes next."""
    space = yield from reader.space()
    options = tuple(filter(None, marks))
    mark = (yield from reader.literal(*options)) if options else ""
    if mark:
        deltas.skip()
    else:
        deltas.content(space)
    return mark
