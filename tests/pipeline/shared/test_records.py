"""One terminal event a request, which is its record: answers are completed from it, and found in it again."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import msgspec
import pytest

from penstock.gateway.access.authentication import Sight
from penstock.gateway.admission.idempotency import claim
from penstock.gateway.http.idempotency_key import canonical_body
from penstock.gateway.request_log.lookup import Records, RequestFinder, RequestLookup
from penstock.infra.bus.connection import Bus, connect
from penstock.infra.bus.direct_get import read
from penstock.infra.bus.memory_storage import MemoryStreams
from penstock.operate.schema import MESSAGES
from penstock.schemas import done, requests, wire
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest, new_request_id
from penstock.schemas.subjects import HEADER_CONTENT_TYPE, HEADER_MSG_ID, request_of
from penstock.schemas.tokens import Finish, TokenBatch, TokenItem
from tests.pipeline.conftest import NewDeployment
from tests.pipeline.support import Deployment, Oracle, joined, ok, parse_sse, until, words

CHAT: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 6}
PATH = "/v1/chat/completions"


async def accepted(bus: Bus, user: str) -> GenerateRequest:
    """The request of this user, once it is in the log."""

    async def found() -> GenerateRequest | None:
        async for entry in read(bus, bus.subjects.stream("REQUESTS"), bus.subjects.all("request")):
            request = requests.decode(entry.data)
            if request.user == user:
                return request
        return None

    request: GenerateRequest = await until(found, f"the request of {user}")
    return request


class Worker:
    """Speaks for a worker that is not there."""

    def __init__(self, bus: Bus, request: GenerateRequest, tokens: list[int]) -> None:
        self._bus = bus
        self._request = request
        self._tokens = tokens

    async def stream(self, count: int, *, finish: bool = False) -> None:
        """The first tokens of each choice."""
        request = self._request
        end = Finish("length") if finish else None
        items = [
            TokenItem(request.id, 1, choice, 0, wire.pack_tokens(self._tokens[:count]), end)
            for choice in range(request.n)
        ]
        batch = TokenBatch("w", 0, 0, tuple(items))
        await self._bus.js.publish(self._bus.subjects.tokens(request.gateway), wire.encode(batch))

    async def end(self, **changes: Any) -> None:
        request = self._request
        outcome = done.Outcome(wire.pack_tokens(self._tokens), "length")
        usage = done.Usage(len(request.prompt) // 4, len(self._tokens) * request.n)
        event = done.Done(
            request.id, request.model, 1, "w", (outcome,) * request.n, usage, submitted=wire.encode(request)
        )
        await self._bus.js.publish(
            self._bus.subjects.done(request.tenant, request.model, request.id),
            wire.encode(msgspec.structs.replace(event, **changes)),
            headers={HEADER_MSG_ID: request.id},
        )


def body(user: str, **more: Any) -> dict[str, Any]:
    return {**CHAT, "messages": [{"role": "user", "content": words(20)}], "user": user, **more}


@pytest.mark.parametrize("streamed", [pytest.param(0, marks=pytest.mark.slow), 3])
async def test_an_answer_whose_last_tokens_were_lost_is_completed_from_its_terminal_event(
    empty_http: httpx.AsyncClient, empty_bus: Bus, oracle: Oracle, streamed: int
) -> None:
    asked = body(f"streamed-{streamed}", n=2)
    stream = asyncio.create_task(empty_http.post(PATH, json={**asked, "stream": True}))
    request = await accepted(empty_bus, asked["user"])
    tokens = oracle.tokens(asked, 6)
    worker = Worker(empty_bus, request, tokens)
    if streamed:
        await worker.stream(streamed)
    await worker.end()
    events = parse_sse((await asyncio.wait_for(stream, 10)).content)
    assert events[-1].data == "[DONE]"
    assert [joined(events, choice) for choice in range(2)] == [oracle.text(tokens)] * 2
    again = (await empty_http.get(f"/v1/requests/{request.id}/stream")).content
    assert joined(parse_sse(again)) == oracle.text(tokens)
    status = (await empty_http.get(f"/v1/requests/{request.id}")).json()
    assert (status["state"], status["output_tokens"]) == ("done", 12)
    assert [choice["message"]["content"] for choice in status["result"]["choices"]] == [oracle.text(tokens)] * 2


async def test_a_whole_answer_that_failed_in_its_terminal_event_only_fails(
    empty_http: httpx.AsyncClient, empty_bus: Bus, oracle: Oracle
) -> None:
    asked = body("failed")
    answer = asyncio.create_task(empty_http.post(PATH, json=asked))
    request = await accepted(empty_bus, asked["user"])
    await Worker(empty_bus, request, []).end(code="worker_lost", message="gone", choices=())
    got = await asyncio.wait_for(answer, 10)
    assert (got.status_code, got.json()["error"]["code"]) == (502, "worker_lost")


async def test_a_request_that_its_router_ends_leaves_the_same_record(
    empty_http: httpx.AsyncClient, empty_bus: Bus, empty: Deployment
) -> None:
    asked = body("overdue", timeout_s=0.3)
    got = await empty_http.post(PATH, json=asked)
    assert got.status_code == 504
    request = await accepted(empty_bus, "overdue")
    subject = empty_bus.subjects.done_of(request.id)
    stream = empty_bus.subjects.stream("DONE")

    async def ends() -> list[done.Done]:
        return [done.decode(entry.data) async for entry in read(empty_bus, stream, subject)]  # type: ignore[misc]

    (event,) = await until(ends, "the terminal event")
    assert (event.code, event.submitted) == ("deadline_exceeded", done.recorded(request))


async def test_messages_name_their_encoding_and_schema_where_bytes_are_few(http: httpx.AsyncClient, bus: Bus) -> None:
    answer = await http.post(PATH, json=body("named-schema"))
    asked = await accepted(bus, "named-schema")
    assert answer.status_code == 200, answer.text
    found: dict[str, set[str]] = {}
    for stream in ("REQUESTS", "WORK", "DONE"):
        async for entry in read(bus, bus.subjects.stream(stream), ">"):
            if request_of(entry.headers) == asked.id:
                encoding, _, schema = entry.headers[HEADER_CONTENT_TYPE].partition("; schema=")
                assert encoding == wire.MSGPACK
                msgspec.msgpack.decode(entry.data, type=MESSAGES[schema])
                found.setdefault(stream, set()).add(schema)
    assert found == {"REQUESTS": {"PackedRequest"}, "WORK": {"Job"}, "DONE": {"Done"}}
    tokens = [entry async for entry in read(bus, bus.subjects.stream("TOKENS"), bus.subjects.tokens(asked.gateway))]
    assert tokens
    assert not any(HEADER_CONTENT_TYPE in entry.headers for entry in tokens)


# -- repeats ------------------------------------------------------------------------------------------------------


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=30)


def keyed(key: str) -> dict[str, str]:
    return {"Idempotency-Key": key}


async def runs(bus: Bus, user: str) -> int:
    """How often a user's requests came into the log."""
    found = 0
    async for entry in read(bus, bus.subjects.stream("REQUESTS"), bus.subjects.all("request")):
        found += requests.decode(entry.data).user == user
    return found


async def test_a_repeat_with_the_same_key_gets_the_first_answer_streamed_or_whole_at_any_gateway(
    fast: Deployment, bus: Bus
) -> None:
    asked = body("repeated", temperature=1)  # each run would draw another seed
    async with client_of(fast.urls[0]) as one, client_of(fast.urls[1]) as other:
        first = await ok(one.post(PATH, json=asked, headers=keyed("k-1") | {"X-Request-Id": "mine-7"}))
        request_id = first.headers["x-request-id"]
        for client in (one, other):
            reordered = msgspec.json.encode(dict(reversed(asked.items())))
            again = await client.post(PATH, content=reordered, headers=keyed("k-1"))
            assert (again.json(), again.headers["x-request-id"]) == (first.json(), request_id)
            streamed = await client.post(PATH, json={**asked, "stream": True}, headers=keyed("k-1"))
            assert streamed.headers["x-request-id"] == request_id
            assert joined(parse_sse(streamed.content)) == first.json()["choices"][0]["message"]["content"]
        refused = await other.post(PATH, json={**asked, "max_tokens": 5}, headers=keyed("k-1"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_conflict")
        assert (await one.post(PATH, json=asked, headers=keyed("k-2"))).headers["x-request-id"] != request_id
        status = (await other.get(f"/v1/requests/{request_id}")).json()
        assert status["client_request_id"] == "mine-7"
        assert (await one.post(PATH, json=asked, headers=keyed(""))).status_code == 400
    assert await runs(bus, "repeated") == 2


async def test_what_a_first_cannot_ask_a_repeat_cannot_ask_either(http: httpx.AsyncClient) -> None:
    asked = body("form", max_tokens=2)
    assert (await http.post(PATH, json=asked, headers=keyed("form"))).status_code == 200
    for wrong in ({"stream": "yes"}, {"stream": {}}, {"stream": True, "stream_options": {"include_usage": "x"}}):
        refused = await http.post(PATH, json={**asked, **wrong}, headers=keyed("form"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request"), wrong
    scored = {**asked, "prompt_logprobs": 1}
    assert (await http.post(PATH, json=scored, headers=keyed("scored"))).status_code == 200
    refused = await http.post(PATH, json={**scored, "stream": True}, headers=keyed("scored"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")


@pytest.mark.parametrize("content", [b'{"a":' * 50_000, b"[" * 50_000, b'{"model": "\xff"}', b""])
async def test_a_body_that_cannot_be_read_is_refused_with_a_key_too(http: httpx.AsyncClient, content: bytes) -> None:
    refused = await http.post(PATH, content=content, headers=keyed("broken"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_request")


async def test_two_firsts_at_two_gateways_run_once(fast: Deployment, bus: Bus) -> None:
    asked = body("twins", temperature=1, max_tokens=20)
    async with client_of(fast.urls[0]) as one, client_of(fast.urls[1]) as other:
        both = [client.post(PATH, json=asked, headers=keyed("twins")) for client in (one, other) for _ in range(4)]
        answers = await asyncio.gather(*both)
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert await runs(bus, "twins") == 1


async def test_a_client_that_left_finds_its_run_going_on(slow: Deployment, slow_http: httpx.AsyncClient) -> None:
    asked = {**body("left"), "max_tokens": 60, "stream": True}
    async with slow_http.stream("POST", PATH, json=asked, headers=keyed("left")) as answer:
        request_id = answer.headers["x-request-id"]
        await anext(answer.aiter_raw())
    async with client_of(slow.urls[1]) as other:
        again = await other.post(PATH, json={**asked, "stream": False}, headers=keyed("left"))
    assert again.headers["x-request-id"] == request_id
    assert again.json()["usage"]["completion_tokens"] == 60


async def test_a_key_whose_gateway_died_before_the_request_was_stored_is_served_under_its_id(
    fast: Deployment, bus: Bus
) -> None:
    asked = body("orphaned")
    meaning = canonical_body("chat", msgspec.json.encode(asked))
    made = new_request_id(time.time_ns() - 3_000_000_000)
    old = new_request_id(time.time_ns() - 3_600_000_000_000)
    for key, request_id in (("orphan", made), ("old-orphan", old)):
        claimed = await claim(bus, "default", f"key:{key}", meaning, request_id)
        assert claimed.fresh
    async with client_of(fast.urls[0]) as client:
        answer = await client.post(PATH, json=asked, headers=keyed("orphan"))
        assert (answer.status_code, answer.headers["x-request-id"]) == (200, made)
        answer = await client.post(PATH, json=asked, headers=keyed("old-orphan"))
        later = answer.headers["x-request-id"]
        assert (answer.status_code, later == old) == (200, False)
        answer = await client.post(PATH, json=asked, headers=keyed("old-orphan"))
        assert answer.headers["x-request-id"] == later


# -- finding ------------------------------------------------------------------------------------------------------


async def test_another_tenants_request_is_not_found(fast: Deployment, bus: Bus) -> None:
    asked = body("owned")
    async with client_of(fast.urls[0]) as client:
        request_id = (await client.post(PATH, json=asked)).headers["x-request-id"]
    records = Records(bus)
    lookup = RequestLookup(bus, records, RequestFinder(bus), 30.0, MemoryStreams(bus))
    found = await lookup.find(request_id, Sight("default"))
    assert found.request.user == "owned"
    with pytest.raises(ServingError) as caught:
        await lookup.find(request_id, Sight("another"))
    assert caught.value.code is Code.request_not_found
    assert (await lookup.find(request_id)).request.id == found.request.id == request_id


async def test_an_id_is_looked_up_without_reading_the_log(new_deployment: NewDeployment) -> None:
    """Behind 16 MiB of later output and 5,000 later requests: far faster than reading these."""
    deployment = new_deployment("--mock-speedup", "0")
    async with client_of(deployment.urls[0]) as client, AsyncExitStack() as stack:
        bus = await connect(deployment.state.nats_url, role="operator", name="test")
        stack.push_async_callback(bus.close)
        known = (await client.post(PATH, json=body("early"))).headers["x-request-id"]
        subjects = bus.subjects
        for _ in range(16):
            await bus.js.publish(subjects.tokens("elsewhere"), bytes(1 << 20))
        for number in range(5_000):
            later = new_request_id()
            await bus.nc.publish(subjects.request("m", "of-nobody", later), bytes(1_000))
            if not number % 500:
                await bus.nc.flush()
        await bus.nc.flush()

        async def best_s(request_id: Callable[[], str], status: int) -> float:
            times = []
            for _ in range(20):
                began = time.perf_counter()
                answer = await client.get(f"/v1/requests/{request_id()}")
                times.append(time.perf_counter() - began)
                assert answer.status_code == status
            return min(times)

        began = time.perf_counter()
        stored = [entry.seq async for entry in read(bus, subjects.stream("REQUESTS"), subjects.all("request"))]
        whole_s = time.perf_counter() - began
        assert len(stored) > 5_000
        took_s = await best_s(lambda: known, 200), await best_s(new_request_id, 404)
        assert max(took_s) < whole_s / 5, (took_s, whole_s)
        found = (await client.get(f"/v1/requests/{known}")).json()
    assert (found["state"], found["output_tokens"]) == ("done", 6)


async def test_a_running_request_is_found_in_its_shard_and_shown_by_the_gateway_that_follows_it(
    slow: Deployment, slow_http: httpx.AsyncClient, slow_bus: Bus
) -> None:
    asked = {**body("running"), "max_tokens": 400, "stream": True}
    async with slow_http.stream("POST", PATH, json=asked) as answer, client_of(slow.urls[1]) as other:
        request_id = answer.headers["x-request-id"]
        parts = answer.aiter_raw()
        await anext(parts)
        shard = slow_bus.subjects.shard_of(request_id)
        stream = slow_bus.subjects.stream("REQUESTS")
        assert request_id in [e.headers[HEADER_MSG_ID] async for e in read(slow_bus, stream, shard)]

        async def in_progress() -> bool:
            status = (await other.get(f"/v1/requests/{request_id}")).json()
            return bool(status["state"] == "running" and status.get("output_tokens", 0) >= 2 and status["attempt"] == 1)

        await until(in_progress, "progress")
        await other.delete(f"/v1/requests/{request_id}")
