"""Flags that ``penstock plan`` and ``penstock plan simulate`` share, and the rules that they make."""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from penstock.configs.settings import NatsSettings
from penstock.schemas import plans
from penstock.schemas.plans import Bounds, Predictor, Role, Rules

PATIENCE = 3  # intervals without a decision after which a planner that is to make some ends


class RuleSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that rules are made of."""

    ttft: Annotated[float, Meta(gt=0, description="limit of the time to the first token, ms")] = 1000.0
    itl: Annotated[float, Meta(gt=0, description="limit of the time per token after the first, ms")] = 50.0
    percentile: Annotated[
        plans.Percentile, Meta(description="statistic of the observed latencies that the limits are for")
    ] = "p95"
    interval_s: Annotated[float, Meta(ge=0.5, le=3600, description="seconds between two decisions")] = 30.0
    start_s: Annotated[
        float, Meta(ge=0, description="seconds until a new worker takes a request; the rate is predicted so far ahead")
    ] = 30.0
    drain_s: Annotated[float, Meta(gt=0, description="seconds within which waiting requests should be served")] = 60.0
    hysteresis: Annotated[
        float, Meta(ge=0, le=2, description="share of the load that is added before workers are taken away")
    ] = 0.15
    down_cooldown_s: Annotated[
        float, Meta(ge=0, description="seconds between two changes of a role that take workers away")
    ] = 60.0
    down_after_s: Annotated[float, Meta(ge=0, description="seconds for which fewer workers must have been enough")] = (
        180.0
    )
    max_down: Annotated[float, Meta(gt=0, le=1, description="share of a role's workers that is taken away at once")] = (
        0.25
    )
    min_workers: Annotated[
        int, Meta(ge=0, description="workers of each role, at least; 0: the last ones may sleep (--zero-after-s)")
    ] = 1
    max_workers: Annotated[int, Meta(ge=1, le=1024, description="workers of each role, at most")] = 32
    gpu_budget: Annotated[int, Meta(ge=0, description="GPUs of all workers, at most; 0: no limit")] = 0


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


class PlannerSettings(RuleSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock plan``."""

    FOLDER_NAMES_BROKER: ClassVar[bool] = True  # a --data-dir on the command line goes before PENSTOCK_NATS_URL

    profile: Annotated[
        tuple[str, ...],
        Meta(
            min_length=1,
            max_length=2,
            description="what a worker can do: a folder of `penstock profile endpoint` or `profile sla`, or mock, "
            "mock:2 for mock workers with --mock-speedup 2; two: of prefill and of decode workers",
        ),
    ] = ("mock",)
    connector: Annotated[
        Literal["dry-run", "local", "kubernetes"],
        Meta(description="what is scaled: nothing, the `penstock up` of --data-dir, or Kubernetes replicas"),
    ] = "dry-run"
    model: Annotated[str, Meta(description="model whose workers are planned; default: the only one with workers")] = ""
    predictor: Annotated[
        Predictor,
        Meta(description="predicted request rate: the last one, the mean of 5 intervals, or level and trend (Holt)"),
    ] = "holt"
    kubernetes_url: Annotated[str, Meta(description="API server; default: of the cluster that this runs in")] = ""
    kubernetes_namespace: Annotated[str, Meta(description="of the workers")] = "default"
    kubernetes_workloads: Annotated[
        tuple[str, ...],
        Meta(description="ROLE=KIND/NAME of the workers; default: deployment/penstock-ROLE, as in the Helm chart"),
    ] = ()
    decisions: Annotated[
        int,
        Meta(
            ge=0,
            description=f"end after this many, or with status 1 after {PATIENCE} intervals without one, as without "
            "requests; 0: run until Ctrl-C",
        ),
    ] = 0
    zero_after_s: Annotated[
        float, Meta(gt=0, description="with --min-workers 0: seconds without requests after which workers sleep")
    ] = 300.0
    history: Annotated[bool, Meta(description="print the logged decisions instead of planning")] = False
    since: Annotated[str, Meta(description="of --history: how far back, such as 15m, 2h, 7d")] = "1h"
    json: Annotated[bool, Meta(description="decisions as JSON, one a line")] = False
    data_dir: Annotated[str, Meta(description="data folder of the deployment")] = NatsSettings().data_dir
    nats_url: Annotated[str, Meta(description="broker instead of the folder's, as the user planner")] = ""
    namespace: Annotated[str, Meta(description="prefix of all subjects; default: the data folder's, else ps")] = ""
    cells: Annotated[int, Meta(ge=0, description="cells of the deployment; 0: as the data folder says, else 1")] = 0
    cell_nats_urls: Annotated[
        tuple[str, ...],
        Meta(description="brokers of the cells after the first, as the gateway's flag; default: that of the first"),
    ] = ()
    log_format: Annotated[Literal["auto", "text", "json"], Meta(description="of log lines, on stderr")] = "auto"
