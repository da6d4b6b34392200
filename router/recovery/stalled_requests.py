"""Requests without progress: their worker renews its lease, but its engine makes no steps, or is late.

A worker that dies loses its lease, and its requests go elsewhere. A worker whose engine hangs (in a kernel, a driver or
a lock) keeps renewing it, and nothing else would notice before the requests' deadlines. So workers count their
engine's steps, and renewals carry the count. Waiting behind others, a long prompt and a slow reader are not stalls:
the engine makes steps meanwhile. Requests that the router holds are at no worker, and are not watched.

A worker is late if it has computed no prompt for ``LATE`` times as long as its oldest uncomputed one should take, by
what was learnt of the model's workers, and for a least time, while another worker is idle. It may be slowed down by a
neighbour, throttled or stuck. Its requests are placed again. What it was sent last is the least likely to have begun,
so that goes first, one request for each idle target. A wrong guess costs computing a prompt twice, and never the
answer: the attempt is fenced, as that of a lost worker is.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import structlog

from penstock.infra.bus.connection import Bus
from penstock.router.state.attempts import ActiveRequest
from penstock.router.state.cluster_state import ClusterState
from penstock.router.state.holders import TargetId
from penstock.router.state.load_tracker import LoadTracker
from penstock.router.state.router_metrics import Metrics
from penstock.router.state.target_loads import Task
from penstock.schemas import fleet
from penstock.schemas.fleet import WorkerState

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
        """Start over: counts were not followed for a while."""
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


LATE = 4.0
LEAST_SAMPLES = 8  # prompts of a model; before, nothing says how long one should take
ROLES = ("aggregated", "prefill")  # that compute prompts


class Late(NamedTuple):
    """A request to be placed again. ``seconds``: for so long its worker has computed no prompt."""

    entry: ActiveRequest
    seconds: float


def find_late(tracker: LoadTracker, now_ns: int, least_s: float) -> list[Late]:
    """The requests to place again now. Pure.

    Only first attempts whose prompt, as far as this router can tell, the chosen worker has not computed.

    Args:
        least_s: seconds without a computed prompt before a worker is late.
    """
    all_late: list[Late] = []
    silent = frozenset(tracker.loads.silent(now_ns - int(least_s * 1e9)))
    if not silent:  # mostly, and there may be thousands of workers
        return all_late
    for (model, role), targets in _groups(tracker).items():
        if role not in ROLES or silent.isdisjoint(targets):
            continue
        idle = sum(not tracker.loads.uncomputed(each) and tracker.capacity(*each) > 0 for each in targets)
        if not idle:
            continue
        late = [
            pair for each in targets if each in silent for pair in _late_tasks(tracker, model, each, now_ns, least_s)
        ]
        late.sort(key=lambda pair: pair[0].at_ns, reverse=True)
        entries = ((tracker.request(task.request), task, seconds) for task, seconds in late)
        ready = [
            Late(entry, seconds)
            for entry, task, seconds in entries
            if entry is not None and entry.echoed and entry.attempt == 1 and entry.target_id == task.target
        ]
        all_late += ready[:idle]
    return all_late


def _groups(tracker: LoadTracker) -> dict[tuple[str, str], list[TargetId]]:
    """Targets by model and role."""
    groups: dict[tuple[str, str], list[TargetId]] = {}
    for each in tracker.workers():
        if each.state is WorkerState.ready:
            groups.setdefault((each.model, each.role), []).extend((each.worker, rank) for rank in range(each.dp_size))
    return groups


def _late_tasks(
    tracker: LoadTracker, model: str, target: TargetId, now_ns: int, least_s: float
) -> Iterator[tuple[Task, float]]:
    """The uncomputed prompts of a target, if it is late, each with the seconds since it computed one."""
    loads = tracker.loads
    tasks = [task for task in loads.uncomputed(target) if task.at_ns]
    if not tasks:
        return
    oldest = min(tasks, key=lambda task: task.at_ns)
    expected = loads.learned.expected(model, oldest.uncached_tokens, LEAST_SAMPLES)
    seconds = (now_ns - max(oldest.at_ns, loads.computed_ns(target))) / 1e9
    if expected is not None and seconds >= max(least_s, LATE * expected):
        for task in tasks:
            yield task, seconds


async def resteer(
    bus: Bus, cluster: ClusterState, least_s: float, on_late: Callable[[ActiveRequest, str], None]
) -> None:
    """Check once a second, and report the requests to place again. Never returns.

    While a worker is late, it gets new requests only if no other is left.

    Args:
        on_late: called with the request and why.
    """
    connected_ns = bus.clock.now_ns()
    while True:
        await asyncio.sleep(CHECK_S)
        now_ns = bus.clock.now_ns()
        if not bus.connected:
            connected_ns = now_ns
        if now_ns - connected_ns < least_s * 1e9:  # what was computed meanwhile may not have been read yet
            cluster.late = frozenset()
            continue
        late = find_late(cluster.tracker, now_ns, least_s)
        cluster.late = frozenset(entry.worker for entry, _ in late)
        for entry, seconds in late:
            why = f"worker {entry.worker} has computed no prompt for {seconds:.1f} s"
            log.info("request_resteered", request=entry.request, worker=entry.worker, seconds=round(seconds, 1))
            on_late(entry, why)
