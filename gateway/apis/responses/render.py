"""Answers of the Responses API: one JSON body, or server-sent events whose numbers are the same on every gateway. Pure.

The events are a function of the request and its tokens, so that any gateway continues a stream after any event.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET

from penstock.gateway.apis.chat.logprobs import LogprobFormatter
from penstock.gateway.apis.chat.segments import Segment, SegmentChange, SegmentedAnswer
from penstock.gateway.apis.chat.stream_renderer import Scored
from penstock.gateway.apis.responses.bodies import (
    CUSTOM,
    ENCODED_REASONING,
    FUNCTION,
    TOOL_SEARCH,
    ResponsesRequest,
    ToolNames,
    custom_input,
)
from penstock.gateway.apis.responses.chat import encode_summary
from penstock.gateway.apis.responses.objects import (
    CustomToolCallItem,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
    Status,
    SummaryText,
    ToolSearchCallItem,
)
from penstock.gateway.apis.responses.record import PREFIX, item_id, read_stored
from penstock.gateway.base.chat_objects import UsageBody
from penstock.gateway.base.event_stream import COMMENT, EventWriter
from penstock.infra.text.detokenizer import Detokenizer
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest, Priority

_TIERS = {Priority.batch: "flex", Priority.interactive: "priority", Priority.standard: "default"}


class ResponseBuilder:
    """Makes response objects of one request. ``asked``: its body."""

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer) -> None:
        """
        Raises:
            ServingError: the stored body is of a release that this one cannot read.
        """
        stored = read_stored(request.client_body)
        self.asked: ResponsesRequest = stored.body
        self._request = request
        self._names = ToolNames(stored.offered)
        self._logprobs = LogprobFormatter(detokenizer) if request.sampling.logprobs is not None else None

    def response(
        self,
        status: Status,
        output: Iterable[OutputItem] = (),
        usage: ResponseUsage | None = None,
        error: ServingError | None = None,
        ended_ns: int = 0,
    ) -> Response:
        asked, request = self.asked, self._request
        text: dict[str, Any] = {"format": {"type": "text"}}
        if asked.text is not None:
            text = {"format": asked.text.format or text["format"], "verbosity": asked.text.verbosity or "medium"}
        return Response(
            id=PREFIX + request.id,
            created_at=request.created_ns // 1_000_000_000,
            status=status,
            model=request.named,
            output=list(output),
            usage=usage,
            error=_error(error) if error is not None and status == "failed" else None,
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            completed_at=(ended_ns // 1_000_000_000 or None) if status == "completed" else None,
            background=bool(asked.background),
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            max_tool_calls=asked.max_tool_calls,
            metadata=asked.metadata or {},
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            presence_penalty=request.sampling.presence_penalty,
            frequency_penalty=request.sampling.frequency_penalty,
            previous_response_id=asked.previous_response_id,
            prompt_cache_key=asked.prompt_cache_key,
            reasoning=asked.reasoning if asked.reasoning is not None else {"effort": None, "summary": None},
            safety_identifier=asked.safety_identifier,
            service_tier=_TIERS[request.priority],
            store=not request.no_store,
            temperature=request.sampling.temperature,
            text=text,
            tool_choice=asked.tool_choice or "auto",
            tools=[
                {"strict": False, "parameters": None, **tool} if tool.get("type") == "function" else tool
                for tool in asked.tools or ()
            ],
            top_logprobs=asked.top_logprobs or 0,
            top_p=request.sampling.top_p,
            truncation=asked.truncation or "disabled",
            user=asked.user,
        )

    def item_id(self, segment: Segment) -> str:
        return item_id(self._request.id, self.kind(segment), segment.index)

    def kind(self, segment: Segment) -> str:
        """ "text", "reasoning", or the kind of the tool that is called."""
        return self._names.kind(segment.name) if segment.kind == "call" else segment.kind

    def item(self, segment: Segment, status: ItemStatus, *, empty: bool = False) -> OutputItem:
        """A segment as an output item. ``empty``: as it is announced, before its content."""
        name, kind = self.item_id(segment), self.kind(segment)
        if kind == TOOL_SEARCH:
            return ToolSearchCallItem(name, status, segment.call_id, {} if empty else segment.arguments)
        if segment.kind == "call":
            namespace, called = self._names.own(segment.name)
            content, within = "" if empty else segment.content, namespace or UNSET
            if kind == CUSTOM:
                return CustomToolCallItem(name, status, segment.call_id, called, custom_input(content), within)
            return FunctionCallItem(name, status, segment.call_id, called, content, within)
        if segment.kind == "reasoning":
            return self._reasoning(name, status, "" if empty else segment.content)
        return MessageItem(name, status, [] if empty else [self.part(segment)])

    def _reasoning(self, name: str, status: ItemStatus, text: str) -> ReasoningItem:
        encoded = encode_summary(text) if text and ENCODED_REASONING in (self.asked.include or ()) else UNSET
        if self.asked.summarises:
            return ReasoningItem(name, status, UNSET, [SummaryText(text)] if text else [], encoded)
        return ReasoningItem(name, status, [ReasoningText(text)] if text else [], encrypted_content=encoded)

    def call_name(self, segment: Segment) -> str:
        return self._names.own(segment.name)[1]

    def part(self, segment: Segment) -> OutputText:
        return OutputText(segment.content, logprobs=self.logprobs(segment.scored))

    def logprobs(self, scored: Iterable[Scored]) -> list[Any]:
        if self._logprobs is None:
            return []
        return [self._logprobs.chat(token, logprob) for token, logprob in scored]

    def items(self, segments: Iterable[Segment]) -> list[OutputItem]:
        return [self.item(segment, "completed" if segment.closed else "incomplete") for segment in segments]


def ended_status(answer: SegmentedAnswer) -> Status:
    """Of an answer that is over."""
    if answer.error is not None:
        return "cancelled" if answer.error.code is Code.cancelled else "failed"
    finish = answer.finish
    return "incomplete" if finish is not None and finish.reason == "length" else "completed"


def usage_of(usage: UsageBody, reasoning_tokens: int) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(reasoning_tokens),
        usage.total_tokens,
    )


def _error(error: ServingError) -> ResponseError:
    code = "rate_limit_exceeded" if error.code.status == 429 else "server_error"
    return ResponseError(code, error.message, error.code.value)


_json = msgspec.json.Encoder().encode
_ENDS = {"completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed"}


def response(request: GenerateRequest, answer: SegmentedAnswer) -> Response:
    """The response as it ended, also if it failed."""
    return _result(ResponseBuilder(request, answer.detokenizer), answer)


class ResponseEvents:
    """Implements ``penstock.gateway.apis.chat.segments.SegmentEvents``."""

    ping = COMMENT

    def __init__(self, request: GenerateRequest, detokenizer: Detokenizer) -> None:
        self._builder = ResponseBuilder(request, detokenizer)

    def left(self, writer: EventWriter, error: ServingError) -> bytes:
        """The number of the next event, since the continued stream uses this event's number for another one."""
        return _json(
            ResponseEvent("error", writer.number, code=error.code.value, message=error.message, param=error.param)
        )

    def begin(self, writer: EventWriter) -> None:
        background = self._builder.asked.background
        _event(writer, "response.created", response=self._state("queued" if background else "in_progress"))
        if background:
            _event(writer, "response.queued", response=self._state("queued"))
        _event(writer, "response.in_progress", response=self._state("in_progress"))

    def change(self, writer: EventWriter, change: SegmentChange) -> None:
        segment = change.segment
        if change.what == "grew":
            self._grow(writer, segment, change)
        elif change.what == "opened":
            self._open(writer, segment)
        else:
            self._end(writer, segment, "completed")

    def _open(self, writer: EventWriter, segment: Segment) -> None:
        item = self._builder.item(segment, "in_progress", empty=True)
        _event(writer, "response.output_item.added", output_index=segment.index, item=item)
        if segment.kind == "reasoning" and self._builder.asked.summarises:
            self._of(writer, "response.reasoning_summary_part.added", segment, part=SummaryText(""))
        elif segment.kind != "call":
            part = OutputText("") if segment.kind == "text" else ReasoningText("")
            self._of(writer, "response.content_part.added", segment, part=part)

    def _grow(self, writer: EventWriter, segment: Segment, change: SegmentChange) -> None:
        match segment.kind:
            case "text":
                logprobs = self._builder.logprobs(change.scored)
                self._of(writer, "response.output_text.delta", segment, delta=change.text, logprobs=logprobs)
            case "reasoning":
                kind = "reasoning_summary_text" if self._builder.asked.summarises else "reasoning_text"
                self._of(writer, f"response.{kind}.delta", segment, delta=change.text)
            case "call" if self._builder.kind(segment) == FUNCTION:  # the others need the whole JSON
                self._of(writer, "response.function_call_arguments.delta", segment, delta=change.text)

    def _end(self, writer: EventWriter, segment: Segment, status: ItemStatus) -> None:
        content = segment.content
        match segment.kind:
            case "text":
                part = self._builder.part(segment)
                self._of(writer, "response.output_text.done", segment, text=content, logprobs=part.logprobs)
                self._of(writer, "response.content_part.done", segment, part=part)
            case "reasoning" if self._builder.asked.summarises:
                self._of(writer, "response.reasoning_summary_text.done", segment, text=content)
                self._of(writer, "response.reasoning_summary_part.done", segment, part=SummaryText(content))
            case "reasoning":
                self._of(writer, "response.reasoning_text.done", segment, text=content)
                self._of(writer, "response.content_part.done", segment, part=ReasoningText(content))
            case "call" if self._builder.kind(segment) == CUSTOM:
                given = custom_input(content)
                self._of(writer, "response.custom_tool_call_input.delta", segment, delta=given)
                self._of(writer, "response.custom_tool_call_input.done", segment, input=given)
            case "call" if self._builder.kind(segment) == FUNCTION:
                self._of(
                    writer,
                    "response.function_call_arguments.done",
                    segment,
                    arguments=content,
                    name=self._builder.call_name(segment),
                )
        item = self._builder.item(segment, status)
        _event(writer, "response.output_item.done", output_index=segment.index, item=item)

    def end(self, writer: EventWriter, answer: SegmentedAnswer) -> None:
        if not answer.segments and answer.error is None:  # an answer without text is an empty message
            self._open(writer, empty := _empty_message())
            self._end(writer, empty, "completed")
        elif answer.segments and not answer.segments[-1].closed:
            self._end(writer, answer.segments[-1], "incomplete")
        status = ended_status(answer)
        # No event says that a response was cancelled; clients know "response.failed" and read the status.
        _event(writer, _ENDS.get(status, "response.failed"), response=_result(self._builder, answer))

    def _state(self, status: Status) -> Response:
        return self._builder.response(status)

    def _of(self, writer: EventWriter, kind: str, segment: Segment, **fields: Any) -> None:
        """An event about the content of an item."""
        if segment.kind == "reasoning" and self._builder.asked.summarises:
            fields["summary_index"] = 0
        elif segment.kind != "call":
            fields["content_index"] = 0
        _event(writer, kind, output_index=segment.index, item_id=self._builder.item_id(segment), **fields)


def _event(writer: EventWriter, kind: str, **fields: Any) -> None:
    data = _json(ResponseEvent(kind, writer.number, **fields)) if writer.wanted else b""
    writer.write(kind.encode(), data)


def _result(builder: ResponseBuilder, answer: SegmentedAnswer) -> Response:
    status = ended_status(answer)
    segments = answer.segments
    items = builder.items(segments)
    if not segments and answer.error is None:
        items = [builder.item(_empty_message(), "completed")]
    usage = usage_of(answer.usage, answer.reasoning_tokens)
    return builder.response(status, items, usage, answer.error, answer.ended_ns())


def _empty_message() -> Segment:
    return Segment(0, "text")
