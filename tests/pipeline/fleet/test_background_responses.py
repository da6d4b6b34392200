"""Stored responses with OpenAI's client: in the background, continued, through the death of every process."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import get_last, read
from penstock.schemas.requests import new_request_id
from penstock.schemas.subjects import HEADER_MSG_ID
from tests.pipeline.support import Deployment, Oracle, until, words

pytestmark = pytest.mark.timeout(180)

LONG = 240  # tokens, which take 3 s


@pytest.fixture
async def clients(fleet: Deployment) -> AsyncIterator[list[openai.AsyncOpenAI]]:
    """One of each gateway."""
    made = [openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) for url in fleet.urls]
    yield made
    for client in made:
        await client.close()


def on_disk(deployment: Deployment) -> bytes:
    """Everything that the broker has stored."""
    return b"\0".join(path.read_bytes() for path in deployment.data_dir.rglob("*.blk"))


async def messages_of(bus: Bus, request_id: str) -> list[str]:
    """Subjects of what REQUESTS, WORK and DONE hold of a request."""
    return [
        entry.subject
        for name in ("REQUESTS", "WORK", "DONE")
        async for entry in read(bus, bus.subjects.stream(name), ">")
        if request_id in entry.headers.get(HEADER_MSG_ID, "") + entry.subject
    ]


def asked(text: str, tokens: int = 4, **more: Any) -> dict[str, Any]:
    body = {"ignore_eos": True} | more.pop("extra_body", {})
    return {"model": "tiny", "input": text, "temperature": 0, "max_output_tokens": tokens, "extra_body": body, **more}


def expected(oracle: Oracle, count: int, *said: str) -> str:
    """What the mock answers to what user and assistant said in turns."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
    return oracle.answer({"messages": messages, "temperature": 0}, count)


async def ended(client: openai.AsyncOpenAI, response_id: str, within_s: float = 60) -> Any:
    async def over() -> Any:
        try:
            found = await client.responses.retrieve(response_id)
        except openai.APIConnectionError:  # its gateway is being started again
            return None
        except openai.InternalServerError:  # the broker is
            return None
        return found if found.status not in ("queued", "in_progress") else None

    return await until(over, f"{response_id} is over", within_s)


@pytest.mark.slow  # test_batches kills every process
async def test_a_background_response_survives_the_death_of_every_process(
    fleet: Deployment, clients: list[openai.AsyncOpenAI], oracle: Oracle
) -> None:
    text = words(20, 1)
    made = await clients[0].responses.create(**asked(text, LONG, background=True))
    assert (made.status, made.output, made.background) == ("queued", [], True)

    async def begun() -> bool:
        return (await clients[1].responses.retrieve(made.id)).status == "in_progress"

    await until(begun, "the answer begins")
    stream = await clients[0].responses.retrieve(made.id, stream=True)
    seen = [await anext(stream) for _ in range(12)]
    victims = {process.pid for process in fleet.state.processes}
    assert {process.role for process in fleet.state.processes} >= {"gateway", "router", "worker", "nats"}
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    await stream.close()
    response = await ended(clients[0], made.id)
    assert response.status == "incomplete"  # by its limit
    assert response.output_text == expected(oracle, LONG, text)
    assert response.usage.output_tokens == LONG
    assert not victims & {process.pid for process in fleet.state.processes}
    behind = await clients[1].responses.retrieve(made.id, stream=True, starting_after=seen[-1].sequence_number)
    events = [*seen, *[event async for event in behind]]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == response.output_text
    nothing = await clients[1].responses.retrieve(made.id, stream=True, starting_after=events[-1].sequence_number)
    assert [event async for event in nothing] == []  # the end of the body, not of the connection


async def test_a_client_that_leaves_does_not_end_its_background_response(
    clients: list[openai.AsyncOpenAI], oracle: Oracle
) -> None:
    text = words(20, 2)
    stream = await clients[0].responses.create(**asked(text, 40, background=True, stream=True))
    first = await anext(stream)
    assert [first.type, (await anext(stream)).type] == ["response.created", "response.queued"]
    await stream.close()
    response = await ended(clients[1], first.response.id)
    assert response.output_text == expected(oracle, 40, text)


async def test_a_background_response_can_be_cancelled_at_any_gateway(clients: list[openai.AsyncOpenAI]) -> None:
    made = await clients[0].responses.create(**asked(words(20, 3), 2000, background=True))
    cancelled = await clients[1].responses.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert (await clients[0].responses.cancel(made.id)).status == "cancelled"
    assert (await clients[0].responses.retrieve(made.id)).error is None
    with pytest.raises(openai.BadRequestError, match="failed or was cancelled"):
        await clients[0].responses.create(**asked("Go on.", previous_response_id=made.id))


async def test_responses_are_continued_at_any_gateway(clients: list[openai.AsyncOpenAI], oracle: Oracle) -> None:
    said = [words(10, 4)]
    options: dict[str, Any] = {}
    for turn in range(3):
        client = clients[turn % 2]
        response = await client.responses.create(**asked(said[-1], **options))
        assert response.output_text == expected(oracle, 4, *said)
        said += [response.output_text, f"And then? {turn}"]
        options = {"previous_response_id": response.id}
    assert (await clients[1].responses.retrieve(response.id)).output_text == said[-2]
    listed = clients[0].responses.input_items
    items = (await listed.list(response.id, order="asc", limit=100)).data
    assert [item.content[0].text for item in items] == said[:-2]  # type: ignore[union-attr]
    assert [item.role for item in items] == ["user", "assistant"] * 2 + ["user"]  # type: ignore[union-attr]
    newest = [item async for item in listed.list(response.id, limit=2)]
    assert [item.id for item in newest] == [item.id for item in reversed(items)]
    count = await clients[0].responses.input_tokens.count(model="tiny", input="Why?", previous_response_id=response.id)
    assert response.usage is not None
    assert count.input_tokens > response.usage.input_tokens


async def test_instructions_are_of_one_response_only(clients: list[openai.AsyncOpenAI], oracle: Oracle) -> None:
    first = await clients[0].responses.create(**asked(words(10, 5), instructions="Sing."))
    second = await clients[0].responses.create(**asked("Again.", previous_response_id=first.id))
    assert second.instructions is None
    assert second.output_text == expected(oracle, 4, words(10, 5), first.output_text, "Again.")


async def test_a_response_that_is_not_stored_is_not_there(clients: list[openai.AsyncOpenAI]) -> None:
    response = await clients[0].responses.create(**asked(words(10, 6), store=False))
    assert response.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        await clients[0].responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError, match="not a stored response"):
        await clients[0].responses.create(**asked("Go on.", previous_response_id=response.id))


async def test_what_cannot_be_continued_or_fetched_is_refused_plainly(
    fleet: Deployment, clients: list[openai.AsyncOpenAI]
) -> None:
    client = clients[0]
    running = await client.responses.create(**asked(words(10, 7), 2000, background=True))
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        await client.responses.create(**asked("Go on.", previous_response_id=running.id))
    await client.responses.cancel(running.id)
    with pytest.raises(openai.BadRequestError, match="not known"):
        await client.responses.create(**asked("Go on.", previous_response_id="resp_1"))
    chat = await client.completions.create(model="tiny", prompt="a", max_tokens=1)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(chat.id.replace("cmpl-", "resp_"))
    async with httpx.AsyncClient(base_url=fleet.urls[0], trust_env=False, timeout=30) as http:
        made = await client.responses.create(**asked("Hi."))
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(made.id)
        for query in ("limit=0", "limit=x", "order=up", "after=nothing"):
            assert (await http.get(f"/v1/responses/{made.id}/input_items?{query}")).status_code == 400
        refused = await http.get(f"/v1/responses/{made.id}?stream=true&starting_after=x")
        assert refused.status_code == 400


async def test_a_deleted_response_leaves_nothing_behind(
    fleet: Deployment, fleet_bus: Bus, clients: list[openai.AsyncOpenAI]
) -> None:
    secret = "sesame-open-17"
    first = await clients[0].responses.create(**asked(f"{words(10, 10)} {secret}", metadata={"about": secret}))
    second = await clients[0].responses.create(**asked("Go on.", previous_response_id=first.id))
    running = await clients[0].responses.create(**asked(f"{words(10, 11)} {secret}", 2000, background=True))
    assert secret.encode() in on_disk(fleet)
    for response in (first, running):
        await clients[1].responses.delete(response.id)
        assert await messages_of(fleet_bus, response.id.removeprefix("resp_")) == []
        with pytest.raises(openai.NotFoundError):
            await clients[0].responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            await clients[0].responses.delete(response.id)
    assert secret.encode() not in on_disk(fleet)
    assert (await clients[0].responses.retrieve(second.id)).output_text == second.output_text
    left = (await clients[0].responses.input_items.list(second.id)).data
    assert [each.content[0].text for each in left] == ["Go on."], "of what it continued, nothing is left"  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="was deleted"):
        await clients[0].responses.create(**asked("Go on.", previous_response_id=second.id))
    again = await clients[0].responses.create(**asked("Hi."))
    assert again.status == "incomplete"


async def test_a_deleted_response_whose_record_is_stored_again_stays_deleted(
    fleet: Deployment, fleet_bus: Bus, clients: list[openai.AsyncOpenAI]
) -> None:
    """As by a worker that never reads that it was stored."""
    secret = "sesame-open-19"
    made = await clients[0].responses.create(**asked(f"{words(10, 12)} {secret}"))
    request_id = made.id.removeprefix("resp_")
    stream, subject = fleet_bus.subjects.stream("DONE"), fleet_bus.subjects.done_of(request_id)
    record = await until(lambda: get_last(fleet_bus, stream, subject), "its record is stored")
    await clients[0].responses.delete(made.id)
    assert secret.encode() not in on_disk(fleet)
    headers = {HEADER_MSG_ID: f"{request_id}:later", "Nats-Expected-Last-Subject-Sequence": "0"}
    await fleet_bus.js.publish(record.subject, record.data, headers=headers)

    async def is_gone() -> bool:
        for client in clients:
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(made.id)
        return not await messages_of(fleet_bus, request_id)

    await until(is_gone, "what was stored again is erased", 30)
    assert secret.encode() not in on_disk(fleet)


async def test_with_an_idempotency_key_a_background_response_is_made_once(clients: list[openai.AsyncOpenAI]) -> None:
    headers = {"Idempotency-Key": "background-1"}
    body = asked(words(10, 8), background=True)
    made = [await client.responses.create(**body, extra_headers=headers) for client in clients]
    assert made[0].id == made[1].id
    assert made[0].status == "queued"
    over = await ended(clients[0], made[0].id)
    again = await clients[1].responses.create(**body, extra_headers=headers)
    assert (again.id, again.status, again.output_text) == (over.id, "incomplete", over.output_text)
    await clients[0].responses.delete(over.id)
    anew = await clients[1].responses.create(**body, extra_headers=headers)
    assert anew.id != over.id, "the key stood for what was deleted"
    assert (await ended(clients[0], anew.id)).output_text == over.output_text
    assert (await clients[0].responses.create(**body, extra_headers=headers)).id == anew.id


async def test_several_clients_continue_the_same_response(clients: list[openai.AsyncOpenAI], oracle: Oracle) -> None:
    first = await clients[0].responses.create(**asked(words(10, 9)))
    questions = [f"Why? {number}" for number in range(4)]
    answers = await asyncio.gather(
        *(
            clients[number % 2].responses.create(**asked(question, previous_response_id=first.id))
            for number, question in enumerate(questions)
        )
    )
    for question, answer in zip(questions, answers, strict=True):
        assert answer.output_text == expected(oracle, 4, words(10, 9), first.output_text, question)


async def test_what_runs_without_a_client_is_listed_as_running_by_every_gateway(
    fleet: Deployment, clients: list[openai.AsyncOpenAI], http: httpx.AsyncClient
) -> None:
    """In the background, under a key whose client has left, and accepted by a gateway that is gone."""
    user = f"runs-{new_request_id()}"
    made = await clients[0].responses.create(**asked(words(20, 3), 2000, background=True, user=user))
    body = {"model": "tiny", "prompt": words(10, 4), "max_tokens": 2000, "stream": True, "user": user}
    async with http.stream("POST", "/v1/completions", json=body, headers={"Idempotency-Key": user}) as answer:
        kept = answer.headers["x-request-id"]
        await anext(answer.aiter_lines())
    listed = {"user": user, "since": time.time() - 600}
    states: dict[str, list[str]] = {}
    for url in fleet.urls:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as gateway:

            async def running(gateway: httpx.AsyncClient = gateway) -> bool:
                found = (await gateway.get("/v1/requests", params=listed)).json()["data"]
                states[str(gateway.base_url)] = [each["state"] for each in found]
                return len(found) == 2 and all(each["state"] == "running" and each["output_tokens"] for each in found)

            await until(running, f"listed as running: {states}")
    (killed,) = [each.pid for each in fleet.state.processes if each.name == "gateway-0" and each.pid]
    os.kill(killed, signal.SIGKILL)
    survivor = fleet.urls[1]
    async with httpx.AsyncClient(base_url=survivor, trust_env=False, timeout=30) as gateway:
        found = (await gateway.get("/v1/requests", params=listed)).json()["data"]
        assert [each["state"] for each in found] == ["running", "running"]
        await gateway.post(f"/v1/responses/{made.id}/cancel")
        await gateway.delete(f"/v1/requests/{kept}")
