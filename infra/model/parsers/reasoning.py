"""Reasoning at the beginning of an answer, between two marks."""

from dataclasses import dataclass

from infra.model.parsers.delta_builder import DeltaBuilder
from infra.model.parsers.reader import Markers, Reader, Steps
from infra.model.parsers.tool_formats import TextParameters, ToolFormat, try_calls


@dataclass(frozen=True)
class ReasoningTags:
    """``implied``: an answer begins within reasoning unless the prompt has closed it."""

    opening: tuple[str, ...] = ("<think>",)
    closing: tuple[str, ...] = ("</think>",)
    implied: bool = False

    @property
    def special(self) -> tuple[str, ...]:
        return (*self.opening, *self.closing)

    def begun(self, prompt_end: str) -> bool:
        """Whether an answer to a prompt that ends so begins within reasoning."""
        end = prompt_end.rstrip()
        return end.endswith(self.opening) or (self.implied and not end.endswith(self.closing))


THINK = ReasoningTags()
IMPLIED_THINK = ReasoningTags(implied=True)
MISTRAL = ReasoningTags(("[THINK]",), ("[/THINK]",))
KIMI = ReasoningTags(("◁think▷",), ("◁/think▷",))
GRANITE = ReasoningTags(
    ("Here's my thought process:", "Here is my thought process:"), ("Here's my response:", "Here is my response:")
)


def read_reasoning(
    reader: Reader,
    deltas: DeltaBuilder,
    tags: ReasoningTags,
    tools: ToolFormat | None,
    texts: TextParameters,
    *,
    in_reasoning: bool,
) -> Steps[str]:
    """Read an answer's reasoning, if it begins with some.

    A model may try a call in its thoughts, and some models call without a closing mark. Which of the two a call was is
    known when the mark comes, or the text ends: until then, the call and what follows it are held back.

    Returns: "", or at the end of the text the calls that ended the reasoning, and what follows them.
    """
    space = yield from reader.space()
    if not (yield from reader.literal(*tags.opening)) and not in_reasoning:
        deltas.content(space)
        return ""
    ends = Markers(*tags.closing, *(tools.openers if tools is not None else ()))
    while mark := (yield from reader.until(ends, deltas.reasoning)):
        if mark in tags.closing:
            deltas.end_reasoning()
            return ""
        assert tools is not None
        reader.tape(mark)
        called = False
        while mark and mark not in tags.closing:
            probe = DeltaBuilder(str, tools=True)
            called = (yield from try_calls(reader, probe, tools, texts, mark, _drop)) or called
            if not called:
                break
            mark = yield from reader.until(ends, _drop)
        text = reader.taped()
        if mark in tags.closing:
            deltas.reasoning(text[: -len(mark)])
            deltas.end_reasoning()
            return ""
        if called:
            return text
        if not reader.cut_short:  # else it may have become a call
            deltas.reasoning(text)
    return ""


def _drop(text: str) -> None:
    """For text that is on the tape."""
