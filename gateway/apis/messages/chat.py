"""A message's body as the chat that answers it. Pure."""

from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

from penstock.gateway.apis.chat.bodies import ChatCompletionRequest, ChatMessage, ResponseFormat, SchemaFormat
from penstock.gateway.apis.messages.blocks import Conversation
from penstock.gateway.apis.messages.bodies import (
    CountTokensRequest,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    ThinkingConfig,
)
from penstock.gateway.base.errors import invalid, unsupported

NAMES = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "max_thinking_tokens": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}


class Chat(NamedTuple):
    """``places``: names of the chat's fields -> the client's, for errors."""

    body: ChatCompletionRequest
    places: dict[str, str]


def chat_of(body: MessagesRequest) -> Chat:
    """
    Raises:
        ServingError: something in the body is not supported; names the field.
    """
    _check_thinking(body.thinking, body.max_tokens)
    talk = _conversation(body)
    tools, tool_places = _tools(body.tools or (), talk.references)
    choice, answer_format, prefilled = body.tool_choice, _format(body), _is_prefilled(talk.messages)
    if answer_format is not None and prefilled:
        raise invalid("output_config.format", "output_config.format excludes a last message of the assistant's")
    chat = ChatCompletionRequest(
        model=body.model,
        messages=talk.messages,
        tools=tools or None,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        max_completion_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        stop=body.stop_sequences,
        ignore_eos=body.ignore_eos,
        reasoning_effort=_effort(body),
        max_thinking_tokens=body.thinking.budget_tokens if body.thinking is not None else None,
        response_format=answer_format,
        chat_template_kwargs=_variables(body),
        continue_final_message=prefilled or None,
        seed=body.seed,
        stream=body.stream,
        user=body.user or (body.metadata.user_id if body.metadata is not None else None),
        priority=body.priority,
        timeout_s=body.timeout_s,
        deadline_s=body.deadline_s,
        no_store=body.no_store,
        worker=body.worker,
        cache_salt=body.cache_salt,
    )
    return Chat(chat, {**NAMES, **talk.places, **tool_places})


def counted_chat(body: CountTokensRequest) -> Chat:
    """The chat whose prompt is counted.

    Raises:
        ServingError: something in the body is not supported; names the field.
    """
    talk = _conversation(body)
    tools, tool_places = _tools(body.tools or (), talk.references)
    chat = ChatCompletionRequest(
        model=body.model,
        messages=talk.messages,
        tools=tools or None,
        tool_choice="none" if body.tool_choice is not None and body.tool_choice.type == "none" else None,
        reasoning_effort=_effort(body),
        chat_template_kwargs=_variables(body),
        continue_final_message=_is_prefilled(talk.messages) or None,
    )
    return Chat(chat, {**NAMES, **talk.places, **tool_places})


def _is_prefilled(messages: Sequence[ChatMessage]) -> bool:
    """Whether the last message is the beginning of the answer, which then holds only what follows."""
    last = messages[-1]
    return last.role == "assistant" and not last.tool_calls and isinstance(last.content, str) and bool(last.content)


def _conversation(body: MessagesRequest | CountTokensRequest) -> Conversation:
    talk = Conversation()
    if body.system is not None:
        talk.instruct(body.system)
    for number, message in enumerate(body.messages):
        talk.add(message, f"messages[{number}]")
    if not talk.messages:
        raise invalid("messages", "messages have no content")
    return talk


def _tools(given: Iterable[MessageTool], references: Set[str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """
    Args:
        references: tools that the conversation names, which are no longer deferred.
    """
    tools: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    for number, tool in enumerate(given):
        at = f"tools[{number}]"
        if tool.defer_loading and tool.name not in references:
            continue
        if tool.type not in (None, "custom"):
            raise unsupported(f"{at}.type", f"{at}: tools of type {tool.type[:40]!r} are not supported; use 'custom'")
        if tool.input_schema is None:
            raise invalid(f"{at}.input_schema", f"{at}.input_schema is missing")
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        name = f"tools[{len(tools)}]"
        places[f"{name}.function.parameters"] = f"{at}.input_schema"
        places[f"{name}.function"] = at
        tools.append({"type": "function", "function": function})
    return tools, places


def _tool_choice(given: MessageToolChoice | None) -> str | dict[str, Any] | None:
    """As chat completions have it, whose own limits apply to it."""
    if given is None:
        return None
    if given.type == "tool":
        if given.name is None:
            raise invalid("tool_choice.name", "tool_choice.name is missing")
        return {"type": "function", "function": {"name": given.name}}
    return "required" if given.type == "any" else given.type


def _check_thinking(thinking: ThinkingConfig | None, max_tokens: int) -> None:
    if thinking is None or thinking.type != "enabled":
        return
    if thinking.budget_tokens is None:
        raise invalid("thinking.budget_tokens", "thinking.budget_tokens is missing")
    if thinking.budget_tokens >= max_tokens:
        raise invalid(
            "thinking.budget_tokens",
            f"thinking.budget_tokens is {thinking.budget_tokens}; it must be below max_tokens ({max_tokens})",
        )


def _effort(body: MessagesRequest | CountTokensRequest) -> str | None:
    config = body.output_config
    if config is None:
        return None
    return config.effort


def _format(body: MessagesRequest) -> ResponseFormat | None:
    """What the output must match, as chat completions have it, whose own limits apply to it."""
    given = body.output_config.format if body.output_config is not None else None
    if given is None:
        return None
    if given.type != "json_schema":
        at = "output_config.format.type"
        raise unsupported(at, f"{at} {given.type[:40]!r} is not supported; use 'json_schema'")
    return ResponseFormat(given.type, SchemaFormat(schema=given.schema))


def _variables(body: MessagesRequest | CountTokensRequest) -> dict[str, Any] | None:
    """Variables of the chat template. Templates of models that can think or not read ``enable_thinking``."""
    thinking = body.thinking
    if thinking is None or thinking.type == "adaptive":
        return body.chat_template_kwargs
    return {"enable_thinking": thinking.type == "enabled", **(body.chat_template_kwargs or {})}
