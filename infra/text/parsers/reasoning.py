"""Reasoning at the beginning of an answer, between two marks."""

from penstock.infra.text.parsers.delta_builder import DeltaBuilder
from penstock.infra.text.parsers.families import Thoughts
from penstock.infra.text.parsers.marks import Marks
from penstock.infra.text.parsers.reader import Markers, Reader, Steps
from penstock.infra.text.parsers.tool_formats import Offered, ToolFormat, try_calls


class ThoughtMarks:
    """The marks of a row's thoughts, as one vocabulary writes them.

    Attributes:
        begins: the characters with which the marks begin.
    """

    def __init__(self, thoughts: Thoughts, marks: Marks) -> None:
        self.opening = tuple(marks.within(each.rstrip()) for each in thoughts.opening)
        self.closing = tuple(marks.within(each) for each in thoughts.closing)
        self.begins = "".join({mark[0] for mark in (*self.opening, *self.closing)})


def read_reasoning(
    reader: Reader,
    deltas: DeltaBuilder,
    tags: ThoughtMarks,
    tools: ToolFormat | None,
    offered: Offered,
    *,
    in_reasoning: bool,
    joined: bool = False,
) -> Steps[str]:
    """Read an answer's reasoning, if it begins with some.

    A model may try a call in its thoughts, and some models call without a closing mark. Which of the two a call was is
    known when the mark comes, or the text ends: until then, the call and what follows it are held back.

    Args:
        joined: reasoning and its marks are part of the content.
    Returns: "", or at the end of the text the calls that ended the reasoning, and what follows them.
    """
    space = yield from reader.space()
    opening = yield from reader.literal(*tags.opening)
    if not opening and not in_reasoning:
        if stray := (yield from reader.literal(*tags.closing)):  # of thoughts that the prompt has closed
            _close(deltas, stray, joined=joined)
        else:
            deltas.content(space)
        return ""
    thought = deltas.verbatim if joined else deltas.reasoning
    thought(space + opening if joined else "" if opening else space)
    ends = Markers(*tags.closing, *(tools.openers if tools is not None else ()))
    while mark := (yield from reader.until(ends, thought)):
        if mark in tags.closing:
            _close(deltas, mark, joined=joined)
            return ""
        assert tools is not None
        reader.tape(mark)
        called = False
        while mark and mark not in tags.closing:
            probe = deltas.probe()
            called = (yield from try_calls(reader, probe, tools, offered, mark, _drop)) or called
            if not called:
                break
            mark = yield from reader.until(ends, _drop)
        text = reader.taped()
        if mark in tags.closing:
            thought(text[: -len(mark)])
            _close(deltas, mark, joined=joined)
            return ""
        if called:
            return text
        if not reader.cut_short:  # else it may have become a call
            thought(text)
    return ""


def _close(deltas: DeltaBuilder, mark: str, *, joined: bool) -> None:
    if joined:
        deltas.verbatim(mark)
    else:
        deltas.end_reasoning()


def _drop(text: str) -> None:
    """For text that is on the tape."""
