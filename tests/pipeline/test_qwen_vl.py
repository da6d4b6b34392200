"""Images and videos through a deployment of a small Qwen2.5-VL model: answers are those of transformers' ``generate``.

Each is asked of one worker, which does everything, and of an encode, a prefill and a decode worker.
"""

import base64
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from penstock.infra.bus.connection import Bus
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, bus_of, ending, http_of, ok
from tests.workers.engines.native.qwen_vl import film, generated, noisy, picture, write

# test_disaggregated_native has images through these stages, engines/native/test_qwen_vl the model; more load torch.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

A, B = picture(40, 90, 1), picture(150, 31, 2)
FILM, LONG = film(30, 10, 64, 48), film(80, 5, 40, 70)
COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("qwen-vl"))


@pytest.fixture(scope="module")
def apart(new_deployment: NewDeployment, folder: Path) -> Deployment:
    return new_deployment(
        *("--engine", "native", "--model", str(folder), "--served-model-name", "m", "--threads", "1"),
        *("--kv-blocks", "300", "--prefill", "1", "--decode", "1", "--encode", "1", "--local-prefill-tokens", "16"),
    )


http = http_of("apart")
bus = bus_of("apart")


def part(value: str | bytes) -> dict[str, Any]:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    kind = "image" if value.startswith(b"\x89PNG") else "video"
    url = f"data:{kind}/{'png' if kind == 'image' else 'mp4'};base64,{base64.b64encode(value).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def said(*parts: str | bytes) -> dict[str, Any]:
    return {"role": "user", "content": [part(each) for each in parts]}


def body(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    asked = {"model": "m", "messages": messages, "max_tokens": COUNT, "temperature": 0, "return_token_ids": True}
    return {**asked, "ignore_eos": True, **more}


async def ask(http: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[str, Any]:
    answer = await ok(http.post("/v1/chat/completions", json=asked))
    return answer.headers["x-request-id"], answer.json()


def tokens(answer: Any) -> list[int]:
    return answer["choices"][0]["token_ids"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "parts",
    [(A, "Describe the picture."), ("First", A, "and then", B, "?"), (LONG, "What happens?"), (FILM, A, "Tell.")],
    ids=["one image", "two images", "a video", "both"],
)
async def test_media_are_answered_as_transformers_answers_them_by_one_worker_and_by_three(
    http: httpx.AsyncClient, bus: Bus, folder: Path, parts: tuple[str | bytes, ...]
) -> None:
    _, whole = await ask(http, body(said(*parts), worker="prefill-0", cache_salt="whole"))
    media = [each for each in parts if isinstance(each, bytes)]
    assert tokens(whole) == generated(folder, whole["prompt_token_ids"], media, COUNT)
    request, split = await ask(http, body(said(*parts)))
    timeline, _ = await ending(bus, request)
    assert [stage.role for stage in timeline.routed[0].decision.route] == ["encode", "prefill", "decode"]
    assert (split["prompt_token_ids"], tokens(split)) == (whole["prompt_token_ids"], tokens(whole))


async def test_a_second_turn_finds_the_video_in_the_cache(http: httpx.AsyncClient, folder: Path) -> None:
    """Also what was generated: its tokens have the positions that the same tokens have in a prompt."""
    first = said(LONG, "What happens?")
    _, one = await ask(http, body(first, worker="prefill-0", max_tokens=70))
    answered = {"role": "assistant", "content": one["choices"][0]["message"]["content"]}
    second = body(first, answered, said("And ", A, " too?"), worker="prefill-0")
    _, two = await ask(http, second)
    details = two["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= len(one["prompt_token_ids"]) - 32
    assert tokens(two) == generated(folder, two["prompt_token_ids"], [LONG, A], COUNT)


async def test_another_video_with_the_same_text_shares_nothing(http: httpx.AsyncClient) -> None:
    other = film(30, 10, 64, 48, "libx264")  # as many tokens, other bytes
    _, one = await ask(http, body(said(FILM, "Which?"), worker="prefill-0", cache_salt="bytes"))
    _, two = await ask(http, body(said(other, "Which?"), worker="prefill-0", cache_salt="bytes"))
    assert two["prompt_token_ids"] == one["prompt_token_ids"]
    assert two["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_media_that_cannot_be_used_are_refused_and_the_next_request_is_served(http: httpx.AsyncClient) -> None:
    broken = FILM[: len(FILM) // 2]
    for parts, words in (
        ([part(broken)], "video_url cannot be decoded"),
        ([part(A) | {"type": "video_url", "video_url": part(A)["image_url"]}], "video_url is not an MP4, MOV, WebM"),
        ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], "no model here takes audio"),
    ):
        answer = await http.post("/v1/chat/completions", json=body({"role": "user", "content": parts}))
        assert answer.status_code == 400, answer.text
        assert words in answer.json()["error"]["message"]
    await ask(http, body(said(FILM, "Still there?"), max_tokens=2))


async def test_a_video_of_a_request_with_no_store_is_in_memory_only(
    http: httpx.AsyncClient, bus: Bus, folder: Path
) -> None:
    raw = film(24, 6, 48, 64)
    before = (await bus.js.stream_info(f"OBJ_{bus.subjects.bucket('media')}")).state.bytes
    _, answer = await ask(http, body(said(raw, "What happens?"), no_store=True))
    assert tokens(answer) == generated(folder, answer["prompt_token_ids"], [raw], COUNT)
    assert (await bus.js.stream_info(f"OBJ_{bus.subjects.bucket('media')}")).state.bytes == before


async def test_a_stock_client_asks_about_a_video(apart: Deployment, folder: Path) -> None:
    async with openai.AsyncOpenAI(base_url=apart.urls[0] + "/v1", api_key="unused", max_retries=0) as client:
        answer = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": [part(FILM), part("What happens?")]}],  # type: ignore[list-item]
            max_tokens=COUNT,
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
    told: Any = answer
    assert told.choices[0].token_ids == generated(folder, told.prompt_token_ids, [FILM], COUNT)


async def test_of_a_video_nothing_passes_the_streams_of_work(http: httpx.AsyncClient, bus: Bus) -> None:
    large = noisy()
    assert len(large) > 1 << 20

    async def stored() -> tuple[int, int]:
        """Bytes in the bucket of media, and in all other streams."""
        found = {each.config.name: each.state.bytes for each in await bus.js.streams_info()}
        media = sum(size for name, size in found.items() if name.endswith("_media"))
        return media, sum(found.values()) - media

    media, other = await stored()
    request, _ = await ask(http, body(said(large, "What happens?")))
    timeline, _ = await ending(bus, request)
    assert [stage.role for stage in timeline.routed[0].decision.route] == ["encode", "prefill", "decode"]
    media_now, other_now = await stored()
    assert len(large) < media_now - media < len(large) + (256 << 10)
    assert other_now - other < 128 << 10


async def test_a_worker_that_is_killed_in_mid_answer_is_continued_by_another(
    http: httpx.AsyncClient, bus: Bus, apart: Deployment, folder: Path
) -> None:
    count, got, prompt, killed = 600, list[int](), list[int](), False
    asked = body(said(LONG, "Tell", B, "all."), max_tokens=count, stream=True, cache_salt="killed")
    async with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
        request = answer.headers["x-request-id"]
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            prompt = event.get("prompt_token_ids") or prompt
            for choice in event["choices"]:
                got += choice.get("token_ids") or ()
            if len(got) > 20 and not killed:
                killed = True
                decode = next(each for each in apart.state.processes if each.name == "decode-0")
                os.kill(decode.pid, signal.SIGKILL)
    assert got == generated(folder, prompt, [LONG, B], count)
    timeline, _ = await ending(bus, request)
    assert len(timeline.routed) > 1
