"""Stopping a deployment in order, and what the terminal shows meanwhile."""

import asyncio
import time
from collections.abc import Callable, Sequence

from infra.launch.supervisor import Keeper

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
    for roles in STAGES:
        await _stop_together([keeper for keeper in keepers if keeper.child.role in roles], drain_s + GRACE_S, say)
    cut_short = insisted.is_set()
    insisting.cancel()
    say(
        f"stopped at once{'; open requests were cut off' if serving else ''}"
        if cut_short
        else f"stopped after {time.monotonic() - began:.1f} s"
    )
    return cut_short


async def _stop_together(keepers: Sequence[Keeper], timeout_s: float, say: Callable[[str], None]) -> None:
    if not keepers:
        return
    end = time.monotonic() + timeout_s
    pending = {asyncio.create_task(keeper.stop(timeout_s), name=keeper.child.name) for keeper in keepers}
    while pending:
        done, pending = await asyncio.wait(pending, timeout=REPORT_S)
        for task in done:
            task.result()
        if pending:
            names = ", ".join(sorted(task.get_name() for task in pending))
            say(f"  waiting for {names}: {max(0.0, end - time.monotonic()):.0f} s left")
