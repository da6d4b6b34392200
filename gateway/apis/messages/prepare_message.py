"""From the body of a message to a request. Pure but for random numbers."""

import re
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import msgspec

from penstock.gateway.apis.chat.bodies import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    FunctionCall,
    ResponseFormat,
    SchemaFormat,
    ThinkingSwitch,
    ToolCall,
    TranslatedChat,
    shared_options,
    thinking_variables,
)
from penstock.gateway.apis.chat.prepare_chat import (
    PendingMediaRequest,
    PreparedRequest,
    count_translated,
    prepare_chat,
    prepare_translated,
)
from penstock.gateway.apis.messages.bodies import (
    LEFT_OUT,
    SEARCHES_TOOLS,
    BlockSource,
    ContentBlock,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    ThinkingConfig,
    parse_count,
    parse_message,
)
from penstock.gateway.apis.messages.objects import TokenCount
from penstock.gateway.apis.messages.render import ClientBody
from penstock.gateway.base.request_bodies import PrepareContext, invalid, needed, unsupported

_json = msgspec.json.encode

# Claude Code's first line. It differs in each request, so no prompt would share a prefix with the one before.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*(?:\n|\Z)")


class MessagesConversation:
    """Chat messages made of messages with blocks. Results of tools become separate messages.

    Attributes:
        messages: so far.
        places: from a field of a chat message to the client's.
        references: names of tools in ``tool_reference`` blocks.
    """

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.places: dict[str, str] = {}
        self.references: set[str] = set()

    def instruct(self, system: str | Sequence[ContentBlock]) -> None:
        text = system if isinstance(system, str) else _texts(system, "system")
        if text := _BILLING.sub("", text):
            self._append(ChatMessage("system", text), "system")

    def add(self, message: InputMessage, at: str) -> None:
        """
        Raises:
            ServingError: a block that is not supported here, or lacks something.
        """
        if isinstance(message.content, str):
            self._append(ChatMessage(message.role, message.content), at)
        elif message.role == "assistant":
            self._assistant(message.content, f"{at}.content")
        elif message.role == "system":
            self._append(ChatMessage("system", _texts(message.content, f"{at}.content")), at)
        else:
            self._user(message.content, f"{at}.content")

    def _user(self, blocks: Sequence[ContentBlock], at: str) -> None:
        parts: list[ContentPart] = []
        places: list[str] = []
        for number, block in enumerate(blocks):
            here = f"{at}[{number}]"
            if block.type == "tool_result":
                self._spoken(parts, places)
                parts, places = [], []
                self._tool_result(block, here)
            else:
                parts.append(_part(block, here))
                places.append(here)
        self._spoken(parts, places)

    def _spoken(self, parts: list[ContentPart], places: list[str]) -> None:
        if not parts:
            return
        name = f"messages[{len(self.messages)}]"
        for number, place in enumerate(places):
            self.places[f"{name}.content[{number}]"] = place
            self.places[f"{name}.content[{number}].image_url"] = f"{place}.source"
        self._append(ChatMessage("user", parts), places[0])

    def _tool_result(self, block: ContentBlock, at: str) -> None:
        content: str | list[ContentPart]
        if isinstance(block.content, list):
            content = [self._result_part(part, f"{at}.content[{number}]") for number, part in enumerate(block.content)]
        else:
            content = _plain(block, at)
        call = needed(block.tool_use_id, f"{at}.tool_use_id")
        self._append(ChatMessage("tool", content, tool_call_id=call), at)

    def _result_part(self, block: ContentBlock, at: str) -> ContentPart:
        if block.type != "tool_reference":
            return _part(block, at)
        name = needed(block.tool_name, f"{at}.tool_name")
        self.references.add(name)
        return ContentPart("text", name)

    def _assistant(self, blocks: Sequence[ContentBlock], at: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for number, block in enumerate(blocks):
            here = f"{at}[{number}]"
            match block.type:
                case "text":
                    texts.append(needed(block.text, f"{here}.text"))
                case "thinking":
                    thoughts.append(needed(block.thinking, f"{here}.thinking"))
                case "redacted_thinking":
                    pass  # from another server: reasoning is never redacted here
                case "tool_use":
                    name, arguments = needed(block.name, f"{here}.name"), _json(block.input or {}).decode()
                    calls.append(ToolCall(FunctionCall(name, arguments), id=needed(block.id, f"{here}.id")))
                case "compaction":
                    texts.append(_plain(block, here))
                case "server_tool_use" | "mcp_tool_use":
                    pass  # from another server, which ran it; so is its result
                case other if not other.endswith("_tool_result"):
                    raise _unsupported(other, here, "'text', 'thinking' or 'tool_use'")
        self._append(
            ChatMessage(
                "assistant",
                "".join(texts) if texts or not (calls or thoughts) else None,
                tool_calls=calls or None,
                reasoning_content="".join(thoughts) if thoughts else None,
            ),
            at.removesuffix(".content"),
        )

    def _append(self, message: ChatMessage, place: str) -> None:
        self.places[f"messages[{len(self.messages)}]"] = place
        self.messages.append(message)


def _texts(blocks: Sequence[ContentBlock], at: str) -> str:
    for number, block in enumerate(blocks):
        if block.type != "text":
            raise _unsupported(block.type, f"{at}[{number}]", "'text'")
    return "\n".join(needed(block.text, f"{at}[{number}].text") for number, block in enumerate(blocks))


def _part(block: ContentBlock, at: str) -> ContentPart:
    if block.type == "text":
        return ContentPart("text", needed(block.text, f"{at}.text"))
    if block.type == "image":
        return ContentPart("image_url", image_url=_url(_source(block, at), f"{at}.source"))
    if block.type == "document":
        return ContentPart("text", _lines(block.title, _document(_source(block, at), f"{at}.source")))
    if block.type == "search_result":
        source = block.source if isinstance(block.source, str) else None
        return ContentPart("text", _lines(block.title, source, _plain(block, at)))
    raise _unsupported(block.type, at, "'text', 'image', 'document', 'search_result' or 'tool_result'")


def _lines(*texts: str | None) -> str:
    return "\n".join(filter(None, texts))


def _plain(block: ContentBlock, at: str) -> str:
    """The content of a block as text."""
    content = block.content or ""
    if isinstance(content, dict):
        raise invalid(f"{at}.content", f"{at}.content must be a text or a list of blocks")
    return content if isinstance(content, str) else _texts(content, f"{at}.content")


def _source(block: ContentBlock, at: str) -> BlockSource:
    if not isinstance(block.source, BlockSource):
        raise invalid(f"{at}.source", f"{at}.source is missing; it must be an object")
    return block.source


def _document(source: BlockSource, at: str) -> str:
    if source.type == "text":
        return needed(source.data, f"{at}.data")
    if source.type != "content":
        given = f"{at}.type {source.type[:40]!r} is not supported for documents"
        raise unsupported(f"{at}.type", f"{given}; send their text, with 'text' or 'content'")
    content = source.content or ""
    return content if isinstance(content, str) else _texts(content, f"{at}.content")


def _url(source: BlockSource, at: str) -> str:
    if source.type == "url":
        return needed(source.url, f"{at}.url")
    if source.type == "base64":
        kind = needed(source.media_type, f"{at}.media_type")
        if not kind.startswith("image/") or "," in kind or ";" in kind:
            raise invalid(f"{at}.media_type", f"{at}.media_type {kind[:40]!r} is not the media type of an image")
        return f"data:{kind};base64,{needed(source.data, f'{at}.data')}"
    raise unsupported(f"{at}.type", f"{at}.type {source.type[:40]!r} is not supported; use 'base64' or 'url'")


def _unsupported(kind: str, at: str, known: str) -> Exception:
    return unsupported(f"{at}.type", f"{at}: blocks of type {kind[:40]!r} are not supported here; use {known}")


NAMES = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "max_thinking_tokens": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}


def chat_of(body: MessagesRequest) -> TranslatedChat:
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
        **shared_options(body),
        messages=talk.messages,
        tools=tools or None,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        max_completion_tokens=body.max_tokens,
        stop=body.stop_sequences,
        reasoning_effort=_effort(body),
        max_thinking_tokens=body.thinking.budget_tokens if body.thinking is not None else None,
        response_format=answer_format,
        chat_template_kwargs=_variables(body),
        continue_final_message=prefilled or None,
        user=body.user or (body.metadata.user_id if body.metadata is not None else None),
        no_store=body.no_store,
    )
    return TranslatedChat(chat, {**NAMES, **talk.places, **tool_places})


def counted_chat(body: CountTokensRequest) -> TranslatedChat:
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
    return TranslatedChat(chat, {**NAMES, **talk.places, **tool_places})


def _is_prefilled(messages: Sequence[ChatMessage]) -> bool:
    """Whether the last message is the beginning of the answer, which then holds only what follows."""
    last = messages[-1]
    return last.role == "assistant" and not last.tool_calls and isinstance(last.content, str) and bool(last.content)


def _conversation(body: MessagesRequest | CountTokensRequest) -> MessagesConversation:
    talk = MessagesConversation()
    if body.system is not None:
        talk.instruct(body.system)
    for number, message in enumerate(body.messages):
        talk.add(message, f"messages[{number}]")
    if not talk.messages:
        raise invalid("messages", "messages have no content")
    return talk


def _tools(given: Sequence[MessageTool], references: Set[str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """
    Args:
        references: tools that the conversation names, which are no longer deferred.
    """
    tools: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    left_out = {tool.type for tool in given if tool.type is not None and tool.type.startswith(LEFT_OUT)}
    searched = any(kind.startswith(SEARCHES_TOOLS) for kind in left_out)
    if not any(tool.type in (None, "custom") for tool in given):
        left_out = set()
    for number, tool in enumerate(given):
        at = f"tools[{number}]"
        if tool.type in left_out or (tool.defer_loading and not searched and tool.name not in references):
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
    """Variables of the chat template."""
    thinks = thinking_variables(ThinkingSwitch(body.thinking.type)) if body.thinking is not None else None
    return body.chat_template_kwargs if thinks is None else {**thinks, **(body.chat_template_kwargs or {})}


class PreparedMessage(NamedTuple):
    """
    Attributes:
        context: what the request was prepared for, with the client's limit of the output.
        client_body: to be stored with the request.
    """

    prepared: PreparedRequest | PendingMediaRequest
    context: PrepareContext
    client_body: bytes


def prepare_message(data: bytes, context: PrepareContext, *, now_ns: int, request_id: str) -> PreparedMessage:
    """
    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    asked = parse_message(data)
    chat = chat_of(asked)
    # The output may be as long as the context has room for, so the limit is a default and not a demand.
    context = context._replace(default_max_tokens=asked.max_tokens)

    def prepare(body: ChatCompletionRequest) -> PreparedRequest | PendingMediaRequest:
        body = msgspec.structs.replace(body, max_completion_tokens=None)
        if context.parsers is None or not context.parsers.reasoning:  # without thinking, any budget is kept
            body = msgspec.structs.replace(body, max_thinking_tokens=None)
        return prepare_chat(body, context, now_ns=now_ns, request_id=request_id)

    prepared = prepare_translated(chat, prepare)
    return PreparedMessage(prepared, context, msgspec.json.encode(ClientBody(asked.max_tokens)))


def count_message(data: bytes, context: PrepareContext) -> TokenCount:
    """Tokens of a message's prompt.

    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    return TokenCount(count_translated(counted_chat(parse_count(data)), context))
