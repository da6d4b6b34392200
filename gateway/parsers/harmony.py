"""OpenAI's harmony format (gpt-oss): messages in channels. Analysis is thoughts, calls are addressed to functions.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather
<|constrain|>json<|message|>{...}<|call|>``; the recipient may also stand before the channel.
"""

import re

from gateway.parsers.delta_builder import DeltaBuilder
from gateway.parsers.reader import Marks, Reader, Steps
from gateway.parsers.tool_formats import NAME

SPECIAL = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")

_MESSAGE = Marks("<|message|>")
_ENDS = Marks("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_OPENINGS = ("<|start|>", "<|channel|>", "<|message|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_LONGEST_HEADER = 256  # characters; what is longer without its end was meant as text


def harmony(reader: Reader, deltas: DeltaBuilder, *, calls: bool) -> Steps[None]:
    """A whole answer, which begins in a header: the prompt ends with ``<|start|>assistant``.

    Args:
        calls: the request has tools; otherwise what is sent to functions is content.
    """
    thoughts = 0
    mark = yield from _opening(reader)
    while mark:
        header = [mark]
        if mark != "<|message|>" and not (yield from reader.until(_MESSAGE, header.append)):
            if len("".join(header)) > _LONGEST_HEADER:
                deltas.content("".join(header))
            return
        said = "".join(header)
        found, to = _CHANNEL.search(said), _RECIPIENT.search(said)
        name = to[1].removeprefix("functions.") if to is not None and to[1].startswith("functions.") else ""
        if calls and NAME.fullmatch(name):
            mark = yield from _call(reader, deltas, name)
        elif found is not None and found[1] == "analysis":
            thoughts += 1
            if thoughts > 1:
                deltas.reasoning("\n")
            mark = yield from reader.until(_ENDS, deltas.reasoning)
        else:
            mark = yield from reader.until(_ENDS, deltas.content)
        if mark not in _OPENINGS:
            mark = yield from _opening(reader)


def _opening(reader: Reader) -> Steps[str]:
    """The mark with which a header begins, or what stands for it; "": what follows is no message."""
    mark = yield from reader.literal(*_OPENINGS, " to=", "to=")
    return mark


def _call(reader: Reader, deltas: DeltaBuilder, name: str) -> Steps[str]:
    some: list[str] = []

    def emit(text: str) -> None:
        if text := text if some else text.lstrip():
            some.append("")
            deltas.arguments(text)

    deltas.call(name)
    mark = yield from reader.until(_ENDS, emit)
    if mark and not some:
        deltas.arguments("{}")
    return mark
