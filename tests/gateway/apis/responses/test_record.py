from typing import Any

import msgspec
import pytest

from penstock.gateway.apis.chat.prompt import template_messages
from penstock.gateway.apis.responses.bodies import InputItem, InputPart, ResponsesRequest, parse_response
from penstock.gateway.apis.responses.chat import chat_of
from penstock.gateway.apis.responses.record import (
    MAX_BYTES,
    MAX_TURNS,
    check_turns,
    encode_stored,
    input_items,
    listed_item,
    read_stored,
    turn_of,
)
from penstock.schemas import done
from penstock.schemas.errors import ServingError
from penstock.schemas.wire import pack_tokens
from tests.gateway.answers import CALL, CONTEXT, DETOKENIZER, ID, request

BODY = ResponsesRequest(model="demo", input="hi")


def ended(text: str, reason: str = "stop") -> done.Done:
    tokens = CONTEXT.model.tokenizer.encode(text, add_special_tokens=False).ids
    return done.Done(ID, "demo", 1, choices=(done.Outcome(pack_tokens(tokens), reason),))


def test_an_ended_response_is_a_turn_of_a_later_one() -> None:
    made = request("response", encode_stored(BODY))
    turn = turn_of(made, ended(f"<think>Hm.</think>Look:{CALL}"), DETOKENIZER)
    assert turn.id == f"resp_{ID}"
    assert [item.type for item in turn.output] == ["reasoning", "message", "function_call"]
    assert len({item.id for item in turn.output}) == 3
    messages = chat_of(msgspec.structs.replace(BODY, input="go on"), [turn]).body.messages
    assert [message.role for message in messages] == ["user", "assistant", "user"]
    assert messages[1].reasoning_content == "Hm."
    assert [call.function.arguments for call in messages[1].tool_calls or ()] == ['{"city": "Oslo"}']


def test_a_call_of_a_namespace_is_continued_with_other_tools_by_its_own_name() -> None:
    def tools(*namespaces: str) -> list[dict[str, object]]:
        inner = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
        return [{"type": "namespace", "name": name, "tools": [inner]} for name in namespaces]

    first = msgspec.structs.replace(BODY, tools=tools("a", "b"))
    turn = turn_of(
        request("response", encode_stored(first)), ended(CALL.replace("get_weather", "b__get_weather")), DETOKENIZER
    )
    assert [(item.namespace, item.name) for item in turn.output] == [("b", "get_weather")]
    for offered, shown in ((("a", "b"), "b__get_weather"), (("b",), "get_weather"), (("b", "c"), "b__get_weather")):
        later = msgspec.structs.replace(BODY, input="go on", tools=tools(*offered))
        calls = chat_of(later, [turn]).body.messages[1].tool_calls or ()
        assert [call.function.name for call in calls] == [shown]


def test_a_call_of_a_custom_tool_is_continued_with_its_output() -> None:
    body = msgspec.structs.replace(BODY, tools=[{"type": "custom", "name": "apply_patch"}])
    said = '<tool_call>{"name": "apply_patch", "arguments": {"input": "+ \\"a\\""}}</tool_call>'
    turn = turn_of(request("response", encode_stored(body)), ended(said), DETOKENIZER)
    [call] = turn.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", '+ "a"')
    result = InputItem("custom_tool_call_output", call_id=call.call_id, output="done")
    continued = chat_of(msgspec.structs.replace(body, input=[result]), [turn]).body.messages
    sent = chat_of(
        msgspec.structs.replace(body, input=[InputItem(role="user", content="hi"), call, result])
    ).body.messages
    assert continued == sent
    assert [each.function.arguments for each in sent[1].tool_calls or ()] == ['{"input":"+ \\"a\\""}']
    assert (sent[2].role, sent[2].content, sent[2].tool_call_id) == ("tool", "done", call.call_id)
    assert [item.id for item in input_items("resp_x", [result])] == ["ctco_x_in0"]


def test_a_search_for_tools_is_continued_with_what_was_found_also_if_the_input_is_not_stored() -> None:
    search = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
    body = msgspec.structs.replace(BODY, tools=None, store=False)
    said = '<tool_call>{"name": "tool_search", "arguments": {"query": "x"}}</tool_call>'
    turn = turn_of(request("response", encode_stored(body, tools=[search])), ended(said), DETOKENIZER)
    [item] = turn.output
    assert (item.type, item.arguments, item.execution) == ("tool_search_call", {"query": "x"}, "client")


def test_a_call_that_was_cut_off_is_continued_with_its_output() -> None:
    turn = turn_of(request("response", encode_stored(BODY)), ended(f"Look:{CALL[:-25]}", "length"), DETOKENIZER)
    assert [(item.type, item.status) for item in turn.output] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]
    call = turn.output[-1]
    output = InputItem("function_call_output", call_id=call.call_id, output="try again")
    chat = chat_of(msgspec.structs.replace(BODY, input=[output]), [turn]).body
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool"]
    [shown] = template_messages(chat.messages)[1]["tool_calls"]
    assert shown["function"]["arguments"] == call.arguments
    assert call.arguments == '{"ci'


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Pa', '{"city": "Pa'),
        ('{"a": "b\nc"}', {"a": "b\nc"}),
        (None, {}),
        (["a"], '["a"]'),
        ({"city": "Paris"}, {"city": "Paris"}),
    ],
)
def test_an_item_may_have_any_arguments(arguments: Any, shown: Any) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "w", "arguments": arguments}
    result = {"type": "function_call_output", "call_id": "c", "output": "x"}
    body = parse_response(msgspec.json.encode({"model": "demo", "input": [call, result]}))
    [message, _] = template_messages(chat_of(body).body.messages)
    assert message["tool_calls"][0]["function"]["arguments"] == shown


def test_of_a_response_that_is_not_kept_no_input_is_stored() -> None:
    assert read_stored(encode_stored(msgspec.structs.replace(BODY, store=False), ("a",))).body.input is None


def test_a_body_that_was_removed_reads_as_an_empty_one() -> None:
    assert read_stored(b"").body.input is None


def test_input_that_is_too_large_to_be_stored_is_refused() -> None:
    image = InputPart("input_image", image_url="data:image/png;base64," + "A" * MAX_BYTES)
    with pytest.raises(ServingError, match=f"the limit is {MAX_BYTES}") as caught:
        encode_stored(msgspec.structs.replace(BODY, input=[InputItem(role="user", content=[image])]))
    assert caught.value.param == "input"


def test_the_limit_of_turns_is_named() -> None:
    check_turns(MAX_TURNS)
    with pytest.raises(ServingError, match=f"the limit is {MAX_TURNS}"):
        check_turns(MAX_TURNS + 1)


def test_listed_input_has_ids_types_and_statuses() -> None:
    given = [InputItem(role="user", content="a"), InputItem("function_call_output", call_id="c", output="b", id="mine")]
    for items in (input_items("resp_1", "text"), input_items("resp_1", given)):
        assert all(item.id and item.type and item.status == "completed" for item in items)
        assert len({item.id for item in items}) == len(items)
    assert input_items("resp_1", given)[0].content == [InputPart("input_text", text="a")]
    assert input_items("resp_1", given)[1].id == "mine"


def test_listed_parts_have_the_fields_that_the_schema_requires() -> None:
    parts = [
        InputPart("output_text", text="a"),
        InputPart("input_text", text="b"),
        InputPart("input_image", file_id="c"),
    ]
    assert listed_item(InputItem("message", "m", "assistant", parts))["content"] == [
        {"type": "output_text", "text": "a", "annotations": [], "logprobs": []},
        {"type": "input_text", "text": "b"},
        {"type": "input_image", "file_id": "c", "detail": "auto"},
    ]
    assert listed_item(InputItem("reasoning", "r", summary=[])) == {"type": "reasoning", "id": "r", "summary": []}
