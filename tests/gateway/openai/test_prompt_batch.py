"""Completions of several prompts."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.prompt_batch import MAX_PROMPTS, merge_answers, split_prompts
from schemas.errors import ServingError


def body(prompt: Any, **options: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": prompt, **options}).encode()


@given(st.lists(st.text() | st.lists(st.integers(0, 9), min_size=1), min_size=2, max_size=5), st.booleans())
def test_each_prompt_gets_a_body_with_the_same_options(prompts: list[Any], stream_said: bool) -> None:
    options = {"n": 2, "nested": {"prompt": 1}} | ({"stream": False} if stream_said else {})
    assert [json.loads(each) for each in split_prompts(body(prompts, **options))] == [
        {"model": "tiny", "prompt": each, **options} for each in prompts
    ]


@pytest.mark.parametrize("prompt", ["a", ["a"], [[1, 2]], [1, 2, 3], [], [1, "a"], {"a": 1}, None])
def test_one_prompt_and_what_is_none_are_left_to_the_usual_way(prompt: Any) -> None:
    assert split_prompts(body(prompt)) == ()


@given(st.binary(max_size=40))
def test_what_is_no_body_is_left_to_the_usual_way(data: bytes) -> None:
    assert split_prompts(data) == ()


@pytest.mark.parametrize(
    ("options", "prompts", "message"), [({"stream": True}, 2, "stream: true"), ({}, MAX_PROMPTS + 1, "limit is 256")]
)
def test_streams_and_too_many_prompts_are_refused(options: dict[str, Any], prompts: int, message: str) -> None:
    with pytest.raises(ServingError, match=message) as caught:
        split_prompts(body(["a"] * prompts, **options))
    assert caught.value.param == "prompt"


def test_the_answers_become_one_with_numbered_choices_and_the_sum_of_their_usage() -> None:
    def answer(id: str, texts: list[str]) -> bytes:
        choices = [{"index": at, "text": text, "logprobs": None} for at, text in enumerate(texts)]
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        cached = {"prompt_tokens_details": {"cached_tokens": 1}}
        whole = {"id": id, "created": 5, "model": "m", "choices": choices, "usage": usage | cached}
        return json.dumps(whole | {"object": "text_completion"}, separators=(",", ":")).encode()

    merged = json.loads(merge_answers([answer("x", ["a", "b"]), answer("y", ["c", "d"])]))
    assert [(each["index"], each["text"]) for each in merged["choices"]] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert merged["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert (merged["id"], merged["object"]) == ("x", "text_completion")


def test_a_body_that_is_nested_too_deeply_is_left_to_the_parser() -> None:
    assert split_prompts(b'{"prompt": ["a", "b"], "x": ' + b"[" * 100_000) == ()
    assert split_prompts(b'{"prompt": ' + b"[" * 100_000) == ()
