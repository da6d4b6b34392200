"""Collects what a parser found, as deltas of a chat completion, without the layout around thoughts and calls."""

from collections.abc import Callable

from gateway.openai.responses import CallDelta, Delta, FunctionDelta

_SPACE = " \t\r\n"


class DeltaBuilder:
    """White space next to a call, and at both ends of thoughts, is layout and dropped; the rest is kept to the letter.

    Attributes:
        calls: tool calls begun.
    """

    __slots__ = (
        "_arguments",
        "_content",
        "_gap",
        "_holds",
        "_ids",
        "_limit",
        "_new",
        "_pause",
        "_reasoning",
        "_thought",
        "_told",
        "calls",
    )

    def __init__(self, ids: Callable[[int], str], *, tools: bool, one_call: bool = False) -> None:
        """
        Args:
            ids: from a call's index to its id.
            tools: calls may come, so white space waits for what follows it.
            one_call: show the first call only.
        """
        self._ids = ids
        self._holds = tools
        self._limit = 1 if one_call else 1 << 31
        self.calls = 0
        self._thought = self._told = False  # whether thoughts, content were shown
        self._pause: list[str] = []  # white space that waits, of thoughts
        self._gap: list[str] = []  # of content
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._new: list[tuple[int, str, str]] = []  # index, id, name
        self._arguments: dict[int, list[str]] = {}

    @property
    def plain(self) -> bool:
        """Content is shown as it comes from here on."""
        return self._told and not self._holds

    def reasoning(self, text: str) -> None:
        body = _behind(self._pause, text)
        if body:
            self._reasoning.append(body if self._thought else body.lstrip(_SPACE))
            self._thought = True

    def thought(self) -> None:
        """The thoughts are over: white space at their end, and before the content, is layout."""
        self._pause.clear()
        self._thought = True

    def content(self, text: str) -> None:
        body = _behind(self._gap, text) if self._holds else text
        if not self._told and (self.calls or self._thought):
            body = body.lstrip(_SPACE)
        if body:
            self._told = True
            self._content.append(body)

    def call(self, name: str, call_id: str = "") -> None:
        """A tool call begins; its arguments follow."""
        index, self.calls = self.calls, self.calls + 1
        self._pause.clear()
        if index < self._limit:
            self._new.append((index, call_id or self._ids(index), name))

    def arguments(self, text: str) -> None:
        """More of the JSON text of the last call's arguments."""
        index = self.calls - 1
        if text and index < self._limit:
            self._arguments.setdefault(index, []).append(text)

    def finish(self) -> None:
        """The text has ended: white space that waits is none before a call."""
        if self._pause and self._thought:
            self._reasoning += self._pause
        if self._gap and not self.calls and (self._told or not self._thought):
            self._content += self._gap
        self._pause.clear()
        self._gap.clear()

    def take(self) -> Delta | None:
        """What is new since the last time."""
        if not (self._content or self._reasoning or self._new or self._arguments):
            return None
        reasoning = "".join(self._reasoning) if self._reasoning else None
        content = "".join(self._content) if self._content else None
        calls = self._calls() if self._new or self._arguments else None
        self._reasoning, self._content = [], []
        return Delta(content=content, reasoning_content=reasoning, tool_calls=calls)

    def _calls(self) -> list[CallDelta]:
        said = {index: "".join(parts) for index, parts in self._arguments.items()}
        new = {index for index, _, _ in self._new}
        calls = [CallDelta(index, FunctionDelta(text)) for index, text in said.items() if index not in new]
        calls += [
            CallDelta(index, FunctionDelta(said.get(index, ""), name), call_id, "function")
            for index, call_id, name in self._new
        ]
        self._new, self._arguments = [], {}
        return calls


def _behind(waiting: list[str], text: str) -> str:
    """What can be shown of a text behind white space that waits; white space at its own end waits now."""
    body = text.rstrip(_SPACE)
    if not body:
        waiting.append(text)
        return ""
    if waiting:
        shown = "".join(waiting) + body
        waiting.clear()
    else:
        shown = body
    if len(body) < len(text):
        waiting.append(text[len(body) :])
    return shown
