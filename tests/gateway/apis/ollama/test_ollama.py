"""Ollama's API: bodies as chats, and answers as lines that say together what the whole one says."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.apis.chat.prepare_chat import PreparedRequest
from penstock.gateway.apis.endpoints import aggregator_for, ignored_options, renderer_for
from penstock.gateway.apis.ollama.bodies import parse_ollama_chat, parse_ollama_generate
from penstock.gateway.apis.ollama.prepare_ollama import chat_of, chat_of_prompt, prepare_ollama
from penstock.gateway.apis.ollama.render import OllamaLines
from penstock.gateway.base.request_bodies import OLLAMA_CHAT, OLLAMA_GENERATE
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.tokens import Finish, TokenItem
from tests.gateway.answers import CALL, CONTEXT, DETOKENIZER, ID, LENGTH, NOW, STOP, TEXTS, items, request

HI = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}


def prepared(endpoint: str = OLLAMA_CHAT, **body: Any) -> PreparedRequest:
    if endpoint == OLLAMA_CHAT:
        body = {"messages": HI, **body}
    found = prepare_ollama(endpoint, msgspec.json.encode(body), CONTEXT, now_ns=NOW, request_id=ID).prepared
    assert isinstance(found, PreparedRequest)
    return found


def lines(data: bytes) -> list[dict[str, Any]]:
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


# -- bodies -----------------------------------------------------------------------------------------------------------


def test_options_reach_the_request_and_answers_are_streamed_unless_refused() -> None:
    options = {"num_predict": 7, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 11, "stop": ["x", "y"]}
    made = prepared(model="demo:latest", options={**options, "repeat_penalty": 1.5, "min_p": 0.125})
    sampling = made.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 3, 11)
    assert (sampling.repetition_penalty, sampling.min_p) == (1.5, 0.125)
    assert (made.request.stop.max_tokens, made.request.stop.strings) == (7, ("x", "y"))
    assert (made.stream, made.request.model) == (True, "demo")
    assert prepared(stream=False).stream is False


@pytest.mark.parametrize("asked", [0, -1, -2, 1 << 30])
def test_a_limit_beyond_the_context_is_as_many_tokens_as_fit(asked: int) -> None:
    limit = prepared(options={"num_predict": asked}).request.stop.max_tokens
    assert limit == prepared().request.stop.max_tokens > 1000


@pytest.mark.parametrize(
    ("endpoint", "body", "param", "named"),
    [
        (OLLAMA_CHAT, {"options": {"temperature": 9}}, "options.temperature", "2.0"),
        (OLLAMA_CHAT, {"options": {"num_predict": -3}}, "options.num_predict", "-2"),
        (OLLAMA_CHAT, {"format": "xml"}, "format", "'json'"),
        (OLLAMA_CHAT, {"think": "much"}, "think", "'low'"),
        (OLLAMA_CHAT, {"model": "nobody:latest"}, "model", "'demo'"),
        (OLLAMA_CHAT, {"messages": [{**HI[0], "images": ["iVBORw0KGgo="]}]}, "messages[0].images[0]", "image"),
        (OLLAMA_GENERATE, {"prompt": "x", "images": ["iVBORw0KGgo="]}, "images[0]", "image"),
        (OLLAMA_GENERATE, {"prompt": "x", "raw": True}, "raw", "POST /v1/completions"),
        (OLLAMA_GENERATE, {"prompt": "x", "suffix": "y"}, "suffix", "leave it out"),
        (OLLAMA_GENERATE, {"prompt": "x", "context": [1, 2]}, "context", "POST /api/chat"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_clients_name_of_the_field(
    endpoint: str, body: dict[str, Any], param: str, named: str
) -> None:
    with pytest.raises(ServingError) as caught:
        prepared(endpoint, **body)
    assert caught.value.param == param
    assert named in caught.value.message


def test_options_without_effect_are_named_and_keep_alive_is_not() -> None:
    body = {"model": "demo", "messages": HI, "keep_alive": "5m", "options": {"num_ctx": 4096, "top_k": 1}, "mood": 1}
    assert sorted(ignored_options(OLLAMA_CHAT, msgspec.json.encode(body))) == ["mood", "options.num_ctx"]


def test_results_belong_to_the_calls_that_their_names_or_their_order_say() -> None:
    calls = [{"function": {"name": name, "arguments": {"n": 1}}} for name in ("a", "b", "a")]
    results = [
        {"role": "tool", "content": "of b", "tool_name": "b"},
        {"role": "tool", "content": "of the first a", "tool_name": "a"},
        {"role": "tool", "content": "of the other"},
        {"role": "tool", "content": "of none", "tool_call_id": "own"},
    ]
    asked = [*HI, {"role": "assistant", "content": "", "tool_calls": calls, "thinking": "hm"}, *results]
    chat = chat_of(parse_ollama_chat(msgspec.json.encode({"messages": asked})), CONTEXT).body
    made = chat.messages[1]
    assert made.reasoning_content == "hm"
    ids = [call.id for call in made.tool_calls or ()]
    assert len(set(ids)) == 3
    assert [each.tool_call_id for each in chat.messages[2:]] == [ids[1], ids[0], ids[2], "own"]
    assert (made.tool_calls or [])[0].function.arguments == '{"n":1}'


def test_thinking_formats_images_and_prefilled_answers_are_those_of_a_chat() -> None:
    def chat(**body: Any) -> Any:
        return chat_of(parse_ollama_chat(msgspec.json.encode({"messages": HI, **body})), CONTEXT).body

    assert chat().chat_template_kwargs is None
    assert chat(think=False).chat_template_kwargs == {"enable_thinking": False, "thinking": False}
    high = chat(think="high")
    assert (high.chat_template_kwargs, high.reasoning_effort) == ({"enable_thinking": True, "thinking": True}, "high")
    assert chat(format="").response_format is None
    assert chat(format="json").response_format.type == "json_object"
    assert chat(format=CITY).response_format.json_schema.schema == CITY
    assert chat(messages=[*HI, {"role": "assistant", "content": "It is"}]).continue_final_message is True
    pictured = {"system": "Look.", "prompt": "What?", "images": ["/9j/4AAQ", "data:image/gif;base64,R0lGOD"]}
    messages = chat_of_prompt(parse_ollama_generate(msgspec.json.encode(pictured)), CONTEXT).body.messages
    assert (messages[0].role, messages[0].content) == ("system", "Look.")
    parts: Any = messages[1].content
    urls = ["data:image/jpeg;base64,/9j/4AAQ", "data:image/gif;base64,R0lGOD"]
    assert [part.image_url for part in parts] == [*urls, None]
    assert parts[-1].text == "What?"


# -- answers ----------------------------------------------------------------------------------------------------------


@given(TEXTS, st.sampled_from([STOP, LENGTH]), st.integers(1, 5), st.sampled_from([OLLAMA_CHAT, OLLAMA_GENERATE]))
def test_the_lines_of_a_stream_say_what_the_whole_answer_says(
    text: str, finish: Finish, size: int, endpoint: str
) -> None:
    asked, answer = request(endpoint), items(text, finish, size=size)
    collector = aggregator_for(asked, DETOKENIZER)
    assert collector.push(answer)
    whole = json.loads(collector.response())
    renderer = renderer_for(asked, DETOKENIZER)
    streamed = lines(b"".join(renderer.push([item]) for item in answer))
    assert renderer.done
    assert [each["done"] for each in streamed] == [False] * (len(streamed) - 1) + [True]
    said = {"content": "", "thinking": "", "calls": []}
    for each in streamed:
        said["content"] += each["message"]["content"] if endpoint == OLLAMA_CHAT else each["response"]
        part = each.get("message", each)
        said["thinking"] += part.get("thinking", "")
        said["calls"] += part.get("tool_calls", [])
    told = whole.get("message", whole)
    assert said["content"] == told["content" if endpoint == OLLAMA_CHAT else "response"]
    assert (said["thinking"], said["calls"]) == (told.get("thinking", ""), told.get("tool_calls", []))
    last = streamed[-1]
    for name in ("done_reason", "prompt_eval_count", "eval_count"):
        assert last[name] == whole[name]
    assert last["done_reason"] == finish.reason
    assert last["eval_count"] == sum(len(item.tokens) // 4 for item in answer)


def test_a_call_is_one_line_with_its_arguments_as_an_object() -> None:
    renderer = renderer_for(request(OLLAMA_CHAT), DETOKENIZER)
    calls = [
        each["message"]["tool_calls"] for each in lines(renderer.push(items(CALL))) if "tool_calls" in each["message"]
    ]
    [[call]] = calls
    assert call["function"] == {"name": "get_weather", "arguments": {"city": "Oslo"}}
    assert call["id"]


def test_durations_are_those_of_the_answer_and_left_out_when_it_is_read_later() -> None:
    times = iter([NOW + 5, *[NOW + 8] * 100])
    answer = items("One two three four.")
    renderer = OllamaLines(request(OLLAMA_CHAT), DETOKENIZER, lambda: next(times))
    last = lines(b"".join(renderer.push([item]) for item in answer))[-1]
    assert (last["total_duration"], last["prompt_eval_duration"], last["eval_duration"]) == (8, 5, 3)
    later = aggregator_for(request(OLLAMA_CHAT), DETOKENIZER, late=True)
    assert later.push(answer)
    assert not [name for name in json.loads(later.response()) if name.endswith("_duration")]


def test_a_failure_is_a_line_with_an_error_whether_it_continues_elsewhere_or_not() -> None:
    for finished in (True, False):
        renderer = renderer_for(request(OLLAMA_CHAT), DETOKENIZER)
        renderer.push(items("Well.", None))
        [error] = lines(renderer.fail(ServingError(Code.worker_lost, "gone"), finished=finished))
        assert (error, renderer.done) == ({"error": "gone"}, True)
        assert renderer.fail(ServingError(Code.internal, "again")) == b""
        assert renderer.ping == b""
    renderer = renderer_for(request(OLLAMA_CHAT), DETOKENIZER)
    failed = TokenItem(ID, 1, 0, 0, b"", Finish("error", code="engine_error", message="broke"))
    assert lines(renderer.push([failed])) == [{"error": "broke"}]
    with pytest.raises(ServingError, match="no ids"):
        renderer.resume("3")


def test_a_stream_is_kept_open_by_a_piece_without_text() -> None:
    [ping] = lines(renderer_for(request(OLLAMA_CHAT), DETOKENIZER).ping)
    assert (ping["message"], ping["done"]) == ({"content": "", "role": "assistant"}, False)
    [ping] = lines(renderer_for(request(OLLAMA_GENERATE), DETOKENIZER).ping)
    assert (ping["response"], ping["done"]) == ("", False)
