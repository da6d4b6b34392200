"""Stopping a deployment in order, and what the terminal shows meanwhile."""

import asyncio
import time
from collections.abc import Callable, Sequence

from penstock.infra.process.supervisor import Keeper

GRACE_S = 5.0  # beyond drain_s, to close connections
REPORT_S = 5.0  # between two lines about processes that are still awaited
# Gateways first, since clients are connected to them; then routers and workers, readers of the log, and the broker.
STAGES = (("gateway",), ("router", "worker"), ("trace", "dashboard"), ("nats",))


async def stop_in_order(
    keepers: Sequence[Keeper],
    drain_s: float,
    insisted: asyncio.Event,
    say: Callable[[str], None],
    *,
    serving: bool = True,
) -> bool:
    """Stop all processes; whether ``insisted`` cut it short, by killing them.

    Args:
        serving: requests may be open.
        say: takes each line for the user.
    """
    began = time.monotonic()

    def kill(task: asyncio.Task[bool]) -> None:
        if not task.cancelled():
            for keeper in keepers:
                keeper.kill()

    insisting = asyncio.create_task(insisted.wait(), name="second-signal")
    insisting.add_done_callback(kill)
    awaited = f"waiting up to {drain_s:g} s for open requests" if serving else "the start is given up"
    say(f"stopping: {awaited}; Ctrl-C again to stop at once")
    deadline = began + drain_s  # one for all: what a gateway has used of it is gone for workers
    for roles in STAGES:
        await _stop_together([keeper for keeper in keepers if keeper.child.role in roles], deadline, say)
    cut_short = insisted.is_set()
    insisting.cancel()
    say(
        f"stopped at once{'; open requests were cut off' if serving else ''}"
        if cut_short
        else f"stopped after {time.monotonic() - began:.1f} s"
    )
    return cut_short


async def _stop_together(keepers: Sequence[Keeper], deadline: float, say: Callable[[str], None]) -> None:
    if not keepers:
        return
    now = reported = time.monotonic()
    kill_s = max(deadline, now) + GRACE_S - now
    pending = {asyncio.create_task(keeper.stop(kill_s), name=keeper.child.name) for keeper in keepers}
    hurried = False
    while pending:
        until = reported + REPORT_S if hurried else min(deadline, reported + REPORT_S)
        done, pending = await asyncio.wait(pending, timeout=max(0.0, until - now))
        for task in done:
            task.result()
        now = time.monotonic()
        if not hurried and now >= deadline:
            hurried = True
            for keeper in keepers:
                keeper.hurry()
        if pending and now >= reported + REPORT_S:
            reported = now
            names = ", ".join(sorted(task.get_name() for task in pending))
            say(f"  waiting for {names}: {max(0.0, deadline - now):.0f} s left")
