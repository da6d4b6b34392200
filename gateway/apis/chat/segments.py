"""An answer as a sequence of segments: reasoning, text and tool calls, in the order in which the model wrote them.

The Responses API shows each segment as an output item, the Messages API as a content block. Pure: the segments and
their changes depend only on the tokens, not on how items split them.
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from penstock.gateway.apis.chat.stream_renderer import AnswerState, Scored
from penstock.gateway.base.chat_objects import UsageBody
from penstock.gateway.base.event_stream import EventWriter
from penstock.gateway.base.request_bodies import decode_json
from penstock.infra.text.detokenizer import Detokenizer
from penstock.infra.text.parsers.delta_builder import Delta
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import WHOLE_REQUEST, Finish, TokenItem
from penstock.schemas.wire import unpack_tokens

Kind = Literal["reasoning", "text", "call"]
_object = msgspec.json.Decoder(dict[str, Any]).decode


class Segment:
    """
    Attributes:
        index: in the answer, from 0.
        parts: pieces of the text, the reasoning, or the JSON of a call's arguments.
        scored: tokens of a text with their log-probabilities, if these were requested.
        closed: the segment is complete. One that is open at the end of the answer was cut off.
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

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a call as an object. Other text, for example if it was cut off, is the value of one key."""
        text = self.content
        try:
            found: dict[str, Any] = decode_json(_object, (text or "{}").encode())
            return found
        except (ValueError, RecursionError):
            return {"arguments": text}


class SegmentChange(NamedTuple):
    """A change of a segment. ``text`` and ``scored``: what was added."""

    what: Literal["opened", "grew", "closed"]
    segment: Segment
    text: str = ""
    scored: tuple[Scored, ...] = ()


EndedNs = Callable[[], int]


def unknown() -> int:
    """As an answer's end: that is not known here."""
    return 0


class SegmentedAnswer:
    """Reads the answer of a request with one choice.

    Args:
        ended_ns: when it ended, once it has; Unix time.
    Attributes:
        segments: so far.
    """

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer, ended_ns: EndedNs = unknown) -> None:
        self.detokenizer = detokenizer
        self.ended_ns = ended_ns
        self._state = AnswerState(request, detokenizer)
        self._choice = self._state.choices[0]
        self._parser = self._choice.parser
        self._scores = request.sampling.logprobs is not None
        self._scored: list[Scored] = []  # the content that the last token added
        self._has_calls = False
        self.segments: list[Segment] = []

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
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning and its marks."""
        return self._state.reasoning_tokens

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
        """End the answer, unless it has ended."""
        if not self.done:
            self._state.error = error

    def push(self, items: Iterable[TokenItem]) -> list[SegmentChange]:
        """The changes that these items make, in order."""
        out: list[SegmentChange] = []
        for item in items:
            if self.done:
                break
            if item.choice >= WHOLE_REQUEST:
                self._item(out, item)
            else:
                self._state.count(item)
        return out

    def _item(self, out: list[SegmentChange], item: TokenItem) -> None:
        choice, state = self._choice, self._state
        tokens = unpack_tokens(item.tokens)
        shown = len(tokens) - state.hides_last(item.finish)
        for place, token in enumerate(tokens):
            choice.position += 1
            if self._scores and item.logprobs and place < min(shown, len(item.logprobs)):
                choice.score(token, item.logprobs[place])
            self._text(out, choice.push(token) if place < shown else "")
        if item.finish is not None and state.end(choice, item.finish):
            self._end(out, choice.stream.finish(), cut_off=item.finish.reason == "length")

    def _text(self, out: list[SegmentChange], text: str) -> None:
        delta = self._parser.push(text) if self._parser is not None else Delta(content=text) if text else None
        self._change(out, text, delta)

    def _change(self, out: list[SegmentChange], text: str, delta: Delta | None) -> None:
        self._scored = self._choice.content_scores(text) if self._scores else []
        if delta is not None:
            self._delta(out, delta)

    def _end(self, out: list[SegmentChange], rest: str, *, cut_off: bool) -> None:
        if self._parser is None:
            self._change(out, rest, Delta(content=rest) if rest else None)
        else:
            self._change(out, rest, self._parser.finish(rest, limited=cut_off))
        # An answer that reached its limit ends within a segment, which is not complete.
        if not cut_off:
            self._close(out)

    def _delta(self, out: list[SegmentChange], delta: Delta) -> None:
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

    def _grow(self, out: list[SegmentChange], kind: Kind, text: str) -> None:
        segment = self._open
        if segment is None or segment.kind != kind:
            self._close(out)
            segment = self._begin(out, kind)
        scored: tuple[Scored, ...] = ()
        if kind == "text" and self._scored:
            scored, self._scored = tuple(self._scored), []
            segment.scored += scored
        segment.parts.append(text)
        out.append(SegmentChange("grew", segment, text, scored))

    def _begin(self, out: list[SegmentChange], kind: Kind, call_id: str = "", name: str = "") -> Segment:
        segment = Segment(len(self.segments), kind, call_id, name)
        self.segments.append(segment)
        out.append(SegmentChange("opened", segment))
        return segment

    def _close(self, out: list[SegmentChange]) -> None:
        segment = self._open
        if segment is not None:
            segment.closed = True
            out.append(SegmentChange("closed", segment))


class WholeAnswer:
    """One JSON body of an answer. ``push`` items until it is done.

    Args:
        body: makes the body of an answer that has ended without failure.
    """

    large = False

    def __init__(
        self,
        request: GenerateRequest,
        detokenizer: Detokenizer,
        body: Callable[[GenerateRequest, SegmentedAnswer], Any],
        ended_ns: EndedNs = unknown,
    ) -> None:
        self._request = request
        self.answer = SegmentedAnswer(request, detokenizer, ended_ns)
        self._body = body

    @property
    def usage(self) -> UsageBody:
        return self.answer.usage

    @property
    def error(self) -> ServingError | None:
        return self.answer.error

    def push(self, items: Iterable[TokenItem]) -> bool:
        self.answer.push(items)
        return self.answer.done

    def parts(self) -> list[bytes]:
        return [self.response()]

    def response(self) -> bytes:
        """
        Raises:
            ServingError: the request failed, or its answer has no body.
        """
        if self.answer.error is not None:
            raise self.answer.error
        return msgspec.json.encode(self._body(self._request, self.answer))


class SegmentEvents(Protocol):
    """How an API shows an answer's segments as server-sent events. ``ping``: an event without content."""

    ping: bytes

    def begin(self, writer: EventWriter) -> None:
        """The answer begins."""

    def change(self, writer: EventWriter, change: SegmentChange) -> None:
        """A segment has changed."""

    def end(self, writer: EventWriter, answer: SegmentedAnswer) -> None:
        """The answer has ended, or failed."""

    def left(self, writer: EventWriter, error: ServingError) -> bytes:
        """The end of a stream whose answer continues elsewhere; it is not an event of the answer."""


class SegmentRenderer:
    """A streamed answer, as the events of one API."""

    def __init__(
        self,
        request: GenerateRequest,
        detokenizer: Detokenizer,
        events: SegmentEvents,
        ended_ns: EndedNs = unknown,
    ) -> None:
        self._events = events
        self._answer = SegmentedAnswer(request, detokenizer, ended_ns)
        self._writer = EventWriter()
        self._begun = self._closed = False

    @property
    def done(self) -> bool:
        return self._answer.done

    @property
    def usage(self) -> UsageBody:
        return self._answer.usage

    @property
    def error(self) -> ServingError | None:
        return self._answer.error

    @property
    def ping(self) -> bytes:
        """A ping has no number, since it is not part of the answer."""
        return b"" if self.done else self._events.ping

    def resume(self, last_event_id: str) -> None:
        """Skip what the client has seen; then push all items from the first on.

        Raises:
            ServingError: not the id of an event.
        """
        self._writer.resume(last_event_id)

    def push(self, items: Iterable[TokenItem]) -> bytes:
        """Events for these items, and the end of the stream once nothing more can follow."""
        self._begin()
        for change in self._answer.push(items):
            self._events.change(self._writer, change)
        if self._answer.done:
            self._close()
        return self._writer.take()

    def fail(self, error: ServingError, *, finished: bool = True) -> bytes:
        """End the stream with an error event; b"" if it has ended. ``finished``: the request has ended too."""
        if self._closed:
            return b""
        self._answer.fail(error)
        if finished:
            self._begin()
            self._close()
        else:
            self._closed = True
            self._writer.write_apart(b"error", self._events.left(self._writer, error))
        return self._writer.take()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._events.begin(self._writer)

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._events.end(self._writer, self._answer)
