"""The ledger of a cell counts each record once, whatever ends the routers that count, on a real nats-server."""

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get, get_last, read, server_ns
from penstock.infra.bus.log_tail import LogTail
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.router.service import usage_ledger
from penstock.router.service.usage_ledger import UsageLedger
from penstock.schemas import usage
from penstock.schemas.done import Done, Returned, Usage
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest, new_request_id
from penstock.schemas.subjects import HEADER_MSG_ID, HEADER_RECORDED_TIME, HEADER_SUMMARY, Subjects
from penstock.schemas.summary import header_of
from penstock.schemas.usage import UsagePart, UsageRow, UsageTable
from penstock.schemas.wire import encode
from tests.infra.bus.support import eventually
from tests.penstock.log_tools.requests.support import end
from tests.penstock.log_tools.traces import samples
from tests.router.service.test_deletion import delete
from tests.router.support import Routing, routing
from tests.workers.support import dial

KEY = "pst-0a1b2c3d4e5f"


@pytest.fixture
async def bus(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[Bus]:
    async with dial(broker, pipeline) as bus:
        yield bus


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_ledger, "COUNT_S", 0.02)


def asked(**fields: Any) -> GenerateRequest:
    return samples.request(**{"id": new_request_id(), "api_key": KEY, "lora": "poet"} | fields)


async def publish(bus: Bus, request: GenerateRequest, prompt: int, completion: int, *, words: int = 99) -> None:
    """A record. ``words``: of its summary, fewer as from an earlier release."""
    event = Done(request.id, request.model, 1, "w", usage=Usage(prompt, completion), submitted=encode(request))
    header = " ".join(header_of(event, request).split(" ")[:words])
    headers = {HEADER_MSG_ID: request.id, HEADER_SUMMARY: header}
    subject = bus.subjects.done(request.tenant, request.model, request.id)
    await bus.js.publish(subject, encode(event), headers=headers)


async def parts(bus: Bus) -> list[UsagePart]:
    found = read(bus, bus.subjects.stream("USAGE"), bus.subjects.all("usage"))
    return [usage.decode(entry.data) async for entry in found]


async def total(bus: Bus) -> UsageRow:
    found = (await table(bus)).sums()
    return found[0].total if found else UsageRow(0, "")


async def table(bus: Bus, *by: str) -> UsageTable:
    made = UsageTable(by)
    for part in await parts(bus):
        made.add(part)
    return made


async def counts(bus: Bus, requests: int) -> UsageRow:
    async with asyncio.timeout(20):
        while (found := await total(bus)).requests < requests:  # noqa: ASYNC110 - another task
            await asyncio.sleep(0.02)
    return found


async def test_records_are_counted_by_their_headers_once_each(bus: Bus, one: Routing) -> None:
    await publish(bus, asked(), 10, 3)
    await publish(bus, asked(tenant="acme"), 20, 5)
    await publish(bus, asked(origin="elsewhere"), 20, 5)
    await publish(bus, asked(api_key="", lora=""), 40, 7, words=16)
    await bus.js.publish(bus.subjects.returned("tiny"), encode(Returned("x", "tiny", 1, "w", "no")))
    imported = asked()
    await bus.js.publish(
        bus.subjects.done("acme", "tiny", imported.id),
        encode(Done(imported.id, "tiny", 1, "w", usage=Usage(9, 9), submitted=encode(imported))),
        headers={HEADER_MSG_ID: imported.id, HEADER_RECORDED_TIME: "2026-11-29T00:00:00Z"},
    )
    await publish(bus, asked(), 80, 1)
    found = await counts(bus, 4)
    assert (found.requests, found.prompt, found.completion) == (4, 150, 16)
    now = time.time_ns() // usage.HOUR_NS
    assert all(now - 1 <= row.hour <= now for part in await parts(bus) for row in part.rows)
    by = (await table(bus, "tenant", "key", "adapter")).sums()
    assert {each.of: each.total.requests for each in by} == {
        ("default", KEY, "poet"): 2,
        ("acme", KEY, "poet"): 1,
        ("default", "", ""): 1,
    }


async def test_what_ended_while_no_router_ran_is_read_from_the_log(bus: Bus, broker: EmbeddedNats) -> None:
    for _ in range(3):
        await publish(bus, asked(), 10, 3, words=16)
    async with routing(broker, bus.subjects):
        await counts(bus, 3)
    await publish(bus, asked(), 10, 3)
    async with routing(broker, bus.subjects):
        found = await counts(bus, 4)
    assert (found.prompt, found.completion) == (40, 12)


async def test_a_router_that_starts_keeps_no_bodies_of_what_had_ended(
    bus: Bus, broker: EmbeddedNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_ledger, "COUNT_S", 60.0)
    for _ in range(3):
        await publish(bus, asked(), 10, 3)
    async with routing(broker, bus.subjects) as started:
        assert [entry.data for entry in started.router.cluster.ended] == [b"", b"", b""]


async def test_what_is_deleted_stays_counted(bus: Bus, one: Routing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what was deleted in the moment in which it ended: it is counted first."""
    await publish(bus, asked(), 10, 3)
    await counts(bus, 1)
    monkeypatch.setattr(usage_ledger, "COUNT_S", 0.5)
    request = asked()
    await end(bus, request, 1, 2)
    assert await delete(bus, request) == ""
    assert await get_last(bus, bus.subjects.stream("DONE"), bus.subjects.done_of(request.id)) is None
    assert (await total(bus)).requests == 2


async def test_what_the_log_discarded_before_it_was_counted_is_a_gap(bus: Bus, broker: EmbeddedNats) -> None:
    async with routing(broker, bus.subjects):
        await publish(bus, asked(), 10, 3)
        await counts(bus, 1)
    for _ in range(5):
        await publish(bus, asked(), 10, 3)
    await bus.js.purge_stream(bus.subjects.stream("DONE"), seq=5)
    async with routing(broker, bus.subjects):
        found = await counts(bus, 3)
    assert found.requests == 3
    before, after = await parts(bus)
    assert before.closed
    assert after.gap is not None
    assert after.gap.messages == 3
    assert 0 < after.gap.since_ns == before.counted_ns < after.gap.until_ns


async def test_a_ledger_that_was_lost_begins_with_what_the_log_has(bus: Bus, broker: EmbeddedNats) -> None:
    async with routing(broker, bus.subjects):
        for _ in range(4):
            await publish(bus, asked(), 10, 3)
        await counts(bus, 4)
    await bus.js.purge_stream(bus.subjects.stream("DONE"), seq=3)
    await bus.js.purge_stream(bus.subjects.stream("USAGE"))
    async with routing(broker, bus.subjects):
        assert (await counts(bus, 2)).requests == 2
    (part,) = await parts(bus)
    assert part.gap is not None
    assert (part.gap.messages, part.gap.since_ns) == (2, 0)
    assert part.gap.until_ns > 0


async def test_two_routers_that_both_count_count_nothing_twice(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither knows of the other, both read the same log, and one after the other is killed between two messages: an
    answer of the broker is lost, or the write is."""
    monkeypatch.setattr(usage, "MAX_ROWS", 3)
    chance = random.Random(5)
    written = UsageLedger._write

    async def unsure(ledger: UsageLedger, part: UsagePart, revision: int) -> None:
        if chance.random() < 0.2:
            raise TimeoutError("killed before the write")
        await written(ledger, part, revision)
        if chance.random() < 0.2:
            raise TimeoutError("killed behind the write")

    monkeypatch.setattr(UsageLedger, "_write", unsure)
    expected = 0
    async with contextlib.AsyncExitStack() as stack:
        ledgers = []
        for _ in range(2):
            ended: deque[Entry] = deque(maxlen=8)
            tail = LogTail(bus, bus.subjects.stream("DONE"), bus.subjects.all("done"), ended.append)
            await stack.enter_async_context(tail.following())
            ledgers.append([ended, UsageLedger(bus, ended, lambda: True)])
        for step in range(120):
            if chance.random() < 0.6:
                prompt = chance.randrange(100)
                await publish(bus, asked(tenant=chance.choice("abcdef")), prompt, 1)
                expected += prompt
            one = chance.choice(ledgers)
            try:
                await one[1].count()  # type: ignore[attr-defined]
            except (ServingError, TimeoutError):
                one[1] = UsageLedger(bus, one[0], lambda: True)  # type: ignore[arg-type]
            assert (await total(bus)).prompt <= expected, step
        monkeypatch.setattr(UsageLedger, "_write", written)
        await UsageLedger(bus, deque(maxlen=8), lambda: True).count()
    assert (await total(bus)).prompt == expected


async def test_a_router_that_does_not_lead_counts_nothing(bus: Bus) -> None:
    ended: deque[Entry] = deque(maxlen=8)
    leads = False
    ledger = UsageLedger(bus, ended, lambda: leads)
    await publish(bus, asked(), 10, 3)
    await ledger.count()
    assert await parts(bus) == []
    leads = True
    await ledger.count()
    assert (await total(bus)).requests == 1


async def test_a_reconnect_within_a_count_makes_the_next_one_read_the_ledger_again(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It made the count fail, with an error of ours in the log."""
    ledger = UsageLedger(bus, deque(maxlen=8), lambda: True)
    counted, resumed = ledger._counted, ledger._resume
    resumes = 0

    async def reconnected(entry: Entry) -> Any:
        await ledger._read_again()
        return await counted(entry)

    async def resume() -> None:
        nonlocal resumes
        resumes += 1
        await resumed()

    monkeypatch.setattr(ledger, "_counted", reconnected)
    monkeypatch.setattr(ledger, "_resume", resume)
    for number in (1, 2):
        await publish(bus, asked(), 10, 3)
        await ledger.count()
        assert (await total(bus)).requests == resumes == number


async def test_a_ledger_that_has_counted_nothing_yet_is_gone_on_with(bus: Bus) -> None:
    for _ in range(2):
        await UsageLedger(bus, deque(maxlen=8), lambda: True).count()
    assert [part.last for part in await parts(bus)] == [0]
    await publish(bus, asked(), 10, 3)
    await UsageLedger(bus, deque(maxlen=8), lambda: True).count()
    assert (await total(bus)).requests == 1


async def test_of_two_routers_the_other_one_continues_when_one_is_killed(bus: Bus, broker: EmbeddedNats) -> None:
    async with routing(broker, bus.subjects, name="one") as first, routing(broker, bus.subjects, name="two") as second:
        sees: Callable[[], bool] = lambda: bool(first.router.intake.membership.others)  # noqa: E731
        await eventually(sees)
        for number in range(10):
            await publish(bus, asked(), 10, 3)
            if number == 5:
                await first.kill()
        assert (await counts(bus, 10)).requests == 10
        assert second.router.intake.membership.reads


async def test_a_log_that_was_recreated_is_counted_from_its_beginning(bus: Bus, broker: EmbeddedNats) -> None:
    async with routing(broker, bus.subjects):
        for _ in range(3):
            await publish(bus, asked(), 10, 3)
        await counts(bus, 3)
    stream = bus.subjects.stream("DONE")
    config = (await bus.js.stream_info(stream)).config
    await bus.js.delete_stream(stream)
    await bus.js.add_stream(config)
    for _ in range(4):
        await publish(bus, asked(), 10, 3)
    async with routing(broker, bus.subjects):
        assert (await counts(bus, 7)).requests == 7


async def test_a_log_that_is_recreated_while_a_router_counts_is_counted_from_its_beginning(bus: Bus) -> None:
    """The broker runs on, so no reconnect tells."""
    ended: deque[Entry] = deque(maxlen=8)
    ledger, stream = UsageLedger(bus, ended, lambda: True), bus.subjects.stream("DONE")
    for _ in range(3):
        await publish(bus, asked(), 10, 3)
    await ledger.count()
    config = (await bus.js.stream_info(stream)).config
    await bus.js.delete_stream(stream)
    await bus.js.add_stream(config)
    await publish(bus, asked(), 10, 3)
    ended.extend([entry async for entry in read(bus, stream, bus.subjects.all("done"))])
    await ledger.count()
    assert (await total(bus)).requests == 4
    await ledger.count()
    assert (await total(bus)).requests == 4


async def test_a_log_that_lost_its_end_is_counted_from_there(bus: Bus, broker: EmbeddedNats) -> None:
    """As after a loss of power: the broker stores other messages under sequences that were counted."""
    async with routing(broker, bus.subjects):
        for _ in range(3):
            await publish(bus, asked(), 10, 3)
        await counts(bus, 3)
    (part,) = await parts(bus)
    entry = await get(bus, bus.subjects.stream("DONE"), 2)
    assert entry is not None
    # The ledger counted a third message that the log has lost since, and has another one in its place.
    before = msgspec.structs.replace(part, counted_ns=server_ns(entry) + 1)
    await bus.js.publish(bus.subjects.usage(part.number), encode(before))
    await publish(bus, asked(), 10, 3)
    async with routing(broker, bus.subjects):
        assert (await counts(bus, 5)).requests == 5


async def test_deletions_of_what_was_counted_last_make_nothing_count_twice(bus: Bus, broker: EmbeddedNats) -> None:
    done = bus.subjects.stream("DONE")
    for number in range(3):
        async with routing(broker, bus.subjects):
            await publish(bus, asked(), 10, 3)
            await counts(bus, number + 1)
            end = (await bus.js.stream_info(done)).state.last_seq
        await bus.js.delete_msg(done, end)
    async with routing(broker, bus.subjects):
        await publish(bus, asked(), 10, 3)
        assert (await counts(bus, 4)).requests == 4
