"""Fronts, gains and costs as tables and sentences."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from penstock.measure.pareto.front import Gain
from penstock.measure.pareto.records import Record, kinds


def print_report(
    measured: Sequence[Record], gains: Mapping[str, Gain], baseline: str, currency: str, console: Console
) -> None:
    """Print one table for each kind, then the remarks.

    Args:
        currency: of the costs; "": there are none.
    """
    for kind, of_kind in kinds(measured).items():
        console.print(table(kind, of_kind, currency))
    for line in remarks(measured, gains, baseline, currency):
        console.print(line, markup=False, highlight=False)


def table(kind: str, of_kind: Sequence[Record], currency: str) -> Table:
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


def remarks(measured: Sequence[Record], gains: Mapping[str, Gain], baseline: str, currency: str) -> list[str]:
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
