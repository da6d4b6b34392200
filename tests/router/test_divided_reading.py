"""What routers that share requests tell each other of WORK and DONE: nothing is lost or counted twice."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from infra.broker.server import EmbeddedNats
from infra.bus.direct_get import Entry
from router.divided_reading import DividedReading
from router.ownership import membership
from router.ownership import sharing as ownership
from schemas import jobs, readings, routers, wire
from schemas.jobs import LoadHeader, Stage
from schemas.readings import Placed, Readings
from schemas.subjects import HEADER_LOAD, HEADER_MSG_ID, HEADER_NO_STORE, Subjects
from tests.infra.bus.support import eventually
from tests.router.ownership.test_membership import link_of, member_of, roles, share
from tests.router.support import Clients, Routing, routing
from tests.workers.support import MODEL, request


@pytest.fixture(autouse=True)
def shares_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, nothing ends it but the test."""
    monkeypatch.setattr(ownership, "CALM_S", 3600.0)
    monkeypatch.setattr(routers, "LEASE_S", 10.0)


@contextlib.asynccontextmanager
async def sharing(broker: EmbeddedNats, pipeline: Subjects) -> AsyncIterator[tuple[Routing, Routing]]:
    async with routing(broker, pipeline) as one, routing(broker, pipeline) as two:
        yield one, two


async def together(owner: Routing, helper: Routing) -> None:
    share(owner, True)
    await eventually(lambda: all(each.router.cluster.divided._group for each in (owner, helper)))


def knows(one: Routing) -> set[str]:
    return set(one.unfinished)


async def test_all_know_what_each_reads(broker: EmbeddedNats, pipeline: Subjects, clients: Clients) -> None:
    async with sharing(broker, pipeline) as both:
        worker = await clients.stub("w1", slots=200, no_store=True)
        owner, helper = await roles(*both)
        await together(owner, helper)
        told = []
        await clients.bus.nc.subscribe_direct(
            clients.bus.subjects.readings("*"), lambda message: told.append(readings.decode(message.data))
        )
        asked = [request(no_store=number % 10 == 9) for number in range(60)]
        await clients.ask(*asked)
        ids = {each.id for each in asked}
        await eventually(lambda: knows(owner) == knows(helper) == ids)
        for each in asked[:50]:
            await worker.finish(each)
        left = {each.id for each in asked[50:]}
        await eventually(lambda: knows(owner) == knows(helper) == left)
        assert {each.request for message in told for each in message.placed} == {
            each.id for each in asked if not each.no_store
        }
        assert len([each for message in told for each in message.work]) == 6
        clusters = [each.router.cluster for each in both]
        await eventually(lambda: clusters[0].positions() == clusters[1].positions())
        loads = [cluster.tracker.load(("w1", 0), 0) for cluster in clusters]
        assert loads[0].sequences == loads[1].sequences == 10


async def test_what_a_lost_router_read_is_read_by_the_others(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sharing(broker, pipeline) as both:
        worker = await clients.stub("w1", slots=200)
        owner, helper = await roles(*both)
        await together(owner, helper)
        monkeypatch.setattr(owner.router.cluster.divided, "tell", lambda: None)
        asked = [request() for _ in range(40)]
        await clients.ask(*asked)
        for each in asked:
            await clients.placed(each)
        for each in asked[:20]:
            await worker.finish(each)
        await eventually(lambda: set(owner.folded) != {each.id for each in asked})
        link = link_of(owner)
        await owner.kill()
        member_of(helper).link_broke(link)
        await eventually(lambda: knows(helper) == {each.id for each in asked[20:]})
        assert helper.router.cluster.divided._wanted == ""


async def test_a_router_of_an_earlier_build_reads_everything_itself(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = membership.Membership._member

    def earlier(self: membership.Membership) -> object:
        return msgspec.structs.replace(made(self), divides=False)

    async with sharing(broker, pipeline) as both:
        await clients.stub("w1", slots=200)
        owner, helper = await roles(*both)
        for each in both:
            monkeypatch.setattr(member_of(each), "_member", lambda each=each: earlier(member_of(each)))
            await member_of(each)._renew()
        await eventually(lambda: not any(s.member.divides for each in both for s in member_of(each)._seen.values()))
        share(owner, True)
        await eventually(lambda: member_of(helper).places(MODEL))
        asked = [request() for _ in range(20)]
        await clients.ask(*asked)
        await eventually(lambda: knows(owner) == knows(helper) == {each.id for each in asked})
        assert owner.router.cluster.divided._group == helper.router.cluster.divided._group == ""


class Told:
    """One router's readings, as another one takes them."""

    def __init__(self) -> None:
        self.sent: list[Readings] = []
        self.subjects = Subjects("ps")
        self.nc = self

    def post(self, _: str, data: bytes) -> bool:
        self.sent.append(readings.decode(data))
        return True


def entry(seq: int, name: str, load: LoadHeader | None, **headers: str) -> Entry:
    fields = {HEADER_MSG_ID: name} | headers
    if load is not None:
        fields[HEADER_LOAD] = jobs.load_header(*load)
    return Entry("ps.work.aggregated.w1", seq, b"x", fields)


LOAD = LoadHeader(225, 96, "g1", 5, "standard", 2)


async def test_the_short_form_is_for_plain_jobs_only() -> None:
    bus = Told()
    divided = DividedReading(bus, "r", placed=lambda _: None, ended=lambda _: None)  # type: ignore[arg-type]
    divided.read_work(entry(1, "r1:1", LOAD))
    unusual = [
        entry(2, "r1:1:revoke", None),
        entry(3, "r1:1:decode", LOAD),
        entry(4, "r1:1:kept", LOAD),
        entry(5, "r1:2", LOAD._replace(route=(Stage("aggregated", "w1", 1),))),
        entry(6, "r1:2", LOAD, **{HEADER_NO_STORE: "1"}),
        entry(7, "r1:x", LOAD),
    ]
    for each in unusual:
        divided.read_work(each)
    divided.tell()
    (message,) = bus.sent
    assert message.placed == (Placed(1, "r1", 1, "aggregated", "w1", 225, 96, "g1", 5, "standard", 2),)
    assert [(each.seq, each.subject, each.headers) for each in message.work] == [
        (each.seq, each.subject, each.headers) for each in unusual
    ]
    divided.tell()
    assert len(bus.sent) == 1, "once"


async def test_what_is_read_is_told_at_once_and_then_together() -> None:
    bus = Told()
    divided = DividedReading(bus, "r", placed=lambda _: None, ended=lambda _: None)  # type: ignore[arg-type]
    for seq in range(20):
        divided.read_work(entry(seq, f"r{seq}:1", LOAD))
        await asyncio.sleep(0)
    await eventually(lambda: sum(len(message.placed) for message in bus.sent) == 20)
    assert len(bus.sent) < 20


async def test_many_readings_are_several_messages() -> None:
    bus = Told()
    divided = DividedReading(bus, "r", placed=lambda _: None, ended=lambda _: None)  # type: ignore[arg-type]
    for seq in range(5000):
        divided.read_done(Entry("ps.done.a.b.c", seq, b"", {HEADER_MSG_ID: f"r{seq}"}))
    divided.tell()
    assert [each.seq for message in bus.sent for each in message.ended] == list(range(5000))
    assert max(len(wire.encode(message)) for message in bus.sent) < 1 << 20
