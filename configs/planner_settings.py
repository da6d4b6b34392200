"""Flags that ``penstock plan`` and ``penstock plan simulate`` share, and the rules that they make."""

from typing import Annotated, Protocol

from msgspec import Meta

from penstock.schemas import plans
from penstock.schemas.plans import Bounds, Predictor, Role, Rules

Ttft = Annotated[float, Meta(gt=0, description="limit of the time to the first token, ms")]
Itl = Annotated[float, Meta(gt=0, description="limit of the time per token behind it, ms")]
Percentile = Annotated[plans.Percentile, Meta(description="what of the observed latencies is to be within the limits")]
Prediction = Annotated[
    Predictor, Meta(description="of the request rate: as it was last, mean of 5 intervals, or level and trend (Holt)")
]
IntervalS = Annotated[float, Meta(ge=0.5, le=3600, description="seconds between two decisions")]
StartS = Annotated[
    float, Meta(ge=0, description="seconds from asking for a worker to its first request; the rate is predicted so far")
]
DrainS = Annotated[float, Meta(gt=0, description="seconds within which requests that wait are to be served")]
Hysteresis = Annotated[
    float, Meta(ge=0, le=2, description="share of the load that is added before workers are taken away")
]
Cooldown = Annotated[float, Meta(ge=0, description="seconds between two changes of a role that take workers away")]
DownAfter = Annotated[float, Meta(ge=0, description="seconds for which fewer workers must have been enough")]
MaxDown = Annotated[float, Meta(gt=0, le=1, description="share of a role's workers that is taken away at once")]
Least = Annotated[int, Meta(ge=1, description="workers of each role, at least")]
Most = Annotated[int, Meta(ge=1, le=1024, description="workers of each role, at most")]
Budget = Annotated[int, Meta(ge=0, description="GPUs of all workers, at most; 0: no limit")]


class RuleSettings(Protocol):
    """Settings that rules are made of."""

    @property
    def ttft(self) -> float: ...
    @property
    def itl(self) -> float: ...
    @property
    def percentile(self) -> plans.Percentile: ...
    @property
    def interval_s(self) -> float: ...
    @property
    def start_s(self) -> float: ...
    @property
    def drain_s(self) -> float: ...
    @property
    def hysteresis(self) -> float: ...
    @property
    def down_cooldown_s(self) -> float: ...
    @property
    def down_after_s(self) -> float: ...
    @property
    def max_down(self) -> float: ...
    @property
    def min_workers(self) -> int: ...
    @property
    def max_workers(self) -> int: ...
    @property
    def gpu_budget(self) -> int: ...


class BadRules(ValueError):
    """Limits that contradict each other."""


def rules_of(settings: RuleSettings, roles: tuple[Role, ...], predictor: Predictor) -> Rules:
    """
    Raises:
        BadRules: the least number of workers is above the largest.
    """
    if settings.min_workers > settings.max_workers:
        raise BadRules(f"--min-workers {settings.min_workers} is above --max-workers {settings.max_workers}")
    bounds = Bounds(settings.min_workers, settings.max_workers)
    return Rules(
        ttft_ms=settings.ttft,
        itl_ms=settings.itl,
        percentile=settings.percentile,
        predictor=predictor,
        interval_s=settings.interval_s,
        start_s=settings.start_s,
        drain_s=settings.drain_s,
        hysteresis=settings.hysteresis,
        down_cooldown_s=settings.down_cooldown_s,
        down_after_s=settings.down_after_s,
        max_down=settings.max_down,
        gpu_budget=settings.gpu_budget,
        bounds=dict.fromkeys(roles, bounds),
    )
