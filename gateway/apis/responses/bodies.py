"""Request bodies of the Responses API: their fields and limits. Knows no model and no tokenizer.

As in ``penstock.gateway.apis.chat.bodies``, unknown fields are ignored. A known field whose value cannot be honoured is
an error that names the field. Tools become functions as chat completions have them, and their names are translated in
both directions.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from penstock.gateway.apis.chat.bodies import MAX_MESSAGES, Count, Logprobs, SamplingOptions, StopText
from penstock.gateway.base.request_bodies import (
    CommonOptions,
    Name,
    ToolInput,
    decode_body,
    decode_json,
    invalid,
    unsupported,
)
from penstock.infra.constraints.constraint_grammar import LARK, REGEX
from penstock.infra.constraints.lark_expression import (
    MAX_CHARACTERS,
    BadLark,
    NotOneExpression,
    Steps,
    expression,
    of_regex,
)
from penstock.schemas.requests import Constraint

MAX_TOOLS = 512  # including those in namespaces
MOST_GRAMMARS = 2 * MAX_CHARACTERS  # of all tools: with the expressions that they become
FUNCTION, NAMESPACE, CUSTOM, TOOL_SEARCH = "function", "namespace", "custom", "tool_search"
# Agents offer these with every request. Next to functions they are left out, and a header names them.
LEFT_OUT = (
    *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    "image_generation",
    TOOL_SEARCH,  # unless the client searches
)
_INPUT = "input"  # the only parameter of a function that represents a custom tool
_TAKES_TEXT = {
    "type": "object",
    "properties": {_INPUT: {"type": "string", "description": "the whole input of the tool, as plain text"}},
    "required": [_INPUT],
    "additionalProperties": False,
}


class FunctionTool(NamedTuple):
    """A function and its place in the client's body. An empty ``namespace`` means that it has none.

    Attributes:
        kind: of the tool that it represents: "function", "custom" or "tool_search".
        given: that tool, as its client wrote it.
    """

    place: str
    namespace: str
    name: str
    tool: dict[str, Any]
    kind: str
    given: dict[str, Any]


class ToolNames:
    """Names for the model. A function in a namespace keeps its own name, unless another function has it too."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self._own: dict[str, tuple[str, str]] = {}
        self._shown: dict[tuple[str, str], str] = {}
        functions = list(_functions(tools))
        self._kinds = {(each.namespace, each.name): each.kind for each in functions}
        found = [(each.namespace, each.name) for each in functions]
        count = Counter(name for _, name in set(found))
        taken = {name for namespace, name in found if not namespace or count[name] == 1}
        for namespace, name in dict.fromkeys(found):
            shown = name
            if namespace and count[name] > 1:
                shown = f"{namespace}__{name}"
                while shown in taken:
                    shown += "_"
                taken.add(shown)
            self._shown[namespace, name] = shown
            self._own[shown] = (namespace, name)
        for namespace, name in self._shown:  # models also write the namespace in front
            for spelled in (f"{namespace}.{name}", f"{namespace}__{name}") if namespace else ():
                self._own.setdefault(spelled, (namespace, name))

    def shown(self, namespace: str | None, name: str) -> str:
        """The name that the model knows. A function that is no longer offered keeps its own."""
        return self._shown.get((namespace or "", name), name)

    def kind(self, shown: str) -> str:
        """The kind of the tool that ``shown`` names. One that is not offered is a function."""
        return self._kinds.get(self.own(shown), FUNCTION)

    def own(self, shown: str) -> tuple[str, str]:
        """Namespace (empty if there is none) and name of the function that the model called."""
        return self._own.get(shown, ("", shown))


def chat_tools(tools: Sequence[dict[str, Any]], names: ToolNames) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Functions as chat completions have them, and the places in the body that they come from.

    Raises:
        ServingError: a tool is not supported. The error names it.
    """
    _check(tools)
    made: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    for found in _distinct(tools):
        function = _shown(found)
        if isinstance(name := function.get("name"), str):
            function["name"] = names.shown(found.namespace, name)
        places[f"tools[{len(made)}].function"] = found.place
        made.append({"type": FUNCTION, "function": function})
    return made, places


def _shown(found: FunctionTool) -> dict[str, Any]:
    """What the model sees of a function."""
    keys = ("name", "description", "parameters", "strict")
    return {key: value for key in keys if (value := found.tool.get(key)) is not None}


def _distinct(tools: Iterable[dict[str, Any]]) -> list[FunctionTool]:
    """Each function once: several searches may find it, in namespaces that hold different parts of the same tools."""
    distinct: dict[bytes, FunctionTool] = {}
    for found in _functions(tools):
        distinct.setdefault(msgspec.json.encode((found.namespace, _shown(found))), found)
    return list(distinct.values())


def check_count(tools: Iterable[dict[str, Any]]) -> None:
    """
    Raises:
        ServingError: too many functions. Whoever compares their names checks this first.
    """
    if (count := len(_distinct(tools))) > MAX_TOOLS:
        raise invalid("tools", f"tools have {count} functions, namespaces included; at most {MAX_TOOLS} are allowed")


def left_out(tools: Iterable[dict[str, Any]]) -> list[str]:
    """The tools that the model does not see, and grammars that it is only told, as in "tools[3].format"."""
    tools = list(tools)
    hidden = [f"tools[{number}]" for number, tool in enumerate(tools) if _is_left_out(tool)]
    return hidden + [f"{found.place}.format" for found, rule in _rules(tools) if isinstance(rule, NotOneExpression)]


def _is_left_out(tool: dict[str, Any]) -> bool:
    return tool.get("type") in LEFT_OUT and not _is_searched(tool)


def _is_searched(tool: dict[str, Any]) -> bool:
    """Whether a tool is the search for tools that its client runs."""
    return tool.get("type") == TOOL_SEARCH and tool.get("execution") == "client"


def _functions(tools: Iterable[dict[str, Any]], place: str = "tools", namespace: str = "") -> Iterator[FunctionTool]:
    for number, tool in enumerate(tools):
        at, name = f"{place}[{number}]", str(tool.get("name"))
        if tool.get("type") == FUNCTION:
            yield FunctionTool(at, namespace, name, tool, FUNCTION, tool)
        elif tool.get("type") == CUSTOM:
            yield FunctionTool(at, namespace, name, _custom(tool), CUSTOM, tool)
        elif tool.get("type") == NAMESPACE and not namespace:
            yield from _functions(_inner(tool), f"{at}.tools", name)
        elif _is_searched(tool) and not namespace:
            yield FunctionTool(at, "", TOOL_SEARCH, {**tool, "name": TOOL_SEARCH}, TOOL_SEARCH, tool)


def input_rules(tools: Sequence[dict[str, Any]]) -> dict[str, ToolInput]:
    """By name of a custom tool for the model, what its text must match.

    Raises:
        ServingError: a format is not of a known form, or its grammar is none. The error names it.
    """
    names, found = ToolNames(tools), {}
    for tool, rule in _rules(tools):
        if isinstance(rule, BadLark):
            at = f"{tool.place}.format.definition"
            raise invalid(at, f"{at} of tool {tool.name[:64]!r}: {rule}")
        if isinstance(rule, ToolInput):
            found[names.shown(tool.namespace, tool.name)] = rule
    return found


def _rules(
    tools: Iterable[dict[str, Any]],
) -> Iterator[tuple[FunctionTool, ToolInput | BadLark | NotOneExpression]]:
    """Each tool with a grammar, with what its text must match, or why there is no rule. They share one limit."""
    left, steps = MOST_GRAMMARS, Steps()
    for tool in _functions(tools):
        form = tool.given.get("format")
        if tool.kind != CUSTOM or not isinstance(form, dict) or form.get("type") != "grammar":
            continue
        syntax, text = form.get("syntax"), form.get("definition")
        if not isinstance(text, str) or syntax not in ("lark", "regex"):
            yield tool, BadLark("a grammar needs syntax, 'lark' or 'regex', and definition, a text")
            continue
        left -= len(text)
        try:  # one that is not enforced is told to the model, and ``left_out`` names it
            rule = _rule(syntax, text, left, steps)
            left -= len(rule.schema["properties"][_INPUT]["pattern"])
            yield tool, rule
        except (BadLark, NotOneExpression) as error:
            yield tool, error


def _rule(syntax: str, text: str, left: int, steps: Steps) -> ToolInput:
    """
    Raises:
        BadLark, NotOneExpression
    """
    if left < 0:
        raise NotOneExpression(
            f"the grammars of all tools and their expressions have more than {2 * MAX_CHARACTERS} characters"
        )
    pattern = expression(text, steps) if syntax == "lark" else of_regex(text)
    schema = msgspec.json.decode(msgspec.json.encode(_TAKES_TEXT))
    schema["properties"][_INPUT] = {"type": "string", "pattern": f"^(?:{pattern})$"}
    return ToolInput(schema, Constraint(LARK if syntax == "lark" else REGEX, text))


def _custom(tool: dict[str, Any]) -> dict[str, Any]:
    """A custom tool as a function, with its grammar in words."""
    given = tool.get("format")
    form: dict[str, Any] = given if isinstance(given, dict) else {}
    grammar = f"The input must match this grammar ({form.get('syntax')}):\n{form.get('definition')}"
    description = "\n\n".join(
        str(text) for text in (tool.get("description"), grammar if "definition" in form else "") if text
    )
    return {"name": tool.get("name"), "description": description or None, "parameters": _TAKES_TEXT}


def custom_arguments(text: str) -> str:
    """The input of a custom tool, as JSON arguments of the function that represents it."""
    return msgspec.json.encode({_INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """The reverse of ``custom_arguments``, whatever the model called the text.

    Incomplete or unexpected arguments are returned unchanged.
    """
    try:
        value = decode_json(msgspec.json.decode, arguments.encode())
    except (msgspec.DecodeError, RecursionError):
        return arguments
    if isinstance(value, dict):
        value = value.get(_INPUT) if len(value) != 1 else next(iter(value.values()))
    return value if isinstance(value, str) else arguments


def _inner(tool: dict[str, Any]) -> list[dict[str, Any]]:
    inner = tool.get("tools")
    return [each for each in inner if isinstance(each, dict)] if isinstance(inner, list) else []


def _check(tools: Sequence[dict[str, Any]]) -> None:
    functions = any(tool.get("type") in (FUNCTION, NAMESPACE, CUSTOM) for tool in tools)
    for number, tool in enumerate(tools):
        at, kind = f"tools[{number}]", tool.get("type")
        if kind == NAMESPACE:
            _check_namespace(tool, at)
        elif kind not in (FUNCTION, CUSTOM) and not _is_searched(tool) and not (kind in LEFT_OUT and functions):
            known = "use 'function' or 'custom'"
            raise unsupported(f"{at}.type", f"{at}: tools of type {str(kind)[:40]!r} are not supported; {known}")


def _check_namespace(tool: dict[str, Any], at: str) -> None:
    name, inner = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not name:
        raise invalid(f"{at}.name", f"{at}.name is missing; it must be a text")
    if not isinstance(inner, list):
        raise invalid(f"{at}.tools", f"{at}.tools is missing; it must be a list of tools")
    for number, each in enumerate(inner):
        here = f"{at}.tools[{number}]"
        if not isinstance(each, dict) or each.get("type") not in (FUNCTION, CUSTOM):
            raise unsupported(f"{here}.type", f"{here}: a namespace may only have tools of type 'function' or 'custom'")


_WORD = r"^[A-Za-z0-9_-]{1,64}(?![\s\S])"

ResponseId = Annotated[str, Meta(min_length=1, max_length=128)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]

ENCODED_REASONING = "reasoning.encrypted_content"
INCLUDABLE = frozenset(
    {
        "message.output_text.logprobs",
        "message.input_image.image_url",
        ENCODED_REASONING,
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "computer_call_output.output.image_url",
        "code_interpreter_call.outputs",
    }
)


class InputPart(Struct, frozen=True, omit_defaults=True):
    """``type``: "input_text", "input_image", "output_text", "refusal", "reasoning_text" or "summary_text"."""

    type: str
    text: str | None = None
    image_url: str | None = None
    detail: str | None = None
    file_id: str | None = None
    refusal: str | None = None


class InputItem(Struct, frozen=True, omit_defaults=True):
    """``type``: "message" (the default), "function_call", "function_call_output", "reasoning" or "compaction".

    "custom_tool_call" and "custom_tool_call_output" belong to a tool that takes text, its ``input``. An "agent_message"
    from another agent is read as the user's. The ``tools`` of "additional_tools" and "tool_search_output" are offered
    like those of the body. "item_reference" stands for the item of a stored response that has this ``id``.
    """

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | list[Any] | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    status: str | None = None
    phase: str | None = None
    namespace: str | None = None
    input: str | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    execution: str | None = None


class TextFormat(Struct, frozen=True, omit_defaults=True):
    """``type``: "text", "json_object" or "json_schema", whose other fields are the schema's."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct, frozen=True, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, Meta(description="passed to the chat template")] = (
        None
    )


class ReasoningConfig(Struct, frozen=True, omit_defaults=True):
    """``summary``: reasoning is returned as a summary, though it is whole."""

    effort: Annotated[str, Meta(pattern=_WORD, description="passed to the chat template")] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Struct, frozen=True, omit_defaults=True):
    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingOptions, frozen=True, kw_only=True, omit_defaults=True):
    """POST /v1/responses."""

    input: str | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: (
        Annotated[ResponseId, Meta(description="continue this response: its input and output come first")] | None
    ) = None
    store: (
        Annotated[
            bool, Meta(description="false: erase everything soon after the end; nothing can be fetched or continued")
        ]
        | None
    ) = None
    background: (
        Annotated[
            bool, Meta(description="answer immediately; the response continues without the client, which polls it")
        ]
        | None
    ) = None
    metadata: Metadata | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Annotated[bool, Meta(description="false: return the first call only")] | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Annotated[Count, Meta(description="of built-in tools, of which there are none")] | None = None
    top_logprobs: Logprobs | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[str], Meta(max_length=32)] | None = None
    stream_options: ResponseStreamOptions | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: Name | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: list[Any] | None = None
    moderation: Any = None
    # As in chat completions:
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None

    @property
    def summarises(self) -> bool:
        """Whether reasoning is returned as a summary."""
        asked = self.reasoning
        return asked is not None and bool(asked.summary or asked.generate_summary)

    @property
    def kept(self) -> bool:
        """Whether the response can be fetched and continued after its end."""
        return self.store is not False and not self.no_store


class CompactionRequest(CommonOptions, frozen=True, kw_only=True, omit_defaults=True):
    """POST /v1/responses/compact. Its fields mean what they mean in ``ResponsesRequest``."""

    input: str | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: (
        Annotated[ResponseId, Meta(description="compact this response's conversation: it comes before input")] | None
    ) = None
    store: (
        Annotated[bool, Meta(description="false: erase everything soon after the end; nothing can be fetched")] | None
    ) = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: str | None = None
    max_output_tokens: Annotated[Count, Meta(description="of the summary, with the reasoning before it")] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    reasoning: ReasoningConfig | None = None
    cache_salt: Name | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None


_decode = msgspec.json.Decoder(ResponsesRequest).decode
_decode_compaction = msgspec.json.Decoder(CompactionRequest).decode


def parse_response(data: bytes) -> ResponsesRequest:
    """Parse a body, and check all limits that depend neither on the model nor on earlier responses.

    Raises:
        ServingError: invalid_request or unsupported. The error names the field.
    """
    body: ResponsesRequest = decode_body(_decode, data)
    for name in ("conversation", "prompt", "context_management", "moderation"):
        if getattr(body, name):
            raise unsupported(name, f"{name} is not supported; use previous_response_id, instructions and input")
    if body.input is None:
        raise invalid("input", "input is missing; it must be a text or a list of items")
    for number, name in enumerate(body.include or ()):
        if name not in INCLUDABLE:
            raise invalid(f"include[{number}]", f"include[{number}] {name[:80]!r} is not known")
    if body.background and not body.kept:
        raise invalid("background", "background needs store: true, because the response is fetched later")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options requires stream: true")
    return body


def parse_compaction(data: bytes) -> ResponsesRequest:
    """Parse a body for compaction. The result is that of the response whose conversation is summarised.

    Raises:
        ServingError: invalid_request or unsupported. The error names the field.
    """
    body: CompactionRequest = decode_body(_decode_compaction, data)
    if body.input is None and body.previous_response_id is None:
        raise invalid("input", "input is missing; send the conversation, or set previous_response_id")
    if body.stream:
        raise unsupported("stream", "a compaction is not streamed; leave stream out")
    return ResponsesRequest(**{name: getattr(body, name) for name in body.__struct_fields__})
