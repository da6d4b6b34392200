"""OpenAI's harmony format (gpt-oss): messages in channels. Analysis is reasoning; calls have a function as recipient.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather
<|constrain|>json<|message|>{...}<|call|>``; the recipient may also stand before the channel.
"""

import re

from infra.model.parsers.delta_builder import DeltaBuilder
from infra.model.parsers.reader import Markers, Reader, Steps
from infra.model.parsers.tool_formats import FUNCTION_NAME

SPECIAL = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")

_MESSAGE = Markers("<|message|>")
_ENDS = Markers("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_OPENINGS = ("<|start|>", "<|channel|>", "<|message|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_LONGEST_HEADER = 256  # characters; a longer one that does not end was meant as text


def read_harmony(reader: Reader, deltas: DeltaBuilder, *, calls: bool, prefilled: bool = False) -> Steps[None]:
    """Read a whole answer. It begins within a header, as the prompt ends with ``<|start|>assistant``.

    Args:
        calls: the request has tools; otherwise messages to functions are content.
        prefilled: it begins within a message that is content.
    """
    analyses = 0
    mark = ""
    if prefilled:
        mark = yield from reader.until(_ENDS, deltas.content)
    if mark not in _OPENINGS:
        mark = yield from _opening(reader)
    while mark:
        header = [mark]
        if mark != "<|message|>" and not (yield from reader.until(_MESSAGE, header.append)):
            if len("".join(header)) > _LONGEST_HEADER:
                deltas.content("".join(header))
            return
        deltas.skip()
        text = "".join(header)
        channel, to = _CHANNEL.search(text), _RECIPIENT.search(text)
        name = to[1].removeprefix("functions.") if to is not None and to[1].startswith("functions.") else ""
        if calls and FUNCTION_NAME.fullmatch(name):
            mark = yield from _call(reader, deltas, name)
        elif channel is not None and channel[1] == "analysis":
            analyses += 1
            if analyses > 1:
                deltas.reasoning("\n")
            mark = yield from reader.until(_ENDS, deltas.reasoning)
        else:
            mark = yield from reader.until(_ENDS, deltas.content)
        if mark not in _OPENINGS:
            mark = yield from _opening(reader)


def _opening(reader: Reader) -> Steps[str]:
    """The mark at which a header begins, or the recipient in its place; "": no message follows."""
    mark = yield from reader.literal(*_OPENINGS, " to=", "to=")
    return mark


def _call(reader: Reader, deltas: DeltaBuilder, name: str) -> Steps[str]:
    some: list[str] = []

    def emit(text: str) -> None:
        if text := text if some else text.lstrip():
            some.append("")
            deltas.arguments(text)

    deltas.begin_call(name)
    mark = yield from reader.until(_ENDS, emit)
    if mark and not some:
        deltas.arguments("{}")
    return mark
