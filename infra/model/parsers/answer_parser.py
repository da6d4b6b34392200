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
        stops: stop strings, searched in the content only.
        min_tokens: stop strings count from this token (counted from 1) on.
        stops_shown: the content ends behind the stop string, not before it.
    """

    reasoning: ReasoningTags | None = None
    tools: ToolFormat | None = None
    harmony: bool = False
    harmony_calls: bool = False
    in_reasoning: bool = False
    one_call: bool = False
    texts: TextParameters = {}
    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    stops_shown: bool = False


class AnswerParser:
    """``push`` the text of each token, then ``finish``; without stop strings, in any pieces, or all of it to ``parse``.

    Workers (to end a generation) and gateways (to show it) run this code over the same tokens. What it has found after
    k tokens depends on those k tokens only, so another process can take over at any k.
    """

    __slots__ = ("_deltas", "_reader", "_steps", "_unsearched")

    def __init__(self, answer_format: AnswerFormat, call_id: Callable[[int], str]) -> None:
        """
        Args:
            call_id: from a call's index to its id.
        """
        self._reader = Reader()
        self._deltas = DeltaBuilder(
            call_id,
            tools=answer_format.tools is not None,
            one_call=answer_format.one_call,
            stops=answer_format.stops,
            stops_shown=answer_format.stops_shown,
        )
        self._unsearched = max(answer_format.min_tokens - 1, 0)
        self._deltas.searching = not self._unsearched
        self._steps: Steps[None] | None = _read(self._reader, self._deltas, answer_format)

    @property
    def passthrough(self) -> bool:
        """All further text is content, unchanged."""
        return self._steps is None and self._deltas.passthrough

    @property
    def has_calls(self) -> bool:
        return self._deltas.calls > 0

    @property
    def stop(self) -> str | None:
        """The stop string that ended the content; nothing follows."""
        return self._deltas.stop

    def push(self, text: str) -> Delta | None:
        """What the text of a token ("": it has none yet) adds; None: nothing yet."""
        self._feed(text)
        return self._deltas.take()

    def _feed(self, text: str) -> None:
        if self._unsearched:
            self._unsearched -= 1
        elif not self._deltas.searching:
            self._deltas.searching = True
        if not text or self._deltas.stop is not None:
            return
        if self._steps is None:
            self._deltas.content(text)
        else:
            self._reader.feed(text)
            self._step()

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
        self._deltas.finish(limited=limited)
        return self._deltas.take()

    def parse(self, *texts: str, limited: bool = False) -> Delta:
        """What the deltas of a whole answer add up to.

        Args:
            texts: of each token, and at last what was held back at the end; without stop strings, in any pieces.
            limited: as for ``finish``.
        """
        if self._deltas.stoppable:
            for text in texts[:-1]:
                self._feed(text)
            texts = texts[-1:]
        return self.finish("".join(texts), limited=limited) or Delta()

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
    rest = ""
    if form.reasoning is not None:
        rest = yield from read_reasoning(
            reader, deltas, form.reasoning, form.tools, form.texts, in_reasoning=form.in_reasoning
        )
        if rest:  # the reasoning was not closed: it ends where this begins, which is all that is left
            reader = reader.within(rest)
    if form.tools is not None:
        yield from read_content(reader, deltas, form.tools, form.texts)
    if rest:
        deltas.content(reader.rest())
