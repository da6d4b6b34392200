"""Which parsers a model's chat template calls for."""

from schemas.parser_names import AUTO, NONE

_HARMONY = ("<|start|>", "<|channel|>", "<|message|>")
# what a template must hold; the first line that fits decides
_REASONING: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpt_oss", _HARMONY),
    ("mistral", ("[THINK]", "[/THINK]")),
    ("kimi", ("◁think▷", "◁/think▷")),
    ("granite", ("Here is my thought process",)),
    ("basic", ("</think>",)),  # it does nothing unless the prompt or the answer opens with <think>
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


def reasoning_parser(asked: str, template: str) -> str:
    """The format that a worker registers: as asked for, or detected from the template; "": none, or not certain."""
    return _resolved(asked, template, _REASONING)


def tool_call_parser(asked: str, template: str) -> str:
    """As ``reasoning_parser``, for tool calls."""
    return _resolved(asked, template, _TOOLS)


def _resolved(asked: str, template: str, known: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    if asked != AUTO:
        return "" if asked == NONE else asked
    return next((name for name, marks in known if all(mark in template for mark in marks)), "")
