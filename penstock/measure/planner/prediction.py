"""What the request rate will be a few intervals from now, from what it was.

``constant``: the last one. ``moving_average``: the mean of the last few. ``holt``: exponential smoothing of level and
trend, the trend damped (Gardner and McKenzie 1985), or the last one if that is higher; it follows a ramp, on which the
others lag behind.
"""

from collections.abc import Sequence

from penstock.schemas.plans import Predictor

HISTORY = 60  # intervals that are kept
AVERAGED = 5
LEVEL, TREND, DAMPING = 0.5, 0.3, 0.9


def predict(kind: Predictor, history: Sequence[float], ahead: float) -> float:
    """The value ``ahead`` intervals after the last one; not below zero, nor above twice the largest that was seen.

    Args:
        history: the oldest first; empty: 0.0.
    """
    if not history:
        return 0.0
    if kind == "constant":
        return history[-1]
    if kind == "moving_average":
        recent = history[-AVERAGED:]
        return sum(recent) / len(recent)
    level, trend = holt(history)
    damped: float = DAMPING * (1 - DAMPING**ahead) / (1 - DAMPING)  # sum of its powers from 1 to ahead
    return min(max(history[-1], level + damped * trend), 2 * max(history))


def holt(history: Sequence[float]) -> tuple[float, float]:
    """Level and trend after the last value."""
    level, trend = history[0], 0.0
    for value in history[1:]:
        before = level
        level = LEVEL * value + (1 - LEVEL) * (before + DAMPING * trend)
        trend = TREND * (level - before) + (1 - TREND) * DAMPING * trend
    return level, trend
