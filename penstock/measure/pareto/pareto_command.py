"""``penstock bench pareto``: throughput per GPU and cost against tokens/s per user, from the results of sweeps."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from penstock.cli.terminal import fail, stdout
from penstock.configs.flags import Parser
from penstock.measure.pareto import plots
from penstock.measure.pareto.records import (
    BadDeployment,
    BadPrices,
    Gain,
    ParetoRecord,
    Prices,
    deployment_of,
    fronts,
    gains,
    kinds,
    marked,
    overridden,
    parse_deployment,
    read_prices,
    records,
)
from penstock.measure.plots import PlotsMissing
from penstock.measure.sweep.results import BadResults, EndpointSeries, read_series


def print_report(
    measured: Sequence[ParetoRecord], gains: Mapping[str, Gain], baseline: str, currency: str, console: Console
) -> None:
    """Print one table for each kind, then the remarks.

    Args:
        currency: of the costs; "": there are none.
    """
    for kind, of_kind in kinds(measured).items():
        console.print(table(kind, of_kind, currency))
    for line in remarks(measured, gains, baseline, currency):
        console.print(line, markup=False, highlight=False)


def table(kind: str, of_kind: Sequence[ParetoRecord], currency: str) -> Table:
    """A table of records by tokens/s per user. Those on the front are marked."""
    shown = Table(title=f"{kind}: output tokens/s, times in ms", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    shown.add_column("deployment")
    headings = ["GPUs", "load", "/user", "/GPU", "TTFT p99", "latency p50"]
    if currency:
        headings += ["hardware", "energy", f"{currency}/M", "kWh/M"]
    for heading in headings:
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("front", justify="center")
    for each in sorted(of_kind, key=lambda record: record.output_tokens_per_s_per_user):
        cells = [
            f"{each.total_gpus}",
            f"{each.level:g}" if each.concurrency is not None else f"{each.load} {each.level:g}",
            f"{each.output_tokens_per_s_per_user:,.1f}",
            f"{each.output_tokens_per_s_per_gpu:,.1f}",
            "–" if each.ttft_p99_ms is None else f"{each.ttft_p99_ms:,.0f}",
            f"{each.latency_p50_ms:,.0f}",
        ]
        if currency and each.cost:
            cells += [f"{value:.3f}" for value in (each.cost.hardware, each.cost.energy, each.cost.total)]
            cells.append(f"{each.cost.energy_kwh:.3f}")
        shown.add_row(each.name, *cells, "●" if each.on_front else "", style="" if each.on_front else "dim")
    return shown


def remarks(measured: Sequence[ParetoRecord], gains: Mapping[str, Gain], baseline: str, currency: str) -> list[str]:
    """Sentences about the gains, the cheapest level of each kind, and the limits of the comparison."""
    lines = [
        f"{kind}: {gain.ratio:.2f} × the tokens/s per GPU of {baseline}, at {gain.x:.1f} tokens/s per user "
        f"({gain.ours:,.1f} against {gain.theirs:,.1f})."
        for kind, gain in gains.items()
    ]
    if currency:
        for kind, of_kind in kinds(measured).items():
            lowest, each = min(((each.cost.total, each) for each in of_kind if each.cost), key=lambda priced: priced[0])
            lines.append(
                f"{kind}: from {lowest:.3f} {currency} per million output tokens, at {each.load} {each.level:g} of "
                f"{each.name} ({each.output_tokens_per_s_per_user:.1f} tokens/s per user)."
            )
    if len(models := dict.fromkeys(each.model for each in measured)) > 1:
        lines.append(f"Not the same model everywhere: {', '.join(models)}.")
    for each in measured:
        if each.failed:
            lines.append(f"{each.name}, {each.load} {each.level:g}: {each.failed} requests failed and are not counted.")
    return lines


_WIDTH = 160


def run(argv: Sequence[str]) -> int:
    """Write plots, records and summary; 1 if results, a description or a price cannot be used."""
    args = _parser().parse_args(argv)
    folders = [Path(each) for each in args.results]
    out = Path(args.out) if args.out else folders[0] / "plots"
    try:
        prices = _prices(Path(args.prices)) if args.prices else None
        series = read_series(folders)
        points = _records(series, parse_deployment(args.deployment), prices)
        lines = fronts(points)
        baseline = _baseline(args.baseline, list(lines))
        higher = gains(lines, baseline, args.pace)
        plots.draw_efficiency(points, higher, baseline, out / "pareto.png")
        if prices is not None:
            plots.draw_cost(points, plots.AGAINST[args.cost_against], prices.currency, out / "cost.png")
    except (BadResults, BadDeployment, BadPrices, PlotsMissing) as error:
        return fail("bench pareto", error)
    currency = prices.currency if prices else ""
    (out / "pareto.json").write_bytes(as_json(points, higher, baseline, prices))
    with (out / "pareto.txt").open("w", encoding="utf-8") as file:
        print_report(points, higher, baseline, currency, Console(file=file, width=_WIDTH))
    print_report(points, higher, baseline, currency, stdout())
    if len(loads := _workloads(series)) > 1:
        print(f"The loads differ, so the fronts are not comparable: {'; '.join(loads)}.")
    print(f"\npareto.png,{' cost.png,' if prices else ''} pareto.json and pareto.txt in {out}")
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="penstock bench pareto",
        description="compare deployments that `penstock bench sweep` has measured by GPU and by cost",
        epilog="a deployment.json beside the results says the same as --deployment",
    )
    parser.add_argument("results", metavar="DIR", nargs="+", help="--out of a sweep, or the folder of one endpoint")
    parser.add_argument(
        "--deployment",
        metavar="NAME:FIELD=VALUE,…",
        action="append",
        default=[],
        help="kind, total_gpus, gpu, workers, prefill_workers, decode_workers of an endpoint, or any other setting",
    )
    parser.add_argument("--baseline", metavar="KIND", default="", help="to compare with (default: the first one)")
    parser.add_argument(
        "--pace", metavar="N", type=float, default=0.0, help="tokens/s per user to compare at (default: largest ratio)"
    )
    parser.add_argument("--prices", metavar="FILE", default="", help="YAML file with prices, for the cost curve")
    parser.add_argument(
        "--cost-against",
        choices=sorted(plots.AGAINST),
        default="pace",
        help="plot cost against tokens/s per user (pace), p50 of the latency, or p99 of TTFT (default: pace)",
    )
    parser.add_argument("--out", metavar="FOLDER", default="", help="for the files; default: plots in the first DIR")
    return parser


def _prices(path: Path) -> Prices:
    try:
        return read_prices(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadPrices(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, BadPrices) as error:
        raise BadPrices(f"{path}: {error}") from None


def _records(
    series: Sequence[EndpointSeries], descriptions: Mapping[str, dict[str, str]], prices: Prices | None
) -> list[ParetoRecord]:
    names = [each.name for each in series]
    if unknown := sorted(descriptions.keys() - set(names)):
        raise BadDeployment(f"--deployment: no endpoint is called {', '.join(unknown)}; there are {', '.join(names)}")
    measured: list[ParetoRecord] = []
    for each in series:
        made_of = overridden(deployment_of(each.folder), descriptions.get(each.name, {}))
        measured += records(each, made_of, prices)
    if not measured:
        raise BadResults("no level has streamed answers, so none has a pace per user; sweep with --stream")
    return marked(measured)


def _baseline(name: str, kinds: Sequence[str]) -> str:
    if name and name not in kinds:
        raise BadDeployment(f"--baseline {name}: no deployment is of that kind; there are {', '.join(kinds)}")
    return name or kinds[0]


def _workloads(series: Sequence[EndpointSeries]) -> list[str]:
    loads = (
        f"trace {result.trace}" if result.trace else f"ISL {result.workload.isl}, OSL {result.workload.osl}"
        for each in series
        for result in each.results
    )
    return list(dict.fromkeys(loads))


def as_json(
    measured: Sequence[ParetoRecord], higher: Mapping[str, Gain], baseline: str, prices: Prices | None
) -> bytes:
    """``pareto.json``: the records, the gains, and the prices they were computed with."""
    page = {
        "records": measured,
        "baseline": baseline,
        "gains": {
            kind: {
                "ratio": gain.ratio,
                "output_tokens_per_s_per_user": gain.x,
                "output_tokens_per_s_per_gpu": gain.ours,
                "baseline_output_tokens_per_s_per_gpu": gain.theirs,
            }
            for kind, gain in higher.items()
        },
        "prices": prices,
    }
    return msgspec.json.format(msgspec.json.encode(page), indent=2) + b"\n"
