"""A worker's lease on a real nats-server: who loses it knows, and says nothing more."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from nats.js.errors import NotFoundError

from penstock.infra.bus.connection import Bus
from penstock.infra.bus.worker_leases import WorkerRegistry
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas import fleet
from penstock.schemas.errors import ServingError
from penstock.schemas.subjects import Subjects
from penstock.schemas.wire import encode
from penstock.workers.session import lease as module
from penstock.workers.session.lease import TRUST_S, Lease
from tests.infra.bus.support import eventually, opened


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "RENEW_S", 0.03)
    monkeypatch.setattr(module, "RETRY_S", 0.01)


class Owner:
    def __init__(self, bus: Bus, worker: str = "w", epoch: int = 1) -> None:
        self.bus = bus
        self.subject = bus.subjects.lease(worker)
        self.offset = 0.0
        self.lost = 0
        self.regained = 0
        self.resend_fails = 0
        self.running = 0
        self.worker = worker
        self.epoch = epoch
        self.lease = Lease(
            bus,
            worker,
            self.describe,
            self._lost,
            self._regained,
            clock=lambda: asyncio.get_running_loop().time() + self.offset,
        )

    def describe(self) -> fleet.Registration:
        return fleet.Registration(
            self.worker, "m", "aggregated", "mock", self.epoch, 32, 100, 8, 1024, load=fleet.Load(self.running)
        )

    def _lost(self) -> None:
        self.lost += 1

    async def _regained(self) -> None:
        if self.resend_fails:
            self.resend_fails -= 1
            raise RuntimeError("the link broke during the resend")
        self.regained += 1

    async def stored(self) -> Any:
        """The key's last message; None: there is none."""
        try:
            return await self.bus.js.get_last_msg(
                f"KV_{self.bus.subjects.bucket('workers')}", self.subject, direct=True
            )
        except NotFoundError:
            return None

    async def revision(self) -> int:
        message = await self.stored()
        return message.seq if message is not None else 0

    async def renewals(self, count: int) -> None:
        """BlockWait until it renewed some more times."""
        last = self.lease.revision
        await eventually(lambda: self.lease.revision >= last + count)


@pytest.fixture
async def owner(bus: Bus) -> AsyncIterator[Owner]:
    owner = Owner(bus)
    await owner.lease.acquire()
    yield owner
    await owner.lease.stop()


async def purge(bus: Bus, owner: Owner) -> None:
    """As a router does that declares the worker dead."""
    while True:
        headers = fleet.removal_headers(await owner.revision())
        reply = await bus.nc.request(owner.subject, b"", headers=headers)
        if b"10071" not in reply.data:
            return


async def test_renewals_keep_the_lease(bus: Bus, owner: Owner) -> None:
    async with WorkerRegistry(bus) as watch:
        await owner.renewals(5)
        assert owner.lease.trusted()
        assert list(watch.members) == ["w"]
        message = await owner.stored()
        assert message.headers["Nats-TTL"] == str(int(fleet.LEASE_S))
        assert not owner.lost


async def test_an_update_is_published_at_once(bus: Bus, owner: Owner) -> None:
    owner.running = 7
    await owner.lease.update()
    assert fleet.decode((await owner.stored()).data).load.running == 7


async def test_a_key_removed_by_someone_else_is_a_lost_lease(bus: Bus, owner: Owner) -> None:
    await purge(bus, owner)
    removal = await owner.revision()
    await eventually(lambda: owner.lost)
    assert not owner.lease.trusted()
    for _ in range(3):
        await owner.lease.confirm()
    assert owner.lost == 1
    assert await owner.revision() == removal, "a lost lease is not taken again"


async def test_a_lease_whose_removal_left_no_trace_is_lost_too(bus: Bus) -> None:
    """As for a worker that slept longer than the mark of a removal is kept."""
    owner = Owner(bus)
    await owner.lease.acquire()
    await bus.js.purge_stream(f"KV_{bus.subjects.bucket('workers')}", subject=owner.subject)
    await eventually(lambda: owner.lost)
    assert await owner.stored() is None
    await owner.lease.stop()


async def test_a_lease_that_ran_out_while_the_process_slept_is_lost(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "LEASE_S", 1)
    monkeypatch.setattr(fleet, "RENEW_S", 60)
    owner = Owner(bus)
    await owner.lease.acquire()
    async with WorkerRegistry(bus) as watch:
        assert owner.lease.trusted()
        await eventually(lambda: not watch.members)  # the server's marker
        owner.offset = TRUST_S + 0.1
        assert not owner.lease.trusted()
        await owner.lease.confirm()
        assert owner.lost == 1
        await owner.lease.stop()


async def test_without_an_answer_for_a_while_nothing_may_be_published_until_a_renewal_succeeds(owner: Owner) -> None:
    assert owner.lease.trusted()
    owner.offset = TRUST_S + 0.1
    assert not owner.lease.trusted()
    await eventually(lambda: owner.regained == 1)
    assert owner.lease.trusted()
    assert not owner.lost


async def test_a_renewal_whose_answer_was_lost_is_adopted(bus: Bus, owner: Owner) -> None:
    await owner.renewals(1)
    async with owner.lease.renewal:  # as if the server had stored a renewal and its answer had not come
        await bus.js.publish(owner.subject, encode(owner.describe()), headers={"Nats-TTL": "3"})
    await owner.renewals(3)
    assert owner.lease.trusted()
    assert not owner.lost


@pytest.mark.parametrize("payload", [b"\xc1", "another life"])
async def test_a_key_that_another_wrote_is_a_lost_lease_and_stays_as_it_is(
    bus: Bus, owner: Owner, payload: bytes | str
) -> None:
    other = encode(Owner(bus, epoch=2).describe()) if isinstance(payload, str) else payload
    async with owner.lease.renewal:
        ack = await bus.js.publish(owner.subject, other, headers={"Nats-TTL": "60"})
    await eventually(lambda: owner.lost == 1)
    await owner.lease.update()
    await owner.lease.release()
    message = await owner.stored()
    assert (message.seq, message.data) == (ack.seq, other)


async def test_releasing_removes_the_key_even_amid_renewals(bus: Bus) -> None:
    for number in range(5):
        owner = Owner(bus, f"w{number}")
        await owner.lease.acquire()
        updating = asyncio.create_task(owner.lease.update())
        await asyncio.sleep(0)
        await owner.lease.release()
        await updating
        message = await owner.stored()
        assert message.headers["KV-Operation"] == "PURGE"
        assert not owner.lease.trusted()
        assert not owner.lost
    assert not bus.on_reconnect


async def test_releasing_after_a_renewal_whose_answer_was_lost_removes_the_key_too(bus: Bus, owner: Owner) -> None:
    async with owner.lease.renewal:
        await bus.js.publish(owner.subject, encode(owner.describe()), headers={"Nats-TTL": "3"})
        owner.lease.revision -= 1
    await owner.lease.release()
    assert (await owner.stored()).headers["KV-Operation"] == "PURGE"


async def test_a_failing_resend_does_not_end_the_renewals(owner: Owner) -> None:
    owner.resend_fails = 2
    owner.offset = TRUST_S + 0.1
    assert not owner.lease.trusted()
    await eventually(lambda: owner.regained == 1)
    assert owner.resend_fails == 0
    await owner.renewals(2)
    assert owner.lease.trusted()


async def test_a_lease_cannot_be_had_without_a_bucket(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ACQUIRE_S", 0.2)
    await bus.js.delete_stream(f"KV_{bus.subjects.bucket('workers')}")
    with pytest.raises(ServingError, match="streams apply"):
        await Owner(bus).lease.acquire()
    assert not bus.on_reconnect


async def test_the_lease_outlives_a_short_absence_of_the_server(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects
) -> None:
    server = make_broker()
    await server.start()
    async with opened(server, subjects) as bus:
        owner = Owner(bus)
        await owner.lease.acquire()
        server.kill()
        await eventually(lambda: not bus.connected)
        await server.start()
        await eventually(lambda: owner.regained >= 1)
        assert owner.lease.trusted()
        await owner.renewals(2)
        assert not owner.lost
        await owner.lease.release()
