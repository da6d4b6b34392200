"""Prints an answer while it comes: text as it is, thoughts folded or dim, tool calls as lines."""

import msgspec
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from penstock.chat.answer import Answer, Call, Part
from penstock.cli.terminal import visible

THOUGHT = "dim italic"
_ERASED_LINE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))


class AnswerPrinter:
    """
    Args:
        console: standard output.
        thoughts: whether thoughts are printed; folded, a line says that the model thinks.
    """

    def __init__(self, console: Console, *, thoughts: bool) -> None:
        self._console = console
        self._thoughts = thoughts
        self._kind = ""  # of what was printed last
        self._open = False  # the line is not ended

    def part(self, part: Part) -> None:
        if part.thought:
            if self._kind != "thought":
                self._begin("thought")
                if not self._thoughts:
                    self._write("(thinking ...)" if self._console.is_terminal else "", THOUGHT)
            if self._thoughts:
                self._write(part.thought, THOUGHT)
        if part.text:
            text = part.text
            if self._kind == "thought":
                self._fold()
                text = text.lstrip("\n")
            self._begin("text")
            self._write(text, "")

    def end(self, answer: Answer) -> None:
        """The answer is complete, or broke off."""
        if self._kind == "thought":
            self._fold()
        for call in answer.calls:
            self._begin("call")
            self._write(call_line(call), "cyan")
            self.newline()
        self.newline()

    def newline(self) -> None:
        """End the line, unless nothing stands in it."""
        if self._open:
            self._console.print()
            self._open = False

    def _begin(self, kind: str) -> None:
        if self._kind not in ("", kind):
            self.newline()
        self._kind = kind

    def _fold(self) -> None:
        if not self._thoughts and self._console.is_terminal and self._open:
            self._console.control(_ERASED_LINE)
            self._open = False

    def _write(self, text: str, style: str) -> None:
        if not text:
            return
        shown = visible(text)
        self._console.print(Text(shown, style), end="", soft_wrap=True)
        self._open = not shown.endswith("\n")


def call_line(call: Call) -> str:
    """A tool call as a line: its arguments in order, or as they came if they are no JSON object."""
    try:
        arguments = msgspec.json.decode(call.arguments or "{}", type=dict)
    except msgspec.MsgspecError:
        return f"-> {call.name}({call.arguments})"
    values = ", ".join(f"{name}={msgspec.json.encode(value).decode()}" for name, value in arguments.items())
    return f"-> {call.name}({values})"
