"""Several policies on the same requests and engines, over several seeds."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from random import Random

import msgspec
from msgspec import Struct

from penstock.measure.intervals import Interval, paired
from penstock.measure.simulation import rules
from penstock.measure.simulation.dynamo import DynamoPolicy
from penstock.measure.simulation.figures import Figures, figures
from penstock.measure.simulation.fleet import simulate
from penstock.measure.simulation.placement import DELAY_NS, PlacementPolicy
from penstock.measure.simulation.policy import Fleet, Policy
from penstock.measure.simulation.trace import Trace
from penstock.measure.simulation.workloads import WORKLOADS, generate
from penstock.router.placement.routing import Weights

POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "kv": PlacementPolicy,
    "kv_predicted": partial(PlacementPolicy, kv_events=False),
    "dynamo": DynamoPolicy,
    "round_robin": partial(rules.RulePolicy, rules.round_robin),
    "random": partial(rules.RulePolicy, rules.uniform),
    "least_loaded": partial(rules.RulePolicy, rules.least_requests),
    "least_blocks": partial(rules.RulePolicy, rules.least_blocks),
}
COMPARED = ("ttft_mean", "ttft_p99", "e2e_mean")
_JITTER_MS = 1000.0  # of the arrivals of a recorded trace, for every seed but the first


@dataclass(frozen=True, slots=True)
class Cell:
    """One load on one fleet.

    Attributes:
        trace: recorded requests; None: ``workload`` is generated, for each seed.
        load: speed-up of a recorded trace; of a workload the share of the rate that saturates round robin.
    """

    fleet: Fleet
    load: float
    workload: str
    trace: Trace | None = None
    requests: int = 0
    replicas: int = 1  # of the routers of policy "kv"
    replica_delay_ns: int = DELAY_NS  # until they have folded each other's decisions
    weights: Weights = Weights()  # noqa: RUF009  # frozen; of policy "kv"

    def arrivals(self, seed: int) -> tuple[Trace, float]:
        """The trace of a seed, and its speed-up."""
        if self.trace is not None:
            return (self.trace if seed == 0 else _jittered(self.trace, seed)), self.load
        rate = self.load * WORKLOADS[self.workload].saturation * len(self.fleet.targets)
        return generate(self.workload, seed, self.requests, rate), 1.0


class Run(Struct, frozen=True):
    workload: str
    load: float
    policy: str
    seed: int
    figures: Figures


def run(cell: Cell, policy: str, seed: int) -> Run:
    """Simulate one policy under one seed."""
    trace, speed = cell.arrivals(seed)
    requests = trace.requests(cell.fleet.block_size, speed)
    if policy.startswith("kv"):
        made: Policy = PlacementPolicy(
            seed, cell.replicas, cell.weights, kv_events=policy == "kv", delay_ns=cell.replica_delay_ns
        )
    else:
        made = POLICIES[policy](seed)
    result = simulate(cell.fleet, requests, made)
    return Run(cell.workload, cell.load, policy, seed, figures(cell.fleet, result))


def runs(cells: Iterable[Cell], policies: Sequence[str], seeds: int, jobs: int = 1) -> Iterator[Run]:
    """All runs in order, ``jobs`` processes at a time."""
    todo = [(cell, policy, seed) for cell in cells for policy in policies for seed in range(seeds)]
    if jobs == 1:
        yield from (run(*each) for each in todo)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, *zip(*todo, strict=True))


class Summary(Struct, frozen=True):
    """A policy in one cell: means over the seeds, and how much more than the first policy it takes, as shares."""

    workload: str
    load: float
    policy: str
    seeds: int
    figures: Figures
    against_first: dict[str, Interval]


def summaries(runs: Sequence[Run]) -> list[Summary]:
    """One per cell and policy, in the order of the runs; the others are compared with the first policy of a cell."""
    cells: dict[tuple[str, float], dict[str, list[Run]]] = {}
    for each in runs:
        cells.setdefault((each.workload, each.load), {}).setdefault(each.policy, []).append(each)
    out = []
    for (workload, load), policies in cells.items():
        first = next(iter(policies.values()))
        for policy, group in policies.items():
            against = {name: paired(_values(group, name), _values(first, name)) for name in COMPARED}
            out.append(Summary(workload, load, policy, len(group), _mean(group), against))
    return out


def _values(group: Sequence[Run], name: str) -> list[float]:
    return [float(getattr(each.figures, name)) for each in group]


def _mean(group: Sequence[Run]) -> Figures:
    means = {name: sum(_values(group, name)) / len(group) for name in Figures.__struct_fields__}
    for name in ("requests", "unfinished", "preemptions"):
        means[name] = round(means[name])
    return msgspec.convert(means, Figures)


def _jittered(trace: Trace, seed: int) -> Trace:
    rng = Random(seed)
    moved = [msgspec.structs.replace(row, timestamp=row.timestamp + rng.uniform(0, _JITTER_MS)) for row in trace.rows]
    return Trace(trace.name, tuple(sorted(moved, key=lambda row: row.timestamp)), trace.block_tokens)
