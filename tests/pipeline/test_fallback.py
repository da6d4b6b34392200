"""A model that has no worker, or whose server fails: its requests run on another, with other tokens and templates."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import nats
import pytest

from penstock.infra.bus.connection import connect
from penstock.infra.bus.direct_get import get_last
from penstock.infra.model.modeldir import DEMO, TINY
from penstock.schemas.subjects import HEADER_ERROR
from penstock.schemas.summary import of_done
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, Oracle, Process, ending, http_of, ok, parse_sse, registrations, until
from tests.workers.engines.openai.test_server import Handler, Played

COUNT = 6
MESSAGES = [{"role": "user", "content": "Where is the harbour?"}]
CHAT = {"model": "small", "messages": MESSAGES, "temperature": 0, "max_tokens": COUNT}
TEXT = {"model": "small", "prompt": "The harbour is", "temperature": 0, "max_tokens": COUNT}
ANSWERED_BY = "x-penstock-model"


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(DEMO)


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment) -> Deployment:
    """Workers of demo, and none of small."""
    made = new_deployment(
        *("--workers", "0", "--model", "demo", "--model", "small=tiny"),
        *("--fallback", "small=demo", "--fallback-after-s", "5"),
    )
    flags = ("--engine", "mock", "--mock-speedup", "0", "--model", str(DEMO), "--served-model-name", "demo")
    made.also("worker", *flags).wait_for("worker_registered")
    return made


http = http_of("deployment")


async def said(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> httpx.Response:
    return await ok(http.post(path, json=body))


async def test_requests_of_a_model_without_workers_run_on_its_fallback_by_every_api(
    http: httpx.AsyncClient, deployment: Deployment, oracle: Oracle
) -> None:
    wanted = oracle.answer(CHAT, COUNT).strip()
    message = {"model": "small", "messages": MESSAGES, "temperature": 0, "max_tokens": COUNT}
    response = {"model": "small", "input": MESSAGES[0]["content"], "temperature": 0, "max_output_tokens": COUNT}
    nc = await nats.connect(deployment.state.client_nats_url)
    try:
        asks = (
            said(http, "/v1/chat/completions", CHAT),
            http.post("/v1/chat/completions", json=CHAT | {"stream": True}),
            said(http, "/v1/completions", TEXT),
            said(http, "/v1/messages", message),
            said(http, "/v1/responses", response),
            http.post("/v1/responses", json=response | {"stream": True}),
            nc.request("ps.ask.small", json.dumps(CHAT).encode(), timeout=20),
        )
        chat, streamed, text, anthropic, whole, events, answer = await asyncio.gather(*asks)
    finally:
        await nc.close()
    assert (chat.headers[ANSWERED_BY], chat.json()["model"]) == ("demo", "demo")
    assert chat.json()["choices"][0]["message"]["content"] == wanted
    assert chat.json()["usage"]["prompt_tokens"] == len(oracle.prompt(CHAT)), "with its own template"
    chunks = [event.body for event in parse_sse(streamed.content)[:-1]]
    assert {each["model"] for each in chunks} == {"demo"}
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks).strip() == wanted
    assert text.json()["choices"][0]["text"] == oracle.answer(TEXT, COUNT)
    assert (anthropic.json()["model"], anthropic.json()["content"][0]["text"].strip()) == ("demo", wanted)
    assert whole.json()["model"] == "demo"
    assert whole.json()["output"][0]["content"][0]["text"].strip() == wanted
    seen = [json.loads(line[6:]) for line in events.text.splitlines() if line.startswith("data: {")]
    assert [each["type"] for each in seen].count("response.created") == 1
    assert {each["response"]["model"] for each in seen if "response" in each} == {"demo"}
    assert not (answer.headers or {}).get(HEADER_ERROR)
    assert json.loads(answer.data)["model"] == "demo"
    again = await http.get(f"/v1/requests/{chat.headers['x-request-id']}")
    assert again.json()["result"]["model"] == "demo"
    replayed = await http.get(f"/v1/requests/{chat.headers['x-request-id']}/stream")
    assert {event.body["model"] for event in parse_sse(replayed.content)[:-1]} == {"demo"}
    got = (await http.get(f"/v1/responses/{whole.json()['id']}")).json()
    assert (got["model"], got["output"]) == ("demo", whole.json()["output"])
    continued = await said(http, "/v1/responses", response | {"previous_response_id": whole.json()["id"]})
    assert continued.json()["model"] == "demo"


async def test_what_is_not_stored_and_what_ollama_s_clients_ask_fall_back_too(
    http: httpx.AsyncClient, oracle: Oracle
) -> None:
    wanted = oracle.answer(CHAT, COUNT).strip()
    lines = {"model": "small", "messages": MESSAGES, "options": {"temperature": 0, "num_predict": COUNT}}
    whole, streamed, ollama = await asyncio.gather(
        said(http, "/v1/chat/completions", CHAT | {"no_store": True}),
        http.post("/v1/chat/completions", json=CHAT | {"no_store": True, "stream": True}),
        http.post("/api/chat", json=lines),
    )
    assert (whole.json()["model"], whole.json()["choices"][0]["message"]["content"]) == ("demo", wanted)
    chunks = [event.body for event in parse_sse(streamed.content)[:-1]]
    assert {each["model"] for each in chunks} == {"demo"}
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks).strip() == wanted
    events = [json.loads(line) for line in ollama.text.splitlines()]
    assert "".join(each["message"]["content"] for each in events).strip() == wanted
    assert {each["model"] for each in events} == {"demo"}
    again = await http.get(f"/v1/requests/{whole.headers['x-request-id']}")
    assert again.json()["result"]["model"] == "demo"


async def test_its_one_record_names_both_models_and_counts_for_the_one_that_answered(
    http: httpx.AsyncClient, deployment: Deployment
) -> None:
    answer = await said(http, "/v1/chat/completions", CHAT)
    request_id = answer.headers["x-request-id"]
    bus = await connect(deployment.state.nats_url, role="operator", name="test", namespace="ps")
    try:
        timeline, record = await ending(bus, request_id)
    finally:
        await bus.close()
    assert (record.model, record.code) == ("demo", "")
    assert record.timings.made_with is not None
    assert record.timings.made_with.fallback == 1
    assert timeline.routed[-1].decision.reason.startswith("fallback: 'small' has no worker")
    summary = of_done(record)
    assert (summary.model, summary.asked, summary.prompt_tokens) == ("demo", "small", record.usage.prompt)


async def test_a_request_whose_only_worker_is_killed_before_the_first_token_falls_back(
    http: httpx.AsyncClient, deployment: Deployment, oracle: Oracle
) -> None:
    flags = ("--engine", "mock", "--mock-speedup", "0.001", "--model", str(TINY), "--served-model-name", "small")
    slow = deployment.also("worker", *flags)
    slow.wait_for("worker_registered")
    bus = await connect(deployment.state.nats_url, role="operator", name="test", namespace="ps")
    body = CHAT | {"messages": [{"role": "user", "content": "Where is the harbour, and where the tower? " * 20}]}
    try:
        [name] = [each for each, found in (await registrations(bus)).items() if found.model == "small"]
        subject = bus.subjects.work("aggregated", name)
        asked = asyncio.create_task(said(http, "/v1/chat/completions", body))
        await until(lambda: get_last(bus, bus.subjects.stream("WORK"), subject), "its job")
        slow.kill()
        answer = await asked
        _, record = await ending(bus, answer.headers["x-request-id"])
    finally:
        slow.kill()
        await bus.close()
    assert answer.json()["model"] == "demo"
    assert answer.json()["choices"][0]["message"]["content"].strip() == oracle.answer(body, COUNT).strip()
    [lost] = [each for each in record.timings.earlier_workers if each.lost]
    assert (lost.worker, record.attempt) == (name, 2)


async def test_a_request_that_waits_in_its_worker_for_too_long_falls_back(
    http: httpx.AsyncClient, deployment: Deployment, oracle: Oracle
) -> None:
    """The router has given it to the worker, which runs another one."""
    flags = ("--engine", "mock", "--mock-speedup", "0.02", "--max-running", "1", "--model", str(TINY))
    slow = deployment.also("worker", *flags, "--served-model-name", "small")
    slow.wait_for("worker_registered")
    bus = await connect(deployment.state.nats_url, role="operator", name="test", namespace="ps")
    try:
        long = CHAT | {"max_tokens": 500, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=long) as first:
            lines = first.aiter_lines()  # to leave it would cancel the request
            while '"content"' not in await anext(lines):
                pass
            answer = await said(http, "/v1/chat/completions", CHAT)
            _, record = await ending(bus, answer.headers["x-request-id"])
    finally:
        slow.kill()
        await bus.close()
    assert (answer.json()["model"], answer.json()["choices"][0]["message"]["content"].strip()) == (
        "demo", oracle.answer(CHAT, COUNT).strip()
    )  # fmt: skip
    (waited,) = record.timings.earlier_workers
    assert waited.ended.startswith("returned: waited: no worker of it started the request within 5 s")
    assert record.attempt == 2


class Failing(Played):
    """A server of small that takes the probes of a worker, and fails as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.names = ["small"]
        self.status = 200

    def answer(self, handler: Handler, _: dict[str, Any]) -> None:
        if self.status != 200:
            handler.whole(self.status, {"error": {"message": "no"}}, retry_after="9")
            return
        handler.stream({"choices": [{"text": "", "token_ids": [20, 21]}]},
                       {"choices": [{"text": "", "token_ids": [], "finish_reason": "stop"}]})  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Failing]:
    import threading

    made = Failing()
    made.answers = [made.answer]
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture(scope="module")
def worker(deployment: Deployment, server: Failing) -> Process:
    flags = ("--engine", "openai", "--url", server.url, "--model", str(TINY), "--served-model-name", "small")
    made = deployment.also("worker", *flags)
    made.wait_for("worker_registered")
    return made


@pytest.mark.usefixtures("worker")
async def test_several_prompts_of_one_body_stay_with_their_model(http: httpx.AsyncClient, server: Failing) -> None:
    server.status = 200
    answer = await said(http, "/v1/completions", TEXT | {"prompt": ["The harbour is", "The tower is"]})
    assert answer.json()["model"] == "small"
    server.status = 401
    answer = await http.post("/v1/completions", json=TEXT | {"prompt": ["The harbour is", "The tower is"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")


@pytest.mark.usefixtures("worker")
async def test_what_the_server_refuses_is_the_clients_own_error(http: httpx.AsyncClient, server: Failing) -> None:
    server.status = 400
    answer = await http.post("/v1/chat/completions", json=CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(("status", "model"), [(200, "small"), (500, "demo"), (401, "demo"), (429, "demo")])
async def test_a_server_that_fails_or_is_busy_loses_the_request_to_the_fallback(
    http: httpx.AsyncClient, server: Failing, status: int, model: str
) -> None:
    server.status = status
    answer = await said(http, "/v1/chat/completions", CHAT)
    assert answer.json()["model"] == model
    assert answer.headers.get(ANSWERED_BY) == (None if model == "small" else model)
