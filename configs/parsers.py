"""Names of the formats in which models write their thoughts and tool calls, and which one a chat template tells of.

Workers say which they are (``--reasoning-parser``, ``--tool-call-parser``); ``gateway.parsers`` reads them. The names
are those that users of vLLM, SGLang and Dynamo know.
"""

from typing import Literal

NONE = "none"
AUTO = "auto"

ReasoningParser = Literal[
    "auto",
    "none",
    "basic",
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "gpt_oss",
    "granite",
    "kimi",
    "kimi_k2",
    "mistral",
    "nemotron_deci",
    "qwen3",
]
ToolCallParser = Literal[
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v3_1",
    "deepseek_v31",
    "glm45",
    "gpt_oss",
    "harmony",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "llama4_pythonic",
    "mistral",
    "nemotron_deci",
    "pythonic",
    "qwen3_coder",
]

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
    """The format that a worker registers: as asked for, or as the template tells; "": none, or not certain."""
    return _resolved(asked, template, _REASONING)


def tool_call_parser(asked: str, template: str) -> str:
    """As ``reasoning_parser``, for tool calls."""
    return _resolved(asked, template, _TOOLS)


def _resolved(asked: str, template: str, known: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    if asked != AUTO:
        return "" if asked == NONE else asked
    return next((name for name, marks in known if all(mark in template for mark in marks)), "")
