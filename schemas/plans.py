"""Decisions of planners: how many workers there should be, and everything that this depends on.

A planner folds the observations of its model's decisions, so that one that takes over knows what the last one knew.
"""

from typing import Literal

import msgspec

from penstock.schemas.wire import decoder

Role = Literal["aggregated", "prefill", "decode"]
ROLES: tuple[Role, ...] = ("aggregated", "prefill", "decode")
Percentile = Literal["mean", "p50", "p95"]
Predictor = Literal["constant", "moving_average", "holt"]


class Times(msgspec.Struct, frozen=True):
    """One latency, ms: its mean and percentiles over requests."""

    mean: float
    p50: float
    p95: float


class Pool(msgspec.Struct, frozen=True, omit_defaults=True):
    """Workers of one role.

    Attributes:
        ready: take requests.
        starting: were asked for and do not take requests yet.
        waiting: requests that they have and have not begun.
        starved: of those that are ready, the ones that wait for a processor core for a quarter of the time or more.
        running: requests that they have begun.
        asleep: of those that are ready, the ones that wake up for a request.
    """

    ready: int = 0
    starting: int = 0
    waiting: int = 0
    starved: int = 0
    running: int = 0
    asleep: int = 0

    @property
    def count(self) -> int:
        return self.ready + self.starting


class Observation(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One interval.

    Attributes:
        seconds: its length.
        arrived: requests that were accepted in it.
        ended: requests that ended in it; what follows is of these, lengths in tokens.
        hit_rate: prompt tokens that came from a cache, of all; 0 to 1.
        queued: requests at its end that no worker has.
        pools: by role; roles without workers may be absent.
        one_machine: further workers would share the processor cores of those there are.
    """

    seconds: float
    arrived: int
    ended: int = 0
    isl: float = 0.0
    osl: float = 0.0
    hit_rate: float = 0.0
    ttft: Times | None = None
    itl: Times | None = None
    queued: int = 0
    pools: dict[Role, Pool] = {}
    one_machine: bool = False

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.arrived / self.seconds if self.seconds > 0 else 0.0

    @property
    def backlog(self) -> int:
        """Requests that wait, at workers or before them."""
        return self.queued + sum(pool.waiting for pool in self.pools.values())

    @property
    def idle(self) -> bool:
        """Whether no request of this model ended or ran. Those that no worker has may be of any model."""
        return not self.ended and not any(pool.waiting or pool.running for pool in self.pools.values())

    @property
    def steady(self) -> bool:
        """Whether no worker was on its way."""
        return not any(pool.starting for pool in self.pools.values())


class Demand(msgspec.Struct, frozen=True):
    """Requests per second, prompt and answer tokens of each, and the share of the prompt that is cached."""

    rate: float
    isl: float
    osl: float
    hit_rate: float = 0.0

    @property
    def computed(self) -> float:
        """Prompt tokens that a worker computes."""
        return max(1.0, self.isl * (1 - self.hit_rate))

    @property
    def context(self) -> float:
        """Mean tokens of a request that decodes."""
        return self.isl + self.osl / 2


class Latency(msgspec.Struct, frozen=True):
    """Means, ms; infinite: more comes than can be served. A role's other latency is 0.0.

    Attributes:
        busy: share of what the workers can do that is used, 0 to 1 and above.
    """

    ttft_ms: float
    itl_ms: float
    busy: float


class Bounds(msgspec.Struct, frozen=True):
    """The least and the largest number of workers of one role."""

    least: int = 1
    most: int = 64


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """
    Attributes:
        ttft_ms, itl_ms: limits.
        percentile: of the observed latencies that is to be within them.
        start_s: from asking for a worker to its first request.
        drain_s: within which what waits is to be served.
        hysteresis: share of the load that is added before workers are taken away.
        up_cooldown_s, down_cooldown_s: from one change of a role in this direction to the next.
        down_after_s: for so long fewer workers must have been enough.
        max_down: share of a role's workers that is taken away at once, at least one.
        gpu_budget: of all workers; 0: no limit.
    """

    ttft_ms: float
    itl_ms: float
    percentile: Percentile = "p95"
    predictor: Predictor = "holt"
    interval_s: float = 30.0
    start_s: float = 30.0
    drain_s: float = 60.0
    hysteresis: float = 0.15
    up_cooldown_s: float = 0.0
    down_cooldown_s: float = 60.0
    down_after_s: float = 180.0
    max_down: float = 0.25
    gpu_budget: int = 0
    bounds: dict[Role, Bounds] = {}


class Correction(msgspec.Struct, frozen=True):
    """Observed latency by predicted one."""

    ttft: float = 1.0
    itl: float = 1.0


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is decided of one role.

    Attributes:
        current: workers there are or that are starting.
        needed: for the predicted load.
        kept: that would be needed with the hysteresis; fewer are not asked for.
        target: to be had now.
        busy: predicted share of the target's capacity.
        reasons: words for what bounded the target; of a missed limit, why nothing was done.
        missed: intervals in a row, up to this decision, in which a limit of the role was missed, since the last workers
            came.
    """

    current: int
    needed: int
    kept: int
    target: int
    busy: float
    reasons: tuple[str, ...] = ()
    missed: int = 0


class PlanDecision(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One decision and all that it depends on.

    Attributes:
        predicted: by the model, of the workers that were ready.
        sleep: all workers are to sleep, until a request wakes one.
    """

    demand: Demand
    observed: Observation
    correction: Correction
    predicted: Latency
    changes: dict[Role, Change]
    sleep: bool = False

    @property
    def targets(self) -> dict[Role, int]:
        return {role: change.target for role, change in self.changes.items()}

    @property
    def moves(self) -> bool:
        return any(change.target != change.current for change in self.changes.values())


class Planned(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A decision of a planner, and what came of it.

    Attributes:
        at_ns: Unix time that the decision was made for.
        connector: what starts and ends workers.
        failure: why the workers could not be changed; "": they were, or nothing was to be done.
        zero_after_s: of idleness after which roles whose least is 0 sleep; 0: they never do.
    """

    planner: str
    model: str
    at_ns: int
    connector: str
    rules: Rules
    decision: PlanDecision
    failure: str = ""
    zero_after_s: float = 0.0


decode = decoder(Planned)
