"""The gauge that shows when something blocks an event loop."""

import asyncio
import time

from infra.bus.loop_lag import EVERY_S, SLICE_S, WINDOW_S, LoopLag, TimeSlice, gauge
from infra.metrics.scope import MetricScope
from tests.infra.bus.support import eventually


async def test_whatever_blocks_the_loop_shows_in_the_gauge() -> None:
    scope = MetricScope(prefix="penstock_router")
    lag = gauge(scope)
    watching = asyncio.create_task(lag.watch())
    await asyncio.sleep(0.03)
    before = lag.worst_s
    time.sleep(before + 0.4)  # noqa: ASYNC251 - this is what it is for
    await eventually(lambda: lag.worst_s > before)
    watching.cancel()
    shown = scope.registry.get_sample_value("penstock_router_loop_lag_seconds")
    assert shown == lag.worst_s
    assert shown >= before + 0.4 - EVERY_S - 0.05


def test_the_worst_is_shown_for_one_window_at_least_and_two_at_most() -> None:
    now = 100.0
    lag = LoopLag(lambda: now)
    lag.late(0.5)
    lag.late(0.1)
    for seconds, worst in ((0.0, 0.5), (WINDOW_S - 1, 0.5), (WINDOW_S, 0.5), (2 * WINDOW_S - 1, 0.5)):
        now = 100.0 + seconds
        assert lag.worst_s == worst
    now = 100.0 + 2 * WINDOW_S
    assert lag.worst_s == 0.0
    lag.late(0.2)
    now += 10 * WINDOW_S
    assert lag.worst_s == 0.0


async def test_a_short_turn_is_not_given_away_however_long_the_loop_was_idle_before() -> None:
    time_slice, others = TimeSlice(), 0

    def other() -> None:
        nonlocal others
        others += 1

    for _ in range(3):
        await asyncio.sleep(2 * SLICE_S)
        asyncio.get_running_loop().call_soon(other)
        before = others
        await time_slice.yield_if_spent()
        await time_slice.yield_if_spent()
        assert others == before, "what one turn publishes leaves in one write"


async def test_a_long_turn_lets_others_run() -> None:
    time_slice, ran = TimeSlice(), asyncio.Event()
    await time_slice.yield_if_spent()
    asyncio.get_running_loop().call_soon(ran.set)
    time.sleep(2 * SLICE_S)  # noqa: ASYNC251 - work
    await time_slice.yield_if_spent()
    assert ran.is_set()
