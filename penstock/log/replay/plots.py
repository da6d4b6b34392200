"""Distributions as inline SVG: the share of values below each time, recorded and replayed. Pure."""

import math
from collections.abc import Sequence
from html import escape

from penstock.log.replay.report import Series

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 38, 12, 12, 34
LOG_FROM = 30.0  # the largest is so many times the smallest: logarithmic axis
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_STEPS = (1, 2, 5)


class _Axis:
    """Milliseconds to pixels."""

    def __init__(self, low: float, high: float) -> None:
        self._log = low > 0 and high / low > LOG_FROM
        if high <= low:
            low, high = low * 0.9, (high or 1.0) * 1.1
        self._low, self._high = (math.log10(low), math.log10(high)) if self._log else (min(0.0, low), high * 1.02)

    def x(self, value: float) -> float:
        at = math.log10(max(value, 1e-9)) if self._log else value
        share = (at - self._low) / (self._high - self._low)
        return LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT)

    def ticks(self) -> list[float]:
        if self._log:
            powers = range(math.floor(self._low), math.ceil(self._high) + 1)
            values = [step * 10.0**power for power in powers for step in _STEPS]
            values = [value for value in values if self._low <= math.log10(value) <= self._high]
            return values if len(values) <= 6 else [value for value in values if _is_power(value)] or values[:6]
        step = _nice((self._high - self._low) / 4)
        return [step * number for number in range(int(self._high / step) + 1)]


def _is_power(value: float) -> bool:
    return abs(math.log10(value) - round(math.log10(value))) < 1e-9


def _nice(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next((factor * power for factor in (1, 2, 5, 10) if factor * power >= step), step)


def distribution(title: str, recorded: Series | None, replayed: Series | None) -> str:
    """One plot, "" without values."""
    present = [each for each in (recorded, replayed) if each is not None]
    if not present:
        return ""
    low = min(each.points[0] for each in present)
    high = max(_top(each) for each in present)
    axis = _Axis(low, high)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    for share in SHARES:
        y = _y(share)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for value in axis.ticks():
        x = axis.x(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{duration(value)}</text>'
        )
    for name, series in (("recorded", recorded), ("replayed", replayed)):
        if series is not None:
            parts.append(f'<polyline class="{name}" points="{_line(series.points, axis)}"/>')
            x = axis.x(series.p50)
            parts.append(f'<circle class="{name}" cx="{x:.1f}" cy="{_y(0.5):.1f}" r="3.5"/>')
    parts.append("</svg>")
    return "".join(parts)


def _top(series: Series) -> float:
    """The last point that is drawn, so that a few outliers do not compress all others."""
    return series.max if series.max <= 3 * series.p99 else series.p99 * 1.5


def _y(share: float) -> float:
    return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)


def _line(points: Sequence[float], axis: _Axis) -> str:
    last = max(1, len(points) - 1)
    shown = [f"{axis.x(points[0]):.1f},{_y(0):.1f}"]
    shown += [
        f"{axis.x(value):.1f},{_y(number / last if len(points) > 1 else 1.0):.1f}"
        for number, value in enumerate(points)
    ]
    return " ".join(shown)


def duration(ms: float) -> str:
    """ "850 µs", "12 ms", "1.5 s"."""
    if ms == 0:
        return "0"
    if ms < 1:
        return f"{ms * 1e3:.3g} µs"
    if ms < 1000:
        return f"{ms:.3g} ms"
    return f"{ms / 1e3:.3g} s"
