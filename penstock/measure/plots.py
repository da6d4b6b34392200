"""Plots of benchmarks, as PNG files. matplotlib comes with ``penstock[bench]``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class PlotsMissing(Exception):
    """matplotlib is not installed."""


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
