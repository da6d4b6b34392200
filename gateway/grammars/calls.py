"""The grammar of tool calls in each format that ``infra.model.parsers`` reads."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.grammars.arguments import Pieces, by_property
from gateway.grammars.writer import CannotExpress, GrammarWriter
from infra.model.constraints import quoted

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(NamedTuple):
    """A function that may be called. ``strict``: every keyword of its schema holds, or the request is refused."""

    name: str
    parameters: dict[str, Any]
    strict: bool

    def loosened(self, schemas: Mapping[str, Any]) -> "Tool":
        """With the schema of that name, unless it is strict."""
        return self if self.strict or self.name not in schemas else self._replace(parameters=schemas[self.name])


class CallGrammar(NamedTuple):
    """How calls are written: ``before call (between call)* after``.

    Attributes:
        call: from the writer and a tool to one call.
        opener: what a call begins with, wherever in the text; "": only whole answers are calls.
        one: a single call per answer.
        starts: characters with which no content begins, where calls have no opener.
    """

    call: Callable[[GrammarWriter, Tool], str]
    before: str = ""
    between: str = ""
    after: str = ""
    opener: str = ""
    one: bool = False
    starts: str = ""

    def _one(self, writer: GrammarWriter, tool: Tool) -> str:
        try:
            return self.call(writer, tool)
        except CannotExpress as error:
            raise CannotExpress(f"tool {tool.name!r}: {error}") from None

    def calls(self, writer: GrammarWriter, tools: Sequence[Tool], *, one: bool) -> str:
        """At least one call of these tools; ``one``: exactly one."""
        call = writer.rule(" | ".join(self._one(writer, tool) for tool in tools))
        body = call if one or self.one else f"{call} ({writer.literal(self.between)} {call})*"
        return writer.rule(f"{writer.literal(self.before)} {body} {writer.literal(self.after)}".strip())


def _json_object(begin: str, key: str, end: str) -> Callable[[GrammarWriter, Tool], str]:
    """``begin {"name": NAME, key: {...}} end``"""

    def call(writer: GrammarWriter, tool: Tool) -> str:
        head = f'{begin}{{"name": {quoted(tool.name)}, "{key}": '
        return f"{writer.literal(head)} {_arguments(writer, tool)} {writer.literal('}' + end)}"

    return call


def _headed(head: str, end: str) -> Callable[[GrammarWriter, Tool], str]:
    """``head`` with the name in place of {}, then the arguments as JSON, then ``end``."""

    def call(writer: GrammarWriter, tool: Tool) -> str:
        before, after = head.split("{}")
        return f"{writer.literal(before + tool.name + after)} {_arguments(writer, tool)} {writer.literal(end)}".strip()

    return call


def _kimi(writer: GrammarWriter, tool: Tool) -> str:
    """The name is followed by the call's number in the conversation."""
    head = writer.literal(f"<|tool_call_begin|>functions.{tool.name}:")
    return (
        f"{head} /[0-9]{{1,3}}/ {writer.literal('<|tool_call_argument_begin|>')} {_arguments(writer, tool)} "
        + writer.literal("<|tool_call_end|>")
    )


def _qwen3_coder(writer: GrammarWriter, tool: Tool) -> str:
    pieces = Pieces(lambda key: f"<parameter={key}>\n", text_end="\n</parameter>\n", json_end="\n</parameter>\n")
    head, end = writer.literal(f"<tool_call>\n<function={tool.name}>\n"), writer.literal("</function>\n</tool_call>")
    return f"{head} {by_property(writer, tool.parameters, pieces, strict=tool.strict)} {end}"


def _glm45(writer: GrammarWriter, tool: Tool) -> str:
    pieces = Pieces(
        lambda key: f"<arg_key>{key}</arg_key>\n<arg_value>",
        text_end="</arg_value>",
        json_end="</arg_value>",
        last="\n",
    )
    head, end = writer.literal(f"<tool_call>{tool.name}\n"), writer.literal("</tool_call>")
    return f"{head} {by_property(writer, tool.parameters, pieces, strict=tool.strict)} {end}"


def _pythonic(writer: GrammarWriter, tool: Tool) -> str:
    pieces = Pieces(lambda key: f"{key}=", between=", ")
    arguments = by_property(writer, tool.parameters, pieces, strict=tool.strict)
    return f"{quoted(tool.name + '(')} {arguments} {quoted(')')}"


def _arguments(writer: GrammarWriter, tool: Tool) -> str:
    return writer.json(tool.parameters, lenient=not tool.strict)


_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

GRAMMARS: dict[str, CallGrammar] = {
    "deepseek_v3": CallGrammar(
        _headed("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n", "\n```<｜tool▁call▁end｜>"),
        *(_DEEPSEEK_BEGIN, "\n", _DEEPSEEK_END, _DEEPSEEK_BEGIN),
    ),
    "deepseek_v3_1": CallGrammar(
        _headed("<｜tool▁call▁begin｜>{}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        *(_DEEPSEEK_BEGIN, "", _DEEPSEEK_END, _DEEPSEEK_BEGIN),
    ),
    "glm45": CallGrammar(_glm45, between="\n", opener="<tool_call>"),
    "gpt_oss": CallGrammar(_headed("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>", ""), one=True),
    "hermes": CallGrammar(
        _json_object("<tool_call>\n", "arguments", "\n</tool_call>"), between="\n", opener="<tool_call>"
    ),
    "kimi_k2": CallGrammar(
        _kimi,
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
        opener="<|tool_calls_section_begin|>",
    ),
    "llama3_json": CallGrammar(_json_object("", "parameters", ""), between="; ", starts="{"),
    "llama4_pythonic": CallGrammar(_pythonic, "[", ", ", "]", starts="["),
    "mistral": CallGrammar(_json_object("", "arguments", ""), "[TOOL_CALLS][", ", ", "]", "[TOOL_CALLS]"),
    "mistral_args": CallGrammar(_headed("[TOOL_CALLS]{}[ARGS]", ""), opener="[TOOL_CALLS]"),
    "nemotron_deci": CallGrammar(_json_object("", "arguments", ""), "<TOOLCALL>[", ", ", "]</TOOLCALL>", "<TOOLCALL>"),
    "qwen3_coder": CallGrammar(_qwen3_coder, between="\n", opener="<tool_call>"),
}
GRAMMARS["deepseek_v31"] = GRAMMARS["deepseek_v3_1"]
GRAMMARS["harmony"] = GRAMMARS["gpt_oss"]
GRAMMARS["pythonic"] = GRAMMARS["llama4_pythonic"]


def call_grammar(parser: str, token_id: Callable[[str], int | None]) -> CallGrammar:
    """The grammar of a parser's format. Mistral has two; newer vocabularies have a token for the second."""
    newer = parser == "mistral" and token_id("[ARGS]") is not None
    return GRAMMARS["mistral_args" if newer else parser]
