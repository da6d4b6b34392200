"""``penstock bench plot``: plots and a summary of the results of ``penstock bench sweep``."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from penstock.cli.terminal import fail
from penstock.configs.flags import Parser
from penstock.measure.plots import PlotsMissing, drawn
from penstock.measure.sweep.report import knee_of, load_text, print_report
from penstock.measure.sweep.results import BadResults, EndpointSeries, LevelResult, mean, read_series, values_of

COLOURS = ("#0f766e", "#c2410c", "#4338ca", "#a16207", "#be185d", "#4d7c0f", "#0369a1", "#6b7280")
_INK, _MUTED, _GRID = "#1f2937", "#6b7280", "#e5e7eb"
STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "text.color": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
}


class PlotLine(NamedTuple):
    """A figure by level: its source, and its style.

    Attributes:
        label: after the endpoint's name, where a plot has several lines for each.
    """

    figure: str
    part: str = ""
    label: str = ""
    style: str = "-"


class Plot(NamedTuple):
    """
    Attributes:
        name: of its file; "{x}" is the kind of load.
        knee: mark where throughput stops growing.
    """

    name: str
    title: str
    unit: str
    lines: tuple[PlotLine, ...]
    scale: float = 1.0
    knee: bool = False


PLOTS = (
    Plot(
        "output_token_throughput_vs_{x}",
        "Output throughput",
        "tokens/s",
        (PlotLine("output_tokens_per_s"),),
        knee=True,
    ),
    Plot("request_throughput_vs_{x}", "Request throughput", "requests/s", (PlotLine("requests_per_s"),)),
    Plot("avg_time_to_first_token_vs_{x}", "Time to first token, mean", "ms", (PlotLine("ttft_ms", "mean"),)),
    Plot(
        "time_to_first_token_percentiles_vs_{x}",
        "Time to first token, p50 and p99",
        "ms",
        (PlotLine("ttft_ms", "p50", "p50"), PlotLine("ttft_ms", "p99", "p99", "--")),
    ),
    Plot("p50_inter_token_latency_vs_{x}", "Inter-token latency, p50", "ms", (PlotLine("itl_ms", "p50"),)),
    Plot("avg_inter_token_latency_vs_{x}", "Inter-token latency, mean", "ms", (PlotLine("itl_ms", "mean"),)),
    Plot(
        "request_latency_percentiles_vs_{x}",
        "Request latency, p50 and p99",
        "s",
        (PlotLine("latency_ms", "p50", "p50"), PlotLine("latency_ms", "p99", "p99", "--")),
        scale=1e-3,
    ),
    Plot("goodput_vs_{x}", "Goodput: requests within the limits", "requests/s", (PlotLine("good_per_s"),)),
    Plot(
        "kv_hit_rate_vs_{x}",
        "Prompt tokens found in the KV cache",
        "%",
        (PlotLine("cached_share"),),
        scale=100.0,
    ),
)
EFFICIENCY = "efficiency_tok_s_gpu_vs_user"
_AXES = {
    "concurrency": "concurrency (requests under way)",
    "rate": "requests per second offered",
    "speed": "speed-up of the trace",
}


def draw(series: Sequence[EndpointSeries], folder: Path) -> int:
    """Write all plots that have data as PNG; their number.

    Args:
        series: of one kind of load.

    Raises:
        PlotsMissing: with the command that installs matplotlib.
    """
    kind = series[0].results[0].level.kind
    count = 0
    for name, title, paint in _painters(series, kind):
        with drawn(folder / f"{name}.png", 6.4, 3.8, dpi=160, style=STYLE) as figure:
            axis = figure.subplots()
            paint(axis)
            axis.set_title(title)
            for line, text in enumerate(workloads(series)):
                figure.text(0.01, -0.03 - 0.045 * line, text, fontsize=7, color=_MUTED)
            if len(series) > 1 or len(axis.get_legend_handles_labels()[0]) > 1:
                axis.legend(fontsize=8.5, handlelength=2.4)
        count += 1
    return count


def workloads(series: Sequence[EndpointSeries]) -> list[str]:
    """What the series measured: the load, the number of requests, and which endpoints it is of where they differ."""
    texts: dict[str, list[str]] = {}
    for each in series:
        first = each.results[0]
        counts = sorted({result.level.requests for result in each.results})
        many = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        runs = max(len(result.complete) for result in each.results)
        text = f"{first.model}: {load_text(first)}; {many} requests a level" + (f", {runs} runs" if runs > 1 else "")
        shares = [share for result in each.results if (share := mean(result, "cached_share")) is not None]
        bounds = list(dict.fromkeys(f"{share:.0%}" for share in (min(shares), max(shares)))) if shares else []
        text += f"; {' to '.join(bounds)} of prompt tokens from the cache" if bounds else ""
        texts.setdefault(text, []).append(each.name)
    return [text if len(texts) == 1 else f"{', '.join(names)}: {text}" for text, names in texts.items()]


def _painters(series: Sequence[EndpointSeries], kind: str) -> Iterator[tuple[str, str, Callable[[Any], None]]]:
    """Name, title and drawing of each plot that has data."""
    results = [result for each in series for result in each.results]
    if any(mean(result, "tokens_per_s_per_user") is not None for result in results):
        per_gpu = all(result.gpus for result in results)
        title = (
            "Efficiency: throughput per GPU against pace per user" if per_gpu else "Throughput against pace per user"
        )
        yield EFFICIENCY, title, lambda axis: _efficiency(axis, series, per_gpu)
    for plot in PLOTS:
        if any(mean(result, *line[:2]) is not None for line in plot.lines for result in results):
            yield plot.name.format(x=kind), plot.title, partial(_by_level, plot=plot, series=series, kind=kind)


def _by_level(axis: Any, plot: Plot, series: Sequence[EndpointSeries], kind: str) -> None:
    levels = sorted({result.level.value for each in series for result in each.results})
    for number, each in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        for line in plot.lines:
            points = [(result.level.value, values_of(result, *line[:2])) for result in each.results]
            scaled = [(x, [value * plot.scale for value in values]) for x, values in points if values]
            if not scaled:
                continue
            x = [at for at, _ in scaled]
            label = f"{each.name} {line.label}".strip()
            means = [sum(values) / len(values) for _, values in scaled]
            axis.plot(x, means, line.style, marker="o", color=colour, label=label)
            low, high = ([pick(values) for _, values in scaled] for pick in (min, max))
            if low != high:
                axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        if plot.knee:
            _mark_knee(axis, each, colour)
    if len(levels) > 2 and levels[-1] / levels[0] > 8:
        axis.set_xscale("log")
    axis.set_xticks(_apart(levels), [f"{level:g}" for level in _apart(levels)])
    axis.minorticks_off()
    axis.set_ylim(0, 100 if plot.unit == "%" else axis.get_ylim()[1] * 1.06)
    axis.set_xlabel(_AXES[kind])
    axis.set_ylabel(plot.unit)


def _apart(levels: Sequence[float]) -> list[float]:
    """The levels whose labels do not touch on a logarithmic axis."""
    kept: list[float] = []
    for level in levels:
        if not kept or level / kept[-1] >= (levels[-1] / levels[0]) ** (1 / 14):
            kept.append(level)
    return kept


def _mark_knee(axis: Any, series: EndpointSeries, colour: str) -> None:
    knee = knee_of(series)
    if knee is None or not knee.saturated:
        return
    axis.axvline(knee.level, color=colour, linewidth=1, linestyle=":")
    axis.annotate(
        f"knee {knee.level:g}",
        (knee.level, knee.throughput),
        textcoords="offset points",
        xytext=(5, -13),
        fontsize=8,
        color=colour,
    )


def _efficiency(axis: Any, series: Sequence[EndpointSeries], per_gpu: bool) -> None:
    for number, each in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        points = [(x, y, result) for result in each.results if (xy := _pace(result, per_gpu)) for x, y in [xy]]
        axis.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o", color=colour, label=each.name)
        below = number % 2  # labels of two lines on either side
        for x, y, result in points:
            axis.annotate(
                f"{result.level.value:g}",
                (x, y),
                textcoords="offset points",
                xytext=(-6, -10) if below else (5, 4),
                ha="right" if below else "left",
                fontsize=8,
                color=colour,
            )
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.margins(0.06)
    axis.set_xlabel("tokens/s per user")
    axis.set_ylabel("tokens/s per GPU" if per_gpu else "tokens/s (GPUs unknown: --gpus)")


def _pace(result: LevelResult, per_gpu: bool) -> tuple[float, float] | None:
    pace = mean(result, "tokens_per_s_per_user")
    throughput = mean(result, "tokens_per_s_per_gpu" if per_gpu else "output_tokens_per_s")
    return None if pace is None or throughput is None else (pace, throughput)


_WIDTH = 220
_SUMMARISED = (
    "requests_per_s",
    "output_tokens_per_s",
    "tokens_per_s_per_user",
    "tokens_per_s_per_gpu",
    "cached_share",
    "good_per_s",
    "good_share",
)
_DISTRIBUTIONS = ("ttft_ms", "itl_ms", "gap_ms", "latency_ms", "isl", "osl")


def run(argv: Sequence[str]) -> int:
    """Write the files. Returns 1 if there are no results or no matplotlib."""
    parser = Parser(prog="penstock bench plot", description="plot what `penstock bench sweep` has measured")
    parser.add_argument("results", metavar="DIR", nargs="+", help="--out of a sweep, or the folder of one endpoint")
    parser.add_argument("--out", metavar="FOLDER", default="", help="for the files; default: plots in the first DIR")
    args = parser.parse_args(argv)
    folders = [Path(each) for each in args.results]
    out = Path(args.out) if args.out else folders[0] / "plots"
    try:
        series = [part for each in read_series(folders) for part in by_kind(each)]
        count = 0
        for kind in dict.fromkeys(each.results[0].level.kind for each in series):
            count += draw([each for each in series if each.results[0].level.kind == kind], out)
    except (BadResults, PlotsMissing) as error:
        return fail("bench plot", error)
    with (out / "summary.txt").open("w", encoding="utf-8") as file:
        print_report(series, Console(file=file, width=_WIDTH))
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary(series)), indent=2) + b"\n")
    print_report(series)
    print(f"\n{count} plots, summary.txt and summary.json in {out}")
    return 0


def by_kind(series: EndpointSeries) -> list[EndpointSeries]:
    """Split a series by kind of load."""
    kinds = dict.fromkeys(result.level.kind for result in series.results)
    return [
        msgspec.structs.replace(series, results=tuple(result for result in series.results if result.level.kind == kind))
        for kind in kinds
    ]


def summary(series: Sequence[EndpointSeries]) -> list[dict[str, Any]]:
    """The numbers behind the plots: for each level, the values of its runs."""
    return [
        {
            "name": each.name,
            "kind": each.results[0].level.kind,
            "levels": [result.level.value for result in each.results],
            "knee": knee_of(each),
            "figures": {name: [values_of(result, name) for result in each.results] for name in _SUMMARISED}
            | {
                f"{name}.{part}": [values_of(result, name, part) for result in each.results]
                for name in _DISTRIBUTIONS
                for part in ("mean", "p50", "p95", "p99")
            },
        }
        for each in series
    ]
