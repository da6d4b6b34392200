"""Several policies on the same requests and engines, over several seeds.

The figures of one simulation run.

Traces whose prompts share a given part of their tokens, for a sweep over that share, and its series.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from msgspec import Struct

from penstock.cli.figures import quantile
from penstock.measure.plots import drawn
from penstock.measure.simulation.fleet import SimulatedRequest, SimulationResult, simulate
from penstock.measure.simulation.placement import PlacementPolicy
from penstock.measure.simulation.policy import Policy, SimulatedFleet, Target
from penstock.measure.simulation.trace import UNIT_TOKENS, RequestTrace, TraceRow
from penstock.measure.sweep.compare import Interval, paired
from penstock.router.placement.routing import Weights
from tests.perf.policies import (
    CellsPolicy,
    DynamoPolicy,
    RulePolicy,
    least_blocks,
    least_requests,
    round_robin,
    uniform,
)
from tests.perf.workloads import WORKLOADS, generate


class GroupFigures(Struct, frozen=True):
    """The time to the first token of a class or a tenant, in ms."""

    ttft_mean: float
    ttft_p99: float


class SimulationFigures(Struct, frozen=True):
    """Figures of the completed requests; times in ms.

    Attributes:
        hit_rate: prompt tokens cached when a request was admitted first, of all prompt tokens.
        itl_mean: over all gaps between two tokens of a request.
        imbalance: work (prompt tokens computed and tokens generated) of the busiest target, divided by the mean.
        moved_rate: the same of those that a worker read from another one for it.
        served: the same ratio for tokens served: prompts, cached or not, and tokens generated.
        unfinished: requests that were rejected or never placed.
        groups: by class or tenant, where there are several.
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
    groups: dict[str, GroupFigures] = {}
    moved_rate: float = 0.0


def figures(fleet: SimulatedFleet, result: SimulationResult) -> SimulationFigures:
    done = [served for served in result.served if served.complete]
    if not done:
        raise ValueError("no request was completed")
    ttft = sorted((served.first_ns - served.request.arrival_ns) / 1e6 for served in done)
    gaps = sum(served.request.output_tokens - 1 for served in done)
    last = max(served.last_ns for served in done)
    return SimulationFigures(
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
        groups=_groups(done),
        moved_rate=sum(served.moved_tokens for served in done) / sum(served.request.prompt_tokens for served in done),
    )


def _groups(done: Sequence[SimulatedRequest]) -> dict[str, GroupFigures]:
    times: dict[str, list[float]] = {}
    for served in done:
        group = served.request.tenant or served.request.priority.value
        times.setdefault(group, []).append((served.first_ns - served.request.arrival_ns) / 1e6)
    if len(times) < 2:
        return {}
    return {
        name: GroupFigures(statistics.fmean(ttft), quantile(sorted(ttft), 0.99, math.nan))
        for name, ttft in sorted(times.items())
    }


def _imbalance(
    fleet: SimulatedFleet, done: Sequence[SimulatedRequest], prompt_tokens: Callable[[SimulatedRequest], int]
) -> float:
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


POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "kv": PlacementPolicy,
    "kv_predicted": partial(PlacementPolicy, kv_events=False),
    "kv_moves": partial(PlacementPolicy, moves="host"),
    "kv_cells": CellsPolicy,
    "dynamo": DynamoPolicy,
    "round_robin": partial(RulePolicy, round_robin),
    "random": partial(RulePolicy, uniform),
    "least_loaded": partial(RulePolicy, least_requests),
    "least_blocks": partial(RulePolicy, least_blocks),
}
COMPARED = ("ttft_mean", "ttft_p99", "e2e_mean")
_JITTER_MS = 1000.0  # of the arrivals of a recorded trace, for every seed but the first


@dataclass(frozen=True, slots=True)
class TableCell:
    """One load on one fleet.

    Attributes:
        trace: recorded requests; None: ``workload`` is generated, for each seed.
        load: speed-up of a recorded trace; of a workload the share of the rate that saturates round robin.
    """

    fleet: SimulatedFleet
    load: float
    workload: str
    trace: RequestTrace | None = None
    requests: int = 0
    weights: Weights = Weights()  # noqa: RUF009  # frozen; of policy "kv"
    cells: int = 2  # of policy "kv_cells", as the following
    gateways: int = 4
    moves: str = "host"  # of policy "kv_moves"

    def arrivals(self, seed: int) -> tuple[RequestTrace, float]:
        """The trace of a seed, and its speed-up."""
        if self.trace is not None:
            return (self.trace if seed == 0 else _jittered(self.trace, seed)), self.load
        rate = self.load * WORKLOADS[self.workload].saturation * len(self.fleet.targets)
        return generate(self.workload, seed, self.requests, rate), 1.0


class SimulationRun(Struct, frozen=True):
    workload: str
    load: float
    policy: str
    seed: int
    figures: SimulationFigures


def run(cell: TableCell, policy: str, seed: int) -> SimulationRun:
    """Simulate one policy under one seed."""
    trace, speed = cell.arrivals(seed)
    requests = trace.requests(cell.fleet.block_size, speed)
    if policy == "kv_cells":
        made: Policy = CellsPolicy(seed, cell.cells, cell.gateways, cell.weights)
    elif policy.startswith("kv"):
        moves = cell.moves if policy == "kv_moves" else ""
        made = PlacementPolicy(seed, cell.weights, kv_events=policy != "kv_predicted", moves=moves)
    else:
        made = POLICIES[policy](seed)
    result = simulate(cell.fleet, requests, made)
    return SimulationRun(cell.workload, cell.load, policy, seed, figures(cell.fleet, result))


def runs(cells: Iterable[TableCell], policies: Sequence[str], seeds: int, jobs: int = 1) -> Iterator[SimulationRun]:
    """All runs in order, ``jobs`` processes at a time."""
    todo = [(cell, policy, seed) for cell in cells for policy in policies for seed in range(seeds)]
    if jobs == 1:
        yield from (run(*each) for each in todo)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, *zip(*todo, strict=True))


class PolicySummary(Struct, frozen=True):
    """A policy in one cell: means over the seeds, and how much more than the first policy it takes, as shares."""

    workload: str
    load: float
    policy: str
    seeds: int
    figures: SimulationFigures
    against_first: dict[str, Interval]


def summaries(runs: Sequence[SimulationRun]) -> list[PolicySummary]:
    """One per cell and policy, in the order of the runs; the others are compared with the first policy of a cell."""
    cells: dict[tuple[str, float], dict[str, list[SimulationRun]]] = {}
    for each in runs:
        cells.setdefault((each.workload, each.load), {}).setdefault(each.policy, []).append(each)
    out = []
    for (workload, load), policies in cells.items():
        first = next(iter(policies.values()))
        for policy, group in policies.items():
            against = {name: paired(_values(group, name), _values(first, name)) for name in COMPARED}
            out.append(PolicySummary(workload, load, policy, len(group), _mean(group), against))
    return out


def _values(group: Sequence[SimulationRun], name: str) -> list[float]:
    return [float(getattr(each.figures, name)) for each in group]


def _mean(group: Sequence[SimulationRun]) -> SimulationFigures:
    names = [name for name in SimulationFigures.__struct_fields__ if name != "groups"]
    means: dict[str, Any] = {name: sum(_values(group, name)) / len(group) for name in names}
    for name in ("requests", "unfinished", "preemptions"):
        means[name] = round(means[name])
    means["groups"] = {
        name: GroupFigures(
            statistics.fmean(each.figures.groups[name].ttft_mean for each in group),
            statistics.fmean(each.figures.groups[name].ttft_p99 for each in group),
        )
        for name in group[0].figures.groups
        if all(name in each.figures.groups for each in group)
    }
    return msgspec.convert(means, SimulationFigures)


def _jittered(trace: RequestTrace, seed: int) -> RequestTrace:
    rng = Random(seed)
    moved = [msgspec.structs.replace(row, timestamp=row.timestamp + rng.uniform(0, _JITTER_MS)) for row in trace.rows]
    return RequestTrace(trace.name, tuple(sorted(moved, key=lambda row: row.timestamp)), trace.block_tokens)


def dealt(trace: RequestTrace, tenants: int) -> RequestTrace:
    """Deal the conversations of a trace out to tenants, of which the n-th gets an n-th of what the first one does.

    What begins with the same two units is taken for one conversation: many share the first, a system prompt.
    """
    if not tenants:
        return trace
    rng, of = random.Random(tenants), dict[int, str]()
    names, weights = [f"t{number}" for number in range(tenants)], [1 / (number + 1) for number in range(tenants)]
    rows = []
    for row in trace.rows:
        first = row.hash_ids[:2][-1] if row.hash_ids else 0
        if first not in of:
            of[first] = rng.choices(names, weights)[0]
        rows.append(msgspec.structs.replace(row, tenant=of[first]))
    return replace(trace, rows=tuple(rows))


@dataclass(frozen=True, slots=True)
class PrefixSweep:
    """
    Attributes:
        ratios: shares of the mean prompt that are one of ``prefixes`` common prefixes.
        rate: requests per second, Poisson arrivals.
    """

    ratios: Sequence[float]
    requests: int = 200
    prompt_tokens: int = 14000
    output_tokens: int = 200
    prefixes: int = 20
    rate: float = 5.0
    seed: int = 0

    def traces(self) -> dict[float, RequestTrace]:
        """One trace per ratio, each with its own seed. Lengths of unshared parts are normal with σ of a quarter."""
        return {ratio: self._trace(ratio, self.seed + turn) for turn, ratio in enumerate(self.ratios)}

    def _trace(self, ratio: float, seed: int) -> RequestTrace:
        rng = random.Random(seed)
        shared = round(self.prompt_tokens * ratio / UNIT_TOKENS)
        own_tokens = self.prompt_tokens - shared * UNIT_TOKENS
        fresh = self.prefixes * shared  # ids below are of the prefixes
        rows, at_ms = [], 0.0
        for _ in range(self.requests):
            first = rng.randrange(self.prefixes) * shared
            tokens = max(1, round(rng.gauss(own_tokens, own_tokens / 4)))
            own = -(-tokens // UNIT_TOKENS)
            ids = (*range(first, first + shared), *range(fresh, fresh + own))
            fresh += own
            rows.append(TraceRow(at_ms, shared * UNIT_TOKENS + tokens, self.output_tokens, ids))
            at_ms += rng.expovariate(self.rate) * 1e3
        return RequestTrace(name_of(ratio), tuple(rows), UNIT_TOKENS)


def name_of(ratio: float) -> str:
    return f"prefix {ratio:g}"


def series(summaries: Sequence[PolicySummary], ratios: Sequence[float], load: float) -> dict[str, Any]:
    """The results at one load as series by policy: mean TTFT in ms, output tokens per second, hit rates."""
    cells = {(each.workload, each.policy): each.figures for each in summaries if each.load == load}
    policies = list(dict.fromkeys(each.policy for each in summaries))

    def line(figure: str) -> dict[str, list[float]]:
        return {name: [getattr(cells[name_of(ratio), name], figure) for ratio in ratios] for name in policies}

    return {
        "prefix_ratios": list(ratios),
        "ttft_values": line("ttft_mean"),
        "throughput_values": line("tokens_per_s"),
        "hit_rates": line("hit_rate"),
    }


def plot_prefix_ratios(
    ratios: Sequence[float], ttft_ms: dict[str, list[float]], tokens: dict[str, list[float]], path: Path
) -> None:
    """TTFT and tokens/s by share of the prompt that is common, a line a deployment.

    Raises:
        PlotsMissing: with the command that installs it.
    """
    with drawn(path, 7.2, 2.6) as figure:
        axes = figure.subplots(1, 2)
        for axis, values, unit in zip(axes, (ttft_ms, tokens), ("TTFT, mean (ms)", "tokens/s"), strict=True):
            for name, line in values.items():
                axis.plot(ratios, line, marker="o", markersize=3, label=name)
            axis.set_xlabel("common share of the prompt", fontsize=8)
            axis.set_ylabel(unit, fontsize=8)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
        axes[0].legend(fontsize=7)
