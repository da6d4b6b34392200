"""TTFT and ITL between the points of a profile. Nothing is guessed beyond them.

Between two prompt lengths, and between two levels of concurrency, figures are on a straight line. For a step whose time
grows with batch and context together, that is exact.
"""

from bisect import bisect_left
from collections.abc import Sequence

from penstock.measure.profile.data import Decode, Prefill


def between(x: float, at: Sequence[float], values: Sequence[float]) -> float | None:
    """Interpolate linearly between the two nearest points. None: ``x`` is outside the range.

    Args:
        at: ascending, without repetitions.
    """
    if not at or not at[0] <= x <= at[-1]:
        return None
    right = bisect_left(at, x)
    if at[right] == x:
        return values[right]
    left = right - 1
    share = (x - at[left]) / (at[right] - at[left])
    return values[left] + share * (values[right] - values[left])


def ttft_at(data: Prefill, isl: int) -> float | None:
    """TTFT of a prompt of ``isl`` tokens, ms; None: such prompts were not measured."""
    return between(isl, data.prefill_isl, data.prefill_ttft)


class DecodeSurface:
    """ITL by context length and concurrency."""

    def __init__(self, data: Decode) -> None:
        self._lines: dict[float, tuple[list[int], list[float]]] = {}
        rows = zip(data.y_context_length, data.decode_concurrency, data.z_itl, strict=True)
        for context, concurrency, itl in sorted(rows):
            levels, values = self._lines.setdefault(context, ([], []))
            levels.append(concurrency)
            values.append(itl)
        self.contexts = sorted(self._lines)

    def itl(self, context: float, concurrency: float) -> float | None:
        """ITL in ms. None: outside the measured range at one of the two nearest contexts."""
        near = self._near(context)
        values = [between(concurrency, *self._lines[each]) for each in near]
        measured = [value for value in values if value is not None]
        return between(context, near, measured) if len(measured) == len(near) else None

    def levels(self, context: float) -> tuple[int, int]:
        """Lowest and highest concurrency with a figure at this context; (0, 0): there is none."""
        lines = [self._lines[each][0] for each in self._near(context)]
        if not lines:
            return 0, 0
        low, high = max(line[0] for line in lines), min(line[-1] for line in lines)
        return (low, high) if low <= high else (0, 0)

    def _near(self, context: float) -> list[float]:
        """The nearest measured contexts on both sides, or the one that is equal."""
        if not self.contexts or not self.contexts[0] <= context <= self.contexts[-1]:
            return []
        right = bisect_left(self.contexts, context)
        left = right if self.contexts[right] == context else right - 1
        return self.contexts[left : right + 1]
