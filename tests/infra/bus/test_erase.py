"""Erasing one message after the other: in turn, with rests, and never more than may wait."""

import asyncio
import time
from typing import Any

import pytest
from nats.aio.msg import Msg

from penstock.infra.bus import forget as erasing
from penstock.infra.bus.forget import MOST_REST_S, SHARE, Ended, Eraser, erase, forget_messages
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.errors import ServingError
from penstock.schemas.requests import new_request_id
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import opened


async def test_one_is_erased_at_a_time_with_a_rest_that_is_longer_than_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rests, running = [0.0], [], 0
    sleep = asyncio.sleep

    async def erased(bus: Any, stream: str, seq: int) -> bool:
        nonlocal running
        running += 1
        assert running == 1
        await sleep(0)
        clock[0] += seq / 100
        running -= 1
        return True

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        clock[0] += seconds
        await sleep(0)

    monkeypatch.setattr(erasing, "erase", erased)
    monkeypatch.setattr(erasing.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(erasing.asyncio, "sleep", rest)
    eraser = Eraser(None)  # type: ignore[arg-type]
    assert all(await asyncio.gather(*(eraser.erase("s", seq) for seq in (1, 2, 1000))))
    assert rests == pytest.approx([0.01 * (1 / SHARE - 1), 0.02 * (1 / SHARE - 1)])  # nobody waits for the last one
    clock[0] += 0.5  # nothing was to be erased
    await eraser.erase("s", 1)
    assert rests[2] == pytest.approx(MOST_REST_S - 0.5)


async def test_beyond_those_that_may_wait_a_message_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    go = asyncio.Event()

    async def erased(bus: Any, stream: str, seq: int) -> bool:
        await go.wait()
        return True

    monkeypatch.setattr(erasing, "erase", erased)
    eraser = Eraser(None, 2)  # type: ignore[arg-type]
    under_way = [asyncio.create_task(eraser.erase("s", seq)) for seq in range(3)]
    await asyncio.sleep(0)
    assert not await eraser.erase("s", 3)
    go.set()
    assert await asyncio.gather(*under_way) == [True] * 3


class Electing:
    """A bus whose broker has no leader for the stream until it is asked for this many times; -1: it never has."""

    def __init__(self, times: int) -> None:
        self.nc, self._times = self, times

    async def request(self, subject: str, body: bytes, timeout: float) -> Msg:
        assert 0 < timeout <= erasing.ERASE_S
        self._times -= 1
        refused = b'{"error":{"code":503,"err_code":10008,"description":"JetStream system temporarily unavailable"}}'
        return Msg(None, data=refused if self._times else b'{"success":true}')  # type: ignore[arg-type]


async def test_an_election_is_waited_for_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await erase(Electing(3), "s", 1)  # type: ignore[arg-type]
    monkeypatch.setattr(erasing, "ERASE_S", 0.2)
    with pytest.raises(ServingError, match=r"message 1 of s was not erased: .* \(10008\)"):
        await erase(Electing(-1), "s", 1)  # type: ignore[arg-type]


async def test_a_request_whose_id_is_ahead_of_the_brokers_time_is_deleted_whole(
    broker: EmbeddedNats, subjects: Subjects
) -> None:
    """A gateway that had just started made it by its own clock: only the record was found, and the rest stayed."""
    ahead = new_request_id(time.time_ns() + 15_000_000_000)
    async with opened(broker, subjects) as bus:
        named = {"Nats-Msg-Id": ahead}
        await bus.js.publish(subjects.request("m", "standard", ahead), b"prompt", headers=named)
        await bus.js.publish(subjects.work("aggregated", "w"), b"job", headers={"Nats-Msg-Id": f"{ahead}:1"})
        record = subjects.done("default", "m", ahead)
        await bus.js.publish(record, b"record", headers=named)
        assert await forget_messages(bus, [Ended(ahead, record, time.time_ns(), no_store=False)], Eraser(bus)) == 3
        for stream in ("WORK", "REQUESTS", "DONE"):
            assert (await bus.js.stream_info(subjects.stream(stream))).state.messages == 0
