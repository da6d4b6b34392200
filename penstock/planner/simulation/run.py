"""One trace on a planned fleet, or on one of a fixed size, and what it comes to.

Simulated engines that take as long as a profile says, instead of the mock's formula.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from penstock.cli.figures import quantile
from penstock.measure.profile.modelled import mock_profile
from penstock.measure.simulation.engine import MAX_SEQUENCES
from penstock.measure.simulation.fleet import SimulatedRequest, Simulation
from penstock.measure.simulation.policy import SimulatedFleet, WorkerSpec
from penstock.measure.simulation.trace import RequestTrace
from penstock.planner.capacity import EngineTiming
from penstock.planner.simulation.elastic import ElasticPolicy, Life, Step
from penstock.planner.worker_counts import Planner
from penstock.schemas.plans import Observation, PlanDecision, Role, Rules

_UNKNOWN_TOKENS = 1 << 24  # of KV cache, where a profile does not tell


class ProfileTimes:
    """``penstock.measure.simulation.engine.PassTimes`` of one rank of a worker.

    A pass with prompts takes as long as one prompt of as many tokens would, or, for a later part of a long one, what
    that adds to the earlier parts if it is more. Sequences that decode beside it add a token's time.
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
        gpu_hours: from asking for each worker until it has ended.
        mean_gpus, peak_gpus: at work, or starting.
        starts: workers that were asked for while it ran.
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
    """``lives``: of each worker its role, and from when to when it used GPUs, s."""

    outcome: PolicyOutcome
    steps: tuple[Step, ...]
    lives: tuple[tuple[Role, float, float], ...]


class Engines(Struct, frozen=True):
    """The simulated workers.

    Attributes:
        slowness: factor on the time of each step of the mock's model.
        profiles: of workers, instead of the mock's model; their GPUs count, too.
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
        counts: workers at the beginning; the roles that are planned.
        planned: False: the workers stay as they are.
    """
    most = {
        role: (rules.bounds[role].most if role in rules.bounds else count) + _STARTS * planned
        for role, count in counts.items()
    }
    specs = [spec for role, count in most.items() for spec in [engines.worker(role)] * count]
    fleet = SimulatedFleet(tuple(specs), BLOCK_SIZE, engines.transfer_ns_per_token)
    decide = _Decider(Planner(rules, {role: engines.timing(role) for role in counts})) if planned else None
    policy = ElasticPolicy(
        counts,
        seed=seed,
        interval_s=rules.interval_s,
        start_s=rules.start_s,
        decide=decide,
    )
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
    lives = [_used(life, specs[number].role, end_ns) for number, life in sorted(policy.lives.items())]
    hours = sum((end - begin) * engines.gpus_of(role) for role, begin, end in lives) / 3600
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
        peak_gpus=_peak(lives, engines),
        starts=sum(life.asked_ns > 0 for life in policy.lives.values()),
    )
    return Simulated(outcome, tuple(policy.steps), tuple(lives))


def _used(life: Life, role: str, end_ns: int) -> tuple[Role, float, float]:
    end = life.ended_ns if life.ended_ns >= 0 else max(end_ns, life.asked_ns)
    return msgspec.convert(role, Role), life.asked_ns / 1e9, min(end, max(end_ns, life.asked_ns)) / 1e9


def _peak(lives: Sequence[tuple[Role, float, float]], engines: Engines) -> int:
    """The most GPUs at one time; a worker that ends when another begins is not beside it."""
    used = [(begin, end, engines.gpus_of(role)) for role, begin, end in lives]
    changes = sorted([(begin, gpus) for begin, _, gpus in used] + [(end, -gpus) for _, end, gpus in used])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak
