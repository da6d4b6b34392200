"""One self-contained HTML page of a sweep: plots, tables and remarks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment

from penstock.measure.sweep.plots import COLOURS, Drawn
from penstock.measure.sweep.report import remarks
from penstock.measure.sweep.results import Result, Run, Series, mean

_TEMPLATE = Path(__file__).with_name("page.html")
_PARTS = ("mean", "p50", "p95", "p99")
_PERCENT, _GIB = 100.0, 1 << 30


class _Column(NamedTuple):
    group: str
    head: str
    figure: str
    part: str = ""
    decimals: int = 0
    scale: float = 1.0


_CLIENT = (
    _Column("throughput", "req/s", "requests_per_s", decimals=2),
    _Column("throughput", "tok/s", "output_tokens_per_s"),
    _Column("throughput", "per user", "tokens_per_s_per_user", decimals=1),
    _Column("throughput", "per GPU", "tokens_per_s_per_gpu", decimals=1),
    *(_Column("TTFT, ms", part, "ttft_ms", part) for part in _PARTS),
    *(_Column("ITL, ms", part, "itl_ms", part, 1) for part in _PARTS),
    *(_Column("gap, ms", part, "gap_ms", part, 1) for part in ("p95", "p99")),
    *(_Column("latency, ms", part, "latency_ms", part) for part in _PARTS),
    *(_Column("ISL seen", part, "isl", part, 1) for part in ("mean", "stddev")),
    *(_Column("OSL seen", part, "osl", part, 1) for part in ("mean", "stddev")),
)
_SERVER = (
    _Column("server", "running", "running", "mean", 1),
    _Column("server", "batch", "batch", "mean", 1),
    _Column("server", "waiting", "waiting", "mean", 1),
    _Column("server", "KV use, %", "kv_usage", "max", 0, _PERCENT),
    _Column("server", "KV hit, %", "kv_hit_rate", "", 0, _PERCENT),
    _Column("server", "GPU mem, GiB", "gpu_memory_bytes", "max", 1, 1 / _GIB),
    _Column("server", "GPU, %", "gpu_utilisation", "mean", 0, _PERCENT),
)


def render(title: str, series: Sequence[Series], groups: Sequence[tuple[str, Sequence[Drawn]]]) -> str:
    """
    Args:
        groups: plots by heading.
    """
    environment = Environment(autoescape=True)
    first = min(run.began for each in series for result in each.results for run in result.runs)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        about=f"Measured by penstock bench sweep from {first}. Times in milliseconds, means over repeated runs.",
        cards=[_card(each, number) for number, each in enumerate(series)],
        groups=[{"title": heading, "plots": plots} for heading, plots in groups],
        tables=[_table(each) for each in series],
    )


def _card(series: Series, number: int) -> dict[str, Any]:
    first = series.results[0]
    load = f"trace {first.trace}" if first.trace else f"ISL {first.workload.isl}, OSL {first.workload.osl} tokens"
    shared = f", {first.workload.shared_prefix:.0%} shared" if first.workload.shared_prefix else ""
    gpus = f", {first.gpus} GPU{'s' if first.gpus > 1 else ''}" if first.gpus else ""
    return {
        "name": series.name,
        "colour": COLOURS[number % len(COLOURS)],
        "where": f"{first.model} at {first.url} ({first.generator}); {load}{shared}{gpus}",
        "remarks": remarks(series),
    }


def _table(series: Series) -> dict[str, Any]:
    """A table of levels. Columns without values are left out; those of the server say that they are absent."""
    client = [
        each for each in _CLIENT if any(mean(result, each.figure, each.part) is not None for result in series.results)
    ]
    heads: list[tuple[str, bool]] = [("load", False), ("requests", True), ("failed", False)]
    groups: list[list[Any]] = [["", 1], ["requests", 2]]
    for column in (*client, *_SERVER):
        new = groups[-1][0] != column.group
        heads.append((column.head, new))
        if new:
            groups.append([column.group, 1])
        else:
            groups[-1][1] += 1
    rows = []
    for result in series.results:
        cells = [_number(mean(result, each.figure, each.part), each) for each in client]
        cells += [_number(_of_server(result, each), each) for each in _SERVER]
        counts = [sum(getattr(run.figures, name) for run in result.runs) for name in ("requests", "failed")]
        rows.append([f"{result.level.value:g}", *map(str, counts), *cells])
    return {"name": series.name, "groups": groups, "heads": heads, "rows": rows}


def _of_server(result: Result, column: _Column) -> float | None:
    def value(run: Run) -> float | None:
        figure: Any = getattr(run.server, column.figure)
        if figure is not None and column.part:
            figure = getattr(figure, column.part)
        return None if figure is None else float(figure)

    figures = [measured for run in result.complete if (measured := value(run)) is not None]
    return sum(figures) / len(figures) if figures else None


def _number(value: float | None, column: _Column) -> str:
    return "–" if value is None else f"{value * column.scale:,.{column.decimals}f}"
