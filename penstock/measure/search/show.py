"""How the candidates of a search look in a terminal."""

from collections.abc import Sequence

from rich.table import Table

from penstock.measure.pareto.cost import Prices, cost, gpu_of
from penstock.measure.search.candidates import Candidate, Sla


def table(found: Sequence[Candidate], sla: Sla, *, limited: str, rate: float, gpu: str, prices: Prices | None) -> Table:
    """A row a deployment, the best first.

    Args:
        limited: "mean", or a percentile.
        rate: requests per second that are served; 0: as many as each can.
        gpu: kind of GPU, for the prices.
    """
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column("deployment")
    what = "" if limited == "mean" else f" {limited}"
    headings = ["GPUs", f"TTFT{what} ms", f"ITL{what} ms", "at once", "req/s", "req/s per GPU"]
    for heading in (*headings, *([f"{prices.currency} per 10⁶ tokens"] if prices else [])):
        drawn.add_column(heading, justify="right")
    for each in found:
        served = min(rate, each.requests_per_s) if rate else each.requests_per_s
        row = [
            each.name,
            str(each.gpus),
            f"{each.ttft_ms:.0f}",
            f"{each.itl_ms:.1f}",
            str(each.pools[-1].concurrency),
            f"{each.requests_per_s:.3g}",
            f"{each.per_gpu:.3g}",
        ]
        if prices:
            tokens = served * sla.osl / each.gpus
            row.append(f"{cost(prices, gpu_of(prices, gpu), tokens).total:.3f}")
        drawn.add_row(*row)
    return drawn


def lines(best: Candidate, sla: Sla, basis: str, utilization: float, limited: str) -> list[str]:
    """The best one, for a terminal.

    Args:
        basis: where the times come from.
        limited: "mean", or a percentile.
    """
    return [
        f"for {limited} TTFT ≤ {sla.ttft_ms:g} ms and {limited} ITL ≤ {sla.itl_ms:g} ms, prompts of {sla.isl} tokens "
        f"and answers of {sla.osl}, {basis}:",
        f"  {best.name}: {best.gpus} GPUs, {best.requests_per_s:.3g} requests/s with at most "
        f"{utilization:.0%} of the workers' capacity",
    ]
