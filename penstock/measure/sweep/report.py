"""The figures of a sweep for the terminal and as text: one table per endpoint, and its knee."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from penstock.cli.terminal import stdout
from penstock.measure.sweep.figures import FEW
from penstock.measure.sweep.results import EndpointSeries, Knee, LevelResult, find_knee, mean, point

_COLUMNS: tuple[tuple[str, str, str, int], ...] = (  # heading, figure, part, decimals
    ("req/s", "requests_per_s", "", 2),
    ("tok/s", "output_tokens_per_s", "", 0),
    ("/user", "tokens_per_s_per_user", "", 1),
    ("/GPU", "tokens_per_s_per_gpu", "", 1),
    ("good/s", "good_per_s", "", 2),
    ("TTFT", "ttft_ms", "mean", 0),
    ("p50", "ttft_ms", "p50", 0),
    ("p95", "ttft_ms", "p95", 0),
    ("p99", "ttft_ms", "p99", 0),
    ("ITL", "itl_ms", "mean", 1),
    ("p50", "itl_ms", "p50", 1),
    ("p95", "itl_ms", "p95", 1),
    ("p99", "itl_ms", "p99", 1),
    ("latency", "latency_ms", "mean", 0),
    ("p50", "latency_ms", "p50", 0),
    ("p95", "latency_ms", "p95", 0),
    ("p99", "latency_ms", "p99", 0),
)


def print_report(series: Sequence[EndpointSeries], console: Console | None = None) -> None:
    console = console or stdout()
    for each in series:
        console.print(table(each))
        for line in remarks(each):
            console.print(line, markup=False, highlight=False)


def table(series: EndpointSeries) -> Table:
    """Means over the runs of each level. Columns without values are left out."""
    shown = Table(title=title(series), title_justify="left", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    kind = series.results[0].level.kind
    shown.add_column("conc." if kind == "concurrency" else kind, justify="right", no_wrap=True)
    columns = [column for column in _COLUMNS if any(mean(each, *column[1:3]) is not None for each in series.results)]
    for heading, *_ in columns:
        shown.add_column(heading, justify="right", no_wrap=True)
    for heading in ("hit", "batch", "KV", "failed"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for result in series.results:
        cells = [
            _number(mean(result, figure, part), decimals)
            + (MARK if part.startswith("p") and few(result, figure) else "")
            for _, figure, part, decimals in columns
        ]
        shown.add_row(f"{result.level.value:g}", *cells, *_server(result), str(_failed(result)))
    return shown


def title(series: EndpointSeries) -> str:
    first = series.results[0]
    load = load_text(first)
    runs = max(len(each.complete) for each in series.results)
    repeated = f", means of {runs} runs" if runs > 1 else ""
    return f"{series.name}: {first.model} at {first.url}, {load}{repeated}; times in ms"


def load_text(result: LevelResult) -> str:
    """What was sent, in few words."""
    if result.trace:
        return f"requests of {result.trace}"
    workload = result.workload
    common = f", {workload.shared_prefix:.0%} of a prompt common" if workload.shared_prefix else ""
    return f"ISL {workload.isl}, OSL {workload.osl}{common}"


MARK = "*"


def few(result: LevelResult, figure: str) -> bool:
    """Whether the percentiles of a figure are of fewer than ``FEW`` requests in some run."""
    return any(getattr(run.figures, figure) is not None and run.figures.requests < FEW for run in result.complete)


def remarks(series: EndpointSeries) -> list[str]:
    """Sentences about the knee, the lengths, missing features, and levels where the generator was the limit."""
    lines = [knee_text(series), lengths_text(series), _slo_text(series)]
    if any(few(each, "latency_ms") for each in series.results):
        lines.append(f"{MARK} percentiles of fewer than {FEW} requests: a p99 is then one of the slowest (--requests).")
    lines += dict.fromkeys(warning for each in series.results for warning in each.warnings)
    lines.append(_generator_text(series))
    for each in series.results:
        if reasons := dict.fromkeys(reason for run in each.runs for reason in run.figures.errors):
            lines.append(f"{each.level.title}: {_failed(each)} failed: {'; '.join(reasons)}")
    return [line for line in lines if line]


def _slo_text(series: EndpointSeries) -> str:
    parts = [
        f"{each.level.title}: {share:.0%}" for each in series.results if (share := mean(each, "good_share")) is not None
    ]
    limits = next((run.figures.slo for each in series.results for run in each.complete if run.figures.slo), "")
    return f"Requests within {limits} (ms): {', '.join(parts)}." if parts else ""


def _generator_text(series: EndpointSeries) -> str:
    late = [each for each in series.results if any(run.client.warnings for run in each.complete)]
    if not late:
        return ""
    clients = [run.client for each in late for run in each.complete]
    levels = ", ".join(f"{each.level.value:g}" for each in late)
    return (
        f"The load generator was a limit itself at {levels}: its event loop "
        f"up to {max(each.loop_late_p99_ms for each in clients):.0f} ms late (p99), up to "
        f"{max(each.cpu_share for each in clients):.0%} of a core; times are too long by about as much."
    )


def knee_of(series: EndpointSeries) -> Knee | None:
    if series.results[0].level.kind == "speed":
        return None
    return find_knee(map(point, series.results))


def knee_text(series: EndpointSeries) -> str:
    knee = knee_of(series)
    if knee is None:
        return ""
    unit = "concurrency" if series.results[0].level.kind == "concurrency" else "rate"
    tail = f"the tail (p99) leaves at {unit} {knee.tail_leaves:g}" if knee.tail_leaves else "the tail (p99) stays near"
    if not knee.saturated:
        return f"No knee up to {unit} {series.results[-1].level.value:g}: throughput may still grow; {tail}."
    return (
        f"Knee at {unit} {knee.level:g}: {knee.throughput:.0f} tok/s, {knee.throughput / knee.best:.0%} of the "
        f"best; p99 {knee.tail:.0f} ms there; {tail}."
    )


def lengths_text(series: EndpointSeries) -> str:
    """The lengths that the server counted, over all levels."""
    parts = []
    for name, seen, asked in (("ISL", "isl", "isl_asked"), ("OSL", "osl", "osl_asked")):
        means = [value for each in series.results if (value := mean(each, seen, "mean")) is not None]
        spreads = [value for each in series.results if (value := mean(each, seen, "stddev")) is not None]
        asked_lengths = [value for each in series.results if (value := mean(each, asked, "mean")) is not None]
        if not means:
            return "Lengths as asked for; the server counts no tokens."
        parts.append(
            f"{name} {sum(means) / len(means):.1f} ± {sum(spreads) / len(spreads):.1f} "
            f"(asked for {sum(asked_lengths) / len(asked_lengths):.1f})"
        )
    return f"Tokens as the server counted them: {', '.join(parts)}."


def _server(result: LevelResult) -> Iterable[str]:
    runs = result.complete
    # A decode worker counts blocks that were handed off to it as cache hits, so the answers' counts take precedence.
    hits = [run.figures.cached_share for run in runs if run.figures.cached_share is not None]
    if not hits:
        hits = [run.server.kv_hit_rate for run in runs if run.server.kv_hit_rate is not None]
    batches = [run.server.batch.mean for run in runs if run.server.batch is not None]
    usages = [run.server.kv_usage.max for run in runs if run.server.kv_usage is not None]
    yield f"{sum(hits) / len(hits):.0%}" if hits else "–"
    yield f"{sum(batches) / len(batches):.1f}" if batches else "–"
    yield f"{max(usages):.0%}" if usages else "–"


def _failed(result: LevelResult) -> int:
    return sum(run.figures.failed for run in result.runs)


def _number(value: float | None, decimals: int) -> str:
    return "–" if value is None else f"{value:,.{decimals}f}"
