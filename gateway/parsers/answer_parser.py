"""One answer's text, taken apart as it comes."""

from collections.abc import Callable

from msgspec import UNSET

from gateway.openai.responses import AnswerMessage, CallMessage, Delta, FunctionMessage
from gateway.parsers.delta_builder import DeltaBuilder
from gateway.parsers.harmony import harmony
from gateway.parsers.reader import Reader, Steps
from gateway.parsers.reasoning import ReasoningTags, thoughts
from gateway.parsers.tool_formats import Texts, ToolFormat, content


class AnswerParser:
    """Give it each piece of text, then ``finish`` it; or the ``whole`` text at once.

    Attributes:
        called: there is a tool call.
    """

    __slots__ = ("_reader", "_sink", "_steps")

    def __init__(
        self,
        call_id: Callable[[int], str],
        tags: ReasoningTags | None,
        tools: ToolFormat | None,
        *,
        harmony: bool = False,
        calls: bool = False,
        thinking: bool = False,
        one_call: bool = False,
        texts: Texts | None = None,
    ) -> None:
        """
        Args:
            call_id: of the call with an index.
            harmony: it is in that format, whatever the marks; with calls or without.
            thinking: the answer begins within thoughts.
            one_call: show the first call only.
        """
        self._reader = Reader()
        self._sink = DeltaBuilder(call_id, tools=tools is not None, one_call=one_call)
        self._steps: Steps[None] | None = _read(
            self._reader, self._sink, tags, tools, harmony, calls, thinking, texts or {}
        )

    @property
    def plain(self) -> bool:
        """All that still comes is content, as it is."""
        return self._steps is None and self._sink.plain

    @property
    def called(self) -> bool:
        return self._sink.calls > 0

    def push(self, text: str) -> Delta | None:
        """What is newly known."""
        if self._steps is None:
            self._sink.content(text)
        else:
            self._reader.feed(text)
            self._step()
        return self._sink.take()

    def finish(self, text: str = "") -> Delta | None:
        """The last piece, and what was held back."""
        if self._steps is None:
            self._sink.content(text)
        self._reader.feed(text)
        self._reader.ended = True
        if self._steps is not None:
            self._step()
        self._sink.finish()
        return self._sink.take()

    def whole(self, text: str) -> AnswerMessage:
        """The message that the deltas add up to."""
        found = self.finish(text)
        if found is None:
            return AnswerMessage("")
        calls = [
            CallMessage(call.id or "", FunctionMessage(call.function.name or "", call.function.arguments))
            for call in found.tool_calls or ()
        ]
        reasoning = UNSET if found.reasoning_content is None else found.reasoning_content
        return AnswerMessage(found.content, reasoning_content=reasoning, tool_calls=calls or UNSET)

    def _step(self) -> None:
        assert self._steps is not None
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None
            if rest := self._reader.rest():
                self._sink.content(rest)


def _read(
    reader: Reader,
    deltas: DeltaBuilder,
    tags: ReasoningTags | None,
    tools: ToolFormat | None,
    in_harmony: bool,
    calls: bool,
    thinking: bool,
    texts: Texts,
) -> Steps[None]:
    if in_harmony:
        yield from harmony(reader, deltas, calls=calls)
        return
    if tags is not None:
        yield from thoughts(reader, deltas, tags, thinking, tools, texts)
    if tools is not None:
        yield from content(reader, deltas, tools, texts)
