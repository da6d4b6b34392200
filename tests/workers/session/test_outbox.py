"""Output that is sent again until the server surely has it: kept, resent in order, trimmed, bounded."""

import asyncio
from functools import partial
from typing import Any

import pytest
from nats.errors import Error as NatsError

from penstock.infra.bus.direct_get import read
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import Code, ServingError
from penstock.schemas.subjects import Subjects
from penstock.workers.session import lease as module
from penstock.workers.session.lease import KEEP_S, Outbox
from tests.infra.bus.support import eventually, opened


class FakeBus:
    """Notes what is published; also the client itself."""

    max_message = 1000
    clustered = False

    def __init__(self) -> None:
        self.connected = True
        self.reconnects = 0
        self.sent: list[str] = []
        self.fail_at = ""
        self.pauses = False

    @property
    def nc(self) -> "FakeBus":
        return self

    async def publish(self, subject: str, payload: bytes, headers: dict[str, str]) -> None:
        if self.pauses:
            await asyncio.sleep(0)
        if headers["Nats-Msg-Id"] == self.fail_at:
            raise NatsError("link broke")
        self.sent.append(headers["Nats-Msg-Id"])


class Rig:
    def __init__(self) -> None:
        self.now = 100.0
        self.trusted = True
        self.bus = FakeBus()
        self.outbox = Outbox(self.bus, lambda: self.trusted, clock=lambda: self.now)  # type: ignore[arg-type]
        self.count = 0

    async def send(self, count: int = 1, size: int = 1) -> None:
        for _ in range(count):
            self.count += 1
            await self.outbox.send("s", bytes(size), str(self.count))

    async def resent(self) -> list[str]:
        self.bus.sent.clear()
        await self.outbox.resend()
        return self.bus.sent

    def reconnect(self) -> None:
        self.bus.connected = True
        self.bus.reconnects += 1


def numbers(first: int, last: int) -> list[str]:
    return [str(number) for number in range(first, last + 1)]


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_with_the_gate_open_messages_go_out_at_once(rig: Rig) -> None:
    await rig.send(3)
    assert rig.bus.sent == numbers(1, 3)
    assert rig.outbox.unsent_bytes == 0


@pytest.mark.parametrize("shut", ["disconnected", "untrusted", "new link"])
async def test_with_the_gate_shut_they_are_kept_and_sent_in_order_when_it_opens(rig: Rig, shut: str) -> None:
    await rig.send(2)
    rig.bus.connected = shut != "disconnected"
    rig.trusted = shut != "untrusted"
    rig.bus.reconnects += shut == "new link"  # the hooks have not run yet, so what was lost goes first
    await rig.send(3, size=10)
    assert rig.bus.sent == numbers(1, 2)
    assert rig.outbox.unsent_bytes == 30
    rig.reconnect()
    rig.trusted = True
    await rig.send()
    assert rig.bus.sent == numbers(1, 2), "the gate opens with a resend, not before"
    assert await rig.resent() == numbers(1, 6)
    assert rig.outbox.unsent_bytes == 0
    await rig.send()
    assert rig.bus.sent[-1] == "7"


async def test_after_a_while_on_a_trusted_link_messages_are_forgotten(rig: Rig) -> None:
    await rig.send(3)
    rig.now += KEEP_S - 1
    await rig.send()
    rig.now += 1.5
    await rig.send()
    assert await rig.resent() == numbers(4, 5)


@pytest.mark.parametrize("shut", ["disconnected", "untrusted"])
async def test_what_was_sent_just_before_an_outage_is_kept_however_long_it_lasts(rig: Rig, shut: str) -> None:
    """Those are the messages that the broken link lost."""
    await rig.send(2)
    rig.bus.connected = shut != "disconnected"
    rig.trusted = shut != "untrusted"
    for _ in range(5):
        rig.now += KEEP_S
        await rig.send()
    rig.reconnect()
    rig.trusted = True
    assert await rig.resent() == numbers(1, 7)
    rig.now += KEEP_S - 0.5
    await rig.send()
    assert await rig.resent() == numbers(1, 8), "resent messages are as fresh as new ones"


async def test_what_is_sent_during_a_resend_waits_for_its_turn(rig: Rig) -> None:
    rig.bus.connected = False
    await rig.send(5)
    rig.reconnect()
    rig.bus.pauses = True
    resending = asyncio.create_task(rig.outbox.resend())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await rig.send(2)
    await resending
    assert rig.bus.sent == numbers(1, 7)


async def test_a_resend_that_fails_is_done_again_as_a_whole(rig: Rig) -> None:
    rig.bus.connected = False
    await rig.send(4)
    rig.reconnect()
    rig.bus.fail_at = "3"
    with pytest.raises(NatsError):
        await rig.outbox.resend()
    rig.now += 10 * KEEP_S
    await rig.send()
    assert rig.bus.sent == numbers(1, 2)
    rig.bus.fail_at = ""
    assert await rig.resent() == numbers(1, 5)


async def test_beyond_its_limit_it_makes_the_sender_wait_until_the_gate_opens(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIMIT_BYTES", 100)
    rig.bus.connected = False
    await rig.send(10, size=10)
    blocked = asyncio.create_task(rig.send(2, size=10))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not blocked.done()
    assert rig.outbox.unsent_bytes == 110
    rig.reconnect()
    await rig.outbox.resend()
    await asyncio.wait_for(blocked, 5)
    assert rig.bus.sent == numbers(1, 12)


async def test_dropping_frees_the_sender_and_forgets_everything(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_BYTES", 5)
    rig.trusted = False
    blocked = asyncio.create_task(rig.send(size=10))
    await asyncio.sleep(0)
    rig.outbox.clear()
    await asyncio.wait_for(blocked, 5)
    assert rig.outbox.unsent_bytes == 0
    assert await rig.resent() == []


async def test_a_message_that_never_fits_is_refused_and_blocks_nothing(rig: Rig) -> None:
    with pytest.raises(ServingError) as caught:
        await rig.send(size=1001)
    assert caught.value.code is Code.body_too_large
    await rig.send()
    assert await rig.resent() == ["2"]


async def test_every_message_is_stored_once_although_the_server_is_killed(make_broker: Any, subjects: Subjects) -> None:
    server: EmbeddedNats = make_broker()
    await server.start()
    async with opened(server, subjects) as bus:
        outbox = Outbox(bus, lambda: True)
        bus.on_reconnect.append(outbox.resend)
        subject = subjects.tokens("gw")
        sent = 0

        async def produce() -> None:
            nonlocal sent
            for number in range(1500):
                await outbox.send(subject, b"%d" % number, f"w:{number}")
                sent += 1
                if number % 4 == 0:
                    await asyncio.sleep(0.001)

        producing = asyncio.create_task(produce())

        def passed(limit: int) -> bool:
            return sent > limit

        for limit in (300, 700):
            await eventually(partial(passed, limit))
            server.kill()
            await eventually(lambda: not bus.connected)
            await server.start()
            await eventually(lambda: bus.connected)
        await producing
        await eventually(lambda: not outbox.unsent_bytes)
        await bus.js.publish(subject, b"-1")
        stored = [int(entry.data) async for entry in read(bus, subjects.stream("TOKENS"), subject)]
        assert sorted(stored) == list(range(-1, 1500))
