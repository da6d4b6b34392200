"""Prefixes that move between two aggregated workers of the native engine, over real NIXL: the same answers.

The first request of each test goes to one worker by name. The next one begins with the same text and has to run on the
other, since the first is busy: it reads the beginning there instead of computing it.
"""

import asyncio
import os
import signal
from typing import Any

import httpx
import pytest

from penstock.cli.commands import main
from penstock.infra.bus.connection import Bus
from penstock.schemas.jobs import Move
from penstock.schemas.transfer import PREFIX, Handoff
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, bus_of, ending, http_of, ok, registrations, until

# workers/disagg/test_moves has them between engines of the mock; here two processes load torch.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOMS = " ".join(f"The code of room {number} is {number * 37 % 1000}." for number in range(90))


@pytest.fixture(scope="module")
def two(new_deployment: NewDeployment) -> Deployment:
    return new_deployment(
        *("--engine", "native", "--workers", "2", "--threads", "1", "--kv-blocks", "600", "--move-prefixes", "on")
    )


bus = bus_of("two")
http = http_of("two")


def body(text: str, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "model": "demo",
        "temperature": 0,
        "max_tokens": 24,
        **more,
    }


async def ask(http: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[str, Any]:
    answer = await ok(http.post("/v1/chat/completions", json=asked))
    return answer.headers["x-request-id"], answer.json()


async def move_of(bus: Bus, request: str) -> Move:
    """What the router had the worker read."""
    timeline, _ = await ending(bus, request)
    move = timeline.routed[-1].decision.route[0].move
    assert move is not None
    return move


async def reads(bus: Bus, request: str) -> list[Handoff]:
    """The ledger's lines about the blocks that were read; it is written a moment later."""
    timeline, _ = await ending(bus, request)
    return [line for line in timeline.handoffs if line.ticket.endswith(PREFIX) and line.state == "read"]


async def test_a_prefix_that_another_worker_caches_is_read_and_the_answer_is_the_same(
    http: httpx.AsyncClient, bus: Bus, two: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    question = f"{ROOMS} What is the code of room 33?"
    _, computed = await ask(http, body(question, worker="worker-0"))
    await ask(http, body("How do I start a worker?", worker="worker-1"))  # so that it knows how long computing takes
    request, read = await ask(http, body(question, worker="worker-1"))
    move = await move_of(bus, request)
    assert move.path == "on the same host"
    (done,) = await until(lambda: reads(bus, request), "the ledger is written")
    assert done.blocks == move.blocks or done.blocks == move.blocks - 1
    assert done.bytes
    assert "% of computing them" in done.message
    assert read["choices"] == computed["choices"]
    assert "221" in read["choices"][0]["message"]["content"]
    assert await asyncio.to_thread(main, ["inspect", "--data-dir", str(two.data_dir), request]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{move.blocks} are at {move.source} on the same host" in shown
    assert f"of the cache of {move.source} in" in shown
    assert done.message in shown
    assert f"{move.blocks} from {move.source}" in shown
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
    assert (await move_of(bus, request)).source == source.worker
    assert await reads(bus, request) == []
    assert again["choices"] == computed["choices"]
