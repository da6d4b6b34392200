"""The figures of each stage of ``penstock bench http``, and their table."""

from collections.abc import Mapping

from msgspec import Struct
from rich.table import Table

from penstock.cli.quantile import quantile
from penstock.cli.terminal import stdout
from penstock.measure.bench.tally import Tally

_BUSY = 0.85  # share of a core from which the generator is itself the limit


class Stage(Struct, frozen=True):
    """Figures of one stage. ``cpu_us_per_token`` is by process name; the generator's own is in a field of its own."""

    concurrency: int
    seconds: float
    requests: int
    failed: int
    errors: dict[str, int]
    requests_per_s: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    latency_p50_ms: float
    latency_p99_ms: float
    tokens_per_event: float
    cpu_us_per_token: dict[str, float]
    total_cpu_us_per_token: float
    cpu_ms_per_request: float
    own_cpu_us_per_token: float
    own_cpu_share: float


def figures(concurrency: int, seconds: float, tally: Tally, spent: Mapping[str, float], own_s: float) -> Stage:
    """Compute a stage's figures from its counters, and from the CPU seconds of each process."""
    tokens = max(1, tally.tokens)
    first, between, total = sorted(tally.first_s), sorted(tally.between_s), sorted(tally.total_s)
    return Stage(
        concurrency=concurrency,
        seconds=round(seconds, 3),
        requests=tally.requests,
        failed=tally.failed,
        errors=dict(tally.errors),
        requests_per_s=round(tally.requests / seconds, 1),
        tokens_per_s=round(tally.tokens / seconds, 1),
        ttft_p50_ms=quantile(first, 0.5, 0.0) * 1e3,
        ttft_p99_ms=quantile(first, 0.99, 0.0) * 1e3,
        itl_p50_ms=quantile(between, 0.5, 0.0) * 1e3,
        itl_p99_ms=quantile(between, 0.99, 0.0) * 1e3,
        latency_p50_ms=quantile(total, 0.5, 0.0) * 1e3,
        latency_p99_ms=quantile(total, 0.99, 0.0) * 1e3,
        tokens_per_event=round(tally.tokens / max(1, tally.events), 3),
        cpu_us_per_token={name: round(cpu / tokens * 1e6, 2) for name, cpu in spent.items()},
        total_cpu_us_per_token=round(sum(spent.values()) / tokens * 1e6, 2),
        cpu_ms_per_request=round(sum(spent.values()) / max(1, tally.requests) * 1e3, 3),
        own_cpu_us_per_token=round(own_s / tokens * 1e6, 2),
        own_cpu_share=round(own_s / seconds, 3),
    )


def report(stages: list[Stage], processes: Mapping[str, int]) -> None:
    """Print a table of all stages, then the errors."""
    console = stdout()
    table = Table(title="closed loop, times in ms")
    names = ("conns", "req/s", "tokens/s", "TTFT p50", "p99", "ITL p50", "p99", "latency p50", "tok/event", "failed")
    for name in (*names, *(("CPU µs/token", "CPU ms/req") if processes else ()), "own CPU"):
        table.add_column(name, justify="right")
    for stage in stages:
        cells = [
            *(str(stage.concurrency), f"{stage.requests_per_s:.0f}", f"{stage.tokens_per_s:.0f}"),
            *(f"{stage.ttft_p50_ms:.2f}", f"{stage.ttft_p99_ms:.2f}"),
            *(f"{stage.itl_p50_ms:.2f}", f"{stage.itl_p99_ms:.2f}", f"{stage.latency_p50_ms:.1f}"),
            *(f"{stage.tokens_per_event:.2f}", str(stage.failed)),
        ]
        if processes:
            cells += [f"{stage.total_cpu_us_per_token:.1f}", f"{stage.cpu_ms_per_request:.2f}"]
        table.add_row(*cells, f"{stage.own_cpu_share:.0%}")
    console.print(table)
    for stage in stages if processes else ():
        parts = ", ".join(f"{name} {cpu:.1f}" for name, cpu in stage.cpu_us_per_token.items())
        console.print(f"{stage.concurrency} connections, CPU µs/token: {parts}", highlight=False)
    for stage in stages:
        for reason, count in stage.errors.items():
            console.print(f"{stage.concurrency} connections: {count} × {reason}", style="red", markup=False)
        if stage.own_cpu_share > _BUSY:
            console.print(
                f"{stage.concurrency} connections: the load generator itself used {stage.own_cpu_share:.0%} of a core; "
                "the server may be faster than shown",
                style="yellow",
            )
