import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.apis.chat.bodies import ChatCompletionRequest, parse_chat, parse_completion
from penstock.gateway.apis.chat.prompt import chat_prompt, media_parts, single_prompt, template_messages
from penstock.gateway.base.request_bodies import PrepareContext
from penstock.gateway.media.sources import MediaPart
from penstock.infra.model import modeldir
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import Priority
from tests.properties import examples
from tests.tiny_model import write

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}


def chat(**options: Any) -> ChatCompletionRequest:
    return parse_chat(json.dumps({**CHAT, **options}).encode())


def refusal(**options: Any) -> ServingError:
    with pytest.raises(ServingError) as caught:
        template_messages(chat(**options).messages)
    assert caught.value.code.status == 400
    return caught.value


LIMITS: list[tuple[str, Any, str]] = [
    ("temperature", 2.1, "2.0"),
    ("temperature", -0.1, "0.0"),
    ("temperature", "1", "float"),
    ("top_p", 0, "0"),
    ("top_p", 1.5, "1.0"),
    ("top_k", -2, "-1"),
    ("min_p", 1.01, "1.0"),
    ("max_tokens", 0, "1"),
    ("max_tokens", 1.5, "int"),
    ("max_completion_tokens", 0, "1"),
    ("max_tokens", 10**30, "2147483648"),
    ("min_tokens", -1, "0"),
    ("seed", 2**63, "9223372036854775807"),
    ("presence_penalty", 2.5, "2.0"),
    ("frequency_penalty", -2.5, "-2.0"),
    ("repetition_penalty", 0, "0"),
    ("logit_bias", {"5": 101}, "100"),
    ("logit_bias", {"x": 1}, "int"),
    ("logit_bias", {"-1": 1}, "0"),
    ("n", 0, "1"),
    ("n", 129, "128"),
    ("stop", "", "1"),
    ("stop", [""], "1"),
    ("stop", ["x"] * 17, "16"),
    ("stop", "x" * 257, "256"),
    ("stop_token_ids", [-1], "0"),
    ("top_logprobs", 21, "20"),
    ("stream", "yes", "bool"),
    ("timeout_s", 0, "0"),
    ("timeout_s", 3601, "3600"),
    ("deadline_s", -1, "0"),
    ("priority", "urgent", "urgent"),
    ("priority", 3, "3"),
    ("worker", "a.b", "A-Za-z"),
    ("worker", "*", "A-Za-z"),
    ("worker", "w1\n", "A-Za-z"),
    ("messages", [], "1"),
    ("messages", "hi", "array"),
    ("messages", [{"role": "<king>", "content": "x"}], "A-Za-z"),
    ("messages", [{"role": "user", "content": 5}], "str"),
    ("messages", [{"role": "user"}], "missing"),
    ("model", 5, "str"),
    ("model", "m" * 513, "512"),
]


@pytest.mark.parametrize(("field", "value", "limit"), LIMITS)
def test_a_violation_names_the_field_and_the_limit(field: str, value: Any, limit: str) -> None:
    error = refusal(**{field: value})
    assert error.code is Code.invalid_request
    assert (error.param or "").startswith(field)
    assert field in error.message
    assert limit in error.message


UNSUPPORTED: list[tuple[str, Any, str]] = [
    ("modalities", ["text", "audio"], "modalities"),
    ("messages", [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}], "messages"),
    ("messages", [{"role": "system", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}], "messages"),
    ("messages", [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages"),
]


@pytest.mark.parametrize(("field", "value", "param"), UNSUPPORTED)
def test_what_is_not_served_is_refused_and_not_dropped(field: str, value: Any, param: str) -> None:
    error = refusal(**{field: value})
    assert error.code is Code.unsupported
    assert (error.param or "").startswith(param)


def test_an_unserved_content_part_is_named() -> None:
    error = refusal(messages=[{"role": "user", "content": [{"type": "input_audio"}]}])
    assert "input_audio" in error.message
    assert error.param == "messages[0].content[0].type"


def test_a_choice_without_tools_is_held_to_the_same() -> None:
    for choice in ("required", "bogus", {"type": "function", "function": {"name": "f"}}):
        assert refusal(tool_choice=choice).param == "tool_choice"
        assert refusal(tools=[], tool_choice=choice).param == "tool_choice"
    assert chat(tool_choice="auto").tool_choice == "auto"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({}, "function"),
        ({"type": "function"}, "function"),
        ({"type": "function", "function": None}, "function"),
        ({"type": "function", "name": "f", "parameters": {}}, "function"),
        ({"type": "web_search"}, "type"),
        ({"type": ["function"], "function": {"name": "f"}}, "type"),
        ({"type": "function", "function": {"description": "no name"}}, "function.name"),
        ({"type": "function", "function": {"name": 5}}, "function.name"),
        ({"type": "function", "function": {"name": "a b"}}, "function.name"),
        ({"type": "function", "function": {"name": "x" * 257}}, "function.name"),
        ({"type": "function", "function": {"name": "f", "parameters": "bad"}}, "function.parameters"),
    ],
)
def test_a_tool_whose_calls_could_not_be_read_is_refused_with_its_place(tool: Any, param: str) -> None:
    good = {"type": "function", "function": {"name": "ns.get-x_1", "parameters": None, "strict": True}}
    assert chat(tools=[good]).tools == [good]
    error = refusal(tools=[good, tool])
    assert error.param == f"tools[1].{param}"
    assert error.code.status == 400


def test_an_answer_of_reasoning_alone_can_be_sent_back() -> None:
    cut = {"role": "assistant", "content": None, "reasoning_content": "so far"}
    body = chat(messages=[{"role": "user", "content": "a"}, cut, {"role": "user", "content": "b"}])
    assert template_messages(body.messages)[1] == {"role": "assistant", "content": "", "reasoning_content": "so far"}


@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_an_answer_or_a_tools_output_may_be_empty(role: str) -> None:
    for content in ({}, {"content": None}, {"content": []}):
        body = chat(messages=[{"role": "user", "content": "a"}, {"role": role, **content}])
        assert template_messages(body.messages)[1] == {"role": role, "content": ""}


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_question_may_not(role: str) -> None:
    assert refusal(messages=[{"role": role, "content": None}]).param == "messages[0].content"


def test_parts_of_text_may_be_called_as_in_other_apis() -> None:
    parts = [
        {"type": "input_text", "text": "a"},
        {"type": "output_text", "text": "b", "annotations": []},
        {"type": "refusal", "refusal": "c"},
    ]
    body = chat(messages=[{"role": "assistant", "content": parts}])
    assert template_messages(body.messages) == [{"role": "assistant", "content": "a\nb\nc"}]
    walked = template_messages(body.messages, frozenset({"assistant"}))[0]["content"]
    assert walked == [{"type": "text", "text": text} for text in "abc"]
    assert refusal(messages=[{"role": "assistant", "content": [{"type": "refusal"}]}]).param is not None


def test_a_call_in_the_history_needs_no_type() -> None:
    call = {"id": "c", "type": None, "index": 0, "function": {"name": "w", "arguments": "{}"}}
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    assert template_messages(chat(messages=said).messages)[1]["tool_calls"][0]["type"] == "function"


def test_fields_depend_on_each_other() -> None:
    assert refusal(top_logprobs=2).param == "top_logprobs"
    assert refusal(stream_options={"include_usage": True}).param == "stream_options"
    assert refusal(min_tokens=5, max_tokens=4).param == "min_tokens"


def test_unknown_fields_and_nulls_are_tolerated() -> None:
    body = chat(metadata={"a": [1]}, store=True, temperature=None, stop=None, stream=None, logit_bias=None)
    assert body.temperature is None


def test_every_option_is_read() -> None:
    options = {
        "max_completion_tokens": 5,
        "min_tokens": 1,
        "temperature": 1,
        "top_k": 3,
        "logit_bias": {"7": -100},
        "n": 2,
        "stop": ["a", "b"],
        "priority": "batch",
        "timeout_s": 1.5,
        "worker": "w-1_a",
        "cache_salt": "tenant",
    }
    body = chat(**options)
    assert (body.logit_bias, body.priority, body.stop) == ({7: -100.0}, Priority.batch, ["a", "b"])
    assert (body.worker, body.cache_salt, body.timeout_s) == ("w-1_a", "tenant", 1.5)


def test_text_parts_become_one_string_and_tool_arguments_an_object() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    body = chat(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
        ]
    )
    call["function"] = {"name": "f", "arguments": {"x": 1}}
    assert template_messages(body.messages) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Pa', '{"city": "Pa'),
        ("{", "{"),
        ("[1]", "[1]"),
        ('"x"', '"x"'),
        ("[" * 5000, "[" * 5000),
        ([1, "é"], '[1, "é"]'),
        (None, {}),
        ("null", {}),
        ("", {}),
        ('{"text": "one\ntwo"}', {"text": "one\ntwo"}),
        (r'{"text": "\ud83d\ude00, \ud83d"}', {"text": "😀, \ufffd"}),
        ({"x": 1}, {"x": 1}),
    ],
)
def test_arguments_that_are_no_object_reach_the_template_as_they_stand(arguments: Any, shown: Any) -> None:
    """A call that a limit cut off, or that the model wrote badly, must not end the conversation."""
    call = {"function": {"name": "f", "arguments": arguments}}
    [message] = template_messages(chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages)
    assert message["tool_calls"][0]["function"]["arguments"] == shown


def test_a_template_that_takes_objects_alone_gets_broken_arguments_in_one(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}{% endfor %}"
        "{{ m.content }}{% endfor %}"
    )
    context = PrepareContext(modeldir.load(write(tmp_path / "m", template=template)), ("tiny",), "gw1")
    calls = [{"function": {"name": "f", "arguments": text}} for text in ('{"a": 1}', '{"city": "Pa')]
    body = chat(messages=[{"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "2"}])
    tokens = chat_prompt(body, context).tokens
    assert context.model.tokenizer.decode(tokens) == 'a=1;arguments={"city": "Pa;2'


@pytest.mark.parametrize(
    ("prompt", "expected"), [("a", "a"), ([1, 2], [1, 2]), (["a"], "a"), ([[1, 2]], [1, 2]), ([5], [5])]
)
def test_a_prompt_is_text_or_token_ids_perhaps_in_a_list_of_one(prompt: Any, expected: Any) -> None:
    assert single_prompt(parse_completion(json.dumps({**TEXT, "prompt": prompt}).encode())) == expected


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [1, "a"], []])
def test_several_prompts_are_refused_with_the_limit(prompt: Any) -> None:
    with pytest.raises(ServingError, match="limit is 1 prompt") as caught:
        single_prompt(parse_completion(json.dumps({**TEXT, "prompt": prompt}).encode()))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(("field", "value"), [("suffix", "x"), ("best_of", 2)])
def test_text_options_that_are_not_served_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ServingError) as caught:
        parse_completion(json.dumps({**TEXT, field: value}).encode())
    assert (caught.value.code, caught.value.param) == (Code.unsupported, field)


def test_text_options_at_their_defaults_are_accepted() -> None:
    body = parse_completion(
        json.dumps({**TEXT, "echo": False, "suffix": None, "best_of": 2, "n": 2, "logprobs": 0}).encode()
    )
    assert body.logprobs == 0


BROKEN = [
    b"",
    b"null",
    b"[]",
    b"{",
    b'{"model": "m"}',
    b"\xff\xfe",
    b'{"model": "\xff", "messages": []}',
    b'{"model": "\\ud800", "messages": []}',
    b'{"model": "m", "temperature": NaN}',
    b'{"model": "m", "temperature": Infinity}',
    b'{"model": "m", "temperature": 1e999}',
    b'{"model": "m", "max_tokens": ' + b"9" * 10_000 + b"}",
    b'{"model": "m", "x": ' + b"[" * 100_000,
    b'{"model": "m", "tools": ' + b'[{"a":' * 50_000,
    b'{"model": "m", "model": 5, "messages": []}',
]


@pytest.mark.parametrize("data", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_body_is_a_serving_error(data: bytes) -> None:
    for parse in (parse_chat, parse_completion):
        with pytest.raises(ServingError) as caught:
            parse(data)
        assert caught.value.code is Code.invalid_request
        assert len(caught.value.message) < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from([*ChatCompletionRequest.__struct_fields__, "prompt", "echo", "suffix", "best_of"])


@examples(200)
@given(st.dictionaries(FIELDS, JSON, max_size=6), st.booleans(), st.data())
def test_no_body_raises_anything_but_a_serving_error(fields: dict[str, Any], whole: bool, data: st.DataObject) -> None:
    base = {**CHAT, **TEXT} if data.draw(st.booleans()) else {}
    encoded = json.dumps({**base, **fields}).encode()
    if not whole:
        at = data.draw(st.integers(0, len(encoded)))
        encoded = encoded[:at] + data.draw(st.binary(max_size=3)) + encoded[at + 1 :]
    try:
        template_messages(parse_chat(encoded).messages)
    except ServingError:
        pass
    try:
        single_prompt(parse_completion(encoded))
    except ServingError:
        pass


def test_images_are_collected_in_their_order_and_text_between_them_is_kept() -> None:
    def at(url: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": url}}

    def content_of(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text}

    body = chat(
        messages=[
            {"role": "user", "content": [at("a"), content_of("x"), content_of("y"), at("b"), at("c")]},
            {"role": "user", "content": "plain"},
            {"role": "user", "content": [content_of("z"), {"type": "image_embeds", "image_embeds": "d"}]},
        ]
    )
    image = {"type": "image"}
    assert [message["content"] for message in template_messages(body.messages)] == [
        [image, content_of("x\ny"), image, image],
        "plain",
        [content_of("z"), image],
    ]
    assert media_parts(body.messages) == [
        MediaPart("messages[0].content[0].image_url", "a"),
        MediaPart("messages[0].content[3].image_url", "b"),
        MediaPart("messages[0].content[4].image_url", "c"),
        MediaPart("messages[2].content[1].image_embeds", "d", embedding=True),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes."}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "H"}, {"type": "text", "text": "m."}]},
                     {"type": "text", "text": "Yes."}]},
        {"content": [{"type": "reasoning", "text": "Hm."}, {"type": "redacted_thinking", "data": "x"},
                     {"type": "text", "text": "Yes."}]},
        {"content": "Yes.", "reasoning_details": [{"type": "reasoning.text", "text": "Hm.", "signature": None},
                                                  {"type": "reasoning.encrypted", "data": "x"}]},
        {"content": "Yes.", "reasoning_details": [{"type": "reasoning.summary", "summary": "Hm."}]},
        {"content": "Yes.", "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]},
        {"content": "Yes.", "reasoning": "Hm.", "thinking_blocks": [{"type": "thinking", "thinking": "other"}]},
        {"content": [{"type": "thinking", "thinking": 5}, {"type": "text", "text": "Yes."}], "reasoning": "Hm."},
    ],
)  # fmt: skip
def test_reasoning_that_clients_return_in_another_form_reaches_the_template(fields: dict[str, Any]) -> None:
    said = [*CHAT["messages"], {"role": "assistant", **fields}, *CHAT["messages"]]
    turn = template_messages(chat(messages=said).messages)[1]
    assert (turn["content"], turn["reasoning_content"]) == ("Yes.", "Hm.")


def test_reasoning_is_looked_for_in_the_parts_of_thoughts_and_no_deeper() -> None:
    thought: Any = "Hm."
    for _ in range(450):  # as deep as JSON of a body may be
        thought = [{"type": "text", "text": thought}]
    for fields in (
        {"content": [{"type": "thinking", "thinking": thought}, {"type": "text", "text": "Yes."}]},
        {"content": "Yes.", "reasoning_details": [{"text": thought}]},
    ):
        said = [*CHAT["messages"], {"role": "assistant", **fields}, *CHAT["messages"]]
        assert "reasoning_content" not in template_messages(chat(messages=said).messages)[1]


def test_a_message_of_reasoning_alone_is_empty_besides() -> None:
    said = [*CHAT["messages"], {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]}]
    turn = template_messages(chat(messages=said).messages)[1]
    assert (turn["content"], turn["reasoning_content"]) == ("", "Hm.")


@pytest.mark.parametrize(
    ("given", "switch", "effort", "shown"),
    [
        ({"reasoning": {"enabled": False}}, "disabled", None, None),
        ({"reasoning": False}, "disabled", None, None),
        ({"reasoning": {"enabled": True, "effort": "high", "exclude": True}}, "enabled", "high", False),
        ({"reasoning": {"effort": "none"}}, None, "none", None),
        ({"think": False}, "disabled", None, None),
        ({"think": "low"}, None, "low", None),
        ({"reasoning": {"effort": "high", "exclude": True}, "reasoning_effort": "low", "include_reasoning": True},
         None, "low", True),
        ({"reasoning": {"enabled": False}, "thinking": {"type": "enabled"}}, "enabled", None, None),
    ],
)  # fmt: skip
def test_whether_to_think_may_be_said_as_to_openrouter_or_ollama(
    given: dict[str, Any], switch: str | None, effort: str | None, shown: bool | None
) -> None:
    body = chat(**given)
    assert body.thinking is None if switch is None else body.thinking is not None and body.thinking.type == switch
    assert (body.reasoning_effort, body.include_reasoning) == (effort, shown)
