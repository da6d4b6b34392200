"""Chat templates render as transformers' ``apply_chat_template`` renders them, without transformers."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from infra.model import modeldir
from infra.model.chat_template import ChatTemplate, PromptEnd, TemplateError

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "<a> & 'b'", "parameters": {"type": "object", "properties": {"x": {}}}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"x": "ü", "y": [1, None]}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b>"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "äöü 🙂\n"}],
    [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "thinking": "hm"},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
        {"role": "assistant", "content": "5", "reasoning": "easy"},
        {"role": "user", "content": "Thanks"},
    ],
]
SOURCES = {
    "trimmed blocks": "{% for m in messages %}\n  {% if m.role %}\n{{ m.role }}: {{ m.content }}\n  {% endif %}\n"
    "{% endfor %}",
    "json": "{{ tools | tojson }}{{ messages | tojson(indent=2) }}{{ messages | tojson(sort_keys=True) }}",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "namespace and dict": "{% set n = namespace(a=1) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}"
    "{{ n.a }}{{ dict(a=2)['a'] }}{{ dict.fromkeys(['k'], 3)['k'] }}{{ messages[0].content }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% set x = 1 %}{% endgeneration %}{% endfor %}"
    "{{ x is defined }}",
    "reasoning": "{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
    "variables": "{{ bos_token }}{{ messages[-1].content }}{{ mood }}{{ documents is none }}"
    "{{ add_generation_prompt }}",
    "the year": "{{ strftime_now('%Y') }}{{ messages[0]['content'] }}",
}


def theirs(source: str, messages: list[dict[str, Any]], tools: Any, **variables: Any) -> str:
    texts, _ = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=source, add_generation_prompt=True, **variables
    )
    return str(texts[0])


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=len)
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_it_renders_what_transformers_renders(source: str, tools: Any, messages: list[dict[str, Any]]) -> None:
    ours = ChatTemplate(source, {"bos_token": "<s>"})
    assert not ours.wants_parts
    assert ours.render(messages, tools, mood="calm") == theirs(source, messages, tools, bos_token="<s>", mood="calm")


@pytest.mark.parametrize("name", modeldir.BUNDLED)
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=len)
def test_the_bundled_models_are_asked_as_transformers_would(name: str, messages: list[dict[str, Any]]) -> None:
    template = modeldir.load(modeldir.MODELS / name).template
    assert template is not None
    assert template.render(messages, [TOOL]) == theirs(template.source, messages, [TOOL], **template._special_tokens)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system prompt') }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace(__class__=1) %}",
        "{% set n = namespace() %}{% set n.__init__ = 1 %}",
        "{{ ''.__class__.__mro__ }}",
        "{% for %}",
    ],
)
def test_what_transformers_refuses_is_refused(source: str) -> None:
    source += "{{ messages[0].content }}"
    with pytest.raises(Exception):  # noqa: B017 - of many kinds
        theirs(source, CONVERSATIONS[0], None)
    with pytest.raises(TemplateError):
        ChatTemplate(source, {})


def test_the_names_that_transformers_reserves_are_reserved() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    for name in ("messages", "tools", "documents", "conversations", "chat_template", "continue_final_message", "self"):
        with pytest.raises(TemplateError, match="these variables are set by the server"):
            template.render(CONVERSATIONS[0], None, **{name: 1})


@pytest.mark.parametrize("source", ["plain", "trimmed"])
@pytest.mark.parametrize(
    "content", ["Once", " Once upon a time \n", [{"type": "text", "text": "x"}, {"type": "text", "text": "Once "}]]
)
def test_a_final_message_is_cut_where_transformers_cuts_it(source: str, content: Any) -> None:
    trim = " | trim" if source == "trimmed" else ""
    text = "m.content[-1].text" if isinstance(content, list) else "m.content"
    template = "{% for m in messages %}{{ m.role }}: {{ " + text + trim + " }}<end>\n{% endfor %}"
    if isinstance(content, list):  # the template is probed with plain strings
        template = "{% for m in messages %}{{ m.role }}: {{ (m.content if m.content is string else m.content[-1].text)"
        template += trim + " }}<end>\n{% endfor %}"
    messages = [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": content}]
    expected, _ = render_jinja_template(conversations=[messages], chat_template=template, continue_final_message=True)
    assert ChatTemplate(template, {}).render(messages, None, PromptEnd.last_text) == expected[0]
    whole, _ = render_jinja_template(conversations=[messages], chat_template=template, add_generation_prompt=False)
    assert ChatTemplate(template, {}).render(messages, None, PromptEnd.last_message) == whole[0]
