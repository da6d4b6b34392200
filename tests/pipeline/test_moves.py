"""Prefixes that move between two aggregated workers of the native engine, over real NIXL: the same answers.

The first request of each test goes to one worker by name. The next one begins with the same text and has to run on the
other, since the first is busy: it reads the beginning there instead of computing it.
"""

import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from penstock.infra.bus.connection import Bus, connect
from penstock.schemas.jobs import Move
from penstock.schemas.transfer import PREFIX, Handoff
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, ending, registrations

pytestmark = pytest.mark.timeout(180)

ROOMS = " ".join(f"The code of room {number} is {number * 37 % 1000}." for number in range(90))


@pytest.fixture(scope="module")
def two(new_deployment: NewDeployment) -> Deployment:
    return new_deployment(
        *("--engine", "native", "--workers", "2", "--threads", "1", "--kv-blocks", "600", "--move-prefixes", "on")
    )


@pytest.fixture
async def bus(two: Deployment) -> AsyncIterator[Bus]:
    made = await connect(two.state.nats_url, role="client", name="test")
    yield made
    await made.close()


@pytest.fixture
async def http(two: Deployment) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=two.urls[0], trust_env=False, timeout=60) as made:
        yield made


def body(text: str, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "model": "demo",
        "temperature": 0,
        "max_tokens": 24,
        **more,
    }


async def ask(http: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[str, Any]:
    answer = await http.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"], answer.json()


async def moved(bus: Bus, request: str) -> tuple[Move | None, list[Handoff]]:
    """What the router had the worker read, and the ledger's lines about it."""
    timeline, _ = await ending(bus, request)
    route = timeline.routed[-1].decision.route
    lines = [line for line in timeline.handoffs if line.ticket.endswith(PREFIX)]
    return (route[0].move if route else None), lines


async def test_a_prefix_that_another_worker_caches_is_read_and_the_answer_is_the_same(
    http: httpx.AsyncClient, bus: Bus
) -> None:
    question = f"{ROOMS} What is the code of room 33?"
    _, computed = await ask(http, body(question, worker="worker-0"))
    request, read = await ask(http, body(question, worker="worker-1"))
    move, lines = await moved(bus, request)
    assert move is not None
    assert move.path == "on the same host"
    assert [line.state for line in lines] == ["offered", "leased", "read", "released"]
    (done,) = [line for line in lines if line.state == "read"]
    assert done.blocks == move.blocks or done.blocks == move.blocks - 1
    assert done.bytes
    assert read["choices"] == computed["choices"]
    assert "221" in read["choices"][0]["message"]["content"]
    assert read["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32 * done.blocks


async def test_a_source_that_stands_still_means_computing_here(http: httpx.AsyncClient, bus: Bus) -> None:
    question = f"{ROOMS[::-1]} What is the code of room 7?"
    _, computed = await ask(http, body(question, worker="worker-0"))
    (source,) = [each for each in (await registrations(bus)).values() if each.name == "worker-0"]
    os.kill(source.pid, signal.SIGSTOP)
    try:
        request, again = await ask(http, body(question, worker="worker-1"))
    finally:
        os.kill(source.pid, signal.SIGCONT)
    move, lines = await moved(bus, request)
    assert move is not None
    assert [line.state for line in lines if line.state == "read"] == []
    assert again["choices"] == computed["choices"]
