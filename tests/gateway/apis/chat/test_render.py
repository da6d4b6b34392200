import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.apis.chat import stream_renderer
from penstock.gateway.apis.chat.aggregator import AnswerAggregator
from penstock.gateway.apis.chat.prepare_chat import prepare_chat, prepare_completion
from penstock.gateway.apis.chat.stream_renderer import StreamRenderer
from penstock.gateway.base.request_bodies import PrepareContext
from penstock.infra.model.modeldir import ModelDir, load
from penstock.infra.text.parsers.registry import ParserNames
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest, Shown
from penstock.schemas.token_dedup import TokenReassembler
from penstock.schemas.tokens import WHOLE_REQUEST, Finish, Logprob, TokenItem
from penstock.schemas.wire import pack_tokens
from tests.properties import examples
from tests.tiny_model import CORPUS, metaspace_json, write

NOW = 1_700_000_000 * 10**9


def request(context: PrepareContext, endpoint: str = "chat", **options: Any) -> GenerateRequest:
    if endpoint == "text":
        body = {"model": "tiny", "prompt": "hi", **options}
        return prepare_completion(json.dumps(body).encode(), context, now_ns=NOW, request_id="r").request
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **options}
    return prepare_chat(json.dumps(body).encode(), context, now_ns=NOW, request_id="r").request


def answer(model: ModelDir, text: str, *, choice: int = 0, finish: Finish | None = None) -> list[TokenItem]:
    """One item per token; the last is the end token and carries the finish."""
    ids = [*model.tokenizer.encode(text, add_special_tokens=False).ids, 2]
    return [
        TokenItem("r", 1, choice, k, pack_tokens([token]), (finish or Finish("stop")) if k == len(ids) - 1 else None)
        for k, token in enumerate(ids)
    ]


def events(data: bytes) -> list[tuple[str, Any]]:
    """(id, JSON) of each event, as a client reads them."""
    out = []
    for block in data.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        out.append((lines.get("id", ""), "DONE" if lines["data"] == "[DONE]" else json.loads(lines["data"])))
    return out


def text_of(parsed: list[tuple[str, Any]], choice: int = 0) -> str:
    out = ""
    for _, body in parsed:
        for entry in body["choices"] if body != "DONE" and "choices" in body else []:
            if entry["index"] == choice:
                out += entry["delta"].get("content", "") if "delta" in entry else entry["text"]
    return out


def test_a_chat_streams_one_event_per_token_then_reason_and_done(model: ModelDir, context: PrepareContext) -> None:
    asked = request(context)
    items = answer(model, "The broker keeps")
    renderer = StreamRenderer(asked, model.detokenizer)
    pushed = [renderer.push([item]) for item in items]
    parsed = events(b"".join(pushed))
    assert [id for id, _ in parsed] == ["1", "2", "3", "4f", ""]
    first, second, _, last, done = (body for _, body in parsed)
    assert first == {
        "id": f"chatcmpl-{asked.id}",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "tiny",
        "system_fingerprint": first["system_fingerprint"],
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": "The"}, "logprobs": None, "finish_reason": None}
        ],
    }
    assert re.fullmatch("fp_[0-9a-f]{10}", first["system_fingerprint"])
    assert second["choices"][0]["delta"] == {"content": " broker"}
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
    assert done == "DONE"
    assert all(pushed)
    assert renderer.done


def test_text_completions_stream_text(model: ModelDir, context: PrepareContext) -> None:
    parsed = events(StreamRenderer(request(context, "text"), model.detokenizer).push(answer(model, "The broker")))
    first = parsed[0][1]
    assert (first["object"], first["id"][:5]) == ("text_completion", "cmpl-")
    assert first["choices"] == [{"index": 0, "text": "The", "logprobs": None, "finish_reason": None}]
    assert parsed[-2][1]["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}]


def test_usage_comes_last_and_is_null_before(model: ModelDir, context: PrepareContext) -> None:
    asked = request(context, n=2)
    renderer = StreamRenderer(asked, model.detokenizer, include_usage=True)
    data = renderer.push(answer(model, "The broker", finish=Finish("stop", cached_tokens=4)))
    data += renderer.push(answer(model, "A worker", choice=1, finish=Finish("length", cached_tokens=6)))
    *chunks, last, done = (body for _, body in events(data))
    assert done == "DONE"
    assert all(chunk["usage"] is None for chunk in chunks)
    prompt = len(asked.prompt) // 4
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == prompt
    assert last["usage"]["total_tokens"] == prompt + last["usage"]["completion_tokens"]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_an_answer_without_text_still_has_a_role(model: ModelDir, context: PrepareContext) -> None:
    parsed = events(StreamRenderer(request(context), model.detokenizer).push(answer(model, "")))
    assert parsed[0][1]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert parsed[0][1]["choices"][0]["finish_reason"] == "stop"


def test_tokens_without_text_have_no_event(model: ModelDir, context: PrepareContext) -> None:
    items = answer(model, "🦊")
    renderer = StreamRenderer(request(context), model.detokenizer)
    pushed = [events(renderer.push([item])) for item in items]
    assert [len(one) for one in pushed] == [0] * (len(items) - 2) + [1, 2]
    assert text_of(pushed[-2]) == "🦊"


def test_a_stop_string_is_never_shown_in_part(model: ModelDir, context: PrepareContext) -> None:
    items = answer(model, "The broker keeps every request", finish=Finish("stop", stop="eeps"))
    for shown, expected in ((False, "The broker k"), (True, "The broker keeps")):
        asked = request(context, stop=["eeps"], include_stop_str_in_output=shown)
        renderer = StreamRenderer(asked, model.detokenizer)
        seen = ""
        for item in items:
            seen += text_of(events(renderer.push([item])))
            assert expected.startswith(seen)
        assert seen == expected


def test_what_was_held_back_comes_with_the_finish(model: ModelDir, context: PrepareContext) -> None:
    renderer = StreamRenderer(request(context, stop=["keeps it"]), model.detokenizer)
    parsed = events(renderer.push(answer(model, "The broker keeps", finish=Finish("length"))))
    assert parsed[-2][1]["choices"][0]["delta"]["content"].endswith("keeps")
    assert text_of(parsed) == "The broker keeps"


def mixed(draw: st.DrawFn, model: ModelDir, n: int) -> list[TokenItem]:
    """Answers of n choices, interleaved as engine steps would."""
    texts = [CORPUS[start : start + 30] for start in draw(st.lists(st.integers(0, 250), min_size=n, max_size=n))]
    streams = [answer(model, text, choice=choice) for choice, text in enumerate(texts)]
    order = draw(st.permutations([choice for choice, items in enumerate(streams) for _ in items]))
    iterators = [iter(items) for items in streams]
    return [next(iterators[choice]) for choice in order]


@examples(60)
@given(st.data())
def test_streamed_and_whole_answers_have_the_same_text_and_usage(
    model: ModelDir, context: PrepareContext, data: st.DataObject
) -> None:
    n, endpoint = data.draw(st.integers(1, 3)), data.draw(st.sampled_from(["chat", "text"]))
    asked = request(context, endpoint, n=n, stop=data.draw(st.sampled_from([None, "the", ["ü", "er"]])))
    items = mixed(data.draw, model, n)  # type: ignore[arg-type]
    renderer, collector = (
        StreamRenderer(asked, model.detokenizer, include_usage=True),
        AnswerAggregator(asked, model.detokenizer),
    )
    parsed = events(b"".join(renderer.push([item]) for item in items))
    assert collector.push(items)
    body = json.loads(collector.response())
    assert parsed[-2][1]["usage"] == body["usage"]
    for choice in body["choices"]:
        whole = choice["message"]["content"] if endpoint == "chat" else choice["text"]
        assert text_of(parsed, choice["index"]) == whole
        assert choice["finish_reason"] == "stop"


@examples(60)
@given(st.data())
def test_a_client_can_continue_after_any_event_on_another_replica(
    model: ModelDir, context: PrepareContext, data: st.DataObject
) -> None:
    n = data.draw(st.integers(1, 3))
    asked = request(context, n=n, stop=data.draw(st.sampled_from([None, ["the", "ü"]])))
    items = mixed(data.draw, model, n)  # type: ignore[arg-type]
    whole = events(StreamRenderer(asked, model.detokenizer, include_usage=True).push(items))
    cut = data.draw(st.integers(0, len(whole) - 3))
    second = StreamRenderer(asked, model.detokenizer, include_usage=True)
    second.resume(whole[cut][0])
    batch = data.draw(st.integers(1, 5))
    resumed = events(b"".join(second.push(items[at : at + batch]) for at in range(0, len(items), batch)))
    assert resumed == whole[cut + 1 :]


@examples(60)
@given(st.data())
def test_events_do_not_depend_on_how_tokens_are_cut_into_items(
    model: ModelDir, context: PrepareContext, data: st.DataObject
) -> None:
    n, cut, known = (data.draw(st.integers(1, most)) for most in (2, 20, 40))
    asked = request(context, n=n, stop=data.draw(st.sampled_from([None, ["the", "ü"]])))
    items = mixed(data.draw, model, n)  # type: ignore[arg-type]
    single = events(StreamRenderer(asked, model.detokenizer).push(items))
    joined = [
        TokenItem(
            "r", 1, choice, at, b"".join(item.tokens for item in own[at : at + cut]), own[at : at + cut][-1].finish
        )
        for choice in range(n)
        for own in [[item for item in items if item.choice == choice]]
        for at in range(0, len(own), cut)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.gateway.apis.chat.stream_renderer._IDS", stream_renderer._IDS[:known])
        cut_otherwise = events(StreamRenderer(asked, model.detokenizer).push(joined))
        resumed, after = StreamRenderer(asked, model.detokenizer), data.draw(st.integers(0, len(single) - 2))
        resumed.resume(single[after][0])
        rest = events(resumed.push(joined))
    for choice in range(n):
        assert text_of(cut_otherwise, choice) == text_of(single, choice)
    if n == 1:
        assert (cut_otherwise, rest) == (single, single[after + 1 :])


@pytest.mark.parametrize("bad", ["", "x", "1.2", "-1", "1e3", "٣", "f", "9" * 40])
def test_a_foreign_event_id_is_refused(model: ModelDir, context: PrepareContext, bad: str) -> None:
    with pytest.raises(ServingError, match="not an event id"):
        StreamRenderer(request(context), model.detokenizer).resume(bad)


@pytest.mark.parametrize(
    ("finish", "code", "kind"),
    [
        (Finish("error", code="worker_lost", message="gone"), "worker_lost", "server_error"),
        (Finish("error", code="from_the_future"), "internal", "server_error"),
        (Finish("error", code="out_of_blocks"), "out_of_blocks", "invalid_request_error"),
        (Finish("cancelled"), "cancelled", "invalid_request_error"),
    ],
)
def test_a_failed_request_ends_in_one_openai_error(
    model: ModelDir, context: PrepareContext, finish: Finish, code: str, kind: str
) -> None:
    asked, fold = request(context, n=2), TokenReassembler(2)
    items = [*answer(model, "The broker")[:2], TokenItem("r", 1, WHOLE_REQUEST, 0, b"", finish)]
    due = [out for item in items for out in fold.push(item)]
    parsed = events(StreamRenderer(asked, model.detokenizer, include_usage=True).push(due))
    assert text_of(parsed) == "The broker"
    error = parsed[-2][1]["error"]
    assert (error["code"], error["type"], error["param"]) == (code, kind, None)
    assert error["message"]
    assert [body for _, body in parsed].count("DONE") == 1
    collector = AnswerAggregator(asked, model.detokenizer)
    assert collector.push(due)
    with pytest.raises(ServingError) as caught:
        collector.response()
    assert caught.value.code == code


def test_a_stream_can_be_failed_once_from_outside(model: ModelDir, context: PrepareContext) -> None:
    renderer = StreamRenderer(request(context), model.detokenizer)
    renderer.push(answer(model, "The broker")[:1])
    parsed = events(renderer.fail(ServingError(Code.deadline_exceeded, "too late")))
    assert parsed[0][1]["error"]["code"] == "deadline_exceeded"
    assert renderer.fail(ServingError(Code.internal, "again")) == b""
    assert renderer.push(answer(model, "The broker")[1:]) == b""


def with_logprobs(items: list[TokenItem]) -> list[TokenItem]:
    return [
        TokenItem(
            i.request, i.attempt, i.choice, i.first, i.tokens, i.finish, (Logprob(-0.5, ((5, -0.25), (6, -9e9))),)
        )
        for i in items
    ]


def test_chat_logprobs_come_with_every_token_of_the_content_also_with_parts_of_one(
    model: ModelDir, context: PrepareContext
) -> None:
    asked = request(context, logprobs=True, top_logprobs=2)
    items = with_logprobs(answer(model, "Grüße 🦊"))
    parsed = events(StreamRenderer(asked, model.detokenizer).push(items))
    entries = [e for _, body in parsed[:-2] for e in (body["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert len(entries) == len(items) - 1
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == "Grüße 🦊".encode()
    assert entries[0]["logprob"] == -0.5
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-0.25, -9999.0]
    assert text_of(parsed) == "Grüße 🦊"
    collector = AnswerAggregator(asked, model.detokenizer)
    collector.push(items)
    whole = json.loads(collector.response())["choices"][0]["logprobs"]
    assert whole == {"content": entries, "refusal": None}
    assert parsed[1][1]["choices"][0]["logprobs"].keys() == whole.keys()


@pytest.mark.parametrize("endpoint", ["chat", "text"])
@pytest.mark.parametrize("stop", [[], ["<|im_end|>x"]])
def test_special_tokens_are_text_if_they_are_asked_for(
    model: ModelDir, context: PrepareContext, endpoint: str, stop: list[str]
) -> None:
    begin = model.detokenizer.added["<|im_start|>"]
    ids = [*model.tokenizer.encode("The broker", add_special_tokens=False).ids, 2, begin, 2]
    items = [TokenItem("r", 1, 0, k, pack_tokens([token])) for k, token in enumerate(ids[:-1])]
    items.append(TokenItem("r", 1, 0, len(items), pack_tokens(ids[-1:]), Finish("stop", 2)))
    for skip, text in ((False, "The broker<|im_end|><|im_start|>"), (True, "The broker")):
        asked = request(
            context, endpoint, skip_special_tokens=skip, stop=stop, logprobs=True if endpoint == "chat" else 0
        )
        assert asked.shown == Shown(special=not skip)
        assert text_of(events(StreamRenderer(asked, model.detokenizer).push(items))) == text
        collector = AnswerAggregator(asked, model.detokenizer)
        collector.push(with_logprobs(items))
        choice = json.loads(collector.response())["choices"][0]
        assert (choice["message"]["content"] if endpoint == "chat" else choice["text"]) == text
        if endpoint == "text":
            assert choice["logprobs"]["text_offset"][-1] == len(text)  # of the end token


def test_what_continues_a_text_keeps_the_blank_behind_it_and_a_chat_begins_without_one(tmp_path: Path) -> None:
    model = load(write(tmp_path, tokenizer=metaspace_json()))
    context = PrepareContext(model, ("tiny",), "gw1")
    ids = model.tokenizer.encode("keeps", add_special_tokens=False).ids
    items = [TokenItem("r", 1, 0, k, pack_tokens([token])) for k, token in enumerate(ids)]
    items.append(TokenItem("r", 1, 0, len(ids), b"", Finish("length")))
    for endpoint, options, text in (
        ("text", {}, " keeps"),
        ("text", {"echo": True}, "hi keeps"),
        ("chat", {}, "keeps"),
        ("chat", {"continue_final_message": True}, " keeps"),
    ):
        for parsers in (None, ParserNames("qwen3", "")) if endpoint == "chat" else (None,):
            asked = request(context._replace(parsers=parsers), endpoint, **options)
            assert text_of(events(StreamRenderer(asked, model.detokenizer).push(items))) == text
            collector = AnswerAggregator(asked, model.detokenizer)
            collector.push(items)
            choice = json.loads(collector.response())["choices"][0]
            assert (choice["message"]["content"] if endpoint == "chat" else choice["text"]) == text


def test_an_answer_with_many_logprobs_is_large_and_one_without_is_not(model: ModelDir, context: PrepareContext) -> None:
    text = " ".join(["The broker keeps what it was told."] * 20)
    for options, large in (({"logprobs": True, "top_logprobs": 20}, True), ({"logprobs": True}, False), ({}, False)):
        collector = AnswerAggregator(request(context, **options), model.detokenizer)
        assert not collector.large
        collector.push(with_logprobs(answer(model, text)) if options else answer(model, text))
        assert collector.large is large


def test_text_logprobs_have_offsets(model: ModelDir, context: PrepareContext) -> None:
    asked = request(context, "text", logprobs=2)
    items = with_logprobs(answer(model, "The broker keeps"))
    collector = AnswerAggregator(asked, model.detokenizer)
    collector.push(items)
    whole = json.loads(collector.response())["choices"][0]["logprobs"]
    assert whole["tokens"] == ["The", " broker", " keeps", "<|im_end|>"]
    assert whole["text_offset"] == [0, 3, 10, 16]
    assert whole["token_logprobs"] == [-0.5] * 4
    assert whole["top_logprobs"][0]["The"] == -0.5
    assert len(whole["top_logprobs"][0]) == 3
    streamed = [
        body["choices"][0]["logprobs"] for _, body in events(StreamRenderer(asked, model.detokenizer).push(items))[:4]
    ]
    assert [offset for entry in streamed for offset in entry["text_offset"]] == whole["text_offset"]


@pytest.mark.parametrize("text", ["日本語 a", "🦊🦊b", "é 🦊c", "plain"])
def test_offsets_count_characters_and_not_the_tokens_that_make_one(
    model: ModelDir, context: PrepareContext, text: str
) -> None:
    asked = request(context, "text", logprobs=2)
    items = with_logprobs(answer(model, text))
    collector = AnswerAggregator(asked, model.detokenizer)
    collector.push(items)
    choice = json.loads(collector.response())["choices"][0]
    shown, found = choice["text"], choice["logprobs"]
    assert shown == text
    raw = b""
    for item, name, offset in zip(items, found["tokens"], found["text_offset"], strict=True):
        assert offset == len(raw.decode("utf-8", "ignore"))
        piece = model.detokenizer.raw(int.from_bytes(item.tokens, "little"))
        raw += piece
        assert name.startswith("bytes:\\x") or name.encode() == piece
    streamed = [
        body["choices"][0]["logprobs"] for _, body in events(StreamRenderer(asked, model.detokenizer).push(items))
        if body != "DONE" and body["choices"][0]["logprobs"]
    ]  # fmt: skip
    assert [offset for entry in streamed for offset in entry["text_offset"]] == found["text_offset"]
    assert [token for entry in streamed for token in entry["tokens"]] == found["tokens"]


def test_alternatives_of_equal_text_are_all_there(model: ModelDir, context: PrepareContext) -> None:
    """Parts of characters are no text: they were all the same key. Two tokens may have one text, too."""
    size = model.vocab_size
    partial = [token for token in range(size) if model.detokenizer.raw(token)[:1] > b"\x7f"][:3]
    empty = [size + 1, size + 2]  # of no text
    top = tuple((token, -0.5 - at) for at, token in enumerate([*partial, *empty]))
    asked = request(context, "text", logprobs=5)
    item = TokenItem(asked.id, 1, 0, 0, pack_tokens([partial[1]]), Finish("length"), (Logprob(-1.5, top),))
    collector = AnswerAggregator(asked, model.detokenizer)
    collector.push([item])
    [best] = json.loads(collector.response())["choices"][0]["logprobs"]["top_logprobs"]
    assert sorted(best.values(), reverse=True) == [-0.5, -1.5, -2.5, -3.5, -4.5]
    assert f"token_id:{size + 2}" in best


def test_a_streamed_completion_begins_with_its_prompt_if_asked_for(model: ModelDir, context: PrepareContext) -> None:
    asked = request(context, "text", echo=True, n=2)
    items = answer(model, " keeps")
    both = [*items, *(msgspec.structs.replace(item, choice=1) for item in items)]
    data = StreamRenderer(asked, model.detokenizer).push(both)
    parsed = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    texts = ["", ""]
    for choice in (body["choices"][0] for body in parsed):
        texts[choice["index"]] += choice["text"]
    collector = AnswerAggregator(asked, model.detokenizer)
    collector.push(both)
    assert texts == [choice["text"] for choice in json.loads(collector.response())["choices"]]
    assert all(text.endswith(" keeps") and len(text) > 6 for text in texts)
    resumed = StreamRenderer(asked, model.detokenizer)
    resumed.resume("0.0")
    assert data.decode().split("id: 0.0", 1)[1].split("\n\n", 1)[1] == resumed.push(both).decode()
    only = request(context, "text", echo=True, max_tokens=0)
    drawn = msgspec.structs.replace(answer(model, "x")[0], finish=Finish("length"))
    data = StreamRenderer(only, model.detokenizer).push([drawn])
    [shown, end] = [json.loads(line[6:])["choices"][0] for line in data.split(b"\n") if line.startswith(b"data: {")]
    assert shown["text"] == texts[0].removesuffix(" keeps")
    assert (end["text"], end["finish_reason"]) == ("", "length")


@given(st.text(max_size=30))
def test_any_text_is_valid_json_in_an_event(model: ModelDir, context: PrepareContext, text: str) -> None:
    data = StreamRenderer(request(context), model.detokenizer).push(answer(model, text))
    ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    assert text_of(events(data)) == model.tokenizer.decode(ids)


def test_the_openai_client_reads_our_shapes(model: ModelDir, context: PrepareContext) -> None:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.completion import Completion

    for endpoint, kind in (("chat", ChatCompletion), ("text", Completion)):
        for options in ({}, {"logprobs": True, "top_logprobs": 2} if endpoint == "chat" else {"logprobs": 2}):
            asked = request(context, endpoint, **options)
            items = with_logprobs(answer(model, "The broker")) if options else answer(model, "The broker")
            collector = AnswerAggregator(asked, model.detokenizer)
            collector.push(items)
            kind.model_validate_json(collector.response(), strict=True)
            for _, body in events(StreamRenderer(asked, model.detokenizer, include_usage=True).push(items))[:-1]:
                if endpoint == "chat":
                    ChatCompletionChunk.model_validate_json(json.dumps(body), strict=True)


@pytest.mark.parametrize("endpoint", ["chat", "text"])
def test_many_logprobs_are_encoded_in_slices_and_read_as_if_in_one(
    model: ModelDir, context: PrepareContext, endpoint: str
) -> None:
    options = {"logprobs": True, "top_logprobs": 2} if endpoint == "chat" else {"logprobs": 2}
    items = with_logprobs(answer(model, " ".join(["The broker keeps"] * 400)))
    collector = AnswerAggregator(request(context, endpoint, n=2, **options), model.detokenizer)
    for choice in range(2):
        collector.push([msgspec.structs.replace(item, choice=choice) for item in items])
    parts = collector.parts()
    assert max(map(len, parts)) < 16_384
    assert len(b"".join(parts)) > 100_000
    first, second = (choice["logprobs"] for choice in json.loads(b"".join(parts))["choices"])
    assert first == second
    shown = first["content"] if endpoint == "chat" else first["tokens"]
    assert [entry["token"] if endpoint == "chat" else entry for entry in shown[:3]] == ["The", " broker", " keeps"]
    assert len(shown) == len(items) - (endpoint == "chat")  # without the end token
