"""What a format of tool calls is, and how text is searched for its calls."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.parsers.reader import Malformed, Marks, Reader, Steps
from gateway.parsers.sink import Sink

NAME = re.compile(r"[A-Za-z0-9_.\-/]{1,256}")
NAME_RUN = re.compile(r"[A-Za-z0-9_.\-/]*")

Texts = dict[str, dict[str, bool]]  # function -> parameter that is text, whatever it looks like -> may it be null?


@dataclass(frozen=True)
class Tools:
    """One format.

    Attributes:
        calls: reads the calls behind an opener, ``(reader, sink, texts)``. Until it has dropped what the reader holds
            it may raise Malformed; behind each call it holds anew.
        openers: marks before calls, anywhere.
        starts: characters that are openers too if an answer begins with one; they are not read before ``calls``.
        special: marks of the format that may be special tokens, which have no text otherwise.
        texts: it needs to know which parameters are text.
        id_chars: characters of a call's id; 0: "call_" and 24 of them.
    """

    calls: Callable[[Reader, Sink, Texts], Steps[None]]
    openers: tuple[str, ...] = ()
    starts: str = ""
    special: tuple[str, ...] = ()
    texts: bool = False
    id_chars: int = 0
    marks: Marks | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "marks", Marks(*self.openers) if self.openers else None)


def name_of(text: str) -> str:
    """A function's name.

    Raises:
        Malformed: it cannot be one.
    """
    if not NAME.fullmatch(text := text.strip()):
        raise Malformed
    return text


def attempt(
    reader: Reader, sink: Sink, tools: Tools, texts: Texts, opener: str, otherwise: Callable[[str], None]
) -> Steps[bool]:
    """Read calls behind an opener; what is none goes to ``otherwise``. Returns: whether there was a call."""
    before = sink.calls
    reader.hold(opener)
    try:
        yield from tools.calls(reader, sink, texts)
        reader.drop()
    except Malformed:
        otherwise(reader.held())
    return sink.calls > before


def content(reader: Reader, sink: Sink, tools: Tools, texts: Texts) -> Steps[None]:
    """Content with calls in it. If it returns before the end of the text, the rest is content."""
    if tools.starts:
        sink.content((yield from reader.space()))
        if reader.peek() and reader.peek() in tools.starts:
            yield from attempt(reader, sink, tools, texts, "", sink.content)
    while tools.marks is not None and (opener := (yield from reader.until(tools.marks, sink.content))):
        yield from attempt(reader, sink, tools, texts, opener, sink.content)


def closing(reader: Reader, sink: Sink, *marks: str) -> Steps[str]:
    """Behind a call: read one of ``marks``, if it comes next, and the space before it."""
    space = yield from reader.space()
    mark = yield from reader.literal(*marks)
    if not mark:
        sink.content(space)
    return mark
