"""Images and videos through a deployment of a small Qwen2.5-VL model: answers are those of transformers' ``generate``.

Each is asked of one worker, which does everything, and of an encode, a prefill and a decode worker.
"""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.infra.bus.connection import Bus, connect
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, ending
from tests.workers.engines.native.qwen_vl import film, generated, picture, write

pytestmark = pytest.mark.timeout(180)

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


@pytest.fixture
async def http(apart: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=apart.urls[0], trust_env=False, timeout=60) as made:
        yield made


@pytest.fixture
async def bus(apart: Deployment) -> AsyncIterator[Bus]:
    bus = await connect(apart.state.nats_url, role="client", name="test")
    yield bus
    await bus.close()


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
    answer = await http.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
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
