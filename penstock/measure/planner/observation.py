"""Percentiles of what was seen in an interval."""

from penstock.cli.quantile import quantile
from penstock.schemas.plans import Times


def times(values: list[float]) -> Times | None:
    """Of unordered values; None: there are none."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p95 = (quantile(ordered, share, 0.0) for share in (0.5, 0.95))
    return Times(round(sum(ordered) / len(ordered), 3), round(p50, 3), round(p95, 3))
