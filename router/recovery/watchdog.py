"""Requests without progress: their worker's lease is renewed, but its engine makes no steps.

A worker that dies loses its lease, and its requests go elsewhere. A worker whose engine hangs (in a kernel, a driver or
a lock) goes on renewing it, and nothing else would notice before the requests' deadlines. So workers count their
engine's steps, and renewals carry the count. Waiting behind others, a long prompt and a slow reader are no stalls:
the engine makes steps meanwhile. Requests that the router holds are at no worker, and are not watched.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping

import structlog

from penstock.infra.bus.connection import Bus
from penstock.router.state.cluster_state import ClusterState
from penstock.router.state.load import ActiveRequest
from penstock.router.state.metrics import Metrics
from penstock.schemas import fleet

log = structlog.get_logger("router")

CHECK_S = 1.0
LEAST_S = 2 * fleet.RENEW_S  # a count is known once a renewal

_Watched = tuple[str, int, str]  # request, attempt, worker


class Watchdog:
    """Which requests are stalled. Pure.

    A request is stalled once no step of its worker's engine was seen for ``after_s``, all of which it was there.
    Workers that count no steps (of diffusion) are not watched.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._steps: dict[str, tuple[int, int]] = {}
        self._quiet_since: dict[_Watched, float] = {}  # requests at workers that made no step since
        self._stalled: dict[str, float] = {}  # worker -> when it was last reported

    def check(
        self, steps: Mapping[str, tuple[int, int]], active: Iterable[ActiveRequest], now: float
    ) -> list[ActiveRequest]:
        """Requests that are stalled; each again after another ``after_s``, if it is still there.

        Args:
            steps: of each registered worker: the epoch of its cache, and the steps of its engine (-1: unknown).
            active: requests that were sent to workers.
            now: monotonic time, seconds.
        """
        quiet = {name for name, count in steps.items() if count[1] >= 0 and self._steps.get(name) == count}
        self._steps = dict(steps)
        self._stalled = {w: at for w, at in self._stalled.items() if w in quiet and now - at < self._after_s}
        if not quiet:
            self._quiet_since.clear()
            return []
        watched = {(e.request, e.attempt, e.worker): e for e in active if e.echoed and e.worker in quiet}
        self._quiet_since = {key: self._quiet_since.get(key, now) for key in watched}
        stalled = [key for key, since in self._quiet_since.items() if now - since >= self._after_s]
        self._quiet_since.update(dict.fromkeys(stalled, now))
        self._stalled.update((worker, now) for _, _, worker in stalled)
        return [watched[key] for key in stalled]

    def stalled_workers(self) -> frozenset[str]:
        """Workers with stalled requests, to be used only if no other is left.

        A worker leaves the set with its next step, or after ``after_s``: without work it makes none.
        """
        return frozenset(self._stalled)

    def forget(self) -> None:
        """Begin anew: counts were not followed for a while."""
        self._steps.clear()
        self._quiet_since.clear()


async def watch(
    bus: Bus, cluster: ClusterState, metrics: Metrics, after_s: float, on_stalled: Callable[[ActiveRequest, str], None]
) -> None:
    """Check once a second, and report stalled requests. Never returns.

    Args:
        after_s: at least two renewals of a lease, or a slow renewal would be a stall.
        on_stalled: called with the request and why.
    """
    after_s = max(after_s, LEAST_S)
    watchdog = Watchdog(after_s)
    while True:
        await asyncio.sleep(CHECK_S)
        if not bus.connected:
            watchdog.forget()
            continue
        stalled = watchdog.check(cluster.steps(), cluster.tracker.active(), time.monotonic())
        cluster.stalled = watchdog.stalled_workers()
        for entry in stalled:
            stage = entry.role or "aggregated"
            why = f"no step of the engine for {after_s:g} s at {stage} worker {entry.worker}"
            log.warning(
                "request_stalled", request=entry.request, attempt=entry.attempt, worker=entry.worker, stage=stage
            )
            metrics.stalled.labels(stage).inc()
            on_stalled(entry, why)
