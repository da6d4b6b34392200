"""Decisions of planners: the number of workers, and everything that it depends on.

A planner folds the observations of its model's decisions, so that a successor has the knowledge of its predecessor.
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
        ready: workers that take requests.
        starting: requested workers that do not take requests yet.
        waiting: requests at these workers that have not started.
        starved: ready workers that wait for a processor core for a quarter of the time or more.
        running: requests that have started.
        asleep: ready workers that sleep until a request wakes them.
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
        ended: requests that ended in it; the following fields are about these, lengths in tokens.
        hit_rate: share of prompt tokens from a cache, 0 to 1.
        queued: requests without a worker at its end.
        pools: by role; roles without workers may be absent.
        one_machine: further workers would share the processor cores of the present ones.
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
        """Waiting requests, at workers or in queues before them."""
        return self.queued + sum(pool.waiting for pool in self.pools.values())

    @property
    def idle(self) -> bool:
        """Whether no request of this model ended or ran. Requests without a worker may be of any model."""
        return not self.ended and not any(pool.waiting or pool.running for pool in self.pools.values())

    @property
    def steady(self) -> bool:
        """Whether no worker was starting."""
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
    """Means, ms; infinite: the load exceeds the capacity. A role's other latency is 0.0.

    Attributes:
        busy: used share of the workers' capacity; above 1 if the load exceeds it.
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
        percentile: statistic of the observed latencies that the limits are for.
        start_s: seconds from requesting a worker to its first request.
        drain_s: seconds within which waiting requests should be served.
        hysteresis: share of the load that is added before workers are removed.
        up_cooldown_s, down_cooldown_s: least time between two changes of a role in this direction.
        down_after_s: seconds for which fewer workers must have been enough.
        max_down: largest share of a role's workers that is removed at once, at least one worker.
        gpu_budget: GPUs of all workers; 0: no limit.
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
    """Ratio of the observed to the predicted latency."""

    ttft: float = 1.0
    itl: float = 1.0


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """The decision for one role.

    Attributes:
        current: present and starting workers.
        needed: workers for the predicted load.
        kept: workers for the load with the hysteresis, the least number to scale down to.
        target: workers from now on.
        busy: predicted used share of the target's capacity.
        reasons: words for the bounds of the target; for a missed limit, why nothing was done.
        missed: consecutive intervals, up to this decision, in which a limit of the role was missed since the last
            workers were added.
    """

    current: int
    needed: int
    kept: int
    target: int
    busy: float
    reasons: tuple[str, ...] = ()
    missed: int = 0


class PlanDecision(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One decision and everything that it depends on.

    Attributes:
        predicted: latencies that the model predicts for the ready workers.
        sleep: all workers shall sleep until a request wakes one.
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
    """A decision of a planner, and its outcome.

    Attributes:
        at_ns: Unix time that the decision was made for.
        connector: the connector that starts and ends workers.
        failure: the reason if the workers could not be changed; "": they were, or no change was needed.
        zero_after_s: seconds without requests after which roles with a minimum of 0 sleep; 0: never.
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
