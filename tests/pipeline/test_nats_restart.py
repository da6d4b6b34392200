"""The NATS API through a restart of the broker, with clients that have nats-py's defaults: they are back after 2 s."""

import asyncio
import hashlib
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from penstock.schemas.subjects import HEADER_ERROR, HEADER_FINAL, HEADER_MSG_ID, HEADER_REPLY_TO, HEADER_SEQ
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, Oracle, until, words

ANSWERS = 20
TOKENS = 120
SILENCE_S = 10.0


@pytest.fixture(scope="module")
def paced(new_deployment: NewDeployment) -> Deployment:
    """About 12 ms per token, so that answers are under way for a while."""
    return new_deployment("--mock-speedup", "0.5", "--gateways", "2", "--workers", "1")


@pytest.fixture
async def client(paced: Deployment) -> AsyncIterator[Client]:
    async def quiet(error: Exception) -> None:
        pass

    nc = await nats.connect(paced.state.client_nats_url, error_cb=quiet)
    yield nc
    await nc.close()


def body(number: int) -> dict[str, Any]:
    prompt = words(12, 70_000 + number)
    return {
        "model": "tiny",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
    }


class Reader:
    """The procedure of docs/nats.md: take the number that is expected, ask for what is missing."""

    def __init__(self, nc: Client, message_id: str) -> None:
        self.nc = nc
        self.message_id = message_id
        self.taken: list[Any] = []
        self.done = asyncio.Event()
        self.moved = asyncio.Event()

    async def take(self, message: Msg) -> None:
        headers = message.headers or {}
        if HEADER_SEQ not in headers:
            assert headers.get(HEADER_ERROR) or headers.get("Status"), message
            return
        number = int(headers[HEADER_SEQ])
        if number > len(self.taken):
            await self.ask()
        elif number == len(self.taken) and not self.done.is_set():
            self.taken.append(json.loads(message.data))
            self.moved.set()
            if HEADER_FINAL in headers:
                self.done.set()

    async def ask(self) -> None:
        inbox = self.nc.new_inbox()
        await self.nc.subscribe(inbox, cb=self.take)
        wanted = {"key": self.message_id, "from": len(self.taken)}
        await self.nc.publish("ps.read", json.dumps(wanted).encode(), reply=inbox)

    async def finish(self) -> None:
        while not self.done.is_set():
            self.moved.clear()
            moved = asyncio.ensure_future(self.moved.wait())
            done = asyncio.ensure_future(self.done.wait())
            await asyncio.wait([moved, done], timeout=SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
            silent = not (moved.done() or done.done())
            moved.cancel()
            done.cancel()
            if silent and self.nc.is_connected:
                await self.ask()

    @property
    def text(self) -> str:
        assert not [piece for piece in self.taken if "error" in piece]
        return "".join(choice["text"] for piece in self.taken for choice in piece["choices"])


async def restart_broker(deployment: Deployment, sign: signal.Signals) -> None:
    """Its supervisor starts it again."""
    [old] = [process.pid for process in deployment.state.processes if process.role == "nats"]
    assert old is not None
    os.kill(old, sign)

    async def replaced() -> bool:
        return [p.pid for p in deployment.state.processes if p.role == "nats"] not in ([old], [None])

    await until(replaced, "a new broker", within_s=20)


@pytest.mark.parametrize(
    "sign", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=["killed", "in order"]
)
async def test_every_answer_is_whole_by_the_documented_procedure(
    paced: Deployment, client: Client, oracle: Oracle, sign: signal.Signals
) -> None:
    readers = [Reader(client, f"restart-{sign.name}-{number}") for number in range(ANSWERS)]
    back = asyncio.Event()

    async def reconnected() -> None:
        back.set()
        for reader in readers:
            if not reader.done.is_set():
                await reader.ask()

    client.options["reconnected_cb"] = reconnected
    client._reconnected_cb = reconnected  # as given to nats.connect
    for number, reader in enumerate(readers):
        key = hashlib.sha256(reader.message_id.encode()).hexdigest()[:32]
        await client.subscribe(f"ps.answer.{key}", cb=reader.take)
        data = json.dumps(body(number)).encode()
        await client.jetstream().publish("ps.submit.tiny", data, headers={HEADER_MSG_ID: reader.message_id})

    async def under_way() -> bool:
        return sum(len(reader.taken) for reader in readers) > ANSWERS * TOKENS // 5

    await until(under_way, "answers under way")
    assert not all(reader.done.is_set() for reader in readers)
    await restart_broker(paced, sign)
    async with asyncio.timeout(60):
        await asyncio.gather(*(reader.finish() for reader in readers))
    assert back.is_set()
    whole = [reader.text == oracle.answer(body(number), TOKENS) for number, reader in enumerate(readers)]
    assert whole == [True] * ANSWERS


async def test_a_client_that_only_drops_what_it_has_gets_its_answers_too(
    paced: Deployment, client: Client, oracle: Oracle
) -> None:
    """As in the README: the gateway sends open answers again once their readers are back."""
    pieces: list[dict[int, Any]] = [{} for _ in range(ANSWERS)]
    finals: set[int] = set()

    async def listen(number: int) -> None:
        inbox = client.new_inbox()

        async def take(message: Msg) -> None:
            headers = message.headers or {}
            pieces[number].setdefault(int(headers[HEADER_SEQ]), json.loads(message.data))
            if HEADER_FINAL in headers:
                finals.add(number)

        await client.subscribe(inbox, cb=take)
        data = json.dumps(body(100 + number)).encode()
        await client.jetstream().publish("ps.submit.tiny", data, headers={HEADER_REPLY_TO: inbox})

    for number in range(ANSWERS):
        await listen(number)

    async def under_way() -> bool:
        return sum(map(len, pieces)) > ANSWERS * TOKENS // 5

    await until(under_way, "answers under way")
    assert len(finals) < ANSWERS
    ended = set(finals)
    await restart_broker(paced, signal.SIGKILL)

    async def complete() -> bool:
        return len(finals) == ANSWERS

    await until(complete, "all final messages", within_s=60)
    for number in sorted(set(range(ANSWERS)) - ended):
        numbers = sorted(pieces[number])
        assert numbers == list(range(len(numbers)))
        text = "".join(c["text"] for n in numbers for c in pieces[number][n]["choices"])
        assert text == oracle.answer(body(100 + number), TOKENS)
