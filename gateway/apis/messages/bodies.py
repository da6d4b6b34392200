"""Request bodies of the Messages API: their fields and limits. Knows no model and no tokenizer.

As in ``penstock.gateway.apis.chat.bodies``, unknown fields are ignored, and a known field whose value cannot be
honoured is an error that names it.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.apis.chat.bodies import MAX_MESSAGES, Count, SamplingOptions, StopText
from penstock.gateway.base.request_bodies import Name, decode_body, invalid, unsupported

MAX_TOOLS = 512
CLEAR_THINKING, CLEAR_TOOL_USES = "clear_thinking_20251015", "clear_tool_uses_20250919"
THREAD = "thread"
SEARCHES_TOOLS = "tool_search_tool_"
# Tools that Anthropic's servers run, by the beginning of their type. Beside others they are left out.
LEFT_OUT = ("web_search_", "web_fetch_", "code_execution_", "advisor_", SEARCHES_TOOLS)


class BlockSource(Struct, frozen=True):
    """``type``: "base64" (``data`` and ``media_type``) or "url" for images, "text" or "content" for documents."""

    type: str
    data: str | None = None
    media_type: str | None = None
    url: str | None = None
    content: "str | list[ContentBlock] | None" = None


class ContentBlock(Struct, frozen=True):
    """``type``: "text", "image", "document", "search_result", "tool_use", "tool_result", "tool_reference",
    "thinking" or "redacted_thinking". ``source``: of a search result, a text.

    In system messages also "tool_addition" and "tool_removal": from there on, a ``tool`` is offered or not. A
    "mid_conv_system" block is a system message within a user's.
    """

    type: str
    text: str | None = None
    source: BlockSource | str | None = None
    title: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[ContentBlock] | dict[str, Any] | None" = None
    is_error: bool | None = None
    thinking: str | None = None
    tool_name: str | None = None
    tool: "ToolChange | None" = None


class InputMessage(Struct, frozen=True):
    """``clear_at``: of a system message, whether the model no longer sees its text once the user has said more."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]
    clear_at: Literal["next_user_message", "never"] | None = None


class ToolChange(Struct, frozen=True):
    """``type``: "tool_reference" with the ``name`` of a tool, or "tool_definition" with the ``definition`` of one."""

    type: str
    name: str | None = None
    definition: "MessageTool | None" = None


class MessageTool(Struct, frozen=True):
    """``type``: "custom" (if it is not given). Of Anthropic's own tools, those in ``LEFT_OUT`` may stand beside others.

    ``defer_loading``: the model does not see it before a ``tool_reference`` in the conversation names it, unless the
    tools would be searched by Anthropic's servers.
    """

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


def left_out(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tools that the model does not see, as in "tools[3]"."""
    return [
        f"tools[{at}]"
        for at, tool in enumerate(tools)
        if str(tool.get("type")).startswith(LEFT_OUT) and tool.get("input_schema") is None
    ]


class MessageToolChoice(Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class OutputFormat(Struct, frozen=True):
    """``type``: "json_schema"."""

    type: str
    schema: dict[str, Any] | bool | None = None


class OutputConfig(Struct, frozen=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class EditAmount(Struct, frozen=True):
    """``type``: "input_tokens" or "tool_uses"; of ``keep``, also "thinking_turns" or "all", which has no value."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns", "all"]
    value: Annotated[int, Meta(ge=0)] | None = None


class ContextEdit(Struct, frozen=True):
    """``type``: "clear_thinking_20251015", or "clear_tool_uses_20250919", to which all but ``keep`` belongs."""

    type: str
    keep: Literal["all"] | EditAmount | None = None
    trigger: EditAmount | None = None
    clear_at_least: EditAmount | None = None
    exclude_tools: Annotated[list[str], Meta(max_length=MAX_TOOLS)] | None = None
    clear_tool_inputs: bool | Annotated[list[str], Meta(max_length=MAX_TOOLS)] | None = None


class ContextManagement(Struct, frozen=True):
    edits: Annotated[list[ContextEdit], Meta(max_length=16)] = []


class MessageMetadata(Struct, frozen=True):
    user_id: Name | None = None


class CountTokensRequest(Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[ContentBlock] | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None


class MessagesRequest(SamplingOptions, frozen=True, kw_only=True):
    """POST /v1/messages."""

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[Count, Meta(description="most tokens of the answer, within the room in the context")]
    system: str | list[ContentBlock] | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=16)] | None = None
    metadata: MessageMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None  # type: ignore[assignment]
    container: Any = None
    mcp_servers: list[Any] | None = None
    context_management: ContextManagement | None = None
    thread: Annotated[Any, Meta(description="refused, so that clients send the whole conversation")] = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None


_decode = msgspec.json.Decoder(MessagesRequest).decode
_decode_count = msgspec.json.Decoder(CountTokensRequest).decode


def parse_message(data: bytes) -> MessagesRequest:
    """A body within every limit that does not depend on the model.

    Raises:
        ServingError: invalid_request or unsupported, with the field.
    """
    body: MessagesRequest = decode_body(_decode, data)
    for name in ("container", "mcp_servers"):
        if getattr(body, name):
            raise unsupported(name, f"{name} is not supported")
    if body.thread is not None:
        raise unsupported(THREAD, "thread is not supported; send the whole conversation")
    _check_edits(body.context_management)
    return body


_AMOUNTS: dict[str, dict[str, tuple[str, ...]]] = {
    CLEAR_THINKING: {"keep": ("thinking_turns", "all")},
    CLEAR_TOOL_USES: {
        "keep": ("tool_uses",), "trigger": ("input_tokens", "tool_uses"), "clear_at_least": ("input_tokens",)
    },
}  # fmt: skip


def _check_edits(given: ContextManagement | None) -> None:
    seen: set[str] = set()  # each may render the prompt once more
    for number, edit in enumerate(given.edits if given is not None else ()):
        at = f"context_management.edits[{number}]"
        if (amounts := _AMOUNTS.get(edit.type)) is None:
            raise unsupported(at, f"{at} {edit.type[:40]!r} is not supported; use {' or '.join(map(repr, _AMOUNTS))}")
        if edit.type in seen:
            raise invalid(at, f"{at}: {edit.type!r} is there twice")
        seen.add(edit.type)
        for name in ("keep", "trigger", "clear_at_least"):
            amount, kinds = getattr(edit, name), amounts.get(name, ())
            kind = amount if isinstance(amount, str) else amount and amount.type
            if amount is None:
                continue
            if kind not in kinds:
                use = f"use {' or '.join(map(repr, kinds))}" if kinds else f"{edit.type!r} has none"
                raise invalid(f"{at}.{name}", f"{at}.{name} is {kind!r}; {use}")
            if kind != "all" and not isinstance(amount, str) and amount.value is None:
                raise invalid(f"{at}.{name}.value", f"{at}.{name}.value is missing")


def parse_count(data: bytes) -> CountTokensRequest:
    """
    Raises:
        ServingError: invalid_request, with the field.
    """
    body: CountTokensRequest = decode_body(_decode_count, data)
    _check_edits(body.context_management)
    return body
