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
) -> Steps[None]:
    """Read an answer's reasoning, if it begins with some.

    A tool call ends it as well: some models do not write the closing mark.
    """
    space = yield from reader.space()
    if not (yield from reader.literal(*tags.opening)) and not in_reasoning:
        deltas.content(space)
        return
    ends = Markers(*tags.closing, *(tools.openers if tools is not None else ()))
    while mark := (yield from reader.until(ends, deltas.reasoning)):
        if mark in tags.closing:
            deltas.end_reasoning()
            return
        assert tools is not None
        if (yield from try_calls(reader, deltas, tools, texts, mark, deltas.reasoning)):
            return
