"""Which reasoning and tool-call parsers a model needs, detected from its chat template."""

from schemas.parser_names import AUTO, NONE

_HARMONY = ("<|start|>", "<|channel|>", "<|message|>")
# What the template must contain. The first entry that fits decides.
_REASONING: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt_oss", _HARMONY),
    ("mistral", ("[THINK]", "[/THINK]")),
    ("kimi", ("◁think▷", "◁/think▷")),
    ("granite", ("Here is my thought process",)),
    ("basic", ("</think>",)),  # no effect unless the prompt or the answer starts with <think>
)
_TOOLS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt_oss", _HARMONY),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v3_1", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("nemotron_deci", ("<TOOLCALL>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>", "</tool_call>", "arguments")),
    ("llama3_json", ("<|start_header_id|>", '"parameters": dictionary of argument name')),
    ("pythonic", ("[func_name1(",)),
)


def reasoning_parser(requested: str, template: str) -> str:
    """The parser that a worker registers: the requested one, or the detected one; "": none, or not certain."""
    return _resolved(requested, template, _REASONING)


def tool_call_parser(requested: str, template: str) -> str:
    """As ``reasoning_parser``, for tool calls."""
    return _resolved(requested, template, _TOOLS)


def _resolved(requested: str, template: str, markers: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    if requested != AUTO:
        return "" if requested == NONE else requested
    return next((name for name, marks in markers if all(mark in template for mark in marks)), "")
