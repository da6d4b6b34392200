"""Requests with ``no_store`` on a broker without a cluster, which loses what is in memory when it restarts."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.gateway.base.event_stream import COMMENT
from penstock.infra.bus.connection import connect
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.fleet.test_no_store import PATH, body, is_deleted, on_disk, traces
from tests.pipeline.support import Deployment, Oracle, joined, parse_sse, until

pytestmark = pytest.mark.timeout(180)

LONG = 250  # tokens, about 12 ms each


@pytest.fixture(scope="module")
def lone(new_deployment: NewDeployment) -> Deployment:
    flags = ("--mock-speedup", "0.5", "--workers", "2", "--no-store-grace-s", "1", "--drain-s", "5")
    return new_deployment(*flags)


def kill(deployment: Deployment, *names: str) -> None:
    for process in deployment.state.processes:
        if process.name.startswith(names):
            os.kill(process.pid, signal.SIGKILL)


async def begun(http: httpx.AsyncClient, asked: dict[str, Any]) -> "tuple[str, asyncio.Task[bytes]]":
    """A stream of which the first tokens came: the request's id, and the rest of its body."""
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def read_all() -> bytes:
        parts = []
        async with http.stream("POST", PATH, json=asked | {"stream": True}) as answer:
            async for part in answer.aiter_bytes():
                parts.append(part)
                if len(parts) == 5:
                    started.set_result(answer.headers["x-request-id"])
        return b"".join(parts)

    task = asyncio.create_task(read_all())
    return await started, task


@pytest.mark.parametrize(
    "victims",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in (("nats",), ("nats", "router"))), ("nats", "worker")],
)
async def test_answers_are_whole_though_the_broker_and_one_other_process_die(
    lone: Deployment, oracle: Oracle, victims: tuple[str, ...]
) -> None:
    first = 40 + 10 * len(victims) + len(victims[-1])
    asked = [body(first + number, no_store=True, max_tokens=LONG) for number in range(3)]
    async with httpx.AsyncClient(base_url=lone.urls[0], trust_env=False, timeout=60) as http:
        running = [await begun(http, each) for each in asked]
        kill(lone, *victims)
        answers = [await task for _, task in running]
    answers = [answer.replace(COMMENT, b"") for answer in answers]  # on a slow machine, the first token takes long
    assert [joined(parse_sse(answer)) for answer in answers] == [oracle.answer(each, LONG) for each in asked]
    bus = await connect(lone.state.nats_url, role="operator", name="test")
    for (request_id, _), each in zip(running, asked, strict=True):
        await is_deleted(lone, bus, request_id, traces(oracle, each))
    await bus.close()


async def test_a_request_whose_broker_and_gateway_die_ends_with_content_lost(lone: Deployment, oracle: Oracle) -> None:
    waiting = body(90, no_store=True, max_tokens=LONG, worker="none-of-this-name-yet")
    del waiting["worker"]
    async with httpx.AsyncClient(base_url=lone.urls[0], trust_env=False, timeout=60) as http:
        request_id, task = await begun(http, waiting)
        kill(lone, "nats", "gateway", "worker")
        with pytest.raises(httpx.TransportError):
            await task

        async def ends() -> str:
            try:
                answer = await http.get(f"/v1/requests/{request_id}/stream")
            except httpx.TransportError:
                return ""
            return str(answer.json()["error"]["code"]) if answer.status_code >= 400 else ""

        async def lost() -> bool:
            return await ends() in ("content_lost", "request_erased")

        await until(lost, "its end", 60.0)
    bus = await connect(lone.state.nats_url, role="operator", name="test")
    assert await on_disk(lone, traces(oracle, waiting)) == []
    await until(lambda: has_ended(bus, request_id), "its record", 60.0)
    await bus.close()


async def has_ended(bus: Any, request_id: str) -> bool:
    from penstock.infra.bus.direct_get import get_last
    from penstock.schemas import done

    entry = await get_last(bus, bus.subjects.stream("DONE"), bus.subjects.done_of(request_id))
    if entry is None:
        return False
    event = done.decode(entry.data)
    assert isinstance(event, done.Done)
    return event.code == "content_lost"


async def test_a_storm_of_them_gets_every_answer_and_costs_the_broker_no_rewriting(lone: Deployment) -> None:
    broker = next(process.pid for process in lone.state.processes if process.name == "nats")
    before, seconds = written_by(broker), 8.0
    statuses: list[int] = []

    async def ask_on(client: int, http: httpx.AsyncClient, until_s: float) -> None:
        number = 0
        while asyncio.get_running_loop().time() < until_s:
            number += 1
            asked = body(1000 * client + number, no_store=True, max_tokens=20)
            statuses.append((await http.post(PATH, json=asked)).status_code)

    async with httpx.AsyncClient(base_url=lone.urls[0], trust_env=False, timeout=60) as http:
        end = asyncio.get_running_loop().time() + seconds
        await asyncio.gather(*(ask_on(client, http, end) for client in range(1, 9)))
    assert set(statuses) == {200}
    assert written_by(broker) - before < 20_000 * len(statuses) + (4 << 20)


def written_by(pid: int) -> int:
    """Bytes that a process has written to files and sockets."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("write_bytes")).split()[1])
