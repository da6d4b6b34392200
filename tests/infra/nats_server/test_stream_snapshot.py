"""Snapshots of streams on a real nats-server."""

import hashlib
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.errors import NoRespondersError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.infra.nats_server.jetstream_api import (
    BrokerProblem,
    existing_info,
    request,
    restore_snapshot,
    take_snapshot,
)


async def test_a_stream_larger_than_what_the_server_sends_ahead_comes_back_as_it_was(bus: Bus) -> None:
    name = bus.subjects.stream("KV")
    for number in range(24):  # the server sends 8 MiB without an acknowledgement; hashes cannot be compressed
        data = hashlib.shake_256(b"%d" % number).digest(512 << 10)
        await bus.js.publish(f"{bus.subjects.namespace}.kv.w-{number}", data)
    await bus.js.delete_msg(name, 3)
    before = [entry async for entry in read(bus, name, ">")]
    chunks: list[bytes] = []
    head = await take_snapshot(bus.nc, name, chunks.append)
    assert sum(map(len, chunks)) > 11 << 20
    with pytest.raises(BrokerProblem):
        await restore_snapshot(bus.nc, head, chunks)
    await request(bus.nc, f"STREAM.DELETE.{name}", {})
    await restore_snapshot(bus.nc, head, chunks)
    assert [entry async for entry in read(bus, name, ">")] == before
    assert len(before) == 23


@pytest.mark.parametrize(("unheard", "restored"), [(3, True), (10**6, False)])
async def test_chunks_wait_until_the_servers_of_a_cluster_have_heard_of_their_subject(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, unheard: int, restored: bool
) -> None:
    name, left, ask = bus.subjects.stream("KV"), unheard, bus.nc.request
    await bus.js.publish(f"{bus.subjects.namespace}.kv.w-1", b"x" * 4096)
    chunks: list[bytes] = []
    head = await take_snapshot(bus.nc, name, chunks.append)
    await request(bus.nc, f"STREAM.DELETE.{name}", {})

    async def asked(subject: str, *arguments: Any, **more: Any) -> Msg:
        nonlocal left
        if not subject.startswith("$JS.API") and (left := left - 1) >= 0:
            raise NoRespondersError
        return await ask(subject, *arguments, **more)

    monkeypatch.setattr(bus.nc, "request", asked)
    if restored:
        await restore_snapshot(bus.nc, head, chunks)
        assert len([entry async for entry in read(bus, name, ">")]) == 1
    else:
        monkeypatch.setattr("penstock.infra.nats_server.jetstream_api.HEARD_S", 0.2)
        with pytest.raises(BrokerProblem, match="did not take all of"):
            await restore_snapshot(bus.nc, head, chunks)


async def test_a_snapshot_without_its_end_makes_no_stream(bus: Bus) -> None:
    name = bus.subjects.stream("KV")
    await bus.js.publish(f"{bus.subjects.namespace}.kv.w-1", b"x" * 4096)
    chunks: list[bytes] = []
    head = await take_snapshot(bus.nc, name, chunks.append)
    await request(bus.nc, f"STREAM.DELETE.{name}", {})
    whole = b"".join(chunks)
    with pytest.raises(BrokerProblem, match="does not take the snapshot"):
        await restore_snapshot(bus.nc, head, [whole[: len(whole) // 2]])
    assert await existing_info(bus.nc, f"STREAM.INFO.{name}", 10059) is None


async def test_streams_that_are_missing_or_in_memory_have_no_snapshot(bus: Bus) -> None:
    for name in ("NONE", "MEMORY_CONTENTS"):
        with pytest.raises(BrokerProblem):
            await take_snapshot(bus.nc, bus.subjects.stream(name), lambda chunk: None)
