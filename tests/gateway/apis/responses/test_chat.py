import json
from typing import Any

import pytest

from penstock.gateway.apis.chat.bodies import ChatMessage, ContentPart
from penstock.gateway.apis.chat.prepare_chat import PreparedRequest
from penstock.gateway.apis.chat.prompt import template_messages
from penstock.gateway.apis.responses.bodies import InputItem, ResponsesRequest, parse_response
from penstock.gateway.apis.responses.chat import Turn, chat_of
from penstock.gateway.apis.responses.prepare_response import prepare_response
from penstock.gateway.apis.responses.record import StoredBody, encode_stored, read_stored
from penstock.infra.constraints.constraint_grammar import check
from penstock.infra.text.parsers.registry import ParserNames
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import CONSTRAINT, CONSTRAINT_LARK, Constraint
from penstock.schemas.wire import unpack_tokens
from tests.gateway.answers import CONTEXT, NOW

TOOL = {"type": "function", "name": "get_weather", "description": "d", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Oslo"}'}


def parsed(**fields: Any) -> ResponsesRequest:
    return parse_response(json.dumps({"model": "demo", "input": "hi", **fields}).encode())


def messages(given: Any, **fields: Any) -> list[ChatMessage]:
    return chat_of(parsed(input=given, **fields)).body.messages


def prepared(room: int = 0, **fields: Any) -> PreparedRequest:
    """``room``: tokens of the context, if not the model's own."""
    found = prepare_response(
        parsed(**fields), (), CONTEXT._replace(worker_max_model_len=room), now_ns=NOW, request_id="r"
    )
    assert isinstance(found, PreparedRequest)
    return found


NUMBER = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
APPLY = {"type": "custom", "name": "apply", "format": NUMBER}


@pytest.mark.parametrize(
    ("processors", "parsers", "choice", "constrained"),
    [
        (frozenset([CONSTRAINT, CONSTRAINT_LARK]), ParserNames("", "hermes"), "auto", True),
        (frozenset([CONSTRAINT, CONSTRAINT_LARK]), ParserNames("", "hermes"), "none", False),
        (frozenset[str](), ParserNames("", "hermes"), "auto", False),
        (None, ParserNames("", "hermes"), "auto", False),
        (None, ParserNames("", "hermes"), {"type": "custom", "name": "apply"}, True),
        (frozenset([CONSTRAINT, CONSTRAINT_LARK]), None, "auto", False),
    ],
)
def test_a_custom_tools_grammar_is_enforced_where_calls_can_be_constrained(
    processors: frozenset[str] | None, parsers: ParserNames | None, choice: Any, constrained: bool
) -> None:
    """Where they cannot, the model is told, as it is anyway; a call that is forced needs a constraint."""
    context = CONTEXT._replace(logits_processors=processors, parsers=parsers)
    body = parsed(tools=[APPLY, TOOL | {"strict": False}], tool_choice=choice)
    found = prepare_response(body, (), context, now_ns=NOW, request_id="r")
    assert isinstance(found, PreparedRequest)
    wanted = found.wanted
    assert (wanted is not None) == constrained
    if wanted is not None:
        assert "[0-9]+" in wanted.constraint.text
        assert wanted.tools[0].given == Constraint("regex", "[0-9]+")
        check(wanted.constraint)


def test_a_tool_choice_may_nest_the_name_as_chat_completions_do() -> None:
    nested = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ({"type": "function", "name": "get_weather"}, nested):
        assert chat_of(parsed(tools=[TOOL], tool_choice=choice)).body.tool_choice == nested
    for choice in ({"type": "function"}, {"type": "function", "function": "get_weather"}):
        with pytest.raises(ServingError, match="tool_choice names no tool"):
            prepared(tools=[TOOL], tool_choice=choice)


def test_a_text_is_what_the_user_says() -> None:
    assert messages("hi", instructions="Be brief.") == [ChatMessage("system", "Be brief."), ChatMessage("user", "hi")]


def test_items_of_one_turn_become_one_message() -> None:
    given = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        CALL,
        {**CALL, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"type": "message", "role": "assistant", "content": "Rain."},
        {"type": "message", "role": "assistant", "content": "And sun."},
    ]
    found = messages(given)
    assert [message.role for message in found] == [
        "developer",
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "assistant",
    ]
    turn = found[2]
    assert turn.reasoning_content == "Hm."
    assert turn.content == [ContentPart("text", "I look.")]
    assert [call.id for call in turn.tool_calls or ()] == ["c1", "c2"]
    assert (found[3].tool_call_id, found[3].content) == ("c1", "rain")
    template_messages(found)  # which a chat template takes


def test_what_another_agent_says_is_read_as_the_users() -> None:
    said: dict[str, Any] = {"type": "agent_message", "author": "/lead/probe", "recipient": "/lead"}
    sealed = {"type": "encrypted_content", "encrypted_content": "x"}
    given = [{**said, "content": [sealed, {"type": "input_text", "text": "Done."}]}, {**said, "content": [sealed]}]
    assert messages(given) == [ChatMessage("user", [ContentPart("text", "Done.")])]


def test_a_summary_stands_for_reasoning_that_was_left_out() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "In short."}]}
    assert messages([item, {"role": "user", "content": "go on"}])[0].reasoning_content == "In short."


@pytest.mark.parametrize("content", ["gAAAAABo", "", None])
def test_the_reasoning_of_another_server_cannot_be_read_and_is_left_out(content: str | None) -> None:
    item: dict[str, Any] = {"type": "reasoning", "summary": [], "encrypted_content": content}
    assert [each.role for each in messages([item, {"role": "user", "content": "go on"}])] == ["user"]


def test_earlier_responses_come_first_and_instructions_before_them() -> None:
    turns = [
        Turn("resp_1", "one", [InputItem("message", role="assistant", content="1")]),
        Turn("resp_2", [InputItem(role="user", content="two")], [InputItem("message", role="assistant", content="2")]),
    ]
    found = chat_of(parsed(input="three", instructions="New."), turns).body.messages
    assert [message.content for message in found] == ["New.", "one", "1", "two", "2", "three"]


def test_options_reach_the_request() -> None:
    request = prepared(
        max_output_tokens=7, temperature=0.5, top_p=0.5, top_logprobs=2, seed=3, stop="x", tools=[TOOL], top_k=5
    ).request
    assert request.stop.max_tokens == 7
    assert request.stop.strings == ("x",)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.logprobs, sampling.seed, sampling.top_k) == (
        0.5,
        0.5,
        2,
        3,
        5,
    )
    assert request.parsing is not None
    assert request.parsing.tools == "hermes"
    assert prepared(include=["message.output_text.logprobs"]).request.sampling.logprobs == 0


def test_a_format_becomes_a_constraint() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    given = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    constraint = prepared(text={"format": given}).request.constraint
    assert constraint is not None
    assert '"properties":{"a":{"type":"integer"}}' in constraint.text  # among the model's reasoning marks
    assert prepared(text={"format": {"type": "json_object"}}).request.constraint is not None
    assert prepared(text={"format": {"type": "text"}}).request.constraint is None


def test_a_response_that_is_not_kept_is_erased() -> None:
    assert prepared(store=False).request.no_store
    assert not prepared().request.no_store


def test_what_is_stored_can_be_read_again() -> None:
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "https://a/b"}]}
    options = {"metadata": {"a": "b"}, "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}
    body = parsed(input=[CALL, image], tools=[TOOL], **options)
    assert read_stored(encode_stored(body, ("a",))) == StoredBody(body, ("a",))


def long_talk(turns: int) -> list[dict[str, Any]]:
    """Some hundred tokens a turn, each with a call and its result."""
    found: list[dict[str, Any]] = [{"role": "developer", "content": "Be brief."}]
    for turn in range(turns):
        output = {"type": "function_call_output", "call_id": "c1", "output": "word " * 300}
        found += [{"role": "user", "content": f"turn {turn}"}, CALL, output]
    return found


def test_truncation_drops_whole_turns_from_the_beginning() -> None:
    talk = long_talk(12)
    with pytest.raises(ServingError) as caught:
        prepared(2000, input=talk)
    assert caught.value.code is Code.context_length_exceeded
    request = prepared(2000, input=talk, truncation="auto", max_output_tokens=10).request
    text = CONTEXT.model.tokenizer.decode(list(unpack_tokens(request.prompt)), skip_special_tokens=False)
    assert "Be brief." in text
    assert "turn 11" in text
    kept = [turn for turn in range(12) if f"turn {turn}\n" in text or f"turn {turn}<" in text]
    assert kept == list(range(kept[0], 12))
    assert 0 < len(kept) < 12
    more = [talk[0], *talk[1 + 3 * (kept[0] - 1) :]]
    with pytest.raises(ServingError):
        prepared(2000, input=more, max_output_tokens=10)


def test_a_turn_that_does_not_fit_alone_is_refused_with_truncation_too() -> None:
    with pytest.raises(ServingError) as caught:
        prepared(2000, input="word " * 3_000, truncation="auto")
    assert caught.value.code is Code.context_length_exceeded


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
         "input[0].content[0].file_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://a/b"}]}]},
         "input[0].content[0].image_url"),
        ({"input": [{k: v for k, v in CALL.items() if k != "call_id"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c1", "output": "a"}, CALL]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a", "parameters": 1}]}, "tools[0].parameters"),
        ({"max_output_tokens": 1 << 30}, "max_output_tokens"),
        ({"max_output_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"reasoning": {"effort": "a b"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"a": [[[]]] * 50_000}}}},
         "text.format.schema"),
        ({"include": ["everything"]}, "include[0]"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"background": True, "store": False}, "background"),
        ({"model": "other"}, "model"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_under_the_clients_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ServingError) as caught:
        prepared(**fields)
    assert caught.value.param == param
    assert caught.value.code.status in (400, 404)
    assert "messages[" not in caught.value.message
