"""The demo model's chat format: its Jinja template, and the same in Python for training, where speed counts."""

import json
from collections.abc import Sequence
from typing import Any

END, START, STOP, IMAGE = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"
SPECIAL = (END, START, STOP, IMAGE)
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # one token each, and part of the text

TEMPLATE = """{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}
{%- for part in content -%}
{%- if part.type == 'text' -%}{{ part.text }}
{%- elif part.type in ('image', 'image_url', 'input_image') -%}<image>
{% endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ text(messages[0].content) }}

{% endif %}# Tools
{%- for tool in tools -%}
{{ '\\n' }}{{ tool | tojson }}
{%- endfor -%}
<|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ text(messages[0].content) }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
<|im_start|>{{ message.role }}
{{ text(message.content) }}<|im_end|>
{% elif message.role == 'assistant' -%}
<|im_start|>assistant
{{ text(message.content).split('</think>')[-1].lstrip('\\n') }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
<tool_call>{"name": "{{ function.name }}", "arguments": {{ function.arguments if function.arguments is string else
function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|im_end|>
{% elif message.role == 'tool' -%}
<|im_start|>tool
{{ text(message.content) }}<|im_end|>
{% elif message.role != 'system' -%}
{{ raise_exception('roles are system, user, assistant and tool, not ' + message.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking -%}
<think>
{% endif -%}
{% endif -%}
"""


def segments(messages: Sequence[tuple[str, str]], tools: Sequence[dict[str, Any]] = ()) -> list[tuple[str, bool]]:
    """The conversation's text in pieces, and whether the assistant says them; they tokenise apart as they do joined."""
    pieces: list[tuple[str, bool]] = []
    said = ""
    if tools:
        system = f"{messages[0][1]}\n\n" if messages[0][0] == "system" else ""
        listed = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
        said = f"{START}system\n{system}# Tools{listed}{STOP}\n"
    for role, text in messages:
        if role == "assistant":
            pieces += [(f"{said}{START}assistant\n", False), (f"{text}{STOP}", True)]
            said = "\n"
        elif not (tools and role == "system"):
            said += f"{START}{role}\n{text}{STOP}\n"
    return [*pieces, (said, False)] if said.strip() else pieces


def prompt(messages: Sequence[tuple[str, str]], tools: Sequence[dict[str, Any]] = ()) -> str:
    """What the model is given to answer the last message."""
    return "".join(text for text, _ in segments(messages, tools)) + f"{START}assistant\n"
