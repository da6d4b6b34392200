"""A batch through SIGKILL of each kind of process, and of all: a result a line, no line twice, the right text."""

import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from penstock.gateway.batches.store import BatchStore
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.bus.direct_get import read
from penstock.schemas import requests
from penstock.schemas.batches import Batch
from penstock.schemas.errors import ServingError
from tests.pipeline.support import Deployment, Oracle, until

pytestmark = pytest.mark.timeout(240)

TOKENS = 151  # two seconds, and no other test asks for as many
CHAT = "/v1/chat/completions"
AWAY = (openai.APIConnectionError, openai.InternalServerError)


@pytest.fixture
async def clients(fleet: Deployment) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """One of each gateway."""
    made = [openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) for url in fleet.urls]
    for client in made:  # an earlier test may have killed it a moment ago
        await until(lambda client=client: answers(client), "the gateway answers")  # type: ignore[misc]
    yield made
    for client in made:
        await client.close()


async def answers(client: openai.AsyncOpenAI) -> bool:
    try:
        await client.batches.list(limit=1)  # which it reads from the broker after it has begun to answer
        return bool((await client.models.list()).data)
    except AWAY:
        return False


def body(text: str) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"model": "tiny", "messages": [message], "temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}


async def state_of(clients: list[openai.AsyncOpenAI], name: str) -> Any:
    """None: no gateway answers at the moment."""
    for client in clients:
        try:
            return await client.batches.retrieve(name)
        except AWAY:
            continue
    return None


async def driver_of(bus: Bus, name: str) -> str:
    """The id of the gateway that drives a batch, the name of its process and a suffix; "": none does."""
    found = await BatchStore(bus).find(name, "default", Batch)
    assert isinstance(found.value, Batch)
    return found.value.driver


async def successor(bus: Bus, name: str, killed: set[str]) -> str:
    """The driver of a batch that is none of those that were killed; "": there is none yet."""
    try:
        driver = await driver_of(bus, name)
    except ServingError:  # the broker is being started again
        return ""
    return "" if driver in killed else driver


async def accepted(bus: Bus, said: str) -> list[str]:
    """Ids of the requests of a batch, as often as they were accepted."""
    subject = f"{bus.subjects.namespace}.request.*.batch.*"
    stored = [requests.decode(entry.data) async for entry in read(bus, bus.subjects.stream("REQUESTS"), subject)]
    return [each.id for each in stored if each.stop.max_tokens == TOKENS and each.user == said]


@pytest.mark.parametrize(
    ("count", "victims"),
    [
        (800, ("driver", "all")),
        pytest.param(1500, ("driver", "router", "worker", "nats", "all"), marks=pytest.mark.slow),
    ],
    ids=["two", "five"],
)
async def test_a_batch_survives_the_death_of_each_process_and_of_all_and_runs_no_line_twice(
    clients: list[openai.AsyncOpenAI], fleet: Deployment, oracle: Oracle, count: int, victims: tuple[str, ...]
) -> None:
    """Of its lines, 512 run at a time."""
    bodies = [body(f"Number {number}") | {"user": f"survives {count}"} for number in range(count)]
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": CHAT, "body": each})
        for number, each in enumerate(bodies)
    ]
    source = await clients[0].files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = await clients[0].batches.create(input_file_id=source.id, endpoint=CHAT, completion_window="24h")

    async def begun() -> bool:
        return bool((await clients[0].batches.retrieve(batch.id)).request_counts.completed)

    await until(begun, "some have ended")
    bus = await connect(fleet.state.nats_url, role="operator", name="test")
    killed: set[str] = set()
    try:
        for victim in victims:
            now = await until(lambda: state_of(clients, batch.id), "a gateway answers")
            assert now.status == "in_progress", "it is to be disturbed"
            driver = await until(lambda: successor(bus, batch.id, killed), "it is driven")
            killed.add(driver if victim in ("driver", "all") else "")
            name = driver.rpartition("-")[0] if victim == "driver" else ""
            for process in fleet.state.processes:
                if victim in ("all", process.role) or process.name == name:
                    os.kill(process.pid, signal.SIGKILL)

        async def over() -> Any:
            now = await state_of(clients, batch.id)
            return now if now is not None and now.status != "in_progress" and now.status != "finalizing" else None

        ended = await until(over, "it has ended", 120)
        assert (ended.status, ended.request_counts.completed, ended.error_file_id) == ("completed", count, None)
        await until(lambda: answers(clients[0]), "the gateway answers")
        text = (await clients[0].files.content(ended.output_file_id)).text
        output = [json.loads(each) for each in text.splitlines()]
        assert [each["custom_id"] for each in output] == [str(number) for number in range(count)]
        for asked, each in list(zip(bodies, output, strict=True))[::5]:
            assert each["response"]["body"]["choices"][0]["message"]["content"] == oracle.answer(asked, TOKENS)
        ran = [each["response"]["request_id"] for each in output]
        assert sorted(await accepted(bus, f"survives {count}")) == sorted(ran)
    finally:
        await bus.close()


async def test_a_cancel_is_not_forgotten_when_the_driver_dies_with_it(
    clients: list[openai.AsyncOpenAI], fleet: Deployment, fleet_bus: Bus
) -> None:
    count = 800  # of which 512 run at a time, for two seconds
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": CHAT, "body": body(f"Number {number}")})
        for number in range(count)
    ]
    source = await clients[0].files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = await clients[0].batches.create(input_file_id=source.id, endpoint=CHAT, completion_window="24h")

    async def begun() -> bool:
        return bool((await clients[0].batches.retrieve(batch.id)).request_counts.completed)

    await until(begun, "some have ended")
    name = (await driver_of(fleet_bus, batch.id)).rpartition("-")[0]
    pids = {process.name: process.pid for process in fleet.state.processes}
    os.kill(pids[name], signal.SIGSTOP)  # it cannot see the cancel
    other = next(client for process, client in zip(("gateway-0", "gateway-1"), clients, strict=True) if process != name)
    assert (await other.batches.cancel(batch.id)).status == "cancelling"
    os.kill(pids[name], signal.SIGKILL)

    async def over() -> Any:
        now = await state_of(clients, batch.id)
        return now if now is not None and now.status == "cancelled" else None

    ended = await until(over, "it is cancelled", 60)
    counts = ended.request_counts
    assert counts.completed + counts.failed == counts.total == count
    assert counts.failed > 0
    errors = (await other.files.content(ended.error_file_id)).text.splitlines()
    assert {json.loads(each)["error"]["code"] for each in errors} == {"batch_cancelled"}
