"""From the names of parsers to what they read, and which a request's answer is read with."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from blake3 import blake3

from gateway.parsers import jsoncalls, markup, thoughts
from gateway.parsers.answer import AnswerParser
from gateway.parsers.formats import Texts, Tools
from gateway.parsers.harmony import SPECIAL
from gateway.parsers.pythonic import PYTHONIC
from gateway.parsers.thoughts import Tags
from schemas.fleet import Registration
from schemas.requests import GenerateRequest, Parsing

HARMONY = "harmony"  # one format for both: its parser reads thoughts and calls together

REASONING: dict[str, Tags | str] = {
    "basic": thoughts.THINK,
    "deepseek_r1": thoughts.IMPLIED_THINK,
    "deepseek_v3": thoughts.THINK,
    "glm45": thoughts.THINK,
    "gpt_oss": HARMONY,
    "granite": thoughts.GRANITE,
    "kimi": thoughts.KIMI,
    "kimi_k2": thoughts.THINK,
    "mistral": thoughts.MISTRAL,
    "nemotron_deci": thoughts.THINK,
    "qwen3": thoughts.THINK,
}
TOOLS: dict[str, Tools | str] = {
    "deepseek_v3": jsoncalls.DEEPSEEK_V3,
    "deepseek_v3_1": jsoncalls.DEEPSEEK_V31,
    "deepseek_v31": jsoncalls.DEEPSEEK_V31,
    "glm45": markup.GLM45,
    "gpt_oss": HARMONY,
    "harmony": HARMONY,
    "hermes": jsoncalls.HERMES,
    "kimi_k2": jsoncalls.KIMI_K2,
    "llama3_json": jsoncalls.LLAMA3,
    "llama4_pythonic": PYTHONIC,
    "mistral": jsoncalls.MISTRAL,
    "nemotron_deci": jsoncalls.NEMOTRON,
    "pythonic": PYTHONIC,
    "qwen3_coder": markup.QWEN3_CODER,
}
_PROMPT_END = 16  # tokens: more than the longest mark and a line break


class Parsers(NamedTuple):
    """What the workers of a model say that it writes; "": nothing, or what this gateway does not know."""

    reasoning: str = ""
    tools: str = ""


def agreed(workers: Iterable[Registration]) -> tuple[Parsers, frozenset[Parsers]]:
    """(the parsers for a model's answers, all that its workers name). The worker that is there longest decides, so
    that all gateways decide alike."""
    speaking = [worker for worker in workers if worker.role in ("aggregated", "decode")]
    if not speaking:
        return Parsers(), frozenset()
    first = min(speaking, key=lambda worker: (worker.epoch, worker.worker))
    named = frozenset(Parsers(worker.reasoning_parser, worker.tool_call_parser) for worker in speaking)
    known = Parsers(
        first.reasoning_parser if first.reasoning_parser in REASONING else "",
        first.tool_call_parser if first.tool_call_parser in TOOLS else "",
    )
    return known, named


def parsing(
    parsers: Parsers,
    tools: Sequence[dict[str, Any]] | None,
    prompt_end: Callable[[int], str],
    *,
    one_call: bool,
) -> Parsing | None:
    """What a request's record says of how its answer is read; None: as it is.

    Args:
        tools: that the model was told of.
        prompt_end: the text of so many of the prompt's last tokens.
    """
    called = parsers.tools if tools else ""
    if not parsers.reasoning and not called:
        return None
    tags, calls = REASONING.get(parsers.reasoning), TOOLS.get(called)
    return Parsing(
        reasoning=parsers.reasoning,
        tools=called,
        thinking=isinstance(tags, Tags) and tags.begun(prompt_end(_PROMPT_END)),
        one_call=bool(called) and one_call,
        texts=_texts(tools or ()) if isinstance(calls, Tools) and calls.texts else {},
    )


def special(parsing: Parsing) -> tuple[str, ...]:
    """Marks of its formats that may be special tokens."""
    tags, tools = REASONING.get(parsing.reasoning), TOOLS.get(parsing.tools)
    if HARMONY in (tags, tools):
        return SPECIAL
    marks = tags.special if isinstance(tags, Tags) else ()
    return marks + tools.special if isinstance(tools, Tools) else marks


def parser(request: GenerateRequest, choice: int) -> AnswerParser:
    """For the text of one choice, of a request that is to be parsed."""
    parsing = request.parsing
    assert parsing is not None
    tags, tools = REASONING.get(parsing.reasoning), TOOLS.get(parsing.tools)
    chars = tools.id_chars if isinstance(tools, Tools) else 0

    def call_id(index: int) -> str:
        digest = blake3(f"{request.id}.{choice}.{index}".encode()).hexdigest()
        return digest[:chars] if chars else "call_" + digest[:24]

    return AnswerParser(
        call_id,
        tags if isinstance(tags, Tags) else None,
        tools if isinstance(tools, Tools) else None,
        harmony=HARMONY in (tags, tools),
        calls=tools is not None,
        thinking=parsing.thinking,
        one_call=parsing.one_call,
        texts=parsing.texts,
    )


def _texts(tools: Iterable[dict[str, Any]]) -> Texts:
    """Which parameters are text, from the tools' schemas."""
    found: Texts = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") if isinstance(function, dict) else None
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        if isinstance(properties, dict) and isinstance(name := function.get("name"), str):
            texts = {key: null for key, schema in properties.items() if (null := _text_or_null(schema)) is not None}
            if texts:
                found[name] = texts
    return found


def _text_or_null(schema: Any) -> bool | None:
    """Whether a parameter may be null, if otherwise it is text; None: it may be something else."""
    if not isinstance(schema, dict):
        return None
    kinds = schema.get("type")
    if kinds is None and isinstance(options := schema.get("anyOf") or schema.get("oneOf"), list):
        kinds = [option.get("type") if isinstance(option, dict) else None for option in options]
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if any(kind not in ("string", "null") for kind in kinds) or "string" not in kinds:
        return None
    return "null" in kinds
