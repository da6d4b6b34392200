"""Parsers by name, and which one parses a request's answer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from blake3 import blake3

from infra.model.detokenizer import Detokenizer, StopSearch, TextStream
from infra.model.parsers import json_calls, reasoning, xml_calls
from infra.model.parsers.answer_parser import AnswerFormat, AnswerParser
from infra.model.parsers.harmony import SPECIAL
from infra.model.parsers.pythonic_calls import PYTHONIC
from infra.model.parsers.reasoning import ReasoningTags
from infra.model.parsers.tool_formats import TextParameters, ToolFormat
from infra.model.schema_kinds import kinds
from schemas.fleet import Registration
from schemas.requests import GenerateRequest, Parsing

HARMONY = "harmony"  # one format for reasoning and calls

REASONING: dict[str, ReasoningTags | str] = {
    "basic": reasoning.THINK,
    "deepseek_r1": reasoning.IMPLIED_THINK,
    "deepseek_v3": reasoning.THINK,
    "glm45": reasoning.THINK,
    "gpt_oss": HARMONY,
    "granite": reasoning.GRANITE,
    "kimi": reasoning.KIMI,
    "kimi_k2": reasoning.THINK,
    "mistral": reasoning.MISTRAL,
    "nemotron_deci": reasoning.THINK,
    "qwen3": reasoning.THINK,
}
TOOLS: dict[str, ToolFormat | str] = {
    "deepseek_v3": json_calls.DEEPSEEK_V3,
    "deepseek_v3_1": json_calls.DEEPSEEK_V31,
    "deepseek_v31": json_calls.DEEPSEEK_V31,
    "glm45": xml_calls.GLM45,
    "gpt_oss": HARMONY,
    "harmony": HARMONY,
    "hermes": json_calls.HERMES,
    "kimi_k2": json_calls.KIMI_K2,
    "llama3_json": json_calls.LLAMA3,
    "llama4_pythonic": PYTHONIC,
    "mistral": json_calls.MISTRAL,
    "nemotron_deci": json_calls.NEMOTRON,
    "pythonic": PYTHONIC,
    "qwen3_coder": xml_calls.QWEN3_CODER,
}
_PROMPT_END = 16  # tokens; longer than any mark and a line break


class ParserNames(NamedTuple):
    """As the workers of a model name them; "": none, or unknown to this gateway."""

    reasoning: str = ""
    tools: str = ""


def agreed_parsers(workers: Iterable[Registration]) -> tuple[ParserNames, frozenset[ParserNames]]:
    """The parsers of a model, and all combinations that its workers name.

    The worker that registered first decides, so that all gateways agree.
    """
    decoding = [worker for worker in workers if worker.role in ("aggregated", "decode")]
    if not decoding:
        return ParserNames(), frozenset()
    first = min(decoding, key=lambda worker: (worker.epoch, worker.worker))
    named = frozenset(ParserNames(worker.reasoning_parser, worker.tool_call_parser) for worker in decoding)
    names = ParserNames(
        first.reasoning_parser if first.reasoning_parser in REASONING else "",
        first.tool_call_parser if first.tool_call_parser in TOOLS else "",
    )
    return names, named


def answer_parsing(
    parsers: ParserNames,
    tools: Sequence[dict[str, Any]] | None,
    prompt_end: Callable[[int], str],
    *,
    one_call: bool,
    begins: bool = True,
    prefilled: str | None = None,
) -> Parsing | None:
    """How a request's answer is to be parsed, for its record; None: not at all.

    Args:
        tools: in the prompt.
        prompt_end: from a number of tokens to the text of the last ones of the prompt.
        one_call: return the first call only.
        begins: the prompt ends with the beginning of an answer.
        prefilled: what the prompt has of the answer already, which continues it; None: nothing.
    """
    called = parsers.tools if tools else ""
    if not parsers.reasoning and not called:
        return None
    tags, calls = REASONING.get(parsers.reasoning), TOOLS.get(called)
    thinking = continued = False
    if prefilled is not None:
        thought = tags.open_thought(prefilled) if isinstance(tags, ReasoningTags) else None
        thinking, continued = thought is not None, thought is None or bool(thought.strip())
    elif isinstance(tags, ReasoningTags):
        thinking = tags.begun(prompt_end(_PROMPT_END), begins=begins)
    return Parsing(
        reasoning=parsers.reasoning,
        tools=called,
        thinking=thinking,
        one_call=bool(called) and one_call,
        texts=_text_parameters(tools or ()) if isinstance(calls, ToolFormat) and calls.needs_texts else {},
        prefilled=continued,
    )


def special_markers(parsing: Parsing) -> tuple[str, ...]:
    """Marks of the formats that may be special tokens, which the detokenizer must show."""
    tags, tools = REASONING.get(parsing.reasoning), TOOLS.get(parsing.tools)
    if HARMONY in (tags, tools):
        return SPECIAL
    marks = tags.special if isinstance(tags, ReasoningTags) else ()
    return marks + tools.special if isinstance(tools, ToolFormat) else marks


def parser_for(request: GenerateRequest, choice: int) -> AnswerParser:
    """A parser for the text of one choice. ``request.parsing`` is set."""
    parsing = request.parsing
    assert parsing is not None
    tags, tools = REASONING.get(parsing.reasoning), TOOLS.get(parsing.tools)
    chars = tools.id_chars if isinstance(tools, ToolFormat) else 0

    def call_id(index: int) -> str:
        digest = blake3(f"{request.id}.{choice}.{index}".encode()).hexdigest()
        return digest[:chars] if chars else "call_" + digest[:24]

    answer_format = AnswerFormat(
        reasoning=tags if isinstance(tags, ReasoningTags) else None,
        tools=tools if isinstance(tools, ToolFormat) else None,
        harmony=HARMONY in (tags, tools),
        harmony_calls=tools is not None,
        in_reasoning=parsing.thinking,
        prefilled=parsing.prefilled,
        joined=parsing.joined,
        one_call=parsing.one_call,
        texts=parsing.texts,
        stops=request.stop.strings,
        min_tokens=request.stop.min_tokens,
        stops_shown=request.stops_shown,
    )
    return AnswerParser(answer_format, call_id)


def text_stream(request: GenerateRequest, detokenizer: Detokenizer) -> TextStream:
    """The text of one choice. Of an answer that is parsed, with the marks, and the parser searches its stop strings."""
    stop = request.stop
    if request.parsing is None:
        return detokenizer.stream(stop.strings, min_tokens=stop.min_tokens, stops_shown=request.stops_shown)
    return detokenizer.marked_stream(detokenizer.special(special_markers(request.parsing)))


def stop_search(request: GenerateRequest, choice: int, detokenizer: Detokenizer) -> StopSearch:
    """Whether the tokens of one choice have completed a stop string, as every gateway will find it."""
    text = text_stream(request, detokenizer)
    return text if request.parsing is None else ContentSearch(text, parser_for(request, choice))


class ContentSearch:
    """Searches stop strings in the content of an answer that is parsed."""

    __slots__ = ("_parser", "_text")

    def __init__(self, text: TextStream, parser: AnswerParser) -> None:
        self._text = text
        self._parser = parser

    @property
    def stop(self) -> str | None:
        return self._parser.stop

    def push(self, token: int) -> None:
        self._parser.push(self._text.push(token))


def _text_parameters(tools: Iterable[dict[str, Any]]) -> TextParameters:
    """Parameters that are text, from the tools' schemas."""
    named: TextParameters = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") if isinstance(function, dict) else None
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        if isinstance(properties, dict) and isinstance(name := function.get("name"), str):
            found = {key: kinds(schema, parameters) for key, schema in properties.items()}
            texts = {key: "null" in each for key, each in found.items() if "string" in each <= {"string", "null"}}
            if texts:
                named[name] = texts
    return named
