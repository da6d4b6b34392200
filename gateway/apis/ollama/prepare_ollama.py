"""From a body of Ollama's API to a request, by the chat that answers it. Pure but for random numbers."""

from collections.abc import Sequence
from typing import NamedTuple

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
    thinking_variables,
)
from penstock.gateway.apis.chat.prepare_chat import (
    PendingMediaRequest,
    PreparedRequest,
    prepare_chat,
    prepare_translated,
)
from penstock.gateway.apis.ollama.bodies import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
    parse_ollama_chat,
    parse_ollama_generate,
    untagged,
)
from penstock.gateway.base.request_bodies import OLLAMA_CHAT, PrepareContext, invalid, unsupported

JSON_FORMAT = "json"
EFFORTS = ("low", "medium", "high")
# What the base64 of each kind of image begins with.
_KINDS = (("iVBORw", "png"), ("/9j/", "jpeg"), ("R0lGOD", "gif"), ("UklGR", "webp"))

NAMES = {
    "temperature": "options.temperature",
    "top_p": "options.top_p",
    "top_k": "options.top_k",
    "min_p": "options.min_p",
    "seed": "options.seed",
    "stop": "options.stop",
    "repetition_penalty": "options.repeat_penalty",
    "presence_penalty": "options.presence_penalty",
    "frequency_penalty": "options.frequency_penalty",
    "max_completion_tokens": "options.num_predict",
    "max_tokens": "options.num_predict",
    "reasoning_effort": "think",
    "response_format.json_schema": "format",
    "response_format": "format",
}
_NO_OPTIONS = OllamaOptions()
_json = msgspec.json.encode


class PreparedOllama(NamedTuple):
    """``context``: what the request was prepared for, with the client's limit of the output."""

    prepared: PreparedRequest | PendingMediaRequest
    context: PrepareContext


def prepare_ollama(
    endpoint: str, data: bytes, context: PrepareContext, *, now_ns: int, request_id: str
) -> PreparedOllama:
    """
    Args:
        endpoint: as in ``GenerateRequest``.
    Raises:
        ServingError: the body cannot be served; names the field and the limit.
    """
    asked: OllamaChatRequest | OllamaGenerateRequest
    if endpoint == OLLAMA_CHAT:
        asked = parse_ollama_chat(data)
        chat = chat_of(asked, context)
    else:
        asked = parse_ollama_generate(data)
        chat = chat_of_prompt(asked, context)
    limit = (asked.options or _NO_OPTIONS).num_predict or 0
    if limit > 0:  # a default and not a demand: the answer may be as long as the context has room for
        context = context._replace(default_max_tokens=limit)

    def prepare(body: ChatCompletionRequest) -> PreparedRequest | PendingMediaRequest:
        return prepare_chat(body, context, now_ns=now_ns, request_id=request_id)

    return PreparedOllama(prepare_translated(chat, prepare), context)


def chat_of(body: OllamaChatRequest, context: PrepareContext) -> TranslatedChat:
    """
    Raises:
        ServingError: something in the body is not supported; names the field.
    """
    places: dict[str, str] = {}
    messages = _messages(body.messages, places)
    last = messages[-1] if messages else None
    if last is None:
        raise invalid("messages", "messages are missing")
    prefilled = last.role == "assistant" and not last.tool_calls and isinstance(last.content, str) and last.content
    return _translated(body, messages, places, context, tools=body.tools, prefilled=bool(prefilled))


def chat_of_prompt(body: OllamaGenerateRequest, context: PrepareContext) -> TranslatedChat:
    """
    Raises:
        ServingError: something in the body is not supported; names the field.
    """
    messages = [ChatMessage("system", body.system)] if body.system else []
    name = f"messages[{len(messages)}]"
    places = {name: "prompt", "messages": "prompt"}
    for number in range(len(body.images or ())):
        places[f"{name}.content[{number}]"] = places[f"{name}.content[{number}].image_url"] = f"images[{number}]"
    messages.append(ChatMessage("user", _content(body.prompt or "", body.images)))
    return _translated(body, messages, places, context)


def _translated(
    body: OllamaRequest,
    messages: list[ChatMessage],
    places: dict[str, str],
    context: PrepareContext,
    *,
    tools: list[dict[str, object]] | None = None,
    prefilled: bool = False,
) -> TranslatedChat:
    options = body.options or _NO_OPTIONS
    thinks = None if body.think is None else ThinkingSwitch("disabled" if body.think is False else "enabled")
    if isinstance(body.think, str) and body.think not in EFFORTS:
        raise invalid("think", f"think is {body.think[:40]!r}; use true, false, {', '.join(map(repr, EFFORTS))}")
    chat = ChatCompletionRequest(
        model=untagged(body.model, context.names) if body.model else None,
        messages=messages,
        tools=tools or None,
        stream=body.stream is not False,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=body.seed if options.seed is None else options.seed,
        stop=options.stop,
        repetition_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        response_format=_format(body.format),
        reasoning_effort=body.think if isinstance(body.think, str) else None,
        chat_template_kwargs=thinking_variables(thinks),
        continue_final_message=prefilled or None,
        user=body.user,
        priority=body.priority,
        service_tier=body.service_tier,
        timeout_s=body.timeout_s,
        deadline_s=body.deadline_s,
        no_store=body.no_store,
        worker=body.worker,
    )
    return TranslatedChat(chat, {**NAMES, **places})


def _format(given: str | dict[str, object] | None) -> ResponseFormat | None:
    if not given:
        return None
    if isinstance(given, dict):
        return ResponseFormat("json_schema", SchemaFormat(schema=given))
    if given != JSON_FORMAT:
        raise unsupported("format", f"format {given[:40]!r} is not supported; use 'json' or a JSON schema")
    return ResponseFormat("json_object")


def _messages(given: Sequence[OllamaMessage], places: dict[str, str]) -> list[ChatMessage]:
    """Calls get ids, and results those of the calls that they answer: by the tool's name, else in their order."""
    messages: list[ChatMessage] = []
    waiting: list[tuple[str, str]] = []  # calls without a result: (id, name)
    for place, message in enumerate(given):
        calls: list[ToolCall] = []
        for number, call in enumerate(message.tool_calls or ()):
            name = call.id or f"call_{place}_{number}"
            waiting.append((name, call.function.name))
            calls.append(ToolCall(FunctionCall(call.function.name, _json(call.function.arguments).decode()), id=name))
        answered = message.tool_call_id
        if message.role == "tool":
            of_tool = [each for each in waiting if message.tool_name in (None, each[1])] or waiting
            found = next((each for each in waiting if each[0] == answered), of_tool[0] if of_tool else None)
            if found is not None:
                waiting.remove(found)
                answered = answered or found[0]
        for number in range(len(message.images or ())):
            at = f"messages[{place}].content[{number}]"
            places[at] = places[f"{at}.image_url"] = f"messages[{place}].images[{number}]"
        messages.append(
            ChatMessage(
                message.role,
                _content(message.content or "", message.images),
                tool_calls=calls or None,
                tool_call_id=answered,
                reasoning_content=message.thinking,
            )
        )
    return messages


def _content(text: str, images: Sequence[str] | None) -> str | list[ContentPart]:
    if not images:
        return text
    parts = [ContentPart("image_url", image_url=_url(image)) for image in images]
    return [*parts, ContentPart("text", text)]


def _url(image: str) -> str:
    if image.startswith("data:"):
        return image
    kind = next((kind for start, kind in _KINDS if image.startswith(start)), "png")
    return f"data:image/{kind};base64,{image}"
