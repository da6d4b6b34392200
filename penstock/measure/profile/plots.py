"""Plots of a profile: prefill by length, decode by KV usage and context. matplotlib comes with ``penstock[bench]``."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from penstock.measure.plots import PlotsMissing
from penstock.measure.profile.data import Decode, Prefill, Profile

_LINE = "#0f766e"


def draw(profile: Profile, folder: Path) -> list[Path]:
    """Write the plots for which there is data, and return their paths.

    Raises:
        PlotsMissing: with the command that installs matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotsMissing("plots need matplotlib: pip install 'penstock[bench]'") from None
    painters: dict[str, Callable[[Any], None]] = {}
    if profile.prefill.prefill_isl:
        painters["prefill.png"] = partial(_prefill, data=profile.prefill)
    if profile.decode.decode_isl:
        painters["decode.png"] = partial(_decode, data=profile.decode)
    for name, paint in painters.items():
        figure = Figure(figsize=(11, 4.8))
        paint(figure)
        figure.savefig(folder / name, dpi=120)
    return [folder / name for name in painters]


def _prefill(figure: Any, data: Prefill) -> None:
    columns = (data.prefill_ttft, data.prefill_thpt_per_gpu)
    titles = (("Time to first token", "ms"), ("Prompt throughput", "tokens/s per GPU"))
    for axis, values, (title, unit) in zip(figure.subplots(1, 2), columns, titles, strict=True):
        axis.plot(data.prefill_isl, values, marker="o", markersize=4, color=_LINE)
        axis.set_title(title)
        axis.set_xlabel("prompt tokens")
        axis.set_ylabel(unit)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.tight_layout()


def _decode(figure: Any, data: Decode) -> None:
    columns = (data.z_itl, data.z_thpt_per_gpu)
    contexts = [tokens / 1e3 for tokens in data.y_context_length]
    titles = (("Inter-token latency", "ms"), ("Output throughput", "tokens/s per GPU"))
    for place, values, (title, unit) in zip((121, 122), columns, titles, strict=True):
        axis = figure.add_subplot(place, projection="3d")
        usage = [100 * share for share in data.x_kv_usage]
        axis.scatter(usage, contexts, values, c=values, cmap="viridis", depthshade=False)
        for context in dict.fromkeys(contexts):
            own = [row for row in zip(usage, contexts, values, strict=True) if row[1] == context]
            axis.plot(*zip(*own, strict=True), color=_LINE, linewidth=0.8, alpha=0.6)
        axis.set_title(f"{title} ({unit})")
        axis.set_xlabel("KV cache in use (%)", labelpad=8)
        axis.set_ylabel("context (thousand tokens)", labelpad=8)
        axis.set_zlim(bottom=0)
        axis.view_init(elev=22, azim=-128)
    figure.subplots_adjust(left=0.0, right=0.97, bottom=0.06, top=0.94, wspace=0.05)  # 3-D labels have no layout engine
