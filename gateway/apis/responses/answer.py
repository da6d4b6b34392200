"""A response object from its request and the segments of its answer. Pure."""

from collections.abc import Iterable
from typing import Any

from msgspec import UNSET

from penstock.gateway.apis.chat.answer_state import Scored
from penstock.gateway.apis.chat.logprobs import LogprobFormatter
from penstock.gateway.apis.chat.segments import Segment, SegmentedAnswer
from penstock.gateway.apis.responses.bodies import ResponsesRequest
from penstock.gateway.apis.responses.objects import (
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
    ResponseUsage,
    Status,
)
from penstock.gateway.apis.responses.record import PREFIX, item_id, read_stored
from penstock.gateway.apis.responses.tools import ToolNames
from penstock.gateway.base.chat_objects import UsageBody
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
        self.asked: ResponsesRequest = read_stored(request.client_body).body
        self._request = request
        self._names = ToolNames(self.asked.tools or ())
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
            model=request.model,
            output=list(output),
            usage=usage,
            error=_error(error) if error is not None and status == "failed" else None,
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            completed_at=ended_ns // 1_000_000_000 or None,
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
        return item_id(self._request.id, segment.kind, segment.index)

    def item(self, segment: Segment, status: ItemStatus, *, empty: bool = False) -> OutputItem:
        """A segment as an output item. ``empty``: as it is announced, before its content."""
        name = self.item_id(segment)
        if segment.kind == "call":
            namespace, called = self._names.own(segment.name)
            arguments = "" if empty else segment.content
            return FunctionCallItem(name, status, segment.call_id, called, arguments, namespace or UNSET)
        if segment.kind == "reasoning":
            return ReasoningItem(name, status, [] if empty else [ReasoningText(segment.content)])
        return MessageItem(name, status, [] if empty else [self.part(segment)])

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
