"""Scores of prompts over HTTP: whole answers, choices, echo, repeated prompts, refusals; and by OpenAI's client."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.pipeline.support import Oracle, described, ok, token_prompt, words


def text(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 5, **more}


async def ask(http: httpx.AsyncClient, asked: dict[str, Any], path: str = "/v1/completions") -> Any:
    return (await ok(http.post(path, json=asked))).json()


@pytest.mark.parametrize("top", [0, 1, 20])
async def test_each_token_of_a_prompt_has_its_own_and_the_best(
    http: httpx.AsyncClient, oracle: Oracle, top: int
) -> None:
    asked = text(words(60, 4400 + top), prompt_logprobs=top)
    (choice,) = (await ask(http, asked))["choices"]
    assert described(choice["prompt_logprobs"], oracle.prompt(asked), top) == oracle.scores(asked, top)
    assert choice["text"] == oracle.answer(asked, 5)
    assert choice["logprobs"] is None
    entry = choice["prompt_logprobs"][1]
    for token, value in entry.items():
        assert value["decoded_token"] == oracle.model.detokenizer.raw(int(token)).decode("utf-8", "replace")


async def test_a_conversation_has_them_beside_its_choices(http: httpx.AsyncClient, oracle: Oracle) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": words(30, 4410)}],
        "temperature": 1.0,
        "seed": 3,
        "max_tokens": 4,
        "n": 2,
        "prompt_logprobs": 3,
    }
    answer = await ask(http, asked, "/v1/chat/completions")
    assert described(answer["prompt_logprobs"], oracle.prompt(asked), 3) == oracle.scores(asked, 3)
    assert [c["message"]["content"] for c in answer["choices"]] == [oracle.answer(asked, 4, c) for c in range(2)]


async def test_a_prompt_that_is_cached_is_scored_whole_and_stays_cached(
    http: httpx.AsyncClient, oracle: Oracle
) -> None:
    prompt = token_prompt(400, 4420)
    asked = text(prompt, prompt_logprobs=1, n=2)
    plain = text(prompt)
    await ask(http, plain)
    answers = await asyncio.gather(*(ask(http, asked) for _ in range(3)))
    for answer in answers:
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for choice in answer["choices"]:
            assert described(choice["prompt_logprobs"], prompt, 1) == oracle.scores(asked, 1)
    for _ in range(100):  # both workers have computed it by now, or will be asked again
        if (await ask(http, plain))["usage"]["prompt_tokens_details"]["cached_tokens"] == 384:
            return
    raise AssertionError("never found in the cache")


async def test_they_are_read_again_from_the_log(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json=text(words(10, 4430), prompt_logprobs=1, echo=True, logprobs=1))
    status = (await http.get(f"/v1/requests/{answer.headers['x-request-id']}")).json()
    assert status["state"] == "done"
    assert status["result"] == answer.json()


def test_echo_scores_a_text_for_openai_s_own_client(client: openai.OpenAI, oracle: Oracle) -> None:
    """As evaluation harnesses do it: the text's own log-probabilities, with and without an answer behind."""
    asked = text(words(20, 4440))
    prompt, scores = oracle.prompt(asked), oracle.scores(asked, 1)
    said = oracle.answer(asked, 2)
    for count in (0, 2):
        answer = client.completions.create(**{**asked, "max_tokens": count}, echo=True, logprobs=1)
        (choice,) = answer.choices
        assert choice.text == asked["prompt"] + (said if count else "")
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.text_offset is not None
        assert "".join(logprobs.tokens) == choice.text
        assert logprobs.token_logprobs[: len(prompt)] == [None, *(each.logprob for each in scores)]
        assert len(logprobs.tokens) == len(prompt) + count
        assert [
            choice.text[at:].startswith(token) for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)
        ]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), count)
    plain = client.completions.create(**asked, echo=True)
    assert plain.choices[0].text == asked["prompt"] + oracle.answer(asked, 5)
    assert plain.choices[0].logprobs is None


@pytest.mark.parametrize(
    ("path", "more", "field", "says"),
    [
        ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs", "<= 20"),
        ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ("/v1/completions", {"prompt": [5] * 7000, "prompt_logprobs": 20}, "prompt_logprobs", "131072"),
        ("/v1/completions", {"prompt": [5] * 7000, "echo": True, "logprobs": 20}, "logprobs", "131072"),
        ("/v1/completions", {"max_tokens": 0}, "max_tokens", "at least 1"),
        ("/v1/chat/completions", {"prompt_logprobs": -1}, "prompt_logprobs", ">= 0"),
    ],
)
async def test_a_refusal_names_the_field_and_its_limit(
    http: httpx.AsyncClient, path: str, more: dict[str, Any], field: str, says: str
) -> None:
    base = (
        text("hi") if path == "/v1/completions" else {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    )
    answer = await http.post(path, json=base | more)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert says in error["message"]


async def test_a_prompt_near_the_limit_is_scored(http: httpx.AsyncClient, oracle: Oracle) -> None:
    """120,000 values: over a hundred items in the token stream, ten megabytes of answer."""
    asked = text(token_prompt(10_000, 4450), prompt_logprobs=11, max_tokens=1)
    (choice,) = (await ask(http, asked))["choices"]
    found = described(choice["prompt_logprobs"], asked["prompt"], 11)
    assert len(found) == 9_999
    assert found[-1].top[0][0] == oracle.tokens(text(asked["prompt"][:-1]), 1)[0]
