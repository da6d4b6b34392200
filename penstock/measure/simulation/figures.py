"""The figures of one simulation run."""

import math
import statistics
from collections.abc import Callable, Sequence

from msgspec import Struct

from penstock.cli.quantile import quantile
from penstock.measure.simulation.fleet import Result, Served
from penstock.measure.simulation.policy import Fleet, Target


class Figures(Struct, frozen=True):
    """Figures of the completed requests; times in ms.

    Attributes:
        hit_rate: prompt tokens cached when a request was admitted first, of all prompt tokens.
        itl_mean: over all gaps between two tokens of a request.
        imbalance: work (prompt tokens computed and tokens generated) of the busiest target, divided by the mean.
        served: the same ratio for tokens served: prompts, cached or not, and tokens generated.
        unfinished: requests that were rejected or never placed.
    """

    requests: int
    unfinished: int
    hit_rate: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    ttft_max: float
    e2e_mean: float
    itl_mean: float
    tokens_per_s: float
    imbalance: float
    served: float
    preemptions: int


def figures(fleet: Fleet, result: Result) -> Figures:
    done = [served for served in result.served if served.complete]
    if not done:
        raise ValueError("no request was completed")
    ttft = sorted((served.first_ns - served.request.arrival_ns) / 1e6 for served in done)
    gaps = sum(served.request.output_tokens - 1 for served in done)
    last = max(served.last_ns for served in done)
    return Figures(
        requests=len(done),
        unfinished=len(result.served) - len(done),
        hit_rate=sum(served.cached_tokens for served in done) / sum(served.request.prompt_tokens for served in done),
        ttft_mean=statistics.fmean(ttft),
        ttft_p50=quantile(ttft, 0.5, math.nan),
        ttft_p99=quantile(ttft, 0.99, math.nan),
        ttft_max=ttft[-1],
        e2e_mean=statistics.fmean((served.last_ns - served.request.arrival_ns) / 1e6 for served in done),
        itl_mean=sum(served.last_ns - served.first_ns for served in done) / 1e6 / max(1, gaps),
        tokens_per_s=sum(served.request.output_tokens for served in done) / (last / 1e9),
        imbalance=_imbalance(fleet, done, lambda served: served.request.prompt_tokens - served.cached_tokens),
        served=_imbalance(fleet, done, lambda served: served.request.prompt_tokens),
        preemptions=result.preemptions,
    )


def _imbalance(fleet: Fleet, done: Sequence[Served], prompt_tokens: Callable[[Served], int]) -> float:
    """The imbalance of the worst-balanced pool."""
    work: dict[Target, int] = dict.fromkeys(fleet.targets, 0)
    for served in done:
        placement = served.placement
        assert placement is not None
        work[placement.target] += prompt_tokens(served)
        work[served.decode or placement.target] += served.request.output_tokens
    worst = 1.0
    for role in {worker.role for worker in fleet.workers}:
        loads = [work[target] for target in fleet.with_role(role)]
        if sum(loads):
            worst = max(worst, max(loads) / statistics.fmean(loads))
    return worst
