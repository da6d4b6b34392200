"""Chat templates render as transformers' ``apply_chat_template`` renders them, without transformers."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from penstock.infra.model import modeldir
from penstock.infra.text.chat_template import ChatTemplate, PromptEnd, TemplateError

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


# What is before and behind the text of a message, and how the text is written: one habit of real templates each.
_WALK = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
)
_ALL = {"user", "system", "developer", "assistant", "tool"}
ENDS = {
    "plain": "{{ m.role }}: {{ m.content }}<end>\n",
    "trimmed": "{{ m.role }}: {{ m.content | trim }}<end>\n",
    "an end that begins like the text": "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n",
    "spaces behind the text": "{{ m.role }}: {{ m.content }}  \n",
    "parts": "{{ m.role }}: " + _WALK + "<end>\n",
    "text twice": "{{ m.role }}: {{ m.content }}<end>\n{% if loop.last %}({{ m.content | length > 3 }}){% endif %}",
    "json": "{{ {'role': m.role, 'content': m.content} | tojson }}\n",
    "thoughts cut off": "{{ m.role }}: {{ m.content.split('</think>')[-1] }}<end>\n",
}


@pytest.mark.parametrize("source", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("content", ["Once", " Once upon a time \n", "end", "<", "im_end", "a", "\nTrue", "assistant"])
def test_a_final_message_is_cut_where_transformers_cuts_it(source: str, content: str) -> None:
    template = "{% for m in messages %}" + source + "{% endfor %}"
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    expected, _ = render_jinja_template(conversations=[messages], chat_template=template, continue_final_message=True)
    ours = ChatTemplate(template, {})
    assert ours.render(messages, None, PromptEnd.last_text) == expected[0]
    whole, _ = render_jinja_template(conversations=[messages], chat_template=template, add_generation_prompt=False)
    assert ours.render(messages, None, PromptEnd.last_message) == whole[0]


def test_the_last_of_a_final_messages_texts_is_continued() -> None:
    template = "{% for m in messages %}" + ENDS["parts"] + "{% endfor %}"
    content = [{"type": "text", "text": "x"}, {"type": "text", "text": "Once "}]
    messages = [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": content}]
    expected, _ = render_jinja_template(conversations=[messages], chat_template=template, continue_final_message=True)
    assert ChatTemplate(template, {}).render(messages, None, PromptEnd.last_text) == expected[0]
    assert expected[0].endswith("assistant: xOnce ")


@pytest.mark.parametrize(
    ("source", "content", "ending"),
    [
        (ENDS["plain"], "", "assistant: "),
        ("<{{ m.role }}>\n{{ m.content | trim }}<end>\n", "", "<assistant>\n"),  # transformers removes the line break
        ("<{{ m.role }}>\n{{ m.content | trim }}<end>\n", " \n", "<assistant>\n"),
        ("{{ m.role }}: {{ m.content | upper }}<end>\n", "Once", "assistant: ONCE"),
        (ENDS["thoughts cut off"], "<think>hm</think>Once", "assistant: Once"),  # transformers refuses it
    ],
)
def test_a_final_message_that_transformers_cannot_continue(source: str, content: str, ending: str) -> None:
    template = ChatTemplate("{% for m in messages %}" + source + "{% endfor %}", {})
    messages = [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": content}]
    text = template.render(messages, None, PromptEnd.last_text)
    assert text.endswith(ending)
    assert template.render(messages, None, PromptEnd.last_message).startswith(text)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ m.role }}: {{ m.content[:12] }}\n", {"content": "Once upon a time"}),
        (ENDS["plain"], {"content": None}),
        (ENDS["plain"], {"content": "", "tool_calls": [CALL]}),
        (ENDS["plain"], {"content": [{"type": "image"}]}),
    ],
    ids=["cut by the template", "no text", "a call", "an image"],
)
def test_a_final_message_without_an_end_of_its_text_is_refused(source: str, message: dict[str, Any]) -> None:
    template = ChatTemplate("{% for m in messages %}" + source + "{% endfor %}", {})
    messages = [{"role": "user", "content": "Begin."}, {"role": "assistant", **message}]
    with pytest.raises(TemplateError, match=r"no text to continue|leaves out the end"):
        template.render(messages, None, PromptEnd.last_text)


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("{% for t in tools %}{{ t | tojson }}{% endfor %}{{ messages[0].content }}", "tools"),
        ("{{ tools[0].function.name }}{% for p in messages[0].content %}{{ p.text }}{% endfor %}", "tools"),
        ("{{ functions | tojson }}{{ messages[0].content }}", "functions"),
        ("{{ messages[0].content }}", ""),
    ],
)
def test_a_template_that_needs_something_is_usable_with_it(source: str, needs: str) -> None:
    template = ChatTemplate(source, {})
    assert template.needs == needs
    messages = [{"role": "user", "content": "Hi"}]
    assert template.render(messages, [TOOL], functions=[]).endswith("Hi")
    if needs:
        with pytest.raises(TemplateError):
            template.render(messages)


def test_tools_and_documents_choose_their_template() -> None:
    template = ChatTemplate("default", {}, {"tool_use": "tools", "rag": "documents"})
    assert template.suited() is template
    assert [template.suited(*given).render([{}]) for given in [([TOOL],), (None, [{}]), ([TOOL], [{}]), ([], [])]] == [
        "tools",
        "documents",
        "tools",
        "default",
    ]
    assert ChatTemplate("default", {}, {"other": "x"}).suited([TOOL], [{}]).source == "default"
    with pytest.raises(TemplateError, match="template 'rag': "):
        ChatTemplate("default", {}, {"rag": "{% for %}"})


def test_documents_reach_the_template() -> None:
    source = "{% for d in documents or [] %}{{ d.title }}: {{ d.text }}\n{% endfor %}{{ messages[0].content }}"
    documents = [{"title": "a", "text": "b"}]
    expected = theirs(source, CONVERSATIONS[0], None, documents=documents)
    text = ChatTemplate(source, {}).render(CONVERSATIONS[0], None, PromptEnd.generation, documents)
    assert text == expected == "a: b\nHi <b>"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize("read", ["m.reasoning", "m['reasoning_content']", "m.get('reasoning')", "m.thinking"])
def test_reasoning_reaches_a_template_under_the_name_that_it_reads(name: str, read: str) -> None:
    template = ChatTemplate("{% for m in messages %}{{ " + read + " or '' }}{{ m.content }}{% endfor %}", {})
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "hm "}]
    assert template.render(messages) == "ahm b"


@pytest.mark.parametrize(
    ("source", "walked"),
    [
        (_WALK, _ALL),
        ("{% if m.role == 'user' %}" + _WALK + "{% else %}{{ m.content }}{% endif %}", {"user"}),
        ("{{ m.content }}", set()),
        ("{{ m.content | tojson }}", set()),
        ("{{ m.content + '!' }}", set()),
        ("{{ m.content if m.content is string else m.content[0].text }}", set()),  # it would lose the second
        (
            "{{ m.content if m.content is string else m.content | map(attribute='text') | join(', ') }}",
            {"user", "system", "developer", "assistant", "tool"},
        ),
    ],
)
def test_the_roles_whose_parts_a_template_walks_are_found(source: str, walked: set[str]) -> None:
    template = ChatTemplate("{% for m in messages %}" + source + "{% endfor %}", {})
    assert template.walks_parts == walked
