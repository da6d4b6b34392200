"""Answers that are taken apart, as clients get them: streamed, whole, resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import AddedToken, Tokenizer

from gateway.openai.aggregator import AnswerAggregator
from gateway.openai.prepare import prepare_chat, prepare_completion
from gateway.openai.prepare_context import PrepareContext
from gateway.openai.segments import SegmentedAnswer
from gateway.openai.stream_renderer import StreamRenderer
from infra.model import modeldir
from infra.model.modeldir import ModelDir
from infra.model.parsers.registry import ParserNames, stop_search
from schemas.errors import ServingError
from schemas.requests import GenerateRequest, Parsing
from schemas.tokens import Finish, Logprob, TokenItem
from schemas.wire import pack_tokens
from tests.properties import examples
from tests.tiny_model import byte_level_json, write

STOP = Finish("stop")
NOW = 1_700_000_000 * 10**9
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"properties": {}}}}
ANSWER = f"<think>\nThe weather.\n</think>\n\nI look.\n{CALL}\n{CALL}"


@pytest.fixture(scope="module")
def demo() -> PrepareContext:
    return PrepareContext(modeldir.load(modeldir.DEMO), ("demo",), "gw1", parsers=ParserNames("basic", "hermes"))


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> PrepareContext:
    """A model whose marks are special tokens, as Mistral's."""
    tokenizer = Tokenizer.from_str(byte_level_json())
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("[TOOL_CALLS]", "[ARGS]", "[OTHER]")])
    path: Path = write(tmp_path_factory.mktemp("model") / "special", tokenizer=str(tokenizer.to_str()))
    return PrepareContext(modeldir.load(path), ("special",), "gw1", parsers=ParserNames("", "mistral"))


def request(context: PrepareContext, **options: Any) -> GenerateRequest:
    body = {"model": context.names[0], "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], **options}
    prepared = prepare_chat(json.dumps(body).encode(), context, now_ns=NOW, request_id="r")
    return prepared.request  # type: ignore[union-attr]


def answer(model: ModelDir, text: str, finish: Finish = STOP, *, logprobs: bool = False) -> list[TokenItem]:
    ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    return [
        TokenItem(
            "r", 1, 0, k, pack_tokens([token]), finish if k == len(ids) - 1 else None,
            (Logprob(-0.5),) if logprobs else None,
        )
        for k, token in enumerate(ids)
    ]  # fmt: skip


def chunks(data: bytes) -> list[tuple[str, Any]]:
    """(id, chunk) of each event, checked as the openai client reads them."""
    out = []
    for block in data.decode().split("\n\n")[:-1]:
        *head, line = block.split("\n")
        if line == "data: [DONE]":
            continue
        body = json.loads(line.removeprefix("data: "))
        ChatCompletionChunk.model_validate(body, strict=True)
        out.append((head[0].removeprefix("id: "), body))
    return out


def added(parsed: list[tuple[str, Any]]) -> dict[str, Any]:
    """The message that chunks add up to."""
    out: dict[str, Any] = {"role": None, "content": None, "reasoning_content": None, "tool_calls": []}
    for _, body in parsed:
        for choice in body["choices"]:
            delta = choice["delta"]
            out["role"] = out["role"] or delta.get("role")
            for key in ("content", "reasoning_content"):
                if key in delta:
                    out[key] = (out[key] or "") + delta[key]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    out["tool_calls"].append({**call, "function": {**call["function"]}})
                else:
                    out["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            out["finish"] = choice["finish_reason"]
    for index, call in enumerate(out["tool_calls"]):
        assert call.pop("index") == index
    return {key: value for key, value in out.items() if value or key == "content"}


def whole(asked: GenerateRequest, model: ModelDir, items: list[TokenItem]) -> dict[str, Any]:
    collector = AnswerAggregator(asked, model.detokenizer)
    assert collector.push(items)
    body = json.loads(collector.response())
    ChatCompletion.model_validate(body, strict=True)
    [choice] = body["choices"]
    return {**choice["message"], "finish": choice["finish_reason"]}


def test_thoughts_content_and_calls_are_streamed_apart(demo: PrepareContext) -> None:
    asked, items = request(demo), answer(demo.model, ANSWER)
    assert asked.parsing == Parsing("basic", "hermes")
    parsed = chunks(StreamRenderer(asked, demo.model.detokenizer).push(items))
    message = added(parsed)
    assert message == whole(asked, demo.model, items)
    assert (message["reasoning_content"], message["content"]) == ("The weather.", "I look.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    ] * 2
    assert message["finish"] == "tool_calls"
    assert ["role" in body["choices"][0]["delta"] for _, body in parsed] == [True] + [False] * (len(parsed) - 1)
    positions = [int(event_id.removesuffix("f")) for event_id, _ in parsed]
    assert positions == sorted(positions)
    assert positions[-1] == len(items)
    with_arguments = [body for _, body in parsed if "tool_calls" in body["choices"][0]["delta"]]
    assert len(with_arguments) > 6  # as the model writes them


@examples(60)
@given(st.data())
def test_a_client_can_go_on_after_any_event(demo: PrepareContext, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([ANSWER, CALL, "<think>cut", "plain text", ANSWER + "\nDone."]))
    tools, stop = data.draw(st.sampled_from([None, [TOOL]])), data.draw(st.sampled_from([None, "ok", "look.\n"]))
    asked = request(demo, logprobs=data.draw(st.booleans()), tools=tools, stop=stop)
    items = answer(demo.model, text, logprobs=asked.sampling.logprobs is not None)
    parsed = chunks(StreamRenderer(asked, demo.model.detokenizer).push(items))
    assert added(parsed) == whole(asked, demo.model, items)
    cut = data.draw(st.integers(0, len(parsed) - 1))
    renderer = StreamRenderer(asked, demo.model.detokenizer)
    renderer.resume(parsed[cut][0])
    size = data.draw(st.integers(1, 5))
    again = b"".join(renderer.push(items[at : at + size]) for at in range(0, len(items), size))
    assert chunks(again) == parsed[cut + 1 :]


def test_every_token_keeps_its_logprob(demo: PrepareContext) -> None:
    asked, items = request(demo, logprobs=True), answer(demo.model, ANSWER, logprobs=True)
    parsed = chunks(StreamRenderer(asked, demo.model.detokenizer).push(items))
    tokens = [e["token"] for _, body in parsed if (p := body["choices"][0]["logprobs"]) for e in p["content"]]
    assert "".join(tokens) == ANSWER
    assert added(parsed) == whole(asked, demo.model, items)


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_broken_off_call_is_shown_as_far_as_it_came(demo: PrepareContext, reason: str) -> None:
    items = answer(demo.model, CALL[:-15], Finish(reason))
    message = added(chunks(StreamRenderer(request(demo), demo.model.detokenizer).push(items)))
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo'
    assert message["finish"] == ("length" if reason == "length" else "tool_calls")
    text = CALL[:20]
    message = added(chunks(StreamRenderer(request(demo), demo.model.detokenizer).push(answer(demo.model, text))))
    assert (message["content"], message["finish"]) == (text, "stop")


@pytest.mark.parametrize("length", [11, 20, 36])
def test_a_call_that_the_limit_cut_off_before_its_arguments_is_not_shown_as_text(
    demo: PrepareContext, length: int
) -> None:
    items = answer(demo.model, "I look.\n" + CALL[:length], Finish("length"))
    streamed = added(chunks(StreamRenderer(request(demo), demo.model.detokenizer).push(items)))
    assert (streamed["content"], streamed["finish"]) == ("I look.\n", "length")
    assert not streamed.get("tool_calls")
    assert whole(request(demo), demo.model, items) == streamed
    segments = SegmentedAnswer(request(demo), demo.model.detokenizer)
    segments.push(items)
    assert [(each.kind, each.content) for each in segments.segments] == [("text", "I look.\n")]


def test_a_prompt_that_ends_in_thoughts_makes_the_answer_begin_in_them(demo: PrepareContext) -> None:
    asked = request(demo, chat_template_kwargs={"enable_thinking": True}, tools=None)
    assert asked.parsing == Parsing("basic", thinking=True)
    items = answer(demo.model, "So.\n</think>\n\n4")
    assert whole(asked, demo.model, items)["reasoning_content"] == "So."


def test_without_tools_calls_stay_text(demo: PrepareContext) -> None:
    for options in ({"tools": None}, {"tool_choice": "none"}):
        asked = request(demo, **options)
        assert asked.parsing == Parsing("basic")
        message = added(chunks(StreamRenderer(asked, demo.model.detokenizer).push(answer(demo.model, CALL))))
        assert (message["content"], message["finish"]) == (CALL, "stop")
    assert request(demo._replace(parsers=None)).parsing is None
    prepared = prepare_completion(b'{"model": "demo", "prompt": "hi"}', demo, now_ns=NOW, request_id="r")
    assert prepared.request.parsing is None


def test_only_the_first_call_is_shown_if_asked_for(demo: PrepareContext) -> None:
    asked = request(demo, parallel_tool_calls=False)
    message = added(chunks(StreamRenderer(asked, demo.model.detokenizer).push(answer(demo.model, ANSWER))))
    assert len(message["tool_calls"]) == 1


def test_marks_that_are_special_tokens_are_seen_and_others_are_not(special: PrepareContext) -> None:
    text = 'Look.[OTHER][TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]now[ARGS]{}[OTHER]'
    asked, items = request(special), answer(special.model, text)
    message = added(chunks(StreamRenderer(asked, special.model.detokenizer).push(items)))
    assert message == whole(asked, special.model, items)
    assert message["content"] == "Look."
    assert [tuple(call["function"].values()) for call in message["tool_calls"]] == [
        ('{"city": "Oslo"}', "get_weather"),
        ("{}", "now"),
    ]
    assert len(message["tool_calls"][0]["id"]) == 9


STOPPED = "<think>\nNot yet: 1 + 2.\n</think>\n\nIt is 3 + 4 Paris."


@pytest.mark.parametrize(
    ("text", "stop", "content", "thought", "arguments", "ends"),
    [
        (STOPPED, "+", "It is 3 ", "Not yet: 1 + 2.", None, True),
        (STOPPED, "Not yet", "It is 3 + 4 Paris.", "Not yet: 1 + 2.", None, False),
        (STOPPED, "think", "It is 3 + 4 Paris.", "Not yet: 1 + 2.", None, False),
        (STOPPED, "\n\n", "It is 3 + 4 Paris.", "Not yet: 1 + 2.", None, False),  # layout behind the thought
        (STOPPED, "\n", "It is 3 + 4 Paris.", "Not yet: 1 + 2.", None, False),
        (ANSWER, "Os", "I look.", "The weather.", ['{"city": "Oslo"}'] * 2, False),
        (ANSWER, "tool_call", "I look.", "The weather.", ['{"city": "Oslo"}'] * 2, False),
        (ANSWER, "}}", "I look.", "The weather.", ['{"city": "Oslo"}'] * 2, False),
        (ANSWER, "look", "I ", "The weather.", None, True),
        (ANSWER + "\nDone, Oslo.", "slo", "I look.\n\n\nDone, O", "The weather.", ['{"city": "Oslo"}'] * 2, True),
    ],
)
def test_stop_strings_are_searched_in_the_content_alone(
    demo: PrepareContext,
    text: str,
    stop: str,
    content: str,
    thought: str,
    arguments: list[str] | None,
    ends: bool,
) -> None:
    asked, items = request(demo, stop=[stop]), answer(demo.model, text)
    message = added(chunks(StreamRenderer(asked, demo.model.detokenizer).push(items)))
    assert message == whole(asked, demo.model, items)
    assert (message["content"], message["reasoning_content"]) == (content, thought)
    calls = message.get("tool_calls")
    assert (calls and [call["function"]["arguments"] for call in calls]) == arguments
    search = stop_search(asked, 0, demo.model.detokenizer)
    for item in items:
        search.push(int.from_bytes(item.tokens, "little"))
    assert search.stop == (stop if ends else None)
    segments = SegmentedAnswer(asked, demo.model.detokenizer)
    segments.push(items)
    shown = {kind: [s.content for s in segments.segments if s.kind == kind] for kind in ("text", "reasoning", "call")}
    assert "".join(shown["text"]).split() == content.split()
    assert shown["reasoning"] == [thought]
    assert shown["call"] == (arguments or [])


def test_a_stop_string_does_not_see_the_marks_of_calls(special: PrepareContext) -> None:
    text = 'Look.[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}'
    for stop in ("CALLS", "k.get", "city"):
        asked, items = request(special, stop=[stop]), answer(special.model, text)
        search = stop_search(asked, 0, special.model.detokenizer)
        for item in items:
            search.push(int.from_bytes(item.tokens, "little"))
        assert search.stop is None
        message = added(chunks(StreamRenderer(asked, special.model.detokenizer).push(items)))
        assert message["content"] == "Look."
        assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'


def test_the_template_gets_the_reasoning_effort(tmp_path: Path) -> None:
    template = "{{ messages[0].content }} {{ reasoning_effort }}"
    context = PrepareContext(modeldir.load(write(tmp_path / "m", template=template)), ("m",), "gw1")
    for options in ({"reasoning_effort": "low"}, {"chat_template_kwargs": {"reasoning_effort": "low"}}):
        tokens = request(context, **options).prompt
        ids = [int.from_bytes(tokens[at : at + 4], "little") for at in range(0, len(tokens), 4)]
        assert context.model.tokenizer.decode(ids) == "hi low"
    with pytest.raises(ServingError, match="reasoning_effort"):
        request(context, reasoning_effort="<image>")
