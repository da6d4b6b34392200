"""Jobs that run stay readable in a WORK of 1 MiB, however much finished work passes; unfinished work stops new work."""

import dataclasses
from collections.abc import AsyncIterator

import msgspec
import pytest
from nats.aio.client import Client

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import Entry, get, read
from penstock.infra.bus.publisher import Publisher
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.router.service.maintenance import JobRetention
from penstock.router.state.attempts import parse_stage
from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas.jobs import LoadHeader
from penstock.schemas.streams import StreamSpec, topology
from penstock.schemas.subjects import HEADER_LOAD, HEADER_MSG_ID, KEPT, Subjects

SIZE = 1 << 20
BODY = 10_000


class Running(msgspec.Struct):
    request: str
    seq: int
    body: bytes


class Log:
    """WORK, as routers write it and follow it."""

    def __init__(self, bus: Bus, publisher: Publisher) -> None:
        self.bus, self.publisher = bus, publisher
        self.retention = JobRetention(bus, publisher)
        self.stream = bus.subjects.stream("WORK")
        self.running: dict[str, Running] = {}
        self.count = 0
        self.copies: list[Entry] = []

    async def place(self, body: bytes, stage: str = "") -> Running:
        self.count += 1
        name = f"r{self.count}"
        ack = await self.publisher.publish(
            self.bus.subjects.work("aggregated", "w1"), body, f"{name}:1{stage}", headers={HEADER_LOAD: "x"}
        )
        return Running(name, ack.seq, body)

    async def look(self) -> None:
        await self.retention.check(self.running.values())
        after = self.copies[-1].seq if self.copies else 0
        async for entry in read(self.bus, self.stream, self.bus.subjects.kept("*", "*"), after=after):
            self.copies.append(entry)
            request, _, *rest = entry.headers[HEADER_MSG_ID].split(":")
            assert parse_stage(rest)[1]
            if request in self.running:
                self.running[request].seq = entry.seq


@pytest.fixture
async def log(broker: EmbeddedNats, nc: Client, subjects: Subjects) -> AsyncIterator[Log]:
    whole = topology(subjects)

    def shrink(spec: StreamSpec) -> StreamSpec:
        return dataclasses.replace(spec, max_bytes=SIZE) if spec.name == subjects.stream("WORK") else spec

    await apply(nc, dataclasses.replace(whole, streams=tuple(map(shrink, whole.streams))))
    bus = Bus(nc, subjects)
    publisher = Publisher(bus)
    await publisher.open()
    yield Log(bus, publisher)
    await publisher.close()


async def test_running_jobs_outlive_three_times_the_stream_and_block_no_new_work(log: Log) -> None:
    for number, stage in enumerate(("", ":decode", "")):
        running = await log.place(b"job %d" % number, stage)
        log.running[running.request] = running
    for _ in range(3 * SIZE // BODY):
        await log.place(bytes(BODY))
        await log.look()
        assert not log.retention.full
    state = (await log.bus.js.stream_info(log.stream)).state
    assert state.first_seq > 2 * SIZE // BODY  # the jobs' own messages are long gone
    for running in log.running.values():
        entry = await get(log.bus, log.stream, running.seq)
        assert entry is not None
        assert entry.data == running.body
        assert entry.headers[HEADER_LOAD] == "x"
    names = [entry.headers[HEADER_MSG_ID].split(":") for entry in log.copies]
    assert {tuple(parse_stage(name[2:])[0]) for name in names if name[0] == "r2"} == {("decode",)}
    assert len(log.copies) < 3 * 10  # a copy each half stream, not at each look


async def test_unfinished_jobs_that_fill_the_stream_stop_new_work_and_are_not_copied(log: Log) -> None:
    while not log.retention.full:
        running = await log.place(bytes(BODY))
        log.running[running.request] = running
        await log.look()
    assert log.copies == []
    state = (await log.bus.js.stream_info(log.stream)).state
    assert state.first_seq == 1
    assert 0.79 * SIZE < state.bytes < 0.9 * SIZE
    log.running.clear()
    await log.look()
    assert not log.retention.full


def test_a_copy_updates_the_sequence_of_its_job_and_nothing_else() -> None:
    tracker = LoadTracker()
    load = LoadHeader(64, 0, "", 10, "")
    tracker.admit("r", 2, "w1", load, now_ns=0, echoed=True, seq=5, role="aggregated")
    before = tracker.request("r")
    assert before is not None
    assert tracker.set_seq("r", 2, 9)
    assert tracker.request("r") == msgspec.structs.replace(before, seq=9)
    assert tracker.set_seq("r", 1, 11)  # of an attempt that is over
    assert tracker.set_seq("r", 2, 7)  # older than what is known
    assert tracker.request("r") == msgspec.structs.replace(before, seq=9)
    assert not tracker.set_seq("unknown", 1, 3)


def test_a_message_id_names_the_stage_and_marks_a_copy() -> None:
    assert parse_stage([]) == ([], False)
    assert parse_stage(["decode"]) == (["decode"], False)
    assert parse_stage(["decode", KEPT, "17"]) == (["decode"], True)
