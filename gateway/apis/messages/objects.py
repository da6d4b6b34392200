"""Messages, content blocks, events and models of the Messages API."""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from penstock.gateway.apis.messages.bodies import THREAD
from penstock.schemas.errors import Code, ServingError

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(Struct, frozen=True, tag_field="type", tag="text"):
    text: str


# Nothing is verified when a client sends a block back; some send none that has no signature.
SIGNATURE = "unsigned"


class ThinkingBlock(Struct, frozen=True, tag_field="type", tag="thinking"):
    """``signature`` is empty where a stream announces the block, and else ``SIGNATURE``."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Any


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageOutputDetails(Struct, frozen=True):
    thinking_tokens: int


class AppliedEdit(Struct, frozen=True):
    """``cleared_input_tokens``: by which it shortened the prompt; at least so many, if that was beyond the context."""

    type: str
    cleared_input_tokens: int
    cleared_tool_uses: int | UnsetType = UNSET
    cleared_thinking_turns: int | UnsetType = UNSET


class AppliedEdits(Struct, frozen=True):
    applied_edits: Sequence[AppliedEdit]


class MessageUsage(Struct, frozen=True):
    """``input_tokens`` are those that did not come from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    output_tokens_details: MessageOutputDetails
    cache_creation_input_tokens: int = 0


class Message(Struct, frozen=True, kw_only=True):
    """Response of POST /v1/messages without streaming."""

    id: str
    model: str
    content: list[Any]  # of Block
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    context_management: AppliedEdits | UnsetType = UNSET


class MessageDelta(Struct, frozen=True):
    stop_reason: StopReason | None
    stop_sequence: str | None


class TextDelta(Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputDelta(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class SignatureDelta(Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class MessageEvent(Struct, frozen=True, omit_defaults=True):
    """One server-sent event. Which fields it has depends on ``type``."""

    type: str
    message: Message | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Any = UNSET
    delta: Any = UNSET
    usage: MessageUsage | UnsetType = UNSET
    context_management: AppliedEdits | UnsetType = UNSET


class OriginalTokens(Struct, frozen=True):
    """Without edits of the context; at least so many, if that was beyond the context."""

    original_input_tokens: int


class TokenCount(Struct, frozen=True):
    """Response of POST /v1/messages/count_tokens."""

    input_tokens: int
    context_management: OriginalTokens | UnsetType = UNSET


class MessagesModel(Struct, frozen=True):
    """One model of GET /v1/models, for clients of Anthropic's. Lengths in tokens; null: not known."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None = None
    max_tokens: int | None = None
    lifecycle: Literal["active"] = "active"
    type: Literal["model"] = "model"


class ModelPage(Struct, frozen=True):
    """``has_more``: in the direction that was asked for."""

    data: list[MessagesModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


# Of models and batches.
PAGE_LIMITS: dict[str, Any] = {"default": 20, "most": 1000, "after": "after_id", "before": "before_id"}


class ErrorDetails(Struct, frozen=True):
    """``error_code``: one that clients act on by themselves."""

    error_code: Literal["thread_unsupported_request"]


class MessageErrorDetail(Struct, frozen=True):
    """``code`` is a penstock.schemas.errors.Code, ``param`` the field with the error."""

    type: str
    message: str
    code: str
    param: str | None
    details: ErrorDetails | UnsetType = UNSET


class MessageErrorBody(Struct, frozen=True):
    error: MessageErrorDetail
    request_id: str | None
    type: Literal["error"] = "error"


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_status(code: Code) -> int:
    """Anthropic's status of an error: overload has a special one."""
    return 529 if code.status == 503 else code.status


def message_error(error: ServingError, request_id: str) -> MessageErrorBody:
    status = error.code.status
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    # Clients then send the whole conversation by themselves.
    details = ErrorDetails("thread_unsupported_request") if error.param == THREAD else UNSET
    detail = MessageErrorDetail(kind, error.message, error.code.value, error.param, details)
    return MessageErrorBody(detail, request_id or None)
