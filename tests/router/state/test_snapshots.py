"""The index as bytes and back, and after a router's restart: from these and the tail of the stream, or from dumps."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.infra.bus.object_store import get, replace
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.operate.index_command import index_at
from penstock.router.state import caches
from penstock.router.state.prefix_index import PrefixIndex
from penstock.router.state.snapshots import IndexSnapshots, Snapshots, _check_stream, encoding, read_head, restoring
from penstock.schemas import kv, wire
from penstock.schemas.block_hashes import keys_of
from penstock.schemas.kv import KvBatch
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import eventually, opened
from tests.infra.nats_server.support import lose_end
from tests.properties import examples
from tests.router.state.test_holders import check
from tests.router.state.test_prefix_index import Engine, prompt
from tests.router.support import Clients, Routing, Stub, routing
from tests.workers.support import MODEL, request

WORKERS = 4


def stream(seed: int, messages: int, clears: float = 0.02) -> list[tuple[int, bytes]]:
    """What workers that evict leaves first publish, with the sequences of the stream."""
    rng = random.Random(seed)
    engines = [Engine(f"w{at}", rank=at % 2) for at in range(WORKERS)]
    entries = []
    for seq in range(1, messages + 1):
        engine = rng.choice(engines)
        stored = engine.store(prompt(rng.randrange(3), *(rng.randrange(4) for _ in range(rng.randrange(12)))))
        events = [stored] if stored else []
        if rng.random() < 0.4:
            events.append(engine.evict(rng, rng.randrange(1, 4)))
        if rng.random() < clears:
            events.append(engine.clear())
        entries.append((seq, wire.encode(engine.batch(*events))))
    return entries


def folded(entries: list[tuple[int, bytes]], max_blocks: int) -> PrefixIndex:
    index = PrefixIndex(max_blocks)
    for _, data in entries:
        index.apply(kv.decode(data))
    return index


def restored(parts: list[bytes], max_blocks: int) -> PrefixIndex | None:
    index = PrefixIndex(max_blocks)
    steps = restoring(index, read_head(parts[0]), parts[1:])
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return index if end.value else None


@examples(40)
@given(
    seed=st.integers(0, 9999), messages=st.integers(1, 60), cut=st.integers(0, 60), cap=st.sampled_from([7, 40, 9999])
)
def test_an_index_from_a_snapshot_and_the_tail_equals_one_from_the_whole_stream(
    seed: int, messages: int, cut: int, cap: int
) -> None:
    entries = stream(seed, messages, 0.02 if cap == 999 else 0)  # until it is swept, what is cleared takes room
    cut = min(cut, messages)
    whole = folded(entries, cap)
    late = restored(list(encoding(folded(entries[:cut], cap), cut, 0)), cap)
    assert late is not None
    for _, data in entries[cut:]:
        late.apply(kv.decode(data))
    check(late.holders)
    assert late.checksum() == whole.checksum()
    assert {t.target_id: (t.blocks, e, s) for t, e, s in late.feeds()} == {
        t.target_id: (t.blocks, e, s) for t, e, s in whole.feeds()
    }
    rng = random.Random(seed)
    for _ in range(30):
        probe = keys_of(prompt(*(rng.randrange(4) for _ in range(10))))
        assert late.match(probe) == whole.match(probe)


@examples(40)
@given(seed=st.integers(0, 9999), messages=st.integers(10, 60), steps=st.integers(0, 5), leaves=st.booleans())
def test_a_snapshot_is_of_one_moment_though_the_index_changes_while_it_is_encoded(
    seed: int, messages: int, steps: int, leaves: bool
) -> None:
    entries = stream(seed, messages)
    index, half = PrefixIndex(500), messages // 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.router.state.snapshots.PART_BLOCKS", 1)
        for _, data in entries[:half]:
            index.apply(kv.decode(data))
        then, encoder, parts = index.checksum(), encoding(index, half, 0), []
        parts.append(next(encoder))
        for seq, data in entries[half:]:
            index.apply(kv.decode(data))
            if seq == messages - 3 and leaves:
                index.forget("w1")
            index.sweep(3)
            parts += [part for _ in range(steps) if (part := next(encoder, None))]
        parts += list(encoder)
    found = restored(parts, 500)
    assert found is not None
    check(found.holders)
    check(index.holders)
    assert found.checksum() == then
    for _, data in entries[half:]:
        found.apply(kv.decode(data))
    if not leaves:
        assert found.checksum() == index.checksum()


def test_blocks_of_workers_that_left_are_not_in_a_restored_index() -> None:
    index = PrefixIndex(1000)
    for _, data in stream(1, 80):
        index.apply(kv.decode(data))
    index.forget("w1")
    index.sweep(5)
    found = restored(list(encoding(index, 80, 0)), 1000)
    assert found is not None
    while not (found.sweep(10) and index.sweep(10)):
        pass
    assert found.blocks == index.blocks
    assert "w1" not in {target[0] for target in found.match(keys_of(prompt(0)))}
    found.apply(KvBatch("new", 1, 0, (kv.Stored(prompt(0)),)))
    assert found.match(keys_of(prompt(0)))["new", 0] == 1
    check(found.holders)


def test_a_damaged_snapshot_is_noticed() -> None:
    index = PrefixIndex(1000)
    for _, data in stream(2, 50):
        index.apply(kv.decode(data))
    parts = list(encoding(index, 50, 0))
    assert restored(parts, 1000) is not None
    assert restored(parts, 999) is None, "another cap has another order of eviction"
    head = read_head(parts[0])
    wrong = wire.encode(msgspec.structs.replace(head, checksum=head.checksum ^ 1))
    assert restored([wrong, *parts[1:]], 1000) is None
    part = msgspec.msgpack.decode(parts[1])
    part["keys"] = part["keys"][:8] + bytes([part["keys"][8] ^ 1]) + part["keys"][9:]
    assert restored([parts[0], msgspec.msgpack.encode(part)], 1000) is None
    part["keys"] = part["keys"][:-16]
    with pytest.raises(ValueError, match="keys"):
        restored([parts[0], msgspec.msgpack.encode(part)], 1000)


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


@pytest.mark.parametrize("name", ["KV", "WORK", "DONE"])
async def test_a_snapshot_of_a_stream_that_was_recreated_is_not_used(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, name: str
) -> None:
    """Although the new one has got as far."""
    stub = await clients.stub("w1")
    asked = request()
    async with routing(broker, pipeline) as one:
        await one.knows("w1")
        await clients.ask(asked, done := request())
        for each in (asked, done):
            await clients.placed(each)
        await stub.finish(done)
        await stub.store(PROMPTS[0].digests)
        await eventually(lambda: one.unfinished == {asked.id: (1, "w1")} and index_of(one).blocks == 10)
        await eventually(lambda: all(e.echoed for e in one.router.cluster.tracker.active()))
        await one.router.cluster.save()
        await one.router.cluster.caches.save()
    bus = clients.bus
    assert await Snapshots(bus, "").load() is not None
    assert await IndexSnapshots(bus, "").load(index_of(one).holders.max_blocks) is not None

    assert await bus.js.delete_stream(pipeline.stream(name))
    await apply(bus.nc, topology(pipeline))
    subject = {"KV": pipeline.kv(MODEL, "w9"), "WORK": pipeline.work("aggregated", "w9"), "DONE": "done"}[name]
    for number in range(5):
        await bus.js.publish(pipeline.done("t", MODEL, f"r{number}") if name == "DONE" else subject, b"x")
    loaded = await Snapshots(bus, "").load()
    assert loaded is not None
    assert [entry.request for entry in loaded[1].unfinished] == [asked.id]  # its job may be lost
    assert bool(loaded[1].closed and loaded[0].work_seq and loaded[0].done_seq) == (name == "KV")
    assert (await IndexSnapshots(bus, "").load(index_of(one).holders.max_blocks) is None) == (name == "KV")


async def test_a_snapshot_of_a_stream_that_has_lost_its_end_since_is_not_used(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects
) -> None:
    """Other messages have taken the sequences: the fold would begin behind them."""
    server = make_broker()
    await server.start()
    async with opened(server, subjects) as bus:

        async def put(count: int) -> None:
            for _ in range(count):
                await bus.js.publish(subjects.work("aggregated", "w9"), b"x")

        await put(3)
        taken_ns = bus.clock.now_ns()
        await _check_stream(bus, "WORK", 3, taken_ns)
        server.kill()
        await eventually(lambda: not bus.connected)
        lose_end(server.data_dir, subjects.stream("WORK"), 1)
        await server.start()
        await eventually(lambda: bus.connected)
        await put(2)
        await _check_stream(bus, "WORK", 2, taken_ns)
        with pytest.raises(ValueError, match="has lost its end"):
            await _check_stream(bus, "WORK", 3, taken_ns)


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
