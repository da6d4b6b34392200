"""Plots of benchmarks, as PNG files. matplotlib comes with ``penstock[bench]``."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal


class PlotsMissing(Exception):
    """matplotlib is not installed."""


@contextlib.contextmanager
def drawn(
    path: Path,
    width: float,
    height: float,
    *,
    dpi: int = 100,
    style: Mapping[str, Any] = {},
    layout: Literal["constrained"] | None = "constrained",
) -> Iterator[Any]:
    """A figure to draw on, which is saved afterwards.

    Args:
        width, height: inches.
        style: parameters of matplotlib.
        layout: None: the caller sets margins itself.

    Raises:
        PlotsMissing: with the command that installs matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotsMissing("plots need matplotlib: pip install 'penstock[bench]'") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(dict(style)):
        figure = Figure(figsize=(width, height), layout=layout)
        yield figure
        figure.savefig(path, dpi=dpi, bbox_inches="tight" if figure.texts else None)


def plot_prefix_ratios(
    ratios: Sequence[float], ttft_ms: dict[str, list[float]], tokens: dict[str, list[float]], path: Path
) -> None:
    """TTFT and tokens/s by share of the prompt that is common, a line a deployment.

    Raises:
        PlotsMissing: with the command that installs it.
    """
    with drawn(path, 7.2, 2.6) as figure:
        axes = figure.subplots(1, 2)
        for axis, values, unit in zip(axes, (ttft_ms, tokens), ("TTFT, mean (ms)", "tokens/s"), strict=True):
            for name, line in values.items():
                axis.plot(ratios, line, marker="o", markersize=3, label=name)
            axis.set_xlabel("common share of the prompt", fontsize=8)
            axis.set_ylabel(unit, fontsize=8)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
        axes[0].legend(fontsize=7)
