"""Answers of the Messages API: one JSON body, or server-sent events that are the same on every gateway. Pure."""

from typing import Any

import msgspec

from penstock.gateway.apis.chat.segments import Segment, SegmentChange, SegmentedAnswer
from penstock.gateway.apis.messages import objects
from penstock.gateway.base.event_stream import EventWriter
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest

PREFIX = "msg_"

_json = msgspec.json.Encoder().encode


class ClientBody(msgspec.Struct, frozen=True):
    """What is stored of a client's body.

    Attributes:
        max_tokens: as asked; there may be room for less.
        edits: of the context, that were applied; None: none was asked for.
    """

    max_tokens: int = 0
    edits: tuple[objects.AppliedEdit, ...] | None = None


_client_body = msgspec.json.Decoder(ClientBody).decode


def message(request: GenerateRequest, answer: SegmentedAnswer) -> objects.Message:
    """A whole message that did not fail."""
    ended = _ended(request, answer)
    return objects.Message(
        id=PREFIX + request.id,
        model=request.named,
        content=[_block(segment) for segment in answer.segments],
        stop_reason=ended.stop_reason,
        stop_sequence=ended.stop_sequence,
        usage=_usage(answer),
        context_management=_edits(request),
    )


class MessageEvents:
    """Implements ``penstock.gateway.apis.chat.segments.SegmentEvents``."""

    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request

    def left(self, writer: EventWriter, error: ServingError) -> bytes:
        return _json(objects.message_error(error, self._request.id))

    def begin(self, writer: EventWriter) -> None:
        request = self._request
        usage = objects.MessageUsage(request.prompt_tokens, 0, 0, objects.MessageOutputDetails(0))
        _event(
            writer,
            "message_start",
            message=objects.Message(
                id=PREFIX + request.id,
                model=request.named,
                content=[],
                stop_reason=None,
                stop_sequence=None,
                usage=usage,
            ),
        )
        _event(writer, "ping")

    def change(self, writer: EventWriter, change: SegmentChange) -> None:
        index = change.segment.index
        if change.what == "grew":
            _event(writer, "content_block_delta", index=index, delta=_delta(change))
        elif change.what == "opened":
            _event(writer, "content_block_start", index=index, content_block=_block(change.segment, empty=True))
        else:
            _stop(writer, change.segment)

    def end(self, writer: EventWriter, answer: SegmentedAnswer) -> None:
        if answer.error is not None:
            if writer.wanted:
                writer.write(b"error", _json(objects.message_error(answer.error, self._request.id)))
            return
        if answer.segments and not answer.segments[-1].closed:
            _stop(writer, answer.segments[-1])
        _event(
            writer,
            "message_delta",
            delta=_ended(self._request, answer),
            usage=_usage(answer),
            context_management=_edits(self._request),
        )
        _event(writer, "message_stop")


def _event(writer: EventWriter, kind: str, **fields: Any) -> None:
    writer.write(kind.encode(), _json(objects.MessageEvent(kind, **fields)) if writer.wanted else b"")


def _stop(writer: EventWriter, segment: Segment) -> None:
    """The end of a block. Its signature has no number, since earlier builds, which may continue a stream, send none."""
    if segment.kind == "reasoning" and writer.wanted:
        delta = objects.SignatureDelta(objects.SIGNATURE)
        event = objects.MessageEvent("content_block_delta", index=segment.index, delta=delta)
        writer.write_apart(b"content_block_delta", _json(event))
    _event(writer, "content_block_stop", index=segment.index)


def _block(segment: Segment, *, empty: bool = False) -> objects.Block:
    content = "" if empty else segment.content
    if segment.kind == "text":
        return objects.TextBlock(content)
    if segment.kind == "reasoning":
        return objects.ThinkingBlock(content, "" if empty else objects.SIGNATURE)
    return objects.ToolUseBlock(segment.call_id, segment.name, {} if empty else segment.arguments)


def _delta(change: SegmentChange) -> objects.TextDelta | objects.ThinkingDelta | objects.InputDelta:
    if change.segment.kind == "text":
        return objects.TextDelta(change.text)
    return objects.ThinkingDelta(change.text) if change.segment.kind == "reasoning" else objects.InputDelta(change.text)


def _ended(request: GenerateRequest, answer: SegmentedAnswer) -> objects.MessageDelta:
    finish = answer.finish
    assert finish is not None
    if finish.reason == "length":
        asked = _client_body(request.client_body or b"{}").max_tokens
        reason: objects.StopReason = (
            "max_tokens" if request.stop.max_tokens >= asked else "model_context_window_exceeded"
        )
        return objects.MessageDelta(reason, None)
    if isinstance(finish.stop, str):
        return objects.MessageDelta("stop_sequence", finish.stop)
    return objects.MessageDelta("tool_use" if answer.has_calls else "end_turn", None)


def _edits(request: GenerateRequest) -> objects.AppliedEdits | msgspec.UnsetType:
    edits = _client_body(request.client_body or b"{}").edits
    return msgspec.UNSET if edits is None else objects.AppliedEdits(edits)


def _usage(answer: SegmentedAnswer) -> objects.MessageUsage:
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens
    details = objects.MessageOutputDetails(answer.reasoning_tokens)
    return objects.MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached, details)
