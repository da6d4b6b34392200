"""Plots of benchmarks, as PNG files. matplotlib comes with ``penstock[bench]``."""

import contextlib
from collections.abc import Iterator, Mapping
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
