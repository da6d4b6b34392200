"""Workers of ``--engine openai``: another deployment's gateways are the servers, and one of them is lost.

They are asked for completions, and by the workers of another model for chats.
"""

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.cli.commands import main
from penstock.infra.bus.connection import connect
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import MODEL, MODEL_NAME, Deployment, ending, joined, metrics, parse_sse

# engines/openai/test_server has servers that are lost, test_fallback workers of one: here eleven processes start.
pytestmark = pytest.mark.slow
OPEN = "penstock_gateway_open_requests"
BODY = {"model": MODEL_NAME, "prompt": [20, 21, 22, 23], "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def far(new_deployment: NewDeployment) -> Deployment:
    """The servers: three gateways of one deployment, whose worker takes its time."""
    return new_deployment("--mock-speedup", "0.5", "--gateways", "3")


@pytest.fixture(scope="module")
def near(far: Deployment, new_deployment: NewDeployment) -> Deployment:
    """Two workers for each server."""
    made = new_deployment("--workers", "0", "--model", str(MODEL))
    workers = []
    for url in far.urls:
        flags = ("--engine", "openai", "--url", url, "--model", str(MODEL))
        workers.append(made.also("worker", *flags, PENSTOCK_URL_KEY="unused"))
        flags += ("--url-api", "chat", "--url-model", MODEL_NAME, "--served-model-name", "chats")
        workers.append(made.also("worker", *flags))
    for worker in workers:
        worker.wait_for("worker_registered")
    return made


@pytest.fixture
async def http(near: Deployment) -> "httpx.AsyncClient":
    return httpx.AsyncClient(base_url=near.urls[0], trust_env=False, timeout=60)


async def test_answers_are_those_of_the_server_with_its_log_probabilities(
    far: Deployment, http: httpx.AsyncClient
) -> None:
    async with http, httpx.AsyncClient(base_url=far.urls[0], trust_env=False, timeout=60) as server:
        for more in ({"max_tokens": 8}, {"max_tokens": 6, "logprobs": 2, "n": 2}, {"max_tokens": 4, "stop": "a"}):
            mine = (await http.post("/v1/completions", json=BODY | more)).raise_for_status().json()
            theirs = (await server.post("/v1/completions", json=BODY | more)).raise_for_status().json()
            assert [choice["text"] for choice in mine["choices"]] == [choice["text"] for choice in theirs["choices"]]
            assert [choice["finish_reason"] for choice in mine["choices"]] == [
                choice["finish_reason"] for choice in theirs["choices"]
            ]
            assert mine["usage"]["completion_tokens"] == theirs["usage"]["completion_tokens"]
            for mine_of, theirs_of in zip(mine["choices"], theirs["choices"], strict=True):
                assert (mine_of["logprobs"] or {}).get("tokens") == (theirs_of["logprobs"] or {}).get("tokens")


HI = [{"role": "user", "content": "when I wait"}]
CHAT = {"model": "chats", "messages": HI, "temperature": 0, "ignore_eos": True}


async def test_chats_are_those_of_the_server_and_counted_as_it_counts(
    far: Deployment, near: Deployment, http: httpx.AsyncClient
) -> None:
    async with http, httpx.AsyncClient(base_url=far.urls[0], trust_env=False, timeout=60) as server:
        body = CHAT | {"max_tokens": 12}
        mine = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()
        theirs = (
            (await server.post("/v1/chat/completions", json=body | {"model": MODEL_NAME})).raise_for_status().json()
        )
        assert mine["choices"][0]["message"]["content"] == theirs["choices"][0]["message"]["content"]
        assert mine["choices"][0]["finish_reason"] == theirs["choices"][0]["finish_reason"] == "length"
        assert mine["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]
        assert mine["usage"]["completion_tokens"] == theirs["usage"]["completion_tokens"] == 12
        refused = await http.post("/v1/completions", json=BODY | {"model": "chats"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported")
        record = (await http.get(f"/v1/requests/{mine['id']}")).json()
        assert record["output_tokens"] == 12


async def test_chats_run_again_on_the_server_itself(
    far: Deployment, near: Deployment, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with http:
        answer = (await http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 9})).raise_for_status()
    report = tmp_path / "report.json"
    flags = ("--data-dir", str(near.data_dir), "--target", far.urls[0], "--model", MODEL_NAME)
    name = str(answer.headers["x-request-id"])
    async with await connect(near.state.nats_url, role="operator", name="test", namespace=near.state.namespace) as bus:
        await ending(bus, name)  # its record is stored a moment after the answer
    argv = ["replay", name, *flags, "--model-path", str(MODEL), "--json", str(report)]
    assert await asyncio.to_thread(main, argv) == 0
    assert json.loads(report.read_text())["outcomes"]["same"] == 1
    assert await asyncio.to_thread(main, [*argv, "--set", "max_tokens=4"]) == 1
    assert json.loads(report.read_text())["outcomes"]["same"] == 0


async def serving(far: Deployment) -> int:
    """Which of the servers has a request."""
    found = []
    for at, url in enumerate(far.urls):
        with suppress(httpx.TransportError):  # another test has killed it
            found += [at] if (await metrics(url))[OPEN] else []
    (one,) = found
    return one


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)],
    ids=["completions", "chats"],
)
async def test_a_lost_servers_answer_continues_at_another_from_what_was_sent(
    far: Deployment, near: Deployment, http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    body = body | {"max_tokens": 150}
    gateways = {each.name: each.pid for each in far.state.processes if each.role == "gateway"}
    async with http:
        choice = (await http.post(path, json=body)).raise_for_status().json()["choices"][0]
        whole = choice["text"] if "text" in choice else choice["message"]["content"]
        async with http.stream("POST", path, json=body | {"stream": True}) as answer:
            raw, killed = b"", False
            async for part in answer.aiter_bytes():
                raw += part
                if raw.count(b"\n\n") > 20 and not killed:
                    killed = True
                    os.kill(gateways[sorted(gateways)[await serving(far)]] or 0, signal.SIGKILL)
    assert joined(parse_sse(raw)) == whole
    assert killed
