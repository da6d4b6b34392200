"""``penstock tail`` on a real nats-server."""

import asyncio
import json

import pytest

from penstock.infra.bus.connection import Bus
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.log_tools.requests.tail import run
from penstock.schemas.kv import KvBatch, Stored
from penstock.schemas.requests import Media
from penstock.schemas.wire import encode
from tests.penstock.log_tools.requests.support import accept, assign, end, stream


@pytest.fixture
def tail(bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    async def lines(*flags: str, status: int = 0) -> list[str]:
        argv = [*flags, "--nats-url", broker.url(), "--namespace", bus.subjects.namespace]
        assert await asyncio.to_thread(run, argv) == status
        said = capsys.readouterr()
        return (said.err if status else said.out).splitlines()

    return lines


async def test_a_requests_whole_way_is_one_line_per_message_in_order(bus: Bus, tail) -> None:  # type: ignore[no-untyped-def]
    request, other = await accept(bus), await accept(bus)
    for each in (request, other):
        await assign(bus, each)
    await stream(bus, request, 5, 6, 7)
    await end(bus, request, 5, 6, 7)
    lines = await tail("--request", f"chatcmpl-{request.id}")
    assert [line.split()[2] for line in lines] == ["request", "job", "tokens", "done"]
    assert all(request.id in line for line in lines)
    assert "to w-1" in lines[1]
    assert "[0] +3 at 0" in lines[2]
    assert "100 → 3 tokens in 50 ms" in lines[3]


async def test_it_begins_at_a_sequence_or_with_the_last_lines(bus: Bus, tail) -> None:  # type: ignore[no-untyped-def]
    requests = [await accept(bus) for _ in range(5)]
    last = await tail("requests", "-n", "2")
    assert [line.split()[3] for line in last] == [request.id for request in requests[3:]]
    later = await tail("requests", "--from-seq", "2")
    assert [line.split()[3] for line in later] == [request.id for request in requests[1:]]
    assert await tail("requests", "--since", "1h", "--until", "30m") == []


async def test_a_worker_narrows_every_kind_of_message(bus: Bus, tail) -> None:  # type: ignore[no-untyped-def]
    one, two = await accept(bus), await accept(bus)
    await assign(bus, one, "w-1")
    await assign(bus, two, "w-2")
    await end(bus, two, worker="w-2")
    await bus.js.publish(bus.subjects.kv("tiny", "w-2"), encode(KvBatch("w-2", 1, 1, (Stored(bytes(48)),))))
    lines = await tail("--worker", "w-2")
    assert [line.split()[2] for line in lines] == ["job", "done", "kv"]


async def test_json_has_the_whole_message_with_tokens_as_numbers(bus: Bus, tail) -> None:  # type: ignore[no-untyped-def]
    request = await accept(bus, media=(Media(b"\0" * 3, "image/png", 5),))
    await assign(bus, request)
    (line,) = await tail("work", "--json")
    found = json.loads(line)
    assert found["kind"] == "job"
    assert found["message"]["request"]["id"] == request.id
    assert found["message"]["request"]["prompt"] == list(range(100))
    (medium,) = found["message"]["request"]["media"]
    assert (medium["digest"], medium["bytes"]) == ("AAAA", 5), "fields have the names that they have in messages"


async def test_a_message_that_cannot_be_read_is_shown_as_such(bus: Bus, tail) -> None:  # type: ignore[no-untyped-def]
    await bus.js.publish(bus.subjects.work("aggregated", "w-1"), b"\xc1 garbage")
    (line,) = await tail("work")
    assert "9 bytes that cannot be read" in line


async def test_what_is_no_request_id_is_an_error_also_where_nothing_is_stored(tail) -> None:  # type: ignore[no-untyped-def]
    (line,) = await tail("--request", "x", status=1)
    assert line.startswith("penstock tail: 'x' is not a request id")


async def test_a_misspelt_kind_gets_a_suggestion(tail) -> None:  # type: ignore[no-untyped-def]
    (line,) = await tail("wrok", status=1)
    assert "did you mean work?" in line
    (line,) = await tail("--from-seq", "3", status=1)
    assert "one stream" in line
