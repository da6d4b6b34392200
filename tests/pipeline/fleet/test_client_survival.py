"""The Python client while brokers, gateways and its own process die: every answer comes whole, nothing twice."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.client import Client, Position
from penstock.infra.bus.connection import Bus
from penstock.infra.process.child import die_with_parent
from tests.pipeline.support import ROOT, Deployment, Oracle, accepted, idle_workers, until, words

ANSWERS = 20
TOKENS = 150
pytestmark = pytest.mark.timeout(180)


@pytest.fixture
async def client(fleet: Deployment) -> AsyncIterator[Client]:
    """With nats-py's own waits: 2 s before it connects again."""
    async with Client(fleet.state.client_nats_url, timeout=60) as made:
        yield made


def question(number: int, user: str) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": words(30) + f" question {number}"}],
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "user": user,
    }


class Reader:
    """One streamed answer; notes where each chunk stands."""

    def __init__(self, client: Client, number: int, user: str) -> None:
        self.stream = client.chat(**question(number, user), stream=True)
        self.text = ""
        self.numbers: list[int] = []

    async def run(self) -> None:
        async for chunk in self.stream:
            self.text += chunk.text
            self.numbers.append(chunk.position.next - 1)


@pytest.mark.parametrize("role", [pytest.param("nats", marks=pytest.mark.slow), "gateway"])
async def test_every_answer_comes_whole_although_a_process_is_killed(
    fleet: Deployment, fleet_bus: Bus, client: Client, oracle: Oracle, role: str
) -> None:
    """Also with nats-py's default reconnect wait, during which the answer goes on without its reader."""
    readers = [Reader(client, number, f"killed-{role}") for number in range(ANSWERS)]
    whole = [asyncio.create_task(_whole(client, number, f"killed-{role}")) for number in range(4)]
    runs = [asyncio.create_task(reader.run()) for reader in readers]

    async def under_way() -> bool:
        return sum(len(reader.numbers) for reader in readers) > ANSWERS * TOKENS // 4

    await until(under_way, "the answers begin")
    victims = [process for process in fleet.state.processes if process.role == role]
    for victim in victims:  # both gateways: whichever answers must be replaced
        assert victim.pid
        os.kill(victim.pid, signal.SIGKILL)
    await asyncio.gather(*runs)
    for number, reader in enumerate(readers):
        assert reader.text == oracle.answer(question(number, ""), TOKENS), f"answer {number}"
        assert reader.numbers == list(range(TOKENS + 1))
    for number, answer in enumerate(await asyncio.gather(*whole)):
        assert answer.text == oracle.answer(question(number, ""), TOKENS)
    assert len(await accepted(fleet_bus, f"killed-{role}")) == ANSWERS + len(whole), "nothing ran twice"
    await until(lambda: idle_workers(fleet_bus), "all blocks are free", within_s=30)


async def _whole(client: Client, number: int, user: str) -> Any:
    return await client.chat(**question(number, user))


DYING = """
import asyncio, json, sys
from penstock.client import Client

async def main():
    async with Client(sys.argv[1]) as client:
        async for chunk in client.chat(**json.loads(sys.argv[2]), stream=True):
            print(json.dumps([chunk.text, str(chunk.position)]), flush=True)

asyncio.run(main())
"""


@pytest.fixture
def dying(fleet: Deployment) -> Iterator[subprocess.Popen[str]]:
    """A process that asks, and tells each chunk and its position."""
    process = subprocess.Popen(
        [sys.executable, "-c", DYING, fleet.state.client_nats_url, json.dumps(question(77, "dying"))],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=Path(fleet.home),
        text=True,
        preexec_fn=die_with_parent(),
    )
    yield process
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


async def test_a_process_that_died_is_gone_on_for_by_another_from_its_saved_position(
    fleet: Deployment, fleet_bus: Bus, client: Client, oracle: Oracle, dying: subprocess.Popen[str]
) -> None:
    assert dying.stdout is not None
    text, saved = "", ""
    for _ in range(TOKENS // 3):
        piece, saved = json.loads(await asyncio.to_thread(dying.stdout.readline))
        text += piece
    dying.kill()
    assert Position.parse(saved).next == TOKENS // 3
    async for chunk in client.resume(saved):
        text += chunk.text
    assert text == oracle.answer(question(77, ""), TOKENS)
    assert len(await accepted(fleet_bus, "dying")) == 1


async def test_a_question_asked_again_under_its_key_is_answered_but_not_run_again(
    fleet_bus: Bus, client: Client, oracle: Oracle
) -> None:
    asked = question(5, "again")
    first = await client.chat(**asked, idempotency_key="again-5")
    again, third = await asyncio.gather(*(client.chat(**asked, idempotency_key="again-5") for _ in range(2)))
    assert first.text == again.text == third.text == oracle.answer(asked, TOKENS)
    assert first.request == again.request == third.request
    assert len(await accepted(fleet_bus, "again")) == 1
