"""The plot of a simulated plan: the load, the workers, and the latencies. matplotlib comes with ``penstock[bench]``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.measure.planner.simulation.run import Simulated
from penstock.measure.plots import PlotsMissing
from penstock.schemas.plans import Role, Rules, Times

_COLOURS: dict[Role, str] = {"aggregated": "#0f766e", "prefill": "#b45309", "decode": "#0f766e"}
_SEEN, _LIMIT = "#334155", "#b91c1c"


def draw(planned: Simulated, fixed: Sequence[Simulated], rules: Rules, path: Path) -> None:
    """
    Args:
        fixed: for the comparison of limits kept against GPU-hours.

    Raises:
        PlotsMissing: with the command that installs matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotsMissing("plots need matplotlib: pip install 'penstock[bench]'") from None
    figure = Figure(figsize=(11, 7.2), layout="constrained")
    load, workers, ttft, itl, sizes = _axes(figure)
    minutes = [step.at_s / 60 for step in planned.steps]
    load.plot(minutes, [step.observed.rate for step in planned.steps], color=_SEEN, label="arrived")
    known = [step for step in planned.steps if step.decision]
    load.plot(
        [step.at_s / 60 for step in known],
        [step.decision.demand.rate for step in known if step.decision],
        color=_LIMIT,
        linewidth=0.9,
        linestyle="--",
        label="planned for",
    )
    _titled(load, "Requests per second", legend=True)
    for role in dict.fromkeys(each[0] for each in planned.lives):
        times, counts = _counts(planned, role)
        workers.step([at / 60 for at in times], counts, where="post", color=_COLOURS[role], label=role)
    _titled(workers, "Workers, starting ones included", legend=True)
    _latency(ttft, planned, "ttft", rules.ttft_ms, "TTFT (ms)")
    _latency(itl, planned, "itl", rules.itl_ms, "ITL (ms)")
    for number, each in enumerate(sorted((*fixed, planned), key=lambda each: each.outcome.gpu_hours)):
        own = each is planned
        x, y = each.outcome.gpu_hours, 100 * each.outcome.attained
        sizes.plot([x], [y], "o", color=_LIMIT if own else _SEEN, markersize=7 if own else 5)
        sizes.annotate(
            each.outcome.name, (x, y), textcoords="offset points", xytext=(6, 6 if number % 2 else -12), fontsize=8
        )
    _titled(sizes, "Requests within both limits (%)")
    sizes.set_xlabel("GPU-hours", fontsize=8)
    sizes.set_ylim(0, 104)
    sizes.set_xlim(0, 1.25 * max(each.outcome.gpu_hours for each in (*fixed, planned)))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _axes(figure: Any) -> tuple[Any, Any, Any, Any, Any]:
    grid = figure.add_gridspec(4, 2, width_ratios=[1.7, 1])
    rows = [figure.add_subplot(grid[row, 0]) for row in range(4)]
    rows[-1].set_xlabel("minutes", fontsize=8)
    return rows[0], rows[1], rows[2], rows[3], figure.add_subplot(grid[:, 1])


def _titled(axis: Any, title: str, *, legend: bool = False) -> None:
    axis.set_title(title, fontsize=9, loc="left")
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)
    axis.set_ylim(bottom=0)
    if legend:
        axis.legend(fontsize=8, loc="upper right")


def _latency(axis: Any, planned: Simulated, name: str, limit: float, title: str) -> None:
    seen: list[tuple[float, Times]] = [
        (step.at_s / 60, found) for step in planned.steps if (found := getattr(step.observed, name))
    ]
    for kind, colour in (("p50", "#94a3b8"), ("p95", _SEEN)):
        axis.plot([at for at, _ in seen], [getattr(found, kind) for _, found in seen], color=colour, label=kind)
    axis.axhline(limit, color=_LIMIT, linewidth=0.9, linestyle="--", label="limit")
    _titled(axis, title, legend=True)
    axis.set_ylim(0, 2.2 * limit)


def _counts(planned: Simulated, role: Role) -> tuple[list[float], list[int]]:
    changes = [(begin, 1) for kind, begin, _ in planned.lives if kind == role]
    changes += [(end, -1) for kind, _, end in planned.lives if kind == role]
    times, counts, running = [], [], 0
    for at, change in sorted(changes):
        running += change
        times.append(at)
        counts.append(running)
    return times[:-1] or times, counts[:-1] or counts
