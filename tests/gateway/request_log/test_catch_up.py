"""Reading the token log again on a real nats-server: nothing is lost, and many read it together."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from penstock.gateway.request_log import subscriptions
from penstock.gateway.request_log.inflight import InflightRequest
from penstock.gateway.request_log.lookup import RequestFinder
from penstock.gateway.request_log.subscriptions import TokenSubscription
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.publisher import Publisher
from penstock.infra.bus.tasks import Tasks
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.infra.process import turns
from penstock.schemas import wire
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import GenerateRequest, new_request_id
from penstock.schemas.streams import CLOCK_SKEW_NS
from penstock.schemas.subjects import Subjects
from penstock.schemas.tokens import Finish, TokenBatch, TokenItem
from penstock.schemas.wire import pack_tokens
from tests.gateway.request_log.test_inflight import request_of
from tests.infra.bus.support import eventually, opened
from tests.infra.nats_server.support import lose_end

GATEWAY = "gone"


class Worker:
    """Writes tokens of several requests to one gateway's stream: token k of each has the id k."""

    def __init__(self, bus: Bus, count: int) -> None:
        self._bus = bus
        self._publisher = Publisher(bus)
        self._seq = 0
        now = time.time_ns()
        requests = (msgspec.structs.replace(request_of(), id=f"r{i}", gateway=GATEWAY) for i in range(count))
        self.requests = [msgspec.structs.replace(request, created_ns=now, deadline_ns=now) for request in requests]
        self.tokens = 0

    async def __aenter__(self) -> "Worker":
        await self._publisher.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._publisher.close()

    async def step(self, times: int = 1, *, end: bool = False) -> None:
        acks = []
        for _ in range(times):
            finish, packed = Finish("length") if end else None, pack_tokens([self.tokens])
            items = tuple(TokenItem(request.id, 1, 0, self.tokens, packed, finish) for request in self.requests)
            self._seq += 1
            payload = wire.encode(TokenBatch("w", 1, self._seq, items))
            acks.append(await self._publisher.send(self._bus.subjects.tokens(GATEWAY), payload, f"w-{self._seq}"))
            self.tokens += 1
        await asyncio.gather(*acks)


class Client:
    """Takes what an in-flight request has until its request ends."""

    def __init__(self, subscription: TokenSubscription, request: GenerateRequest, *, limit: int = 0) -> None:
        self.inflight = InflightRequest(request)
        if limit:
            self.inflight.limit = limit
        self.tokens = b""
        self._subscription = subscription
        subscription.subscribe_from_start(self.inflight)
        self.reads = asyncio.Event()
        self.reads.set()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            await self.reads.wait()
            for one in await self.inflight.take():
                self.tokens += one.tokens
                if one.finish is not None:
                    self._subscription.unsubscribe(self.inflight)
                    return


@pytest.fixture
async def subscription(bus: Bus) -> AsyncIterator[TokenSubscription]:
    tasks = Tasks("test")
    one = TokenSubscription(bus, GATEWAY, tasks)
    yield one
    await one.close()
    assert await tasks.aclose()


async def finished(clients: list[Client], worker: Worker) -> None:
    await asyncio.wait_for(asyncio.gather(*(client.task for client in clients)), 30)
    for client in clients:
        assert client.tokens == pack_tokens(range(worker.tokens)), client.inflight.request.id


async def test_whoever_attaches_whenever_gets_every_token_once(bus: Bus, subscription: TokenSubscription) -> None:
    rng = random.Random(4)
    async with Worker(bus, 8) as worker:
        await worker.step(300)
        await subscription.start()
        clients = []
        for _ in range(60):
            clients += [Client(subscription, rng.choice(worker.requests)) for _ in range(rng.randrange(3))]
            await worker.step(rng.randrange(6))
        await worker.step(end=True)
        await finished(clients, worker)
    assert len(subscription) == 0


async def test_many_who_attach_together_read_the_log_once(bus: Bus, subscription: TokenSubscription) -> None:
    async with Worker(bus, 100) as worker:
        await worker.step(400)
        await subscription.start()
        clients = [Client(subscription, request) for request in worker.requests for _ in range(2)]
        await eventually(lambda: all(not client.inflight.behind for client in clients), 30)
        await worker.step(end=True)
        await finished(clients, worker)
    assert subscription.catch_up.read_entries < 2 * 400, "one pass, and a little at its end"


async def test_those_who_come_during_a_pass_share_the_next_ones(
    bus: Bus, subscription: TokenSubscription, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "SLICE_S", 0.0)  # others have many turns during a pass
    async with Worker(bus, 5) as worker:
        await worker.step(200)
        await subscription.start()
        clients = []
        for _ in range(40):
            clients.append(Client(subscription, worker.requests[0]))
            await asyncio.sleep(0.002)
        await eventually(lambda: all(not client.inflight.behind for client in clients), 30)
        await worker.step(end=True)
        await finished(clients, worker)
    assert subscription.catch_up.read_entries < 20 * 200, "far fewer passes than clients"


async def test_a_client_that_stops_reading_continues_from_the_log(bus: Bus, subscription: TokenSubscription) -> None:
    async with Worker(bus, 2) as worker:
        await subscription.start()
        stops, reads = Client(subscription, worker.requests[0], limit=20), Client(subscription, worker.requests[1])
        await worker.step(10)
        await eventually(lambda: len(stops.tokens) == 40)
        stops.reads.clear()
        await worker.step(500)
        await eventually(lambda: len(reads.tokens) == 4 * worker.tokens)
        assert stops.inflight.paused
        assert len(stops.inflight.buffered) <= 21
        stops.reads.set()
        await worker.step(50)
        await worker.step(end=True)
        await finished([stops, reads], worker)


async def test_a_log_that_cannot_be_read_fails_those_who_need_it(
    bus: Bus, subscription: TokenSubscription, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Worker(bus, 1) as worker:
        await worker.step()
        await subscription.start()
        monkeypatch.setattr(subscriptions, "GIVE_UP_S", 0.2)
        monkeypatch.setattr(subscription.catch_up, "_stream", "missing")
        client = Client(subscription, worker.requests[0])
        with pytest.raises(ServingError, match="cannot be read"):
            await asyncio.wait_for(client.task, 20)
        subscription.unsubscribe(client.inflight)


async def test_a_request_that_wants_everything_has_it_when_it_is_attached(
    bus: Bus, subscription: TokenSubscription
) -> None:
    async with Worker(bus, 1) as worker:
        await worker.step(3_000)
        await subscription.start()
        inflight = InflightRequest(worker.requests[0], bounded=False)
        subscription.subscribe_from_start(inflight)
        await asyncio.wait_for(inflight.caught_up(), 20)
        assert b"".join(one.tokens for one in inflight.available()) == pack_tokens(range(3_000))
        subscription.unsubscribe(inflight)


# -- finding requests ---------------------------------------------------------------------------------------------


async def test_a_request_is_found_although_its_gateways_clock_is_minutes_off(bus: Bus) -> None:
    publisher, finder = Publisher(bus), RequestFinder(bus)
    await publisher.open()
    made = []
    for minutes in (-10, 10):
        made_ns = time.time_ns() + minutes * 60_000_000_000
        last = new_request_id(made_ns)
        ids = [f"{new_request_id(made_ns)[:-3]}{last[-3:]}" for _ in range(10)]  # of one shard: more than one batch
        for request_id in ids:
            request = msgspec.structs.replace(request_of(), id=request_id, created_ns=made_ns)
            subject = bus.subjects.request("tiny", "standard", request_id)
            await publisher.publish(subject, wire.encode(request), request_id)
        made += ids
    assert [(await finder.find(request_id)).id for request_id in made] == made
    with pytest.raises(ServingError, match="no request"):
        await finder.find(new_request_id(made_ns))
    await publisher.close()


async def test_a_stream_that_continues_elsewhere_begins_with_its_first_token_although_its_gateways_clock_is_ahead(
    bus: Bus, subscription: TokenSubscription
) -> None:
    publisher, ahead_ns = Publisher(bus), time.time_ns() + 600_000_000_000
    finder = RequestFinder(bus)
    await publisher.open()
    async with Worker(bus, 1) as worker:
        request = msgspec.structs.replace(worker.requests[0], id=new_request_id(ahead_ns), created_ns=ahead_ns)
        worker.requests = [request]
        await publisher.publish(bus.subjects.request("tiny", "standard", request.id), wire.encode(request), request.id)
        await worker.step(3)
        await subscription.start()
        client = Client(subscription, await finder.find(request.id))
        await eventually(lambda: client.tokens == pack_tokens(range(3)))
        await worker.step(end=True)
        await finished([client], worker)
    await publisher.close()


@pytest.mark.parametrize("stored", [0, 5], ids=["a new subject", "another gateway's"])
async def test_tokens_that_are_stored_while_the_link_is_down_are_read_by_a_gateway_whose_clock_is_ahead(
    bus: Bus, subscription: TokenSubscription, monkeypatch: pytest.MonkeyPatch, stored: int
) -> None:
    ahead_ns = time.time_ns() + 600_000_000_000
    async with Worker(bus, 1) as worker:
        await worker.step(stored)
        monkeypatch.setattr(time, "time_ns", lambda: ahead_ns)
        await subscription.start(new=not stored)
        client = Client(subscription, worker.requests[0])
        await eventually(lambda: not client.inflight.behind)
        tail = subscription.tail
        await tail.subscription.unsubscribe()
        await worker.step(2)
        tail.subscription = await bus.nc.subscribe_direct(tail.live_subject, tail.on_live)
        await tail.reconnected()
        await worker.step(end=True)
        await finished([client], worker)


async def test_requests_are_found_together_and_unknown_ones_are_not(bus: Bus) -> None:
    publisher, finder = Publisher(bus), RequestFinder(bus)
    await publisher.open()
    base_ns = time.time_ns()
    made = []
    for number in range(300):
        request_id = new_request_id(base_ns)
        request = msgspec.structs.replace(request_of(), id=request_id, user=str(number))
        made.append(request)
        await publisher.publish(bus.subjects.request("tiny", "standard", request_id), wire.encode(request), request_id)
    unknown = [new_request_id(base_ns) for _ in range(20)] + ["nonsense"]
    found = await asyncio.wait_for(
        asyncio.gather(*(finder.find(one) for one in [*(r.id for r in made), *unknown]), return_exceptions=True), 30
    )
    assert found[:300] == made
    assert all(isinstance(one, ServingError) for one in found[300:])
    assert [(await finder.find(made[7].id)).user, (await finder.find(made[299].id)).user] == ["7", "299"]
    await publisher.close()


async def test_of_a_stream_that_has_lost_its_end_what_open_requests_need_is_read_again(
    make_broker: Callable[..., EmbeddedNats], subjects: Subjects
) -> None:
    """Not an hour of it; other messages have the sequences of those that are lost."""
    server = make_broker()
    await server.start()
    async with opened(server, subjects) as bus, Worker(bus, 1) as worker:
        seqs: list[int] = []
        subscription = TokenSubscription(bus, GATEWAY, bus.tasks)
        subscription.on_read = seqs.append
        await subscription.start(new=True)
        await worker.step(3)
        present = msgspec.structs.replace(worker.requests[0], created_ns=time.time_ns() + CLOCK_SKEW_NS)
        subscription.subscribe(InflightRequest(present))
        await worker.step(3)
        await eventually(lambda: seqs == [1, 2, 3, 4, 5, 6])
        server.kill()
        await eventually(lambda: not bus.connected)
        lose_end(server.data_dir, subjects.stream("TOKENS"), 1)
        await server.start()
        await eventually(lambda: bus.connected)
        await worker.step()
        await eventually(lambda: seqs == [1, 2, 3, 4, 5, 6, 4, 5, 6])
        await subscription.close()
