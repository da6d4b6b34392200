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
from penstock.router.service.maintenance import JobRetention, RequestRetention
from penstock.router.state.attempts import parse_stage
from penstock.router.state.load_tracker import LoadTracker
from penstock.schemas import requests
from penstock.schemas.jobs import LoadHeader
from penstock.schemas.streams import StreamSpec, topology
from penstock.schemas.subjects import HEADER_CONTENT_TYPE, HEADER_LOAD, HEADER_MSG_ID, KEPT, Subjects
from penstock.schemas.wire import content_type, encode
from tests.schemas.samples import REQUEST

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


async def test_a_request_is_copied_as_it_was_stored(broker: EmbeddedNats, nc: Client, subjects: Subjects) -> None:
    """The copy of a packed request said that it was a plain one."""
    whole, stream = topology(subjects), subjects.stream("REQUESTS")
    small = (dataclasses.replace(each, max_bytes=SIZE) if each.name == stream else each for each in whole.streams)
    await apply(nc, dataclasses.replace(whole, streams=tuple(small)))
    async with Publisher(Bus(nc, subjects)) as publisher:
        subject = subjects.request(REQUEST.model, "standard", REQUEST.id)
        for stored in (requests.packed(REQUEST), REQUEST):
            ack = await publisher.publish(
                subject, encode(stored), f"{type(stored)}", headers={HEADER_CONTENT_TYPE: content_type(type(stored))}
            )
            for number in range(70):
                await publisher.publish(subject, bytes(BODY), f"{ack.seq} {number}")
            reply = f"$JS.ACK.{stream}.router-standard.1.{ack.seq}.{ack.seq}.1700000000000000000.0"
            copied = await RequestRetention(Bus(nc, subjects), publisher).check([(REQUEST.id, reply)])
            assert copied == [(REQUEST.id, reply)]
            (copy,) = [each async for each in read(Bus(nc, subjects), stream, subject, after=ack.seq + 70)]
            assert copy.data == encode(stored)
            assert copy.headers[HEADER_CONTENT_TYPE] == content_type(type(stored))


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
