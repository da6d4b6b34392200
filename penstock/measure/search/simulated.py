"""Simulates the latency percentiles of a deployment, and sizes it for given limits.

The means of a queueing model say nothing about percentiles. Requests with Poisson arrivals therefore run through
simulated engines, with the router's own policy and the step times of the profiles. Requests that arrive during the
warm-up are not counted.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from penstock.cli.figures import quantile
from penstock.measure.search.candidates import Configuration, PoolSize, Scope, SizedDeployment, Sla
from penstock.measure.simulation.fleet import simulate
from penstock.measure.simulation.placement import PlacementPolicy
from penstock.measure.simulation.policy import SimulatedFleet
from penstock.measure.simulation.trace import RequestTrace
from penstock.planner.simulated import generate, worker_of
from penstock.schemas.plans import Role

Percentile = Literal["mean", "p50", "p75", "p90", "p95", "p99"]
BLOCK_SIZE = 64
# In units of a request's duration: the warm-up, the least time of counted arrivals, and the arrivals after them.
_WARM, _COUNTED, _AFTER = 1.2, 1.0, 0.5
_LATE = 4.0  # in the same unit: a request that has not ended by then counts as unserved
_HELD, _HELD_S = 50, 2.0  # a fleet is too small if more requests wait than this, and than arrive in this many seconds
_STEPS = 6  # bisection steps of a rate
_GROWTH = 12  # a pool grows by a twelfth of its workers, at least by one

Pools = Sequence[tuple[Role, Configuration, int]]


class Percentiles(Struct, frozen=True):
    """Percentiles in ms (infinite if a request was not served), and the number of counted ``requests``."""

    ttft_ms: float
    itl_ms: float
    requests: int

    def meet(self, sla: Sla) -> bool:
        return self.ttft_ms <= sla.ttft_ms and self.itl_ms <= sla.itl_ms


class SimulatedLoad(Struct, frozen=True, kw_only=True):
    """
    Attributes:
        sigma: standard deviation of the logarithm of lengths. 0: all prompts, and all answers, are equally long.
        requests: the least number to count; five times as many for p99.
    """

    sla: Sla
    scope: Scope
    percentile: Percentile
    sigma: float = 0.0
    seed: int = 0
    requests: int = 1_000

    @property
    def share(self) -> float:
        return int(self.percentile.removeprefix("p")) / 100


def measure(pools: Pools, rate: float, load: SimulatedLoad) -> Percentiles:
    """The percentiles of a deployment at ``rate`` requests per second."""
    sla = load.sla
    lasts_s, begins_s, ends_s = _times(rate, load)
    trace = _trace(rate, load)
    handoff_ms = next((each.handoff_ms for role, each, _ in pools if role == "prefill"), 0.0)
    workers = [spec for role, each, count in pools for spec in [worker_of(role, each.timing, BLOCK_SIZE)] * count]
    fleet = SimulatedFleet(tuple(workers), BLOCK_SIZE, round(handoff_ms * 1e6 / sla.isl))
    found = simulate(
        fleet,
        trace.requests(BLOCK_SIZE),
        PlacementPolicy(load.seed),
        until_ns=round((ends_s + _LATE * lasts_s) * 1e9),
        most_held=max(_HELD, round(_HELD_S * rate)),
    ).served
    counted = [each for each in found if begins_s <= each.request.arrival_ns / 1e9 < ends_s]
    if not counted or not all(each.complete for each in counted):
        return Percentiles(math.inf, math.inf, len(counted))
    # A prefill worker streams the first token itself, before the decode worker has the prompt.
    ttft = sorted((each.prompt_ns - each.request.arrival_ns) / 1e6 for each in counted)
    itl = sorted(
        (each.last_ns - each.prompt_ns) / 1e6 / (each.request.output_tokens - 1)
        for each in counted
        if each.request.output_tokens > 1
    )
    return Percentiles(quantile(ttft, load.share, math.inf), quantile(itl, load.share, 0.0), len(counted))


def longest(rate: float, load: SimulatedLoad) -> int:
    """Tokens of the longest simulated request (prompt and answer) at ``rate`` requests per second."""
    return max(row.input_length + row.output_length for row in _trace(rate, load).rows)


def _times(rate: float, load: SimulatedLoad) -> tuple[float, float, float]:
    """In seconds: the duration of a request, and the beginning and end of the counted arrivals."""
    lasts_s = (load.sla.ttft_ms + load.sla.osl * load.sla.itl_ms) / 1e3
    wanted = load.requests * (5 if load.percentile == "p99" else 1)
    begins_s = _WARM * lasts_s
    return lasts_s, begins_s, begins_s + max(_COUNTED * lasts_s, wanted / rate)


def _trace(rate: float, load: SimulatedLoad) -> RequestTrace:
    lasts_s, _, ends_s = _times(rate, load)
    return generate(
        "flat",
        seed=load.seed,
        seconds=ends_s + _AFTER * lasts_s,
        low=rate,
        high=rate,
        isl=load.sla.isl,
        osl=load.sla.osl,
        shared=load.scope.hit_rate,
        sigma=load.sigma,
    )


def search(
    found: Sequence[SizedDeployment],
    configurations: Sequence[Configuration],
    load: SimulatedLoad,
    show: int,
    report: Callable[[str], None],
) -> list[SizedDeployment]:
    """Simulate the candidates and return those that meet the limits, best first.

    With a given rate, pools grow until the limits are met; without one, the rate falls until they are. Candidates whose
    means show that they cannot beat the best one are not simulated.

    Args:
        found: candidates sized by means, best first.
        show: the most candidates to simulate.
        report: called before each simulation with a description of it.
    """
    by_name = {each.name: each for each in configurations}
    kept: list[SizedDeployment] = []
    for each in found[:show]:
        if kept and _cannot_win(each, kept[0], load.scope):
            break
        better = _larger(each, by_name, load, report) if load.scope.rate else _slower(each, by_name, load, report)
        if better is not None:
            kept = sorted([*kept, better], key=lambda one: _order(one, load.scope))
    return kept


def _order(candidate: SizedDeployment, scope: Scope) -> tuple[float, float]:
    return (candidate.gpus if scope.rate else -candidate.per_gpu, candidate.ttft_ms)


def _cannot_win(candidate: SizedDeployment, best: SizedDeployment, scope: Scope) -> bool:
    return candidate.gpus > best.gpus if scope.rate else candidate.per_gpu <= best.per_gpu


def _larger(
    candidate: SizedDeployment, by_name: dict[str, Configuration], load: SimulatedLoad, report: Callable[[str], None]
) -> SizedDeployment | None:
    """The candidate with the workers that the rate needs. None if that takes too many GPUs."""
    rate, sla = load.scope.rate, load.sla
    sizes = [pool.workers for pool in candidate.pools]
    grown: tuple[int, int] | None = None  # the pool that grew last, and its workers before
    while True:
        now = _sized(candidate, sizes, by_name)
        if now.gpus > load.scope.total_gpus:
            return None
        report(f"{now.name} at {rate:.4g} requests/s")
        found = measure(_pools(now, by_name), rate, load)
        late, slow = found.ttft_ms > sla.ttft_ms, found.itl_ms > sla.itl_ms
        if not (late or slow):
            break
        # The last pool decodes and determines the time per token; the first one determines the TTFT.
        at = len(sizes) - 1 if slow and not (late and found.ttft_ms / sla.ttft_ms > found.itl_ms / sla.itl_ms) else 0
        grown = at, sizes[at]
        sizes[at] += max(1, sizes[at] // _GROWTH)
    best, best_seen = now, found
    if grown is not None:  # the last step may have been larger than necessary
        at, low = grown
        high = sizes[at]
        while high - low > 1:
            sizes[at] = (low + high) // 2
            now = _sized(candidate, sizes, by_name)
            report(f"{now.name} at {rate:.4g} requests/s")
            found = measure(_pools(now, by_name), rate, load)
            if found.meet(sla):
                high, best, best_seen = sizes[at], now, found
            else:
                low = sizes[at]
    return _with(best, rate, best_seen, load)


def _slower(
    candidate: SizedDeployment, by_name: dict[str, Configuration], load: SimulatedLoad, report: Callable[[str], None]
) -> SizedDeployment | None:
    """The candidate at the highest rate that meets the limits, at most the rate of its means. None: no rate does."""
    sla, pools = load.sla, _pools(candidate, by_name)

    def tried(rate: float) -> Percentiles | None:
        report(f"{candidate.name} at {rate:.4g} requests/s")
        found = measure(pools, rate, load)
        return found if found.meet(sla) else None

    high = candidate.requests_per_s
    if (found := tried(high)) is not None:
        return _with(candidate, high, found, load)
    low, best = 0.0, None
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if (found := tried(middle)) is not None:
            low, best = middle, found
        else:
            high = middle
    return None if best is None else _with(candidate, low, best, load)


def _pools(candidate: SizedDeployment, by_name: dict[str, Configuration]) -> Pools:
    return [(pool.role, by_name[pool.configuration], pool.workers) for pool in candidate.pools]


def _sized(candidate: SizedDeployment, sizes: Sequence[int], by_name: dict[str, Configuration]) -> SizedDeployment:
    def pools() -> Iterator[PoolSize]:
        for pool, workers in zip(candidate.pools, sizes, strict=True):
            gpus = workers * by_name[pool.configuration].gpus
            yield msgspec.structs.replace(pool, workers=workers, gpus=gpus)

    return msgspec.structs.replace(candidate, pools=tuple(pools()))


def _with(candidate: SizedDeployment, rate: float, found: Percentiles, load: SimulatedLoad) -> SizedDeployment:
    """The candidate with simulated times; its concurrency is the rate times the duration of an answer."""
    pools = tuple(
        pool
        if pool.role == "prefill"
        else msgspec.structs.replace(pool, concurrency=round(rate * load.sla.osl * found.itl_ms / 1e3 / pool.workers))
        for pool in candidate.pools
    )
    return msgspec.structs.replace(
        candidate, pools=pools, ttft_ms=found.ttft_ms, itl_ms=found.itl_ms, requests_per_s=rate
    )
