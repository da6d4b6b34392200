"""Names of the formats in which models write reasoning and tool calls.

A worker registers its own (``--reasoning-parser``, ``--tool-call-parser``); ``infra.model.parsers`` reads
them. The names are those of vLLM, SGLang and Dynamo.
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
