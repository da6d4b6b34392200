"""Plots of benchmarks, as PNG files. matplotlib comes with ``penstock[bench]``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.measure.simulation.comparison import Summary


class PlotsMissing(Exception):
    """matplotlib is not installed."""


def plot_loads(summaries: Sequence[Summary], path: Path) -> None:
    """TTFT (mean and p99) and end-to-end time by load: a row a workload, a line a policy.

    Raises:
        PlotsMissing: with the command that installs it.
    """
    workloads = list(dict.fromkeys(each.workload for each in summaries))
    figure, axes = _subplots(len(workloads), 3)
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
    _save(figure, path)


def plot_prefix_ratios(
    ratios: Sequence[float], ttft_ms: dict[str, list[float]], tokens: dict[str, list[float]], path: Path
) -> None:
    """TTFT and tokens/s by share of the prompt that is common, a line a deployment.

    Raises:
        PlotsMissing: with the command that installs it.
    """
    figure, axes = _subplots(1, 2)
    for axis, values, unit in zip(axes[0], (ttft_ms, tokens), ("TTFT, mean (ms)", "tokens/s"), strict=True):
        for name, line in values.items():
            axis.plot(ratios, line, marker="o", markersize=3, label=name)
        axis.set_xlabel("common share of the prompt", fontsize=8)
        axis.set_ylabel(unit, fontsize=8)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    _save(figure, path)


def _subplots(rows: int, columns: int) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotsMissing("plots need matplotlib: pip install 'penstock[bench]'") from None
    figure = Figure(figsize=(3.6 * columns, 2.6 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
