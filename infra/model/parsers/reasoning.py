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

    def begun(self, prompt_end: str, *, begins: bool = True) -> bool:
        """Whether an answer to a prompt that ends so begins within reasoning.

        Args:
            begins: the prompt ends with the beginning of an answer.
        """
        end = prompt_end.rstrip()
        return end.endswith(self.opening) or (self.implied and begins and not end.endswith(self.closing))

    def open_thought(self, prefilled: str) -> str | None:
        """The thought in which the beginning of an answer ends; None: it ends in the content."""
        text = prefilled.lstrip()
        opening = next((mark for mark in self.opening if text.startswith(mark)), None)
        if opening is None or any(mark in text for mark in self.closing):
            return None
        return text[len(opening) :]


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
            probe = DeltaBuilder(str, tools=True)
            called = (yield from try_calls(reader, probe, tools, texts, mark, _drop)) or called
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
