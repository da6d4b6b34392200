"""``penstock plan``: watches load and latencies, and starts and drains workers."""

import asyncio
import contextlib
import math
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import structlog
from rich.console import Console

from penstock.cli.figures import clock, duration_ns
from penstock.cli.terminal import escape, fail, print_hanging, stdout
from penstock.configs.flags import BadSettings
from penstock.configs.logs import setup
from penstock.configs.planner_settings import BadRules, PlannerSettings, rules_of
from penstock.infra.bus.connection import Bus
from penstock.infra.bus.direct_get import read
from penstock.infra.bus.worker_leases import registrations
from penstock.log_tools.sources.open_log import FAILURES, LogSource, open_cells, open_log
from penstock.measure.profile.data import BadProfile, Profile, load, mock_profile
from penstock.planner.capacity import EngineTiming
from penstock.planner.connectors import BadCluster, Connector, DryRun, KubernetesApi, LocalWorkers, Replicas
from penstock.planner.loop import NoDecision, PlannerLoop
from penstock.planner.worker_counts import MISSED, Planner
from penstock.schemas import plans
from penstock.schemas.plans import ROLES, Change, Planned, Role

REASONS = {
    "cooling_down": "cooling down after the last change",
    "cpu_starved": "CPU starved: more workers would not help",
    "gpu_budget": "at the GPU budget",
    "idle": "idle: asleep until a request comes",
    "less_load": "less load",
    "maximum": "at the maximum",
    "minimum": "at the minimum",
    "more_load": "more load",
    "no_gain": "the last worker added brought no gain",
    "out_of_reach": "out of reach of any number of workers",
    "starting": "workers are starting",
}


def line(planned: Planned) -> str:
    """One decision, without its time."""
    decision, rules = planned.decision, planned.rules
    seen = decision.observed
    waiting = f", {seen.backlog} waiting" if seen.backlog else ""
    latencies = [
        _latency(f"{name} {rules.percentile}", getattr(times, rules.percentile), limit, digits)
        for name, times, limit, digits in (("TTFT", seen.ttft, rules.ttft_ms, 0), ("ITL", seen.itl, rules.itl_ms, 1))
        if times is not None
    ]
    parts = [
        f"{seen.rate:.2f} requests/s (planned for {decision.demand.rate:.2f}){waiting}",
        *latencies,
        *(_change(role, change) for role, change in decision.changes.items()),
        *([f"failed: {planned.failure}"] if planned.failure else []),
    ]
    return ", ".join(parts)


def _latency(name: str, observed: float, limit: float, digits: int) -> str:
    """With the limit if it was missed."""
    above = f" above {limit:,.{0 if limit == int(limit) else digits}f}" if observed > limit else ""
    return f"{name} {observed:,.{digits}f}{above} ms"


def _change(role: str, change: Change) -> str:
    moved = f"{change.current} → {change.target}" if change.target != change.current else str(change.target)
    reasons = [_reason(each, change) for each in change.reasons]
    return f"{role} {moved} ({', '.join(reasons)})" if reasons else f"{role} {moved}"


def _reason(reason: str, change: Change) -> str:
    """In words; those of a later build as they are."""
    if reason == "watching":
        return f"limit missed, {change.missed} of {MISSED} decisions"
    if reason == "limit_missed":
        return f"limit missed for {change.missed} decisions"
    return REASONS.get(reason, reason)


async def show_history(source: LogSource, model: str, since: str, *, as_json: bool) -> None:
    """Print the decisions in the log.

    Args:
        model: "": of all models.
        since: "15m", "2h".

    Raises:
        ValueError: ``since`` is no time.
    """
    since_ns = time.time_ns() - duration_ns(since)
    console = stdout()
    async with open_log(source, name="plan", role="viewer", streams=("PLAN",), files=True) as log:
        subjects = log.reader.subjects
        subject = subjects.plan(model) if model else subjects.all("plan")
        count = 0
        async for entry in read(log.reader, subjects.stream("PLAN"), subject, since_ns=since_ns):
            planned = plans.decode(entry.data)
            _print(planned, console, as_json=as_json)
            count += 1
    if not count and not as_json:
        console.print(f"no decision in the last {since}")


def _print(planned: Planned, console: Console, *, as_json: bool) -> None:
    if as_json:
        console.file.write(without_infinite(planned) + "\n")
        return
    print_hanging(console, f"{clock(planned.at_ns, time.time_ns())}  {escape(planned.model)}  ", escape(line(planned)))


log = structlog.get_logger("plan")


def run(settings: PlannerSettings) -> int:
    """Plan until Ctrl-C or SIGTERM; 1 if the deployment cannot be reached or nothing could be decided, 2 for flags that
    do not fit it.
    """
    setup(settings.log_format, "info", name="plan", stream=sys.stderr)
    source = LogSource(
        Path(settings.data_dir),
        settings.nats_url,
        settings.namespace,
        cells=settings.cells,
        cell_nats_urls=settings.cell_nats_urls,
    )
    try:
        if settings.history:
            asyncio.run(show_history(source, settings.model, settings.since, as_json=settings.json))
        else:
            asyncio.run(_run(settings, source))
    except (BadSettings, BadRules, BadCluster, BadProfile) as error:
        return fail("plan", error, status=2)
    except (NoDecision, *FAILURES, OSError) as error:
        return fail("plan", error)
    except KeyboardInterrupt:
        pass
    return 0


async def _run(settings: PlannerSettings, source: LogSource) -> None:
    async with open_cells(source, name="plan", role="planner", streams=(), whole=True) as logs:
        if any(opened.stopped for opened in logs):
            raise ValueError("the deployment is stopped: there is nothing to plan; --history shows earlier decisions")
        bus, *others = [opened.bus for opened in logs]
        model, roles = await _fleet([bus, *others], settings.model)
        rules = rules_of(settings, roles, settings.predictor)
        if not settings.min_workers:
            await _check_sleepers([bus, *others], model)
        zero_after_s = 0.0 if settings.min_workers else settings.zero_after_s
        planner = Planner(rules, timings(settings.profile, roles), zero_after_s)
        loop = PlannerLoop(
            bus,
            planner,
            connector_of(settings, bus, model, roles, others),
            planner_id=f"plan-{secrets.token_hex(4)}",
            model=model,
            say=_say_json if settings.json else _say,
            others=others,
        )
        log.info("planning", model=model, roles=list(roles), connector=settings.connector)
        await _until_stopped(loop, settings.decisions)


async def _until_stopped(loop: PlannerLoop, decisions: int) -> None:
    """Until SIGTERM or Ctrl-C, or this many decisions; the lease is given up then."""
    task = asyncio.ensure_future(loop.run(decisions))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _fleet(buses: Sequence[Bus], model: str) -> tuple[str, tuple[Role, ...]]:
    """The model, and the roles of its workers that are planned."""
    fleet = [each for bus in buses for each in await registrations(bus) if each.role in ROLES]
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


async def _check_sleepers(buses: Sequence[Bus], model: str) -> None:
    fleet = [each for bus in buses for each in await registrations(bus) if each.model == model and each.role in ROLES]
    for each in fleet:
        if not each.weights.base or each.role != "aggregated":
            raise BadSettings(
                f"--min-workers 0: {each.lasting_name} (--engine {each.engine}, {each.role}) cannot sleep; aggregated "
                "workers of the native engine can"
            )


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
    return {role: EngineTiming(_profile(text, role)) for role, text in by_role.items()}


def _profile(text: str, role: Role) -> Profile:
    kind, _, speedup = text.partition(":")
    if kind != "mock":
        return load(Path(text), role)
    try:
        return mock_profile(slowness=1 / float(speedup or 1))
    except (ValueError, ZeroDivisionError):
        raise BadSettings(f"--profile {text}: give mock, or mock:2 with the workers' --mock-speedup") from None


def connector_of(
    settings: PlannerSettings, bus: Bus, model: str, roles: Sequence[Role], others: Sequence[Bus] = ()
) -> Connector:
    """
    Raises:
        BadSettings, BadCluster: it cannot be used here.
    """
    if settings.connector == "dry-run":
        return DryRun(one_machine=not settings.nats_url)  # as if by ``penstock up`` of the data folder
    if settings.connector == "local":
        if settings.nats_url:
            raise BadSettings("--connector local needs the --data-dir of a `penstock up` instead of --nats-url")
        return LocalWorkers(bus, Path(settings.data_dir).resolve(), model, others)
    workloads: dict[Role, str] = {role: f"deployment/penstock-{role}" for role in roles}
    for text in settings.kubernetes_workloads:
        role, _, workload = text.partition("=")
        if role not in workloads:
            raise BadSettings(f"--kubernetes-workloads {text}: write ROLE=KIND/NAME; roles here: {', '.join(roles)}")
        workloads[role] = workload
    return Replicas(KubernetesApi.find(settings.kubernetes_url), settings.kubernetes_namespace, workloads)


def _say(planned: Planned) -> None:
    print(f"{clock(planned.at_ns, planned.at_ns)}  {line(planned)}")


def _say_json(planned: Planned) -> None:
    print(without_infinite(planned))


def without_infinite(planned: Planned) -> str:
    """Without predicted latencies that are infinite, for which JSON has no number."""
    plain = msgspec.to_builtins(planned)
    predicted = plain["decision"]["predicted"]
    plain["decision"]["predicted"] = {name: each for name, each in predicted.items() if each < math.inf}
    return msgspec.json.encode(plain).decode()
