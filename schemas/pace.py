"""Finds workers that are much slower than their peers. Pure; for routers, ``doctor``, ``top`` and the dashboard.

A worker measures four times (``fleet.Load``): a client's wait for a token, and the engine's time per delivered token,
per computed token (prompts included), and per step without a prompt. At a prefill worker, a prompt takes the place of a
delivered token. Peers are workers of the same model, role, engine and device.

Load alone never makes all of the first three long. In a large batch, tokens come late but take the engine little time;
uncached prompts lengthen the time per delivered token and shorten that per computed one; cached prompts do the reverse.
So a worker is at least as slow as the smallest of these three ratios to its peers: below 1.1 for equal workers with the
same requests, whatever their batches and caches, by the mock's step times (``tests/schemas/test_pace.py``).

A slow worker runs more requests at a time than its peers, because they take longer, and a larger batch shortens its
time per token: for a worker that is 20 times slower with five times the batch, the smallest ratio is 4. A healthy
worker with a large batch takes far less time per token than its peers. A worker that takes as much (``NO_GAIN``) gains
nothing from its batch; its slowness is then the ratio of its waits for tokens and of its steps without prompts.
``SLOW`` leaves room for differing requests, and for GPUs whose names are unknown.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from penstock.schemas.fleet import Registration

SLOW = 4.0  # times
NO_GAIN = 0.8  # times what peers spend on a token
FLOOR_US = 5_000  # shorter waits do not matter, and the machine's noise is large beside them
PREFILL = "prefill"  # the role whose pace is that of prompts


class Pace(NamedTuple):
    """A worker compared with its peers.

    Attributes:
        latency_us: its own, as in ``fleet.Load``.
        peer_latency_us: the lower median of its peers'.
        peers: number of peers with known times.
        slowness: ratio of its time to its peers'; 1 if its time is too short to matter.
    """

    latency_us: int
    peer_latency_us: int
    peers: int
    slowness: float

    @property
    def is_slow(self) -> bool:
        return self.slowness >= SLOW


def compare(workers: Iterable[Registration]) -> dict[str, Pace]:
    """The pace of each worker (by its id) that has one, and a peer that has one. Idle workers keep theirs a while."""
    groups: dict[tuple[str, ...], list[Registration]] = defaultdict(list)
    for each in workers:
        if all(_times(each)):
            groups[each.model, each.role, each.engine, each.device].append(each)
    found: dict[str, Pace] = {}
    for group in groups.values():
        if len(group) < 2:
            continue
        columns = [sorted(column) for column in zip(*map(_times, group), strict=True)]
        for each in group:
            own = _times(each)
            peers = [_median_of_others(column, time) for column, time in zip(columns, own, strict=True)]
            factors = [time / of_peers for time, of_peers in zip(own, peers, strict=True)]
            slowness = min(factors)
            steps = [one.load.decode_us for one in group if one is not each and one.load.decode_us]
            if slowness >= NO_GAIN and each.load.decode_us and steps:
                of_peers = sorted(steps)[(len(steps) - 1) // 2]
                slowness = max(slowness, min(factors[0], each.load.decode_us / of_peers))
            if own[0] < FLOOR_US:
                slowness = 1.0
            found[each.worker] = Pace(own[0], peers[0], len(group) - 1, slowness)
    return found


def _times(worker: Registration) -> tuple[int, int, int]:
    return worker.load.latency_us, worker.load.engine_us, worker.load.work_ns


def _median_of_others(values: list[int], own: int) -> int:
    """The lower median of sorted values without one that is ``own``."""
    middle = (len(values) - 2) // 2
    return values[middle] if values[middle] < own else values[middle + 1]
