"""Loads whose rate changes: a day in a short time, and bursts. Arrivals are Poisson, lengths log-normal."""

import math
import random
from collections.abc import Callable
from typing import Literal

from penstock.measure.simulation.trace import UNIT_TOKENS, RequestTrace, TraceRow

Shape = Literal["diurnal", "bursts", "flat"]

_BURST_EVERY_S, _BURST_S = 600.0, 120.0


def generate(
    shape: Shape,
    *,
    seed: int,
    seconds: float,
    low: float,
    high: float,
    isl: int,
    osl: int,
    shared: float = 0.3,
    sigma: float = 0.6,
) -> RequestTrace:
    """
    Args:
        low, high: requests per second, at the quietest and the busiest moment; a flat load has ``high``.
        isl, osl: mean lengths, tokens.
        shared: of each prompt, the share that is one of eight common texts.
        sigma: of the logarithm of lengths; 0: all are alike.
    """
    rng = random.Random(f"{shape} {seed}")
    rate = _RATES[shape](seconds, low, high)
    common = round(isl * shared / UNIT_TOKENS)
    fresh = 8 * common
    rows, at = [], 0.0
    while (at := at + rng.expovariate(high)) < seconds:
        if rng.random() * high > rate(at):  # thinning: a Poisson process of the changing rate
            continue
        first = rng.randrange(8) * common
        own = max(1, round(_length(rng, isl * (1 - shared), sigma)))
        units = -(-own // UNIT_TOKENS)
        ids = (*range(first, first + common), *range(fresh, fresh + units))
        fresh += units
        answer = max(2, min(4 * osl, round(_length(rng, osl, sigma))))
        rows.append(TraceRow(at * 1e3, common * UNIT_TOKENS + own, answer, ids))
    return RequestTrace(shape, tuple(rows), UNIT_TOKENS)


def _length(rng: random.Random, mean: float, sigma: float) -> float:
    return rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)


def _diurnal(seconds: float, low: float, high: float) -> Callable[[float], float]:
    """One day, from night to night, with a smaller second peak in the evening."""

    def rate(at: float) -> float:
        hour = 24 * at / seconds
        day = math.exp(-(((hour - 11) / 3.2) ** 2)) + 0.6 * math.exp(-(((hour - 19) / 2.0) ** 2))
        return low + (high - low) * min(1.0, day)

    return rate


def _bursts(seconds: float, low: float, high: float) -> Callable[[float], float]:
    """``low``, and for two minutes in each ten ``high``, without a ramp."""
    return lambda at: high if (at + _BURST_EVERY_S / 2) % _BURST_EVERY_S < _BURST_S else low


def _flat(seconds: float, low: float, high: float) -> Callable[[float], float]:
    return lambda at: high


_RATES: dict[Shape, Callable[[float, float, float], Callable[[float], float]]] = {
    "diurnal": _diurnal,
    "bursts": _bursts,
    "flat": _flat,
}
