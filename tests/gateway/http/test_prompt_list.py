import asyncio
import json
from collections.abc import MutableMapping
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.configs.settings import GatewaySettings
from penstock.gateway.base.event_stream import COMMENT
from penstock.gateway.http.asgi import ClientIds
from penstock.gateway.http.prompt_list import (
    MAX_PROMPTS,
    PromptListRenderer,
    _PromptStream,
    answer_prompts,
    merge_answers,
    split_prompts,
)
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.tokens import Finish, TokenItem
from tests.gateway.answers import DETOKENIZER, ID, STOP, items, request


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


def test_half_of_a_utf_16_pair_in_a_prompt_is_a_replacement_character() -> None:
    bodies = split_prompts(rb'{"model": "m", "prompt": ["a\ud83d", "b"]}')
    assert [json.loads(body)["prompt"] for body in bodies] == ["a�", "b"]


def test_too_many_prompts_are_refused() -> None:
    with pytest.raises(ServingError, match="limit is 256") as caught:
        split_prompts(body(["a"] * (MAX_PROMPTS + 1)))
    assert caught.value.param == "prompt"


def test_a_stream_has_each_prompts_choices_under_their_own_index_one_usage_and_one_end() -> None:
    first = request("text", parsing=None)
    requests = [msgspec.structs.replace(first, n=2), msgspec.structs.replace(first, id="other", n=2)]
    renderer = PromptListRenderer(requests, DETOKENIZER, include_usage=True)
    data = b""
    for place, choice in ((1, 0), (0, 1), (1, 1), (0, 0)):
        assert not renderer.ended(place)
        for item in items("one two", STOP):
            data += renderer.push(place, [msgspec.structs.replace(item, choice=choice)])
    assert renderer.ended(0)
    assert renderer.ended(1)
    data += renderer.end()
    assert data.endswith(b"data: [DONE]\n\n")
    assert b"id: " not in data, "no request has the whole stream"
    *chunks, usage = [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: {")]
    assert {chunk["id"] for chunk in [*chunks, usage]} == {f"cmpl-{first.id}"}
    assert all(chunk["usage"] is None for chunk in chunks)
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        (choice_of,) = chunk["choices"]
        texts[choice_of["index"]] += choice_of["text"]
    assert texts == dict.fromkeys(range(4), "one two")
    assert [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]] == [2, 1, 3, 0]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 2 * (len(first.prompt) // 4)
    assert usage["usage"]["completion_tokens"] == 4 * len(items("one two", STOP))


def test_a_failed_prompt_ends_the_stream() -> None:
    renderer = PromptListRenderer([request("text", parsing=None)] * 2, DETOKENIZER)
    failed = TokenItem(ID, 1, 0, 0, b"", Finish("error", None, 0, "worker_lost", "gone"))
    with pytest.raises(ServingError, match="gone"):
        renderer.push(1, [failed])


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


async def test_each_prompt_of_a_list_waits_for_its_portion() -> None:
    steps: list[str] = []
    gateway = MagicMock()

    async def enter() -> None:
        steps.append("portion")

    async def prepare(body: bytes) -> MagicMock:
        steps.append(body.decode())
        if body == b"c":
            raise ServingError(Code.invalid_request, "this is all")
        return MagicMock()

    gateway.turns.enter, gateway.run_for = enter, AsyncMock(return_value=[b"a", b"b", b"c"])
    with pytest.raises(ServingError):
        await answer_prompts(gateway, b"", MagicMock(spec=ClientIds, key=""), prepare, {}, AsyncMock(), 0.0)
    assert steps == ["portion", "a", "portion", "b", "portion", "c"]


async def test_a_stream_of_several_prompts_sends_comments_while_all_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.http.prompt_list.HEAD_S", 0.001)
    asked = [msgspec.structs.replace(request("text", parsing=None), id=f"r{number}") for number in range(3)]
    inflights = [InflightRequest(each) for each in asked]
    sent, seen = bytearray(), asyncio.Event()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.extend(message.get("body", b""))
        if sent.count(COMMENT) >= 3:
            seen.set()

    gateway = MagicMock(settings=GatewaySettings(stream_ping_s=0.001))
    stream = _PromptStream(gateway, inflights, send, 0.0, DETOKENIZER, include_usage=False)
    streaming = asyncio.create_task(stream.run())
    async with asyncio.timeout(10):
        await seen.wait()
        for inflight in inflights:
            for seq, item in enumerate(items("Hi there.", STOP)):
                inflight.feed(msgspec.structs.replace(item, request=inflight.request.id), seq)
        await streaming
    assert sent.endswith(b"data: [DONE]\n\n")
    assert bytes(sent).replace(COMMENT, b"").count(b'"finish_reason":"stop"') == 3
