"""Builds chat completion deltas from what a parser finds, without the layout around reasoning and calls."""

from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import Struct

from penstock.infra.text.detokenizer import StopMatcher
from penstock.infra.text.parsers.reader import NONE, Marks, Reader

_SPACE = " \t\r\n"

REASONING, CONTENT, CALL, LAYOUT = 1, 2, 4, 8  # bits of ``DeltaBuilder.grew``
BEGUN, CLOSED = 1, 2


class FunctionDelta(Struct, frozen=True, omit_defaults=True):
    arguments: str
    name: str | None = None


class CallDelta(Struct, frozen=True, omit_defaults=True):
    """``id``, ``type`` and the name come with the first delta of a call; concatenate the arguments."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class Delta(Struct, frozen=True, omit_defaults=True):
    """What is added to a message, as OpenAI's API writes it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None
    function_call: FunctionDelta | None = None  # older form, of one call


class DeltaBuilder:
    """White space next to a call and at both ends of the reasoning is layout and dropped; all else is kept exactly.

    Stop strings are searched here, because here it is known what is content: not reasoning, calls, marks or layout.

    Attributes:
        calls: number of tool calls begun.
        call_open: the last one is not complete.
        grew: what was added since it was last set to 0: REASONING, CONTENT, CALL, or marks and white space (LAYOUT).
        last: what was added last; 0: nothing yet.
        thought: of reasoning between two marks: BEGUN or CLOSED; 0: there is none so far.
        source: the reader of the last call.
        searching: stop strings count from here on.
        stop: the stop string that was found; nothing is taken in after it.
    """

    __slots__ = (
        "_after_call",
        "_arguments",
        "_call_id",
        "_content",
        "_content_begun",
        "_content_space",
        "_limit",
        "_marks",
        "_matcher",
        "_new_calls",
        "_reasoning",
        "_reasoning_begun",
        "_reasoning_space",
        "_said",
        "_stops_shown",
        "_tools",
        "call_open",
        "calls",
        "grew",
        "last",
        "searching",
        "source",
        "stop",
        "thought",
    )

    def __init__(
        self,
        call_id: Callable[[int], str],
        *,
        tools: bool,
        one_call: bool = False,
        stops: Sequence[str] = (),
        stops_shown: bool = False,
        marks: Marks = NONE,
    ) -> None:
        """
        Args:
            call_id: from a call's index to its id.
            marks: that are tokens, whose text is shown where they are part of a text.
            tools: calls may follow, so white space is held back until it is known what follows.
            one_call: return the first call only.
            stops: stop strings, searched in the content.
            stops_shown: the content ends after the stop string, not before it.
        """
        self._marks = marks
        self._matcher = StopMatcher(stops) if stops else None
        self._stops_shown = stops_shown
        self.searching = True
        self.stop: str | None = None
        self._after_call = False  # only white space has followed the last call
        self._said = True  # the last call has arguments
        self._call_id = call_id
        self._tools = tools
        self._limit = 1 if one_call else 1 << 31
        self.calls = self.grew = self.last = 0
        self.thought = 0
        self.call_open = False
        self.source: Reader | None = None
        self._reasoning_begun = self._content_begun = False  # something non-blank was emitted
        self._reasoning_space: list[str] = []  # trailing white space, held back
        self._content_space: list[str] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._new_calls: list[tuple[int, str, str]] = []  # index, id, name
        self._arguments: dict[int, list[str]] = {}

    def probe(self) -> "DeltaBuilder":
        """A builder for reading calls; its deltas are not used."""
        return DeltaBuilder(str, tools=True, marks=self._marks)

    @property
    def passthrough(self) -> bool:
        """Content is emitted unchanged from here on."""
        return self._content_begun and not self._tools and self._matcher is None

    @property
    def has_content(self) -> bool:
        """There was content, and be it white space."""
        return self._content_begun or bool(self._content_space)

    def shown(self, read: str) -> str:
        """What was read, with the text of the marks in it that are tokens."""
        return self._marks.text(read)

    def reasoning(self, text: str) -> None:
        if self.stop is not None:
            return
        text = self._marks.text(text)
        self._flush()
        body = _without_trailing_space(self._reasoning_space, text)
        if body:
            self._reasoning.append(body if self._reasoning_begun else body.lstrip(_SPACE))
            self._reasoning_begun = True
            self._grow(REASONING)

    def continue_reasoning(self) -> None:
        """The prompt has the beginning of the reasoning: white space that follows belongs to it."""
        self._reasoning_begun = True

    def verbatim(self, text: str) -> None:
        """Content that is shown as it is, and in which no stop string is searched."""
        if self.stop is None and text:
            self._content_begun = True
            self._content.append(self._marks.text(text))
            self._grow(CONTENT)

    def end_reasoning(self) -> None:
        """White space at the end of the reasoning, and before the content, is layout."""
        self._reasoning_space.clear()
        self._reasoning_begun = True
        self.skip()

    def skip(self) -> None:
        """Marks that are part of nothing were read."""
        self.grew |= LAYOUT

    def content(self, text: str) -> None:
        if self.stop is not None:
            return
        text = self._marks.text(text)
        before = not self._content_begun and (self.calls > 0 or self._reasoning_begun)
        layout = self._after_call or before
        if before and not text.strip(_SPACE):
            self.skip()
        if self._after_call and text.strip(_SPACE):
            self._end_call()
            self._after_call = False
        if self._matcher is not None:
            text = self._search(self._matcher, text, layout)
        self._show(text)

    def _search(self, matcher: StopMatcher, text: str, layout: bool) -> str:
        """The text that is safe to show. White space at its beginning that is layout, or may be, is not searched."""
        begin = len(text) - len(text.lstrip(_SPACE)) if layout and not matcher.holds else 0
        if not self.searching:
            return text[:begin] + matcher.skip(text[begin:])
        safe, self.stop = matcher.push(text[begin:])
        if self.stop is not None and self._stops_shown:
            safe += self.stop
        return text[:begin] + safe

    def _flush(self) -> None:
        """Something else than content follows: what was held back did not become a stop string."""
        if self._matcher is not None and self._matcher.holds:
            self._show(self._matcher.flush())

    def _show(self, text: str) -> None:
        body = _without_trailing_space(self._content_space, text) if self._tools else text
        if not self._content_begun and (self.calls or self._reasoning_begun):
            body = body.lstrip(_SPACE)
        if body:
            self._content_begun = True
            self._content.append(body)
            self._grow(CONTENT)

    def _grow(self, kind: int) -> None:
        self.grew |= kind
        self.last = kind

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Begin a tool call; its arguments follow."""
        if self.stop is not None:
            return
        self._flush()
        self._end_call()
        self._said, self._after_call = False, True
        self.call_open = True
        self._grow(CALL)
        index, self.calls = self.calls, self.calls + 1
        self._reasoning_space.clear()
        if index < self._limit:
            self._new_calls.append((index, call_id or self._call_id(index), name))

    def arguments(self, text: str) -> None:
        """More of the JSON text of the last call's arguments."""
        if not text or self.stop is not None:
            return
        self._said = True
        index = self.calls - 1
        if index < self._limit:
            self._arguments.setdefault(index, []).append(self._marks.in_json(text))

    def end_call(self) -> None:
        """The last call is complete."""
        self.call_open = False

    def drop_call(self) -> None:
        """The last call was cut off and is none. If nothing else was called, its text is shown.

        Only for answers of which nothing was taken yet.
        """
        self.calls -= 1
        self._new_calls = [each for each in self._new_calls if each[0] < self.calls]
        self._arguments.pop(self.calls, None)
        self._said, self.call_open = True, False
        if not self.calls:
            self._after_call = False
            self._show(self._marks.text(self.source.call_text if self.source is not None else ""))

    def _end_call(self) -> None:
        """A call without arguments has an empty object of them, which every client can read."""
        if not self._said:
            self.arguments("{}")

    def finish(self, *, limited: bool = False) -> None:
        """The text has ended: no call follows, so white space that was held back counts, unless it is layout.

        Args:
            limited: it was cut off, so that arguments which have not begun are not known.
        """
        if not limited:
            self._end_call()
        self._flush()
        if self._reasoning_space and self._reasoning_begun:
            self._reasoning += self._reasoning_space
        if self._content_space and not self.calls and (self._content_begun or not self._reasoning_begun):
            self._content += self._content_space
            self._grow(CONTENT)
        self._reasoning_space.clear()
        self._content_space.clear()

    def take(self) -> Delta | None:
        """The changes since the last call. None: nothing changed."""
        if not (self._content or self._reasoning or self._new_calls or self._arguments):
            return None
        reasoning = "".join(self._reasoning) if self._reasoning else None
        content = "".join(self._content) if self._content else None
        calls = self._calls() if self._new_calls or self._arguments else None
        self._reasoning, self._content = [], []
        return Delta(content=content, reasoning_content=reasoning, tool_calls=calls)

    def _calls(self) -> list[CallDelta]:
        arguments = {index: "".join(parts) for index, parts in self._arguments.items()}
        new = {index for index, _, _ in self._new_calls}
        calls = [CallDelta(index, FunctionDelta(text)) for index, text in arguments.items() if index not in new]
        calls += [
            CallDelta(index, FunctionDelta(arguments.get(index, ""), name), call_id, "function")
            for index, call_id, name in self._new_calls
        ]
        self._new_calls, self._arguments = [], {}
        return calls


def _without_trailing_space(held: list[str], text: str) -> str:
    """Append text to ``held`` white space and return all but the trailing white space, which is held from now on."""
    body = text.rstrip(_SPACE)
    if not body:
        held.append(text)
        return ""
    if held:
        shown = "".join(held) + body
        held.clear()
    else:
        shown = body
    if len(body) < len(text):
        held.append(text[len(body) :])
    return shown
