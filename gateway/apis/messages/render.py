"""Answers of the Messages API: one JSON body, or server-sent events that are the same on every gateway. Pure."""

from collections.abc import Iterable
from typing import Any

import msgspec

from penstock.gateway.apis.chat.segments import Segment, SegmentChange, SegmentedAnswer
from penstock.gateway.apis.messages.objects import (
    Block,
    InputDelta,
    Message,
    MessageDelta,
    MessageEvent,
    MessageOutputDetails,
    MessageUsage,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    message_error,
)
from penstock.gateway.base.chat_objects import UsageBody
from penstock.gateway.base.event_stream import EventWriter
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import TokenItem

PREFIX = "msg_"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'

_json = msgspec.json.Encoder().encode
_object = msgspec.json.Decoder(dict[str, Any]).decode


class ClientBody(msgspec.Struct, frozen=True):
    """What is stored of a client's body. ``max_tokens``: as asked; there may be room for less."""

    max_tokens: int = 0


_client_body = msgspec.json.Decoder(ClientBody).decode


def message(request: GenerateRequest, answer: SegmentedAnswer) -> Message:
    """A whole message that did not fail."""
    ended = _ended(request, answer)
    return Message(
        id=PREFIX + request.id,
        model=request.model,
        content=[_block(segment) for segment in answer.segments],
        stop_reason=ended.stop_reason,
        stop_sequence=ended.stop_sequence,
        usage=_usage(answer),
    )


class MessageRenderer:
    """A streamed message."""

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer) -> None:
        self._request = request
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
        """Has no number: it is not part of the answer."""
        return b"" if self.done else PING

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
        if self._answer.done and not self._closed:
            self._close()
        return self._writer.take()

    def fail(self, error: ServingError, *, finished: bool = True) -> bytes:
        """End the stream with an error event; b"" if it has ended. ``finished``: the request has ended too."""
        if self._closed:
            return b""
        self._answer.fail(error)
        if finished:
            self._close()
        else:
            self._closed = True
            self._writer.write_apart(b"error", _json(message_error(error, self._request.id)))
        return self._writer.take()

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        request = self._request
        usage = MessageUsage(request.prompt_tokens, 0, 0, MessageOutputDetails(0))
        self._event(
            "message_start",
            message=Message(
                id=PREFIX + request.id,
                model=request.model,
                content=[],
                stop_reason=None,
                stop_sequence=None,
                usage=usage,
            ),
        )
        self._event("ping")

    def _change(self, change: SegmentChange) -> None:
        index = change.segment.index
        if change.what == "grew":
            self._event("content_block_delta", index=index, delta=_delta(change))
        elif change.what == "opened":
            self._event("content_block_start", index=index, content_block=_block(change.segment, empty=True))
        else:
            self._event("content_block_stop", index=index)

    def _close(self) -> None:
        self._closed = True
        answer, writer = self._answer, self._writer
        if answer.error is not None:
            if writer.wanted:
                writer.write(b"error", _json(message_error(answer.error, self._request.id)))
            return
        if answer.segments and not answer.segments[-1].closed:
            self._event("content_block_stop", index=answer.segments[-1].index)
        self._event("message_delta", delta=_ended(self._request, answer), usage=_usage(answer))
        self._event("message_stop")

    def _event(self, kind: str, **fields: Any) -> None:
        writer = self._writer
        writer.write(kind.encode(), _json(MessageEvent(kind, **fields)) if writer.wanted else b"")


def _block(segment: Segment, *, empty: bool = False) -> Block:
    content = "" if empty else segment.content
    if segment.kind == "text":
        return TextBlock(content)
    if segment.kind == "reasoning":
        return ThinkingBlock(content)
    return ToolUseBlock(segment.call_id, segment.name, {} if empty else _input(content))


def _input(arguments: str) -> Any:
    """Arguments as an object; text that is none, as when it was cut off, under one name."""
    try:
        return _object(arguments or "{}")
    except (ValueError, RecursionError):
        return {"arguments": arguments}


def _delta(change: SegmentChange) -> TextDelta | ThinkingDelta | InputDelta:
    if change.segment.kind == "text":
        return TextDelta(change.text)
    return ThinkingDelta(change.text) if change.segment.kind == "reasoning" else InputDelta(change.text)


def _ended(request: GenerateRequest, answer: SegmentedAnswer) -> MessageDelta:
    finish = answer.finish
    assert finish is not None
    if finish.reason == "length":
        asked = _client_body(request.client_body or b"{}").max_tokens
        reason: StopReason = "max_tokens" if request.stop.max_tokens >= asked else "model_context_window_exceeded"
        return MessageDelta(reason, None)
    if isinstance(finish.stop, str):
        return MessageDelta("stop_sequence", finish.stop)
    return MessageDelta("tool_use" if answer.has_calls else "end_turn", None)


def _usage(answer: SegmentedAnswer) -> MessageUsage:
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens
    details = MessageOutputDetails(answer.reasoning_tokens)
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached, details)
