"""Logits processors from a request's body to the token that was drawn, with prefill and decode apart."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from infra.bus.connection import Bus, connect
from infra.model import modeldir
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, ending, joined, parse_sse, registrations, until

pytestmark = pytest.mark.timeout(180)

OWN = "tests.workers.engines.logits.own:TopK"
EVERYBODY = '[{"name": "forced_text", "args": {"text": "Hello world!"}}]'
TEXT = "Grüße, 42 harbours: this is what the client wants to read."
LONG = " ".join(f"The number of room {room} is {room * 37 % 1000}." for room in range(20))


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment) -> Deployment:
    return new_deployment(
        *("--engine", "native", "--threads", "1", "--kv-blocks", "200"),
        *("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "16"),
    )


@pytest.fixture
async def bus(deployment: Deployment) -> AsyncIterator[Bus]:
    made = await connect(deployment.state.nats_url, role="client", name="test")
    yield made
    await made.close()


@pytest.fixture
async def http(deployment: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=deployment.urls[0], trust_env=False, timeout=60) as made:
        yield made


@pytest.fixture
async def own(deployment: Deployment, http: httpx.AsyncClient) -> AsyncIterator[None]:
    """A worker that has one more processor, and forces a text on every request."""
    flags = ("--logits-processor", f"best={OWN}", "--default-logits-processors", EVERYBODY)
    process = deployment.also(
        "worker", "--engine", "native", "--threads", "1", "--kv-blocks", "200", "--name", "own", *flags
    )
    await asyncio.to_thread(process.wait_for, "worker_registered")

    async def known() -> bool:
        answer = await http.post("/v1/chat/completions", json=body(processor("nobody")))
        return "best" in answer.text

    await until(known, "the gateway knows the worker")
    yield
    assert await asyncio.to_thread(process.stop) == 0


def processor(name: str, **args: Any) -> dict[str, Any]:
    return {"name": name, "args": args}


def body(*processors: dict[str, Any], question: str = "What is 347 + 586?", **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": question}]
    given = {"model": "demo", "messages": said, "max_tokens": 80, "temperature": 0, "logits_processors": processors}
    return given | more


async def ask(http: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[str, Any]:
    answer = await http.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"], answer.json()


def shown(answer: Any) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


async def test_a_forced_text_comes_out_verbatim_whole_and_streamed_by_one_stage_and_by_two(
    http: httpx.AsyncClient, bus: Bus
) -> None:
    forced = processor("forced_text", text=TEXT)
    for question, roles in (("Hi", list[str]()), (f"{LONG} What is the number of room 7?", ["prefill", "decode"])):
        request, answer = await ask(http, body(forced, question=question, n=2))
        assert shown(answer) == [TEXT, TEXT]
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]
        told, _ = await ending(bus, request)
        assert [stage.role for stage in told.routed[0].decision.route] == roles
    streamed = await http.post("/v1/chat/completions", json=body(forced, stream=True))
    assert joined(parse_sse(streamed.content)) == TEXT


async def test_a_stock_client_asks_by_its_extra_body(http: httpx.AsyncClient, deployment: Deployment) -> None:
    model = modeldir.load(modeldir.DEMO)
    texts = model.tokenizer.decode_batch([[token] for token in range(model.vocab_size)])
    digits = [token for token, text in enumerate(texts) if text.isdigit()]
    async with openai.AsyncOpenAI(base_url=deployment.urls[0] + "/v1", api_key="unused", max_retries=0) as client:
        answer = await client.completions.create(
            model="demo",
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
        (processor("temperature", temperature=0), "temperature is a number above 0"),
        (processor("temperature", temperature=1, warmth=1), "warmth"),
        (processor("forced_text", text="a", prompt_len=0), "cannot set prompt_len"),
    ):
        answer = await http.post("/v1/chat/completions", json=body(wrong))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "invalid_request"), answer.text
        assert words in error["message"]


async def test_a_worker_with_more_gets_the_requests_for_it_and_can_force_a_text_on_all_of_its_own(
    http: httpx.AsyncClient, bus: Bus, own: None
) -> None:
    for number in range(3):
        request, answer = await ask(http, body(processor("best", k=1), question=f"{LONG} {number}"))
        told, _ = await ending(bus, request)
        assert told.routed[0].decision.chosen.startswith("own-")
        assert shown(answer) == ["Hello world!"]
    elsewhere = await http.post("/v1/chat/completions", json=body(processor("best", k=1), worker="decode-0"))
    assert elsewhere.status_code == 400
    assert "no_processor" in elsewhere.json()["error"]["message"]
    _, plain = await ask(http, body(worker="decode-0"))
    assert "933" in shown(plain)[0]
    told_of = {each.name: each.logits_processors for each in (await registrations(bus)).values()}
    assert told_of["own"] == ("allowed_tokens", "best", "forced_text", "temperature")
    assert told_of["decode-0"] == ("allowed_tokens", "forced_text", "temperature")


def test_a_flag_that_cannot_be_used_ends_the_start(deployment: Deployment) -> None:
    process = deployment.also("worker", "--engine", "native", "--logits-processor", "x=no.such:Class")
    process.wait_for("PYTHONPATH")
    assert process._process.wait(20) == 2
