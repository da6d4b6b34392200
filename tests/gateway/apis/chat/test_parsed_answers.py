"""Answers that are taken apart, as clients get them: streamed, whole, resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import AddedToken, Tokenizer

from penstock.gateway.apis.chat.aggregator import AnswerAggregator
from penstock.gateway.apis.chat.prepare_chat import prepare_chat, prepare_completion
from penstock.gateway.apis.chat.segments import SegmentedAnswer
from penstock.gateway.apis.chat.stream_renderer import StreamRenderer
from penstock.gateway.base.request_bodies import PrepareContext
from penstock.infra.model import modeldir
from penstock.infra.model.modeldir import ModelDir
from penstock.infra.text.parsers.registry import ParserNames, stop_search
from penstock.schemas.done import reasoning_tokens, usage_of
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest, Parsing, ThoughtTokens
from penstock.schemas.tokens import Finish, Logprob, TokenItem
from penstock.schemas.wire import pack_tokens, unpack_tokens
from tests.properties import examples
from tests.tiny_model import byte_level_json, write

STOP = Finish("stop")
NOW = 1_700_000_000 * 10**9
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"properties": {}}}}
THOUGHTS = ThoughtTokens((1272,), (1273,))  # <think> and </think> are tokens of the demo's vocabulary
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


def test_functions_are_called_in_the_form_that_openai_had_before_tools(demo: PrepareContext) -> None:
    """And the calls and results of such a conversation are those of tools for the template."""
    asked = {"role": "assistant", "content": None, "function_call": {"name": "get_weather", "arguments": "{}"}}
    result = {"role": "function", "name": "get_weather", "content": "rain"}
    messages = [{"role": "user", "content": "hi"}, asked, result]
    given = request(demo, tools=None, functions=[TOOL["function"]], function_call="auto", messages=messages)
    calls = [{"id": "call_1", "type": "function", "function": asked["function_call"]}]
    as_tools = [
        messages[0], {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "name": "get_weather", "content": "rain"},
    ]  # fmt: skip
    same = request(demo, messages=as_tools, tool_choice="auto", parallel_tool_calls=False)
    assert (given.prompt, given.parsing) == (same.prompt, same.parsing)
    text = 'Hm.<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
    whole = AnswerAggregator(given, demo.model.detokenizer)
    assert whole.push(answer(demo.model, text))
    body = json.loads(whole.response())
    ChatCompletion.model_validate(body, strict=True)
    [choice] = body["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert "tool_calls" not in choice["message"]
    renderer = StreamRenderer(given, demo.model.detokenizer)
    events = [each["choices"][0] for _, each in chunks(renderer.push(answer(demo.model, text)))]
    parts = [event["delta"]["function_call"] for event in events if "function_call" in event["delta"]]
    assert parts[0]["name"] == "get_weather"
    assert "".join(part["arguments"] for part in parts) == '{"city": "Oslo"}'
    assert not any("tool_calls" in event["delta"] for event in events)
    assert events[-1]["finish_reason"] == "function_call"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"functions": [TOOL["function"]], "function_call": {"name": "g"}}, "function_call"),
        ({"functions": [TOOL["function"]], "function_call": "always"}, "function_call"),
        ({"functions": [TOOL["function"], {"name": "a b"}]}, "functions[1].name"),
        ({"functions": [TOOL["function"]], "function_call": {}}, "function_call"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"tools": [TOOL], "function_call": {"name": "get_weather"}}, "function_call"),
    ],
)  # fmt: skip
def test_errors_in_functions_have_the_clients_names(demo: PrepareContext, options: Any, param: str) -> None:
    with pytest.raises(ServingError) as refused:
        request(demo, **{"tools": None, **options})
    assert refused.value.param == param
    assert param in refused.value.message


def test_a_call_that_no_parser_reads_is_refused_under_the_clients_name(demo: PrepareContext) -> None:
    for options, param in (
        ({"functions": [TOOL["function"]], "function_call": {"name": "get_weather"}}, "function_call"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ):
        with pytest.raises(ServingError) as refused:
            request(demo._replace(parsers=None), **{"tools": None, **options})
        assert refused.value.param == param


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
                if delta.get(key) is not None:
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
    message = choice["message"]
    assert message.get("reasoning", 0) == message.get("reasoning_content", 0)
    shown = {key: value for key, value in message.items() if value is not None and key != "reasoning"}
    return {**shown, "content": message["content"], "finish": choice["finish_reason"]}


def test_thoughts_content_and_calls_are_streamed_apart(demo: PrepareContext) -> None:
    asked, items = request(demo), answer(demo.model, ANSWER)
    assert asked.parsing == Parsing("basic", "hermes", thoughts=THOUGHTS)
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


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("<think>\nHello there.", "Hello there.", None),
        ("<think>Hello there.</think>\n", "Hello there.", None),
        ("<think>I greet.</think>Hello.", "Hello.", "I greet."),
        ("Hello.", "Hello.", None),
        (f"<think>I look.</think>{CALL}", None, "I look."),
        ("", "", None),
    ],
)
@pytest.mark.parametrize("finish", [STOP, Finish("length")])
def test_reasoning_is_the_content_where_that_must_not_be_empty(
    demo: PrepareContext, text: str, content: str | None, reasoning: str | None, finish: Finish
) -> None:
    """A stream has it as both: it is known at the end only."""
    tools = [TOOL] if CALL in text else None
    asked = request(demo, tools=tools, chat_template_kwargs={"force_nonempty_content": True})
    items = answer(demo.model, text, finish) or [TokenItem("r", 1, 0, 0, b"", finish)]
    found = whole(asked, demo.model, items)
    assert (found["content"], found.get("reasoning_content")) == (content, reasoning)
    streamed = added(chunks(StreamRenderer(asked, demo.model.detokenizer).push(items)))
    assert (streamed["content"] or "").strip() == (content or "")
    assert streamed.get("reasoning_content", "") in text
    assert len(found.get("tool_calls", ())) == len(streamed.get("tool_calls", ())) == text.count("<tool_call>")


@examples(60)
@given(st.data())
def test_a_client_can_continue_after_any_event(demo: PrepareContext, data: st.DataObject) -> None:
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


def test_the_tokens_of_the_content_have_logprobs_and_no_others(demo: PrepareContext) -> None:
    """OpenAI's field is of the message's content: not of thoughts, calls, marks and the end token."""
    for text, content in (
        (ANSWER, "I look."),
        (ANSWER + "\nÜber 🦊.", "I look.\n\n\nÜber 🦊."),
        ("<think>a</think>b", "b"),
        ("plain 🦊", "plain 🦊"),
        (CALL, ""),
    ):
        asked, items = request(demo, logprobs=True), answer(demo.model, text, logprobs=True)
        parsed = chunks(StreamRenderer(asked, demo.model.detokenizer).push(items))
        scored = [e for _, body in parsed if (p := body["choices"][0]["logprobs"]) for e in p["content"]]
        shown = bytes(byte for entry in scored for byte in entry["bytes"]).decode()
        assert shown.split() == content.split()
        assert added(parsed) == whole(asked, demo.model, items)
        collector = AnswerAggregator(asked, demo.model.detokenizer)
        collector.push(items)
        assert json.loads(collector.response())["choices"][0]["logprobs"]["content"] == scored


def deltas(asked: GenerateRequest, model: ModelDir, items: list[TokenItem]) -> list[dict[str, Any]]:
    return [b["choices"][0]["delta"] for _, b in chunks(StreamRenderer(asked, model.detokenizer).push(items))]


def message_of(asked: GenerateRequest, model: ModelDir, items: list[TokenItem]) -> dict[str, Any]:
    collector = AnswerAggregator(asked, model.detokenizer)
    assert collector.push(items)
    shown: dict[str, Any] = json.loads(collector.response())["choices"][0]["message"]
    return shown


@pytest.mark.parametrize("text", ["4", "<think>\n\n</think>\n\n4", CALL, "", "<think>So.</think>4"])
def test_every_delta_and_message_of_a_model_that_thinks_has_reasoning_or_null(
    demo: PrepareContext, special: PrepareContext, text: str
) -> None:
    """Code written for other servers reads the attribute without asking whether it is there."""
    items = answer(demo.model, text) or [TokenItem("r", 1, 0, 0, b"", STOP)]
    asked = request(demo)
    thought = "So." if "So." in text else None
    found = deltas(asked, demo.model, items)
    assert all("reasoning_content" in delta and "reasoning" not in delta for delta in found)
    assert ("".join(delta["reasoning_content"] or "" for delta in found) or None) == thought
    shown = message_of(asked, demo.model, items)
    assert shown["reasoning_content"] == shown["reasoning"] == thought
    unknown, four = request(special), answer(special.model, "4")  # a format of calls alone
    assert "reasoning_content" not in message_of(unknown, special.model, four)
    assert all("reasoning_content" not in delta for delta in deltas(unknown, special.model, four))


@pytest.mark.parametrize(
    ("fields", "whole_names", "streamed"),
    [
        ("", {"reasoning_content", "reasoning"}, {"reasoning_content"}),
        ("both", {"reasoning_content", "reasoning"}, {"reasoning_content", "reasoning"}),
        ("reasoning", {"reasoning"}, {"reasoning"}),
        ("reasoning_content", {"reasoning_content"}, {"reasoning_content"}),
    ],
)
def test_the_gateway_says_under_which_names_reasoning_is_sent(
    demo: PrepareContext, fields: str, whole_names: set[str], streamed: set[str]
) -> None:
    names = {"reasoning_content", "reasoning"}
    asked = request(demo._replace(reasoning_fields=fields))
    items = answer(demo.model, ANSWER)
    shown = message_of(asked, demo.model, items)
    assert {name: shown[name] for name in names & shown.keys()} == dict.fromkeys(whole_names, "The weather.")
    for delta in deltas(asked, demo.model, items):
        assert names & delta.keys() == streamed
        assert len({delta[name] for name in streamed}) == 1


def test_reasoning_is_left_out_or_joined_if_asked_for(demo: PrepareContext) -> None:
    text = "<think>\nWhy.\n</think>\n\nSo, Why.\n" + CALL
    items = answer(demo.model, text)
    hidden = request(demo, include_reasoning=False)
    shown = message_of(hidden, demo.model, items)
    assert (shown["reasoning_content"], shown["reasoning"], shown["content"]) == (None, None, "So, Why.")
    assert all(delta["reasoning_content"] is None for delta in deltas(hidden, demo.model, items))
    assert added(chunks(StreamRenderer(hidden, demo.model.detokenizer).push(items)))["content"] == "So, Why."
    joined = request(demo, separate_reasoning=False, stop=["Why"])
    shown = message_of(joined, demo.model, items)
    assert shown["content"] == "<think>\nWhy.\n</think>\n\nSo, "  # stop strings do not see thoughts
    assert "reasoning_content" not in shown
    assert "".join(delta.get("content", "") for delta in deltas(joined, demo.model, items)) == shown["content"]
    joined = request(demo, separate_reasoning=False)
    shown = message_of(joined, demo.model, items)
    assert shown["content"] == "<think>\nWhy.\n</think>\n\nSo, Why."
    assert len(shown["tool_calls"]) == 1
    with pytest.raises(ServingError, match="channels"):
        request(demo._replace(parsers=ParserNames("gpt_oss", "gpt_oss")), separate_reasoning=False)


def thought_tokens(asked: GenerateRequest, model: ModelDir, items: list[TokenItem]) -> int:
    collector = AnswerAggregator(asked, model.detokenizer)
    assert collector.push(items)
    found = json.loads(collector.response())["usage"]
    streamed = chunks(StreamRenderer(asked, model.detokenizer, include_usage=True).push(items))[-1][1]["usage"]
    assert streamed == found
    return int(found["completion_tokens_details"]["reasoning_tokens"])


def test_the_usage_of_a_chat_counts_the_tokens_of_its_reasoning(demo: PrepareContext) -> None:
    def count(text: str) -> int:
        return len(demo.model.tokenizer.encode(text, add_special_tokens=False).ids)

    asked = request(demo)
    assert thought_tokens(asked, demo.model, answer(demo.model, "4")) == 0
    assert thought_tokens(asked, demo.model, answer(demo.model, CALL)) == 0
    thought = thought_tokens(asked, demo.model, answer(demo.model, ANSWER))
    assert thought == count("<think>\nThe weather.\n</think>")
    hidden = request(demo, include_reasoning=False)
    assert thought_tokens(hidden, demo.model, answer(demo.model, ANSWER)) == thought
    cut = answer(demo.model, "<think>\nThe weather", Finish("length"))
    assert thought_tokens(asked, demo.model, cut) == len(cut)
    segments = SegmentedAnswer(asked, demo.model.detokenizer)
    segments.push(answer(demo.model, ANSWER))
    assert segments.reasoning_tokens == thought


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "The weather", "a <", CALL, "é🦊"]), max_size=8),
    st.booleans(),
    st.booleans(),
)
def test_the_record_counts_reasoning_as_clients_see_it(
    demo: PrepareContext, parts: list[str], thinking: bool, joined: bool
) -> None:
    text = "".join(parts)
    asked = request(demo, separate_reasoning=not joined)
    assert asked.parsing is not None
    asked = structs.replace(asked, parsing=structs.replace(asked.parsing, thinking=thinking))
    items = answer(demo.model, text + "." if text else "x")
    output = b"".join(bytes(item.tokens) for item in items)
    lead = text.split("<think>")[0]
    if not thinking and not lead.strip() and len(demo.model.tokenizer.encode(lead).ids) > 1:
        return  # white space of several tokens comes before the mark
    assert usage_of(asked, [output, output]).reasoning == 2 * thought_tokens(asked, demo.model, items)


def test_reasoning_whose_marks_are_no_tokens_is_unknown_to_the_record(demo: PrepareContext) -> None:
    asked = request(demo._replace(parsers=ParserNames("granite", "")))
    assert asked.parsing is not None
    assert asked.parsing.thoughts is None
    assert usage_of(asked, [pack_tokens([5, 6]), b""]).reasoning == -1
    assert reasoning_tokens(None, pack_tokens([1272, 5])) == 0
    aligned = pack_tokens([1272, 1273 << 8, 5, 1273])  # whose bytes have the mark between two tokens
    assert reasoning_tokens(Parsing("basic", thoughts=THOUGHTS), aligned) == 4


def test_every_chunk_has_the_usage_so_far_if_asked_for(demo: PrepareContext) -> None:
    asked = request(demo, stream=True, stream_options={"continuous_usage_stats": True})
    items = answer(demo.model, ANSWER)
    for include in (False, True):
        parsed = chunks(StreamRenderer(asked, demo.model.detokenizer, include_usage=include).push(items))
        bodies = [body for _, body in parsed if body["choices"]]
        positions = [int(name.removesuffix("f")) for name, body in parsed if body["choices"]]
        assert [body["usage"]["completion_tokens"] for body in bodies] == positions
        assert {body["usage"]["prompt_tokens"] for body in bodies} == {len(asked.prompt) // 4}
        assert bodies[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        assert len(parsed) - len(bodies) == include


@pytest.mark.parametrize("logprobs", [False, True])
def test_the_ids_of_tokens_come_if_asked_for(demo: PrepareContext, logprobs: bool) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 0} if logprobs else {}
    asked = request(demo, return_token_ids=True, return_tokens_as_token_ids=True, **options)
    items = answer(demo.model, ANSWER + " 🦊", logprobs=logprobs)
    ids = [token for item in items for token in unpack_tokens(item.tokens)]
    collector = AnswerAggregator(asked, demo.model.detokenizer)
    collector.push(items)
    body = json.loads(collector.response())
    assert body["choices"][0]["token_ids"] == ids
    assert body["prompt_token_ids"] == unpack_tokens(asked.prompt).tolist()
    parsed = [body for _, body in chunks(StreamRenderer(asked, demo.model.detokenizer).push(items))]
    assert [token for body in parsed for token in body["choices"][0]["token_ids"]] == ids
    assert [body.get("prompt_token_ids") for body in parsed[:2]] == [unpack_tokens(asked.prompt).tolist(), None]
    if logprobs:
        entry = body["choices"][0]["logprobs"]["content"][0]
        assert int(entry["token"].removeprefix("token_id:")) in ids
        assert bytes(entry["bytes"]) == b"I"
    plain = AnswerAggregator(request(demo), demo.model.detokenizer)
    plain.push(items)
    assert b"token_ids" not in plain.response()


PREFILLED = [
    # parser, prefilled, output -> content, reasoning
    ("deepseek_r1", "3 + 4 =", " 7", " 7", None),
    ("basic", "3 + 4 =", " 7 <think>", " 7 <think>", None),
    ("basic", "<think>\n3 + 4", " = 7\n</think>\n\n7", "7", " = 7"),
    ("deepseek_r1", "<think>\n3 + 4", " = 7\n</think>\n\n7", "7", " = 7"),
    ("basic", "<think>\n", "\n3 + 4</think>7", "7", "3 + 4"),
    ("qwen3", "In HTML, <think> is", " no tag.</think>", " no tag.</think>", None),
]


@pytest.mark.parametrize(("parser", "prefilled", "output", "content", "thought"), PREFILLED)
def test_an_answer_that_continues_the_last_message_begins_where_that_ends(
    demo: PrepareContext, parser: str, prefilled: str, output: str, content: str, thought: str | None
) -> None:
    context = demo._replace(parsers=ParserNames(parser, "hermes"))
    asked = request(
        context,
        messages=[{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": prefilled}],
        continue_final_message=True,
    )
    items = answer(demo.model, output)
    shown = message_of(asked, demo.model, items)
    assert (shown["content"], shown["reasoning_content"]) == (content, thought)
    streamed = deltas(asked, demo.model, items)
    assert "".join(delta.get("content") or "" for delta in streamed) == content
    assert "".join(delta["reasoning_content"] or "" for delta in streamed) == (thought or "")


def test_other_formats_too_continue_in_the_content(demo: PrepareContext) -> None:
    said = [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "3 + 4 ="}]
    harmony = request(demo._replace(parsers=ParserNames("gpt_oss")), messages=said, continue_final_message=True)
    assert message_of(harmony, demo.model, answer(demo.model, " 7"))["content"] == " 7"
    called = '{"name": "get_weather", "parameters": {}}'
    llama = request(demo._replace(parsers=ParserNames("", "llama3_json")), messages=said, continue_final_message=True)
    assert message_of(llama, demo.model, answer(demo.model, called))["content"] == called
    # Without the beginning of an answer nothing implies a thought.
    implied = request(demo._replace(parsers=ParserNames("deepseek_r1")), messages=said, add_generation_prompt=False)
    assert message_of(implied, demo.model, answer(demo.model, "7"))["content"] == "7"
    begun = request(demo._replace(parsers=ParserNames("deepseek_r1")))
    assert message_of(begun, demo.model, answer(demo.model, "7"))["reasoning_content"] == "7"


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
    assert asked.parsing == Parsing("basic", thinking=True, thoughts=THOUGHTS)
    items = answer(demo.model, "So.\n</think>\n\n4")
    assert whole(asked, demo.model, items)["reasoning_content"] == "So."


def test_without_tools_calls_stay_text(demo: PrepareContext) -> None:
    for options in ({"tools": None}, {"tool_choice": "none"}):
        asked = request(demo, **options)
        assert asked.parsing == Parsing("basic", thoughts=THOUGHTS)
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
    demo: PrepareContext, text: str, stop: str, content: str, thought: str, arguments: list[str] | None, ends: bool
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


@pytest.mark.parametrize("name", ["reasoning_effort", "verbosity"])
def test_the_template_gets_how_much_the_model_thinks_and_says(tmp_path: Path, name: str) -> None:
    template = "{{ messages[0].content }} {{ " + name + " }}"
    context = PrepareContext(modeldir.load(write(tmp_path / "m", template=template)), ("m",), "gw1")
    for options in ({name: "low"}, {"chat_template_kwargs": {name: "low"}, name: "high"}):
        tokens = request(context, **options).prompt
        ids = [int.from_bytes(tokens[at : at + 4], "little") for at in range(0, len(tokens), 4)]
        assert context.model.tokenizer.decode(ids) == "hi low"
    with pytest.raises(ServingError, match=name):
        request(context, **{name: "<image>"})


def test_marks_behind_the_last_one_that_counts_are_text_in_a_stream_too(demo: PrepareContext) -> None:
    """Nothing is parsed any more there, and the tokens of marks come as characters that no text may have."""
    asked, model = request(demo, tool_choice="none"), demo.model
    items = answer(model, "<think>\nHm.\n</think>\n\nIt says </think>, <think> and ü </think><think>.")
    renderer = StreamRenderer(asked, model.detokenizer)
    data = b"".join(renderer.push([item]) for item in items)
    renderer = StreamRenderer(asked, model.detokenizer)
    assert renderer.push(items) == data
    streamed = added(chunks(data))
    assert "</think>, <think> and ü </think><think>." in streamed["content"]
    assert streamed == {"role": "assistant", **whole(asked, model, items)}
