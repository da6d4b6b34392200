"""Quantiles of measured values."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def quantile(ordered: Sequence[float], share: float, nothing: T) -> float | T:
    """The value below which ``share`` of the ordered values are, by nearest rank; ``nothing`` of no values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else nothing
