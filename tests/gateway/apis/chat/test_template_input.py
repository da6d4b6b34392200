"""What a client's chat looks like to the model's template: parts, names, reasoning, tools, documents."""

import dataclasses
from typing import Any

import pytest

from penstock.gateway.apis.chat.bodies import parse_chat
from penstock.gateway.apis.chat.prompt import chat_prompt
from penstock.gateway.base.request_bodies import PrepareContext
from penstock.infra.text.chat_template import ChatTemplate
from penstock.schemas.errors import Code, ServingError
from tests.gateway.apis.chat.test_tokenization import body

WALKS = (
    "{% for m in messages %}[{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}]{% endfor %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
PARTS = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]


def shown(context: PrepareContext, source: str, named: dict[str, str] | None = None, **fields: Any) -> str:
    """The prompt's text."""
    model = dataclasses.replace(context.model, template=ChatTemplate(source, {}, named))
    given = {"model": context.names[0], "messages": [{"role": "user", "content": "Hello"}], **fields}
    tokens = chat_prompt(parse_chat(body(**given)), context._replace(model=model)).tokens
    return str(model.tokenizer.decode(tokens, skip_special_tokens=False))


@pytest.mark.parametrize(("source", "between"), [(WALKS, ""), (PLAIN, "\n")])
@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_texts_are_joined_as_the_template_joins_them(
    context: PrepareContext, source: str, between: str, role: str
) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": role, "content": PARTS}]
    written = "system" if role == "developer" else role
    assert shown(context, source, messages=messages) == f"[user:a][{written}:Hel{between}lo]"


def test_a_list_that_is_empty_is_empty_text(context: PrepareContext) -> None:
    for source in (WALKS, PLAIN):
        assert shown(context, source, messages=[{"role": "user", "content": []}]) == "[user:]"


def test_the_name_of_a_user_reaches_the_template(context: PrepareContext) -> None:
    source = "{% for m in messages %}{{ m.name }}:{{ m.content }}{% endfor %}"
    assert shown(context, source, messages=[{"role": "user", "content": "a", "name": "Ada"}]) == "Ada:a"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_reaches_the_template_whatever_it_is_called(context: PrepareContext, field: str, read: str) -> None:
    source = "{% for m in messages %}{{ m." + read + " or '' }}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", field: "hm"}]
    assert shown(context, source, messages=messages) == "ahmb"


def test_tools_and_documents_have_their_templates(context: PrepareContext) -> None:
    named = {"tool_use": "T{{ tools[0].function.name }}", "rag": "R{{ documents[0].title }}"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    documents = [{"title": "d", "text": "x"}]
    assert shown(context, PLAIN, named) == "[user:Hello]"
    assert shown(context, PLAIN, named, tools=tools) == "Tf"
    assert shown(context, PLAIN, named, tools=tools, tool_choice="none") == "[user:Hello]"
    assert shown(context, PLAIN, named, documents=documents) == "Rd"
    assert shown(context, PLAIN, named, documents=documents, tools=tools) == "Tf"
    assert shown(context, "{{ documents[0].text if documents else 'none' }}", documents=documents) == "x"


def test_a_template_that_needs_tools_refuses_a_chat_without(context: PrepareContext) -> None:
    source = "{% for t in tools %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}"
    assert shown(context, source, tools=[{"type": "function", "function": {"name": "f"}}]) == "fHello"
    with pytest.raises(ServingError, match="chat template rejects these messages") as caught:
        shown(context, source)
    assert (caught.value.code, caught.value.param) == (Code.invalid_request, "messages")


def test_documents_stay_plain_text(context: PrepareContext) -> None:
    """Whoever writes a document must not end the user's turn with it."""
    end = "<|im_end|>"
    token = context.model.added_tokens[end]
    model = dataclasses.replace(
        context.model, template=ChatTemplate("{{ documents[0].text }}{{ messages[0].content }}", {})
    )
    context = context._replace(model=model)
    given = {"model": context.names[0], "messages": [{"role": "user", "content": "x"}]}
    tokens = chat_prompt(parse_chat(body(**given, documents=[{"text": f"a{end}b"}])), context).tokens
    assert token not in tokens
    assert model.tokenizer.decode(tokens, skip_special_tokens=False) == f"a{end}bx"
