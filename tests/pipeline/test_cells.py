"""One deployment in two cells, each with a broker of its own: one address, one set of keys, claims and records."""

import asyncio
import contextlib
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import nats
import pytest

from penstock.infra.bus.connection import connect
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.launch.nats import apply_at
from penstock.schemas.requests import cell_in, in_cell
from penstock.schemas.subjects import cell_namespace
from tests.chaos.log import surplus
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, Oracle, free_port, joined, parse_sse, until, words

COUNT = 6


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment) -> Deployment:
    flags = ("--cells", "2", "--gateways", "2", "--workers", "2", "--mock-speedup", "0", "--list-requests")
    return new_deployment(*flags)


@pytest.fixture
async def gateways(deployment: Deployment) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Clients of the two gateways; the first is nearest to the first cell, the second to the second."""
    made = [httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) for url in deployment.urls]
    seeds = itertools.count(1000)

    async def settled() -> bool:  # each has heard of the workers and the router of its nearest cell
        return [cell_in(request_id(await said(http, chat(next(seeds))))) for http in made] == [0, 1]

    await until(settled, "each gateway uses its nearest cell")
    yield made
    for each in made:
        await each.aclose()


def chat(seed: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": words(20, seed)}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": COUNT, **more}


async def said(http: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = await http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def request_id(answer: dict[str, Any]) -> str:
    return str(answer["id"]).removeprefix("chatcmpl-")


async def test_each_gateway_answers_from_its_nearest_cell_and_finds_the_requests_of_both(
    gateways: list[httpx.AsyncClient], oracle: Oracle
) -> None:
    bodies = [chat(1), chat(2)]
    answers = [await said(http, body) for http, body in zip(gateways, bodies, strict=True)]
    assert [cell_in(request_id(each)) for each in answers] == [0, 1]
    for answer, body in zip(answers, bodies, strict=True):
        text = answer["choices"][0]["message"]["content"]
        assert text.strip() == oracle.answer(body, COUNT).strip()
        for http in gateways:
            found = await http.get(f"/v1/requests/{request_id(answer)}")
            assert found.status_code == 200, found.text
            assert found.json()["id"] == request_id(answer)
            stream = await http.get(f"/v1/requests/{request_id(answer)}/stream")
            assert joined(parse_sse(stream.content)).strip() == text.strip()


async def test_the_list_has_the_requests_of_both_cells_the_newest_first(gateways: list[httpx.AsyncClient]) -> None:
    sent = [request_id(await said(gateways[number % 2], chat(10 + number, user="lister"))) for number in range(6)]
    for http in gateways:
        found, after = list[str](), ""
        while True:
            page = (await http.get("/v1/requests", params={"user": "lister", "limit": 2, "after": after})).json()
            assert len(page["data"]) <= 2
            found += [each["id"] for each in page["data"]]
            after = page["next_after"]
            if not after:
                break
        assert found == sent[::-1]


async def test_a_key_stands_for_one_request_at_every_gateway(gateways: list[httpx.AsyncClient]) -> None:
    key = {"Idempotency-Key": "once"}
    first, second, *late = await asyncio.gather(*(said(http, chat(30), **key) for http in (*gateways, *gateways)))
    assert {request_id(each) for each in (first, second, *late)} == {request_id(first)}
    assert request_id(await said(gateways[1 - cell_in(request_id(first))], chat(30), **key)) == request_id(first)


async def test_a_response_is_continued_at_the_other_gateway(gateways: list[httpx.AsyncClient]) -> None:
    here, there = gateways[1], gateways[0]
    first = (await here.post("/v1/responses", json={"model": "tiny", "input": "hello", "max_output_tokens": 4})).json()
    body = {"model": "tiny", "input": "and?", "previous_response_id": first["id"], "max_output_tokens": 4}
    second = await there.post("/v1/responses", json=body)
    assert second.status_code == 200, second.text
    assert [cell_in(each["id"].removeprefix("resp_")) for each in (first, second.json())] == [1, 0]
    assert (await here.delete(f"/v1/responses/{second.json()['id']}")).status_code == 200
    assert (await there.get(f"/v1/responses/{second.json()['id']}")).status_code == 404


async def used(http: httpx.AsyncClient, at_least: int = 0) -> dict[str, int]:
    """What both cells count, once that is so many requests."""
    found: dict[str, int] = {}

    async def counted() -> bool:
        page = (await http.get("/v1/usage", params={"bucket_width": "1mo"})).json()
        results = [each for bucket in page["data"] for each in bucket["results"]]
        names = ("num_model_requests", "input_tokens", "output_tokens")
        found.update({name: sum(each[name] for each in results) for name in names})
        return found["num_model_requests"] >= at_least

    await until(counted, f"{at_least} requests are counted")
    return dict(found)


async def more_counted(deployment: Deployment) -> dict[str, int]:
    """How much more both cells have counted than they have records of: what was deleted, once all is counted."""
    async with contextlib.AsyncExitStack() as stack:
        buses = []
        for cell, each in enumerate(deployment.state.all_cells):
            namespace = cell_namespace(deployment.state.namespace, cell)
            bus = await connect(each.nats_url, role="operator", name="test", namespace=namespace)
            buses.append(await stack.enter_async_context(bus))
        return await surplus(buses)


async def test_usage_is_the_sum_of_both_cells_with_the_lines_of_a_batch(
    deployment: Deployment, gateways: list[httpx.AsyncClient], oracle: Oracle
) -> None:
    deleted = await more_counted(deployment)
    before = await used(gateways[0])
    chats = [await said(gateways[number % 2], chat(40 + number)) for number in range(4)]
    assert {cell_in(request_id(each)) for each in chats} == {0, 1}
    told = [each["usage"] for each in chats]
    bodies = [chat(100 + number) for number in range(60)]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    form = {"file": ("in.jsonl", "\n".join(map(json.dumps, lines)).encode())}
    source = (await gateways[1].post("/v1/files", files=form, data={"purpose": "batch"})).json()
    asked = {"input_file_id": source["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = (await gateways[0].post("/v1/batches", json=asked)).json()

    async def over() -> Any:
        now = (await gateways[1].get(f"/v1/batches/{batch['id']}")).json()
        return now if now["status"] == "completed" else None

    ended = await until(over, "the batch has ended")
    assert ended["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
    content = (await gateways[0].get(f"/v1/files/{ended['output_file_id']}/content")).text
    output = [json.loads(line) for line in content.splitlines()]
    answers = [each["response"]["body"] for each in output]
    for body, answer in zip(bodies, answers, strict=True):
        assert answer["choices"][0]["message"]["content"] == oracle.answer(body, COUNT)
    told += [answer["usage"] for answer in answers]
    after = await used(gateways[1], before["num_model_requests"] + 64)
    assert after["num_model_requests"] == before["num_model_requests"] + 64
    assert after["input_tokens"] - before["input_tokens"] == sum(each["prompt_tokens"] for each in told)
    assert after["output_tokens"] - before["output_tokens"] == sum(each["completion_tokens"] for each in told)
    assert await more_counted(deployment) == deleted


async def test_the_nats_door_at_home_accepts_into_every_cell(deployment: Deployment) -> None:
    nc = await nats.connect(deployment.state.client_nats_url)
    try:
        body = b'{"model": "tiny", "prompt": "hello", "max_tokens": 3}'
        replies = [await nc.request("ps.ask.tiny", body, timeout=20) for _ in range(8)]
        ids = [dict(reply.headers or {})["Penstock-Request-Id"] for reply in replies]
        assert {cell_in(each) for each in ids} <= {0, 1}
    finally:
        await nc.close()


async def test_without_workers_in_its_nearest_cell_a_gateway_uses_the_other(
    deployment: Deployment, gateways: list[httpx.AsyncClient]
) -> None:
    seeds = itertools.count(50)

    async def cell() -> int:
        return cell_in(request_id(await said(gateways[1], chat(next(seeds)))))

    async def is_lost() -> bool:
        workers = (await gateways[1].get("/health")).json()["components"]
        return not any(each["name"] == "worker-1" for each in workers)

    assert await cell() == 1
    (worker,) = [each.pid for each in deployment.state.processes if each.name == "worker-1"]
    assert worker is not None
    os.kill(worker, signal.SIGSTOP)
    try:
        await until(is_lost, "the worker's lease ends")
        assert [await cell() for _ in range(3)] == [0, 0, 0]
    finally:
        os.kill(worker, signal.SIGCONT)

    async def is_back() -> bool:
        return await cell() == 1

    await until(is_back, "the worker takes requests again")


async def test_a_gateway_starts_without_the_broker_of_a_cell_and_uses_it_once_it_is_there(
    deployment: Deployment, make_broker: Callable[..., EmbeddedNats]
) -> None:
    server = make_broker("late", namespace="ps-1", port=free_port())
    await asyncio.to_thread(lambda: asyncio.run(server.start()))  # for its passwords
    url = server.url("operator")
    await apply_at(url, server.subjects, cells=2)
    await asyncio.to_thread(lambda: asyncio.run(server.stop()))
    flags = ("--cells", "2", "--nearest-cell", "1", "--cell-nats-urls", url, "--http-port", str(free_port()))
    process = deployment.also("gateway", *flags, "--name", "early")
    await asyncio.to_thread(process.wait_for, "gateway_listening")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{flags[-1]}", trust_env=False, timeout=30) as http:
        found = request_id(await said(http, chat(70)))
        assert cell_in(found) == 0
        there = in_cell(found, 1)
        refused = await http.get(f"/v1/requests/{there}")
        assert (refused.status_code, "cell 1" in refused.text) == (503, True), refused.text
        await asyncio.to_thread(lambda: asyncio.run(server.start()))

        async def opened() -> bool:
            return (await http.get(f"/v1/requests/{there}")).status_code == 404

        await until(opened, "the cell is used")
        assert cell_in(request_id(await said(http, chat(71)))) == 0, "it has no workers"
    assert await asyncio.to_thread(process.stop) == 0


async def test_a_gateway_with_fewer_active_cells_uses_these_only_and_finds_the_requests_of_all(
    deployment: Deployment, gateways: list[httpx.AsyncClient], oracle: Oracle
) -> None:
    before = request_id(await said(gateways[1], chat(80)))
    assert cell_in(before) == 1
    port, url = str(free_port()), deployment.state.cells[1].nats_url
    cells = ("--cells", "2", "--active-cells", "1", "--nearest-cell", "1", "--cell-nats-urls", url)
    process = deployment.also("gateway", *cells, "--http-port", port, "--name", "fewer")
    await asyncio.to_thread(process.wait_for, "gateway_listening")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as http:
        assert [cell_in(request_id(await said(http, chat(81 + number)))) for number in range(4)] == [0] * 4
        stream = await http.get(f"/v1/requests/{before}/stream")
        assert joined(parse_sse(stream.content)).strip() == oracle.answer(chat(80), COUNT).strip()
    assert await asyncio.to_thread(process.stop) == 0
