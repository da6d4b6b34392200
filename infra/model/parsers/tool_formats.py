"""What a format of tool calls is, and how text is searched for its calls."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from infra.model.parsers.delta_builder import DeltaBuilder
from infra.model.parsers.reader import MalformedCall, Markers, Reader, Steps

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.\-/]{1,256}")
FUNCTION_NAME_CHARS = re.compile(r"[A-Za-z0-9_.\-/]*")

TextParameters = dict[str, dict[str, bool]]
"""Function -> parameter whose value is text even if it looks like JSON -> whether it may be null."""


@dataclass(frozen=True)
class ToolFormat:
    """
    Attributes:
        calls: reads the calls behind an opener, as ``(reader, deltas, texts)``. It may raise MalformedCall until it
            commits what it has read; after each call it sets a new checkpoint.
        openers: marks in front of calls, anywhere in the text.
        starts: characters that also begin a call, but only as the first of an answer. ``calls`` reads them itself.
        special: marks that may be special tokens, which have no text unless the detokenizer keeps them.
        needs_texts: the format does not distinguish text from numbers, so ``calls`` needs the tools' schemas.
        id_chars: length of a call's id; 0: "call_" and 24 characters.
    """

    calls: Callable[[Reader, DeltaBuilder, TextParameters], Steps[None]]
    openers: tuple[str, ...] = ()
    starts: str = ""
    special: tuple[str, ...] = ()
    needs_texts: bool = False
    id_chars: int = 0
    markers: Markers | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "markers", Markers(*self.openers) if self.openers else None)


def parse_name(text: str) -> str:
    """A function's name.

    Raises:
        MalformedCall: not a valid name.
    """
    if not FUNCTION_NAME.fullmatch(text := text.strip()):
        raise MalformedCall
    return text


def try_calls(
    reader: Reader,
    deltas: DeltaBuilder,
    tools: ToolFormat,
    texts: TextParameters,
    opener: str,
    otherwise: Callable[[str], None],
) -> Steps[bool]:
    """Read calls behind an opener. Text that is not a call goes to ``otherwise``. Returns: whether there was a call.

    The beginning of a call whose rest a limit cut off is neither.
    """
    before = deltas.calls
    reader.checkpoint(opener)
    try:
        yield from tools.calls(reader, deltas, texts)
        reader.commit()
    except MalformedCall:
        read = reader.rollback()
        if not (opener and reader.cut_short):
            otherwise(read)
    return deltas.calls > before


def read_content(
    reader: Reader, deltas: DeltaBuilder, tools: ToolFormat, texts: TextParameters, *, begun: bool = False
) -> Steps[None]:
    """Read content with calls in it. If it returns before the end of the text, the rest is content.

    Args:
        begun: it is no beginning of an answer.
    """
    if tools.starts and not begun:
        deltas.content((yield from reader.space()))
        if reader.peek() and reader.peek() in tools.starts:
            yield from try_calls(reader, deltas, tools, texts, "", deltas.content)
    while tools.markers is not None and (opener := (yield from reader.until(tools.markers, deltas.content))):
        yield from try_calls(reader, deltas, tools, texts, opener, deltas.content)


def read_closing(reader: Reader, deltas: DeltaBuilder, *marks: str) -> Steps[str]:
    """After a call: read one of ``marks`` with the white space before it; returns "" if none comes next."""
    space = yield from reader.space()
    mark = yield from reader.literal(*marks)
    if mark:
        deltas.skip()
    else:
        deltas.content(space)
    return mark
