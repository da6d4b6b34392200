"""A response's body as the chat that answers it. Pure."""

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from penstock.gateway.apis.chat.bodies import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    FunctionCall,
    ResponseFormat,
    SchemaFormat,
    ToolCall,
    TranslatedChat,
    plain_choice,
    shared_options,
)
from penstock.gateway.apis.responses.bodies import (
    CUSTOM,
    FUNCTION,
    NAMESPACE,
    TOOL_SEARCH,
    InputItem,
    InputPart,
    ResponsesRequest,
    ToolNames,
    chat_tools,
    check_count,
    custom_arguments,
)
from penstock.gateway.base.request_bodies import invalid, needed, rename, unsupported
from penstock.schemas.errors import ServingError

# Items of tools that another server ran. Nothing is known of them here, and what came of them is in what was said.
_RAN_ELSEWHERE = frozenset(
    {
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
    }
)
BRINGS_TOOLS = ("additional_tools", "tool_search_output")
ROLES = ("system", "developer", "user", "assistant")
SUMMARY = "Summary of the conversation so far:\n\n"  # in front of what a compaction item holds
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class Summary(msgspec.Struct, frozen=True):
    """What a compaction or reasoning item holds. ``check``: CRC-32 of the text in UTF-8."""

    text: str
    check: int
    version: int = 1


_read_summary = msgspec.json.Decoder(Summary).decode


def encode_summary(text: str) -> str:
    """A summary, or reasoning, as ``encrypted_content``: encoded for transport, not encrypted."""
    data = msgspec.json.encode(Summary(text, crc32(text.encode())))
    return base64.urlsafe_b64encode(data).decode()


def decode_summary(content: str, at: str) -> str:
    """
    Args:
        at: the name of the field, for errors.
    Raises:
        ServingError: invalid_request: damaged, or not made by ``encode_summary``.
    """
    try:
        found = _read_summary(base64.b64decode(content, b"-_", validate=True))
        intact = found.version == 1 and found.check == crc32(found.text.encode())
    except (ValueError, RecursionError, msgspec.DecodeError):
        intact = False
    if not intact:
        raise invalid(at, f"{at} is damaged or from another server; send it as POST /v1/responses/compact returned it")
    return found.text


class ResponsesConversation:
    """Chat messages made of items.

    Consecutive items of a turn of the assistant (reasoning, text, calls) become one message, as chat templates expect.

    Attributes:
        messages: so far.
        places: from a field of a message to the client's, as in "messages[2].content" -> "input[1].output".
    """

    def __init__(self, names: ToolNames) -> None:
        self._names = names
        self.messages: list[ChatMessage] = []
        self.places: dict[str, str] = {}
        self._open = False  # the last message is the assistant's, and may grow
        self._calls: set[str] = set()  # ids

    def instruct(self, text: str) -> None:
        self._append(ChatMessage("system", text), "instructions", "instructions")

    def say(self, text: str, place: str) -> None:
        """What the user wrote, as one text."""
        self._append(ChatMessage("user", text), place, place)

    def add(self, items: Sequence[InputItem], place: str) -> None:
        """
        Args:
            place: the name of the list, for errors.
        Raises:
            ServingError: an item that is not supported, or lacks something.
        """
        for number, item in enumerate(items):
            self._item(item, f"{place}[{number}]")

    def _item(self, item: InputItem, at: str) -> None:
        match item.type or "message":
            case "message":
                self._message(item, at)
            case "agent_message":
                content = item.content
                if isinstance(content, list):  # what is encrypted, only another server can read
                    content = [part for part in content if part.type != "encrypted_content"]
                if content:
                    self._append(ChatMessage("user", _content(content, f"{at}.content")), at)
            case "function_call" | "custom_tool_call" as kind:
                name = self._names.shown(item.namespace, needed(item.name, f"{at}.name"))
                arguments = item.arguments if kind == "function_call" else custom_arguments(item.input or "")
                call = ToolCall(FunctionCall(name, arguments), id=needed(item.call_id, f"{at}.call_id"))
                self._calls.add(call.id or "")
                self._grow(at, ChatMessage("assistant", None, tool_calls=[call]))
            case "function_call_output" | "custom_tool_call_output":
                result = _content(item.output, f"{at}.output")
                call_id = needed(item.call_id, f"{at}.call_id")
                if call_id not in self._calls:
                    known = "send its function_call too, or continue its response with previous_response_id"
                    raise invalid(f"{at}.call_id", f"{at}.call_id {call_id[:80]!r} is of no call before it: {known}")
                self._append(ChatMessage("tool", result, tool_call_id=call_id), at, f"{at}.output")
            case "reasoning":
                parts = item.content if isinstance(item.content, list) else []
                text = "".join(part.text or "" for part in parts or item.summary or ())
                if text or (text := _encoded_reasoning(item.encrypted_content or "")):
                    self._grow(at, ChatMessage("assistant", None, reasoning_content=text))
            case "compaction":
                place = f"{at}.encrypted_content"
                # As the user's: every template has that role, and a forged summary gets no authority by it.
                summary = decode_summary(needed(item.encrypted_content, place), place)
                self._append(ChatMessage("user", SUMMARY + summary), at, place)
            case "tool_search_call" if item.call_id is not None and item.execution != "server":
                call = ToolCall(FunctionCall(self._names.shown("", TOOL_SEARCH), item.arguments), id=item.call_id)
                self._calls.add(item.call_id)
                self._grow(at, ChatMessage("assistant", None, tool_calls=[call]))
            case "tool_search_output" if item.call_id in self._calls:
                found = "\n".join(self._names_in(item.tools or ())) or "no tool was found"
                self._append(ChatMessage("tool", found, tool_call_id=item.call_id), at)
            case "item_reference":
                raise unsupported(f"{at}.type", f"{at}: item references are not supported here; send the item itself")
            case other if other not in _RAN_ELSEWHERE and other not in (*BRINGS_TOOLS, "tool_search_call"):
                raise unsupported(
                    f"{at}.type",
                    f"{at}: items of type {other[:40]!r} are not supported; use 'message', 'function_call', "
                    "'function_call_output', 'reasoning' or 'compaction'",
                )

    def _names_in(self, tools: Iterable[dict[str, Any]], namespace: str = "") -> Iterator[str]:
        """The names that the model knows."""
        for tool in tools:
            if tool.get("type") == NAMESPACE and isinstance(inner := tool.get("tools"), list):
                yield from self._names_in([each for each in inner if isinstance(each, dict)], str(tool.get("name")))
            else:
                yield self._names.shown(namespace, str(tool.get("name")))

    def _message(self, item: InputItem, at: str) -> None:
        role = needed(item.role, f"{at}.role")
        if role not in ROLES:
            raise invalid(f"{at}.role", f"{at}.role {role[:40]!r} is not known; use {', '.join(ROLES)}")
        content = _content(item.content, f"{at}.content")
        message = ChatMessage(role, content)
        if role == "assistant":
            self._grow(at, message)
        else:
            self._append(message, at)

    def _append(self, message: ChatMessage, place: str, content: str = "") -> None:
        name = f"messages[{len(self.messages)}]"
        self.places[name] = place
        if content:
            self.places[f"{name}.content"] = content
        self.messages.append(message)
        self._open = message.role == "assistant"

    def _grow(self, at: str, part: ChatMessage) -> None:
        """Add to the assistant's turn, unless this part begins another one."""
        last = self.messages[-1] if self._open else None
        calls = part.tool_calls or []
        if last is None or not _continues(last, part):
            self._append(part, at)
        else:
            self.messages[-1] = msgspec.structs.replace(
                last,
                content=part.content if part.content is not None else last.content,
                tool_calls=[*(last.tool_calls or ()), *calls] or None,
            )
        name = f"messages[{len(self.messages) - 1}]"
        if calls:
            count = len(self.messages[-1].tool_calls or ())
            self.places[f"{name}.tool_calls[{count - 1}].function.arguments"] = f"{at}.arguments"
            self.places[f"{name}.tool_calls[{count - 1}]"] = at
        elif part.content is not None:
            self.places[f"{name}.content"] = f"{at}.content"


def _encoded_reasoning(content: str) -> str:
    """Empty for that of another server, which cannot be read."""
    try:
        return decode_summary(content, "")
    except ServingError:
        return ""


def _continues(last: ChatMessage, part: ChatMessage) -> bool:
    if part.reasoning_content is not None:
        return False
    return bool(part.tool_calls) or (last.content is None)


def _content(content: str | list[InputPart] | None, at: str) -> str | list[ContentPart]:
    if content is None:
        raise invalid(at, f"{at} is missing")
    if isinstance(content, str):
        return content
    return [_part(part, f"{at}[{number}]") for number, part in enumerate(content)]


def _part(part: InputPart, at: str) -> ContentPart:
    if part.type in _TEXTS:
        return ContentPart("text", needed(part.text, f"{at}.text"))
    if part.type == "refusal":
        return ContentPart("text", needed(part.refusal, f"{at}.refusal"))
    if part.type == "input_image":
        if part.file_id is not None:
            raise unsupported(f"{at}.file_id", f"{at}.file_id is not supported; send the image in image_url")
        return ContentPart("image_url", image_url=needed(part.image_url, f"{at}.image_url"))
    why = ": no model here takes audio" if "audio" in part.type[:40] else ""
    raise unsupported(
        f"{at}.type",
        f"{at}: content of type {part.type[:40]!r} is not supported{why}; use 'input_text', 'output_text' or "
        "'input_image'",
    )


NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class Turn(NamedTuple):
    """An earlier response: what went in, without its instructions, and what came out."""

    id: str
    input: str | Sequence[InputItem]
    output: Sequence[InputItem]


class BroughtTools(NamedTuple):
    """Tools that items of the input bring.

    Attributes:
        places: of each, as in "tools[2]" -> "input[0].tools[1]". They stand after the tools of the body.
    """

    tools: list[dict[str, Any]]
    places: dict[str, str]

    def located(self, error: ServingError) -> ServingError:
        """The error of a tool with its place in the client's body."""
        message = re.sub(r"(?<![\w.])tools\[\d+\]", lambda found: self.places.get(found[0], found[0]), error.message)
        return ServingError(error.code, message, param=rename(error.param or "", self.places))


def brought_tools(body: ResponsesRequest, history: Iterable[Turn] = ()) -> BroughtTools:
    """Those of the conversation, each once."""
    seen = {msgspec.json.encode(tool) for tool in body.tools or ()}
    first = len(body.tools or ())
    brought: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    inputs = [(turn.input, f"the input of {turn.id}") for turn in history] + [(body.input or (), "input")]
    for items, place in inputs:
        for number, item in enumerate(() if isinstance(items, str) else items):
            for at, tool in enumerate((item.tools or ()) if item.type in BRINGS_TOOLS else ()):
                if (written := msgspec.json.encode(tool)) not in seen:
                    seen.add(written)
                    places[f"tools[{first + len(brought)}]"] = f"{place}[{number}].tools[{at}]"
                    brought.append(tool)
    return BroughtTools(brought, places)


def chat_of(body: ResponsesRequest, history: Sequence[Turn] = ()) -> TranslatedChat:
    """
    Args:
        history: the responses that this one continues, the oldest first.
    Raises:
        ServingError: something in the body is not supported; names the field.
    """
    brought = brought_tools(body, history)
    offered = [*(body.tools or ()), *brought.tools]
    check_count(offered)
    names = ToolNames(offered)
    talk = ResponsesConversation(names)
    if body.instructions is not None:
        talk.instruct(body.instructions)
    for turn in history:
        _add(talk, turn.input, f"the input of {turn.id}")
        talk.add(turn.output, f"the output of {turn.id}")
    _add(talk, body.input or (), "input")
    if not talk.messages:
        raise invalid("input", "input is empty; it must have at least 1 item")
    try:
        tools, tool_places = chat_tools(offered, names)
    except ServingError as error:
        raise brought.located(error) from None
    tool_places = {name: rename(place, brought.places) for name, place in tool_places.items()}
    places = {**NAMES, **talk.places, **tool_places}
    if body.store is False and not body.no_store:
        places["no_store"] = "store"
    logprobs = "message.output_text.logprobs" in (body.include or ()) or bool(body.top_logprobs)
    chat = ChatCompletionRequest(
        **shared_options(body),
        messages=talk.messages,
        tools=tools or None,
        tool_choice=_tool_choice(body.tool_choice, names),
        parallel_tool_calls=body.parallel_tool_calls,
        max_completion_tokens=body.max_output_tokens,
        min_tokens=body.min_tokens,
        stop=body.stop,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        response_format=_format(body),
        verbosity=body.text.verbosity if body.text is not None else None,
        chat_template_kwargs=body.chat_template_kwargs,
        user=body.user or body.safety_identifier,
        service_tier=body.service_tier,
        no_store=not body.kept,
        prompt_cache_key=body.prompt_cache_key,
    )
    return TranslatedChat(chat, places)


def _add(talk: ResponsesConversation, given: str | Sequence[InputItem], place: str) -> None:
    if isinstance(given, str):
        talk.say(given, place)
    else:
        talk.add(given, place)


def _tool_choice(given: str | dict[str, Any] | None, names: ToolNames) -> str | dict[str, Any] | None:
    """As chat completions have it, whose own limits apply to it."""
    if isinstance(given, dict) and given.get("type") in (FUNCTION, CUSTOM):
        inner = given.get("function", given)  # some clients nest it as chat completions do
        name, namespace = (inner.get("name"), inner.get("namespace")) if isinstance(inner, dict) else (None, None)
        if isinstance(name, str) and isinstance(namespace, str):
            name = names.shown(namespace, name)
        return {"type": "function", "function": {"name": name}}
    if isinstance(given, dict) and given.get("type") == "allowed_tools":
        return {"type": "allowed_tools", "allowed_tools": {key: given.get(key) for key in ("mode", "tools")}}
    return plain_choice(given)


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    """What the output must match, as chat completions have it, whose own limits apply to it."""
    given = body.text.format if body.text is not None else None
    if given is None:
        return None
    if given.type != "json_schema":
        return ResponseFormat(given.type)
    if given.schema is None:
        raise invalid("text.format.schema", "text.format.schema is missing; it must be a JSON schema (an object)")
    return ResponseFormat(given.type, SchemaFormat(given.name, given.schema, given.strict, given.description))
