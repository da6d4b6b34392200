"""A router's index after its restart: from the snapshot and the tail of the stream, or from dumps."""

from typing import Any

import pytest

from penstock.infra.broker.server import EmbeddedNats
from penstock.infra.bus.object_store import get, replace
from penstock.operate.index_command import index_at
from penstock.router.state import caches
from penstock.router.state.prefix_index import PrefixIndex
from penstock.schemas.blocks import keys_of
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import eventually
from tests.router.support import Clients, Routing, Stub, routing
from tests.workers.support import request

PROMPTS = [request([number] * 41) for number in range(4)]  # of ten blocks each


def index_of(one: Routing) -> PrefixIndex:
    assert one.router.cluster.caches.index is not None
    return one.router.cluster.caches.index


def found(one: Routing) -> list[dict[Any, int]]:
    return [index_of(one).match(keys_of(asked.digests)) for asked in PROMPTS]


async def remembered(broker: EmbeddedNats, pipeline: Subjects, stubs: list[Stub]) -> None:
    """A router stores a snapshot of two workers that have a prompt each."""
    async with routing(broker, pipeline) as one:
        await one.knows(*(stub.id for stub in stubs))
        await eventually(lambda: all(stub.dumps == 1 for stub in stubs))
        for stub, asked in zip(stubs, PROMPTS, strict=False):
            await stub.store(asked.digests)
        await eventually(lambda: index_of(one).blocks == 20)
        await one.router.cluster.caches.save()


async def test_a_router_that_restarts_needs_no_dump(broker: EmbeddedNats, pipeline: Subjects, clients: Clients) -> None:
    stubs = [await clients.stub("w1"), await clients.stub("w2")]
    await remembered(broker, pipeline, stubs)
    await stubs[0].store(PROMPTS[2].digests)
    async with routing(broker, pipeline) as one:
        await one.knows("w1", "w2")
        assert found(one) == [{("w1", 0): 10}, {("w2", 0): 10}, {("w1", 0): 10}, {}]
        await stubs[1].store(PROMPTS[3].digests)
        await eventually(lambda: found(one)[3] == {("w2", 0): 10})
        assert [stub.dumps for stub in stubs] == [1, 1]


async def test_a_worker_that_left_meanwhile_is_not_in_the_restored_index(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    stubs = [await clients.stub("w1"), await clients.stub("w2")]
    await remembered(broker, pipeline, stubs)
    await stubs[1].stop()
    await clients.log.remove_key("w2")
    async with routing(broker, pipeline) as one:
        await one.knows("w1")
        assert found(one)[:2] == [{("w1", 0): 10}, {}]


@pytest.mark.parametrize("damage", ["bytes", "truncated", "missing"])
async def test_without_a_good_snapshot_workers_are_asked_for_dumps(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, damage: str
) -> None:
    stubs = [await clients.stub("w1"), await clients.stub("w2")]
    await remembered(broker, pipeline, stubs)
    if damage == "missing":  # messages after the snapshot
        seq = 0
        for _ in range(2):
            seq = await stubs[0].store(PROMPTS[2].digests)
        await clients.bus.js.purge_stream(pipeline.stream("KV"), seq=seq)
    else:
        data = bytearray(await get(clients.bus, "snapshots", "index-router", limit=1 << 20, newest=True))
        data[-20] ^= 1
        await replace(clients.bus, "snapshots", "index-router", bytes(data[: -30 if damage == "truncated" else None]))
    async with routing(broker, pipeline) as one:
        await one.knows("w1", "w2")
        await eventually(lambda: found(one)[:2] == [{("w1", 0): 10}, {("w2", 0): 10}])
        assert [stub.dumps for stub in stubs] == [2, 2]


async def test_two_routers_note_equal_checksums_at_equal_sequences(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "CHECK_EVERY", 3)
    stub = await clients.stub("w1")
    async with routing(broker, pipeline, name="one") as one, routing(broker, pipeline, name="two") as two:
        for each in (one, two):
            await each.knows("w1")
        await eventually(lambda: stub.dumps == 2)
        last = 0
        for asked in PROMPTS:
            last = await stub.store(asked.digests)
        at = "penstock_router_index_sequence"
        await eventually(lambda: one.metric(at) == two.metric(at) == last)
        checksums = {each.metric("penstock_router_index_checksum") for each in (one, two)}
        assert checksums == {index_of(one).checksum()}
        messages = await clients.bus.js.stream_info(pipeline.stream("KV"))
        entries = [
            (seq, 0, (await clients.bus.js.get_msg(pipeline.stream("KV"), seq, direct=True)).data or b"")
            for seq in range(1, messages.state.last_seq + 1)
        ]
        assert index_at(last, entries, 1000).checksum() in checksums
