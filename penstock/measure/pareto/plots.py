"""Plots throughput per GPU, and cost, against tokens/s per user or latency: all points, and the front of each kind."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.measure.pareto.records import Gain, ParetoRecord, efficiency, front, fronts, kinds
from penstock.measure.plots import drawn
from penstock.measure.sweep.plot import COLOURS, STYLE

_MUTED = "#6b7280"


class Against(NamedTuple):
    """The horizontal axis of a cost plot.

    Attributes:
        sign: 1 if more is better, -1 if less is.
    """

    label: str
    value: Callable[[ParetoRecord], float | None]
    sign: int


AGAINST = {
    "pace": Against("tokens/s per user", lambda record: record.output_tokens_per_s_per_user, 1),
    "latency": Against("request latency, p50 (ms)", lambda record: record.latency_p50_ms, -1),
    "ttft": Against("time to first token, p99 (ms)", lambda record: record.ttft_p99_ms, -1),
}


def cost_fronts(measured: Sequence[ParetoRecord], against: Against) -> dict[str, list[tuple[float, float]]]:
    """For each kind, the lowest cost of a million tokens by ``against``, ascending."""
    lines = {}
    for kind, of_kind in kinds(measured).items():
        points = [(x, each.cost.total) for each in of_kind if each.cost and (x := against.value(each)) is not None]
        best = front(points, lambda point: (against.sign * point[0], -point[1]))
        lines[kind] = sorted(best)
    return lines


def draw_efficiency(measured: Sequence[ParetoRecord], gains: Mapping[str, Gain], baseline: str, path: Path) -> None:
    """Plot tokens/s per GPU against tokens/s per user, and mark how far each other kind is above ``baseline``.

    Raises:
        PlotsMissing: with the command that installs matplotlib.
    """

    def paint(axis: Any) -> None:
        lines = {kind: [efficiency(each) for each in line] for kind, line in fronts(measured).items()}
        _paint(axis, lines, {kind: [efficiency(each) for each in all_] for kind, all_ in kinds(measured).items()})
        _label_levels(axis, measured)
        for kind, gain in gains.items():
            _mark_gain(axis, gain, _colour(list(lines), kind))
        axis.set_title("Throughput per GPU against pace per user")
        axis.set_xlabel("tokens/s per user")
        axis.set_ylabel("tokens/s per GPU")
        if gains:
            axis.plot([], [], " ", label=f"×: ratio to {baseline}")

    _save(paint, path)


def draw_estimates(points: Mapping[str, Sequence[tuple[float, float]]], title: str, pace: float, path: Path) -> None:
    """Plot tokens/s per GPU against tokens/s per user: by kind, all points and the front.

    Args:
        points: tokens/s per user, and per GPU, of deployments that are not measured.
        pace: tokens/s per user that are wanted, as a line.
    Raises:
        PlotsMissing: with the command that installs matplotlib.
    """

    def paint(axis: Any) -> None:
        _paint(axis, {kind: sorted(front(every, lambda point: point)) for kind, every in points.items()}, points)
        axis.axvline(pace, color=_MUTED, linewidth=0.8, linestyle=":", label="wanted")
        axis.set_title(title)
        axis.set_xlabel("tokens/s per user")
        axis.set_ylabel("tokens/s per GPU")

    _save(paint, path)


def draw_cost(measured: Sequence[ParetoRecord], against: Against, currency: str, path: Path) -> None:
    """Plot the cost of a million output tokens against tokens/s per user or latency.

    Raises:
        PlotsMissing: with the command that installs matplotlib.
    """

    def paint(axis: Any) -> None:
        every = {
            kind: [(x, each.cost.total) for each in all_ if each.cost and (x := against.value(each)) is not None]
            for kind, all_ in kinds(measured).items()
        }
        _paint(axis, cost_fronts(measured, against), every)
        axis.set_title("Cost of a million output tokens")
        axis.set_xlabel(against.label)
        axis.set_ylabel(currency)

    _save(paint, path)


Lines = Mapping[str, Sequence[tuple[float, float]]]


def _paint(axis: Any, lines: Lines, every: Lines) -> None:
    """Draw the fronts as lines, and dominated points pale."""
    for kind, line in lines.items():
        colour = _colour(list(lines), kind)
        beaten = [point for point in every[kind] if point not in line]
        if beaten:
            axis.scatter([x for x, _ in beaten], [y for _, y in beaten], s=18, color=colour, alpha=0.35, linewidths=0)
        axis.plot([x for x, _ in line], [y for _, y in line], marker="o", color=colour, label=kind)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.margins(0.08)


def _label_levels(axis: Any, measured: Sequence[ParetoRecord]) -> None:
    names = list(kinds(measured))
    for kind, line in fronts(measured).items():
        below = names.index(kind) % 2  # labels of two lines on either side
        for each in line:
            axis.annotate(
                f"{each.level:g}",
                efficiency(each),
                textcoords="offset points",
                xytext=(-6, -10) if below else (5, 4),
                ha="right" if below else "left",
                fontsize=8,
                color=_colour(names, kind),
            )


def _mark_gain(axis: Any, gain: Gain, colour: str) -> None:
    """Draw an arrow from the baseline's front to the other one, with its ratio above the points."""
    axis.annotate(
        "", (gain.x, gain.ours), (gain.x, gain.theirs), arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.4}
    )
    axis.annotate(
        f"{gain.ratio:.2f} ×",
        (gain.x, max(gain.ours, gain.theirs)),
        textcoords="offset points",
        xytext=(0, 44),
        ha="center",
        fontsize=10,
        fontweight="bold",
        color=colour,
        arrowprops={"arrowstyle": "-", "color": _MUTED, "lw": 0.7, "linestyle": ":"},
    )


def _colour(names: Sequence[str], name: str) -> str:
    return COLOURS[names.index(name) % len(COLOURS)]


def _save(paint: Callable[[Any], None], path: Path) -> None:
    with drawn(path, 6.4, 4.2, dpi=160, style=STYLE) as figure:
        axis = figure.subplots()
        paint(axis)
        axis.legend(fontsize=8.5, handlelength=2.4)
