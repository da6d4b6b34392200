"""Answers of the Responses API: one JSON body, or server-sent events whose numbers are the same on every gateway. Pure.

The events are a function of the request and its tokens, so that any gateway continues a stream behind any event.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from penstock.gateway.apis.chat.segments import Change, Segment, SegmentedAnswer
from penstock.gateway.apis.responses.answer import ResponseBuilder, ended_status, usage_of
from penstock.gateway.apis.responses.objects import (
    ItemStatus,
    OutputText,
    ReasoningText,
    Response,
    ResponseEvent,
    Status,
)
from penstock.gateway.base.chat_objects import UsageBody
from penstock.gateway.base.event_stream import COMMENT
from penstock.gateway.base.event_writer import EventWriter
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import TokenItem

_json = msgspec.json.Encoder().encode
_ENDS = {"completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed"}


def response(request: GenerateRequest, answer: SegmentedAnswer, ended_ns: int = 0) -> Response:
    """The response as it ended, also if it failed."""
    return _result(ResponseBuilder(request, answer.detokenizer), answer, ended_ns)


class ResponseRenderer:
    """A streamed response."""

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer) -> None:
        self._builder = ResponseBuilder(request, detokenizer)
        self._answer = SegmentedAnswer(request, detokenizer)
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
        return b"" if self.done else COMMENT

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
            self._change(change)
        if self._answer.done:
            self._close()
        return self._writer.take()

    def fail(self, error: ServingError, *, finished: bool = True) -> bytes:
        """End the stream; b"" if it has ended. ``finished``: the request has ended too."""
        if self._closed:
            return b""
        self._answer.fail(error)
        if finished:
            self._begin()
            self._close()
        else:  # the response goes on elsewhere: this is no event of it, and has no number of its own
            self._closed = True
            event = ResponseEvent(
                "error", self._writer.number, code=error.code.value, message=error.message, param=error.param
            )
            self._writer.write_apart(b"error", _json(event))
        return self._writer.take()

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        background = self._builder.asked.background
        self._event("response.created", response=self._state("queued" if background else "in_progress"))
        if background:
            self._event("response.queued", response=self._state("queued"))
        self._event("response.in_progress", response=self._state("in_progress"))

    def _change(self, change: Change) -> None:
        segment = change.segment
        if change.what == "grew":
            self._grow(segment, change)
        elif change.what == "opened":
            self._open(segment)
        else:
            self._end(segment, "completed")

    def _open(self, segment: Segment) -> None:
        item = self._builder.item(segment, "in_progress", empty=True)
        self._event("response.output_item.added", output_index=segment.index, item=item)
        if segment.kind != "call":
            part = OutputText("") if segment.kind == "text" else ReasoningText("")
            self._of("response.content_part.added", segment, part=part)

    def _grow(self, segment: Segment, change: Change) -> None:
        match segment.kind:
            case "text":
                logprobs = self._builder.logprobs(change.scored)
                self._of("response.output_text.delta", segment, delta=change.text, logprobs=logprobs)
            case "reasoning":
                self._of("response.reasoning_text.delta", segment, delta=change.text)
            case "call":
                self._of("response.function_call_arguments.delta", segment, delta=change.text)

    def _end(self, segment: Segment, status: ItemStatus) -> None:
        content = segment.content
        match segment.kind:
            case "text":
                part = self._builder.part(segment)
                self._of("response.output_text.done", segment, text=content, logprobs=part.logprobs)
                self._of("response.content_part.done", segment, part=part)
            case "reasoning":
                self._of("response.reasoning_text.done", segment, text=content)
                self._of("response.content_part.done", segment, part=ReasoningText(content))
            case "call":
                self._of(
                    "response.function_call_arguments.done",
                    segment,
                    arguments=content,
                    name=self._builder.call_name(segment),
                )
        item = self._builder.item(segment, status)
        self._event("response.output_item.done", output_index=segment.index, item=item)

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        answer = self._answer
        if not answer.segments and answer.error is None:  # an answer without text is an empty message
            self._open(empty := _empty_message())
            self._end(empty, "completed")
        elif answer.segments and not answer.segments[-1].closed:
            self._end(answer.segments[-1], "incomplete")
        status = ended_status(answer)
        # No event says that a response was cancelled; clients know "response.failed" and read the status.
        self._event(_ENDS.get(status, "response.failed"), response=_result(self._builder, answer, 0))

    def _state(self, status: Status) -> Response:
        return self._builder.response(status)

    def _of(self, kind: str, segment: Segment, **fields: Any) -> None:
        """An event about the content of an item."""
        if segment.kind != "call":
            fields["content_index"] = 0
        self._event(kind, output_index=segment.index, item_id=self._builder.item_id(segment), **fields)

    def _event(self, kind: str, **fields: Any) -> None:
        writer = self._writer
        data = _json(ResponseEvent(kind, writer.number, **fields)) if writer.wanted else b""
        writer.write(kind.encode(), data)


def _result(builder: ResponseBuilder, answer: SegmentedAnswer, ended_ns: int) -> Response:
    status = ended_status(answer)
    segments = answer.segments
    items = builder.items(segments)
    if not segments and answer.error is None:
        items = [builder.item(_empty_message(), "completed")]
    usage = usage_of(answer.usage, answer.reasoning_tokens)
    return builder.response(status, items, usage, answer.error, ended_ns)


def _empty_message() -> Segment:
    return Segment(0, "text")
