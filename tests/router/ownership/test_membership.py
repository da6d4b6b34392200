"""Router replicas on a real nats-server: one owner a model, and what happens when owners come, go and are lost."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.infra.nats_server.server import EmbeddedNats
from penstock.router.ownership import intake, membership
from penstock.router.ownership.intake import redeliver
from penstock.router.ownership.membership import Membership
from penstock.router.state.lost_workers import BrokerConnection
from penstock.schemas import routers, wire
from penstock.schemas.routers import HeldByTenant, Member
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import eventually
from tests.router.support import Clients, Routing, room, routing
from tests.workers.support import MODEL, request


def member_of(one: Routing) -> Membership:
    return one.router.intake.membership


def link_of(one: Routing) -> BrokerConnection:
    nc = one.bus.nc
    return BrokerConnection(nc._server_info["server_id"], nc.client_id)


def helps(one: Routing, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a router of an earlier build whose owner has the others place its requests, too."""
    monkeypatch.setattr(member_of(one), "own", frozenset({membership.REST}))
    monkeypatch.setattr(member_of(one), "owns", lambda name: True)


async def roles(*both: Routing) -> tuple[Routing, Routing]:
    """The owner and the standby, once they agree."""
    one, two = both

    def agreed() -> bool:
        owners = [member_of(each).owner(MODEL) for each in both]
        return owners[0] == owners[1] and any(MODEL in member_of(each).own for each in both)

    await eventually(agreed)
    return (one, two) if member_of(one).owns(MODEL) else (two, one)


async def never_again(clients: Clients) -> None:
    """What is delivered and not acknowledged does not come again by itself."""
    stream = clients.bus.subjects.stream("REQUESTS")
    config = (await clients.bus.js.consumer_info(stream, "router-standard")).config
    config.ack_wait = 3600.0
    await clients.bus.js.add_consumer(stream, config)


async def test_only_the_owner_reads_and_holds_requests(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    async with routing(broker, pipeline) as one, routing(broker, pipeline) as two:
        await clients.stub("w1", slots=1)
        owner, standby = await roles(one, two)
        asked = [request() for _ in range(10)]
        await clients.ask(*asked)
        await eventually(lambda: len(owner.waiting) == 9)
        assert not member_of(standby).reads
        assert standby.waiting == []
        assert {job.decision.router for _, job in await clients.work()} == {owner.router.id}
        lease = member_of(standby).others
        await eventually(
            lambda: [each.member.held for each in lease.values()] == [(HeldByTenant("standard", (("default", 9),)),)]
        )


async def test_models_are_spread_and_each_request_reaches_the_owner_of_its_model(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    await never_again(clients)
    async with routing(broker, pipeline) as one, routing(broker, pipeline) as two:
        names = ["a.b", "b", "c", "d"]
        for name in names:
            await clients.stub(f"w-{name.replace('.', '')}", model=name, aliases=(f"{name}-also",), slots=100)
        both = (one, two)
        await eventually(lambda: member_of(one).owners == member_of(two).owners)
        await eventually(lambda: all(len(member_of(each).own - {membership.REST}) == 2 for each in both))
        await eventually(lambda: member_of(one).owners == member_of(two).owners)
        asked = [request(model=name) for name in (*names, "a.b-also", "d-also") for _ in range(5)]
        await clients.ask(*asked)
        for each in asked:
            await clients.placed(each)
        by = {(job.decision.router, request_model(job)) for _, job in await clients.work()}
        assert len(by) == 6, "each model's requests, by any name, come from one router"
        assert {router for router, _ in by} == {one.router.id, two.router.id}
        assert {router for router, name in by if name.startswith("a.b")} == {
            each.router.id for each in both if each.router.intake.owns("a.b")
        }
        await clients.acknowledged(30)


def request_model(job: Any) -> str:
    from penstock.schemas import requests

    return requests.decode(bytes(job.request)).model


async def test_a_router_may_have_any_name(broker: EmbeddedNats, pipeline: Subjects, clients: Clients) -> None:
    await never_again(clients)
    async with routing(broker, pipeline, name="rack 1.left") as one, routing(broker, pipeline, name="a.b>*") as two:
        for model in ("a", "b"):
            await clients.stub(f"w-{model}", model=model, slots=100)
        await eventually(lambda: member_of(one).owners == member_of(two).owners)
        await eventually(lambda: all(len(member_of(each).own - {membership.REST}) == 1 for each in (one, two)))
        asked = [request(model=model) for model in ("a", "b") for _ in range(10)]
        await clients.ask(*asked)
        for each in asked:
            await clients.placed(each)
        assert {job.decision.router for _, job in await clients.work()} == {one.router.id, two.router.id}


async def test_a_lost_owners_requests_come_at_once_and_not_after_their_ack_wait(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    await never_again(clients)
    async with routing(broker, pipeline) as one, routing(broker, pipeline) as two:
        await clients.stub("w1", slots=1)
        owner, standby = await roles(one, two)
        asked = [request() for _ in range(30)]
        await clients.ask(*asked)
        await eventually(lambda: len(owner.waiting) == 29)
        link = link_of(owner)
        await owner.kill()
        member_of(standby).link_broke(link)
        await eventually(lambda: len(standby.waiting) == 29)
        assert await clients.unacknowledged() == 29
        late = request()
        await clients.ask(late)
        await eventually(lambda: late.id in standby.waiting)


async def test_without_disconnect_events_the_lease_ends(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    async with routing(broker, pipeline) as one, routing(broker, pipeline) as two:
        await clients.stub("w1", slots=100)
        owner, standby = await roles(one, two)
        await owner.kill()
        await eventually(lambda: member_of(standby).owns(MODEL) and member_of(standby).reads)
        asked = request()
        await clients.ask(asked)
        _, job = await clients.placed(asked)
        assert job.decision.router == standby.router.id


async def test_an_owner_that_stops_in_order_hands_over_without_a_wait(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routers, "LEASE_S", 3600.0)
    monkeypatch.setattr(routers, "TTL_S", 3600)
    async with routing(broker, pipeline) as one, routing(broker, pipeline) as two:
        await clients.stub("w1", slots=1)
        owner, standby = await roles(one, two)
        asked = [request() for _ in range(10)]
        await clients.ask(*asked)
        await eventually(lambda: len(owner.waiting) == 9)
        await owner.close()
        await eventually(lambda: len(standby.waiting) == 9)


@pytest.mark.parametrize("left", [False, True], ids=["whole", "left-in-the-log"])
async def test_a_held_request_moves_with_its_model(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, left: bool
) -> None:
    """When a router starts, the models are shared anew; the message stays claimed and is acknowledged once.

    A prompt that was left in the log is delivered once more, to be passed on.
    """
    await never_again(clients)
    space = {"max_held_bytes": room(7)} if left else {}  # for none of these prompts
    long: dict[str, Any] = {"max_model_len": 10_000, "total_blocks": 10_000}
    async with routing(broker, pipeline, **space) as one:
        for name in ("a", "b"):
            await clients.stub(f"w-{name}", model=name, slots=1, **long)
        await eventually(lambda: {"a", "b"} <= member_of(one).own)
        prompt = list(range(1, 4001))
        asked = [request(prompt, model=name, digests=b"") for name in ("a", "b") for _ in range(4)]
        await clients.ask(*asked)
        await eventually(lambda: len(one.waiting) == 6)
        assert [not pending.raw for pending in one.router.held] == [left] * 6
        async with routing(broker, pipeline) as two:
            await eventually(lambda: len(one.waiting) == len(two.waiting) == 3)
            assert await clients.unacknowledged() == 6
            for name in ("a", "b"):
                await clients.stub(f"more-{name}", model=name, slots=100, **long)
            for each in asked:
                await clients.placed(each)
            await clients.acknowledged(8)
    assert len(await clients.work()) == 8


async def test_what_is_delivered_again_while_it_is_held_is_returned_by_its_latest_delivery(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    """The broker ignores a rejection of an earlier delivery."""
    await never_again(clients)
    async with routing(broker, pipeline) as one:
        asked = [request() for _ in range(5)]
        await clients.ask(*asked)
        await eventually(lambda: len(one.waiting) == 5)
        replies = {pending.reply for pending in one.router.held}
        await redeliver(one.bus, pipeline.stream("REQUESTS"), "router-standard", ())
        await eventually(lambda: not replies & {pending.reply for pending in one.router.held})
        await one.close()
        async with routing(broker, pipeline) as two:
            await eventually(lambda: len(two.waiting) == 5)


async def test_what_another_router_holds_is_not_placed_twice_by_a_takeover(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    await never_again(clients)
    async with routing(broker, pipeline) as one:
        worker = await clients.stub("w1", slots=1)
        asked = [request() for _ in range(20)]
        await clients.ask(*asked)
        await eventually(lambda: len(one.waiting) == 19)
        while await clients.unacknowledged() > 19:
            await one.bus.nc.flush()  # an acknowledgement leaves with what is sent next, or after 10 ms
        assert await redeliver(one.bus, pipeline.stream("REQUESTS"), "router-standard", ()) == 19
        await worker.change(slots=100)
        for each in asked:
            await clients.placed(each)
        await clients.acknowledged(20)
        assert len(await clients.work()) == 20


async def test_two_that_both_believe_to_own_a_model_place_each_request_once(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with routing(broker, pipeline, seed=1) as one, routing(broker, pipeline, seed=2) as two:
        await clients.stub("w1", slots=200)
        await clients.stub("w2", slots=200)
        for each in (one, two):
            await each.knows("w1", "w2")
        for each in (one, two):  # each sees nobody else
            member_of(each).others.clear()
            monkeypatch.setattr(member_of(each), "_on_entry", lambda entry: None)
            member_of(each).assign()
        monkeypatch.setattr(member_of(one).tail, "_handle", lambda entry: None)
        monkeypatch.setattr(member_of(two).tail, "_handle", lambda entry: None)
        for each in (one, two):
            member_of(each).others.clear()
            member_of(each).assign()
            await each.router.intake.top_up()
        assert member_of(one).owns(MODEL)
        assert member_of(two).owns(MODEL)
        asked = [request() for _ in range(60)]
        await clients.ask(*asked)
        for router in (one, two):  # the same requests again, at both
            for each in asked[:20]:
                subject = clients.bus.subjects.routed(router.router.id)
                await clients.bus.nc.publish(subject, wire.encode(each), reply=clients.bus.nc.new_inbox()[1:])
        for each in asked:
            await clients.placed(each)
        await clients.acknowledged(60)
        assert len(await clients.work()) == 60
        await eventually(lambda: one.unfinished == two.unfinished)


async def test_what_an_earlier_build_shares_is_left_to_its_routers_as_long_as_they_run(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease with ``shares`` asks the other routers of that build for help, and none of this one."""
    monkeypatch.setattr(routers, "LEASE_S", 3600.0)
    link = BrokerConnection("elsewhere", 7)
    key = f"$KV.{pipeline.bucket('routers')}.earlier"
    earlier = wire.encode(Member("earlier", 1, (MODEL,), *link, shares=(MODEL,)))
    await clients.bus.js.publish(key, earlier, headers={"Nats-TTL": "60"})
    async with routing(broker, pipeline) as one:
        await clients.stub("w1", slots=100)
        await one.knows("w1")
        await eventually(lambda: member_of(one).owner(MODEL) == "earlier" and not member_of(one).reads)
        passed_on: asyncio.Queue[bytes] = asyncio.Queue()

        async def received(message: Any) -> None:
            passed_on.put_nowait(message.data)

        await clients.bus.nc.subscribe(pipeline.routed("earlier"), cb=received)
        await clients.bus.nc.flush()
        asked = request()
        message = type("Message", (), {"subject": pipeline.request(MODEL, "standard", asked.id), "reply": "$r"})()
        message.data = wire.encode(asked)  # a pull request of before may still bring one
        await one.router.intake._on_pulled(message)
        assert await asyncio.wait_for(passed_on.get(), 10) == message.data
        await clients.ask(asked)
        member_of(one).link_broke(link)
        _, job = await clients.placed(asked)
        assert job.decision.router == one.router.id


async def test_what_a_lost_helper_of_an_earlier_build_had_read_comes_again_at_once(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner that it helped has gone, and the one of this build asked for no help."""
    monkeypatch.setattr(intake, "AGAIN_S", 0.0)  # the look at what earlier routers left is over before requests come
    await never_again(clients)
    async with routing(broker, pipeline, seed=1) as one, routing(broker, pipeline, seed=2) as two:
        worker = await clients.stub("w1", slots=1)
        owner, helper = await roles(one, two)
        helps(helper, monkeypatch)
        await helper.router.intake.top_up()
        asked = [request() for _ in range(30)]
        await clients.ask(*asked)
        # Both may have taken the one slot, before either read what the other did.
        await eventually(lambda: len(owner.waiting) + len(helper.waiting) >= 28 and bool(helper.waiting))
        link = link_of(helper)
        await helper.kill()
        member_of(owner).link_broke(link)
        await eventually(lambda: len(owner.waiting) >= 28)
        await worker.change(slots=100)
        for each in asked:
            await clients.placed(each)
        await clients.acknowledged(30)
        assert len(await clients.work()) == 30


async def test_a_request_passed_on_to_a_router_that_owns_nothing_is_placed_by_the_present_loads(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    """For a moment, the router that passes it on knows more about the owners."""
    async with routing(broker, pipeline) as one, routing(broker, pipeline) as two:
        await clients.stub("w1", slots=20)
        owner, standby = await roles(one, two)
        asked = [request() for _ in range(20)]
        await clients.ask(*asked)
        for each in asked:
            await clients.placed(each)
        work = owner.router.cluster.positions().work
        await eventually(lambda: standby.router.cluster.positions().work == work)
        assert standby.folded == {}
        late = request()
        nc = clients.bus.nc
        for each in (asked[0], late):
            await nc.publish(
                clients.bus.subjects.routed(standby.router.id), wire.encode(each), reply=nc.new_inbox()[1:]
            )
        await eventually(lambda: standby.folded == owner.unfinished != {})
        assert late.id not in standby.folded, "the worker is full"
        assert len(await clients.work()) == 20


async def test_an_owner_that_was_stopped_leaves_the_model_to_its_heir(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    async with routing(broker, pipeline) as one, routing(broker, pipeline) as two:
        await clients.stub("w1", slots=100)
        owner, standby = await roles(one, two)
        stopped = member_of(owner)
        stopped._stopped = True  # no renewals, as under SIGSTOP
        await eventually(lambda: member_of(standby).owns(MODEL))
        stopped._stopped = False
        stopped._renewed = time.monotonic() - 2 * routers.LEASE_S
        await stopped._renew()
        await eventually(lambda: not stopped.owns(MODEL) and not stopped.reads)
        await asyncio.sleep(2 * routers.RENEW_S)
        assert member_of(standby).owns(MODEL)


class Relay:
    """A link to the broker that can be cut: nothing arrives, at either end, and neither end is notified."""

    def __init__(self, server: EmbeddedNats) -> None:
        self._server = server
        self._open = asyncio.Event()
        self._open.set()

    def cut(self) -> None:
        self._open.clear()

    def restore(self) -> None:
        self._open.set()

    def url(self, role: str) -> str:
        return f"{self._server.url(role).rpartition(':')[0]}:{self.port}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Relay"]:
        links = await asyncio.start_server(self._link, "127.0.0.1", 0)
        self.port = links.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self.restore()
            links.close()

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = int(self._server.url().rpartition(":")[2])
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(self._carry(reader, back), self._carry(there, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


async def test_an_owner_whose_network_is_cut_is_replaced_and_nothing_is_placed_twice(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    async with (
        Relay(broker).running() as relay,
        routing(broker, pipeline, url=relay.url("operator")) as far,
        routing(broker, pipeline) as near,
    ):
        await clients.stub("w1", slots=1000)
        assert (await roles(far, near))[0] is far, "it is the earlier one"
        first = [request() for _ in range(10)]
        await clients.ask(*first)
        for each in first:
            await clients.placed(each)
        relay.cut()
        second = [request() for _ in range(20)]
        await clients.ask(*second)
        for each in second:
            _, job = await clients.placed(each)
            assert job.decision.router == near.router.id
        relay.restore()
        await eventually(lambda: member_of(far).owners == member_of(near).owners)
        await roles(far, near)
        third = [request() for _ in range(20)]
        await clients.ask(*third)
        for each in third:
            await clients.placed(each)
        await clients.acknowledged(50)
        assert len(await clients.work()) == 50
        await eventually(lambda: far.unfinished == near.unfinished)


async def test_a_renewal_that_is_read_after_the_end_of_its_connection_revives_nobody(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients
) -> None:
    async with routing(broker, pipeline) as one:
        await clients.stub("w1")
        link = BrokerConnection("elsewhere", 7)
        key = f"$KV.{pipeline.bucket('routers')}.lost"
        lost = wire.encode(Member("lost", 1, (MODEL,), *link))
        await clients.bus.js.publish(key, lost, headers={"Nats-TTL": "60"})
        await eventually(lambda: member_of(one).owner(MODEL) == "lost")
        member_of(one).link_broke(link)
        assert member_of(one).owns(MODEL)
        position = member_of(one).tail.position
        await clients.bus.js.publish(key, lost, headers={"Nats-TTL": "60"})
        await eventually(lambda: member_of(one).tail.position > position)
        assert member_of(one).owns(MODEL)


async def test_a_key_that_was_left_behind_does_not_hold_up_a_router_that_starts(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after all processes were killed: the only router must not wait for the lease of its predecessor."""
    monkeypatch.setattr(routers, "LEASE_S", 3600.0)
    key = f"$KV.{pipeline.bucket('routers')}.before"
    await clients.bus.js.publish(key, wire.encode(Member("before", 1, (MODEL,))), headers={"Nats-TTL": "60"})
    await asyncio.sleep(membership.STALE_NS / 1e9 + 0.1)  # by the broker's clock
    async with routing(broker, pipeline) as one:
        await clients.stub("w1")
        await one.knows("w1")
        asked = request()
        await clients.ask(asked)
        await clients.placed(asked)


async def test_without_the_bucket_every_router_works_for_itself_until_it_is_there(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody deleted it, and then ran ``penstock streams apply``."""
    monkeypatch.setattr(membership, "JOIN_S", 0.1)
    name = f"KV_{pipeline.bucket('routers')}"
    config = (await clients.bus.js.stream_info(name)).config
    await clients.bus.js.delete_stream(name)
    async with routing(broker, pipeline) as one, routing(broker, pipeline) as two:
        assert [member_of(each).shared for each in (one, two)] == [False, False]
        await clients.stub("w1", slots=100)
        asked = [request() for _ in range(40)]
        await clients.ask(*asked)
        for each in asked:
            await clients.placed(each)
        assert {job.decision.router for _, job in await clients.work()} == {one.router.id, two.router.id}
        await clients.bus.js.add_stream(config)
        await roles(one, two)
        await eventually(lambda: [member_of(each).shared for each in (one, two)] == [True, True])
        await eventually(lambda: sorted(member_of(each).reads for each in (one, two)) == [False, True])


async def test_the_end_of_a_routers_process_is_reported_by_the_broker(
    broker: EmbeddedNats, pipeline: Subjects, clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system account names the connection; no lease has to end."""
    monkeypatch.setattr(routers, "LEASE_S", 3600.0)
    monkeypatch.setattr(routers, "TTL_S", 3600)
    system = broker.sys_url
    async with (
        routing(broker, pipeline, sys_nats_url=system) as one,
        routing(broker, pipeline, sys_nats_url=system) as two,
    ):
        await clients.stub("w1", slots=100)
        owner, standby = await roles(one, two)
        await owner.kill()
        await eventually(lambda: member_of(standby).owns(MODEL))


async def test_publishing_needs_no_owner(broker: EmbeddedNats, pipeline: Subjects, clients: Clients) -> None:
    """What one router passes on to another that has just gone comes again after its ack_wait."""
    async with routing(broker, pipeline) as one:
        await clients.stub("w1", slots=100)
        await eventually(lambda: member_of(one).owns(MODEL))
        key = f"$KV.{pipeline.bucket('routers')}.ghost"
        ghost = Member("ghost", 1, (MODEL,))
        await clients.bus.js.publish(key, wire.encode(ghost), headers={"Nats-TTL": "1"})
        asked = request()
        await clients.ask(asked)
        await clients.placed(asked)
        await clients.acknowledged(1)
