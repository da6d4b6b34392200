"""The latencies of a number of workers under a load, and the workers needed for given latencies. Pure arithmetic.

Prefill workers are a queue with several servers: the mean wait is Sakasegawa's approximation of M/M/c
(doi:10.1007/BF02480231). Decode workers run what they have at once: requests at a worker are tokens per second times
the time of a token, which grows with them, so they are a fixed point. Their number varies as that of a Poisson process,
and the sizes hold for ``SPREAD`` standard deviations above its mean.

An aggregated worker does both: while it computes prompts no token comes, so time per token is stretched by 1 / (1 -
share of the time for prompts), and a prompt also waits for the step under way.

How long an engine takes for a prompt and for a token comes from a profile, extrapolated beyond its points. ``penstock
profile sla`` does not extrapolate measurements, but a planner must always decide. So the last slope continues, and a
context beyond the longest one counts as more requests of that context with as many tokens in all.
"""

import math
from collections.abc import Callable

from msgspec import Struct

from penstock.measure.profile.data import BadProfile, DecodeSurface, Profile, between
from penstock.schemas.plans import Demand, Latency, Role

_UNKNOWN = 1 << 30


class EngineTiming:
    """Of one worker.

    Raises:
        BadProfile: prefill or decode has no points.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.gpus = profile.setup.gpus
        self.dp = profile.setup.attention_dp
        self._surface = DecodeSurface(profile.decode)
        if not profile.prefill.prefill_isl or not self._surface.contexts:
            raise BadProfile(f"the profile of {profile.setup.model} needs points of prefill and of decode")

    def prefill_ms(self, tokens: float) -> float:
        """To compute ``tokens`` of a prompt that is alone at a rank."""
        lengths, times = self.profile.prefill.prefill_isl, self.profile.prefill.prefill_ttft
        if tokens <= lengths[0]:
            return times[0]
        inside = between(tokens, lengths, times)
        if inside is not None:
            return inside
        if len(lengths) == 1:
            return times[0] * tokens / lengths[0]
        slope = (times[-1] - times[-2]) / (lengths[-1] - lengths[-2])
        return times[-1] + max(0.0, slope) * (tokens - lengths[-1])

    def itl_ms(self, context: float, concurrency: float) -> float:
        """Per token, while ``concurrency`` requests of ``context`` tokens decode at once."""
        contexts = self._surface.contexts
        known = min(max(context, contexts[0]), contexts[-1])
        concurrency *= max(1.0, context / known)
        low, high = self._surface.levels(known)
        if not high:  # no level was measured at both of the nearest contexts: the longer one alone
            known = next(each for each in contexts if each >= known)
            low, high = self._surface.levels(known)
        inside = self._at(known, min(max(concurrency, low), high))
        if concurrency <= high or high == low:
            return inside
        middle = (low + high) / 2
        slope = (inside - self._at(known, middle)) / (high - middle)
        return inside + max(0.0, slope) * (concurrency - high)

    def most(self, tokens: float) -> int:
        """Requests of ``tokens`` each, prompt and answer, that decode at once; at least one."""
        setup = self.profile.setup
        fit = int(setup.max_kv_tokens / tokens) if setup.max_kv_tokens else _UNKNOWN
        return max(1, min(fit, setup.max_batch or _UNKNOWN))

    def _at(self, context: float, concurrency: float) -> float:
        found = self._surface.itl(context, concurrency)
        assert found is not None, (context, concurrency)
        return found


SPREAD = 1.64  # 95 % of a normal distribution lie below
BUSY = 0.95  # share of the time for prompts from which a queue has no mean length worth predicting
_ROUNDS = 200
_NEAR = 1.02  # of what any number of workers could give


class Need(Struct, frozen=True):
    """``workers`` for a load. ``reachable``: False: no number gives the latency that was asked for."""

    workers: int
    latency: Latency
    reachable: bool = True


def latency(role: Role, timing: EngineTiming, demand: Demand, workers: int) -> Latency:
    """What ``workers`` of a role give."""
    if role == "prefill":
        return _prefill(timing, demand, workers)
    if role == "decode":
        return _decode(timing, demand, workers, 0.0)
    prefill = _prefill(timing, demand, workers)
    decode = _decode(timing, demand, workers, min(prefill.busy, BUSY))
    ttft = prefill.ttft_ms + (decode.itl_ms if math.isfinite(decode.itl_ms) else 0.0)
    return Latency(ttft, decode.itl_ms, max(prefill.busy, decode.busy))


def needed(role: Role, timing: EngineTiming, demand: Demand, ttft_ms: float, itl_ms: float, most: int) -> Need:
    """The fewest workers, at most ``most``, whose latencies are within limits.

    If none are, as when a prompt alone takes longer than its limit: the fewest that come near to what ``most`` give.
    """

    def within(limits: tuple[float, float]) -> Callable[[Latency], bool]:
        return lambda found: found.busy <= BUSY and found.ttft_ms <= limits[0] and found.itl_ms <= limits[1]

    found = _fewest(role, timing, demand, most, within((ttft_ms, itl_ms)))
    if found is not None:
        return found
    best = latency(role, timing, demand, most)
    limits = max(ttft_ms, best.ttft_ms * _NEAR), max(itl_ms, best.itl_ms * _NEAR)
    near = _fewest(role, timing, demand, most, within(limits))
    return Need(near.workers, near.latency, False) if near else Need(most, best, False)


def _fewest(
    role: Role, timing: EngineTiming, demand: Demand, most: int, good: Callable[[Latency], bool]
) -> Need | None:
    """More workers are never slower, so the fewest are found by bisection."""
    if not good(latency(role, timing, demand, most)):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(latency(role, timing, demand, middle)) else (middle, high)
    return Need(high, latency(role, timing, demand, high))


def _prefill(timing: EngineTiming, demand: Demand, workers: int) -> Latency:
    service_ms = timing.prefill_ms(demand.computed)
    servers = workers * timing.dp
    busy = demand.rate * service_ms / 1e3 / servers
    if busy >= 1:
        return Latency(math.inf, 0.0, busy)
    wait = service_ms * busy ** (math.sqrt(2 * (servers + 1)) - 1) / (servers * (1 - busy))
    return Latency(service_ms + wait, 0.0, busy)


def _decode(timing: EngineTiming, demand: Demand, workers: int, stolen: float) -> Latency:
    """``stolen``: share of the time that prompts take."""
    tokens_per_ms = demand.rate * demand.osl / 1e3
    most = timing.most(demand.isl + demand.osl)
    at_once = 0.0  # at a worker
    itl = timing.itl_ms(demand.context, 1.0) / (1 - stolen)
    for _ in range(_ROUNDS):
        everywhere = tokens_per_ms * itl
        # With least-loaded routing, workers share the peaks of the whole pool.
        expected = (everywhere + SPREAD * math.sqrt(everywhere)) / workers
        if expected > most:
            return Latency(0.0, math.inf, max(1.0, expected / most))
        if abs(expected - at_once) < 1e-3 * (1 + at_once):
            break
        at_once = expected
        itl = timing.itl_ms(demand.context, max(1.0, at_once)) / (1 - stolen)
    return Latency(0.0, itl, at_once / most)
