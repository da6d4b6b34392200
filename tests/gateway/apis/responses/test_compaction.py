"""Compaction: what the model is asked, what clients get, and what their items become."""

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import CompactedResponse

from penstock.gateway.apis.chat.bodies import ChatMessage, ContentPart
from penstock.gateway.apis.chat.prompt import template_messages
from penstock.gateway.apis.chat.segments import WholeAnswer
from penstock.gateway.apis.endpoints import renderer_for
from penstock.gateway.apis.responses.bodies import InputItem, InputPart, ResponsesRequest, parse_compaction
from penstock.gateway.apis.responses.chat import SUMMARY, Summary, Turn, chat_of, decode_summary, encode_summary
from penstock.gateway.apis.responses.prepare_response import INSTRUCTION, compacted, encode_kept, with_instruction
from penstock.gateway.apis.responses.record import MAX_BYTES
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.tokens import Finish, TokenItem
from tests.gateway.answers import CALL, DETOKENIZER, ID, LENGTH, STOP, items, request
from tests.properties import examples

AT = "input[1].encrypted_content"
TALK = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "What is 347 + 586?"},
    {"type": "compaction", "encrypted_content": encode_summary("They met.")},
    {"role": "assistant", "content": "933"},
    {"role": "user", "content": [{"type": "input_text", "text": "Thanks."}], "id": "msg_own"},
]


def parsed(**fields: Any) -> ResponsesRequest:
    return parse_compaction(json.dumps({"model": "demo", **fields}).encode())


def answered(text: str, finish: Finish = STOP, history: tuple[Turn, ...] = ()) -> dict[str, Any]:
    made = request("compaction", encode_kept(parsed(input=TALK), history, ID))
    return result(WholeAnswer(made, DETOKENIZER, compacted), items(text, finish))


def result(aggregator: WholeAnswer, given: list[TokenItem]) -> dict[str, Any]:
    assert aggregator.push(given)
    found: dict[str, Any] = json.loads(aggregator.response())
    return found


@examples(200)
@given(st.text())
def test_a_summary_is_read_as_it_was_written(text: str) -> None:
    assert decode_summary(encode_summary(text), AT) == text


@examples(200)
@given(st.text(min_size=1), st.data())
def test_a_damaged_summary_is_refused_by_name(text: str, data: st.DataObject) -> None:
    whole = encode_summary(text).rstrip("=")
    at = data.draw(st.integers(0, len(whole) - 1))
    for damaged in (whole[:at], whole[:at] + "!" + whole[at + 1 :], whole[:at] + whole[at + 1 :]):
        with pytest.raises(ServingError) as caught:
            decode_summary(damaged, AT)
        assert (caught.value.code, caught.value.param) == (Code.invalid_request, AT)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "gAAAAABpM0Yj-of-another-server=",
        "é",
        base64.urlsafe_b64encode(b"[" * 100_000).decode(),
        NESTED := base64.urlsafe_b64encode(b'{"x":' + b"[" * 100_000).decode(),
        base64.urlsafe_b64encode(msgspec.json.encode(Summary("a", 0))).decode(),
        base64.urlsafe_b64encode(msgspec.json.encode(Summary("", 0, version=2))).decode(),
    ],
)
def test_what_is_no_summary_of_this_server_is_refused(content: str) -> None:
    with pytest.raises(ServingError) as caught:
        chat_of(ResponsesRequest(input=[InputItem(role="user", content="a"), compaction(content)]))
    assert (caught.value.code, caught.value.param) == (Code.invalid_request, AT)


def test_reasoning_of_another_server_is_passed_over_however_it_is_nested() -> None:
    thought = InputItem("reasoning", encrypted_content=NESTED)
    [message] = chat_of(ResponsesRequest(input=[InputItem(role="user", content="a"), thought])).body.messages
    assert message.role == "user"


def compaction(content: str | None) -> InputItem:
    return InputItem("compaction", encrypted_content=content)


def test_a_compaction_item_needs_its_content() -> None:
    with pytest.raises(ServingError) as caught:
        chat_of(ResponsesRequest(input=[compaction(None)]))
    assert caught.value.param == "input[0].encrypted_content"


def test_the_model_reads_a_summary_where_its_item_is_also_in_an_earlier_response() -> None:
    turn = Turn("resp_1", [compaction(encode_summary("They met."))], [InputItem(role="assistant", content="Yes.")])
    chat = chat_of(ResponsesRequest(input=[compaction(encode_summary("They left."))]), [turn])
    assert template_messages(chat.body.messages) == [
        {"role": "user", "content": SUMMARY + "They met."},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": SUMMARY + "They left."},
    ]
    assert chat.places["messages[2]"] == "input[0]"


def test_the_instruction_comes_last_and_never_as_a_second_message_of_the_user() -> None:
    said, answer = ChatMessage("user", "hi"), ChatMessage("assistant", "ho")
    assert with_instruction([said, answer]) == [said, answer, ChatMessage("user", INSTRUCTION)]
    assert with_instruction([answer, said]) == [answer, ChatMessage("user", f"hi\n\n{INSTRUCTION}")]
    image = ContentPart("image_url", image_url="https://a")
    assert with_instruction([ChatMessage("user", [image])]) == [
        ChatMessage("user", [image, ContentPart("text", INSTRUCTION)])
    ]


def test_an_answer_has_what_the_user_said_and_one_item_for_the_rest() -> None:
    turn = Turn("resp_0", "Hello!", [InputItem(role="assistant", content="Hi.")])
    found = answered("<think>\nHm.\n</think>\n\nThey added.", history=(turn,))
    read = CompactedResponse.construct(**found)  # as the client does: its types know no user in an output
    assert (read.id, read.object, read.created_at) == (f"resp_{ID}", "response.compaction", 1_700_000_000)
    assert read.usage.input_tokens == 3
    assert 0 < read.usage.output_tokens_details.reasoning_tokens < read.usage.output_tokens
    *said, item = found["output"]
    assert [(each["type"], each["role"], each["content"][0]["text"]) for each in said] == [
        ("message", "user", "Hello!"),
        ("message", "user", "What is 347 + 586?"),
        ("message", "user", "Thanks."),
    ]
    assert [each["id"] for each in said] == ["msg_0_in0", f"msg_{ID}_in1", "msg_own"]
    assert item == {"type": "compaction", "id": f"cmp_{ID}", "encrypted_content": encode_summary("They added.")}
    again = msgspec.convert(found["output"], list[InputItem])
    assert chat_of(ResponsesRequest(input=again)).body.messages[-1].content == SUMMARY + "They added."


def test_a_summary_that_was_cut_off_is_used_as_far_as_it_goes() -> None:
    assert decode_summary(answered("They add", LENGTH)["output"][-1]["encrypted_content"], AT) == "They add"


@pytest.mark.parametrize(
    ("text", "finish", "code"),
    [
        ("<think>\nHm.", LENGTH, Code.context_length_exceeded),
        ("<think>\nHm.\n</think>\n\n", STOP, Code.engine_error),
        ("", STOP, Code.engine_error),
        (CALL, STOP, Code.engine_error),
    ],
)
def test_without_a_summary_nothing_replaces_the_conversation(text: str, finish: Finish, code: Code) -> None:
    with pytest.raises(ServingError) as caught:
        answered(text, finish)
    assert caught.value.code is code


def test_a_failure_is_the_answer() -> None:
    with pytest.raises(ServingError) as caught:
        answered("They", Finish("error", code="engine_error", message="broken"))
    assert caught.value.code is Code.engine_error
    assert "broken" in caught.value.message


def test_a_redacted_request_is_answered_without_what_the_user_said() -> None:
    found = result(WholeAnswer(request("compaction"), DETOKENIZER, compacted), items("They met."))
    assert [each["type"] for each in found["output"]] == ["compaction"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": "a", "stream": True}, "stream"),
        ({"input": "a", "temperature": 3}, "temperature"),
        ({"previous_response_id": ""}, "previous_response_id"),
    ],
)
def test_what_cannot_be_compacted_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ServingError) as caught:
        parsed(**fields)
    assert caught.value.param == param


def test_a_body_means_what_it_means_for_a_response() -> None:
    body = parsed(previous_response_id="resp_1", instructions="i", store=False, max_output_tokens=5, seed=7)
    assert (body.previous_response_id, body.input, body.kept) == ("resp_1", None, False)
    chat = chat_of(body, [Turn("resp_1", "hi", [])]).body
    assert (chat.max_completion_tokens, chat.seed, chat.no_store) == (5, 7, True)


def test_more_than_can_be_stored_is_refused() -> None:
    long = [InputItem("message", role="user", content=[InputPart("input_text", text="x" * MAX_BYTES)])]
    with pytest.raises(ServingError) as caught:
        encode_kept(ResponsesRequest(input=long), (), ID)
    assert (caught.value.code, caught.value.param) == (Code.body_too_large, "input")


def test_an_answer_has_no_events() -> None:
    with pytest.raises(ServingError) as caught:
        renderer_for(request("compaction"), DETOKENIZER)
    assert caught.value.code is Code.unsupported
