"""``penstock bench router``: routing policies side by side on the same engines, in simulated time."""

import contextlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from rich.table import Table

from penstock.cli.terminal import fail, stdout
from penstock.measure.plots import PlotsMissing, drawn
from penstock.measure.simulation.policy import SimulatedFleet, WorkerSpec
from penstock.measure.simulation.trace import Multipliers, TraceError, multiplied, read
from penstock.measure.sweep.compare import Interval
from penstock.router.placement.cost import TIER_COSTS
from penstock.router.placement.routing import Weights
from tests.perf.comparison import (
    PolicySummary,
    PrefixSweep,
    SimulationRun,
    TableCell,
    dealt,
    plot_prefix_ratios,
    runs,
    series,
    summaries,
)
from tests.perf.workloads import WORKLOADS


def plot_loads(summaries: Sequence[PolicySummary], path: Path) -> None:
    """TTFT (mean and p99) and end-to-end time by load: a row a workload, a line a policy.

    Raises:
        PlotsMissing: with the command that installs it.
    """
    workloads = list(dict.fromkeys(each.workload for each in summaries))
    with drawn(path, 10.8, 2.6 * len(workloads)) as figure:
        axes = figure.subplots(len(workloads), 3, squeeze=False)
        shown = (("ttft_mean", "TTFT, mean"), ("ttft_p99", "TTFT, p99"), ("e2e_mean", "end to end, mean"))
        for row, workload in zip(axes, workloads, strict=True):
            for axis, (name, title) in zip(row, shown, strict=True):
                for policy in dict.fromkeys(each.policy for each in summaries):
                    points = [each for each in summaries if (each.workload, each.policy) == (workload, policy)]
                    values = [getattr(each.figures, name) / 1e3 for each in points]
                    axis.plot([each.load for each in points], values, marker="o", markersize=3, label=policy)
                axis.set_title(f"{workload}: {title}", fontsize=9)
                axis.set_yscale("log")
                axis.set_xlabel("load", fontsize=8)
                axis.set_ylabel("s", fontsize=8)
                axis.tick_params(labelsize=7)
                axis.grid(alpha=0.3)
            row[0].legend(fontsize=7)


MOVE_NS = {"host": 600, "rdma": 2600}  # a token: an 8B model's KV at 220 and at 50 GB/s
_REQUESTS_PER_WORKER = 500
_SWEEP_REQUESTS = 200

PolicyName = Literal[
    "kv", "kv_predicted", "kv_moves", "kv_cells", "dynamo", "round_robin", "random", "least_loaded", "least_blocks"
]
WorkloadName = Literal[
    "chat", "agents", "documents", "unique", "bursts", "hot", "mixed", "classes", "tenants", "images"
]
Positive = Annotated[float, Meta(gt=0)]


class RouterBenchSettings(Multipliers, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock bench router``."""

    policies: Annotated[tuple[PolicyName, ...], Meta(description="to compare; the others against the first")] = (
        "kv",
        "dynamo",
        "round_robin",
    )
    workload: Annotated[tuple[WorkloadName, ...], Meta(description="shapes of requests to generate")] = ("chat",)
    trace: Annotated[str, Meta(description="file in Mooncake's format, instead of --workload")] = ""
    tenants: Annotated[
        int, Meta(ge=0, description="of a trace: tenants to divide its conversations among, most to the first; 0: one")
    ] = 0
    prefix_ratios: Annotated[
        tuple[Annotated[float, Meta(ge=0, le=1)], ...],
        Meta(description="shares of the prompt that are common, such as 0.1,0.5,0.9, instead of --workload"),
    ] = ()
    rate: Annotated[float, Meta(gt=0, description="of --prefix-ratios: requests per second at load 1")] = 5.0
    prefixes: Annotated[int, Meta(ge=1, description="of --prefix-ratios: different prefixes")] = 20
    prompt_tokens: Annotated[int, Meta(ge=1, description="of --prefix-ratios: mean length of a prompt")] = 14000
    output_tokens: Annotated[int, Meta(ge=2, description="of --prefix-ratios: tokens per answer")] = 200
    load: Annotated[
        tuple[Positive, ...], Meta(description="of a workload: share of what saturates round robin; otherwise speed-up")
    ] = (0.3, 0.7, 1.0, 1.5)
    requests: Annotated[int, Meta(ge=0, description="requests; 0: the whole trace, or 500 per worker")] = 0
    seeds: Annotated[int, Meta(ge=1, le=100, description="runs per policy and load")] = 5
    workers: Annotated[int, Meta(ge=1, description="workers that run whole requests")] = 8
    prefill: Annotated[int, Meta(ge=0, description="prefill workers, instead of --workers")] = 0
    decode: Annotated[int, Meta(ge=0, description="decode workers beside them")] = 0
    encode: Annotated[int, Meta(ge=0, description="encode workers for images")] = 0
    ranks: Annotated[int, Meta(ge=1, description="attention data-parallel ranks of each worker")] = 1
    slow_workers: Annotated[int, Meta(ge=0, description="of the workers, how many run at half speed")] = 0
    slow_decode: Annotated[int, Meta(ge=0, description="of the workers, how many decode at half speed")] = 0
    cells: Annotated[int, Meta(ge=1, description="of policy kv_cells: cells over which the workers are dealt")] = 2
    gateways: Annotated[
        int, Meta(ge=1, description="of policy kv_cells: gateways, each of which is nearest to a cell")
    ] = 4
    blocks: Annotated[int, Meta(ge=1, description="KV blocks per rank")] = 16384
    host_blocks: Annotated[int, Meta(ge=0, description="KV blocks in host memory behind them")] = 0
    disk_blocks: Annotated[int, Meta(ge=0, description="KV blocks on a disk behind these")] = 0
    tier_costs: Annotated[
        tuple[Positive, Positive], Meta(description="to bring a block back from each, where computing it is 1")
    ] = TIER_COSTS
    block_size: Annotated[int, Meta(ge=2, description="tokens per block")] = 64
    local_prefill_tokens: Annotated[
        int, Meta(ge=-1, description="of policy kv: as the router's flag of this name; the engines are GPUs")
    ] = Weights().local_prefill_tokens
    prefill_queue_tokens: Annotated[int, Meta(ge=0, description="of policy kv: as the router's flag of this name")] = (
        Weights().prefill_queue_tokens
    )
    transfer_us_per_token: Annotated[float, Meta(ge=0, description="handoff from prefill to decode")] = 0.0
    move_path: Annotated[
        Literal["host", "rdma"], Meta(description="of policy kv_moves: within a host, or between them")
    ] = "host"
    jobs: Annotated[int, Meta(ge=1, description="processes")] = 1
    json: Annotated[str, Meta(description="file for the figures")] = ""
    plot: Annotated[str, Meta(description="PNG file for TTFT by load; needs penstock[bench]")] = ""


class BadBench(Exception):
    """The settings do not fit together."""


def run(settings: RouterBenchSettings) -> int:
    """Compare the policies and print one table per load. Returns 1 if a request was not served."""
    all_runs: list[SimulationRun] = []
    try:
        cells = list(_cells(settings))
        with contextlib.suppress(KeyboardInterrupt):
            for each in runs(cells, settings.policies, settings.seeds, settings.jobs):
                all_runs.append(each)
                _progress(each, len(all_runs), len(cells) * len(settings.policies) * settings.seeds)
        if not all_runs:
            return 130
        result = summaries(all_runs)
        _report(settings, result)
        swept = [series(result, settings.prefix_ratios, load) | {"load": load} for load in _loads(settings, result)]
        if settings.json:
            figures = {"settings": settings, "summaries": result, "runs": all_runs} | (
                {"sweeps": swept} if swept else {}
            )
            Path(settings.json).write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
        if settings.plot and swept:
            plot_prefix_ratios(
                settings.prefix_ratios, swept[0]["ttft_values"], swept[0]["throughput_values"], Path(settings.plot)
            )
        elif settings.plot:
            plot_loads(result, Path(settings.plot))
    except (BadBench, TraceError, PlotsMissing) as error:
        return fail("bench router", error)
    return 1 if any(each.figures.unfinished for each in all_runs) else 0


def fleet(settings: RouterBenchSettings) -> SimulatedFleet:
    """
    Raises:
        BadBench: there are prefill workers without decode workers, or more slow workers or cells than workers.
    """
    if bool(settings.prefill) != bool(settings.decode):
        raise BadBench("--prefill and --decode go together")
    roles = ["prefill"] * settings.prefill + ["decode"] * settings.decode or ["aggregated"] * settings.workers
    scarcest = min(roles.count(role) for role in set(roles))
    limits = [
        ("--slow-workers", settings.slow_workers, len(roles)),
        ("--slow-decode", settings.slow_decode, len(roles)),
        ("--cells", settings.cells if "kv_cells" in settings.policies else 1, scarcest),
    ]
    for flag, count, most in limits:
        if count > most:
            of_a_role = " of a role" if flag == "--cells" else ""
            raise BadBench(f"{flag} {count}: there are {most} workers{of_a_role}")
    workers = tuple(
        WorkerSpec(
            role,
            settings.blocks,
            settings.ranks,
            slowness=2.0 if number < settings.slow_workers else 1.0,
            decode_slowness=2.0 if number < settings.slow_decode else 1.0,
            lower=(settings.host_blocks, settings.disk_blocks),
            tier_costs=settings.tier_costs,
        )
        for number, role in enumerate(roles)
    )
    return SimulatedFleet(
        workers,
        settings.block_size,
        round(settings.transfer_us_per_token * 1e3),
        settings.encode,
        move_ns_per_token=MOVE_NS[settings.move_path],
    )


def _cells(settings: RouterBenchSettings) -> list[TableCell]:
    engines = fleet(settings)
    weights = Weights(
        local_prefill_tokens=settings.local_prefill_tokens, prefill_queue_tokens=settings.prefill_queue_tokens
    )
    cell = partial(
        TableCell, engines, weights=weights, cells=settings.cells, gateways=settings.gateways, moves=settings.move_path
    )
    if settings.trace:
        trace = multiplied(read(Path(settings.trace)).limited(settings.requests), settings)
        trace = dealt(trace, settings.tenants)
        trace.requests(settings.block_size)  # fails before the first run, not in it
        return [cell(load, trace.name, trace) for load in settings.load]
    if settings.prefix_ratios:
        sweep = PrefixSweep(
            settings.prefix_ratios,
            settings.requests or _SWEEP_REQUESTS,
            settings.prompt_tokens,
            settings.output_tokens,
            settings.prefixes,
            settings.rate,
        )
        return [cell(load, trace.name, trace) for load in settings.load for trace in sweep.traces().values()]
    requests = settings.requests or _REQUESTS_PER_WORKER * len(engines.targets)
    return [cell(load, name, None, requests) for name in settings.workload for load in settings.load]


def _loads(settings: RouterBenchSettings, summaries: Sequence[PolicySummary]) -> list[float]:
    """The loads at which every policy ran every prefix ratio; empty without a sweep."""
    if not settings.prefix_ratios:
        return []
    whole = len(settings.prefix_ratios) * len(settings.policies)
    return [load for load in settings.load if sum(each.load == load for each in summaries) == whole]


def _progress(each: SimulationRun, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{total} {each.workload} ×{each.load:g} {each.policy}\033[K", end="", file=sys.stderr)
        if done == total:
            print("\r\033[K", end="", file=sys.stderr)


def _report(settings: RouterBenchSettings, summaries: Sequence[PolicySummary]) -> None:
    for cell in dict.fromkeys((each.workload, each.load) for each in summaries):
        group = [each for each in summaries if (each.workload, each.load) == cell]
        console = stdout()
        about = cell[0] if settings.trace or settings.prefix_ratios else f"{cell[0]} ({WORKLOADS[cell[0]].about})"
        console.print(table(f"{about}, load {cell[1]:g}, {group[0].figures.requests} requests", group))


def table(title: str, group: Sequence[PolicySummary]) -> Table:
    """Means over the seeds; TTFT and E2E of all but the first also as differences with 95 % intervals."""
    first = group[0].policy
    shown = Table(title=title, title_justify="left")
    shown.add_column("policy")
    for head in ("hit", "TTFT mean", "p50", "p99", "max", "E2E mean", "ITL", "imbalance"):
        shown.add_column(head, justify="right")
    for head in ("TTFT", "p99", "E2E"):
        shown.add_column(f"{head}\nagainst {first}", justify="right", no_wrap=True)
    for each in group:
        figures = each.figures
        times = (figures.ttft_mean, figures.ttft_p50, figures.ttft_p99, figures.ttft_max, figures.e2e_mean)
        shown.add_row(
            each.policy,
            f"{figures.hit_rate:.3f}",
            *map(milliseconds, times),
            f"{figures.itl_mean:.1f} ms",
            f"{figures.imbalance:.2f}",
            *(difference(each.against_first[name]) if each.policy != first else "" for name in each.against_first),
        )
        for name, group_figures in figures.groups.items():
            times_of = milliseconds(group_figures.ttft_mean), "", milliseconds(group_figures.ttft_p99)
            shown.add_row(f"  {name}", "", *times_of)
    return shown


def milliseconds(value: float) -> str:
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1e3:.1f} s"


def difference(interval: Interval) -> str:
    """A difference as text, such as "+12.0 ± 3.1 %". A single seed has no interval."""
    if interval.low <= -1.0:
        return f"{interval.mean * 100:+.1f} %"
    return f"{interval.mean * 100:+.1f} ± {(interval.high - interval.low) * 50:.1f} %"
