"""Encode, prefill and decode apart on the native engine: the same answers as from one worker, also with edited logits.

The reference for each answer is the same request given to the prefill worker by name, which then does all of it.
"""

import asyncio
import base64
import io
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from penstock.infra.bus.connection import Bus
from penstock.infra.model import modeldir
from penstock.log_tools.requests.leases import leases
from penstock.schemas.jobs import Stage
from penstock.schemas.requests import FALLBACK
from penstock.workers.engines.constraints.compiler import ALL_CONSTRAINTS
from tests.demo_model import vision
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import (
    Deployment,
    bus_of,
    ending,
    http_of,
    idle_workers,
    joined,
    ok,
    parse_sse,
    registrations,
    until,
)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def apart(new_deployment: NewDeployment) -> Deployment:
    return new_deployment(
        *("--engine", "native", "--model", "demo-vision", "--threads", "1", "--kv-blocks", "600"),
        *("--prefill", "1", "--decode", "1", "--encode", "1", "--local-prefill-tokens", "16"),
    )


apart_bus = bus_of("apart")
http = http_of("apart")


def picture(seed: int) -> str:
    return "data:image/png;base64," + base64.b64encode(vision.png(vision.scene(Random(seed), True))).decode()


def body(*parts: str | dict[str, Any], **more: Any) -> dict[str, Any]:
    """A question; strings that are data URLs become images."""
    content = [
        part
        if isinstance(part, dict)
        else {"type": "image_url", "image_url": {"url": part}}
        if part.startswith("data:")
        else {"type": "text", "text": part}
        for part in parts
    ]
    return {"messages": [{"role": "user", "content": content}], "model": "demo-vision", "max_tokens": 24, **more}


async def ask(http: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[str, Any]:
    answer = await ok(http.post("/v1/chat/completions", json=asked))
    return answer.headers["x-request-id"], answer.json()


def roles(route: tuple[Stage, ...]) -> list[str]:
    return [stage.role for stage in route]


async def both(http: httpx.AsyncClient, bus: Bus, asked: dict[str, Any], *, salt: str) -> tuple[Any, Any, list[str]]:
    """The answer of one worker, that of several, and their roles. The salt keeps the two from sharing a cache."""
    _, whole = await ask(http, {**asked, "worker": "prefill-0", "cache_salt": salt + "w"})
    request, split = await ask(http, {**asked, "cache_salt": salt})
    timeline, _ = await ending(bus, request)
    return whole, split, roles(timeline.routed[0].decision.route)


def shown(answer: Any) -> Any:
    """What a client sees, without ids and times."""
    usage = {key: answer["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    return [{**choice, "logprobs": _rounded(choice.get("logprobs"))} for choice in answer["choices"]], usage


def _rounded(logprobs: Any) -> Any:
    """Chunks of another size give logits that differ in the last bits."""
    if not logprobs:
        return logprobs
    return [(each["token"], round(each["logprob"], 2)) for each in logprobs["content"]]


ROOMS = " ".join(f"The code of room {number} is {number * 37 % 1000}." for number in range(90))


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (body("What is 347 + 586?"), "933"),
        (body("Spell the word harbour.", stop=["b-o"]), "h-a-r-"),
        (body("Reverse the word lantern.", logprobs=True, top_logprobs=2), "nretnal"),
        (body("How do I start a worker?", temperature=0.8, seed=3, n=3), ""),
        (body(f"{ROOMS} What is the code of room 33?", max_tokens=40), "221"),
    ],
    ids=["greedy", "stop", "logprobs", "seeded choices", "long context"],
)
async def test_text_is_the_same_from_two_workers_as_from_one(
    http: httpx.AsyncClient, apart_bus: Bus, asked: dict[str, Any], wanted: str
) -> None:
    whole, split, route = await both(http, apart_bus, {"temperature": 0, **asked}, salt=wanted + "t")
    assert route == ["prefill", "decode"]
    assert shown(split) == shown(whole)
    assert wanted in split["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    "asked",
    [
        body(picture(1), "What color is the shape?"),
        body(picture(2), picture(3), "How many shapes are there?", temperature=0.9, seed=5, n=2),
        body("Look at this.", picture(4), "What do you see?", max_tokens=60),
        body(picture(5), "?" * 3, stop=["is"], logprobs=True),
    ],
    ids=["one", "two, seeded", "in the middle", "stop and logprobs"],
)
async def test_images_are_seen_alike_through_three_workers_and_in_one(
    http: httpx.AsyncClient, apart_bus: Bus, asked: dict[str, Any]
) -> None:
    whole, split, route = await both(http, apart_bus, {"temperature": 0, **asked}, salt="i")
    assert route == ["encode", "prefill", "decode"]
    assert shown(split) == shown(whole)


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        (body(f"{ROOMS} What is the code of room 7?", n=2), ["prefill", "decode"]),
        (body(picture(6), "What do you see?"), ["encode", "prefill", "decode"]),
    ],
    ids=["text", "image"],
)
async def test_prompts_are_scored_alike_through_several_workers_and_in_one(
    http: httpx.AsyncClient, apart_bus: Bus, asked: dict[str, Any], wanted: list[str]
) -> None:
    scored = {"temperature": 0, "max_tokens": 4, "prompt_logprobs": 1, **asked, "max_completion_tokens": 4}
    whole, split, route = await both(http, apart_bus, scored, salt="s")
    assert route == wanted
    assert shown(split) == shown(whole)
    assert len(split["prompt_logprobs"]) == split["usage"]["prompt_tokens"]
    for one, other in zip(split["prompt_logprobs"][1:], whole["prompt_logprobs"][1:], strict=True):
        for token in one.keys() & other.keys():
            assert one[token]["logprob"] == pytest.approx(other[token]["logprob"], abs=0.01)
        assert 1 <= len(one.keys() & other.keys()) <= 2


async def test_images_share_cached_blocks_with_themselves_only(http: httpx.AsyncClient, apart_bus: Bus) -> None:
    first = body(picture(11), "What do you see?", temperature=0, max_tokens=60)
    other = body(picture(12), "What do you see?", temperature=0, max_tokens=60)
    _, one = await ask(http, first)
    _, two = await ask(http, other)
    assert two["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert one["choices"][0]["message"]["content"] != two["choices"][0]["message"]["content"]

    async def from_the_cache() -> bool:
        _, again = await ask(http, first)
        assert again["choices"] == one["choices"]
        return bool(again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64)

    await until(from_the_cache, "the second time it comes from the cache")


async def test_a_large_image_is_stored_once_and_nothing_that_is_made_of_it_passes_the_broker(
    http: httpx.AsyncClient, apart_bus: Bus
) -> None:
    """Images become part of an accepted request when they are stored; embeddings and KV go from worker to worker."""
    noise = io.BytesIO()
    Image.frombytes("RGB", (700, 560), Random(5).randbytes(3 * 700 * 560)).save(noise, "PNG")
    raw = noise.getvalue()
    assert len(raw) > 1 << 20
    url = "data:image/png;base64," + base64.b64encode(raw).decode()
    pictures = [url, *(picture(number) for number in range(40, 47))]

    async def stored() -> tuple[int, int]:
        """Bytes in the bucket of media, and in all other streams."""
        found = {each.config.name: each.state.bytes for each in await apart_bus.js.streams_info()}
        media = sum(size for name, size in found.items() if name.endswith("_media"))
        return media, sum(found.values()) - media

    media, other = await stored()
    request, _ = await ask(http, body(*pictures, "What do you see?"))
    timeline, _ = await ending(apart_bus, request)
    assert roles(timeline.routed[0].decision.route) == ["encode", "prefill", "decode"]
    media_once, other_once = await stored()
    assert len(raw) < media_once - media < len(raw) + (256 << 10)
    # 8 x 64 embeddings and the KV of their tokens are more than 4 MiB.
    assert other_once - other < 128 << 10
    await ask(http, body(*pictures, "What do you see now?"))
    assert (await stored())[0] == media_once


async def test_prefix_hits_on_either_side_or_both_change_nothing(http: httpx.AsyncClient, apart_bus: Bus) -> None:
    question = body(f"{ROOMS} What is the code of room 12?", temperature=0, max_tokens=40)
    _, cold = await ask(http, {**question, "cache_salt": "p"})
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # what decode received is no hit
    # Prefill alone holds the longer beginning, then both do.
    await ask(http, {**question, "worker": "prefill-0", "max_tokens": 1, "cache_salt": "q"})
    for _ in range(3):
        _, warm = await ask(http, {**question, "cache_salt": "q"})
        assert shown(warm) == shown(cold)
    _, again = await ask(http, {**question, "cache_salt": "p"})
    assert shown(again) == shown(cold)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000


async def test_all_at_once_leave_nothing_held(http: httpx.AsyncClient, apart_bus: Bus) -> None:
    asked = [body(picture(number % 4), f"How many shapes are there? {number}", temperature=0) for number in range(12)]
    asked += [body(f"What is {number} + {3 * number}?", temperature=0) for number in range(12)]
    answers = await asyncio.gather(*(ask(http, each) for each in asked))
    for number, (_, answer) in enumerate(answers[12:]):
        assert str(4 * number) in answer["choices"][0]["message"]["content"]

    async def nothing_held() -> bool:
        now = time.time_ns()
        return await idle_workers(apart_bus) and not any(
            lease.is_open(now) for lease in (await leases(apart_bus, now)).values()
        )

    await until(nothing_held, "all blocks are free and all leases closed")


# -- logits processors ------------------------------------------------------------------------------------------------

OWN = "tests.workers.engines.logits.own:TopK"
EVERYBODY = '[{"name": "forced_text", "args": {"text": "Hello world!"}}]'
TEXT = "Grüße, 42 harbours: this is what the client wants to read."
LONG = " ".join(f"The number of room {room} is {room * 37 % 1000}." for room in range(20))


@pytest.fixture
async def own(apart: Deployment, http: httpx.AsyncClient) -> AsyncIterator[None]:
    """A worker that has one more processor, and forces a text on every request."""
    flags = ("--logits-processor", f"best={OWN}", "--default-logits-processors", EVERYBODY)
    process = apart.also(
        "worker",
        "--engine",
        "native",
        "--model",
        "demo-vision",
        "--threads",
        "1",
        "--kv-blocks",
        "200",
        "--name",
        "own",
        *flags,
    )
    await asyncio.to_thread(process.wait_for, "worker_registered")

    async def known() -> bool:
        answer = await http.post("/v1/chat/completions", json=edited(processor("nobody")))
        return "best" in answer.text

    await until(known, "the gateway knows the worker")
    yield
    assert await asyncio.to_thread(process.stop) == 0


def processor(name: str, **args: Any) -> dict[str, Any]:
    return {"name": name, "args": args}


def edited(*processors: dict[str, Any], question: str = "What is 347 + 586?", **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": question}]
    given = {
        "model": "demo-vision",
        "messages": said,
        "max_tokens": 80,
        "temperature": 0,
        "logits_processors": processors,
    }
    return given | more


def texts(answer: Any) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


async def test_a_forced_text_comes_out_verbatim_whole_and_streamed_by_one_stage_and_by_two(
    http: httpx.AsyncClient, apart_bus: Bus
) -> None:
    forced = processor("forced_text", text=TEXT)
    for question, roles in (("Hi", list[str]()), (f"{LONG} What is the number of room 7?", ["prefill", "decode"])):
        request, answer = await ask(http, edited(forced, question=question, n=2))
        assert texts(answer) == [TEXT, TEXT]
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]
        timeline, _ = await ending(apart_bus, request)
        assert [stage.role for stage in timeline.routed[0].decision.route] == roles
    streamed = await http.post("/v1/chat/completions", json=edited(forced, stream=True))
    assert joined(parse_sse(streamed.content)) == TEXT


async def test_a_stock_client_asks_by_its_extra_body(http: httpx.AsyncClient, apart: Deployment) -> None:
    model = modeldir.load(modeldir.MODELS / "demo-vision")
    texts = model.tokenizer.decode_batch([[token] for token in range(model.vocab_size)])
    digits = [token for token, text in enumerate(texts) if text.isdigit()]
    async with openai.AsyncOpenAI(base_url=apart.urls[0] + "/v1", api_key="unused", max_retries=0) as client:
        answer = await client.completions.create(
            model="demo-vision",
            prompt="Spell the word harbour.",
            max_tokens=12,
            logprobs=3,
            extra_body={"logits_processors": [processor("allowed_tokens", tokens=digits, end=False)]},
        )
    assert len(answer.choices[0].text) >= 12
    assert answer.choices[0].text.isdigit()
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert all(value > -100 for position in logprobs.top_logprobs or () for value in position.values())


async def test_an_unknown_name_is_refused_by_the_gateway_and_bad_arguments_by_the_worker(
    http: httpx.AsyncClient,
) -> None:
    for wrong, words in (
        (processor("os.system", command="true"), "registered: allowed_tokens, forced_text, temperature"),
        (processor("temperature", temperature=0), "temperature must be a number above 0"),
        (processor("temperature", temperature=1, warmth=1), "warmth"),
        (processor("forced_text", text="a", prompt_len=0), "cannot set prompt_len"),
    ):
        answer = await http.post("/v1/chat/completions", json=edited(wrong))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_request"), answer.text
        assert words in error["message"]


@pytest.mark.slow  # another worker; workers/engines/logits has the processors
async def test_a_worker_with_more_gets_the_requests_for_it_and_can_force_a_text_on_all_of_its_own(
    http: httpx.AsyncClient, apart_bus: Bus, own: None
) -> None:
    for number in range(3):
        request, answer = await ask(http, edited(processor("best", k=1), question=f"{LONG} {number}"))
        timeline, _ = await ending(apart_bus, request)
        assert timeline.routed[0].decision.chosen.startswith("own-")
        assert texts(answer) == ["Hello world!"]
    elsewhere = await http.post("/v1/chat/completions", json=edited(processor("best", k=1), worker="decode-0"))
    assert elsewhere.status_code == 400
    assert "no_processor" in elsewhere.json()["error"]["message"]
    _, plain = await ask(http, edited(worker="decode-0"))
    assert "933" in texts(plain)[0]
    processors_of = {each.name: each.logits_processors for each in (await registrations(apart_bus)).values()}
    assert processors_of["own"] == ("allowed_tokens", "best", "forced_text", "temperature", *ALL_CONSTRAINTS, FALLBACK)
    assert processors_of["decode-0"] == ("allowed_tokens", "forced_text", "temperature", *ALL_CONSTRAINTS, FALLBACK)
