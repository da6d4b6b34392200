"""What a client's chat looks like to the model's template: parts, names, reasoning, tools, documents."""

import dataclasses
import itertools
import re
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.apis.chat import prompt
from penstock.gateway.apis.chat.bodies import parse_chat
from penstock.gateway.apis.chat.prompt import chat_prompt
from penstock.gateway.base.request_bodies import PrepareContext
from penstock.infra.text.chat_template import ChatTemplate, TemplateError
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


def said_by(name: str = "w", call_id: str = "call_0123456789", arguments: str = '{"a": "\u00e9"}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED = {"role": "user", "content": "q"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [said_by()]}
RESULT = {"role": "tool", "content": "r", "tool_call_id": "call_0123456789"}

# As the templates of DeepSeek V3, R1 and V3.1 write calls.
JOINS = (
    "{% for m in messages %}[{{ m.role }}:{% if m.role == 'assistant' and m.content is none %}"
    "{% for c in m.tool_calls %}{{ c.function.name + '=' + c.function.arguments }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}]{% endfor %}"
)
# As those of Mistral, Llama 3, Gemma and Qwen 3.5 refuse messages.
NINE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id|length != 9 %}"
    "{{ raise_exception('ids have length 9') }}{% endif %}<{{ c.id }}>{% endfor %}"
    "{% if m.role == 'tool' %}<{{ m.tool_call_id }}>{% endif %}{{ m.content }}{% endfor %}"
)
SINGLE = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls|length != 1 %}"
    "{{ raise_exception('single tool-calls') }}{% endif %}<{{ m.tool_calls[0].function.name }}>{% endif %}"
    "{{ m.content }}{% endfor %}"
)
ALTERNATES = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
FIRST_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}:{{ m.content }}]{% endfor %}"
)


def test_a_template_that_joins_arguments_to_its_text_gets_them_as_text(context: PrepareContext) -> None:
    prompt = shown(context, JOINS, messages=[ASKED, CALLED, RESULT])
    assert prompt == '[user:q][assistant:w={"a": "\u00e9"}][tool:r]'


def test_a_template_that_writes_calls_without_content_alone_gets_the_content_apart(context: PrepareContext) -> None:
    prompt = shown(context, JOINS, messages=[ASKED, {**CALLED, "content": "Well."}, RESULT])
    assert prompt == '[user:q][assistant:Well.][assistant:w={"a": "\u00e9"}][tool:r]'


# As Hermes, Mistral Nemo, Llama 3, Command R7B and strict templates write calls, without the text beside them.
CALLS_ALONE = (
    "{%% for m in messages %%}[{{ m.role }}]{%% if m.tool_calls %%}{%% for c in m.tool_calls %%}%s{{ c.function.name }}"
    "({{ c.function.arguments.a }}){%% endfor %%}{%% else %%}%s{{ m.content }}{%% endif %%}/{%% endfor %%}"
    "{%% if add_generation_prompt %%}[assistant]{%% endif %%}"
)
STRICT = (
    "{%% for m in messages %%}{%% if not loop.first and m.role == messages[loop.index0 - 1].role %%}"
    "{{ raise_exception('roles must alternate') }}{%% endif %%}{%% endfor %%}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CALLS_ALONE % ("<call>\n", ""), "Well.\n<call>\nw(é)<call>\nv(é)/"),
        (CALLS_ALONE % ("[CALLS]", ""), "Well.[CALLS]w(é)[CALLS]v(é)/"),
        (CALLS_ALONE % ('{"name": ', ""), 'Well./[assistant]{"name": w(é){"name": v(é)/'),
        (CALLS_ALONE % ("<|ACTION|>", "<|TEXT|>"), "<|TEXT|>Well./[assistant]<|ACTION|>w(é)<|ACTION|>v(é)/"),
        (CALLS_ALONE % ("<{{ c.id }}>", ""), "Well./[assistant]<0>w(é)<1>v(é)/"),
        ((STRICT + CALLS_ALONE) % ('{"name": ', ""), '{"name": w(é){"name": v(é)/'),
    ],
    ids=["tag", "token", "no mark", "mark of the text", "id before the name", "refused"],
)
def test_text_beside_calls_that_the_template_leaves_out_is_written_before_them(
    context: PrepareContext, source: str, expected: str
) -> None:
    """Nothing else in the prompt changes. Where the template refuses two answers in a row, the text is left out."""
    calls = {"tool_calls": [said_by(call_id="0"), said_by("v", "1")]}
    results = [{"role": "tool", "content": "r", "tool_call_id": each} for each in "01"]
    messages = [ASKED, {"role": "assistant", "content": "Well.", **calls}, *results[: 1 if "raise" in source else 2]]
    head, tail = "[user]q/[assistant]", "".join("[tool]r/" for _ in messages[2:])
    text = "<|TEXT|>" if "TEXT" in source else ""
    head, tail = head.replace("q", text + "q"), tail.replace("r/", text + "r/")
    assert shown(context, source, messages=messages) == f"{head}{expected}{tail}[assistant]"
    silent = [ASKED, {"role": "assistant", "content": "", **calls}, *messages[2:]]
    alone = expected.rpartition("Well./[assistant]")[2].replace("Well.\n", "").replace("Well.", "")
    assert shown(context, source, messages=silent) == f"{head}{alone}{tail}[assistant]"
    twice = shown(context, source, messages=[*messages, *messages[1:]])
    assert twice == f"{head}{expected}{tail}[assistant]{expected}{tail}[assistant]"
    omits = ChatTemplate(source, {}).omits
    assert ("text beside calls" in omits) == ("Well." not in expected)


@pytest.mark.parametrize(
    "compares",
    [
        "name == 'w'", "'w' == name", "not name != 'w'", "name in ['v', 'w']", "{'w': true}[name]", "'w' in name",
        "name.startswith('w')", "[{'name': 'w'}] | selectattr('name', 'equalto', name) | list", "name is eq('w')",
    ],
)  # fmt: skip
def test_a_template_that_compares_the_names_of_calls_writes_text_beside_them_nevertheless(compares: str) -> None:
    """As Llama's does, with the names of built-in tools."""
    written = "{% set name = c.function.name %}{{ name }}{% if " + compares + " %}!{% endif %}"
    source = (CALLS_ALONE % ("<call>\n", "")).replace("{{ c.function.name }}", written)
    calls = [{"id": "0", "type": "function", "function": {"name": "w", "arguments": {"a": 1}}}]
    prompt = ChatTemplate(source, {}).render([ASKED, {"role": "assistant", "content": "Well.", "tool_calls": calls}])
    assert prompt == "[user]q/[assistant]Well.\n<call>\nw!(1)/[assistant]"


def test_texts_beside_many_calls_take_one_pass_over_the_prompt() -> None:
    calls = [{"id": "0", "type": "function", "function": {"name": "w", "arguments": {"a": 1}}}]
    messages = [ASKED, *({"role": "assistant", "content": f"{at:01000}", "tool_calls": calls} for at in range(2000))]
    template = ChatTemplate(CALLS_ALONE % ("<call>\n", ""), {})
    began = time.process_time()
    prompt = template.render(messages)
    assert time.process_time() - began < 1.0, "one pass for each takes some seconds"
    assert re.findall(r"0(\d{4})\n<call>\nw\(1\)", prompt) == [f"{at:04}" for at in range(2000)]


def test_ids_of_calls_become_as_short_as_the_template_takes_them(context: PrepareContext) -> None:
    prompt = shown(context, NINE, messages=[ASKED, CALLED, RESULT])
    _, first, _, second, _ = re.split("[<>]", prompt)
    assert first == second
    assert re.fullmatch("[a-z0-9]{9}", first)
    short = [ASKED, {**CALLED, "tool_calls": [said_by(call_id="abcdefghi")]}, {**RESULT, "tool_call_id": "abcdefghi"}]
    assert shown(context, NINE, messages=short) == "q<abcdefghi><abcdefghi>r"


def test_calls_that_a_template_takes_one_by_one_have_their_results_behind_them(context: PrepareContext) -> None:
    calls = [said_by(name, f"call_{name}") for name in "abc"]
    results = [{"role": "tool", "content": f"={name}", "tool_call_id": f"call_{name}"} for name in "cab"]
    messages = [ASKED, {"role": "assistant", "content": "I look.", "tool_calls": calls}, *results, ASKED]
    assert shown(context, SINGLE, messages=messages) == "q<a>I look.<c>=c=a<b>=bq"
    assert shown(context, SINGLE, messages=[*messages[:2], ASKED]) == "q<a>I look.<b><c>q"


def test_messages_of_one_role_in_a_row_are_one_where_roles_must_alternate(context: PrepareContext) -> None:
    later = {"role": "user", "content": [{"type": "text", "text": "b"}]}
    assert shown(context, ALTERNATES, messages=[ASKED, later]) == "[user:q\n\nb]"


def test_a_system_message_that_the_template_refuses_is_the_users(context: PrepareContext) -> None:
    rules = {"role": "system", "content": "Be brief."}
    assert shown(context, ALTERNATES, messages=[rules, ASKED]) == "[user:Be brief.\n\nq]"
    answer = {"role": "assistant", "content": "a"}
    prompt = shown(context, FIRST_SYSTEM, messages=[rules, ASKED, answer, rules, ASKED])
    assert prompt == "[system:Be brief.][user:q][assistant:a][user:Be brief.][user:q]"


def test_system_messages_that_the_template_would_leave_out_are_written(context: PrepareContext) -> None:
    one = (
        "{{ messages[0].content }}|"
        "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }},{% endif %}{% endfor %}"
    )
    rules = {"role": "system", "content": "Be brief."}
    more = {"role": "system", "content": [{"type": "text", "text": "!"}]}
    assert shown(context, one, messages=[rules, more, ASKED]) == "Be brief.\n\n!|q,"
    answer = {"role": "assistant", "content": "a"}
    assert shown(context, one, messages=[rules, ASKED, answer, more, ASKED]) == "Be brief.|q,a,!,q,"


def test_several_calls_of_which_the_template_writes_the_first_stand_one_by_one(context: PrepareContext) -> None:
    first = (
        "{% for m in messages %}{% if m.tool_calls %}<{{ m.tool_calls[0].function.name }}>{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    calls = [said_by(name, f"call_{name}") for name in "ab"]
    results = [{"role": "tool", "content": f"={name}", "tool_call_id": f"call_{name}"} for name in "ab"]
    messages = [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    assert shown(context, first, messages=messages) == "q<a>=a<b>=b"


def test_a_developer_whom_the_template_mentions_and_does_not_write_is_system(context: PrepareContext) -> None:
    source = (
        "{# developer #}{% for m in messages %}{% if m.role in ('system', 'user') %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    messages = [{"role": "developer", "content": "Be brief. "}, ASKED]
    assert shown(context, source, messages=messages) == "Be brief. q"


def test_a_question_behind_a_result_is_answered_where_roles_must_alternate(context: PrepareContext) -> None:
    """As in Mistral's templates, which leave out calls and results when they look at the roles."""
    source = (
        "{% set talk = messages|rejectattr('role', 'equalto', 'tool')|rejectattr('tool_calls')|list %}"
        "{% for m in talk %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    )
    prompt = shown(context, source, messages=[ASKED, CALLED, RESULT, ASKED])
    assert prompt == "[user:q][assistant:][tool:r][assistant:Done.][user:q]"


def test_an_earlier_answer_without_content_is_left_out_where_it_is_refused(context: PrepareContext) -> None:
    source = (
        "{% for m in messages %}{% if not m.content %}{{ raise_exception('no content') }}{% endif %}"
        "[{{ m.role }}:{{ m.content }}]{% endfor %}"
    )
    empty = {"role": "assistant", "content": None}
    assert shown(context, source, messages=[ASKED, empty, ASKED]) == "[user:q][user:q]"


@pytest.mark.parametrize("function", [{"name": "w"}, {"name": "w", "description": None, "parameters": None}])
def test_a_tool_without_a_description_or_parameters_is_taken_by_any_template(
    context: PrepareContext, function: dict[str, Any]
) -> None:
    source = (
        "{% for t in tools or [] %}{{ t.function.name + t.function.description }}"
        "{{ t.function.parameters.properties|length }}{% endfor %}{{ messages[0].content }}"
    )
    assert shown(context, source, tools=[{"type": "function", "function": function}]) == "w0Hello"


def test_what_no_change_makes_acceptable_is_refused_in_the_templates_words(context: PrepareContext) -> None:
    refuses = "{% if messages|length > 1 %}{{ raise_exception('one message') }}{% endif %}{{ messages[0].content }}"
    answer = {"role": "assistant", "content": "a"}
    for messages in ([ASKED, CALLED, RESULT], [answer, answer], [answer, ASKED, answer], [RESULT, RESULT, ASKED]):
        with pytest.raises(ServingError) as caught:
            shown(context, refuses, messages=[*messages, CALLED, RESULT])
        assert "one message" in caught.value.message


@pytest.mark.parametrize("asked", [{"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}])
def test_thinking_is_switched_off_however_a_client_says_so(context: PrepareContext, asked: dict[str, Any]) -> None:
    source = "{{ enable_thinking }} {{ thinking }} {{ messages[0].content }}"
    assert shown(context, source, **asked) == "False False Hello"
    assert shown(context, source, thinking={"type": "enabled"}) == "True True Hello"
    assert shown(context, source, thinking={"type": "adaptive"}) == "  Hello"
    given = {"chat_template_kwargs": {"enable_thinking": True}}
    assert shown(context, source, **asked, **given) == "True  Hello"


CONTENT = st.sampled_from(["", "a", [{"type": "text", "text": "b"}, {"type": "image"}], [{"type": "image"}]])
ONE_CALL = st.builds(
    lambda name, call_id, arguments: {"id": call_id, "function": {"name": name, "arguments": arguments}},
    st.sampled_from("wv"),
    st.sampled_from(["call_0", "call_1", "abcdefghi", None]),
    st.sampled_from([{"x": 1}, "{", {}]),
)
SAID = st.builds(
    lambda role, content, calls, call_id: {
        "role": role,
        "content": content,
        **({"tool_calls": calls} if role == "assistant" and calls else {}),
        **({"tool_call_id": call_id} if role == "tool" else {}),
    },
    st.sampled_from(["system", "user", "assistant", "tool"]),
    CONTENT,
    st.lists(ONE_CALL, max_size=3),
    st.sampled_from(["call_0", "call_1", "abcdefghi"]),
)


def written(messages: list[dict[str, Any]]) -> tuple[list[str], int, list[str]]:
    """The texts, the number of images, and the names of calls."""
    contents = [
        [{"text": each["content"]}] if isinstance(each["content"], str) else each["content"] for each in messages
    ]
    parts = [part for content in contents for part in content]
    texts = [text for part in parts for text in part.get("text", "").split("\n\n") if text not in ("", "Done.")]
    calls = [call["function"]["name"] for each in messages for call in each.get("tool_calls", ())]
    return texts, sum("text" not in part for part in parts), calls


@given(st.lists(SAID, min_size=1, max_size=8))
def test_no_change_for_a_template_loses_a_text_an_image_or_a_call(messages: list[dict[str, Any]]) -> None:
    before = written(messages)
    for adapt in prompt._ADAPTATIONS:
        assert written(adapt(messages) or messages) == before, adapt
    together = messages
    for adapt in prompt._TOGETHER:
        together = adapt(together) or together
    assert written(together) == before

    def refuse(given: list[dict[str, Any]]) -> str:
        raise TemplateError(str(len(given)))

    with pytest.raises(TemplateError):
        prompt.rendered(messages, refuse)
    for first_call, joins, leads in itertools.product((False, True), repeat=3):
        template = SimpleNamespace(first_call=first_call, joins_system=joins, leads_system=leads)
        suited = prompt.suited(messages, cast(ChatTemplate, template))
        assert written(suited) == before
        assert not leads or all(each["role"] != "system" for each in suited[1:])
        assert not first_call or all(len(each.get("tool_calls", ())) < 2 for each in suited)
