"""Looking things up in a stream, on a real nats-server."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.infra.bus import direct_get
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import (
    BATCH,
    before_time,
    find_lost,
    format_time,
    get_last,
    get_next,
    parse_time,
    read,
    read_backwards,
)
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import HEADER_MSG_ID, Subjects
from tests.infra.bus.support import eventually, opened
from tests.infra.nats_server.support import lose_end


async def fill(bus: Bus, subject: str, count: int, size: int = 0) -> None:
    for number in range(count - 1):
        await bus.nc.publish(subject, b"%d" % number + bytes(size))
    await bus.js.publish(subject, b"%d" % (count - 1) + bytes(size))


async def numbers(bus: Bus, subject: str, **where: int) -> list[int]:
    stream = bus.subjects.stream("TOKENS")
    return [int(entry.data.rstrip(b"\0")) async for entry in read(bus, stream, subject, **where)]


async def test_more_than_one_batch_is_read_to_its_end(bus: Bus) -> None:
    count = 2 * BATCH + 7
    await fill(bus, bus.subjects.tokens("gw"), count)
    assert await numbers(bus, bus.subjects.tokens("gw")) == list(range(count))


async def test_messages_that_a_broker_has_lost_are_told_from_those_that_took_their_place(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects
) -> None:
    server = make_broker()
    await server.start()
    stream, subject = subjects.stream("TOKENS"), subjects.tokens("gw")
    async with opened(server, subjects) as bus:
        for number in range(1, 9):
            await bus.js.publish(subject, b"", headers={HEADER_MSG_ID: f"r{number}:1"})
        stored = [(number, f"r{number}") for number in range(1, 9)]
        assert await find_lost(bus, stream, stored) == set()
        await bus.js.purge_stream(stream, seq=3)  # it is full, say
        await bus.js.delete_msg(stream, 4)
        assert await find_lost(bus, stream, stored) == {(4, "r4")}
        server.kill()
        await eventually(lambda: not bus.connected)
        lose_end(server.data_dir, stream, 3)
        await server.start()
        await eventually(lambda: bus.connected)
        lost = {(4, "r4"), (6, "r6"), (7, "r7"), (8, "r8")}
        assert await find_lost(bus, stream, stored) == lost
        for number in range(4):
            await bus.js.publish(subject, b"", headers={HEADER_MSG_ID: f"other{number}"})
        assert await find_lost(bus, stream, stored) == lost
        for known in ([*stored, (8, "other2")], [(8, "other2"), *stored]):  # both are known, in whatever order
            assert await find_lost(bus, stream, known) == {(8, "r8"), (4, "r4")}
        assert await find_lost(bus, stream, [(5, "r5")]) == await find_lost(bus, stream, []) == set()


async def test_a_batch_cut_by_its_size_continues(bus: Bus) -> None:
    await fill(bus, bus.subjects.tokens("gw"), 12, size=1 << 20)
    assert await numbers(bus, bus.subjects.tokens("gw")) == list(range(12))


async def test_an_exact_number_of_batches_ends(bus: Bus) -> None:
    await fill(bus, bus.subjects.tokens("gw"), BATCH)
    assert await numbers(bus, bus.subjects.tokens("gw")) == list(range(BATCH))


async def test_only_the_asked_subject_is_read_and_previous_names_its_last_message(bus: Bus) -> None:
    for number in range(3):
        await bus.js.publish(bus.subjects.tokens("a"), b"%d" % number)
        await bus.js.publish(bus.subjects.tokens("b"), b"%d" % (number + 10))
    assert await numbers(bus, bus.subjects.tokens("b")) == [10, 11, 12]
    assert await numbers(bus, bus.subjects.all("tokens")) == [0, 10, 1, 11, 2, 12]
    entries = [e async for e in read(bus, bus.subjects.stream("TOKENS"), bus.subjects.tokens("b"))]
    assert [(e.subject, e.seq, e.previous) for e in entries] == [
        (bus.subjects.tokens("b"), seq, max(seq - 2, 0)) for seq in (2, 4, 6)
    ]


async def test_after_and_until_bound_the_range(bus: Bus) -> None:
    await fill(bus, bus.subjects.tokens("gw"), 10)
    assert await numbers(bus, bus.subjects.tokens("gw"), after=3) == [3, 4, 5, 6, 7, 8, 9]
    assert await numbers(bus, bus.subjects.tokens("gw"), after=3, until_seq=6) == [3, 4, 5]
    assert await numbers(bus, bus.subjects.tokens("gw"), after=10) == []
    assert await numbers(bus, bus.subjects.tokens("gw"), until_seq=0) == []


async def test_since_starts_at_the_time_the_server_stored(bus: Bus) -> None:
    subject = bus.subjects.tokens("gw")
    await fill(bus, subject, 5)
    entries = [entry async for entry in read(bus, bus.subjects.stream("TOKENS"), subject)]
    times = [entry.time_ns for entry in entries]
    assert times == sorted(times)
    assert abs(times[-1] - time.time_ns()) < 60e9
    assert await numbers(bus, subject, since_ns=times[2]) == [2, 3, 4]
    assert await numbers(bus, subject, since_ns=times[4] + 1) == []
    assert await numbers(bus, subject, since_ns=times[4], after=1) == [1, 2, 3, 4]


@pytest.mark.parametrize("end", [200, 201], ids=["the others", "the stream"])
async def test_since_finds_what_is_in_blocks_whose_last_message_was_erased_before_the_server_was_killed(
    make_broker: Callable[..., EmbeddedNats], end: int
) -> None:
    server = make_broker()
    await server.start()
    began = time.time_ns()
    async with opened(server, Subjects("ps")) as bus:
        config = {"name": "small", "subjects": ["small"], "storage": "file", "allow_direct": True}
        await bus.nc.request("$JS.API.STREAM.CREATE.small", json.dumps(config).encode())
        for _ in range(200):
            await bus.js.publish("small", bytes(100_000))  # so a block has about 83 messages
        erased = [seq for seq in range(50, end) if seq % 7]  # wherever a block ends, and the last of all
        for seq in erased:
            await bus.nc.request("$JS.API.STREAM.MSG.DELETE.small", json.dumps({"seq": seq}).encode())
    server.kill()
    await server.wait()
    await server.start()
    async with opened(server, Subjects("ps")) as bus:
        every = [entry async for entry in read(bus, "small", "small")]
        assert len(every) == 200 - len(erased)
        assert [entry.seq async for entry in read(bus, "small", "small", since_ns=began)] == [e.seq for e in every]
        for place in (0, 1, 40, 51, 60, len(every) - 1):
            found = [each.seq async for each in read(bus, "small", "small", since_ns=every[place].time_ns)]
            assert found == [each.seq for each in every[place:]]
        assert await before_time(bus, "small", time.time_ns()) == every[-1].seq


async def test_a_time_after_the_last_message_is_found_at_the_end_without_a_look_at_older_blocks(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker keeps 8 MiB for each block in which something is looked up."""
    await fill(bus, bus.subjects.tokens("gw"), 500)
    looked_at, ask = [], direct_get._batch

    async def noted(bus: Bus, stream: str, query: dict[str, Any]) -> Any:
        looked_at.append(query.get("seq"))
        return await ask(bus, stream, query)

    monkeypatch.setattr(direct_get, "_batch", noted)
    assert await before_time(bus, bus.subjects.stream("TOKENS"), time.time_ns()) == 500
    assert looked_at == [None, 500]  # by time, and the last message


async def test_since_leaves_out_what_is_older_where_a_replica_did_not_know_the_place(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = bus.subjects.tokens("gw")
    await fill(bus, subject, 5)
    times = [entry.time_ns async for entry in read(bus, bus.subjects.stream("TOKENS"), subject)]

    async def unknown(*_: object) -> int:
        return 0

    monkeypatch.setattr(direct_get, "before_time", unknown)
    assert await numbers(bus, subject, since_ns=times[2]) == [2, 3, 4]


async def test_nothing_stored_is_nothing_read(bus: Bus) -> None:
    assert await numbers(bus, bus.subjects.tokens("gw")) == []


async def test_an_unknown_stream_is_an_error_at_once(bus: Bus) -> None:
    began = time.monotonic()
    with pytest.raises(ServingError, match="streams apply") as caught:
        [entry async for entry in read(bus, "no_such_stream", ">")]
    assert caught.value.code is Code.broker_unavailable
    assert time.monotonic() - began < 2


async def test_reading_leaves_no_subscription_behind(bus: Bus) -> None:
    before = len(bus.nc._subs)
    await fill(bus, bus.subjects.tokens("gw"), 2 * BATCH)
    await numbers(bus, bus.subjects.tokens("gw"), until_seq=3)
    assert len(bus.nc._subs) == before


@pytest.mark.parametrize("time_ns", [0, 1, 999_999_999, 1_700_000_000_123_456_789, 4_102_444_800_000_000_000])
def test_times_come_back_to_the_nanosecond(time_ns: int) -> None:
    assert parse_time(format_time(time_ns)) == time_ns


def test_times_with_fewer_decimals_are_read() -> None:
    assert parse_time("1970-01-01T00:00:02.5Z") == 2_500_000_000
    assert parse_time("1970-01-01T00:00:02Z") == 2_000_000_000
    assert parse_time("") == 0


async def test_reading_backwards_meets_every_message_once_newest_first(bus: Bus) -> None:
    stream, subject = bus.subjects.stream("TOKENS"), bus.subjects.tokens("gw")
    for number in range(25):
        await bus.js.publish(subject if number % 3 else bus.subjects.tokens("other"), b"%d" % number)
    expected = [number for number in reversed(range(25)) if number % 3]
    for window in (1, 4, 100):
        found = [int(entry.data) async for entry in read_backwards(bus, stream, subject, window=window)]
        assert found == expected
    earlier = [int(entry.data) async for entry in read_backwards(bus, stream, subject, before=11)]
    assert earlier == [number for number in expected if number < 10]


async def test_reading_backwards_ends_where_the_stream_was_purged(bus: Bus) -> None:
    stream, subject = bus.subjects.stream("TOKENS"), bus.subjects.tokens("gw")
    await fill(bus, subject, 10)
    await bus.js.purge_stream(stream, seq=6)
    assert [int(entry.data) async for entry in read_backwards(bus, stream, subject, window=2)] == [9, 8, 7, 6, 5]
    await bus.js.purge_stream(stream)
    assert [entry async for entry in read_backwards(bus, stream, subject)] == []


async def test_the_last_message_is_found_behind_deleted_ones(bus: Bus) -> None:
    """As after requests that are forgotten, or entries that expired."""
    stream = bus.subjects.stream("TOKENS")
    await fill(bus, bus.subjects.tokens("a"), 4)
    for seq in (4, 3, 1):
        await bus.js.delete_msg(stream, seq)
    for subject in (bus.subjects.all("tokens"), f"{bus.subjects.namespace}.>"):
        last = await get_last(bus, stream, subject)
        assert last is not None
        assert last.seq == 2, subject
        assert [e.seq async for e in read_backwards(bus, stream, subject)] == [2], subject
        first = await get_next(bus, stream, subject, 0)
        assert first is not None
        assert first.seq == 2, subject
        assert await get_next(bus, stream, subject, 2) is None
