"""Decides the number of workers: a function of the state, the last interval's observation, and the time.

No clock, no broker. A decision takes these steps:

1. The request rate a start's time ahead is predicted. Lengths and hit rate are averages over recent requests. What
   waits is to be served within ``drain_s``, and counts as further rate.
2. The predicted latencies of the workers there are, against the observed percentile, give a correction: it covers
   what the model leaves out, and that a limit is on a percentile while the model gives means. Nothing is learnt
   while rate or workers change or requests queue.
3. Of each role the fewest workers are taken whose predicted latency, corrected, is within its limit.
4. More workers are asked for at once. Fewer are kept only when the load with ``hysteresis`` on top has needed no more
   for ``down_after_s``, and not again within ``down_cooldown_s``.
5. A role whose limit was missed before ``MISSED`` decisions in a row gets one worker more than the model asks for,
   unless something says that this would not help. A worker that changed little is not followed by another.
6. Minimum, maximum and the GPU budget bound the result.
7. Where the minimum is 0, workers that were idle for ``zero_after_s`` sleep until a request wakes one.

The rate is predicted in one of three ways. ``constant``: the last one. ``moving_average``: the mean of the last few.
``holt``: exponential smoothing of level and trend, the trend damped (Gardner and McKenzie 1985), or the last one if
that is higher; it follows a ramp, on which the others lag behind.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from penstock.planner.capacity import BUSY, EngineTiming, Need, latency, needed
from penstock.schemas.plans import (
    Bounds,
    Change,
    Correction,
    Demand,
    Latency,
    Observation,
    PlanDecision,
    Pool,
    Predictor,
    Role,
    Rules,
    Times,
)

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


LEAST_ENDED = 10  # requests from which observed latencies count
EVEN = 0.3  # change of the rate within ``SETTLED`` intervals up to which latencies are those of the rate
SETTLED = 2  # intervals without a change; what ends in one may have come in the one before
_LENGTHS = 0.3  # weight of a full interval in the averages of lengths
_CORRECTION = 0.3  # weight of an interval in the correction
_LEAST, _MOST = 0.5, 4.0  # of a correction
_FIRST = {"mean": 1.0, "p50": 1.0, "p95": 1.2}  # before anything was observed: a tail is above the mean


MISSED = 3  # decisions in a row; one interval above a limit is often a burst that is over when a worker has started
USELESS = ("cpu_starved", "out_of_reach", "no_gain")  # whatever the limit, fewer workers would do as well
GAIN = 0.1  # share of a missed latency that a further worker has to take away to be followed by another


class Asked(Struct, frozen=True):
    """A worker that was asked for because a limit was missed.

    Attributes:
        workers: of the role, with it; fewer are not kept at this rate. 0: it brought nothing and may go.
        rate: that it was asked for, requests per second.
        times: observed latency by its limit, when it was asked for; 0.0: the limit was kept since.
    """

    workers: int
    rate: float
    times: float


class PlannerState(Struct, frozen=True, omit_defaults=True):
    """What a planner remembers. Averages are of tokens; times are those given to ``step``."""

    rates: tuple[float, ...] = ()
    sizes: tuple[dict[Role, int], ...] = ()  # workers that were ready, in the last intervals
    isl: float = 0.0
    osl: float = 0.0
    hit_rate: float = 0.0
    correction: Correction = Correction()
    kept: dict[Role, tuple[tuple[float, int], ...]] = {}  # when, and how many would have been kept
    raised_at: dict[Role, float] = {}
    lowered_at: dict[Role, float] = {}
    missed: dict[Role, int] = {}  # decisions in a row before which a limit of the role was missed
    asked: dict[Role, Asked] = {}
    idle_since: float = 0.0  # 0: there was something to do in the last interval


class Planner:
    """
    Args:
        timings: of the roles that are planned: prefill and decode, or aggregated.
        zero_after_s: of idleness after which roles whose least is 0 sleep; 0: they never do.
    """

    def __init__(self, rules: Rules, timings: Mapping[Role, EngineTiming], zero_after_s: float = 0.0) -> None:
        self.rules = rules
        self.zero_after_s = zero_after_s
        self.timings = dict(timings)

    def begin(self) -> PlannerState:
        """The state before the first interval."""
        first = _FIRST[self.rules.percentile]
        return PlannerState(correction=Correction(first, first))

    def step(self, state: PlannerState, seen: Observation, now_s: float) -> tuple[PlannerState, PlanDecision | None]:
        """The state after an interval, and what to do; None: no request was seen yet, so nothing is known."""
        state = _learnt(state, seen)
        idle_since = (state.idle_since or now_s - seen.seconds) if seen.idle else 0.0
        state = msgspec.structs.replace(state, idle_since=idle_since)
        sleep = self._sleeps(state, now_s)
        if not state.osl:
            return state, self._unplanned(state, seen) if sleep else None
        predicted = self._predicted(state, seen)
        if _settled(state):
            state = msgspec.structs.replace(state, correction=self._corrected(state.correction, seen, predicted))
        demand = self._demand(state, seen)
        changes: dict[Role, Change] = {}
        for role in self.timings:
            state, changes[role] = self._change(state, role, demand, seen, now_s)
        changes = self._within_budget(changes)
        for role, change in changes.items():
            state = _remembered(state, role, change, now_s)
        if sleep:
            changes = {role: _idle(change) for role, change in changes.items()}
        return state, PlanDecision(
            demand=demand, observed=seen, correction=state.correction, predicted=predicted, changes=changes, sleep=sleep
        )

    def _sleeps(self, state: PlannerState, now_s: float) -> bool:
        rules = self.rules
        may = self.zero_after_s > 0 and all(rules.bounds.get(role, Bounds()).least == 0 for role in self.timings)
        return may and state.idle_since > 0 and now_s - state.idle_since >= self.zero_after_s

    def _unplanned(self, state: PlannerState, seen: Observation) -> PlanDecision:
        """To sleep before any request was seen."""
        there = {role: seen.pools[role].count if role in seen.pools else 0 for role in self.timings}
        return PlanDecision(
            demand=Demand(0.0, 0.0, 0.0),
            observed=seen,
            correction=state.correction,
            predicted=Latency(0.0, 0.0, 0.0),
            changes={role: _idle(Change(count, 0, 0, count, 0.0)) for role, count in there.items()},
            sleep=True,
        )

    def _demand(self, state: PlannerState, seen: Observation) -> Demand:
        rules = self.rules
        ahead = 1 + rules.start_s / rules.interval_s
        rate = predict(rules.predictor, state.rates, ahead) + seen.backlog / rules.drain_s
        return Demand(rate, state.isl, state.osl, state.hit_rate)

    def _predicted(self, state: PlannerState, seen: Observation) -> Latency:
        """Of the interval that was seen, with the workers that were ready."""
        demand = Demand(seen.rate, seen.isl or state.isl, seen.osl or state.osl, seen.hit_rate)
        found = [
            latency(role, timing, demand, max(1, seen.pools[role].ready))
            for role, timing in self.timings.items()
            if role in seen.pools
        ]
        return Latency(
            sum(each.ttft_ms for each in found),
            sum(each.itl_ms for each in found),
            max((each.busy for each in found), default=0.0),
        )

    def _corrected(self, old: Correction, seen: Observation, predicted: Latency) -> Correction:
        """Not learnt from intervals without a steady state: their latencies are of the backlog. Nor from workers that
        wait for cores: the correction would ask for more of them.
        """
        if not seen.steady or seen.queued or seen.ended < LEAST_ENDED or predicted.busy > BUSY:
            return old
        if any(_starved(seen, role) for role in seen.pools):
            return old
        return Correction(
            self._ratio(old.ttft, seen.ttft, predicted.ttft_ms), self._ratio(old.itl, seen.itl, predicted.itl_ms)
        )

    def _ratio(self, old: float, seen: Times | None, predicted_ms: float) -> float:
        if seen is None or not 0 < predicted_ms < math.inf:
            return old
        observed = float(getattr(seen, self.rules.percentile))
        ratio = min(_MOST, max(_LEAST, observed / predicted_ms))
        return round(old + _CORRECTION * (ratio - old), 4)

    def _change(
        self, state: PlannerState, role: Role, demand: Demand, seen: Observation, now_s: float
    ) -> tuple[PlannerState, Change]:
        rules = self.rules
        bounds = rules.bounds.get(role, Bounds())
        current = seen.pools[role].count if role in seen.pools else 0
        need = self._needed(state, role, demand)
        arriving = msgspec.structs.replace(demand, rate=demand.rate - seen.backlog / rules.drain_s)
        more = msgspec.structs.replace(demand, rate=demand.rate * (1 + rules.hysteresis))
        kept = max(need.workers, self._needed(state, role, more).workers)
        state, times = self._judged(state, role, seen)
        if (asked := state.asked.get(role)) is not None and more.rate >= asked.rate:
            kept = max(kept, asked.workers)
        window = (*state.kept.get(role, ()), (now_s, kept))
        window = tuple(each for each in window if each[0] > now_s - rules.down_after_s)
        state = msgspec.structs.replace(state, kept=state.kept | {role: window})
        reasons = [] if need.reachable else ["out_of_reach"]
        target, stable = current, max(count for _, count in window)
        cooling = now_s - state.raised_at.get(role, -math.inf) < rules.up_cooldown_s
        against = self._against(state, role, demand, seen, times, cooling) if times > 1 else ""
        if need.workers > current and _starved(seen, role) and self._needed(state, role, arriving).workers <= current:
            reasons.append("cpu_starved")  # what waits does so for cores: more workers would serve it no sooner
        elif need.workers > current:
            target = current if cooling else need.workers
            reasons += ["cooling_down"] if cooling else ["more_load"]
        elif times > 1 and not against:
            target, reasons = current + 1, ["limit_missed"]
            state = _with_asked(state, role, Asked(target, demand.rate, times))
        else:
            reasons = [against] if against else reasons
            if against == "no_gain":
                state = _with_asked(state, role, msgspec.structs.replace(state.asked[role], workers=0))
            if current > stable and (not against or against in USELESS):
                waits = now_s - state.lowered_at.get(role, -math.inf) < rules.down_cooldown_s
                step = max(1, int(current * rules.max_down))
                target = current if waits else max(stable, current - step)
                reasons += ["cooling_down"] if waits else ["less_load"]
        bounded = min(max(target, bounds.least, 1), bounds.most)  # the last one sleeps, so that the model is listed
        if bounded != target or (need.workers == bounds.most and not need.reachable):
            reasons.append("minimum" if bounded > target else "maximum")
        busy = latency(role, self.timings[role], demand, max(1, bounded)).busy
        missed = state.missed.get(role, 0) if times > 1 else 0
        reasons = list(dict.fromkeys(reasons))
        return state, Change(current, need.workers, kept, bounded, round(busy, 4), tuple(reasons), missed)

    def _judged(self, state: PlannerState, role: Role, seen: Observation) -> tuple[PlannerState, float]:
        """
        Returns: the state with the interval counted, and the observed latencies of the role by their limits, the higher
            one; 0.0: no request has ended.
        """
        rules = self.rules
        limited = ((seen.ttft, rules.ttft_ms, "decode"), (seen.itl, rules.itl_ms, "prefill"))
        times = [getattr(each, rules.percentile) / limit for each, limit, other in limited if each and role != other]
        if not times:
            return state, 0.0
        kept = max(times) <= 1
        if kept and role in state.asked:
            state = _with_asked(state, role, msgspec.structs.replace(state.asked[role], times=0.0))
        starting = role in seen.pools and seen.pools[role].starting
        missed = 0 if kept or starting else state.missed.get(role, 0) + 1
        return msgspec.structs.replace(state, missed=state.missed | {role: missed}), max(times)

    def _against(
        self, state: PlannerState, role: Role, demand: Demand, seen: Observation, times: float, cooling: bool
    ) -> str:
        """Why a missed limit is no reason for another worker now; "": it is one."""
        rules, pool, asked = self.rules, seen.pools.get(role, Pool()), state.asked.get(role, Asked(0, 0.0, 0.0))
        bounds = rules.bounds.get(role, Bounds())
        if _starved(seen, role):
            return "cpu_starved"
        if not needed(role, self.timings[role], demand, rules.ttft_ms, rules.itl_ms, max(1, bounds.most)).reachable:
            return "out_of_reach"
        if pool.count >= bounds.most:
            return "maximum"
        if pool.starting:
            return "starting"
        if state.missed[role] < MISSED:
            return "watching"
        tried = pool.ready >= asked.workers and demand.rate <= asked.rate * (1 + rules.hysteresis)
        if tried and times > (1 - GAIN) * asked.times > 0:
            return "no_gain"
        return "cooling_down" if cooling else ""

    def _needed(self, state: PlannerState, role: Role, demand: Demand) -> Need:
        rules = self.rules
        ttft_ms, itl_ms = rules.ttft_ms / state.correction.ttft, rules.itl_ms / state.correction.itl
        most = rules.bounds.get(role, Bounds()).most
        return needed(role, self.timings[role], demand, ttft_ms, itl_ms, max(1, most))

    def _within_budget(self, changes: dict[Role, Change]) -> dict[Role, Change]:
        """Fewer workers of the role that is least short of them, until the GPUs are enough."""
        budget = self.rules.gpu_budget
        out = dict(changes)
        while budget and sum(self.timings[role].gpus * each.target for role, each in out.items()) > budget:
            can = [role for role in out if out[role].target > max(1, self.rules.bounds.get(role, Bounds()).least)]
            if not can:
                break
            role = max(can, key=lambda role: (out[role].target / max(1, out[role].needed), out[role].target))
            reasons = tuple(dict.fromkeys((*out[role].reasons, "gpu_budget")))
            out[role] = msgspec.structs.replace(out[role], target=out[role].target - 1, reasons=reasons)
        return out


def _learnt(state: PlannerState, seen: Observation) -> PlannerState:
    """With the interval's rate and lengths."""
    rates = (*state.rates, seen.rate)[-HISTORY:]
    sizes = (*state.sizes, {role: pool.ready for role, pool in seen.pools.items()})[-SETTLED:]
    state = msgspec.structs.replace(state, rates=rates, sizes=sizes)
    if not seen.ended:
        return state
    share = _LENGTHS * min(1.0, seen.ended / LEAST_ENDED) if state.osl else 1.0
    return msgspec.structs.replace(
        state,
        isl=state.isl + share * (seen.isl - state.isl),
        osl=state.osl + share * (seen.osl - state.osl),
        hit_rate=state.hit_rate + share * (seen.hit_rate - state.hit_rate),
    )


def _settled(state: PlannerState) -> bool:
    """Whether rate and workers were much the same for some intervals."""
    rates = state.rates[-SETTLED:]
    same = len(state.sizes) == SETTLED and all(each == state.sizes[0] for each in state.sizes)
    return same and max(rates) - min(rates) <= EVEN * max(rates)


def _starved(seen: Observation, role: Role) -> bool:
    """Whether further workers of the role would take their cores from those there are."""
    pool = seen.pools.get(role, Pool())
    return seen.one_machine and pool.starved > 0 and 2 * pool.starved >= pool.ready


def _idle(change: Change) -> Change:
    return msgspec.structs.replace(change, reasons=(*change.reasons, "idle"))


def _with_asked(state: PlannerState, role: Role, asked: Asked) -> PlannerState:
    return msgspec.structs.replace(state, asked=state.asked | {role: asked})


def _remembered(state: PlannerState, role: Role, change: Change, now_s: float) -> PlannerState:
    if change.target > change.current:  # what was missed before says nothing of the workers that come
        raised, missed = state.raised_at | {role: now_s}, state.missed | {role: 0}
        return msgspec.structs.replace(state, raised_at=raised, missed=missed)
    if change.target < change.current:
        return msgspec.structs.replace(state, lowered_at=state.lowered_at | {role: now_s})
    return state
