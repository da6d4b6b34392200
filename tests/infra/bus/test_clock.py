"""One clock for a deployment: the broker's, as far as a machine's own differs by more than a second."""

import asyncio
import sys
import time
from collections.abc import Callable

import pytest

from penstock.infra.bus.clock import TOLERATED_NS, BrokerClock, steady_ns, unix_ns
from penstock.infra.bus.connection import Bus
from penstock.infra.nats_server.server import EmbeddedNats
from penstock.schemas.subjects import Subjects
from tests.infra.bus.support import opened

S = 1_000_000_000


class Machine:
    """Its clock runs ahead of the broker's by so much."""

    def __init__(self, ahead_s: float, real: Callable[[], int] = time.time_ns) -> None:
        self.ahead_ns = int(ahead_s * S)
        self._real = real

    def time_ns(self) -> int:
        return self._real() + self.ahead_ns


async def follow(clock: BrokerClock, bus: Bus) -> None:
    bus.clock = clock
    await bus.follow_clock()


@pytest.mark.parametrize("ahead_s", [-30.0, -1.5, 1.5, 30.0, 86_400.0])
async def test_a_machine_whose_clock_differs_takes_the_brokers(
    broker: EmbeddedNats, pipeline: Subjects, ahead_s: float
) -> None:
    machine = Machine(ahead_s)
    clock = BrokerClock(machine.time_ns)
    async with opened(broker, pipeline) as bus:
        await follow(clock, bus)
        assert abs(clock.now_ns() - time.time_ns()) < TOLERATED_NS


async def test_small_differences_stay(broker: EmbeddedNats, pipeline: Subjects) -> None:
    machine = Machine(0.4)
    clock = BrokerClock(machine.time_ns)
    async with opened(broker, pipeline) as bus:
        await follow(clock, bus)
    assert clock.offset_ns == 0


async def test_without_an_answer_the_machines_own_clock_is_used(broker: EmbeddedNats, pipeline: Subjects) -> None:
    clock = BrokerClock(Machine(30).time_ns)
    async with opened(broker, pipeline) as bus, asyncio.timeout(20):
        await clock.follow(bus.nc, bus.tasks, "no_such_stream")
    assert clock.offset_ns == 0


@pytest.mark.parametrize("step_s", [3600, -3600, -86_400])
def test_a_clock_that_is_set_changes_neither_deadlines_nor_what_was_stamped_before(
    step_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = BrokerClock()
    stamped_ns, now_ns = steady_ns(), clock.now_ns()
    assert abs(now_ns - time.time_ns()) < TOLERATED_NS
    machine = Machine(step_s, time.time_ns)
    monkeypatch.setattr(time, "time_ns", machine.time_ns)
    assert 0 <= clock.now_ns() - now_ns < 30 * S
    asked_ns = steady_ns()
    clock.note(clock.now_ns(), asked_ns, steady_ns())  # the broker agrees
    assert clock.offset_ns == 0
    assert 0 <= steady_ns() - stamped_ns < 30 * S


@pytest.mark.skipif(sys.platform != "linux", reason="needs a clock of Linux")
def test_time_passes_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    real, before_ns = time.clock_gettime_ns, steady_ns()
    monkeypatch.setattr(time, "clock_gettime_ns", lambda kind: real(kind) + 3600 * S * (kind == time.CLOCK_BOOTTIME))
    assert 3600 * S <= steady_ns() - before_ns < 3630 * S


def test_an_answer_that_took_too_long_says_nothing_and_a_later_one_does() -> None:
    clock = BrokerClock(lambda: 0)
    clock.note(30 * S, 0, 2 * S)
    assert clock.offset_ns == 0
    clock.note(30 * S, 0, S // 100)
    assert clock.now_ns() == pytest.approx(30 * S, abs=S // 100)
    clock.note(S // 10, 0, S // 100)  # its clock was set
    assert clock.offset_ns == 0


@pytest.mark.parametrize("text", ["2026-11-28T05:43:35.123456789Z", "2026-11-28T05:43:35.123456Z"])
def test_the_brokers_time_is_read_to_the_microsecond(text: str) -> None:
    assert unix_ns(text) == 1_795_844_615_123_456_000


def test_what_is_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="isoformat"):
        unix_ns("yesterday")
