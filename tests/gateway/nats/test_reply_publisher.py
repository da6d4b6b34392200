"""Answers that nobody reads are not sent to their end, on a real broker."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.nats import reply_publisher
from gateway.nats.messages import AnswerMessage
from gateway.nats.reply_publisher import ReplyPublisher
from infra.broker.server import EmbeddedNats
from infra.bus.connection import Bus
from schemas.subjects import Subjects
from tests.infra.bus.support import opened


@pytest.fixture
async def bus(broker: EmbeddedNats, subjects: Subjects) -> AsyncIterator[Bus]:
    async with opened(broker, subjects) as bus:
        yield bus


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_publisher, "INTEREST_S", 0.3)
    monkeypatch.setattr(reply_publisher, "PROBE_S", 0.02)


def message(number: int) -> AnswerMessage:
    return AnswerMessage(number, b"%d" % number, final=False)


async def send_until_unread(replies: ReplyPublisher, bus: Bus, most: int, first: int = 0) -> int:
    """How many messages were sent."""
    for number in range(first, first + most):
        await replies.send(message(number))
        await bus.nc.flush()
        if replies.unread:
            return number - first + 1
    return most


async def test_an_answer_that_nobody_reads_is_given_up_soon(bus: Bus) -> None:
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


async def test_a_reader_that_is_away_for_a_moment_goes_on(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_publisher, "INTEREST_S", 10.0)
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
