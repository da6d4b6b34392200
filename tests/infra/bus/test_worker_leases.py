"""The live table of workers, on a real nats-server, with a clock that the test moves."""

import time
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from penstock.infra.bus.clock import BrokerClock, steady_ns
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.worker_leases import RENEWED_S, RegisteredWorker, WorkerRegistry, registrations
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas import fleet
from penstock.schemas.subjects import Subjects
from penstock.schemas.wire import encode
from tests.infra.bus.support import eventually, opened


class Watched:
    def __init__(self, bus: Bus) -> None:
        self.now = 1000.0
        self.joined: list[fleet.Registration] = []
        self.left: list[tuple[str, str]] = []
        self.renewed: list[int] = []
        self.watch = WorkerRegistry(bus, self._joined, self._left, self._renewed, clock=lambda: self.now)

    def _joined(self, member: RegisteredWorker) -> None:
        self.joined.append(member.registration)

    def _left(self, member: RegisteredWorker, why: str) -> None:
        self.left.append((member.registration.worker, why))

    def _renewed(self, member: RegisteredWorker) -> None:
        self.renewed.append(member.registration.load.running)

    def pass_time(self, seconds: float) -> None:
        """As a process would live through it: looking four times a second."""
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            self.watch.expire()


def registration(worker: str, running: int = 0) -> fleet.Registration:
    return fleet.Registration(worker, "m", "aggregated", "mock", 1, 32, 100, 8, 1024, load=fleet.Load(running))


async def register(bus: Bus, worker: str, running: int = 0, ttl: int = 60) -> int:
    payload = encode(registration(worker, running))
    return int((await bus.js.publish(bus.subjects.lease(worker), payload, headers={"Nats-TTL": str(ttl)})).seq)


async def revision_is(watched: Watched, worker: str, revision: int) -> None:
    await eventually(lambda: watched.watch.members[worker].revision == revision)


async def remove(bus: Bus, worker: str, revision: int) -> None:
    await bus.js.publish(bus.subjects.lease(worker), b"", headers=fleet.removal_headers(revision))


@pytest.fixture
async def watched(bus: Bus) -> AsyncIterator[Watched]:
    await register(bus, "early")
    watched = Watched(bus)
    async with watched.watch:
        yield watched


async def test_who_was_there_and_who_comes_are_members(bus: Bus, watched: Watched) -> None:
    assert list(watched.watch.members) == ["early"]
    revision = await register(bus, "late")
    await eventually(lambda: "late" in watched.watch.members)
    assert watched.watch.members["late"].revision == revision
    assert watched.watch.members["late"].registration == registration("late")


async def test_a_renewal_replaces_what_was_known(bus: Bus, watched: Watched) -> None:
    revision = await register(bus, "early", running=3)
    await eventually(lambda: watched.watch.members["early"].revision == revision)
    assert watched.watch.members["early"].registration.load.running == 3
    assert (len(watched.joined), watched.renewed) == (1, [3])
    assert not watched.left
    draining = msgspec.structs.replace(registration("early", 4), state=fleet.WorkerState.draining)
    await bus.js.publish(bus.subjects.lease("early"), encode(draining))
    await eventually(lambda: len(watched.joined) == 2)  # more than the load has changed
    assert watched.joined[1] == draining
    assert watched.renewed == [3]


async def test_who_unregisters_leaves_at_once(bus: Bus, watched: Watched) -> None:
    await remove(bus, "early", watched.watch.members["early"].revision)
    await eventually(lambda: watched.left == [("early", "unregistered")])
    assert not watched.watch.members


async def test_a_removal_of_an_older_revision_removes_nothing(bus: Bus, watched: Watched) -> None:
    old = watched.watch.members["early"].revision
    new = await register(bus, "early")
    reply = await bus.nc.request(bus.subjects.lease("early"), b"", headers=fleet.removal_headers(old))
    assert b"10071" in reply.data
    await eventually(lambda: watched.watch.members["early"].revision == new)
    assert not watched.left


async def test_a_member_that_does_not_renew_leaves_when_its_lease_has_passed(bus: Bus, watched: Watched) -> None:
    watched.pass_time(fleet.LEASE_S)
    assert not watched.left
    watched.pass_time(0.25)
    assert watched.left == [("early", "lease expired")]


async def test_a_member_that_renews_stays(bus: Bus, watched: Watched) -> None:
    for _ in range(4):
        watched.pass_time(2)
        revision = await register(bus, "early")
        await revision_is(watched, "early", revision)
    assert not watched.left


async def test_the_servers_expiry_marker_counts_too(bus: Bus, watched: Watched) -> None:
    await register(bus, "short", ttl=1)
    await eventually(lambda: "short" in watched.watch.members)
    await eventually(lambda: watched.left == [("short", "lease expired")])


async def test_who_left_may_come_again(bus: Bus, watched: Watched) -> None:
    watched.watch.remove("early", "connection lost")
    watched.watch.remove("early", "connection lost")
    assert watched.left == [("early", "connection lost")]
    await register(bus, "early")
    await eventually(lambda: "early" in watched.watch.members)


async def test_after_a_pause_of_this_process_nobody_is_accused(bus: Bus, watched: Watched) -> None:
    watched.now += 60
    watched.watch.expire()
    assert not watched.left
    watched.pass_time(fleet.LEASE_S + 0.25)
    assert watched.left == [("early", "lease expired")]


async def test_an_unreadable_registration_is_passed_over(bus: Bus, watched: Watched) -> None:
    await bus.js.publish(bus.subjects.lease("odd"), b"\xc1")
    await register(bus, "late")
    await eventually(lambda: "late" in watched.watch.members)
    assert "odd" not in watched.watch.members


async def test_silence_of_the_broker_is_no_silence_of_the_workers(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects
) -> None:
    server = make_broker()
    await server.start()
    async with opened(server, subjects) as bus:
        await register(bus, "a")
        watched = Watched(bus)
        await watched.watch.start()
        server.kill()
        await eventually(lambda: not bus.connected)
        watched.pass_time(fleet.LEASE_S * 3)
        assert not watched.left
        await server.start()
        await eventually(lambda: bus.connected)
        watched.now += 0.25
        watched.watch.expire()
        watched.pass_time(fleet.LEASE_S)
        assert not watched.left
        revision = await register(bus, "a", running=1)
        await eventually(lambda: watched.watch.members["a"].revision == revision)
        watched.pass_time(fleet.LEASE_S + 0.25)
        assert watched.left == [("a", "lease expired")]
        await watched.watch.stop()


async def test_a_short_absence_of_the_broker_gives_every_lease_a_new_start(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects
) -> None:
    server = make_broker()
    await server.start()
    async with opened(server, subjects) as bus:
        await register(bus, "a")
        watched = Watched(bus)
        await watched.watch.start()
        watched.pass_time(fleet.LEASE_S - 0.25)
        server.kill()
        await eventually(lambda: not bus.connected)
        await server.start()
        await eventually(lambda: bus.connected)
        watched.pass_time(0.5)
        assert not watched.left
        await watched.watch.stop()


async def test_a_registration_that_outlived_its_lease_is_no_member_until_it_is_renewed(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server leaves them behind that was killed: their time to live is not enforced any more."""
    await register(bus, "ghost")
    monkeypatch.setattr("penstock.infra.bus.worker_leases.STALE_NS", -3_600_000_000_000)  # whatever is read is too old
    watched = Watched(bus)
    async with watched.watch:
        assert (watched.watch.stale_keys, watched.watch.members, watched.joined) == ({"ghost"}, {}, [])
        await register(bus, "ghost")
        await eventually(lambda: "ghost" in watched.watch.members)
        assert not watched.watch.stale_keys


async def test_what_nobody_renewed_for_long_is_of_workers_that_ended(bus: Bus, watched: Watched) -> None:
    dead = await register(bus, "dead")
    await eventually(lambda: "dead" in watched.watch.members)
    watched.pass_time(RENEWED_S)
    assert watched.watch.ended_before() <= dead, "it may live, on a machine whose clock differs"
    alive = await register(bus, "alive")
    await revision_is(watched, "alive", alive)
    watched.pass_time(RENEWED_S)
    assert dead < watched.watch.ended_before() <= alive


async def test_the_oldest_registration_of_a_live_worker_is_kept(bus: Bus, watched: Watched) -> None:
    dead = await register(bus, "dead")
    alive = await register(bus, "alive")
    late = await register(bus, "late")
    await revision_is(watched, "late", late)
    watched.watch.remove("dead", "connection lost")
    for _ in range(int(2 * RENEWED_S)):
        watched.pass_time(1.0)
        for name in ("alive", "late"):
            watched.watch.members[name].renewed_at = watched.now
    assert dead < watched.watch.ended_before() <= alive


async def test_after_a_reconnect_and_a_pause_every_worker_has_time_to_renew_again(
    bus: Bus, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    await register(bus, "dead")
    await eventually(lambda: "dead" in watched.watch.members)
    watched.pass_time(2 * RENEWED_S)
    assert watched.watch.ended_before()
    monkeypatch.setattr(Bus, "reconnects", bus.reconnects + 1)
    watched.pass_time(RENEWED_S)
    assert watched.watch.ended_before() == 0, "reconnected"
    watched.pass_time(RENEWED_S)
    assert watched.watch.ended_before()
    watched.now += 30.0
    watched.watch.expire()
    assert watched.watch.ended_before() == 0, "this process was stopped"


async def test_a_young_registration_is_a_member_at_once(bus: Bus) -> None:
    await register(bus, "young")
    watched = Watched(bus)
    async with watched.watch:
        assert (list(watched.watch.members), watched.watch.stale_keys) == (["young"], set())


async def test_of_those_that_are_read_once_the_ended_and_the_unreadable_are_left_out(bus: Bus) -> None:
    await remove(bus, "ended", await register(bus, "ended"))
    await bus.js.publish(bus.subjects.lease("of-a-later-build"), b"\xc1")
    for worker in ("w-10", "w-2"):
        await register(bus, worker)
    assert [each.worker for each in await registrations(bus)] == ["w-10", "w-2"], "they have no names: by id"


async def test_leases_are_read_by_the_brokers_clock(
    broker: EmbeddedNats, pipeline: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` would never see its workers on a broker elsewhere, if this machine's clock is a few seconds ahead."""
    ahead = time.time_ns() - steady_ns() + int(60e9)
    async with opened(broker, pipeline) as bus:
        await register(bus, "w")
        bus.clock = BrokerClock(lambda: steady_ns() + ahead)
        monkeypatch.setattr(time, "time_ns", lambda: steady_ns() + ahead)
        assert [each.worker for each in await registrations(bus)] == ["w"]
