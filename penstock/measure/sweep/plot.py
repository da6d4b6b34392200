"""``penstock bench plot``: plots, a page and a summary of the results of ``penstock bench sweep``."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from penstock.configs.flags import Parser
from penstock.measure.plots import PlotsMissing
from penstock.measure.sweep.page import render
from penstock.measure.sweep.plots import draw
from penstock.measure.sweep.report import knee_of, print_report
from penstock.measure.sweep.results import BadResults, Series, read_series, values_of

_WIDTH = 220
_HEADINGS = {"concurrency": "By concurrency", "rate": "By request rate", "speed": "By speed of the trace"}
_SUMMARISED = (
    "requests_per_s",
    "output_tokens_per_s",
    "tokens_per_s_per_user",
    "tokens_per_s_per_gpu",
    "cached_share",
)
_DISTRIBUTIONS = ("ttft_ms", "itl_ms", "gap_ms", "latency_ms", "isl", "osl")


def run(argv: Sequence[str]) -> int:
    """Write the files. Returns 1 if there are no results or no matplotlib."""
    parser = Parser(prog="penstock bench plot", description="plot what `penstock bench sweep` has measured")
    parser.add_argument("results", metavar="DIR", nargs="+", help="--out of a sweep, or the folder of one endpoint")
    parser.add_argument("--out", metavar="FOLDER", default="", help="for the files; default: plots in the first DIR")
    parser.add_argument("--title", default="Benchmark", help="of the page (default: Benchmark)")
    args = parser.parse_args(argv)
    folders = [Path(each) for each in args.results]
    out = Path(args.out) if args.out else folders[0] / "plots"
    try:
        series = [part for each in read_series(folders) for part in by_kind(each)]
        groups = []
        for kind, heading in _HEADINGS.items():
            if same := [each for each in series if each.results[0].level.kind == kind]:
                groups.append((heading, draw(same, out)))
    except (BadResults, PlotsMissing) as error:
        print(f"penstock bench plot: {error}", file=sys.stderr)
        return 1
    (out / "index.html").write_text(render(args.title, series, groups), encoding="utf-8")
    with (out / "summary.txt").open("w", encoding="utf-8") as file:
        print_report(series, Console(file=file, width=_WIDTH))
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary(series)), indent=2) + b"\n")
    print_report(series)
    print(f"\n{sum(len(plots) for _, plots in groups)} plots, summary.txt, summary.json and index.html in {out}")
    return 0


def by_kind(series: Series) -> list[Series]:
    """Split a series by kind of load."""
    kinds = dict.fromkeys(result.level.kind for result in series.results)
    return [
        msgspec.structs.replace(series, results=tuple(result for result in series.results if result.level.kind == kind))
        for kind in kinds
    ]


def summary(series: Sequence[Series]) -> list[dict[str, Any]]:
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
