"""Request bodies of chat completions and completions: their fields and limits, and which tools an answer may or must
call. Pure: knows no model and no tokenizer.

Unknown fields are ignored. A known field whose value cannot be honoured is an error that names the field and its limit;
nothing is silently dropped.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.base.request_bodies import CommonOptions, Name, decode_body, invalid, renamed, unsupported
from penstock.gateway.grammars.calls import NO_PARAMETERS, Tool
from penstock.infra.text.parsers.tool_formats import FUNCTION_NAME
from penstock.schemas.errors import ServingError

AUTO, NONE, REQUIRED = "auto", "none", "required"
CHOICES = "'none', 'auto', 'required', a function or allowed_tools"


class ToolChoice(NamedTuple):
    """
    Attributes:
        tools: that may be called.
        must: at least one is called.
        one: at most one call.
        restricts: it asks more of the answer than the model's own habits.
    """

    tools: tuple[Tool, ...] = ()
    must: bool = False
    one: bool = False
    restricts: bool = False


def plain_choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """Mistral's name for "required", and Cursor's ``{"type": "auto"}``, as OpenAI has them."""
    if isinstance(given, dict) and given.get("type") in (AUTO, NONE, REQUIRED, "any"):
        given = str(given["type"])
    return REQUIRED if given == "any" else given


def resolve_tool_choice(
    given: str | dict[str, Any] | None, functions: Sequence[dict[str, Any]] | None, parallel: bool | None
) -> ToolChoice:
    """
    Args:
        given: the body's tool_choice.
        functions: its tools.
        parallel: its parallel_tool_calls.
    Raises:
        ServingError: it names a tool that is not there, or is of an unknown form.
    """
    choice = AUTO if given is None else given
    tools = tuple(_tool(each["function"]) for each in functions or ())
    if choice == NONE:
        return ToolChoice()
    one, strict = parallel is False, any(tool.strict for tool in tools)
    if choice == AUTO:
        return ToolChoice(tools, one=one, restricts=strict)
    if choice == REQUIRED:
        mode, chosen = REQUIRED, tools
    elif isinstance(choice, dict) and choice.get("type") == "function":
        mode, chosen, one = REQUIRED, _named([choice], tools), True
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        listed = inner.get("tools") if isinstance(inner, dict) else None
        if not isinstance(listed, list) or inner.get("mode") not in (AUTO, REQUIRED):
            raise invalid("tool_choice", "tool_choice.allowed_tools needs a mode ('auto' or 'required') and tools")
        mode, chosen = inner["mode"], _named(listed, tools)
    else:
        shown = choice if isinstance(choice, str) else msgspec.json.encode(choice).decode()
        raise unsupported("tool_choice", f"tool_choice {shown[:60]!r} is not supported; use {CHOICES}")
    if not chosen:
        raise invalid("tool_choice", "tool_choice requires a call, and the request has no tools")
    return ToolChoice(chosen, must=mode == REQUIRED, one=one, restricts=True)


def _tool(function: dict[str, Any]) -> Tool:
    return Tool(function["name"], function.get("parameters") or NO_PARAMETERS, function.get("strict") is True)


def _named(references: list[Any], tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The tools that are referred to, as ``{"type": "function", "function": {"name": NAME}}`` or without "function"."""
    names = []
    for each in references:
        function = each.get("function", each) if isinstance(each, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if name is None:
            raise invalid("tool_choice", "tool_choice names no tool; its form is {'type': 'function', 'name': ...}")
        if not any(name == tool.name for tool in tools):
            raise invalid("tool_choice", f"tool_choice names {str(name)[:60]!r}, which is not among the tools")
        names.append(name)
    return tuple(tool for tool in tools if tool.name in names)


MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20
MAX_MESSAGES = 16_384
MAX_PROCESSORS = 8

_U32 = (1 << 32) - 1
_WORD = r"^[A-Za-z0-9_-]{1,64}(?![\s\S])"  # not "$", which in Python also matches before a final line break

_is_word = re.compile(_WORD).match

ROLES = ("system", "developer", "user", "assistant", "tool")

TokenId = Annotated[int, Meta(ge=0, le=_U32)]
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Schema = dict[str, Any] | str | bool
StructuralTag = Annotated[
    dict[str, Any] | str, Meta(description="parts of the output between marks, as vLLM and SGLang take them")
]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]


class StreamOptions(Struct, frozen=True):
    """``include_usage``: one more chunk before [DONE], with the usage of the whole request.

    ``continuous_usage_stats``: every chunk has the usage so far.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ProcessorOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """A logits processor by the name under which workers registered it, and its constructor's arguments."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    args: dict[str, Any] | None = None


class SchemaFormat(Struct, frozen=True):
    """A JSON schema and its name. The output matches it whatever ``strict`` says."""

    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, frozen=True):
    """``type``: "text", "json_object", "json_schema" or "structural_tag"."""

    type: str
    json_schema: SchemaFormat | None = None
    schema: Annotated[Schema | None, Meta(description="beside json_object or json_schema: llama.cpp's spelling")] = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """What the output must match, one of these: vLLM's options."""

    json: Annotated[Schema | None, Meta(description="a JSON schema, as an object or as text")] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str] | None, Meta(description="one of these texts")] = None
    grammar: Annotated[str | None, Meta(description="a context-free grammar: Lark or GBNF")] = None
    structural_tag: StructuralTag | None = None


class SamplingOptions(CommonOptions, frozen=True, kw_only=True):
    """Options that all APIs for text share. null means: not given."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31, description="0 or -1: off")] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[Name, Meta(description="requests with different salts share no KV cache")] | None = None


class TextOptions(SamplingOptions, frozen=True, kw_only=True):
    """Options that chat completions and completions share."""

    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: Annotated[bool, Meta(description="false: special tokens are a part of the text")] | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_key: (
        Annotated[Name, Meta(description="name of the conversation: a hint for the router; X-Session-Id goes before")]
        | None
    ) = None
    session_id: Annotated[Name, Meta(description="vLLM's name of prompt_cache_key")] | None = None
    prompt_logprobs: (
        Annotated[Logprobs, Meta(description="log-probabilities of the prompt's tokens and of this many alternatives")]
        | None
    ) = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, le=1 << 31, description="keep the prompt's last tokens; -1: as many as fit")] | None
    ) = None
    truncation_side: (
        Annotated[Literal["left", "right"], Meta(description="where truncate_prompt_tokens cuts; default: left")] | None
    ) = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[Schema | None, Meta(description="older name of the option of structured_outputs")] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: Annotated[bool, Meta(description="return the ids of the prompt and of the output")] | None = None
    return_tokens_as_token_ids: (
        Annotated[bool, Meta(description='tokens of log-probabilities are "token_id:ID", not their text')] | None
    ) = None
    json_schema: Annotated[
        Schema | None, Meta(description="llama.cpp's and SGLang's name of structured_outputs.json")
    ] = None
    regex: Annotated[str | None, Meta(description="SGLang's name of structured_outputs.regex")] = None
    ebnf: Annotated[str | None, Meta(description="SGLang's name of structured_outputs.grammar")] = None
    grammar: Annotated[str | None, Meta(description="llama.cpp's name of structured_outputs.grammar")] = None
    structural_tag: StructuralTag | None = None
    guided_whitespace_pattern: str | None = None
    grammar_lazy: bool | None = None
    use_beam_search: bool | None = None
    logprob_token_ids: list[int] | None = None
    logits_processors: (
        Annotated[list[ProcessorOptions], Meta(max_length=MAX_PROCESSORS, description="applied in this order")] | None
    ) = None


class MediaUrl(Struct, frozen=True):
    """URL of an image (PNG, JPEG, WebP, GIF), a video (MP4, MOV, WebM, Matroska) or an embedding file (safetensors):
    data:, http(s):, file: or a path."""

    url: str
    detail: Annotated[
        Literal["auto", "low", "high"] | None,
        Meta(description="without effect: the model decides how many tokens an image takes"),
    ] = None


class ContentPart(Struct, frozen=True):
    """``type``: "text", "image_url", "input_image", "image_embeds" or "video_url".

    "input_text", "output_text" and "refusal", types of OpenAI's other APIs, are accepted as text. In an assistant's
    message "thinking" (a text, or parts with one) and "reasoning" are its reasoning.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: MediaUrl | str | None = None
    image_embeds: MediaUrl | str | None = None
    video_url: MediaUrl | str | None = None
    thinking: Any = None


class FunctionCall(Struct, frozen=True):
    """``arguments``: JSON as the model wrote it, whole or not; also as the value itself."""

    name: str
    arguments: str | dict[str, Any] | list[Any] | None = ""


class ToolCall(Struct, frozen=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = "function"


class ChatMessage(Struct, frozen=True):
    role: Annotated[
        str,
        Meta(
            max_length=64,
            description=f"{', '.join(ROLES)}, or another that the chat template knows",
            extra_json_schema={"pattern": _WORD},  # checked by ``check_chat``, as few have another one
        ),
    ]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: Annotated[list[dict[str, Any]] | None, Meta(description="as OpenRouter returns reasoning")] = (
        None
    )
    thinking_blocks: Annotated[list[dict[str, Any]] | None, Meta(description="as LiteLLM returns reasoning")] = None
    function_call: Annotated[FunctionCall | None, Meta(description="older form of tool_calls")] = None


_THOUGHTS = ("thinking", "reasoning", "redacted_thinking")  # types of parts


def _with_reasoning(message: ChatMessage) -> ChatMessage:
    """An assistant's message whose reasoning, which clients return in several forms, is ``reasoning_content``."""
    content, thoughts = message.content, []
    if isinstance(content, list) and any(part.type in _THOUGHTS for part in content):
        thoughts = [_thought(part.thinking) or part.text for part in content if part.type in _THOUGHTS]
        content = [part for part in content if part.type not in _THOUGHTS] or None
    for block in (*(message.reasoning_details or ()), *(message.thinking_blocks or ())) if not thoughts else ():
        thoughts.append(next((found for key in _TEXT_KEYS if (found := _thought(block.get(key)))), ""))
    given = message.reasoning if message.reasoning_content is None else message.reasoning_content
    text = "".join(filter(None, thoughts)) or None
    return msgspec.structs.replace(message, content=content, reasoning_content=text if given is None else given)


_TEXT_KEYS = ("text", "summary", "thinking")  # of reasoning_details and thinking_blocks


def _thought(value: Any) -> str:
    """A text, or the texts of parts."""
    if isinstance(value, list):
        texts = [part.get("text") for part in value if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return value if isinstance(value, str) else ""


class ThinkingSwitch(Struct, frozen=True):
    """The ``thinking`` object of the APIs of DeepSeek, GLM, Kimi and MiniMax.

    ``type``: "adaptive" and "auto" leave the decision to the model.
    """

    type: Literal["enabled", "disabled", "adaptive", "auto"]


def thinking_variables(switch: ThinkingSwitch | None) -> dict[str, Any] | None:
    """Variables for the chat template, by both names that templates use. None: the model decides."""
    if switch is None or switch.type not in ("enabled", "disabled"):
        return None
    return dict.fromkeys(("enable_thinking", "thinking"), switch.type == "enabled")


NO_THINKING = ThinkingSwitch("disabled")


class ReasoningOptions(Struct, frozen=True):
    """OpenRouter's. ``effort`` is ``reasoning_effort``; ``exclude``: the reasoning is left out of the answer."""

    effort: Annotated[str, Meta(pattern=_WORD)] | None = None
    enabled: bool | None = None
    exclude: bool | None = None


def _with_thinking(body: "ChatCompletionRequest") -> "ChatCompletionRequest":
    """OpenRouter's ``reasoning`` and Ollama's ``think`` as the options that mean the same, which win."""
    given = body.reasoning if body.reasoning is not None else body.think
    if isinstance(given, str):
        given = ReasoningOptions(given)
    elif isinstance(given, bool) or given is None:
        given = ReasoningOptions(enabled=given)
    switch = body.thinking
    if switch is None and given.enabled is not None:
        switch = ThinkingSwitch("enabled") if given.enabled else NO_THINKING
    return msgspec.structs.replace(
        body,
        reasoning_effort=body.reasoning_effort or given.effort,
        thinking=switch,
        include_reasoning=False if body.include_reasoning is None and given.exclude else body.include_reasoning,
    )


class ChatCompletionRequest(TextOptions, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[Count, Meta(description="new name of max_tokens, and wins")] | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=512, description="passed to the chat template")] | None = (
        None
    )
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Annotated[bool, Meta(description="false: at most one call")] | None = None
    reasoning_effort: (
        Annotated[str, Meta(pattern=_WORD, description="passed to the chat template; none: do not think")] | None
    ) = None
    verbosity: Annotated[Literal["low", "medium", "high"], Meta(description="passed to the chat template")] | None = (
        None
    )
    thinking: ThinkingSwitch | None = None
    reasoning: Annotated[ReasoningOptions | bool | None, Meta(description="as OpenRouter takes it")] = None
    think: Annotated[str, Meta(pattern=_WORD, description="as Ollama takes it: whether, or how much")] | bool | None = (
        None
    )
    include_reasoning: Annotated[bool, Meta(description="false: leave the reasoning out of the answer")] | None = None
    separate_reasoning: (
        Annotated[bool, Meta(description="false: reasoning is part of the content, with its marks")] | None
    ) = None
    functions: Annotated[list[dict[str, Any]], Meta(max_length=512, description="older form of tools")] | None = None
    function_call: Annotated[str | dict[str, Any] | None, Meta(description="older form of tool_choice")] = None
    modalities: list[str] | None = None
    audio: Any = None
    best_of: int | None = None
    web_search_options: Any = None
    echo: bool | None = None
    max_thinking_tokens: (
        Annotated[int, Meta(ge=0, le=1 << 31, description="tokens of reasoning, which is then ended")] | None
    ) = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=1 << 31, description="the same")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    documents: (
        Annotated[
            list[dict[str, Any]],
            Meta(max_length=1024, description="for templates of models that answer from documents, as title and text"),
        ]
        | None
    ) = None
    add_generation_prompt: (
        Annotated[bool, Meta(description="false: the prompt ends after the last message, and begins no answer")] | None
    ) = None
    continue_final_message: Annotated[bool, Meta(description="continue the text of the last message")] | None = None


class TranslatedChat(NamedTuple):
    """Another API's body as a chat. ``places``: names of the chat's fields -> the client's, for errors."""

    body: ChatCompletionRequest
    places: dict[str, str]


_SHARED = (
    *("model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "ignore_eos", "seed", "stream", "priority", "timeout_s", "deadline_s", "worker", "cache_salt"),
)


def shared_options(body: CommonOptions) -> dict[str, Any]:
    """Options of another API's body that mean the same in a chat, under the same names."""
    return {name: getattr(body, name) for name in _SHARED}


class CompletionRequest(TextOptions, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[
        str | list[TokenId | str | list[TokenId]],
        Meta(description="text, token ids, or a list of these; over NATS, of one"),
    ]
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 31, description="0: with echo, the prompt only")] | None = None
    logprobs: Logprobs | None = None
    echo: Annotated[bool, Meta(description="return the prompt in front of the output")] | None = None
    best_of: int | None = None
    suffix: str | None = None


_decode_chat = msgspec.json.Decoder(ChatCompletionRequest).decode
_decode_completion = msgspec.json.Decoder(CompletionRequest).decode


def parse_chat(data: bytes) -> ChatCompletionRequest:
    """A chat body within every limit that does not depend on the model.

    Raises:
        ServingError: invalid_request or unsupported, with the field.
    """
    body: ChatCompletionRequest = decode_body(_decode_chat, data)
    if body.reasoning is not None or body.think is not None:
        body = _with_thinking(body)
    if b'"function_call"' in data or b'"functions"' in data:
        body = _with_functions(body)
    if (choice := plain_choice(body.tool_choice)) is not body.tool_choice:
        body = msgspec.structs.replace(body, tool_choice=choice)
    if any(map(_may_reason, body.messages)):
        messages = [_with_reasoning(each) if _may_reason(each) else each for each in body.messages]
        body = msgspec.structs.replace(body, messages=messages)
    try:
        check_chat(body)
    except ServingError as error:
        raise as_written(error, body) from None
    return body


def as_written(error: ServingError, body: ChatCompletionRequest) -> ServingError:
    """The error with the client's names of the fields, if the body has ``functions`` in place of tools."""
    if not body.functions:
        return error
    places = {f"tools[{number}].function": f"functions[{number}]" for number in range(len(body.functions))}
    choice = {"tool_choice": "function_call"} if body.function_call is not None else {}
    return renamed(error, {"tools": "functions", **places, **choice})


def _with_functions(body: ChatCompletionRequest) -> ChatCompletionRequest:
    """Functions and calls in OpenAI's form before tools as these, of which an answer has one at most."""
    messages, call = [], ""
    for number, message in enumerate(body.messages):
        if message.function_call is not None and not message.tool_calls:
            call = f"call_{number}"
            calls = [ToolCall(message.function_call, call)]
            message = msgspec.structs.replace(message, tool_calls=calls, function_call=None)
        elif message.role == "function" and call:
            message = msgspec.structs.replace(message, role="tool", tool_call_id=call)
        messages.append(message)
    body, choice = msgspec.structs.replace(body, messages=messages), body.function_call
    if body.functions and body.tools:
        raise invalid("functions", "functions is the older form of tools, and excludes them; leave it out")
    if not body.functions:
        if choice not in (None, "none", "auto"):
            raise invalid("function_call", "function_call requires a call, and the request has no functions")
        return body
    if choice is None:
        choice = body.tool_choice
    elif isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    tools = [{"type": "function", "function": each} for each in body.functions]
    return msgspec.structs.replace(body, tools=tools, tool_choice=choice, parallel_tool_calls=False)


def _may_reason(message: ChatMessage) -> bool:
    """Whether a message may have reasoning outside the fields for it."""
    if message.role != "assistant":
        return False
    return isinstance(message.content, list) or bool(message.reasoning_details or message.thinking_blocks)


def check_chat(body: ChatCompletionRequest) -> None:
    """The limits that the types of the fields do not express.

    Raises:
        ServingError: invalid_request or unsupported, with the field.
    """
    if body.audio is not None or any(kind != "text" for kind in body.modalities or ()):
        raise unsupported("modalities", "audio and modalities other than 'text' are not supported")
    if body.web_search_options is not None:
        raise unsupported("web_search_options", "web_search_options is not supported: Penstock searches nothing")
    if body.echo and body.messages[-1].role == "assistant":
        raise unsupported(
            "echo", "echo is not supported in chats; put the last message in front of the answer yourself"
        )
    for number, message in enumerate(body.messages):
        if message.role not in ROLES and not _is_word(message.role):
            at = f"messages[{number}].role"
            raise invalid(at, f"{at} must be 1 to 64 of A-Za-z0-9_-, not {message.role!r}; use {', '.join(ROLES)}")
    for number, tool in enumerate(body.tools or ()):
        _check_tool(f"tools[{number}]", tool)
    if body.tools or body.tool_choice is not None:
        resolve_tool_choice(body.tool_choice, body.tools, body.parallel_tool_calls)
    if body.add_generation_prompt and body.continue_final_message:
        raise invalid("continue_final_message", "continue_final_message excludes add_generation_prompt: true")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs requires logprobs: true")
    _check_related(body, body.max_completion_tokens or body.max_tokens)


def parse_completion(data: bytes) -> CompletionRequest:
    """A completion body within every limit that does not depend on the model.

    Raises:
        ServingError: invalid_request or unsupported, with the field.
    """
    body: CompletionRequest = decode_body(_decode_completion, data)
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "max_tokens must be at least 1 unless echo is true")
    if body.suffix:
        raise unsupported("suffix", "suffix is not supported: put what surrounds the gap into the prompt")
    _check_related(body, body.max_tokens)
    return body


def _check_tool(field: str, tool: dict[str, Any]) -> None:
    """
    Raises:
        ServingError: not a function, or a name that no parser of tool calls could read.
    """
    if (kind := tool.get("type", "function")) != "function":
        raise unsupported(f"{field}.type", f"{field}.type {str(kind)[:40]!r} is not supported; use 'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{field}.function", f"{field}.function must be an object with name, description and parameters")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        at = f"{field}.function.name"
        raise invalid(at, f"{at} must be 1 to 256 letters, digits and any of _ . - /, not {str(name)[:40]!r}")
    if not isinstance(parameters, dict | None):
        at = f"{field}.function.parameters"
        raise invalid(at, f"{at} must be a JSON schema (an object)")


def _check_related(body: ChatCompletionRequest | CompletionRequest, max_tokens: int | None) -> None:
    """Limits between fields, which a schema does not express, and options of other servers that change every answer."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", f"best_of is not supported unless it equals n ({body.n or 1})")
    if body.use_beam_search or body.guided_whitespace_pattern or body.grammar_lazy:
        names = ("use_beam_search", "guided_whitespace_pattern", "grammar_lazy")
        name = next(name for name in names if getattr(body, name))
        raise unsupported(name, f"{name} is not supported; leave it out")
    if body.logprob_token_ids:
        raise unsupported(
            "logprob_token_ids",
            f"logprob_token_ids is not supported; ask for up to {MAX_LOGPROBS} of the most likely tokens",
        )
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise invalid("min_tokens", f"min_tokens is {body.min_tokens}; it must not exceed max_tokens ({max_tokens})")
    if body.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens is 0; use 1 or more, or -1: as many as fit")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options requires stream: true")
    if body.stream and body.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", "prompt_logprobs is not supported with stream: true")
