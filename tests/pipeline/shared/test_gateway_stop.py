"""Gateways that are stopped in order: answers that fit into the drain end as always, the others go on elsewhere."""

import asyncio
import json
import os
import signal
from typing import Any

import httpx
import pytest

from penstock.infra.bus.connection import Bus
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.shared.test_limits import request_of, sequences_run
from tests.pipeline.support import (
    MODEL,
    Deployment,
    Oracle,
    Process,
    connected,
    ending,
    free_port,
    joined,
    parse_sse,
    samples,
    token_prompt,
    until,
)

PATH = "/v1/completions"
BOUND_S = 1 + 5.0 + 9.0  # a drain of 1 s, what is left is told within 5 s, and a machine may be busy


def body(seed: int, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": token_prompt(50, seed), "temperature": 0, "max_tokens": 60, **more}


class Extra:
    """One more gateway of a deployment."""

    def __init__(self, deployment: Deployment, *flags: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.process: Process = deployment.also(
            "gateway", "--http-port", str(port), "--model", str(MODEL), "--served-model-name", "tiny", *flags
        )
        self.process.wait_for("gateway_listening")

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=30)

    async def ready(self) -> None:
        async def serves() -> bool:
            async with self.client() as client:
                return (await client.get("/health/ready")).status_code == 200

        await until(serves, "the gateway is ready")

    async def ended(self, within_s: float) -> int:
        return await asyncio.to_thread(self.process.wait, within_s)


async def test_answers_that_fit_into_the_drain_are_not_disturbed(slow: Deployment, oracle: Oracle) -> None:
    gateway = Extra(slow, "--drain-s", "20")
    await gateway.ready()
    async with gateway.client() as client, gateway.client() as kept:
        await kept.get("/health/live")
        stream = asyncio.create_task(client.post(PATH, json=body(1, stream=True)))
        whole = asyncio.create_task(client.post(PATH, json=body(2)))

        async def open_two() -> bool:
            return samples((await kept.get("/metrics")).text)["penstock_gateway_open_requests"] == 2

        await until(open_two, "both are open")
        gateway.process.ask_to_stop()
        late = await kept.post(PATH, json=body(3, max_tokens=2))  # on a connection that it has
        assert late.status_code == 200
        assert late.headers["connection"] == "close"
        answers = await asyncio.gather(stream, whole)
    assert joined(parse_sse(answers[0].content)) == oracle.answer(body(1), 60)
    assert parse_sse(answers[0].content)[-1].data == "[DONE]"
    assert answers[1].json()["choices"][0]["text"] == oracle.answer(body(2), 60)
    assert await gateway.ended(10) == 0


async def test_answers_that_do_not_fit_continue_at_another_gateway(
    slow: Deployment, slow_http: httpx.AsyncClient, slow_bus: Bus, oracle: Oracle
) -> None:
    gateway = Extra(slow, "--drain-s", "0.5")
    await gateway.ready()
    long = {"max_tokens": 120}
    async with gateway.client() as client:
        stream = asyncio.create_task(client.post(PATH, json=body(4, stream=True, user="stop-4", **long)))
        whole = asyncio.create_task(client.post(PATH, json=body(5, user="stop-5", **long)))
        ids = [(await request_of(slow_bus, user))[0].id for user in ("stop-4", "stop-5")]
        await sequences_run(slow_bus, 2)
        await asyncio.sleep(0.3)  # some tokens
        gateway.process.ask_to_stop()
        streamed, refused = await asyncio.gather(stream, whole)
    assert await gateway.ended(6) == 0

    assert (streamed.status_code, streamed.headers["x-request-id"]) == (200, ids[0])
    *events, last = parse_sse(streamed.content)
    error = last.body["error"]
    assert (error["code"], error["type"]) == ("shutting_down", "server_error")
    assert ids[0] in error["message"]
    assert b"[DONE]" not in streamed.content
    assert events
    rest = await slow_http.get(f"/v1/requests/{ids[0]}/stream", headers={"Last-Event-ID": events[-1].id})
    assert joined(events) + joined(parse_sse(rest.content)) == oracle.answer(body(4), 120)

    assert (refused.status_code, refused.headers["x-request-id"]) == (503, ids[1])
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "shutting_down"
    rest = await slow_http.get(f"/v1/requests/{ids[1]}/stream")
    assert joined(parse_sse(rest.content)) == oracle.answer(body(5), 120)
    for request_id in ids:
        _, end = await ending(slow_bus, request_id)
        assert end.code == "", "nothing was cancelled"


async def test_a_stream_has_its_request_id_before_its_first_token(
    empty: Deployment, empty_http: httpx.AsyncClient
) -> None:
    async with (
        asyncio.timeout(10),
        empty_http.stream("POST", PATH, json=body(6, stream=True, timeout_s=20)) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["x-request-id"]
        assert (await empty_http.get(f"/v1/requests/{answer.headers['x-request-id']}")).json()["state"] == "queued"


async def test_a_gateway_ends_within_its_bound_whatever_holds_it(slow: Deployment, slow_bus: Bus) -> None:
    """Uploads, headers and clients that do not read, a request that nobody places, a broker that does not answer."""
    gateway = Extra(slow, "--drain-s", "1")
    await gateway.ready()
    asked = json.dumps(body(7, stream=True, max_tokens=5_000, user="stop-7")).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(asked)}\r\n\r\n".encode()
    async with (
        connected(gateway.url) as (_, upload),
        connected(gateway.url) as (_, header),
        connected(gateway.url) as (_, silent),
        connected(gateway.url),
    ):
        upload.write(head + asked[:-1])
        header.write(head[:20])
        silent.write(head + asked)
        [request] = await request_of(slow_bus, "stop-7")
        gateway.process.ask_to_stop()
        assert await gateway.ended(BOUND_S) == 0
    async with httpx.AsyncClient(base_url=slow.urls[0], trust_env=False) as client:
        assert (await client.delete(f"/v1/requests/{request.id}")).status_code == 202


@pytest.mark.slow  # it is held up otherwise above
@pytest.mark.timeout(120)
async def test_a_gateway_ends_within_its_bound_when_the_broker_does_not_answer(new_deployment: NewDeployment) -> None:
    deployment = new_deployment("--mock-speedup", "0.25", "--drain-s", "1")
    gateway = Extra(deployment, "--drain-s", "1")
    await gateway.ready()
    [broker] = [process for process in deployment.state.processes if process.role == "nats"]
    async with gateway.client() as client:
        running = asyncio.create_task(client.post(PATH, json=body(8, stream=True, max_tokens=3_000)))

        async def begun() -> bool:
            async with gateway.client() as other:
                return samples((await other.get("/metrics")).text)["penstock_gateway_open_requests"] == 1

        await until(begun, "one is open")
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            waiting = asyncio.create_task(client.post(PATH, json=body(9)))
            gateway.process.ask_to_stop()
            assert await gateway.ended(BOUND_S) in (0, 71)
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        answer = await running
        assert parse_sse(answer.content)[-1].body["error"]["code"] == "shutting_down"
        assert (await waiting).status_code == 503
