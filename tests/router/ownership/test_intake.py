"""Requests are read from the stream as it is, also after the one before was lost with the broker's disk."""

import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from penstock.infra.bus.puller import config_of, pull_request
from penstock.infra.nats_server.apply_streams import apply
from penstock.infra.nats_server.jetstream_api import request as ask_broker
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.operate.doctor import fleet
from penstock.operate.doctor.finding import CheckResult, CheckStatus
from penstock.operate.doctor.fleet import check_fleet
from penstock.router.recovery import recovery
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import new_request_id
from penstock.schemas.streams import topology
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import eventually
from tests.router.support import Clients, Routing, routing
from tests.workers.support import dial, log_client, request

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize("restarted", [False, True])
async def test_requests_are_placed_after_the_brokers_store_was_lost(
    make_broker: Callable[..., EmbeddedNats], restarted: bool
) -> None:
    """The routers make their consumers: streams are there a moment before the operator makes those."""
    server, subjects = make_broker(), Subjects("ps")
    await server.start()
    streams = topology(subjects)
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(dial(server, subjects))
        await apply(bus.nc, streams)
        one = await stack.enter_async_context(routing(server, subjects))
        async with log_client(server, subjects) as log:
            clients = Clients(log)
            await clients.stub("before")
            lost = [request() for _ in range(5)]
            await clients.ask(*lost)
            for asked in lost:
                await clients.placed(asked)
            waits = request(model="without-workers")
            await clients.ask(waits)
            await eventually(lambda: one.waiting == [waits.id])
            await clients.stop()
        if restarted:
            await one.kill()

        await server.stop()
        shutil.rmtree(server.data_dir / "nats")
        await server.start()
        await eventually(lambda: bus.connected)
        await apply(bus.nc, replace(streams, consumers=()))
        if restarted:
            one = await stack.enter_async_context(routing(server, subjects))
        clients = Clients(await stack.enter_async_context(log_client(server, subjects)))
        await clients.stub("after")
        await one.knows("after")
        again = [request() for _ in range(3)]
        await clients.ask(*again)
        for asked in again:
            await clients.placed(asked)
        assert not any("REQUESTS" in line for line in await apply(bus.nc, streams))
        if not restarted:  # a verdict on its message would be one on a message of the new stream
            assert [(each.request.id, each.reply) for each in one.router.held] == [(waits.id, "")]
        await clients.stop()


async def finding(clients: Clients) -> CheckResult:
    (found,) = (each for each in await check_fleet(clients.bus, None) if each.check == "router")
    return found


@pytest.mark.parametrize("reached", [False, True])
async def test_a_consumer_that_passes_over_requests_is_named_and_replaced(
    broker: EmbeddedNats, clients: Clients, pipeline: Subjects, reached: bool
) -> None:
    """As a release left it behind that asked for a position in the lost stream."""
    nc, stream = clients.bus.nc, pipeline.stream("REQUESTS")
    await clients.stub()
    for spec in topology(pipeline).consumers:
        if spec.stream == stream:
            config = config_of(spec) | {"deliver_policy": "by_start_sequence", "opt_start_seq": 3}
            await ask_broker(nc, f"CONSUMER.DELETE.{stream}.{spec.name}", {})
            await ask_broker(nc, f"CONSUMER.CREATE.{stream}.{spec.name}", {"stream_name": stream, "config": config})
    asked = [request() for _ in range(3 if reached else 1)]
    await clients.ask(*asked)
    if not reached:  # from then on, only who may read messages sees it
        found = await finding(clients)
        assert (found.status, found.fix) == (CheckStatus.problem, "replace it: `penstock streams apply`")
        assert "begins at 3" in found.what

    assert sum(line.startswith("replaced ") for line in await apply(nc, topology(pipeline))) == 3
    assert await apply(nc, topology(pipeline)) == []
    assert "begins at" not in (await finding(clients)).what
    async with routing(broker, pipeline):
        for each in asked:
            await clients.placed(each)


async def test_requests_that_no_router_takes_although_some_run_are_named(
    clients: Clients, pipeline: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    nc, stream = clients.bus.nc, pipeline.stream("REQUESTS")
    asks = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.router-interactive"  # and nobody takes those of class standard
    await nc.subscribe(inbox := nc.new_inbox())
    await nc.publish(asks, pull_request(1), reply=inbox)
    monkeypatch.setattr(fleet, "RECONNECT_S", 0.0)
    await clients.ask(request())
    assert (await finding(clients)).status is CheckStatus.ok, "it has not waited for long"
    first = time.monotonic()
    await eventually(lambda: time.monotonic() - first > 1.0)
    await clients.ask(request())  # also while others come
    monkeypatch.setattr(fleet, "UNREAD_S", 1.0)
    found = await finding(clients)
    text = "2 requests unread: routers have taken none of a class since the broker started"
    assert (found.status, found.what) == (CheckStatus.problem, text)


async def test_a_router_on_a_machine_whose_clock_is_ahead_reads_every_request(
    broker: EmbeddedNats, clients: Clients, pipeline: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    await clients.stub()
    asked = [request() for _ in range(3)]
    await clients.ask(*asked)
    for name in ("interactive", "standard", "batch"):
        await clients.bus.js.delete_consumer(pipeline.stream("REQUESTS"), f"router-{name}")
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 10**9 * 86_400)
    async with routing(broker, pipeline):
        for each in asked:
            await clients.placed(each)


async def test_a_consumer_that_was_made_again_behind_what_was_placed_stays(
    clients: Clients, pipeline: Subjects, one: Routing
) -> None:
    await clients.stub()
    asked = [request() for _ in range(3)]
    await clients.ask(*asked)
    for each in asked:
        await clients.placed(each)
    await clients.acknowledged(3)
    stream = pipeline.stream("REQUESTS")
    for name in ("interactive", "standard", "batch"):
        await clients.bus.js.delete_consumer(stream, f"router-{name}")
    later = request()
    await clients.ask(later)
    await clients.placed(later)
    assert await apply(clients.bus.nc, topology(pipeline)) == []
    assert (await clients.bus.js.consumer_info(stream, "router-standard")).config.opt_start_seq == 4


async def test_a_consumer_is_made_again_from_a_request_on_that_is_being_resumed(
    clients: Clients, pipeline: Subjects, one: Routing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its output cannot be read, it is delivered again."""
    reads, failures = recovery._read_progress, iter((True,))

    async def fails_once(*args: Any) -> dict[str, str]:
        if next(failures, False):
            raise ServingError(Code.broker_unavailable, "not yet")
        return await reads(*args)

    monkeypatch.setattr(recovery, "_read_progress", fails_once)
    await clients.stub()
    asked, later = request(id=new_request_id()), request()
    async with one.router.recovery._resume_turn:
        await clients.ask(msgspec.structs.replace(asked, interrupted_attempt=1))
        await eventually(lambda: asked.id in one.router.recovery.resuming)
        await clients.bus.js.delete_consumer(pipeline.stream("REQUESTS"), "router-standard")
        await clients.ask(later)
        await clients.placed(later)
    await clients.placed(asked, 2)
    await clients.acknowledged(2)
