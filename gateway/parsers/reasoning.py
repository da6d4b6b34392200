"""Thoughts at the beginning of an answer, between two marks."""

from dataclasses import dataclass

from gateway.parsers.delta_builder import DeltaBuilder
from gateway.parsers.reader import Marks, Reader, Steps
from gateway.parsers.tool_formats import Texts, ToolFormat, attempt


@dataclass(frozen=True)
class ReasoningTags:
    """Attributes: ``implied``: an answer begins with thoughts unless the prompt has closed them."""

    opening: tuple[str, ...] = ("<think>",)
    closing: tuple[str, ...] = ("</think>",)
    implied: bool = False

    @property
    def special(self) -> tuple[str, ...]:
        return (*self.opening, *self.closing)

    def begun(self, prompt_end: str) -> bool:
        """Whether an answer to a prompt that ends so begins within thoughts."""
        end = prompt_end.rstrip()
        return end.endswith(self.opening) or (self.implied and not end.endswith(self.closing))


THINK = ReasoningTags()
IMPLIED_THINK = ReasoningTags(implied=True)
MISTRAL = ReasoningTags(("[THINK]",), ("[/THINK]",))
KIMI = ReasoningTags(("◁think▷",), ("◁/think▷",))
GRANITE = ReasoningTags(
    ("Here's my thought process:", "Here is my thought process:"), ("Here's my response:", "Here is my response:")
)


def thoughts(
    reader: Reader, deltas: DeltaBuilder, tags: ReasoningTags, begun: bool, tools: ToolFormat | None, texts: Texts
) -> Steps[None]:
    """Read an answer's thoughts, if it begins with some. A tool call ends them too: some models do not close them."""
    space = yield from reader.space()
    if not (yield from reader.literal(*tags.opening)) and not begun:
        deltas.content(space)
        return
    ends = Marks(*tags.closing, *(tools.openers if tools is not None else ()))
    while mark := (yield from reader.until(ends, deltas.reasoning)):
        if mark in tags.closing:
            deltas.thought()
            return
        assert tools is not None
        if (yield from attempt(reader, deltas, tools, texts, mark, deltas.reasoning)):
            return
