"""Requests with ``no_store``: served like all others, nothing of them reaches a disk, and memory is freed soon."""

import asyncio
import json
import os
import signal
from collections.abc import Iterable, Sequence
from typing import Any

import httpx
import nats
import pytest

from penstock.infra.bus.connection import Bus, connect
from penstock.infra.bus.direct_get import read
from penstock.schemas import done, requests, tokens
from penstock.schemas.subjects import HEADER_MSG_ID, HEADER_NO_STORE, HEADER_REPLY_TO, HEADER_REQUEST
from penstock.schemas.wire import pack_tokens
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, Oracle, joined, ok, parse_sse, registrations, token_prompt, until

pytestmark = pytest.mark.timeout(120)

COUNT = 24  # tokens of an answer
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def pairs(new_deployment: NewDeployment) -> Deployment:
    flags = ("--mock-speedup", "1", "--prefill", "1", "--decode", "1", "--local-prefill-tokens", "16")
    return new_deployment(*flags, "--always-no-store", "--no-store-grace-s", "1")


def body(number: int, **more: Any) -> dict[str, Any]:
    """A prompt that no other request begins with, and that can be told from others on the disk."""
    prompt = token_prompt(40, number)
    return {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": COUNT, "ignore_eos": True} | more


def traces(oracle: Oracle, asked: dict[str, Any], choices: int = 1) -> list[bytes]:
    """What of a request can be found in a file: parts of its prompt and its answers, as tokens and as text."""
    prompt = oracle.prompt(asked)
    found = [low_bytes(prompt), *(pack_tokens(prompt[at : at + 4]) for at in range(0, len(prompt) - 3, 12))]
    for choice in range(choices):
        answer = oracle.tokens(asked, COUNT, choice)
        # Token batches are small: with any three tokens in a row of them all, one batch at least is recognised. Two are
        # in some other answer by chance, where thousands are stored.
        found += [pack_tokens(answer[at : at + 3]) for at in range(COUNT - 3)]
        found.append(oracle.text(answer).encode())
    return found


def low_bytes(prompt: Sequence[int]) -> bytes:
    """Of a prompt's tokens, as they lie one after the other where it is packed."""
    return pack_tokens(prompt)[::4]


async def messages_of(bus: Bus, request_id: str) -> list[str]:
    """Subjects of the messages of WORK about a request."""
    work = read(bus, bus.subjects.stream("WORK"), ">")
    return [entry.subject async for entry in work if request_id in entry.headers.get(HEADER_MSG_ID, "")]


async def on_disk(deployment: Deployment, wanted: Iterable[bytes]) -> list[bytes]:
    """Those that some file of the deployment contains: the broker's streams of either kind, logs, and all else.

    Not on the event loop: the broker cuts off who does not answer its pings for 2 s.
    """

    def look() -> list[bytes]:
        raw = b"\0\0".join(path.read_bytes() for path in deployment.data_dir.rglob("*") if path.is_file())
        return [each for each in wanted if each in raw]

    return await asyncio.to_thread(look)


async def in_memory(bus: Bus, request_id: str) -> list[str]:
    """Subjects of what memory storage holds of a request."""
    found = []
    async for entry in read(bus, bus.subjects.stream("MEMORY_CONTENTS"), ">"):
        if request_id in entry.subject:
            found.append(entry.subject)
    async for entry in read(bus, bus.subjects.stream("MEMORY_TOKENS"), ">"):
        if any(item.request == request_id for item in tokens.decode(entry.data).items):
            found.append(entry.subject)
    return found


async def record_of(bus: Bus, request_id: str) -> done.Done:
    records = [entry async for entry in read(bus, bus.subjects.stream("DONE"), bus.subjects.done_of(request_id))]
    assert len(records) == 1
    event = done.decode(records[0].data)
    assert isinstance(event, done.Done)
    return event


async def is_deleted(deployment: Deployment, bus: Bus, request_id: str, wanted: list[bytes]) -> None:
    """Returns once memory storage has nothing of it; then, as ever before, no file has."""
    assert await on_disk(deployment, wanted) == []

    async def gone() -> bool:
        return await in_memory(bus, request_id) == []

    await until(gone, f"deletion of {request_id}", 45.0)
    assert await on_disk(deployment, wanted) == []
    assert "prompt" in (await record_of(bus, request_id)).left_out


async def stream(http: httpx.AsyncClient, asked: dict[str, Any], **headers: str) -> tuple[str, str]:
    """The request's id and its text."""
    answer = await ok(http.post(PATH, json=asked | {"stream": True}, headers=headers))
    return answer.headers["x-request-id"], joined(parse_sse(answer.content))


async def test_an_answer_is_whole_and_nothing_of_it_is_ever_on_the_disk(
    fleet: Deployment, fleet_bus: Bus, http: httpx.AsyncClient, oracle: Oracle
) -> None:
    stored, asked = body(1), body(2, no_store=True)
    kept, (request_id, text) = await asyncio.gather(stream(http, stored), stream(http, asked))
    assert text == oracle.answer(asked, COUNT)
    again = await http.get(f"/v1/requests/{request_id}/stream")  # soon, since it is in memory for seconds only
    assert joined(parse_sse(again.content)) == text
    wanted = traces(oracle, asked)
    assert await on_disk(fleet, wanted) == []
    await is_deleted(fleet, fleet_bus, request_id, wanted)
    assert await on_disk(fleet, traces(oracle, stored)[:3]), "a request beside it is stored as ever"
    assert kept[1] == oracle.answer(stored, COUNT)


async def test_its_content_is_sent_to_its_worker_which_need_not_ask(
    fleet: Deployment, fleet_bus: Bus, http: httpx.AsyncClient, oracle: Oracle
) -> None:
    """As the permissions of the roles allow it, and with two workers to one of them."""
    sent: list[bytes] = []

    async def note(message: Any) -> None:
        sent.append(message.data)

    inboxes = [each.inbox for each in (await registrations(fleet_bus)).values()]
    assert all(inboxes)
    subscriptions = [await fleet_bus.nc.subscribe(f"{inbox}.*", cb=note) for inbox in inboxes]
    asked = body(9, no_store=True)
    request_id, text = await stream(http, asked)
    assert text == oracle.answer(asked, COUNT)
    (content,) = [request for data in sent if (request := requests.decode(data)).id == request_id]
    assert content.prompt == pack_tokens(oracle.prompt(asked))
    for each in subscriptions:
        await each.unsubscribe()
    await is_deleted(fleet, fleet_bus, request_id, traces(oracle, asked))


async def test_a_deleted_request_is_gone_for_its_client_and_listed_for_the_operator(
    fleet: Deployment, fleet_bus: Bus, http: httpx.AsyncClient, oracle: Oracle
) -> None:
    asked = body(3, user="somebody", prompt_cache_key="our divorce")
    request_id, _ = await stream(http, asked, **{"x-penstock-no-store": "1", "idempotency-key": "once"})
    await is_deleted(fleet, fleet_bus, request_id, [*traces(oracle, asked), b"our divorce"])
    for path in (f"/v1/requests/{request_id}", f"/v1/requests/{request_id}/stream"):
        refused = await http.get(path)
        assert refused.status_code == 410
        assert "its prompt and its answer were in memory only" in refused.json()["error"]["message"]
    repeated = await http.post(PATH, json=asked, headers={"x-penstock-no-store": "1", "idempotency-key": "once"})
    assert (repeated.status_code, repeated.json()["error"]["code"]) == (410, "request_erased"), "it is not run again"
    listed = (await http.get("/v1/requests", params={"user": "somebody"})).json()["data"]
    assert [(each["id"], each["state"], each["output_tokens"]) for each in listed] == [(request_id, "done", COUNT)]


async def test_choices_that_stop_at_a_text_and_have_log_probabilities_leave_nothing(
    fleet: Deployment, fleet_bus: Bus, http: httpx.AsyncClient, oracle: Oracle
) -> None:
    asked = body(4, n=3, temperature=1, seed=7, logprobs=2, stop=["never said so"], no_store=True)
    answer = await http.post(PATH, json=asked)
    assert [choice["text"] for choice in answer.json()["choices"]] == [
        oracle.answer(asked, COUNT, at) for at in range(3)
    ]
    wanted = [*traces(oracle, asked, 3), b"never said so"]
    await is_deleted(fleet, fleet_bus, answer.headers["x-request-id"], wanted)


async def test_a_request_continues_after_its_workers_death_and_leaves_nothing_of_either_attempt(
    fleet: Deployment, fleet_bus: Bus, http: httpx.AsyncClient, oracle: Oracle
) -> None:
    count = 150
    asked = body(5, no_store=True, max_tokens=count)
    running = asyncio.ensure_future(stream(http, asked))
    worker = await until(lambda: worker_with_tokens(fleet_bus), "a worker that streams")
    os.kill(worker, signal.SIGKILL)
    request_id, text = await running
    assert text == oracle.answer(asked, count)
    await is_deleted(fleet, fleet_bus, request_id, traces(oracle, asked))
    event = await record_of(fleet_bus, request_id)
    assert (event.attempt, event.usage.completion, event.code) == (2, count, "")
    await until(lambda: two_workers(fleet_bus), "the worker's successor")


async def worker_with_tokens(bus: Bus) -> int:
    """The pid of a worker that streams a request with ``no_store``; 0: there is none yet."""
    async for entry in read(bus, bus.subjects.stream("MEMORY_TOKENS"), ">"):
        found = (await registrations(bus)).get(tokens.decode(entry.data).worker)
        if found is not None and found.load.running:
            return found.pid
    return 0


async def two_workers(bus: Bus) -> bool:
    return len(await registrations(bus)) == 2


async def test_cancelled_and_refused_requests_leave_nothing_either(
    fleet: Deployment, fleet_bus: Bus, http: httpx.AsyncClient, oracle: Oracle
) -> None:
    cancelled = body(6, no_store=True, max_tokens=2000, stream=True)
    async with http.stream("POST", PATH, json=cancelled) as answer:
        request_id = answer.headers["x-request-id"]
        await anext(answer.aiter_lines())
    await is_deleted(fleet, fleet_bus, request_id, traces(oracle, cancelled))
    late = body(7, no_store=True, max_tokens=2000, timeout_s=0.3)
    failed = await http.post(PATH, json=late)
    assert failed.status_code == 504
    await is_deleted(fleet, fleet_bus, failed.headers["x-request-id"], traces(oracle, late))
    nowhere = body(8, no_store=True, worker="none-of-this-name")
    refused = await http.post(PATH, json=nowhere)
    assert refused.status_code == 400
    await is_deleted(fleet, fleet_bus, refused.headers["x-request-id"], traces(oracle, nowhere))


@pytest.mark.parametrize(
    "victim", ["router", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gateway", "worker"))]
)
async def test_a_process_that_dies_between_the_end_and_the_deletion_saves_nothing(
    fleet: Deployment, fleet_bus: Bus, http: httpx.AsyncClient, oracle: Oracle, victim: str
) -> None:
    asked = body(10 + len(victim), no_store=True)
    request_id, _ = await stream(http, asked)
    for process in fleet.state.processes:
        if process.name.startswith(victim):
            os.kill(process.pid, signal.SIGKILL)
    await is_deleted(fleet, fleet_bus, request_id, traces(oracle, asked))
    await until(lambda: answers(fleet), "the deployment is ready again", 30.0)


async def answers(fleet: Deployment) -> bool:
    async with httpx.AsyncClient(base_url=fleet.urls[0], trust_env=False, timeout=30) as http:
        try:
            return (await http.post(PATH, json=body(99))).status_code == 200
        except httpx.TransportError:
            return False


async def test_an_ask_over_nats_is_answered_and_leaves_nothing(
    fleet: Deployment, fleet_bus: Bus, oracle: Oracle
) -> None:
    client = await nats.connect(fleet.state.client_nats_url)
    said = "a sentence that is said nowhere else"
    asked = {"model": "tiny", "prompt": said, "temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
    answer = await client.request("ps.ask.tiny", json.dumps(asked).encode(), timeout=15, headers={HEADER_NO_STORE: "1"})
    assert json.loads(answer.data)["choices"][0]["text"] == oracle.answer(asked, COUNT)
    assert answer.headers is not None
    await is_deleted(fleet, fleet_bus, answer.headers[HEADER_REQUEST], [said.encode(), *traces(oracle, asked)])
    await client.close()


@pytest.mark.parametrize("how", ["header", "no_store", "store"])
async def test_a_submission_that_must_not_be_stored_is_refused_and_overwritten(fleet: Deployment, how: str) -> None:
    client = await nats.connect(fleet.state.client_nats_url)
    said = f"a sentence that was submitted by mistake, {how}"
    asked: dict[str, Any] = {"model": "tiny", "prompt": said, "max_tokens": COUNT}
    inbox, headers = client.new_inbox(), {}
    if how == "header":
        headers[HEADER_NO_STORE] = "1"
    else:
        asked[how] = how == "no_store"
    answers = await client.subscribe(inbox)
    await client.jetstream().publish(
        "ps.submit.tiny", json.dumps(asked).encode(), headers={HEADER_REPLY_TO: inbox, **headers}
    )
    answer = await answers.next_msg(timeout=15)
    error = json.loads(answer.data)["error"]
    assert error["code"] == "unsupported"
    assert "ps.ask.MODEL" in error["message"]

    async def gone() -> bool:
        return await on_disk(fleet, [said.encode()]) == []

    await until(gone, "its overwriting")
    await client.close()


async def test_a_submission_with_another_value_of_the_header_is_refused_at_its_reply_subject(fleet: Deployment) -> None:
    client = await nats.connect(fleet.state.client_nats_url)
    inbox = client.new_inbox()
    answers = await client.subscribe(inbox)
    asked = json.dumps({"model": "tiny", "prompt": "never stored, never said"}).encode()
    headers = {HEADER_NO_STORE: "maybe", HEADER_REPLY_TO: inbox}
    await client.jetstream().publish("ps.submit.tiny", asked, headers=headers)
    answer = await answers.next_msg(timeout=15)
    assert "Penstock-No-Store is 'maybe'; use 1 or 0" in json.loads(answer.data)["error"]["message"]

    async def gone() -> bool:
        return await on_disk(fleet, [b"never stored, never said"]) == []

    await until(gone, "its erasure")
    await client.close()


async def test_a_prefill_worker_and_a_decode_worker_leave_nothing_where_all_requests_are_made_so(
    pairs: Deployment, oracle: Oracle
) -> None:
    bus = await connect(pairs.state.nats_url, role="operator", name="test")
    async with httpx.AsyncClient(base_url=pairs.urls[0], trust_env=False, timeout=30) as http:
        asked = body(20)
        request_id, text = await stream(http, asked)
    assert text == oracle.answer(asked, COUNT)
    assert [subject.split(".")[2] for subject in await messages_of(bus, request_id)] == ["prefill", "decode"]
    await is_deleted(pairs, bus, request_id, traces(oracle, asked))
    await bus.close()


async def test_an_unclear_wish_is_refused(http: httpx.AsyncClient) -> None:
    unclear = await http.post(PATH, json=body(30), headers={"x-penstock-no-store": "yes please"})
    assert unclear.json()["error"]["param"] == "X-Penstock-No-Store"


@pytest.mark.slow  # gateway/admission/test_storage
async def test_a_full_memory_is_a_503_at_both_doors_and_costs_no_open_request_anything(
    fleet: Deployment, fleet_bus: Bus, http: httpx.AsyncClient, oracle: Oracle
) -> None:
    name = fleet_bus.subjects.stream("MEMORY_TOKENS")
    config = (await fleet_bus.js.stream_info(name)).config
    assert config.max_bytes is not None
    asked = body(60, no_store=True, max_tokens=150)
    running = asyncio.ensure_future(stream(http, asked))
    await until(lambda: worker_with_tokens(fleet_bus), "a worker that streams")
    limited = config.evolve(max_bytes=64 << 10, metadata=None)
    await fleet_bus.js.update_stream(limited)
    client = await nats.connect(fleet.state.client_nats_url)
    try:
        large = body(61, no_store=True, max_tokens=2000)

        async def refused() -> bool:  # a gateway looks at the sizes every half second
            try:
                answer = await http.post(PATH, json=large, timeout=5.0)
            except httpx.TimeoutException:
                return False  # it was taken, by the sizes as they were before; now it is cancelled
            return answer.status_code == 503 and bool(answer.headers.get("retry-after"))

        await until(refused, "a refusal", 30.0)
        answer = await client.request("ps.ask.tiny", json.dumps(large).encode(), timeout=15)
        error = json.loads(answer.data)["error"]
        assert error["code"] == "broker_unavailable"
        assert "MEMORY_TOKENS" in error["message"]
        assert (await http.post(PATH, json=body(62))).status_code == 200, "what is stored is served as ever"
        request_id, text = await running
        assert text == oracle.answer(asked, 150)
    finally:
        await fleet_bus.js.update_stream(config.evolve(metadata=None))
        await client.close()
    await is_deleted(fleet, fleet_bus, request_id, traces(oracle, asked))
