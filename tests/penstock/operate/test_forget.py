"""``penstock forget`` on a real nats-server, down to the bytes on its disk."""

import asyncio
import secrets
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.bus import forget as erasing
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.operate.forget import run
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import HEADER_MSG_ID
from tests.penstock.log_tools.requests.support import accept, assign, end


async def forget(bus: Bus, broker: EmbeddedNats, *argv: str) -> int:
    return await asyncio.to_thread(run, [*argv, "--nats-url", broker.url(), "--namespace", bus.subjects.namespace])


async def stored(bus: Bus) -> list[str]:
    """The ids of requests in the log, one for each of their messages."""
    return [
        entry.headers[HEADER_MSG_ID].partition(":")[0]
        for name in ("REQUESTS", "WORK", "DONE")
        async for entry in read(bus, bus.subjects.stream(name), ">")
    ]


def on_disk(folder: Path, text: str) -> bool:
    return any(text.encode() in path.read_bytes() for path in folder.rglob("*.blk"))


async def test_a_forgotten_request_leaves_no_message_and_no_byte_behind(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = f"secret-{secrets.token_hex(8)}"
    mine, other = await accept(bus, user=secret), await accept(bus)
    for request in (mine, other):
        await assign(bus, request)
        await end(bus, request, 1, 2)
    assert on_disk(broker.data_dir, secret)
    assert await forget(bus, broker, mine.id, "--yes") == 0
    assert await stored(bus) == [other.id] * 3
    assert not on_disk(broker.data_dir, secret)
    shown = " ".join(capsys.readouterr().out.split())
    assert "deleted 3 messages of 1 request; the last of their tokens leave the log by 20" in shown


async def test_the_content_and_tokens_of_a_request_that_is_not_stored_are_forgotten_immediately(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    request = await accept(bus, no_store=True)
    await assign(bus, request)
    await bus.js.publish(bus.subjects.contents(request.gateway, request.id, "request"), b"content")
    await end(bus, request, 1)
    assert await forget(bus, broker, request.id, "--yes") == 0
    assert "of 1 request; their tokens, too" in capsys.readouterr().out
    assert await stored(bus) == []
    assert [entry async for entry in read(bus, bus.subjects.stream("MEMORY_CONTENTS"), ">")] == []


async def test_what_an_interrupted_command_left_is_deleted_by_the_next_one(
    bus: Bus, broker: EmbeddedNats, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = await accept(bus)
    await assign(bus, request)
    await end(bus, request, 1)
    delete, deleted = erasing.erase, 0

    async def refused_at_the_second(*args: Any) -> bool:
        nonlocal deleted
        deleted += 1
        if deleted == 2:
            raise ServingError(Code.broker_unavailable, "the broker does not answer")
        return await delete(*args)

    monkeypatch.setattr(erasing, "erase", refused_at_the_second)
    assert await forget(bus, broker, request.id, "--yes") == 1
    assert "repeat the command" in capsys.readouterr().err
    assert await stored(bus) == [request.id] * 2, "the job is gone first, the record is there"
    assert await forget(bus, broker, request.id, "--yes") == 0
    assert await stored(bus) == []


async def test_only_the_tenants_requests_are_forgotten_together(bus: Bus, broker: EmbeddedNats) -> None:
    requests = [await accept(bus, tenant=tenant) for tenant in ("acme", "other", "acme")]
    running = await accept(bus, tenant="acme")
    for request in requests:
        await assign(bus, request)
        await end(bus, request, 1)
    assert await forget(bus, broker, "--tenant", "acme", "--yes") == 0
    assert sorted(await stored(bus)) == sorted([requests[1].id] * 3 + [running.id])


async def test_a_request_that_runs_is_not_forgotten(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    request = await accept(bus)
    await assign(bus, request)
    assert await forget(bus, broker, request.id, "--yes") == 1
    assert "has not ended" in capsys.readouterr().err
    assert await stored(bus) == [request.id] * 2


async def test_nothing_is_deleted_without_a_yes(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    request = await accept(bus)
    await end(bus, request, 1)
    assert await forget(bus, broker, request.id) == 1
    assert "--yes" in capsys.readouterr().err
    assert await stored(bus) == [request.id] * 2
    assert await forget(bus, broker, "no-id", "--yes") == 1
    assert "is not a request id" in capsys.readouterr().err


async def test_no_request_of_a_tenant_is_forgotten_while_one_may_be_in_a_cell_that_is_away(
    bus: Bus, broker: EmbeddedNats, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = await accept(bus)
    await assign(bus, mine)
    await end(bus, mine, 1)
    cells = ("--cells", "2", "--cell-nats-urls", "nats://127.0.0.1:1")
    assert await forget(bus, broker, "--tenant", mine.tenant, "--yes", *cells) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
    assert await stored(bus) == [mine.id] * 3
