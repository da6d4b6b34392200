"""A request for a server of chats carries what its client said, and no more."""

import json
from typing import Any

import pytest

from penstock.gateway.apis.chat.aggregator import AnswerAggregator
from penstock.gateway.apis.chat.carried_chat import MAX_INLINE_BYTES
from penstock.gateway.apis.chat.prepare_chat import count_prompt, parse_chat, prepare_chat, prepare_completion
from penstock.gateway.apis.chat.segments import SegmentedAnswer
from penstock.gateway.apis.chat.stream_renderer import StreamRenderer
from penstock.gateway.base.request_bodies import PrepareContext
from penstock.gateway.nats.messages import StreamMessages
from penstock.infra.text.parsers.families import PARSED
from penstock.infra.text.parsers.registry import ParserNames
from penstock.schemas.done import Usage, counted
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import CARRIED_CHAT, GenerateRequest
from penstock.schemas.tokens import Finish, TokenItem
from penstock.schemas.wire import pack_tokens

HI = [{"role": "user", "content": "hi"}]
PICTURE = "https://example.org/a.png"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture
def carrying(context: PrepareContext) -> PrepareContext:
    return context._replace(carries_chat=True, parsers=ParserNames(PARSED, PARSED))


def prepared(context: PrepareContext, messages: Any = HI, **options: Any) -> GenerateRequest:
    body = json.dumps({"model": "tiny", "messages": messages, **options}).encode()
    return prepare_chat(body, context, now_ns=10**18, request_id="r").request  # type: ignore[union-attr]


def seen(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "see"}, *parts]}]


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def test_what_the_client_gave_is_carried_and_what_it_left_open_is_not(carrying: PrepareContext) -> None:
    request = prepared(carrying, temperature=0.3, tools=[TOOL], tool_choice="required", reasoning_effort="low", n=2)
    assert json.loads(request.chat) == {
        "messages": HI, "temperature": 0.3, "tools": [TOOL], "tool_choice": "required", "reasoning_effort": "low"
    }  # fmt: skip
    brief = json.loads(prepared(carrying, verbosity="low", thinking={"type": "disabled"}).chat)
    assert brief["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False, "verbosity": "low"}
    assert [each.name for each in request.sampling.logits_processors] == [CARRIED_CHAT]
    assert (request.constraint, request.n, bool(request.prompt)) == (None, 2, True)
    limited = prepared(carrying, max_completion_tokens=7, logit_bias={"4000000": 5}, stop_token_ids=[4_000_000])
    assert json.loads(limited.chat)["max_tokens"] == 7
    assert json.loads(limited.chat)["logit_bias"] == {"4000000": 5}
    assert (limited.sampling.logit_bias, limited.stop.token_ids) == ({}, ()), "ids are of the server's vocabulary"


def test_a_limit_that_was_lowered_to_the_context_is_left_to_the_server(carrying: PrepareContext) -> None:
    clamps = carrying._replace(clamp_max_tokens=True)
    for context, options in (
        (clamps, {"max_tokens": 1 << 20}),
        (carrying._replace(default_max_tokens=carrying.max_model_len), {}),
    ):
        request = prepared(context, **options)
        assert request.stop.max_tokens < carrying.max_model_len
        assert "max_tokens" not in json.loads(request.chat)
    assert json.loads(prepared(clamps, max_tokens=7).chat)["max_tokens"] == 7


def test_a_request_of_other_workers_carries_nothing(context: PrepareContext) -> None:
    request = prepared(context)
    assert (request.chat, request.sampling.logits_processors) == (b"", ())


def test_calls_and_thoughts_of_earlier_turns_are_carried_as_openai_writes_them(carrying: PrepareContext) -> None:
    function = {"name": "f", "arguments": {"a": 1}}
    earlier = {"role": "assistant", "tool_calls": [{"function": function}], "reasoning": "hm"}
    request = prepared(carrying, [*HI, earlier, {"role": "tool", "tool_call_id": "call_1_0", "content": "2"}])
    call = {"id": "call_1_0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert json.loads(request.chat)["messages"][1] == {
        "role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"
    }  # fmt: skip


def test_media_go_along_as_urls_and_have_blocks_of_their_own(carrying: PrepareContext) -> None:
    one, same, other = (prepared(carrying, seen(image(url))) for url in (PICTURE, PICTURE, PICTURE + "?2"))
    assert json.loads(one.chat)["messages"] == seen(image(PICTURE))
    assert one.prompt == same.prompt != other.prompt
    assert one.media == ()
    body = parse_chat(json.dumps({"model": "tiny", "messages": seen(image(PICTURE))}).encode())
    assert count_prompt(body, carrying) == one.prompt_tokens


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"messages": seen(image("file:///etc/passwd"))}, "messages[0].content[1].image_url", "http:, https: and"),
        ({"messages": seen(*[image(PICTURE)] * 17)}, "messages[0].content[17].image_url", "limit is 16"),
        ({"messages": seen(image("data:image/png;base64," + "A" * MAX_INLINE_BYTES))},
         "messages[0].content[1].image_url", "Name larger media"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex", "JSON schemas only"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "leave it out"),
        ({"max_thinking_tokens": 5}, "max_thinking_tokens", "leave it out"),
    ],
)  # fmt: skip
def test_what_such_a_server_has_no_name_for_is_refused(
    carrying: PrepareContext, options: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(ServingError, match=words) as found:
        prepared(carrying, **options)
    assert found.value.param == field


def test_completions_are_refused(carrying: PrepareContext) -> None:
    with pytest.raises(ServingError, match="use POST /v1/chat/completions"):
        prepare_completion(b'{"model":"tiny","prompt":"hi"}', carrying, now_ns=1, request_id="r")


@pytest.mark.parametrize(
    ("given", "carried"),
    [
        ({"response_format": {"type": "json_object"}}, {"type": "json_object"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": False}}},
         {"type": "json_schema", "json_schema": {"name": "n", "strict": False, "schema": SCHEMA}}),
        ({"guided_json": SCHEMA},
         {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}),
        ({"response_format": {"type": "text"}}, None),
    ],
)  # fmt: skip
def test_a_schema_has_one_form(carrying: PrepareContext, given: dict[str, Any], carried: Any) -> None:
    assert json.loads(prepared(carrying, **given).chat).get("response_format") == carried


def test_answers_show_what_the_server_counted(carrying: PrepareContext) -> None:
    request, model = prepared(carrying, n=2), carrying.model
    items = [
        TokenItem("r", 1, 0, 0, pack_tokens([40])),
        counted("r", 1, 0, Usage(12, 7, 4)),
        TokenItem("r", 1, 0, 1, pack_tokens([2]), Finish("stop", 2)),
        counted("r", 1, 1, Usage(12, 3, 5)),
        TokenItem("r", 1, 1, 0, pack_tokens([2]), Finish("stop", 2)),
    ]
    whole = AnswerAggregator(request, model.detokenizer)
    assert whole.push(items)
    streamed, sent = StreamRenderer(request, model.detokenizer), StreamMessages(request, model.detokenizer)
    streamed.push(items)
    sent.push(items)
    for usage in (whole.usage, streamed.usage, sent.usage):
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (12, 10, 22)
        assert usage.prompt_tokens_details.cached_tokens == 4
    one = SegmentedAnswer(prepared(carrying), model.detokenizer)
    one.push(items[:3])
    assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (12, 7)
    whole = AnswerAggregator(request, model.detokenizer)
    whole.push([*items[:3], items[4]])
    assert whole.usage.completion_tokens == 3, "of an answer that the server counted only in part, tokens are counted"
