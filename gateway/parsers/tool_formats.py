"""What a format of tool calls is, and how text is searched for its calls."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.parsers.delta_builder import DeltaBuilder
from gateway.parsers.reader import Malformed, Marks, Reader, Steps

NAME = re.compile(r"[A-Za-z0-9_.\-/]{1,256}")
NAME_RUN = re.compile(r"[A-Za-z0-9_.\-/]*")

Texts = dict[str, dict[str, bool]]  # function -> parameter that is text, whatever it looks like -> may it be null?


@dataclass(frozen=True)
class ToolFormat:
    """One format.

    Attributes:
        calls: reads the calls behind an opener, ``(reader, deltas, texts)``. Until it has dropped what the reader holds
            it may raise Malformed; behind each call it holds anew.
        openers: marks before calls, anywhere.
        starts: characters that are openers too if an answer begins with one; they are not read before ``calls``.
        special: marks of the format that may be special tokens, which have no text otherwise.
        texts: it needs to know which parameters are text.
        id_chars: characters of a call's id; 0: "call_" and 24 of them.
    """

    calls: Callable[[Reader, DeltaBuilder, Texts], Steps[None]]
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
    reader: Reader, deltas: DeltaBuilder, tools: ToolFormat, texts: Texts, opener: str, otherwise: Callable[[str], None]
) -> Steps[bool]:
    """Read calls behind an opener; what is none goes to ``otherwise``. Returns: whether there was a call."""
    before = deltas.calls
    reader.hold(opener)
    try:
        yield from tools.calls(reader, deltas, texts)
        reader.drop()
    except Malformed:
        otherwise(reader.held())
    return deltas.calls > before


def content(reader: Reader, deltas: DeltaBuilder, tools: ToolFormat, texts: Texts) -> Steps[None]:
    """Content with calls in it. If it returns before the end of the text, the rest is content."""
    if tools.starts:
        deltas.content((yield from reader.space()))
        if reader.peek() and reader.peek() in tools.starts:
            yield from attempt(reader, deltas, tools, texts, "", deltas.content)
    while tools.marks is not None and (opener := (yield from reader.until(tools.marks, deltas.content))):
        yield from attempt(reader, deltas, tools, texts, opener, deltas.content)


def closing(reader: Reader, deltas: DeltaBuilder, *marks: str) -> Steps[str]:
    """Behind a call: read one of ``marks``, if it comes next, and the space before it."""
    space = yield from reader.space()
    mark = yield from reader.literal(*marks)
    if not mark:
        deltas.content(space)
    return mark
