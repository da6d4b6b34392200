"""Simulates a trace on a planned fleet, or on one of a fixed size, and sums up latencies and GPU hours.

The fleet has all workers that may be needed from the beginning; a worker that has not started gets no request. Each
start takes a worker that never ran, so its cache is empty. A worker that is drained gets no further request and ends
with its last one, as with ``penstock drain``. Durations of steps come from a profile, or from the mock's formula.
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import Struct

from penstock.cli.figures import quantile
from penstock.measure.profile.data import mock_profile
from penstock.measure.simulation.cache import LowerChanges, StoredRun
from penstock.measure.simulation.engine import MAX_SEQUENCES
from penstock.measure.simulation.fleet import SimulatedRequest, Simulation
from penstock.measure.simulation.placement import PlacementPolicy
from penstock.measure.simulation.policy import Placement, SimulatedFleet, Target, WorkerSpec
from penstock.measure.simulation.trace import UNIT_TOKENS, Request, RequestTrace, TraceRow
from penstock.planner.capacity import EngineTiming
from penstock.planner.observe import times
from penstock.planner.worker_counts import Planner
from penstock.schemas.plans import Observation, PlanDecision, Pool, Role, Rules

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
        low, high: requests per second at the quietest and the busiest moment; a flat load uses ``high``.
        isl, osl: mean lengths, tokens.
        shared: share of each prompt that is one of eight common texts.
        sigma: standard deviation of the logarithm of lengths; 0: all are equal.
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
    """``low``, except for ``high`` in two of every ten minutes, without a ramp."""
    return lambda at: high if (at + _BURST_EVERY_S / 2) % _BURST_EVERY_S < _BURST_S else low


def _flat(seconds: float, low: float, high: float) -> Callable[[float], float]:
    return lambda at: high


_RATES: dict[Shape, Callable[[float, float, float], Callable[[float], float]]] = {
    "diurnal": _diurnal,
    "bursts": _bursts,
    "flat": _flat,
}


Decide = Callable[[Observation, float], PlanDecision | None]


@dataclass(slots=True)
class WorkerRun:
    """When a worker was asked for, became ready and ended, ns; -1: not yet. ``open``: number of its requests."""

    asked_ns: int
    ready_ns: int
    leaving: bool = False
    ended_ns: int = -1
    open: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One interval: when it ended, what was seen, and what was decided."""

    at_s: float
    observed: Observation
    decision: PlanDecision | None


@dataclass(slots=True)
class _Interval:
    arrived: int = 0
    ended: list[Request] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)


class ElasticPolicy:
    """
    Args:
        counts: workers that run from the beginning, by role.
        decide: called at the end of each interval, with what happened in it and the time, s; None: the fleet is fixed.
    """

    def __init__(
        self, counts: Mapping[Role, int], *, seed: int, interval_s: float, start_s: float, decide: Decide | None = None
    ) -> None:
        self._inner = PlacementPolicy(seed, joined=False)
        self._counts = counts
        self._decide = decide
        self._interval_ns = round(interval_s * 1e9)
        self._start_ns = round(start_s * 1e9)
        self.runs: dict[int, WorkerRun] = {}
        self.steps: list[Step] = []
        self.served: Sequence[SimulatedRequest] = ()  # set before the run; filled by the simulation

    def start(self, fleet: SimulatedFleet, requests: Sequence[Request]) -> None:
        self._fleet = fleet
        self._inner.start(fleet, requests)
        self._unused: dict[str, list[int]] = {}
        for number, worker in enumerate(fleet.workers):
            self._unused.setdefault(worker.role, []).append(number)
        self._tick = self._interval_ns
        self._starting: list[int] = []
        self._now = _Interval()
        self._at: dict[int, tuple[int, ...]] = {}  # open request -> its workers
        self._held = 0
        self._prompts: set[int] = set()  # placed requests whose prompt is not computed yet
        for role, count in self._counts.items():
            for _ in range(count):
                self._begin(role, 0, 0)

    # Events of the simulation

    def arrive(self, request: Request, now_ns: int) -> Placement | None:
        self._pass(now_ns)
        self._now.arrived += 1
        placement = self._inner.arrive(request, now_ns)
        if placement is None:
            self._held += 1
        else:
            self._placed(request, placement)
        return placement

    def pump(self, now_ns: int) -> Iterable[tuple[Request, Placement]]:
        self._pass(now_ns)
        for request, placement in self._inner.pump(now_ns):
            self._held -= 1
            self._placed(request, placement)
            yield request, placement

    def wake(self) -> int | None:
        return self._inner.wake()

    def decode(self, request: Request, now_ns: int) -> Target:
        return self._inner.decode(request, now_ns)

    def events(self, target: Target, stored: Sequence[StoredRun], removed: Sequence[int], now_ns: int) -> None:
        self._inner.events(target, stored, removed, now_ns)

    def lower_events(self, target: Target, changes: Sequence[LowerChanges]) -> None:
        self._inner.lower_events(target, changes)

    def prefilled(self, request: Request, now_ns: int) -> None:
        self._pass(now_ns)
        self._prompts.discard(request.index)
        self._inner.prefilled(request, now_ns)

    def finished(self, request: Request, now_ns: int) -> None:
        self._pass(now_ns)
        self._inner.finished(request, now_ns)
        self._prompts.discard(request.index)
        served = self.served[request.index]
        if served.complete:
            self._now.ended.append(request)
            self._now.ttft.append((served.first_ns - request.arrival_ns) / 1e6)
            if request.output_tokens > 1:
                self._now.itl.append((served.last_ns - served.first_ns) / 1e6 / (request.output_tokens - 1))
        for number in self._at.pop(request.index, ()):
            run = self.runs[number]
            run.open -= 1
            self._end_if_idle(run, now_ns)

    # Time and workers

    def _placed(self, request: Request, placement: Placement) -> None:
        numbers = {placement.target[0]} | ({placement.decode[0]} if placement.decode else set())
        self._at[request.index] = tuple(numbers)
        self._prompts.add(request.index)
        for number in numbers:
            self.runs[number].open += 1

    def _pass(self, now_ns: int) -> None:
        """Advance to a time: workers become ready, and intervals end."""
        while self._starting and self.runs[self._starting[0]].ready_ns <= min(now_ns, self._tick):
            number = self._starting.pop(0)
            if not self.runs[number].leaving:
                self._inner.join(number)
        if self._tick <= now_ns:
            self._end_interval(self._tick)
            self._tick += self._interval_ns
            self._pass(now_ns)

    def _end_interval(self, now_ns: int) -> None:
        seen = self._observation(now_ns)
        self._now = _Interval()
        decision = self._decide(seen, now_ns / 1e9) if self._decide else None
        self.steps.append(Step(now_ns / 1e9, seen, decision))
        for role, target in decision.targets.items() if decision else ():
            self._scale(role, target, now_ns)

    def _observation(self, now_ns: int) -> Observation:
        done, ended = self._now, self._now.ended
        prompt = sum(each.prompt_tokens for each in ended)
        cached = sum(self.served[each.index].cached_tokens for each in ended)
        return Observation(
            seconds=self._interval_ns / 1e9,
            arrived=done.arrived,
            ended=len(ended),
            isl=prompt / len(ended) if ended else 0.0,
            osl=sum(each.output_tokens for each in ended) / len(ended) if ended else 0.0,
            hit_rate=cached / prompt if prompt else 0.0,
            ttft=times(done.ttft),
            itl=times(done.itl),
            queued=self._held,
            pools={role: self._pool(role, now_ns) for role in self._counts},
        )

    def _pool(self, role: Role, now_ns: int) -> Pool:
        runs = [self.runs[number] for number in self._of(role)]
        ready = sum(run.ready_ns <= now_ns for run in runs)
        waiting = 0 if role == "decode" else max(0, len(self._prompts) - ready)  # each ready worker computes one
        return Pool(ready, len(runs) - ready, waiting)

    def _of(self, role: Role) -> list[int]:
        """Numbers of the workers of a role that take requests, or will once they are ready."""
        return [
            number for number, run in self.runs.items() if self._fleet.workers[number].role == role and not run.leaving
        ]

    def _scale(self, role: Role, target: int, now_ns: int) -> None:
        running = self._of(role)
        for _ in range(target - len(running)):
            self._begin(role, now_ns, self._start_ns)
        # Workers that are still starting end first: they have neither requests nor a cache.
        for number in sorted(running, key=lambda each: (-self.runs[each].ready_ns, self.runs[each].open))[
            : max(0, len(running) - target)
        ]:
            run = self.runs[number]
            run.leaving = True
            if run.ready_ns <= now_ns:
                self._inner.drain(number)
            self._end_if_idle(run, now_ns)

    def _begin(self, role: Role, now_ns: int, start_ns: int) -> None:
        unused = self._unused[role]
        if not unused:
            raise ValueError(f"all {role} workers of the fleet have run; make it larger")
        number = unused.pop(0)
        self.runs[number] = WorkerRun(now_ns, now_ns + start_ns)
        if start_ns:
            self._starting.append(number)
        else:
            self._inner.join(number)

    @staticmethod
    def _end_if_idle(run: WorkerRun, now_ns: int) -> None:
        if run.leaving and not run.open and run.ended_ns < 0:
            run.ended_ns = now_ns


_UNKNOWN_TOKENS = 1 << 24  # of KV cache, if the profile does not say


class ProfileTimes:
    """``penstock.measure.simulation.engine.PassTimes`` of one rank of a worker.

    A pass with prompts takes as long as one prompt of as many tokens would. For a later part of a long prompt, it takes
    the time that this part adds to the earlier ones, if that is longer. Decoding sequences add the time of a token.
    """

    def __init__(self, timing: EngineTiming) -> None:
        self._timing = timing

    def prefill_ns(self, sequences: int, mean_tokens: int, mean_before: int) -> int:
        new = sequences * max(0, mean_tokens - mean_before)
        if not new:
            return 0
        ms = self._timing.prefill_ms(new)
        if mean_before and sequences == 1:
            ms = max(ms, self._timing.prefill_ms(mean_tokens) - self._timing.prefill_ms(mean_before))
        return round(ms * 1e6)

    def decode_run_ns(self, context_tokens: int, growth: int, passes: int) -> list[int]:
        if not growth:
            return [0] * passes
        # Between two contexts, the time of a token is on a straight line in a profile, too.
        first, last = (
            self._timing.itl_ms(tokens / growth, growth * self._timing.dp) * 1e6
            for tokens in (context_tokens, context_tokens + growth * (passes - 1))
        )
        step = (last - first) / max(1, passes - 1)
        return [round(first + step * number) for number in range(passes)]


def worker_of(role: Role, timing: EngineTiming, block_size: int) -> WorkerSpec:
    """A worker with the ranks, memory, batch and times of a profile."""
    setup = timing.profile.setup
    return WorkerSpec(
        role,
        (setup.max_kv_tokens or _UNKNOWN_TOKENS) // timing.dp // block_size,
        ranks=timing.dp,
        max_sequences=max(1, (setup.max_batch or MAX_SEQUENCES) // timing.dp),
        times=ProfileTimes(timing),
    )


BLOCKS, BLOCK_SIZE = 8192, 64  # 524,288 tokens of KV cache, as a mock worker's
_STARTS = 64  # of each role, besides its largest number


class PolicyOutcome(Struct, frozen=True, kw_only=True):
    """
    Attributes:
        name: of the fleet.
        attained: share of all requests within both limits; those that were not served are not.
        gpu_hours: of all workers, each from the request to start it until its end.
        mean_gpus, peak_gpus: GPUs of workers that run or start.
        starts: workers that were started during the simulation.
    """

    name: str
    requests: int
    unserved: int
    ttft_p50_ms: float
    ttft_p95_ms: float
    itl_p50_ms: float
    itl_p95_ms: float
    attained_ttft: float
    attained_itl: float
    attained: float
    gpu_hours: float
    mean_gpus: float
    peak_gpus: int
    starts: int


class Simulated(Struct, frozen=True):
    """``runs``: role of each worker that ran, and the times between which it used GPUs, s."""

    outcome: PolicyOutcome
    steps: tuple[Step, ...]
    runs: tuple[tuple[Role, float, float], ...]


class Engines(Struct, frozen=True):
    """The simulated workers.

    Attributes:
        slowness: factor on the time of each step of the mock's model.
        profiles: of workers, which replace the mock's model and say how many GPUs a worker has.
    """

    slowness: float = 1.0
    gpus: int = 1
    transfer_ns_per_token: int = 0
    profiles: Mapping[Role, EngineTiming] = {}

    def timing(self, role: Role) -> EngineTiming:
        if role in self.profiles:
            return self.profiles[role]
        return EngineTiming(mock_profile(blocks=BLOCKS, block_size=BLOCK_SIZE, gpus=self.gpus, slowness=self.slowness))

    def worker(self, role: Role) -> WorkerSpec:
        if role in self.profiles:
            return worker_of(role, self.profiles[role], BLOCK_SIZE)
        return WorkerSpec(role, BLOCKS, slowness=self.slowness)

    def gpus_of(self, role: Role) -> int:
        return self.profiles[role].gpus if role in self.profiles else self.gpus


def simulate(
    name: str,
    trace: RequestTrace,
    speed: float,
    engines: Engines,
    counts: Mapping[Role, int],
    rules: Rules,
    *,
    planned: bool,
    seed: int = 0,
) -> Simulated:
    """
    Args:
        counts: workers at the beginning, by role. Other roles are not planned.
        planned: False: the fleet is fixed.
    """
    most = {
        role: (rules.bounds[role].most if role in rules.bounds else count) + _STARTS * planned
        for role, count in counts.items()
    }
    specs = [spec for role, count in most.items() for spec in [engines.worker(role)] * count]
    fleet = SimulatedFleet(tuple(specs), BLOCK_SIZE, engines.transfer_ns_per_token)
    decide = _Decider(Planner(rules, {role: engines.timing(role) for role in counts})) if planned else None
    policy = ElasticPolicy(counts, seed=seed, interval_s=rules.interval_s, start_s=rules.start_s, decide=decide)
    simulation = Simulation(fleet, trace.requests(BLOCK_SIZE, speed), policy)
    policy.served = simulation.served
    simulation.run()
    return _result(name, simulation.served, specs, engines, rules, policy)


class _Decider:
    """A planner with its state."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._state = planner.begin()

    def __call__(self, seen: Observation, now_s: float) -> PlanDecision | None:
        self._state, decision = self._planner.step(self._state, seen, now_s)
        return decision


def _result(
    name: str,
    served: Sequence[SimulatedRequest],
    specs: Sequence[WorkerSpec],
    engines: Engines,
    rules: Rules,
    policy: ElasticPolicy,
) -> Simulated:
    done = [each for each in served if each.complete]
    end_ns = max((each.last_ns for each in done), default=0)
    ttft = [(each.first_ns - each.request.arrival_ns) / 1e6 for each in done]
    itl = [(each.last_ns - each.first_ns) / 1e6 / max(1, each.request.output_tokens - 1) for each in done]
    runs = [_used(run, specs[number].role, end_ns) for number, run in sorted(policy.runs.items())]
    hours = sum((end - begin) * engines.gpus_of(role) for role, begin, end in runs) / 3600
    both = sum(t <= rules.ttft_ms and i <= rules.itl_ms for t, i in zip(ttft, itl, strict=True))
    outcome = PolicyOutcome(
        name=name,
        requests=len(served),
        unserved=len(served) - len(done),
        ttft_p50_ms=quantile(sorted(ttft), 0.5, math.nan),
        ttft_p95_ms=quantile(sorted(ttft), 0.95, math.nan),
        itl_p50_ms=quantile(sorted(itl), 0.5, math.nan),
        itl_p95_ms=quantile(sorted(itl), 0.95, math.nan),
        attained_ttft=sum(each <= rules.ttft_ms for each in ttft) / len(served),
        attained_itl=sum(each <= rules.itl_ms for each in itl) / len(served),
        attained=both / len(served),
        gpu_hours=hours,
        mean_gpus=hours * 3600 / (end_ns / 1e9),
        peak_gpus=_peak(runs, engines),
        starts=sum(run.asked_ns > 0 for run in policy.runs.values()),
    )
    return Simulated(outcome, tuple(policy.steps), tuple(runs))


def _used(run: WorkerRun, role: str, end_ns: int) -> tuple[Role, float, float]:
    end = run.ended_ns if run.ended_ns >= 0 else max(end_ns, run.asked_ns)
    return msgspec.convert(role, Role), run.asked_ns / 1e9, min(end, max(end_ns, run.asked_ns)) / 1e9


def _peak(runs: Sequence[tuple[Role, float, float]], engines: Engines) -> int:
    """The most GPUs at one time. A worker that ends when another begins does not overlap with it."""
    used = [(begin, end, engines.gpus_of(role)) for role, begin, end in runs]
    changes = sorted([(begin, gpus) for begin, _, gpus in used] + [(end, -gpus) for _, end, gpus in used])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak
