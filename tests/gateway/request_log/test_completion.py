"""Answers whose request has ended, and whose end has not come: also where the record has no output."""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
from structlog.testing import capture_logs

from penstock.gateway.request_log import completion
from penstock.gateway.request_log.completion import Completion
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.gateway.request_log.lookup import Records
from penstock.gateway.request_log.subscriptions import TokenSubscription
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.publisher import Publisher
from penstock.infra.bus.tasks import Tasks
from penstock.schemas import done, wire
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.subjects import MEMORY
from penstock.schemas.tokens import WHOLE_REQUEST, Finish, TokenBatch, TokenItem
from penstock.schemas.wire import pack_tokens
from tests.gateway.request_log.test_inflight import request_of, tokens_of

GATEWAY = "mine"
TOKENS = pack_tokens(range(5))


class Ended:
    """A request with ``no_store`` that a worker has ended, with a reader that has got nothing."""

    def __init__(self, bus: Bus, tasks: Tasks, publisher: Publisher) -> None:
        now = time.time_ns()
        self.request = msgspec.structs.replace(
            request_of(), gateway=GATEWAY, no_store=True, created_ns=now, deadline_ns=now + 10**11
        )
        self.inflight = InflightRequest(self.request, bounded=False)
        self._bus = bus
        self._publisher = publisher
        self._subscription = TokenSubscription(bus, f"{MEMORY}.{GATEWAY}", tasks)
        self.reads = 0

    async def start(self) -> None:
        await self._subscription.start(new=True)

    async def close(self) -> None:
        await self._subscription.close()

    async def read_again(self, request: GenerateRequest, last_attempt: int) -> InflightRequest:
        self.reads += 1
        again = InflightRequest(request, bounded=False, last_attempt=last_attempt)
        self._subscription.subscribe_from_start(again)
        await again.caught_up()
        self._subscription.unsubscribe(again)
        return again

    async def record(self, code: str = "") -> None:
        event = done.Done(
            self.request.id, self.request.model, 1, choices=(done.Outcome(TOKENS, "length"),),
            usage=done.Usage(1, 5), code=code, submitted=wire.encode(self.request),
        )  # fmt: skip
        subject = self._bus.subjects.done(self.request.tenant, self.request.model, self.request.id)
        await self._publisher.publish(subject, wire.encode(done.without_content(event)), self.request.id)

    async def stream(self) -> None:
        await self.store(TokenItem(self.request.id, 1, 0, 0, TOKENS, Finish("length")))

    async def store(self, *items: TokenItem) -> None:
        for number, item in enumerate(items, 1):
            batch = wire.encode(TokenBatch("w", 1, number, (item,)))
            await self._publisher.publish(self._bus.subjects.tokens(self.request.token_address), batch, f"w:{number}")


@pytest.fixture
async def ended(bus: Bus) -> AsyncIterator[Ended]:
    tasks = Tasks("test")
    async with Publisher(bus) as publisher:
        made = Ended(bus, tasks, publisher)
        await made.start()
        yield made
        await made.close()
        await tasks.aclose()


async def look(ended: Ended, bus: Bus, tasks: Tasks) -> None:
    idle = Completion(Records(bus), ended.read_again, tasks)
    for now in (10.0, 12.0, 14.0):
        await idle.complete_idle([ended.inflight], now)


async def test_tokens_that_came_late_are_read_from_memory_storage(bus: Bus, ended: Ended) -> None:
    tasks = Tasks("test")
    await ended.record()
    await look(ended, bus, tasks)
    await asyncio.sleep(0)
    await ended.stream()
    items = await asyncio.wait_for(ended.inflight.take(), 10)
    assert b"".join(item.tokens for item in items) == TOKENS
    assert ended.inflight.ended
    await tasks.aclose()


async def test_what_its_worker_streamed_behind_a_fence_counts_if_that_attempt_has_ended_the_request(
    bus: Bus, ended: Ended
) -> None:
    tasks = Tasks("test")
    request_id = ended.request.id
    begun, fence = TokenItem(request_id, 1, 0, 0, TOKENS[:8]), TokenItem(request_id, 2, WHOLE_REQUEST, 0)
    other = TokenItem(request_id, 2, 0, 2, pack_tokens([77]))
    late = TokenItem(request_id, 1, 0, 2, TOKENS[8:], Finish("length"))
    await ended.store(begun, fence, other, late)
    for seq, item in enumerate((begun, fence), 1):
        ended.inflight.feed(item, seq)
    assert tokens_of(ended.inflight.available()) == TOKENS[:8]
    await ended.record()
    await look(ended, bus, tasks)
    items = await asyncio.wait_for(ended.inflight.take(), 10)
    assert tokens_of(items) == TOKENS[8:]
    assert items[-1].finish == Finish("length")
    await tasks.aclose()


async def test_without_its_tokens_a_request_that_succeeded_ends_with_content_lost(
    bus: Bus, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "LATE_S", 0.1)
    tasks = Tasks("test")
    await ended.record()
    await look(ended, bus, tasks)
    items = await asyncio.wait_for(ended.inflight.take(), 10)
    assert [item.finish.code for item in items if item.finish is not None] == ["content_lost"]
    await tasks.aclose()


async def test_a_lost_answer_is_reported_once_and_later_clients_do_not_wait_for_it(
    bus: Bus, ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, records = Tasks("test"), Records(bus)
    idle = Completion(records, ended.read_again, tasks)
    await ended.record()
    (record,) = await records.ends([ended.request])
    with capture_logs() as lines:
        for late_s in (0.1, 3600.0, 3600.0):
            monkeypatch.setattr(completion, "LATE_S", late_s)
            reader = InflightRequest(ended.request, bounded=False)
            idle.complete(reader, record)
            items = await asyncio.wait_for(reader.take(), 10)
            assert [item.finish.code for item in items if item.finish is not None] == ["content_lost"]
    assert [line["request"] for line in lines if line["event"] == "answer_lost"] == [ended.request.id]
    await tasks.aclose()


async def test_one_that_failed_ends_with_its_own_code(bus: Bus, ended: Ended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "LATE_S", 0.1)
    tasks = Tasks("test")
    await ended.record("deadline_exceeded")
    await look(ended, bus, tasks)
    items = await asyncio.wait_for(ended.inflight.take(), 10)
    assert [item.finish.code for item in items if item.finish is not None] == ["deadline_exceeded"]
    await tasks.aclose()
