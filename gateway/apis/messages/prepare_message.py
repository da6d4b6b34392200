"""From the body of a message to a request. Pure but for random numbers."""

import re
from collections.abc import Sequence, Set
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET

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
    CLEAR_THINKING,
    CLEAR_TOOL_USES,
    LEFT_OUT,
    MAX_TOOLS,
    SEARCHES_TOOLS,
    BlockSource,
    ContentBlock,
    ContextEdit,
    CountTokensRequest,
    EditAmount,
    InputMessage,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    ThinkingConfig,
    parse_count,
    parse_message,
)
from penstock.gateway.apis.messages.objects import AppliedEdit, OriginalTokens, TokenCount
from penstock.gateway.apis.messages.render import ClientBody
from penstock.gateway.base.request_bodies import PrepareContext, invalid, needed, unsupported
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import CONSTRAINT_LARK

_json = msgspec.json.encode

# Claude Code's first line. It differs in each request, so no prompt would share a prefix with the one before.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*(?:\n|\Z)")


class MessagesConversation:
    """Chat messages made of messages with blocks. Results of tools become separate messages.

    Attributes:
        messages: so far.
        places: from a field of a chat message to the client's.
        references: names of tools that results or system messages bring in.
        defined: by name, tools that system messages define, with their places.
        withdrawn: names of tools that are no longer offered.
        changes: by place, names that have to be of known tools.
    """

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.places: dict[str, str] = {}
        self.references: set[str] = set()
        self.defined: dict[str, tuple[str, MessageTool]] = {}
        self.withdrawn: set[str] = set()
        self.changes: dict[str, str] = {}

    def instruct(self, system: str | Sequence[ContentBlock]) -> None:
        text = system if isinstance(system, str) else _texts(system, "system")
        if text := _BILLING.sub("", text):
            self._append(ChatMessage("system", text), "system")

    def add(self, message: InputMessage, at: str, *, cleared: bool = False) -> None:
        """
        Args:
            cleared: the text is left out.
        Raises:
            ServingError: a block that is not supported here, or lacks something.
        """
        if isinstance(message.content, str):
            if not cleared:
                self._append(ChatMessage(message.role, message.content), at)
        elif message.role == "assistant":
            self._assistant(message.content, f"{at}.content")
        elif message.role == "system":
            self._system(message.content, f"{at}.content", at, cleared=cleared)
        else:
            self._user(message.content, f"{at}.content")

    def _system(self, blocks: Sequence[ContentBlock], at: str, place: str, *, cleared: bool = False) -> None:
        texts = []
        for number, block in enumerate(blocks):
            here = f"{at}[{number}]"
            if block.type in ("tool_addition", "tool_removal"):
                self._change_tool(block, here)
            elif block.type != "text":
                raise _unsupported(block.type, here, "'text', 'tool_addition' or 'tool_removal'")
            else:
                texts.append(needed(block.text, f"{here}.text"))
        if not cleared and (texts or not blocks):
            self._append(ChatMessage("system", "\n".join(texts)), place)

    def _change_tool(self, block: ContentBlock, at: str) -> None:
        added, tool = block.type == "tool_addition", block.tool
        if tool is not None and tool.type == "tool_reference":
            name = self.changes[f"{at}.tool.name"] = needed(tool.name, f"{at}.tool.name")
        elif tool is not None and tool.definition is not None and added:
            name = tool.definition.name
            self.defined[name] = f"{at}.tool.definition", tool.definition
        else:
            known = "a 'tool_reference'" + (" or a 'tool_definition' with a definition" if added else "")
            raise unsupported(f"{at}.tool", f"{at}.tool of a {block.type} must be {known}")
        if added:
            self.references.add(name)
            self.withdrawn.discard(name)
        else:
            self.withdrawn.add(name)

    def offered(self, declared: Sequence[MessageTool]) -> list[tuple[str, MessageTool]]:
        """The tools at the end of the conversation, with their places.

        Args:
            declared: those of the body.
        Raises:
            ServingError: the conversation names a tool that there is not, or offers too many.
        """
        tools = [(f"tools[{number}]", tool) for number, tool in enumerate(declared)]
        known = {tool.name for tool in declared} | self.defined.keys()
        for place, name in self.changes.items():
            if name not in known:
                raise invalid(place, f"{place} {name[:80]!r} is not among the tools")
        tools = [each for each in tools if each[1].name not in self.defined] + list(self.defined.values())
        tools = [each for each in tools if each[1].name not in self.withdrawn]
        if len(tools) > MAX_TOOLS:
            raise invalid("tools", f"messages and tools offer {len(tools)} tools; at most {MAX_TOOLS} are allowed")
        return tools

    def _user(self, blocks: Sequence[ContentBlock], at: str) -> None:
        parts: list[ContentPart] = []
        places: list[str] = []
        for number, block in enumerate(blocks):
            here = f"{at}[{number}]"
            if block.type in ("tool_result", "mid_conv_system"):
                self._spoken(parts, places)
                parts, places = [], []
                if block.type == "tool_result":
                    self._tool_result(block, here)
                elif isinstance(block.content, str | list):
                    self.add(InputMessage("system", block.content), here)
                else:
                    raise invalid(f"{here}.content", f"{here}.content must be a text or a list of blocks")
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
        if block.is_error:
            content = _as_error(content)
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


def _as_error(content: str | list[ContentPart]) -> str | list[ContentPart]:
    """With "Error: " before it, since chat messages cannot say otherwise that a call failed."""
    if not isinstance(content, str):
        first = content[0].text if content else None
        return content if _says_error(first or "") else [ContentPart("text", "Error: "), *content]
    return content if _says_error(content) else f"Error: {content}"


def _says_error(text: str) -> bool:
    return text.lstrip(" \n<")[:40].casefold().startswith(("error", "tool_use_error"))


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
        given = f"{at}.type {source.type[:40]!r} is not supported for documents"  # Claude Code reads the first words
        raise unsupported(f"{at}.type", f"could not process PDF: {given}; send their text, with 'text' or 'content'")
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
    tools, tool_places = _tools(talk.offered(body.tools or ()), talk.references)
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
    tools, tool_places = _tools(talk.offered(body.tools or ()), talk.references)
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
    asked = max((number for number, each in enumerate(body.messages) if each.role == "user"), default=0)
    for number, message in enumerate(body.messages):
        cleared = message.clear_at == "next_user_message" and number < asked
        talk.add(message, f"messages[{number}]", cleared=cleared)
    if not talk.messages:
        raise invalid("messages", "messages have no content")
    return talk


def _tools(
    given: Sequence[tuple[str, MessageTool]], references: Set[str]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """
    Args:
        given: tools, each with its place.
        references: tools that the conversation names, which are no longer deferred.
    """
    tools: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    theirs = {tool.type for _, tool in given if tool.type is not None and tool.input_schema is None}
    left_out = {kind for kind in theirs if kind.startswith(LEFT_OUT)}
    searched = any(kind.startswith(SEARCHES_TOOLS) for kind in left_out)
    if not any(tool.type in (None, "custom") or tool.input_schema is not None for _, tool in given):
        left_out = set()
    for at, tool in given:
        own = tool.input_schema is not None
        if (tool.type in left_out and not own) or (tool.defer_loading and not searched and tool.name not in references):
            continue
        if tool.type not in (None, "custom") and not own:
            known = "use 'custom', or send its input_schema"
            raise unsupported(f"{at}.type", f"{at}: tools of type {tool.type[:40]!r} are not supported; {known}")
        if not own:
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
    asked, edits, _ = _edited(parse_message(data), context)
    chat = chat_of(asked)
    # The output may be as long as the context has room for, so the limit is a default and not a demand.
    context = context._replace(default_max_tokens=asked.max_tokens)

    def prepare(body: ChatCompletionRequest) -> PreparedRequest | PendingMediaRequest:
        body = msgspec.structs.replace(body, max_completion_tokens=None)
        if not limits_thoughts(context):
            body = msgspec.structs.replace(body, max_thinking_tokens=None)
        return prepare_chat(body, context, now_ns=now_ns, request_id=request_id)

    prepared = prepare_translated(chat, prepare)
    return PreparedMessage(prepared, context, msgspec.json.encode(ClientBody(asked.max_tokens, edits)))


def limits_thoughts(context: PrepareContext) -> bool:
    """Whether a budget can be enforced. Agents send one with every request; to Anthropic's API, it is a target."""
    able = context.logits_processors
    parsed = context.parsers is not None and bool(context.parsers.reasoning)
    return parsed and not context.carries_chat and (able is None or CONSTRAINT_LARK in able)


def count_message(data: bytes, context: PrepareContext) -> TokenCount:
    """Tokens of a message's prompt.

    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    asked, edits, before = _edited(parse_count(data), context)
    tokens = count_translated(counted_chat(asked), context)
    return TokenCount(tokens, UNSET if edits is None else OriginalTokens(tokens if before is None else before))


CLEARED = "[The result of this call was removed to shorten the conversation.]"
_USUAL_TRIGGER = EditAmount("input_tokens", 100_000)  # as Anthropic's API has it, and the two below
_USUAL_TOOL_USES, _USUAL_TURNS = 3, 1
Body = TypeVar("Body", MessagesRequest, CountTokensRequest)


def _edited(body: Body, context: PrepareContext) -> tuple[Body, tuple[AppliedEdit, ...] | None, int | None]:
    """The body after the edits that it asks for, those that changed something, and the tokens of its prompt before.

    Each edit may render the prompt once more, and there are two at most. The tokens are None if nothing had to count.
    """
    if body.context_management is None:
        return body, None, None

    def count(body: Body) -> int:
        chat = counted_chat(body) if isinstance(body, CountTokensRequest) else chat_of(body)
        try:
            return count_translated(chat, context)
        except ServingError as error:
            if error.code is not Code.context_length_exceeded:
                raise
            return context.max_model_len

    applied: list[AppliedEdit] = []
    first = tokens = None
    for edit in body.context_management.edits:
        trigger = edit.trigger or _USUAL_TRIGGER
        if edit.type == CLEAR_THINKING:
            messages, number = _without_thoughts(body.messages, edit)
        else:
            messages, number = _without_results(body.messages, edit)
        if not number:
            continue
        if tokens is None:
            first = tokens = count(body)
        if edit.type == CLEAR_TOOL_USES:
            size = tokens if trigger.type == "input_tokens" else len(_calls(body.messages))
            if size <= (trigger.value or 0):
                continue
        shorter = msgspec.structs.replace(body, messages=messages)
        cleared = max(0, tokens - (left := count(shorter)))
        least = edit.clear_at_least.value or 0 if edit.clear_at_least is not None else 0
        if cleared < least and tokens < context.max_model_len:  # a longer prompt was not counted, and is refused anyway
            continue
        body, tokens = shorter, left
        name = "cleared_thinking_turns" if edit.type == CLEAR_THINKING else "cleared_tool_uses"
        applied.append(AppliedEdit(edit.type, cleared, **{name: number}))
    return body, tuple(applied), first


def _kept(edit: ContextEdit, usual: int) -> int | None:
    """None: all."""
    if edit.keep is None:
        return usual
    return None if isinstance(edit.keep, str) else edit.keep.value


def _blocks(message: InputMessage) -> list[ContentBlock]:
    return message.content if isinstance(message.content, list) else []


def _without_thoughts(messages: list[InputMessage], edit: ContextEdit) -> tuple[list[InputMessage], int]:
    """Without the thoughts of earlier turns, and the number of these. Results of tools do not begin a turn."""
    if (kept := _kept(edit, _USUAL_TURNS)) is None:
        return messages, 0
    turns: list[list[int]] = [[]]  # the places of messages with thoughts
    for at, message in enumerate(messages):
        blocks = _blocks(message)
        if message.role == "user" and not any(block.type == "tool_result" for block in blocks):
            turns.append([])
        elif message.role == "assistant" and any(block.type in _THOUGHTS for block in blocks):
            turns[-1].append(at)
    turns = [turn for turn in turns if turn]
    turns = turns[: max(0, len(turns) - kept)]
    out = list(messages)
    for at in (at for turn in turns for at in turn):
        left: list[ContentBlock] = [block for block in _blocks(out[at]) if block.type not in _THOUGHTS]
        out[at] = msgspec.structs.replace(out[at], content=left)
    return out, len(turns)


_THOUGHTS = ("thinking", "redacted_thinking")


def _calls(messages: Sequence[InputMessage]) -> list[ContentBlock]:
    return [b for m in messages if m.role == "assistant" for b in _blocks(m) if b.type == "tool_use" and b.id]


def _without_results(messages: list[InputMessage], edit: ContextEdit) -> tuple[list[InputMessage], int]:
    """With a line in place of the results of earlier calls, and the number of these.

    A result is of the last call before it with its id: some models number the calls of each turn from 0.
    """
    kept, excluded = _kept(edit, _USUAL_TOOL_USES) or 0, set(edit.exclude_tools or ())
    left = sum(call.name not in excluded for call in _calls(messages)) - kept  # calls that are still to be cleared
    every = edit.clear_tool_inputs is True
    inputs = set(edit.clear_tool_inputs) if isinstance(edit.clear_tool_inputs, list) else ()
    earlier: set[str | None] = set()
    number = 0

    def block_of(block: ContentBlock) -> ContentBlock:
        nonlocal left, number
        if block.type == "tool_result" and block.tool_use_id in earlier:
            number += 1
            return msgspec.structs.replace(block, content=CLEARED, is_error=None)
        if block.type == "tool_use":
            earlier.discard(block.id)
            if block.id and block.name not in excluded and left > 0:
                left -= 1
                earlier.add(block.id)
                if every or block.name in inputs:
                    return msgspec.structs.replace(block, input={})
        return block

    out = [
        msgspec.structs.replace(message, content=[block_of(block) for block in message.content])
        if isinstance(message.content, list)
        else message
        for message in messages
    ]
    return out, number
