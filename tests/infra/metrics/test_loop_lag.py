"""The gauge that shows when something blocks an event loop."""

import asyncio
import time

import pytest

from penstock.infra.metrics.scope import MetricScope, loop_lag
from penstock.infra.process.turns import LAG_EVERY_S, LAG_WINDOW_S, LoopLag, ThreadTimes, Worst
from tests.infra.bus.support import eventually


async def test_whatever_blocks_the_loop_shows_in_the_metrics() -> None:
    scope = MetricScope(prefix="penstock_router")
    lag = loop_lag(scope)

    def shown(name: str) -> float:
        return scope.registry.get_sample_value(f"penstock_router_loop_{name}") or 0.0

    watching = asyncio.create_task(lag.watch())
    await asyncio.sleep(0.03)
    before, late = shown("lag_seconds"), shown("late_total")
    time.sleep(before + 0.4)  # noqa: ASYNC251 - this is what it is for
    await eventually(lambda: shown("lag_seconds") > before)
    watching.cancel()
    assert shown("lag_seconds") >= before + 0.4 - LAG_EVERY_S - 0.05
    assert shown("late_total") == late + 1


async def test_work_of_the_loop_shows_in_its_processor_time_and_a_pause_of_the_process_does_not() -> None:
    lag = LoopLag()
    watching = asyncio.create_task(lag.watch())
    await asyncio.sleep(0.01)
    time.sleep(0.6)  # noqa: ASYNC251 - as if something else had the core
    await eventually(lambda: lag.worst.value > 0.3)
    assert lag.worst_cpu.value < 0.3
    until = time.thread_time() + 0.6
    while time.thread_time() < until:
        pass
    await eventually(lambda: lag.worst_cpu.value > 0.3)
    watching.cancel()


def test_a_lag_is_shown_without_the_threads_waits_for_a_core_and_never_more_than_it_ran() -> None:
    late = 0

    def count() -> None:
        nonlocal late
        late += 1

    for seconds, ran, waited, expected in (
        (0.02, 0.05, 0.015, 0.005),
        (0.02, 0.001, 0.0, 0.001),
        (0.004, 1.0, 0.01, 0),
    ):
        lag = LoopLag(count)
        lag.measured(seconds, ran, waited)
        assert lag.worst.value == seconds
        assert lag.worst_cpu.value == pytest.approx(expected)
    assert late == 2


def test_where_the_system_counts_no_waits_the_thread_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: object, **options: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)
    times = ThreadTimes()
    assert times.lap()[1] == 0.0
    times.close()


def test_the_worst_is_shown_for_one_window_at_least_and_two_at_most() -> None:
    now = 100.0
    worst = Worst(lambda: now)
    worst.add(0.5)
    worst.add(0.1)
    for seconds, value in ((0.0, 0.5), (LAG_WINDOW_S - 1, 0.5), (LAG_WINDOW_S, 0.5), (2 * LAG_WINDOW_S - 1, 0.5)):
        now = 100.0 + seconds
        assert worst.value == value
    now = 100.0 + 2 * LAG_WINDOW_S
    assert worst.value == 0.0
    worst.add(0.2)
    now += 10 * LAG_WINDOW_S
    assert worst.value == 0.0
