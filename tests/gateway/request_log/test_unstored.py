"""Requests with ``no_store`` whose acceptance the broker does not confirm, on a real nats-server."""

import asyncio
import gc
from typing import Any

import msgspec
import pytest
from nats.aio.msg import Msg

from penstock.gateway.request_log.inflight import InflightRequest
from penstock.gateway.service.gateway import Gateway
from penstock.infra.bus import memory_storage
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.publisher import Ack, Refused
from penstock.infra.process import turns
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.requests import GenerateRequest
from penstock.schemas.tokens import Finish, TokenItem
from penstock.schemas.wire import pack_tokens
from tests.gateway.nats.support import Running

BODY = b'{"model": "tiny", "prompt": "a b c", "max_tokens": 4, "no_store": true}'
LATE = ServingError(Code.broker_unavailable, "not confirmed in time")


@pytest.fixture
async def cancelled(bus: Bus) -> list[bytes]:
    """What was asked to be cancelled."""
    found: list[bytes] = []

    async def take(message: Msg) -> None:
        found.append(message.data)

    await bus.nc.subscribe(bus.subjects.cancel, cb=take)
    await bus.nc.flush()
    return found


@pytest.fixture
async def unconfirmed(running: Running, monkeypatch: pytest.MonkeyPatch) -> GenerateRequest:
    """A request that is stored; the gateway does not hear of it."""
    gateway = running.gateway
    publish = gateway.cells[0].publisher.publish

    async def confirm_nothing(*args: Any, **more: Any) -> Ack:
        await publish(*args, **more)
        raise LATE

    with monkeypatch.context() as patch:
        patch.setattr(gateway.cells[0].publisher, "publish", confirm_nothing)
        request = (await gateway.prepare("completion", BODY)).request
        with pytest.raises(ServingError) as error:
            await gateway.submit(request, owner=False)
        assert error.value is LATE
    return request


async def content(bus: Bus, gateway: Gateway, request: GenerateRequest) -> bytes | None:
    return await memory_storage.find(bus, msgspec.structs.replace(request, gateway=gateway.id), "request")


async def test_it_is_not_cancelled_since_a_repeat_may_read_its_answer(
    bus: Bus, running: Running, unconfirmed: GenerateRequest, cancelled: list[bytes]
) -> None:
    repeat = await running.gateway.submit(unconfirmed, owner=False)
    await running.gateway.cells[0].unstored.sweep(asyncio.get_running_loop().time())
    await bus.nc.flush()
    assert isinstance(repeat, InflightRequest)
    assert not cancelled
    assert await content(bus, running.gateway, unconfirmed), "the repeat has not deleted it"
    assert [each.request.id for each in running.gateway.cells[0].unstored.open] == [unconfirmed.id]


async def test_it_is_cancelled_if_its_content_was_refused(
    bus: Bus, running: Running, cancelled: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = running.gateway

    async def refuse(*_: Any, **__: Any) -> "asyncio.Future[Ack]":
        future: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()
        future.set_exception(Refused(Code.broker_unavailable, "full"))
        return future

    monkeypatch.setattr(gateway.cells[0].unstored, "put", refuse)
    request = (await gateway.prepare("completion", BODY)).request
    with pytest.raises(Refused):
        await gateway.submit(request, owner=False)
    async with asyncio.timeout(10):
        while not cancelled:
            await bus.nc.flush()
            await asyncio.sleep(0)
    assert request.id.encode() in cancelled[0]


@pytest.mark.parametrize("confirmed", [True, False])
async def test_in_a_cluster_a_request_is_stored_behind_its_content_only(
    bus: Bus, running: Running, monkeypatch: pytest.MonkeyPatch, confirmed: bool
) -> None:
    """Or it could be accepted without: the leaders of the two streams come and go on their own."""
    gateway = running.gateway
    monkeypatch.setattr(Bus, "clustered", True)
    put, kept, sent = gateway.cells[0].unstored.put, asyncio.get_running_loop().create_future(), asyncio.Event()

    async def unconfirmed_yet(*args: Any) -> "asyncio.Future[Ack]":
        await (await put(*args))
        sent.set()
        return kept

    monkeypatch.setattr(gateway.cells[0].unstored, "put", unconfirmed_yet)
    request = (await gateway.prepare("completion", BODY)).request
    submitting = asyncio.create_task(gateway.submit(request, owner=False))
    await sent.wait()
    await bus.nc.flush()
    name = bus.subjects.stream("REQUESTS")
    assert (await bus.js.stream_info(name)).state.messages == 0
    if confirmed:
        kept.set_result(Ack(1, False))
        await submitting
    else:
        kept.set_exception(LATE)
        with pytest.raises(ServingError):
            await submitting
    assert (await bus.js.stream_info(name)).state.messages == confirmed


async def test_what_has_ended_is_put_again_until_its_grace_is_over(bus: Bus, running: Running) -> None:
    """Its client may have been cut off by the broker's restart, and asks for the answer again."""
    gateway = running.gateway
    prepared = await gateway.prepare("completion", BODY)
    inflight = await gateway.submit(prepared.request)
    inflight.feed(TokenItem(prepared.request.id, 1, 0, 0, pack_tokens([1, 2]), Finish("length")), 1)
    now = asyncio.get_running_loop().time()
    await gateway.cells[0].unstored.sweep(now)
    assert not list(gateway.cells[0].unstored.open)
    for again in (True, False):
        for stream in ("MEMORY_CONTENTS", "MEMORY_TOKENS"):
            await bus.nc.request(f"$JS.API.STREAM.PURGE.{bus.subjects.stream(stream)}", b"")
        assert await content(bus, gateway, prepared.request) is None
        await gateway.cells[0].unstored.put_again()
        assert bool(await content(bus, gateway, prepared.request)) is again
        await gateway.cells[0].unstored.sweep(now + gateway.settings.no_store_grace_s + 1)


async def ended(gateway: Gateway) -> GenerateRequest:
    """A request that has ended, of which its client has everything."""
    inflight = await gateway.submit((await gateway.prepare("completion", BODY)).request)
    inflight.feed(TokenItem(inflight.request.id, 1, 0, 0, pack_tokens([1, 2]), Finish("length")), 1)
    gateway.release(inflight)
    return inflight.request


async def test_garbage_collection_has_nothing_to_visit_of_requests_in_their_grace_period(running: Running) -> None:
    """Tens of thousands are, at a thousand requests a second."""
    asked = [(await ended(running.gateway)).id for _ in range(20)]
    assert len(running.gateway.cells[0].unstored) == len(asked)
    gc.collect()
    kinds = (InflightRequest, GenerateRequest)  # by type: `isinstance` asks some objects, which warn
    found = [each for each in gc.get_objects() if type(each) in kinds]
    assert not [each for each in found if (each if isinstance(each, GenerateRequest) else each.request).id in asked]


async def test_other_tasks_run_while_many_grace_periods_end(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, unstored = running.gateway, running.gateway.cells[0].unstored
    monkeypatch.setattr(turns, "SLICE_S", 0.0)
    for _ in range(20):
        await ended(gateway)
    seen = set()

    async def look() -> None:
        while len(unstored):
            seen.add(len(unstored))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    await unstored.sweep(asyncio.get_running_loop().time() + gateway.settings.no_store_grace_s + 1)
    await looking
    assert len(seen) > 5


async def test_a_repeat_of_what_has_ended_does_not_end_its_grace_period(bus: Bus, running: Running) -> None:
    """The repeat reads the first one's answer, out of memory storage."""
    gateway = running.gateway
    request = await ended(gateway)
    gateway.release(await gateway.submit(request))
    now = asyncio.get_running_loop().time()
    await gateway.cells[0].unstored.sweep(now)
    assert await content(bus, gateway, request)
    await gateway.cells[0].unstored.sweep(now + gateway.settings.no_store_grace_s + 1)
    assert await content(bus, gateway, request) is None


async def test_other_tasks_run_while_contents_of_other_gateways_are_gone_through(
    bus: Bus, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own are passed over: tens of thousands may be in memory storage."""
    unstored = running.gateway.cells[0].unstored
    asked: list[str] = []
    turns_between = 0

    async def subjects() -> list[str]:
        own = [bus.subjects.contents(running.gateway.id, f"r{number}", "request") for number in range(50)]
        others = [bus.subjects.contents("other-1", f"r{number}", "request") for number in range(50)]
        return [*own, bus.subjects.tokens(f"memory.{running.gateway.id}"), *others]

    async def answers(_: Bus, gateway: str) -> bool:
        asked.append(gateway)
        return True

    async def look() -> None:
        nonlocal turns_between
        while not asked:
            turns_between += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(turns, "SLICE_S", 0.0)
    monkeypatch.setattr(unstored.streams, "subjects", subjects)
    monkeypatch.setattr(memory_storage, "answers", answers)
    looking = asyncio.create_task(look())
    await asyncio.sleep(0)
    await unstored.sweep_others(bus.clock.now_ns())
    await looking
    assert asked == ["other-1"]
    assert turns_between > 10
