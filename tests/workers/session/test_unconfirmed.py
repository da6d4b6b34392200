"""In a cluster output waits for its stream's acknowledgement: sent again until then, in order, bounded."""

import asyncio
from typing import Any, NamedTuple

import pytest

from penstock.workers.session import lease as module
from penstock.workers.session.lease import RESEND_S, Outbox


class Answer(NamedTuple):
    subject: str
    data: bytes


class FakeBus:
    """A clustered one; also the client itself."""

    max_message = 1000
    clustered = True

    def __init__(self) -> None:
        self.connected = True
        self.reconnects = 0
        self.sent: list[tuple[str, str]] = []  # message id, reply subject
        self.answered: Any = None

    @property
    def nc(self) -> "FakeBus":
        return self

    def new_inbox(self) -> str:
        return "_INBOX_worker.x"

    async def subscribe(self, subject: str, cb: Any) -> None:
        assert subject == "_INBOX_worker.x.*"
        self.answered = cb

    async def publish(self, subject: str, payload: bytes, *, reply: str, headers: dict[str, str]) -> None:
        self.sent.append((headers["Nats-Msg-Id"], reply))

    def flush_consumed(self) -> list[str]:
        """Ids sent since the last call."""
        names, self.sent = [name for name, _ in self.sent], []
        return names


class Rig:
    def __init__(self, *, clustered: bool) -> None:
        self.now = 100.0
        self.trusted = True
        self.bus = FakeBus()
        self.bus.clustered = clustered
        self.outbox = Outbox(
            self.bus,  # type: ignore[arg-type]
            lambda: self.trusted,
            clock=lambda: self.now,
            acknowledged=not clustered,
        )
        self.replies: dict[str, str] = {}

    async def send(self, *names: str, size: int = 1) -> None:
        for name in names:
            await self.outbox.send("s", bytes(size), name)
            self.replies[name] = self.bus.sent[-1][1] if self.bus.sent else ""

    async def acknowledge(self, name: str, data: bytes = b'{"stream":"S","seq":1}') -> None:
        await self.bus.answered(Answer(self.replies[name], data))

    async def later(self, seconds: float = RESEND_S) -> list[str]:
        self.now += seconds
        await self.outbox.confirm()
        return self.bus.flush_consumed()


@pytest.fixture(params=["cluster", "power"])
def rig(request: pytest.FixtureRequest) -> Rig:
    """On a cluster, or on one server that writes each message to the disk."""
    return Rig(clustered=request.param == "cluster")


async def test_what_is_not_acknowledged_is_sent_again_in_order_until_it_is(rig: Rig) -> None:
    await rig.send("1", "2", "3")
    assert rig.bus.flush_consumed() == ["1", "2", "3"]
    await rig.acknowledge("2")
    assert await rig.later(RESEND_S / 2) == []
    assert await rig.later() == ["1", "3"]
    assert await rig.later() == ["1", "3"]
    await rig.acknowledge("1")
    await rig.acknowledge("3", b'{"stream":"S","seq":3,"duplicate":true}')
    assert await rig.later(3600.0) == []


@pytest.mark.parametrize("answer", [b"", b'{"error":{"code":503,"err_code":10008,"description":"no leader"}}'])
async def test_no_leader_and_a_refusal_are_no_acknowledgement(rig: Rig, answer: bytes) -> None:
    await rig.send("1")
    await rig.acknowledge("1", answer)
    rig.bus.flush_consumed()
    assert await rig.later() == ["1"]


async def test_after_a_reconnect_the_unacknowledged_go_before_what_was_kept_back(rig: Rig) -> None:
    await rig.send("1", "2")
    await rig.acknowledge("1")
    rig.bus.connected = False
    await rig.send("3")
    assert await rig.later() == ["1", "2"]  # those sent before; nothing while the gate is shut
    rig.bus.connected = True
    rig.bus.reconnects += 1
    await rig.outbox.resend()
    assert rig.bus.flush_consumed() == ["2", "3"]
    assert await rig.later() == ["2", "3"]


async def test_a_stream_that_acknowledges_nothing_makes_the_engine_wait_within_bounds(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIMIT_BYTES", 1000)
    await rig.send("1", "2", size=500)
    blocked = asyncio.create_task(rig.outbox.send("s", bytes(500), "3"))
    await asyncio.sleep(0)
    assert not blocked.done()
    await rig.acknowledge("1")
    async with asyncio.timeout(5):
        await blocked


async def test_a_lost_lease_forgets_them(rig: Rig) -> None:
    await rig.send("1")
    rig.bus.flush_consumed()
    rig.outbox.clear()
    assert await rig.later() == []
    await rig.acknowledge("1")


async def test_what_was_sent_is_stored_once_all_of_it_is_acknowledged_and_what_follows_does_not_count(rig: Rig) -> None:
    assert await rig.outbox.stored(0.0)
    await rig.send("1", "2")
    stored = asyncio.create_task(rig.outbox.stored(30.0))
    await asyncio.sleep(0)
    await rig.send("3")
    await rig.acknowledge("2")
    await asyncio.sleep(0)
    assert not stored.done()
    await rig.acknowledge("1")
    assert await stored
    assert not await rig.outbox.stored(0.0)


async def test_what_is_kept_back_is_not_stored_before_it_was_sent(rig: Rig) -> None:
    rig.bus.connected = False
    await rig.send("1")
    assert not await rig.outbox.stored(0.0)
    rig.bus.connected = True
    rig.bus.reconnects += 1
    stored = asyncio.create_task(rig.outbox.stored(30.0))
    await rig.outbox.resend()
    assert not stored.done()
    rig.replies["1"] = rig.bus.sent[-1][1]
    await rig.acknowledge("1")
    assert await stored
