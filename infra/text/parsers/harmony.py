"""OpenAI's harmony format (gpt-oss): messages in channels. Analysis is reasoning; calls have a function as recipient.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather
<|constrain|>json<|message|>{...}<|call|>``; the recipient may also stand before the channel.
"""

import re
from collections.abc import Set

from penstock.infra.text.parsers.delta_builder import DeltaBuilder
from penstock.infra.text.parsers.json_text import ControlsEscaped
from penstock.infra.text.parsers.reader import Markers, Marks, Reader, Steps
from penstock.infra.text.parsers.tool_formats import FUNCTION_NAME, end_call

_RECIPIENT = re.compile("\\bto=([^\\s<\ud800-\udfff]+)")
_NOBODY = ("assistant", "user", "all")  # recipients to whom an answer goes in any case
_GLUED = ("commentary", "analysis", "json")
_LONGEST_HEADER = 256  # characters; a longer one that does not end was meant as text


class HarmonyMarks:
    """The marks of the format, as one vocabulary writes them."""

    def __init__(self, marks: Marks) -> None:
        start, channel, message, end, call, done = (
            marks.within(f"<|{name}|>") for name in ("start", "channel", "message", "end", "call", "return")
        )
        self.message = message
        self.to_message = Markers(message)
        self.ends = Markers(end, call, done, start, channel)
        self.openings = (start, channel, message)
        self.channel = re.compile(re.escape(channel) + r"\s*(\w+)")
        self.closed = (end, call, done)


def read_harmony(
    reader: Reader,
    deltas: DeltaBuilder,
    marks: HarmonyMarks,
    names: Set[str],
    *,
    calls: bool,
    prefilled: bool = False,
) -> Steps[None]:
    """Read a whole answer. It begins within a header, as the prompt ends with ``<|start|>assistant``.

    Args:
        names: of the functions, which models also write without ``functions.``; empty: not known.
        calls: the request has tools; otherwise messages to functions are content.
        prefilled: it begins within a message that is content.
    """
    analyses = 0
    mark = ""
    if prefilled:
        mark = yield from reader.until(marks.ends, deltas.content)
    if mark not in marks.openings:
        mark = yield from _opening(reader, marks)
    while mark:
        reader.checkpoint_call(mark)
        deltas.source = reader
        header = [mark]
        if mark != marks.message and not (yield from reader.until(marks.to_message, header.append)):
            if len("".join(header)) > _LONGEST_HEADER:
                deltas.content("".join(header))
            return
        reader.commit()
        deltas.skip()
        text = "".join(header)
        channels, to = marks.channel.findall(text), _RECIPIENT.search(text)
        channel, recipient = channels[-1] if channels else "", to[1] if to is not None else ""
        name = _unglued(recipient.removeprefix("functions."), names)
        called = recipient.startswith("functions.") or name in names
        if called and calls and FUNCTION_NAME.fullmatch(name):
            mark = yield from _call(reader, deltas, marks, name)
        else:
            reader.end_call()
            if recipient and not called and recipient not in _NOBODY:  # one of the model's own tools, which is not run
                mark = yield from reader.until(marks.ends, lambda part: None)
            elif channel == "analysis":
                analyses += 1
                if analyses > 1:
                    deltas.reasoning("\n")
                mark = yield from reader.until(marks.ends, deltas.reasoning)
            else:
                if deltas.has_content:
                    deltas.content("\n")
                mark = yield from reader.until(marks.ends, deltas.content)
        if mark not in marks.openings:
            mark = yield from _opening(reader, marks)


def _unglued(name: str, names: Set[str]) -> str:
    """The name of a function without a word that models append to it: ``get_weathercommentary``."""
    if name in names:
        return name
    return next((bare for word in _GLUED if (bare := name.removesuffix(word)) in names), name)


def _opening(reader: Reader, marks: HarmonyMarks) -> Steps[str]:
    """The mark at which a header begins, or the recipient in its place; "": no message follows."""
    return (yield from reader.literal(*marks.openings, " to=", "to="))


def _call(reader: Reader, deltas: DeltaBuilder, marks: HarmonyMarks, name: str) -> Steps[str]:
    some: list[str] = []
    escaped = ControlsEscaped(deltas.arguments)

    def emit(text: str) -> None:
        if text := text if some else text.lstrip():
            if not some:
                some.append(text[0])
            (escaped if some[0] == "{" else deltas.arguments)(text)

    deltas.begin_call(name)
    mark = yield from reader.until(marks.ends, emit)
    if mark and not some:
        deltas.arguments("{}")
    if mark or not reader.cut_short:
        end_call(reader, deltas)
    return mark
