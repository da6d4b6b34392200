"""What ends a request early, and what is left behind: deadlines, full queues, clients that go away, leaks."""

import asyncio
import json
import os
import re
import signal
import time
from contextlib import AsyncExitStack
from typing import Any

import httpx
import nats
import pytest
from nats.aio.msg import Msg

from penstock.infra.bus.connection import Bus
from penstock.schemas.requests import GenerateRequest
from tests.pipeline.shared.test_nats_api import Submitter
from tests.pipeline.support import (
    Deployment,
    Oracle,
    accepted,
    connected,
    ending,
    free_port,
    idle_workers,
    joined,
    metrics,
    ok,
    parse_sse,
    registrations,
    stopped,
    token_prompt,
    until,
)

PATH = "/v1/completions"


def text_body(seed: int, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": token_prompt(70, seed), "temperature": 0, "max_tokens": 2000, **more}


async def request_of(bus: Bus, user: str, count: int = 1) -> list[GenerateRequest]:
    """The ``count`` requests of a user, once they are in the log."""

    async def all_there() -> list[GenerateRequest] | None:
        found = await accepted(bus, user)
        return found if len(found) == count else None

    found: list[GenerateRequest] = await until(all_there, f"{count} requests of {user}")
    return found


async def sequences_run(bus: Bus, count: int) -> None:
    async def running() -> bool:
        return sum(one.load.running for one in (await registrations(bus)).values()) == count

    await until(running, f"{count} sequences run")


async def gauge_is(url: str, name: str, value: float) -> None:
    async def reached() -> bool:
        return (await metrics(url))[name] == value

    await until(reached, f"{name} = {value:g}")


async def tasks_are_at_most(url: str, name: str, value: float) -> None:
    """There may have been one more before: of an earlier request that had just ended."""

    async def reached() -> bool:
        return (await metrics(url))[name] <= value

    await until(reached, f"{name} <= {value:g}")


# -- clients that go away -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_ends_its_request_and_frees_everything(
    slow: Deployment, slow_http: httpx.AsyncClient, slow_bus: Bus, stream: bool, n: int
) -> None:
    user = f"leaver-{stream}-{n}"
    before = await metrics(slow.urls[0])
    body = text_body(40 + n, n=n, stream=stream, user=user)
    asking = asyncio.create_task(slow_http.post(PATH, json=body))
    [request] = await request_of(slow_bus, user)
    await sequences_run(slow_bus, n)
    left_ns = time.time_ns()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    timeline, end = await ending(slow_bus, request.id)
    assert end.code == "cancelled"
    assert end.timings.ended_ns - left_ns < 1_000_000_000
    assert end.worker == timeline.routed[-1].decision.chosen
    assert end.usage.completion < 2000
    await until(lambda: idle_workers(slow_bus), "the worker's blocks are free")
    await gauge_is(slow.urls[0], "penstock_gateway_open_requests", 0)
    after = await metrics(slow.urls[0])
    assert after["penstock_gateway_cancelled_total"] - before["penstock_gateway_cancelled_total"] == 1
    status = (await slow_http.get(f"/v1/requests/{request.id}")).json()
    assert status["state"] == "cancelled"


async def test_a_client_that_leaves_before_its_body_was_sent_leaves_nothing(
    slow: Deployment, slow_http: httpx.AsyncClient
) -> None:
    before = await metrics(slow.urls[0])
    for part in (b"", b'{"model"'):
        async with connected(slow.urls[0]) as (_, writer):
            writer.write(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n".encode() + part)
            await writer.drain()
    name = 'penstock_gateway_requests_total{api="http",code="cancelled"}'

    async def counted() -> bool:
        return (await metrics(slow.urls[0])).get(name, 0) >= before.get(name, 0) + 2

    await until(counted, "both were counted as cancelled")
    await tasks_are_at_most(slow.urls[0], "penstock_gateway_tasks", before["penstock_gateway_tasks"])


# -- deadlines ----------------------------------------------------------------------------------------------------


async def test_a_missed_deadline_is_an_error_of_its_own(slow_http: httpx.AsyncClient, slow_bus: Bus) -> None:
    answer = await slow_http.post(PATH, json=text_body(50, timeout_s=0.4))
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert answer.json()["error"]["type"] == "server_error"
    timeline, end = await ending(slow_bus, answer.headers["x-request-id"])
    assert end.code == "deadline_exceeded"
    assert timeline.request.deadline_ns - timeline.request.created_ns == 400_000_000
    assert 0 <= end.timings.ended_ns - timeline.request.deadline_ns < 2_000_000_000
    status = (await slow_http.get(f"/v1/requests/{timeline.request.id}")).json()
    assert (status["state"], status["error"]["code"]) == ("failed", "deadline_exceeded")
    await until(lambda: idle_workers(slow_bus), "the worker's blocks are free")


async def test_a_stream_that_misses_its_deadline_ends_with_the_error(
    slow_http: httpx.AsyncClient, slow_bus: Bus, oracle: Oracle
) -> None:
    body = text_body(51, deadline_s=0.6, timeout_s=50, stream=True)
    answer = await ok(slow_http.post(PATH, json=body))
    *events, error, done = parse_sse(answer.content)
    assert error.body["error"]["code"] == "deadline_exceeded"
    assert done.data == "[DONE]"
    assert len(events) >= 2
    assert joined(events) == oracle.answer(body, len(events))
    await until(lambda: idle_workers(slow_bus), "the worker's blocks are free")


# -- who goes first -----------------------------------------------------------------------------------------------


async def test_when_the_fleet_is_full_classes_go_in_their_order(slow_http: httpx.AsyncClient, slow_bus: Bus) -> None:
    async def send(count: int, seed: int, **more: Any) -> list[asyncio.Task[httpx.Response]]:
        bodies = [text_body(seed + i, **more) for i in range(count)]
        return [asyncio.create_task(slow_http.post(PATH, json=body)) for body in bodies]

    running = await send(6, 60, max_tokens=60)
    await sequences_run(slow_bus, 4)
    late = []
    for number, (name, priority) in enumerate((("batch", "batch"), ("normal", ""), ("urgent", "interactive"))):
        more = {"priority": priority} if priority else {}
        late += await send(3, 70 + 10 * number, max_tokens=1, user=name, **more)
        await request_of(slow_bus, name, 3)
    answers = [await task for task in (*running, *late)]
    assert {answer.status_code for answer in answers} == {200}
    placed = []
    for answer in answers[6:]:
        timeline, _ = await ending(slow_bus, answer.headers["x-request-id"])
        placed.append((timeline.routed[0].decision.at_ns, timeline.request.user))
    assert [user for _, user in sorted(placed)] == ["urgent"] * 3 + ["normal"] * 3 + ["batch"] * 3


# -- without workers ----------------------------------------------------------------------------------------------


async def test_a_deployment_without_workers_is_alive_but_not_ready(empty_http: httpx.AsyncClient) -> None:
    assert (await empty_http.get("/health/live")).status_code == 200
    ready = await empty_http.get("/health/ready")
    assert ready.status_code == 503
    assert [reason for reason in ready.json()["reasons"] if "no worker serves 'tiny'" in reason]


async def submitted(deployment: Deployment, body: dict[str, Any]) -> Msg:
    """The answer by way of NATS, however long it takes."""
    nc = await nats.connect(deployment.state.client_nats_url)
    try:
        inbox = nc.new_inbox()
        sub = await nc.subscribe(inbox)
        await Submitter(nc).submit(body, inbox)
        return await sub.next_msg(timeout=60)
    finally:
        await nc.close()


async def test_requests_wait_for_a_worker_within_the_queues_limit(
    empty: Deployment, empty_http: httpx.AsyncClient, empty_bus: Bus, oracle: Oracle
) -> None:
    async def send(user: str, **more: Any) -> tuple[asyncio.Task[httpx.Response], str]:
        async def post() -> httpx.Response:
            body = text_body(80, max_tokens=5, user=user, **more)
            while True:  # what is accepted while a gateway asks the broker counts twice, until it asks again
                answer = await empty_http.post(PATH, json=body)
                if answer.status_code != 429:
                    return answer

        task = asyncio.create_task(post())
        [request] = await request_of(empty_bus, user)
        return task, request.id

    url = empty.urls[0]
    waits, waiting_id = await send("patient", timeout_s=60)
    cancelled, cancelled_id = await send("cancelled", timeout_s=60)
    leaver, leaver_id = await send("leaver", timeout_s=60, stream=True)
    hasty, _ = await send("hasty", timeout_s=4)
    await gauge_is(url, "penstock_gateway_queued_requests", 4)
    for _ in range(3):
        refused = await empty_http.post(PATH, json=text_body(81, user="refused"))
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
        assert "class 'standard'" in error["message"]
        assert "limit of each class is 4 (--max-queue)" in error["message"]
    urgent, _ = await send("urgent", timeout_s=60, priority="interactive")  # has room of its own
    submission = asyncio.create_task(submitted(empty, text_body(83, max_tokens=5, user="submitted")))
    assert (await empty_http.get(f"/v1/requests/{waiting_id}")).json()["state"] == "queued"

    assert (await empty_http.delete(f"/v1/requests/{cancelled_id}")).status_code == 202
    assert (await cancelled).status_code == 499
    assert (await cancelled).json()["error"]["code"] == "cancelled"
    leaver.cancel()
    _, end = await ending(empty_bus, leaver_id)
    assert (end.code, end.worker) == ("cancelled", "")
    assert (await hasty).status_code == 504
    assert (await hasty).json()["error"]["code"] == "deadline_exceeded"

    assert not waits.done()
    workers = await empty.also_workers()
    try:
        answer = await waits
        assert answer.json()["choices"][0]["text"] == oracle.answer(text_body(80), 5)
        assert (await urgent).status_code == 200
        answer_by_nats = json.loads((await submission).data)  # it waited in its own stream
        assert answer_by_nats["choices"][0]["text"] == oracle.answer(text_body(83), 5)
        assert (await empty_http.get("/health/ready")).status_code == 200
        await gauge_is(url, "penstock_gateway_queued_requests", 0)
        for _ in range(20):  # one after another: nobody waits, however many come within a moment
            assert (await empty_http.post(PATH, json=text_body(82, max_tokens=2))).status_code == 200
    finally:
        assert await stopped(workers) == [0]
    assert (await empty_http.get("/health/ready")).status_code == 503
    assert await accepted(empty_bus, "refused") == []
    await gauge_is(url, "penstock_gateway_open_requests", 0)


async def test_a_cancellation_that_no_router_received_is_sent_again(
    empty: Deployment, empty_http: httpx.AsyncClient, empty_bus: Bus
) -> None:
    asking = asyncio.create_task(empty_http.post(PATH, json=text_body(84, user="unheard", timeout_s=60)))
    [request] = await request_of(empty_bus, "unheard")
    router = next(process for process in empty.state.processes if process.role == "router")
    assert router.pid is not None
    os.kill(router.pid, signal.SIGKILL)
    assert (await empty_http.delete(f"/v1/requests/{request.id}")).status_code == 202
    assert (await asking).status_code == 499
    _, end = await ending(empty_bus, request.id)
    assert (end.code, end.worker) == ("cancelled", "")


# -- nothing is left behind ---------------------------------------------------------------------------------------


async def test_hundreds_of_requests_leave_no_task_behind_anywhere(fast: Deployment, bus: Bus, oracle: Oracle) -> None:
    worker_url = f"http://127.0.0.1:{free_port()}"
    port = worker_url.rpartition(":")[2]
    others = await fast.also_workers("--metrics-port", port, "--served-model-name", "tiny,other")
    [router] = [process for process in fast.state.processes if process.role == "router"]
    router_url = router.metrics_url.removesuffix("/metrics")
    watched = {"gateway": fast.urls[0], "worker": worker_url, "router": router_url}
    try:
        await send_many(fast.urls[0], oracle, 60, 10_000)  # whatever is made once is there
        await until(lambda: idle_workers(bus), "all is quiet")
        before = {role: await metrics(url) for role, url in watched.items()}
        await send_many(fast.urls[0], oracle, 300, 20_000)
        await until(lambda: idle_workers(bus), "all blocks are free")
        for role, url in watched.items():
            await tasks_are_at_most(url, f"penstock_{role}_tasks", before[role][f"penstock_{role}_tasks"])
        await gauge_is(fast.urls[0], "penstock_gateway_open_requests", 0)
        after = {role: await metrics(url) for role, url in watched.items()}
        assert after["worker"]["penstock_worker_kv_used_blocks"] == 0
        assert after["worker"]["penstock_worker_unsent_bytes"] == 0
        assert after["router"]["penstock_router_waiting_requests"] == 0
        grown = {
            name: after[role][name] - before[role].get(name, 0.0)
            for role in watched
            for name in after[role]
            if name.partition("{")[0].endswith(("_total", "_count"))
        }
        assert grown['penstock_gateway_requests_total{api="http",code="ok"}'] == 270
        assert grown['penstock_gateway_requests_total{api="http",code="cancelled"}'] == 30
        assert grown["penstock_worker_tokens_total"] > 100
        assert grown['penstock_worker_requests_total{code="ok"}'] > 10
        assert grown["penstock_worker_request_seconds_count"] > 10
        assert grown['penstock_router_decisions_total{reason="new"}'] > 10
        assert grown["penstock_router_wait_seconds_count"] > 10
    finally:
        statuses = await stopped(others)
    assert statuses == [0]


async def send_many(url: str, oracle: Oracle, count: int, seed: int) -> None:
    """A mixture over 16 connections: streamed, whole, and every tenth given up by its client after a moment."""

    async def one(client: httpx.AsyncClient, number: int) -> None:
        body = text_body(seed + number, max_tokens=1 + number % 7, stream=number % 2 == 0)
        if number % 10 == 9:
            async with connected(url) as (_, writer):
                data = json.dumps({**body, "max_tokens": 100_000}).encode()
                writer.write(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
                await writer.drain()
            return
        answer = await ok(client.post(PATH, json=body))
        text = joined(parse_sse(answer.content)) if body["stream"] else answer.json()["choices"][0]["text"]
        if number % 5 == 0:
            assert text == oracle.answer(body, body["max_tokens"])

    async def one_client(first: int) -> None:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
            for number in range(first, count, 16):
                await one(client, number)

    await asyncio.gather(*map(one_client, range(16)))


async def test_connections_that_come_at_once_are_shared_by_the_gateways(fast: Deployment) -> None:
    """Whichever was idle took all that waited: at worst one had 256 of 256."""
    async with AsyncExitStack() as stack:
        shared = fast.state.http_url
        opened = await asyncio.gather(*(stack.enter_async_context(connected(shared)) for _ in range(64)))
        for _, writer in opened:
            writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        for reader, _ in opened:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        counts = []
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            for own in fast.urls:
                page = (await http.get(f"{own}/metrics")).text
                found = re.search(r"^penstock_gateway_connections\{[^}]*\} (\S+)", page, re.MULTILINE)
                assert found
                counts.append(float(found[1]) - 1)  # this one's own
    assert max(counts) <= 1.6 * 32
