"""An answer as a sequence of segments: reasoning, text and tool calls, in the order in which the model wrote them.

The Responses API shows each segment as an output item, the Messages API as a content block. Pure: the segments and
their changes are a function of the tokens, however the items that bring them are cut.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from gateway.openai.answer_state import AnswerState
from gateway.openai.responses import UsageBody
from infra.model.detokenizer import Detokenizer
from infra.model.parsers.delta_builder import Delta
from infra.model.parsers.registry import parser_for
from schemas.errors import ServingError
from schemas.requests import GenerateRequest
from schemas.tokens import PROMPT, Finish, Logprob, TokenItem
from schemas.wire import unpack_tokens

Kind = Literal["reasoning", "text", "call"]
Scored = tuple[int, Logprob]  # a token and its log-probability


class Segment:
    """
    Attributes:
        index: among the segments of the answer, from 0.
        parts: text, reasoning, or the JSON text of a call's arguments, in pieces.
        scored: tokens of a text with their log-probabilities, if those were asked for.
        closed: it is complete. One that is still open at the end was cut off.
        call_id, name: of a call.
    """

    __slots__ = ("call_id", "closed", "index", "kind", "name", "parts", "scored")

    def __init__(self, index: int, kind: Kind, call_id: str = "", name: str = "") -> None:
        self.index = index
        self.kind = kind
        self.call_id = call_id
        self.name = name
        self.parts: list[str] = []
        self.scored: list[Scored] = []
        self.closed = False

    @property
    def content(self) -> str:
        return "".join(self.parts)


class Change(NamedTuple):
    """What happened to a segment. ``text`` and ``scored``: what it grew by."""

    what: Literal["opened", "grew", "closed"]
    segment: Segment
    text: str = ""
    scored: tuple[Scored, ...] = ()


class SegmentedAnswer:
    """Reads the answer of a request with one choice.

    Attributes:
        segments: so far.
        reasoning_tokens: those that reasoning and its marks took.
    """

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer) -> None:
        self._state = AnswerState(request, detokenizer)
        self._choice = self._state.choices[0]
        self._parser = parser_for(request, 0) if request.parsing is not None else None
        self._scores = request.sampling.logprobs is not None
        self._pending: list[Scored] = []  # of tokens whose text is not shown yet
        self._unassigned = 0  # tokens before the first segment
        self._has_calls = False
        self.segments: list[Segment] = []
        self.reasoning_tokens = 0

    @property
    def done(self) -> bool:
        return self._state.done

    @property
    def error(self) -> ServingError | None:
        return self._state.error

    @property
    def usage(self) -> UsageBody:
        return self._state.usage

    @property
    def finish(self) -> Finish | None:
        """Why the answer ended; None: it has not, or it failed."""
        return self._choice.finish

    @property
    def has_calls(self) -> bool:
        return self._has_calls

    @property
    def _open(self) -> Segment | None:
        last = self.segments[-1] if self.segments else None
        return last if last is not None and not last.closed else None

    def fail(self, error: ServingError) -> None:
        """The answer ends here, unless it has ended."""
        if not self.done:
            self._state.error = error

    def push(self, items: Iterable[TokenItem]) -> list[Change]:
        """What these items, in order, change."""
        out: list[Change] = []
        for item in items:
            if self.done:
                break
            if item.choice != PROMPT:
                self._item(out, item)
        return out

    def _item(self, out: list[Change], item: TokenItem) -> None:
        choice, state = self._choice, self._state
        tokens = unpack_tokens(item.tokens)
        shown = len(tokens) - state.hides_last(item.finish)
        for place, token in enumerate(tokens):
            choice.position += 1
            text = choice.push(token) if place < shown else ""
            if self._scores and item.logprobs and place < min(shown, len(item.logprobs)):
                self._pending.append((token, item.logprobs[place]))
            self._text(out, text)
            self._count()
        if item.finish is not None and state.end(choice, item.finish):
            self._end(out, choice.stream.finish(), cut_off=item.finish.reason == "length")

    def _text(self, out: list[Change], text: str) -> None:
        if self._parser is None:
            if text:
                self._grow(out, "text", text)
        elif (delta := self._parser.push(text)) is not None:
            self._delta(out, delta)

    def _end(self, out: list[Change], rest: str, *, cut_off: bool) -> None:
        if self._parser is None:
            if rest:
                self._grow(out, "text", rest)
        elif (delta := self._parser.finish(rest, limited=cut_off)) is not None:
            self._delta(out, delta)
        # An answer that reached its limit ends within a segment, which is not complete.
        if not cut_off:
            self._close(out)

    def _count(self) -> None:
        """Assign the last token to reasoning or not; the marks before a segment belong to it."""
        parsing = self._state.request.parsing
        if not self.segments:
            self._unassigned += 1
            return
        if self.segments[-1].kind == "reasoning":
            self.reasoning_tokens += 1 + self._unassigned
        elif self._unassigned and parsing is not None and parsing.thinking:
            self.reasoning_tokens += self._unassigned  # reasoning without text
        self._unassigned = 0

    def _delta(self, out: list[Change], delta: Delta) -> None:
        calls = delta.tool_calls or ()
        for call in calls:  # the rest of a call comes before what follows it
            if call.id is None and call.function.arguments:
                self._grow(out, "call", call.function.arguments)
        if delta.reasoning_content:
            self._grow(out, "reasoning", delta.reasoning_content)
        if delta.content:
            self._grow(out, "text", delta.content)
        for call in calls:
            if call.id is not None:
                self._close(out)
                self._begin(out, "call", call.id, call.function.name or "")
                self._has_calls = True
                if call.function.arguments:
                    self._grow(out, "call", call.function.arguments)

    def _grow(self, out: list[Change], kind: Kind, text: str) -> None:
        segment = self._open
        if segment is None or segment.kind != kind:
            self._close(out)
            segment = self._begin(out, kind)
        scored: tuple[Scored, ...] = ()
        if self._pending:
            if kind == "text":
                scored = tuple(self._pending)
                segment.scored += scored
            self._pending.clear()
        segment.parts.append(text)
        out.append(Change("grew", segment, text, scored))

    def _begin(self, out: list[Change], kind: Kind, call_id: str = "", name: str = "") -> Segment:
        segment = Segment(len(self.segments), kind, call_id, name)
        self.segments.append(segment)
        out.append(Change("opened", segment))
        return segment

    def _close(self, out: list[Change]) -> None:
        segment = self._open
        if segment is not None:
            segment.closed = True
            out.append(Change("closed", segment))
