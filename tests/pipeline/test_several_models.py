"""Two models behind one HTTP address and one NATS door, with different tokenizers and chat templates."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import nats
import pytest

from penstock.cli.commands import main
from penstock.infra.model.modeldir import DEMO, TINY
from penstock.schemas.subjects import HEADER_ERROR
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, Oracle, Process, free_port, http_of, ok, parse_sse, until

COUNT = 6
MESSAGES = [{"role": "user", "content": "Where is the harbour?"}]
FOLDERS = {"demo": DEMO, "small": TINY}


@pytest.fixture(scope="module")
def oracles() -> dict[str, Oracle]:
    return {name: Oracle(folder) for name, folder in FOLDERS.items()}


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment) -> Deployment:
    return new_deployment("--mock-speedup", "0", "--model", "demo", "--model", "small=tiny")


@pytest.fixture(scope="module")
def learner(deployment: Deployment) -> tuple[str, Process]:
    """The URL of a gateway that was told of no model, and has room for one."""
    port = free_port()
    process = deployment.also("gateway", "--http-port", str(port), "--max-models", "1")
    process.wait_for("gateway_listening")
    return f"http://127.0.0.1:{port}", process


http = http_of("deployment")


@pytest.fixture
async def learning(learner: tuple[str, Process]) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=learner[0], trust_env=False, timeout=30) as made:
        yield made


def chat(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": COUNT, **more}


async def said(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    return (await ok(http.post(path, json=body))).json()


async def test_the_tokenizers_and_templates_of_the_two_are_different(oracles: dict[str, Oracle]) -> None:
    demo, small = oracles["demo"], oracles["small"]
    assert demo.prompt(chat("demo")) != small.prompt(chat("small"))
    assert demo.answer(chat("demo"), COUNT) != small.answer(chat("small"), COUNT)


@pytest.mark.parametrize("model", FOLDERS)
async def test_each_answers_with_its_own_tokenizer_and_template_by_every_api(
    http: httpx.AsyncClient, oracles: dict[str, Oracle], model: str
) -> None:
    oracle = oracles[model]
    wanted = oracle.answer(chat(model), COUNT)
    whole = await said(http, "/v1/chat/completions", chat(model))
    assert (whole["model"], whole["choices"][0]["message"]["content"]) == (model, wanted.strip())
    assert whole["usage"]["prompt_tokens"] == len(oracle.prompt(chat(model)))
    streamed = await http.post("/v1/chat/completions", json=chat(model, stream=True))
    events = [event.body for event in parse_sse(streamed.content)[:-1]]
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in events).strip() == wanted.strip()
    text = {"model": model, "prompt": "The harbour is", "temperature": 0, "max_tokens": COUNT}
    completion = await said(http, "/v1/completions", text)
    assert completion["choices"][0]["text"] == oracle.answer(text, COUNT)
    several = await said(http, "/v1/completions", text | {"prompt": ["The harbour is"] * 2})
    assert [each["text"] for each in several["choices"]] == [oracle.answer(text, COUNT)] * 2
    message = await said(http, "/v1/messages", {"model": model, "messages": MESSAGES, "max_tokens": COUNT} | GREEDY)
    assert message["content"][0]["text"].strip() == wanted.strip()
    response = await said(http, "/v1/responses", asked(model))
    assert output_of(response).strip() == wanted.strip()
    tokens = await said(http, "/tokenize", {"model": model, "prompt": "The harbour is"})
    assert tokens["tokens"] == oracle.prompt(text)
    back = await said(http, "/detokenize", {"model": model, "tokens": tokens["tokens"]})
    assert back["prompt"] == oracle.text(tokens["tokens"])


GREEDY = {"temperature": 0}


def asked(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "input": MESSAGES[0]["content"], "temperature": 0, "max_output_tokens": COUNT, **more}


def output_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


async def test_a_body_without_a_model_is_told_which_there_are(http: httpx.AsyncClient, deployment: Deployment) -> None:
    assert deployment.state.models == ("demo", "small")
    names = [each["id"] for each in (await http.get("/v1/models")).json()["data"]]
    assert names == ["demo", "small"]
    nameless = {key: value for key, value in chat("").items() if key != "model"}
    refused = await http.post("/v1/chat/completions", json=nameless)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "model is missing; name one of 'demo', 'small'"
    unknown = await http.post("/v1/chat/completions", json=chat("other"))
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    broken = await http.post("/v1/chat/completions", content=b'{"model": ')
    assert "not valid JSON" in broken.json()["error"]["message"]


@pytest.mark.parametrize("model", FOLDERS)
async def test_both_are_behind_the_one_nats_door(
    deployment: Deployment, oracles: dict[str, Oracle], model: str
) -> None:
    nc = await nats.connect(deployment.state.client_nats_url)
    try:
        body = json.dumps(chat(model)).encode()
        answer = await nc.request(f"ps.ask.{model}", body, timeout=20)
        assert not (answer.headers or {}).get(HEADER_ERROR)
        content = json.loads(answer.data)["choices"][0]["message"]["content"]
        assert content == oracles[model].answer(chat(model), COUNT).strip()
    finally:
        await nc.close()


async def test_requests_are_counted_by_model(http: httpx.AsyncClient) -> None:
    async def counts() -> dict[str, float]:
        page = (await http.get("/metrics")).text
        lines = [line for line in page.splitlines() if line.startswith("penstock_gateway_output_tokens_total{")]
        return {each: float(line.split()[-1]) for each in FOLDERS for line in lines if f'model="{each}"' in line}

    before = await counts()
    await said(http, "/v1/chat/completions", chat("small"))
    after = await counts()
    assert after == {"demo": before["demo"], "small": before["small"] + COUNT}
    queued = [line for line in (await http.get("/metrics")).text.splitlines() if "queued_requests{" in line]
    assert sorted(model for model in FOLDERS for line in queued if f'model="{model}"' in line) == ["demo", "small"]


async def test_a_gateway_that_learned_of_them_unloads_one_for_the_other_and_loads_it_again(
    learning: httpx.AsyncClient, learner: tuple[str, Process], oracles: dict[str, Oracle]
) -> None:
    for model in ("demo", "small", "demo", "small"):
        whole = await said(learning, "/v1/chat/completions", chat(model))
        assert whole["choices"][0]["message"]["content"] == oracles[model].answer(chat(model), COUNT).strip()
    log = [json.loads(line) for line in learner[1].log.read_text().splitlines() if line.startswith("{")]
    loaded = [entry["model"] for entry in log if entry["event"] == "model_loaded"]
    unloaded = [entry["model"] for entry in log if entry["event"] == "model_unloaded"]
    assert loaded.count("small") >= 2
    assert len(unloaded) >= len(loaded) - 1 >= 3
    names = [each["id"] for each in (await learning.get("/v1/models")).json()["data"]]
    assert sorted(names) == ["demo", "small"], "listed whether it is in memory or not"


async def test_earlier_answers_are_read_with_the_tokenizer_that_made_them_wherever_they_are_read(
    http: httpx.AsyncClient, learning: httpx.AsyncClient, oracles: dict[str, Oracle]
) -> None:
    """By a gateway that has, at that moment, the other model in memory."""
    made = {model: await said(http, "/v1/responses", asked(model)) for model in FOLDERS}
    for model in ("demo", "small", "demo"):
        text = output_of(made[model])
        found = await learning.get(f"/v1/responses/{made[model]['id']}")
        assert output_of(found.json()) == text
        request_id = made[model]["id"].removeprefix("resp_")

        async def ended(request_id: str = request_id) -> Any:
            state = (await learning.get(f"/v1/requests/{request_id}")).json()
            return state if state["state"] == "done" else None

        state = await until(ended, "the response is recorded")
        assert (state["model"], output_of(state["result"])) == (model, text)
        again = await learning.get(f"/v1/requests/{request_id}/stream")
        data = [line.removeprefix("data: ") for line in again.text.splitlines() if line.startswith("data: {")]
        assert output_of(json.loads(data[-1])["response"]) == text
    # A conversation that went from one model to the other.
    first = made["demo"]
    follow = asked("small", previous_response_id=first["id"])
    answers = [await said(each, "/v1/responses", follow) for each in (http, learning)]
    assert output_of(answers[0]) == output_of(answers[1])
    whole = [*MESSAGES, {"role": "assistant", "content": output_of(first)}, *MESSAGES]
    as_chat = {"model": "small", "messages": whole, "temperature": 0, "max_tokens": COUNT}
    assert output_of(answers[0]).strip() == oracles["small"].answer(as_chat, COUNT).strip()


async def test_a_flood_of_one_model_is_counted_as_its_own_and_leaves_the_other_its_share(
    new_deployment: NewDeployment,
) -> None:
    full = new_deployment("--model", "demo", "--model", "small=tiny", "--workers", "0", "--max-queue", "4")
    async with httpx.AsyncClient(base_url=full.urls[0], trust_env=False, timeout=60) as http:

        async def queued() -> dict[str, float]:
            page = (await http.get("/metrics")).text
            lines = [line for line in page.splitlines() if line.startswith("penstock_gateway_queued_requests{")]
            return {each: float(line.split()[-1]) for each in FOLDERS for line in lines if f'model="{each}"' in line}

        async def taken(model: str) -> None:
            # A request that arrives while the broker is polled counts twice until the next poll.
            async def accepted() -> bool:
                return (await http.post("/v1/chat/completions", json=chat(model))).status_code != 429

            await until(accepted, "room")

        def ask(model: str) -> asyncio.Task[None]:
            return asyncio.create_task(taken(model))

        async def counted(demo: float, small: float) -> None:
            async def reached() -> bool:
                return await queued() == {"demo": demo, "small": small}

            await until(reached, f"{demo} and {small} wait")

        asked = [ask("demo") for _ in range(4)]
        await counted(4.0, 0.0)
        refused = await http.post("/v1/chat/completions", json=chat("demo"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        asked += [ask("small") for _ in range(2)]
        await counted(4.0, 2.0)
        refused = await http.post("/v1/chat/completions", json=chat("small"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        for each in asked:
            each.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_a_key_for_one_model_neither_sees_nor_uses_the_other(
    http: httpx.AsyncClient,
    learning: httpx.AsyncClient,
    deployment: Deployment,
    oracles: dict[str, Oracle],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last test here: from now on everyone needs a key."""
    others = (await said(http, "/v1/chat/completions", chat("demo")))["id"]
    response = (await said(http, "/v1/responses", asked("demo")))["id"]
    command = ["keys", "create", "--models", "small", "--data-dir", str(deployment.data_dir)]
    assert await asyncio.to_thread(main, command) == 0
    key = next(word for word in capsys.readouterr().out.split() if word.startswith("pst-"))
    headers = {"authorization": f"Bearer {key}"}
    for client in (http, learning):

        async def admitted(client: httpx.AsyncClient = client) -> bool:
            return (await client.get("/v1/models", headers=headers)).status_code == 200

        await until(admitted, "the key is known")
        client.headers.update(headers)
        assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]] == ["small"]
        assert (await client.get("/v1/models/demo")).status_code == 404
        refused = await client.post("/v1/chat/completions", json=chat("demo"))
        assert refused.status_code == 404
        assert refused.json()["error"]["message"].endswith("served: 'small'")
        nameless = {name: value for name, value in chat("").items() if name != "model"}
        own = await said(client, "/v1/chat/completions", nameless)
        assert own["model"] == "small", "the only one that it may name"
        assert (await client.get(f"/v1/requests/{own['id']}")).status_code == 200
        for path in (f"/v1/requests/{others}", f"/v1/requests/{others}/stream", f"/v1/responses/{response}"):
            assert (await client.get(path)).status_code == 404, "the tenant's, of a model that it may not name"
        for path in (f"/v1/requests/{others}", f"/v1/responses/{response}"):
            assert (await client.delete(path)).status_code == 404
        refused = await client.post("/v1/responses", json=asked("small") | {"previous_response_id": response})
        assert "is not known" in refused.json()["error"]["message"]
        listed = (await client.get("/v1/requests", params={"limit": 100})).json()["data"]
        assert {each["model"] for each in listed} == {"small"}
        assert own["choices"][0]["message"]["content"] == oracles["small"].answer(chat("small"), COUNT).strip()
        for path in ("/tokenize", "/detokenize"):
            body = {"model": "demo", "prompt": "x"} if path == "/tokenize" else {"model": "demo", "tokens": [1]}
            assert (await client.post(path, json=body)).status_code == 404
