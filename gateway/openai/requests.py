"""Request bodies of the OpenAI API: their shape and limits. Knows no model, no tokenizer.

Tolerant of what clients send and we do not know (ignored), strict about what we know: a value that cannot be
honoured is refused with the field's name and its limit, never silently dropped.
"""

import re
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.media import media
from gateway.parsers.tool_formats import NAME
from schemas.errors import Code, ServingError
from schemas.requests import Priority
from schemas.streams import LONGEST_DEADLINE_S

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 131_072  # prompt tokens x (1 + alternatives), as often as an answer shows them
MAX_MESSAGES = 16_384
MAX_PROCESSORS = 8
MAX_PROCESSOR_BYTES = 65_536  # arguments of all logits processors of a request, as JSON

_U32 = (1 << 32) - 1
# one token of a subject; not "$", which in Python also matches before a last line break
_WORKER = r"^[A-Za-z0-9_-]{1,128}(?![\s\S])"

_WORD = r"^[A-Za-z0-9_-]{1,64}(?![\s\S])"

TokenId = Annotated[int, Meta(ge=0, le=_U32)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Duration = Annotated[float, Meta(gt=0, le=LONGEST_DEADLINE_S)]
Name = Annotated[str, Meta(max_length=256)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]


class StreamOptions(Struct, frozen=True):
    """``include_usage``: one more chunk before [DONE], with the usage of the whole request."""

    include_usage: bool | None = None


class Processor(Struct, frozen=True, forbid_unknown_fields=True):
    """A logits processor by the name under which workers registered it, and the arguments of its constructor."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    args: dict[str, Any] | None = None


class Body(Struct, frozen=True, kw_only=True):
    """Options that chat and text completions share. null means: not given."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31, description="0 or -1: off")] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1024)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None
    priority: Priority | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    timeout_s: Annotated[Duration, Meta(description="seconds until the request ends unanswered")] | None = None
    deadline_s: Annotated[Duration, Meta(description="another name of timeout_s; the shorter one holds")] | None = None
    cache_salt: Annotated[Name, Meta(description="requests with different salts share no KV cache")] | None = None
    worker: Annotated[str, Meta(pattern=_WORKER, description="run here only")] | None = None
    prompt_logprobs: (
        Annotated[Logprobs, Meta(description="log-probabilities of the prompt's tokens, and of so many best")] | None
    ) = None
    logits_processors: (
        Annotated[list[Processor], Meta(max_length=MAX_PROCESSORS, description="edit the logits, in this order")] | None
    ) = None


class MediaUrl(Struct, frozen=True):
    """Where an image (PNG, JPEG, WebP, GIF) or an embedding file (safetensors) is: data:, http(s):, file: or a path."""

    url: str
    detail: Annotated[
        Literal["auto", "low", "high"] | None, Meta(description="every image takes the same number of tokens")
    ] = None


class ContentPart(Struct, frozen=True):
    """One part of a message's content: "text", "image_url" or "input_image", or "image_embeds"."""

    type: str
    text: str | None = None
    image_url: MediaUrl | str | None = None
    image_embeds: MediaUrl | str | None = None


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Struct, frozen=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Typed(Struct, frozen=True):
    type: str


class ChatCompletionRequest(Body, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[Count, Meta(description="new name of max_tokens, and wins")] | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=512, description="handed to the template")] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Annotated[bool, Meta(description="false: show the first call only")] | None = None
    reasoning_effort: Annotated[str, Meta(pattern=_WORD, description="handed to the template")] | None = None
    response_format: Typed | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None


class CompletionRequest(Body, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[
        str | list[TokenId | str | list[TokenId]], Meta(description="text, token ids, or a list with one of these")
    ]
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 31, description="0: with echo, the prompt only")] | None = None
    logprobs: Logprobs | None = None
    echo: Annotated[bool, Meta(description="the answer begins with the prompt")] | None = None
    best_of: int | None = None
    suffix: str | None = None


# by type of part, the field that says where the medium is
_MEDIA = {"image_url": "image_url", "input_image": "image_url", "image_embeds": "image_embeds"}
_AT = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")

_chat = msgspec.json.Decoder(ChatCompletionRequest).decode
_text = msgspec.json.Decoder(CompletionRequest).decode
_arguments = msgspec.json.Decoder(dict[str, Any]).decode


def parse_chat(data: bytes) -> ChatCompletionRequest:
    """A chat body that keeps every limit that does not depend on the model.

    Raises:
        ServingError: invalid_request or unsupported, with the field.
    """
    body: ChatCompletionRequest = parse(_chat, data)
    if body.functions or body.function_call is not None:
        raise unsupported("functions", "functions and function_call are not served; use tools")
    if body.response_format is not None and body.response_format.type != "text":
        raise unsupported("response_format", f"response_format type {body.response_format.type!r}; only 'text'")
    if body.audio is not None or any(kind != "text" for kind in body.modalities or ()):
        raise unsupported("modalities", "only text can be answered; leave out audio and other modalities")
    if body.tool_choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", "tool_choice can be 'auto' or 'none'; a call cannot be forced")
    for number, tool in enumerate(body.tools or ()):
        _check_tool(f"tools[{number}]", tool)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
    _check(body, body.max_completion_tokens or body.max_tokens)
    return body


def parse_text(data: bytes) -> CompletionRequest:
    """A text completion body that keeps every limit that does not depend on the model.

    Raises:
        ServingError: invalid_request or unsupported, with the field.
    """
    body: CompletionRequest = parse(_text, data)
    if body.echo and body.stream:
        raise unsupported("echo", "echo with stream: true; ask for the whole answer")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "max_tokens is 0 and must be at least 1, unless echo is true")
    if body.suffix:
        raise unsupported("suffix", "suffix is not served")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", f"best_of must be equal to n ({body.n or 1}) or left out")
    _check(body, body.max_tokens)
    return body


def prompt_of(body: CompletionRequest) -> str | list[int]:
    """The one prompt: text or token ids.

    Raises:
        ServingError: none, several, or a mixture.
    """
    prompt = body.prompt
    if isinstance(prompt, list):
        kinds = {entry.__class__ for entry in prompt}
        if kinds == {int}:
            return prompt  # type: ignore[return-value]
        if len(prompt) != 1:
            what = f"{len(prompt)} prompts" if len(kinds) == 1 else "a mixture" if kinds else "an empty list"
            raise invalid("prompt", f"prompt is {what}; the limit is 1 prompt per request")
        prompt = prompt[0]  # type: ignore[assignment]
    return prompt  # type: ignore[return-value]


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: text content as one string, with images a list of typed parts, tool
    arguments as objects.

    Raises:
        ServingError: a part of the content is not served, or tool arguments are not a JSON object.
    """
    return [
        {"role": message.role, "content": message.content}
        if message.content.__class__ is str and message.role == "user"
        else _template_message(number, message)
        for number, message in enumerate(messages)
    ]


def media_parts(messages: list[ChatMessage]) -> list[media.MediaPart]:
    """The images and embedding files of messages that ``template_messages`` took, in their order."""
    found = []
    for number, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for i, part in enumerate(message.content):
            if name := _MEDIA.get(part.type):
                value: MediaUrl | str = getattr(part, name)
                url = value if isinstance(value, str) else value.url
                found.append(media.MediaPart(f"messages[{number}].content[{i}].{name}", url, name == "image_embeds"))
    return found


def _check_tool(where: str, tool: dict[str, Any]) -> None:
    """
    Raises:
        ServingError: it is no function, or one whose calls nobody could read.
    """
    if (kind := tool.get("type", "function")) != "function":
        raise unsupported(f"{where}.type", f"tools of type {str(kind)[:40]!r}; only 'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{where}.function", f"{where}.function must be an object with name, description and parameters")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        field = f"{where}.function.name"
        raise invalid(field, f"{field} must be 1 to 256 letters, digits and any of _ . - /, not {str(name)[:40]!r}")
    if not isinstance(parameters, dict | None):
        raise invalid(f"{where}.function.parameters", f"{where}.function.parameters must be a JSON schema (an object)")


def _template_message(number: int, message: ChatMessage) -> dict[str, Any]:
    where = f"messages[{number}]"
    content = message.content
    # an answer of ours may have nothing but calls, or thoughts that were cut off: it can be sent back
    silent = message.role == "assistant" and (message.tool_calls or message.reasoning_content is not None)
    if content is None and not silent:
        raise invalid(f"{where}.content", f"{where}.content is missing")
    out: dict[str, Any] = {"role": message.role, "content": _content(where, message.role, content)}
    for key in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, key)) is not None:
            out[key] = value
    if message.tool_calls:
        out["tool_calls"] = [_template_call(f"{where}.tool_calls[{i}]", c) for i, c in enumerate(message.tool_calls)]
    return out


def _content(where: str, role: str, content: str | list[ContentPart] | None) -> str | list[dict[str, str]]:
    if content is None or isinstance(content, str):
        return content or ""
    for i, part in enumerate(content):
        if part.type == "text":
            if part.text is None:
                raise invalid(f"{where}.content[{i}].text", f"{where}.content[{i}].text is missing")
        elif name := _MEDIA.get(part.type):
            field = f"{where}.content[{i}].{name}"
            if getattr(part, name) is None:
                raise invalid(field, f"{field} is missing")
            if role not in ("user", "tool"):
                raise unsupported(field, f"images in {role} messages; put them into user messages")
        else:
            what = f"content parts of type {part.type[:40]!r}; there are 'text', 'image_url' and 'image_embeds'"
            raise unsupported(f"{where}.content[{i}].type", what)
    if all(part.type == "text" for part in content):
        return "\n".join(part.text or "" for part in content)
    parts: list[dict[str, str]] = []
    for is_text, run in groupby(content, lambda part: part.type == "text"):
        if is_text:  # in one: templates would join them without a break, and make words that nobody wrote
            parts.append({"type": "text", "text": "\n".join(part.text or "" for part in run)})
        else:
            parts += [{"type": "image"} for _ in run]
    return parts


def _template_call(where: str, call: ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = _arguments(arguments or "{}")
        except (ValueError, RecursionError):
            field = f"{where}.function.arguments"
            raise invalid(field, f"{field} is not a JSON object") from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def invalid(field: str | None, message: str) -> ServingError:
    return ServingError(Code.invalid_request, message, param=field)


def unsupported(field: str, what: str) -> ServingError:
    return ServingError(Code.unsupported, f"not supported: {what}", param=field)


def parse(decode: Any, data: bytes) -> Any:
    try:
        return decode(data)
    except msgspec.ValidationError as error:
        raise _violation(str(error)) from None
    except RecursionError:
        raise invalid(None, "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(None, f"the body is not valid JSON in UTF-8: {error}") from None


def _violation(text: str) -> ServingError:
    """``Expected `float` <= 2.0 - at `$.temperature``` names the limit first and the field last."""
    at = _AT.search(text)
    if at is None or not at[1]:
        missing = re.search(r"missing required field `(\w+)`", text)
        return invalid(missing[1] if missing else None, text[:400])
    return invalid(at[1], f"{at[1]}: {text[: at.start()]}"[:400])


def _check(body: Body, max_tokens: int | None) -> None:
    """Limits between fields, and those that a schema does not express."""
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise invalid("min_tokens", f"min_tokens {body.min_tokens} is above max_tokens {max_tokens}")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options needs stream: true")
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "prompt_logprobs with stream: true; ask for the whole answer")
