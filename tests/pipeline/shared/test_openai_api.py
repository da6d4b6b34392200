"""OpenAI's own client against the whole pipeline; the mock engine's answers are known in advance."""

import asyncio
import math
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest

from tests.pipeline.support import Deployment, Oracle, joined, ok, parse_sse, token_prompt, words

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the name of the river?"},
    ],
    "temperature": 0,
    "max_tokens": 12,
}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "The river is called", "temperature": 0, "max_tokens": 12}


def chat_prompt(oracle: Oracle) -> int:
    return len(oracle.prompt(CHAT))


def test_a_chat_answer_is_what_the_engine_generates_from_the_rendered_prompt(
    client: openai.OpenAI, oracle: Oracle
) -> None:
    answer = client.chat.completions.create(**CHAT)
    [choice] = answer.choices
    assert choice.message.content == oracle.answer(CHAT, 12)
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (chat_prompt(oracle), 12)
    assert answer.usage.total_tokens == chat_prompt(oracle) + 12


def test_a_streamed_chat_answer_is_the_same_in_pieces(client: openai.OpenAI, oracle: Oracle) -> None:
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].id.startswith("chatcmpl-")
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert [chunk.choices[0].delta.role for chunk in parts] == ["assistant"] + [None] * (len(parts) - 1)
    pieces = [chunk.choices[0].delta.content or "" for chunk in parts]
    assert "".join(pieces) == oracle.answer(CHAT, 12)
    assert len([piece for piece in pieces if piece]) == 12  # one event per token, none kept back
    assert [chunk.choices[0].finish_reason for chunk in parts] == [None] * (len(parts) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in parts)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (chat_prompt(oracle), 12)


async def test_the_asynchronous_client_gets_the_same_from_all_four_ways(
    aclient: openai.AsyncOpenAI, oracle: Oracle
) -> None:
    async def chat_stream() -> str:
        stream = await aclient.chat.completions.create(**CHAT, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def text_stream() -> str:
        stream = await aclient.completions.create(**TEXT, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    chat, text, chat_streamed, text_streamed = await asyncio.gather(
        aclient.chat.completions.create(**CHAT), aclient.completions.create(**TEXT), chat_stream(), text_stream()
    )
    assert chat.choices[0].message.content == chat_streamed == oracle.answer(CHAT, 12)
    assert text.choices[0].text == text_streamed == oracle.answer(TEXT, 12)


def test_a_text_completion_continues_text_and_token_ids_alike(client: openai.OpenAI, oracle: Oracle) -> None:
    ids = oracle.prompt(TEXT)
    answers = [client.completions.create(**{**TEXT, "prompt": prompt}) for prompt in (TEXT["prompt"], ids, [ids])]
    for answer in answers:
        assert answer.choices[0].text == oracle.answer(TEXT, 12)
        assert answer.id.startswith("cmpl-")
        assert answer.object == "text_completion"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(ids)
    assert len({answer.id for answer in answers}) == 3


async def test_every_event_has_an_id_and_the_answer_names_its_request(http: httpx.AsyncClient, oracle: Oracle) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    *events, done = parse_sse(answer.content)
    assert done.data == "[DONE]"
    ids = [event.id for event in events]
    assert all(ids)
    assert len(set(ids)) == len(ids), "a client could not tell two events apart"
    assert {event.body["id"] for event in events} == {"chatcmpl-" + answer.headers["x-request-id"]}
    assert joined(events) == oracle.answer(CHAT, 12)
    whole = await http.post("/v1/chat/completions", json=CHAT)
    assert whole.json()["id"] == "chatcmpl-" + whole.headers["x-request-id"]


async def test_without_include_usage_no_chunk_has_usage(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={**TEXT, "stream": True})
    events = parse_sse(answer.content)[:-1]
    assert all("usage" not in event.body for event in events)
    assert all(event.body["choices"] for event in events)


def test_several_choices_are_separate_answers(client: openai.OpenAI, oracle: Oracle) -> None:
    body = {**CHAT, "temperature": 1.0, "seed": 11, "n": 3}
    expected = [oracle.answer(body, 12, choice) for choice in range(3)]
    assert len(set(expected)) == 3
    whole = client.chat.completions.create(**body)
    assert [choice.message.content for choice in whole.choices] == expected
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 36
    texts = ["", "", ""]
    ends = {}
    for chunk in client.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == expected
    assert ends == {0: "length", 1: "length", 2: "length"}


def test_the_same_seed_gives_the_same_text_and_another_seed_another(client: openai.OpenAI, oracle: Oracle) -> None:
    def ask(seed: int | None) -> str:
        more = {} if seed is None else {"seed": seed}
        return str(client.completions.create(**{**TEXT, "temperature": 1.0, **more}).choices[0].text)

    assert ask(5) == ask(5) == oracle.answer({**TEXT, "temperature": 1.0, "seed": 5}, 12)
    assert ask(5) != ask(6)
    assert ask(None) != ask(None), "without a seed every answer is drawn anew"
    greedy = [client.completions.create(**{**TEXT, "seed": seed}).choices[0].text for seed in (5, 6)]
    assert greedy[0] == greedy[1]


# -- where answers end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("endpoint", ["chat", "text"])
async def test_a_stop_string_cuts_the_text_wherever_it_lies(
    http: httpx.AsyncClient, oracle: Oracle, endpoint: str, stream: bool
) -> None:
    body, path = (CHAT, "/v1/chat/completions") if endpoint == "chat" else (TEXT, "/v1/completions")
    tokens = oracle.tokens(body, 40)
    text = oracle.text(tokens)
    # Within a token, over several tokens, a whole token, at the very start, and one that never comes.
    spots = [text[17:19], text[30:48], oracle.text(tokens[5:6]), text[:1], "\u2603"]

    async def ask(stop: str | list[str]) -> tuple[str, str]:
        answer = await ok(http.post(path, json={**body, "max_tokens": 40, "stop": stop, "stream": stream}))
        if stream:
            events = parse_sse(answer.content)
            reasons = [part["finish_reason"] for event in events[:-1] for part in event.body["choices"]]
            return joined(events), reasons[-1]
        [choice] = answer.json()["choices"]
        return choice["text"] if endpoint == "text" else choice["message"]["content"], choice["finish_reason"]

    answers = await asyncio.gather(*map(ask, spots), ask([spots[1], "\u2603", spots[2]]))
    for stop, (got, reason) in zip(spots, answers[:-1], strict=True):
        assert got == text.partition(stop)[0]
        assert reason == ("stop" if stop in text else "length")
    ends = {stop: text.find(stop) + len(stop) for stop in (spots[1], spots[2])}
    first = min(ends, key=ends.__getitem__)
    assert answers[-1] == (text[: ends[first] - len(first)], "stop")


async def test_a_stop_string_can_be_kept_in_the_answer(http: httpx.AsyncClient, oracle: Oracle) -> None:
    text = oracle.answer(TEXT, 12)
    stop = text[20:26]
    body = {**TEXT, "stop": stop, "include_stop_str_in_output": True}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"] == text.partition(stop)[0] + stop


async def test_generation_ends_with_the_stop_string_and_not_later(http: httpx.AsyncClient, oracle: Oracle) -> None:
    tokens = oracle.tokens(TEXT, 12)
    stop = oracle.text(tokens[4:5])
    first = next(i for i in range(12) if stop in oracle.text(tokens[: i + 1]))
    usage = (await http.post("/v1/completions", json={**TEXT, "max_tokens": 3000, "stop": stop})).json()["usage"]
    assert usage["completion_tokens"] == first + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_token_ends_the_answer_and_is_not_shown(
    http: httpx.AsyncClient, oracle: Oracle, stream: bool
) -> None:
    tokens = oracle.tokens(TEXT, 12)
    stop = tokens[6]
    before = tokens[: tokens.index(stop)]
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = {**TEXT, "stop_token_ids": [stop], **options}
    answer = await http.post("/v1/completions", json=body)
    if stream:
        events = parse_sse(answer.content)
        text, usage, reason = joined(events), events[-2].body["usage"], events[-3].body["choices"][0]["finish_reason"]
    else:
        [choice] = answer.json()["choices"]
        text, usage, reason = choice["text"], answer.json()["usage"], choice["finish_reason"]
    assert text == oracle.text(before)
    assert reason == "stop"
    assert usage["completion_tokens"] == len(before) + 1


async def test_min_tokens_keeps_stop_tokens_and_stop_strings_away(http: httpx.AsyncClient, oracle: Oracle) -> None:
    tokens = oracle.tokens(TEXT, 12)
    body = {**TEXT, "stop_token_ids": [tokens[1]], "min_tokens": 8}
    answer = (await http.post("/v1/completions", json=body)).json()
    expected = oracle.tokens(TEXT, 12, barred=[tokens[1]], barred_tokens=8)
    if tokens[1] in expected[8:]:
        expected = expected[: expected.index(tokens[1], 8)]
    assert answer["choices"][0]["text"] == oracle.text(expected)
    assert answer["usage"]["completion_tokens"] >= 8
    text = oracle.text(tokens)
    body = {**TEXT, "stop": text[3:6], "min_tokens": 10}
    assert (await http.post("/v1/completions", json=body)).json()["usage"]["completion_tokens"] >= 10


def test_max_completion_tokens_is_the_new_name_and_wins(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**{**CHAT, "max_tokens": 9}, max_completion_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


# -- logprobs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_name_every_token_and_its_rivals(client: openai.OpenAI, oracle: Oracle, stream: bool) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 3}
    if stream:
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**body, stream=True)]
        entries = [entry for choice in chunks if choice.logprobs for entry in choice.logprobs.content or ()]
        carried = [len(choice.logprobs.content or ()) for choice in chunks if choice.logprobs]
        assert carried == [1] * 12, "each chunk carries its own token's"
    else:
        entries = client.chat.completions.create(**body).choices[0].logprobs.content
    assert [entry.token for entry in entries] == [oracle.text([token]) for token in oracle.tokens(CHAT, 12)]
    for entry in entries:
        assert entry.logprob == pytest.approx(-math.log(2))
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token
        assert all(a.logprob >= b.logprob for a, b in pairwise(entry.top_logprobs))


def test_text_logprobs_say_where_each_token_starts(client: openai.OpenAI, oracle: Oracle) -> None:
    [choice] = client.completions.create(**TEXT, logprobs=2).choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens) == choice.text == oracle.answer(TEXT, 12)
    offsets = zip(logprobs.text_offset, logprobs.tokens, strict=True)
    assert all(choice.text[at:].startswith(token) for at, token in offsets)
    assert all(value == pytest.approx(-math.log(2)) for value in logprobs.token_logprobs)
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 12
    assert all(token in top for token, top in zip(logprobs.tokens, logprobs.top_logprobs, strict=True))
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**TEXT, logprobs=2, stream=True)]
    assert [at for part in streamed if part for at in part.text_offset] == logprobs.text_offset


def test_logprobs_without_rivals(client: openai.OpenAI) -> None:
    [choice] = client.chat.completions.create(**CHAT, logprobs=True).choices
    assert choice.logprobs is not None
    assert [entry.top_logprobs for entry in choice.logprobs.content or ()] == [[]] * 12


# -- everything else a client may send ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {"logit_bias": {"17": 5.0, "18": -100}},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5},
        {"top_p": 0.5},
        {"user": "somebody"},
        {"n": 1, "stop": None, "seed": None},
        {"service_tier": "flex"},
        {"metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True},
        {"response_format": {"type": "text"}},
        {"extra_body": {"ignore_eos": True, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}},
        {"extra_body": {"priority": "interactive"}},
        {"extra_body": {"priority": "batch", "timeout_s": 30, "cache_salt": "mine"}},
    ],
    ids=lambda more: next(iter(more.get("extra_body", more))),
)
def test_options_are_accepted(client: openai.OpenAI, oracle: Oracle, more: dict[str, Any]) -> None:
    answer = client.chat.completions.create(**CHAT, **more)
    assert answer.choices[0].message.content == oracle.answer(CHAT, 12)


def test_parts_of_content_are_written_as_the_template_writes_them(client: openai.OpenAI, oracle: Oracle) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "the name of the river?"}]
    plain = {**CHAT, "messages": [{"role": "user", "content": "What isthe name of the river?"}]}
    answer = client.chat.completions.create(**{**CHAT, "messages": [{"role": "user", "content": parts}]})
    assert answer.choices[0].message.content == oracle.answer(plain, 12)


def test_another_served_name_is_accepted_and_answered_under_the_first(client: openai.OpenAI, oracle: Oracle) -> None:
    answer = client.chat.completions.create(**{**CHAT, "model": "other"})
    assert answer.choices[0].message.content == oracle.answer(CHAT, 12)
    assert answer.model == "tiny"


def test_models_are_listed_by_all_their_names(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "other"]
    assert client.models.retrieve("other").id == "other"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


async def test_a_template_file_replaces_the_models_own(slow_http: httpx.AsyncClient, oracle: Oracle) -> None:
    rendered = "[system] Be brief. [user] What is the name of the river? =>"
    answer = (await slow_http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 3})).json()
    as_text = {"prompt": oracle.model.tokenizer.encode(rendered, add_special_tokens=False).ids, "temperature": 0}
    assert answer["choices"][0]["message"]["content"] == oracle.answer(as_text, 3)


async def test_the_longest_answers_arrive_whole(http: httpx.AsyncClient, oracle: Oracle) -> None:
    body = {"model": "tiny", "prompt": token_prompt(40, 3), "temperature": 0, "max_tokens": 4000}
    whole, streamed = await asyncio.gather(
        http.post("/v1/completions", json=body), http.post("/v1/completions", json={**body, "stream": True})
    )
    assert whole.json()["choices"][0]["text"] == joined(parse_sse(streamed.content)) == oracle.answer(body, 4000)


async def test_a_hundred_thousand_tokens_go_in(fast: Deployment, http: httpx.AsyncClient, oracle: Oracle) -> None:
    body = {"model": "tiny", "prompt": token_prompt(100_000, 1), "temperature": 0, "max_tokens": 5}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert answer["usage"]["prompt_tokens"] == 100_000
    assert answer["choices"][0]["text"] == oracle.answer(body, 5)
    text = {"model": "tiny", "prompt": words(20_000, 4), "temperature": 0, "max_tokens": 5}
    answer = (await http.post("/v1/completions", json=text)).json()
    assert answer["usage"]["prompt_tokens"] > 40_000
    assert answer["choices"][0]["text"] == oracle.answer(text, 5)


async def test_a_hundred_clients_at_once_each_get_their_own_answer(aclient: openai.AsyncOpenAI, oracle: Oracle) -> None:
    bodies = [{**TEXT, "prompt": words(20 + i % 50, 1000 + i), "max_tokens": 1 + i % 30} for i in range(100)]

    async def ask(number: int, body: dict[str, Any]) -> str:
        if number % 2:
            return str((await aclient.completions.create(**body)).choices[0].text)
        stream = await aclient.completions.create(**body, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    answers = await asyncio.gather(*(ask(number, body) for number, body in enumerate(bodies)))
    assert list(answers) == [oracle.answer(body, body["max_tokens"]) for body in bodies]


def test_ignored_options_are_named_in_a_header_and_tokens_are_counted_without_a_request(fast: Deployment) -> None:
    url = fast.urls[0]
    answer = httpx.post(f"{url}/v1/chat/completions", json=CHAT | {"nosuch": 1, "metadata": {}})
    assert (answer.status_code, answer.headers["x-penstock-ignored-options"]) == (200, "nosuch")
    counted = httpx.post(f"{url}/tokenize", json={"messages": CHAT["messages"]}).json()
    assert counted["count"] == answer.json()["usage"]["prompt_tokens"] == len(counted["tokens"])
    assert httpx.post(f"{url}/detokenize", json={"tokens": counted["tokens"]}).json()["prompt"].endswith("assistant\n")
    assert httpx.post(f"{url}/tokenize", json={"prompt": 1}).status_code == 400


def test_several_prompts_are_answered_in_order_as_each_would_be_alone(
    fast: Deployment, client: openai.OpenAI, oracle: Oracle
) -> None:
    prompts = ["The river is called", "The broker keeps", "One more"]
    answer = client.completions.create(**TEXT | {"prompt": prompts, "n": 2})
    alone = [oracle.answer(TEXT | {"prompt": prompt}, 12) for prompt in prompts]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [text for text in alone for _ in range(2)]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6 * 12
    streamed = dict.fromkeys(range(6), "")
    usages = []
    with client.completions.create(
        **TEXT | {"prompt": prompts, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    ) as stream:
        for chunk in stream:
            usages += [chunk.usage] if chunk.usage is not None else []
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
    assert [*streamed.values()] == [text for text in alone for _ in range(2)]
    assert [usage.completion_tokens for usage in usages] == [6 * 12]
    for more in ({}, {"stream": True}):
        gone = httpx.post(f"{fast.urls[0]}/v1/completions", json=TEXT | {"prompt": prompts, "timeout_s": 0.001, **more})
        assert (gone.status_code, gone.json()["error"]["code"]) == (504, "deadline_exceeded")
    body = TEXT | {"prompt": [*prompts, "x" * 1_000_000]}
    refused = httpx.post(f"{fast.urls[0]}/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
