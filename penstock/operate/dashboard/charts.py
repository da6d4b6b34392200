"""Small line charts as SVG, drawn on the server. Pure."""

from collections.abc import Sequence

WIDTH, HEIGHT = 240, 48
PAD = 2


def sparkline(values: Sequence[float | None], *, label: str) -> str:
    """A line through ``values`` from left to right; where a value is None there is a gap.

    Args:
        label: what a screen reader says of it.
    """
    numbers = [value for value in values if value is not None]
    top = max(numbers, default=0.0) or 1.0
    step = (WIDTH - 2 * PAD) / max(1, len(values) - 1)
    lines: list[list[str]] = [[]]
    for index, value in enumerate(values):
        if value is None:
            lines.append([])
            continue
        y = HEIGHT - PAD - (HEIGHT - 2 * PAD) * value / top
        lines[-1].append(f"{PAD + index * step:.1f},{y:.1f}")
    shapes = "".join(_shape(points) for points in lines if points)
    return (
        f'<svg class="spark" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}">{shapes}</svg>'
    )


def _shape(points: Sequence[str]) -> str:
    first, last = points[0].partition(",")[0], points[-1].partition(",")[0]
    line = " ".join(points)
    if len(points) == 1:
        return f'<polyline class="line" points="{line} {line}"/>'
    area = f"{first},{HEIGHT} {line} {last},{HEIGHT}"
    return f'<polygon class="area" points="{area}"/><polyline class="line" points="{line}"/>'
