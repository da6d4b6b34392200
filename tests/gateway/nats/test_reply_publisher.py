"""Answers that nobody reads are not sent to their end, on a real broker."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import nats
import pytest
from nats.aio.client import Client

from penstock.gateway.nats import delivery
from penstock.gateway.nats.delivery import ReplyPublisher
from penstock.gateway.nats.messages import DeliveredMessage
from penstock.infra.bus.connection import Bus
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import opened


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "INTEREST_S", 0.3)
    monkeypatch.setattr(delivery, "PROBE_S", 0.02)
    monkeypatch.setattr(delivery, "TRACED_S", 0.0)


def message(number: int) -> DeliveredMessage:
    return DeliveredMessage(number, b"%d" % number, final=False)


async def send_until_unread(replies: ReplyPublisher, bus: Bus, most: int, first: int = 0) -> int:
    """How many messages were sent."""
    for number in range(first, first + most):
        await replies.send(message(number))
        await bus.nc.flush()
        if replies.unread:
            return number - first + 1
    return most


async def test_an_answer_without_a_reader_is_given_up_soon(bus: Bus) -> None:
    replies = ReplyPublisher(bus, [bus.nc.new_inbox()], check_interest=True)
    try:
        assert await send_until_unread(replies, bus, 100) < 40
    finally:
        await replies.close()


async def test_a_reader_gets_every_message_and_the_answer_is_given_up_once_it_has_gone(bus: Bus) -> None:
    inbox = bus.nc.new_inbox()
    got = list[bytes]()

    async def take(received: Any) -> None:
        got.append(received.data)

    reader = await bus.nc.subscribe(inbox, cb=take)
    replies = ReplyPublisher(bus, [inbox], check_interest=True)
    try:
        assert await send_until_unread(replies, bus, 200) == 200
        await bus.nc.flush()
        assert got == [b"%d" % number for number in range(200)]
        await reader.unsubscribe()
        assert await send_until_unread(replies, bus, 200, first=200) < 80
    finally:
        await replies.close()


async def test_a_reader_that_is_away_for_a_moment_continues(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "INTEREST_S", 10.0)
    inbox, got = bus.nc.new_inbox(), list[bytes]()
    replies = ReplyPublisher(bus, [inbox], check_interest=True)

    async def take(received: Any) -> None:
        got.append(received.data)

    try:
        await replies.send(message(0))
        while not replies.waits_for_subscriber:
            await bus.nc.flush()
        await bus.nc.subscribe(inbox, cb=take)
        assert await send_until_unread(replies, bus, 50, first=1) == 50
        await bus.nc.flush()
        assert got == [b"%d" % number for number in range(1, 51)]
    finally:
        await replies.close()


@pytest.fixture
async def accounts(make_broker: Callable[..., EmbeddedNats]) -> AsyncIterator[tuple[Bus, Client]]:
    """The pipeline's connection, and a client's in an account of its own."""
    server = make_broker("accounts")
    await server.start()
    async with opened(server, Subjects()) as bus:
        client = await nats.connect(server.url("client"))
        try:
            yield bus, client
        finally:
            await client.close()


async def mapped_read(bus: Bus, client: Client, inbox: str) -> ReplyPublisher:
    """What a gateway answers a read from another account with."""
    asked = await bus.nc.subscribe("ps.read.default")
    await bus.nc.flush()
    await client.publish("ps.read", b"{}", reply=inbox)
    reply = (await asked.next_msg(timeout=10)).reply
    assert reply.startswith("_R_.")
    await asked.unsubscribe()
    return ReplyPublisher(bus, [reply], durable=False, check_interest=True)


async def test_a_reader_in_another_account_gets_every_message_and_is_known_to_be_gone(
    accounts: tuple[Bus, Client],
) -> None:
    bus, client = accounts
    inbox, named = client.new_inbox(), list[str]()
    reader = await client.subscribe(inbox)
    replies = await mapped_read(bus, client, inbox)
    replies.on_inbox = named.append
    try:
        assert await send_until_unread(replies, bus, 200) == 200
        assert [(await reader.next_msg(timeout=10)).data for _ in range(200)] == [b"%d" % n for n in range(200)]
        assert named == [inbox]
        await reader.unsubscribe()
        await client.flush()
        assert await send_until_unread(replies, bus, 300, first=200) < 100
    finally:
        await replies.close()


async def test_a_reader_in_another_account_that_disconnects_is_known_to_be_gone(
    accounts: tuple[Bus, Client],
) -> None:
    bus, client = accounts
    inbox = client.new_inbox()
    await client.subscribe(inbox)
    replies = await mapped_read(bus, client, inbox)
    try:
        assert await send_until_unread(replies, bus, 100) == 100
        await client.close()
        assert await send_until_unread(replies, bus, 300, first=100) < 100
    finally:
        await replies.close()


async def test_a_refusal_waits_for_its_client_if_the_broker_was_away(
    bus: Bus, broker: EmbeddedNats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "INTEREST_S", 30.0)
    inbox = bus.nc.new_inbox()
    replies = ReplyPublisher(bus, [inbox])
    links = bus.reconnects
    bus.nc.link.close()
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        while bus.reconnects == links or not bus.connected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        tasks.create_task(replies.refuse(message(-1)))
        await bus.nc.flush()
        client = await nats.connect(broker.url())
        subscription = await client.subscribe(inbox)
        assert (await subscription.next_msg(timeout=20)).data == b"-1"
        await client.close()


async def test_a_broker_that_does_not_answer_is_no_failure_of_the_gateway(
    broker: EmbeddedNats, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "FLUSH_S", 0.05)
    replies = ReplyPublisher(bus, [bus.nc.new_inbox()], check_interest=True)
    replies.require_subscriber()
    assert broker.pid
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        await replies.refuse(message(0))
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    assert not replies.unread, "whether anybody reads is unknown"
    await replies.close()
