"""Parses the text of one choice as it is generated."""

from collections.abc import Callable
from typing import NamedTuple

from infra.model.parsers.delta_builder import Delta, DeltaBuilder
from infra.model.parsers.harmony import read_harmony
from infra.model.parsers.reader import Reader, Steps
from infra.model.parsers.reasoning import ReasoningTags, read_reasoning
from infra.model.parsers.tool_formats import TextParameters, ToolFormat, read_content


class AnswerFormat(NamedTuple):
    """
    Attributes:
        reasoning: None: no reasoning is separated.
        tools: None: no calls are parsed.
        harmony: the text is in the harmony format, which has marks of its own for both.
        harmony_calls: parse tool calls in harmony.
        in_reasoning: the prompt ends within reasoning, so the text begins there.
        one_call: return the first call only.
        texts: function -> parameters that are text.
    """

    reasoning: ReasoningTags | None = None
    tools: ToolFormat | None = None
    harmony: bool = False
    harmony_calls: bool = False
    in_reasoning: bool = False
    one_call: bool = False
    texts: TextParameters = {}


class AnswerParser:
    """``push`` each piece of text, then ``finish``; or pass all of it to ``parse``."""

    __slots__ = ("_deltas", "_reader", "_steps")

    def __init__(self, answer_format: AnswerFormat, call_id: Callable[[int], str]) -> None:
        """
        Args:
            call_id: from a call's index to its id.
        """
        self._reader = Reader()
        self._deltas = DeltaBuilder(call_id, tools=answer_format.tools is not None, one_call=answer_format.one_call)
        self._steps: Steps[None] | None = _read(self._reader, self._deltas, answer_format)

    @property
    def passthrough(self) -> bool:
        """All further text is content, unchanged."""
        return self._steps is None and self._deltas.passthrough

    @property
    def has_calls(self) -> bool:
        return self._deltas.calls > 0

    def push(self, text: str) -> Delta | None:
        """What this piece adds; None: nothing yet."""
        if self._steps is None:
            self._deltas.content(text)
        else:
            self._reader.feed(text)
            self._step()
        return self._deltas.take()

    def finish(self, text: str = "", *, limited: bool = False) -> Delta | None:
        """Parse the last piece, and the text held back before it.

        Args:
            limited: the answer was cut off by its length: the beginning of a call is not shown as text.
        """
        if self._steps is None:
            self._deltas.content(text)
        self._reader.feed(text)
        self._reader.ended, self._reader.limited = True, limited
        if self._steps is not None:
            self._step()
        self._deltas.finish()
        return self._deltas.take()

    def parse(self, text: str, *, limited: bool = False) -> Delta:
        """What the deltas of the whole text add up to. ``limited``: as for ``finish``."""
        return self.finish(text, limited=limited) or Delta()

    def _step(self) -> None:
        assert self._steps is not None
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None
            if remaining := self._reader.rest():
                self._deltas.content(remaining)


def _read(reader: Reader, deltas: DeltaBuilder, form: AnswerFormat) -> Steps[None]:
    if form.harmony:
        yield from read_harmony(reader, deltas, calls=form.harmony_calls)
        return
    if form.reasoning is not None:
        yield from read_reasoning(
            reader, deltas, form.reasoning, form.tools, form.texts, in_reasoning=form.in_reasoning
        )
    if form.tools is not None:
        yield from read_content(reader, deltas, form.tools, form.texts)
