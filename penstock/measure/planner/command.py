"""``penstock plan``: watches load and latencies, and starts and drains workers."""

import asyncio
import contextlib
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import structlog
from msgspec import Meta

from penstock.cli.figures import clock
from penstock.configs import planner_settings as flags
from penstock.configs.logs import setup
from penstock.configs.planner_settings import BadRules, rules_of
from penstock.configs.settings import NatsSettings
from penstock.infra.bus.connection import Bus
from penstock.log.sources.open_log import FAILURES, Source, open_log
from penstock.measure.planner.connectors import Connector, DryRun
from penstock.measure.planner.core import Planner
from penstock.measure.planner.kubernetes import Api, BadCluster, Replicas
from penstock.measure.planner.lines import line, show_history
from penstock.measure.planner.local import LocalWorkers
from penstock.measure.planner.loop import PATIENCE, NoDecision, PlannerLoop
from penstock.measure.planner.timing import EngineTiming
from penstock.measure.profile.data import BadProfile, Profile, load
from penstock.measure.profile.modelled import mock_profile
from penstock.operate.workers import registrations
from penstock.schemas.plans import ROLES, Planned, Role

log = structlog.get_logger("plan")

FLEET_S = 30.0  # to wait for the first workers


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock plan``."""

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
        Meta(description="what changes workers: nothing, the `penstock up` of --data-dir, or Kubernetes replicas"),
    ] = "dry-run"
    model: Annotated[str, Meta(description="whose workers are planned; default: the only one with workers")] = ""
    ttft: flags.Ttft = 1000.0
    itl: flags.Itl = 50.0
    percentile: flags.Percentile = "p95"
    predictor: flags.Prediction = "holt"
    interval_s: flags.IntervalS = 30.0
    start_s: flags.StartS = 30.0
    drain_s: flags.DrainS = 60.0
    hysteresis: flags.Hysteresis = 0.15
    down_cooldown_s: flags.Cooldown = 60.0
    down_after_s: flags.DownAfter = 180.0
    max_down: flags.MaxDown = 0.25
    min_workers: flags.Least = 1
    max_workers: flags.Most = 32
    gpu_budget: flags.Budget = 0
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
            description=f"end after so many, or with status 1 after {PATIENCE} intervals without one, as when nothing "
            "is asked; 0: run until Ctrl-C",
        ),
    ] = 0
    history: Annotated[bool, Meta(description="print the decisions in the log instead")] = False
    since: Annotated[str, Meta(description="of --history: how far back, such as 15m, 2h, 7d")] = "1h"
    json: Annotated[bool, Meta(description="decisions as JSON, one a line")] = False
    data_dir: Annotated[str, Meta(description="data folder of the deployment")] = NatsSettings().data_dir
    nats_url: Annotated[str, Meta(description="broker instead of the folder's, as the user planner")] = ""
    namespace: Annotated[str, Meta(description="prefix of all subjects; default: the data folder's, else ps")] = ""
    log_format: Annotated[Literal["auto", "text", "json"], Meta(description="of log lines, on stderr")] = "auto"


class BadSettings(ValueError):
    """Flags that do not fit together, or not to the deployment."""


def run(settings: Settings) -> int:
    """Plan until Ctrl-C or SIGTERM; 1 if the deployment cannot be reached or nothing could be decided, 2 for flags that
    do not fit it.
    """
    setup(settings.log_format, "info", name="plan", stream=sys.stderr)
    source = Source(Path(settings.data_dir), settings.nats_url, settings.namespace)
    try:
        if settings.history:
            asyncio.run(show_history(source, settings.model, settings.since, as_json=settings.json))
        else:
            asyncio.run(_run(settings, source))
    except (BadSettings, BadRules, BadCluster, BadProfile) as error:
        return _explain(error, 2)
    except (NoDecision, *FAILURES, OSError) as error:
        return _explain(error, 1)
    except KeyboardInterrupt:
        pass
    return 0


def _explain(error: object, status: int) -> int:
    print(f"penstock plan: {error}", file=sys.stderr)
    return status


async def _run(settings: Settings, source: Source) -> None:
    async with open_log(source, name="plan", role="planner", streams=()) as opened:
        if opened.stopped:
            raise ValueError("the deployment is stopped: there is nothing to plan; --history shows earlier decisions")
        model, roles = await _fleet(opened.bus, settings.model)
        planner = Planner(rules_of(settings, roles, settings.predictor), timings(settings.profile, roles))
        loop = PlannerLoop(
            opened.bus,
            planner,
            connector_of(settings, opened.bus, roles),
            planner_id=f"plan-{secrets.token_hex(4)}",
            model=model,
            say=_say_json if settings.json else _say,
        )
        log.info("planning", model=model, roles=list(roles), connector=settings.connector)
        await _until_stopped(loop, settings.decisions)


async def _until_stopped(loop: PlannerLoop, decisions: int) -> None:
    """Until SIGTERM or Ctrl-C, or so many decisions; the lease is given up then."""
    task = asyncio.ensure_future(loop.run(decisions))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _fleet(bus: Bus, model: str) -> tuple[str, tuple[Role, ...]]:
    """The model, and the roles of its workers that are planned.

    Raises:
        BadSettings: no such model has workers, or several and none was named.
    """
    fleet = [each for each in await registrations(bus) if each.role in ROLES]
    models = sorted({each.model for each in fleet if model in ("", each.model, *each.aliases)})
    if len(models) != 1:
        known = ", ".join(sorted({each.model for each in fleet})) or "none"
        raise BadSettings(f"name the model with --model; models with workers: {known}")
    found = {each.role for each in fleet if each.model == models[0]}
    roles = tuple(role for role in ROLES if role in found)
    if "aggregated" in roles and len(roles) > 1:
        raise BadSettings(
            f"{models[0]} has aggregated workers beside {' and '.join(roles[1:])} workers: plan one kind, and end the "
            "other with `penstock drain`"
        )
    return models[0], roles


def timings(profiles: Sequence[str], roles: Sequence[Role]) -> dict[Role, EngineTiming]:
    """
    Args:
        profiles: one for all roles, or of prefill and of decode.

    Raises:
        BadSettings: two profiles, and the workers are aggregated.
        BadProfile: one cannot be used.
    """
    if len(profiles) > 1 and "aggregated" in roles:
        raise BadSettings("--profile: the workers are aggregated; give one profile")
    by_role: Mapping[Role, str] = dict.fromkeys(roles, profiles[0])
    if len(profiles) > 1:
        by_role = {role: profiles[role == "decode"] for role in roles}
    return {role: EngineTiming(_profile(text)) for role, text in by_role.items()}


def _profile(text: str) -> Profile:
    kind, _, speedup = text.partition(":")
    if kind != "mock":
        return load(Path(text))
    try:
        return mock_profile(slowness=1 / float(speedup or 1))
    except (ValueError, ZeroDivisionError):
        raise BadSettings(f"--profile {text}: give mock, or mock:2 with the workers' --mock-speedup") from None


def connector_of(settings: Settings, bus: Bus, roles: Sequence[Role]) -> Connector:
    """
    Raises:
        BadSettings, BadCluster: it cannot be used here.
    """
    if settings.connector == "dry-run":
        return DryRun()
    if settings.connector == "local":
        if settings.nats_url:
            raise BadSettings("--connector local needs the --data-dir of a `penstock up` instead of --nats-url")
        return LocalWorkers(bus, Path(settings.data_dir).resolve())
    workloads: dict[Role, str] = {role: f"deployment/penstock-{role}" for role in roles}
    for text in settings.kubernetes_workloads:
        role, _, workload = text.partition("=")
        if role not in workloads:
            raise BadSettings(f"--kubernetes-workloads {text}: write ROLE=KIND/NAME; roles here: {', '.join(roles)}")
        workloads[role] = workload
    return Replicas(Api.find(settings.kubernetes_url), settings.kubernetes_namespace, workloads)


def _say(planned: Planned) -> None:
    print(f"{clock(planned.at_ns, planned.at_ns)}  {line(planned)}")


def _say_json(planned: Planned) -> None:
    print(msgspec.json.encode(planned).decode())
