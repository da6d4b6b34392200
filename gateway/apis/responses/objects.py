"""Responses, output items and events of the Responses API."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: list[Any] = []


class ReasoningText(Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class SummaryText(Struct, frozen=True, tag_field="type", tag="summary_text"):
    text: str


class MessageItem(Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(Struct, frozen=True, tag_field="type", tag="reasoning"):
    """The reasoning as the model wrote it: as ``summary`` if one was asked for, and else as ``content``.

    ``encrypted_content``: the same, encoded but not encrypted, if it was to be included.
    """

    id: str
    status: ItemStatus
    content: list[ReasoningText] | UnsetType
    summary: list[SummaryText] = []
    encrypted_content: str | UnsetType = UNSET


class FunctionCallItem(Struct, frozen=True, tag_field="type", tag="function_call"):
    """``arguments``: JSON as the model wrote it. ``namespace``: of the tool, if it was offered in one."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomToolCallItem(Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    """``input``: the text that the model wrote for a custom tool."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


class ToolSearchCallItem(Struct, frozen=True, tag_field="type", tag="tool_search_call"):
    """The client searches, and returns the tools in a "tool_search_output"."""

    id: str
    status: ItemStatus
    call_id: str
    arguments: Any
    execution: Literal["client"] = "client"


class CompactionItem(Struct, frozen=True, tag_field="type", tag="compaction"):
    """``encrypted_content``: a summary, encoded but not encrypted."""

    id: str
    encrypted_content: str


OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem | ToolSearchCallItem


class InputTokensDetails(Struct, frozen=True):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct, frozen=True):
    """``code``: one of OpenAI's; ``penstock_code``: a penstock.schemas.errors.Code."""

    code: str
    message: str
    penstock_code: str


class IncompleteDetails(Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class Response(Struct, frozen=True, kw_only=True):
    """A response, and what it was asked with."""

    id: str
    created_at: int
    status: Status
    model: str
    output: list[Any]  # of OutputItem
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
    background: bool = False
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: Any = None
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float = 1.0
    text: Any = None
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"
    user: str | None = None
    object: Literal["response"] = "response"


class ResponseEvent(Struct, frozen=True, omit_defaults=True):
    """One server-sent event. Which fields it has depends on ``type``."""

    type: str
    sequence_number: int
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    item: Any = UNSET
    part: Any = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


class CompactedResponse(Struct, frozen=True):
    """POST /v1/responses/compact.

    Attributes:
        output: every message of the user, and a ``CompactionItem`` for the rest; the input of what follows.
    """

    id: str
    created_at: int
    output: list[Any]
    usage: ResponseUsage
    object: Literal["response.compaction"] = "response.compaction"


class DeletedResponse(Struct, frozen=True):
    id: str
    deleted: Literal[True] = True
    object: Literal["response"] = "response"


class InputItemList(Struct, frozen=True):
    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class InputTokens(Struct, frozen=True):
    """POST /v1/responses/input_tokens."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
