"""``penstock plan simulate``: the planner on a trace in simulated time, beside fleets of a fixed size."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from rich.table import Table

from penstock.cli.terminal import Column, fail, fitting_table, stdout
from penstock.configs.flags import BadSettings
from penstock.configs.planner_settings import BadRules, RuleSettings, rules_of
from penstock.measure.plots import PlotsMissing, drawn
from penstock.measure.profile.data import BadProfile, load
from penstock.measure.simulation.trace import RequestTrace, TraceError, read
from penstock.planner.capacity import EngineTiming
from penstock.planner.simulated import Engines, PolicyOutcome, Shape, Simulated, generate, simulate
from penstock.schemas.plans import Predictor, Role, Rules, Times

_COLOURS: dict[Role, str] = {"aggregated": "#0f766e", "prefill": "#b45309", "decode": "#0f766e"}
_SEEN, _LIMIT = "#334155", "#b91c1c"


def draw(planned: Simulated, fixed: Sequence[Simulated], rules: Rules, path: Path) -> None:
    """
    Args:
        fixed: for the comparison of limits kept against GPU-hours.

    Raises:
        PlotsMissing: with the command that installs matplotlib.
    """
    with drawn(path, 11, 7.2, dpi=110) as figure:
        _draw(figure, planned, fixed, rules)


def _draw(figure: Any, planned: Simulated, fixed: Sequence[Simulated], rules: Rules) -> None:
    load, workers, ttft, itl, sizes = _axes(figure)
    minutes = [step.at_s / 60 for step in planned.steps]
    load.plot(minutes, [step.observed.rate for step in planned.steps], color=_SEEN, label="arrived")
    known = [step for step in planned.steps if step.decision]
    load.plot(
        [step.at_s / 60 for step in known],
        [step.decision.demand.rate for step in known if step.decision],
        color=_LIMIT,
        linewidth=0.9,
        linestyle="--",
        label="planned for",
    )
    _titled(load, "Requests per second", legend=True)
    for role in dict.fromkeys(each[0] for each in planned.runs):
        times, counts = _counts(planned, role)
        workers.step([at / 60 for at in times], counts, where="post", color=_COLOURS[role], label=role)
    _titled(workers, "Workers, starting ones included", legend=True)
    _latency(ttft, planned, "ttft", rules.ttft_ms, "TTFT (ms)")
    _latency(itl, planned, "itl", rules.itl_ms, "ITL (ms)")
    for number, each in enumerate(sorted((*fixed, planned), key=lambda each: each.outcome.gpu_hours)):
        own = each is planned
        x, y = each.outcome.gpu_hours, 100 * each.outcome.attained
        sizes.plot([x], [y], "o", color=_LIMIT if own else _SEEN, markersize=7 if own else 5)
        sizes.annotate(
            each.outcome.name, (x, y), textcoords="offset points", xytext=(6, 6 if number % 2 else -12), fontsize=8
        )
    _titled(sizes, "Requests within both limits (%)")
    sizes.set_xlabel("GPU-hours", fontsize=8)
    sizes.set_ylim(0, 104)
    sizes.set_xlim(0, 1.25 * max(each.outcome.gpu_hours for each in (*fixed, planned)))


def _axes(figure: Any) -> tuple[Any, Any, Any, Any, Any]:
    grid = figure.add_gridspec(4, 2, width_ratios=[1.7, 1])
    rows = [figure.add_subplot(grid[row, 0]) for row in range(4)]
    rows[-1].set_xlabel("minutes", fontsize=8)
    return rows[0], rows[1], rows[2], rows[3], figure.add_subplot(grid[:, 1])


def _titled(axis: Any, title: str, *, legend: bool = False) -> None:
    axis.set_title(title, fontsize=9, loc="left")
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.3)
    axis.set_ylim(bottom=0)
    if legend:
        axis.legend(fontsize=8, loc="upper right")


def _latency(axis: Any, planned: Simulated, name: str, limit: float, title: str) -> None:
    seen: list[tuple[float, Times]] = [
        (step.at_s / 60, found) for step in planned.steps if (found := getattr(step.observed, name))
    ]
    for kind, colour in (("p50", "#94a3b8"), ("p95", _SEEN)):
        axis.plot([at for at, _ in seen], [getattr(found, kind) for _, found in seen], color=colour, label=kind)
    axis.axhline(limit, color=_LIMIT, linewidth=0.9, linestyle="--", label="limit")
    _titled(axis, title, legend=True)
    axis.set_ylim(0, 2.2 * limit)


def _counts(planned: Simulated, role: Role) -> tuple[list[float], list[int]]:
    changes = [(begin, 1) for kind, begin, _ in planned.runs if kind == role]
    changes += [(end, -1) for kind, _, end in planned.runs if kind == role]
    times, counts, running = [], [], 0
    for at, change in sorted(changes):
        running += change
        times.append(at)
        counts.append(running)
    return times[:-1] or times, counts[:-1] or counts


class PlanSimulationSettings(RuleSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock plan simulate``."""

    itl: Annotated[float, Meta(gt=0, description="limit of the time per token after the first, ms")] = 40.0
    shape: Annotated[Shape, Meta(description="of the load: a day, bursts of two minutes, or always --high")] = "diurnal"
    trace: Annotated[str, Meta(description="file in Mooncake's format, instead of --shape")] = ""
    speed: Annotated[float, Meta(gt=0, description="of a trace: how many times faster it comes")] = 1.0
    requests: Annotated[int, Meta(ge=0, description="of a trace: number of first requests; 0: all")] = 0
    seconds: Annotated[float, Meta(gt=0, description="of a shape: its length")] = 3600.0
    low: Annotated[float, Meta(gt=0, description="of a shape: requests per second at its quietest")] = 1.0
    high: Annotated[float, Meta(gt=0, description="of a shape: requests per second at its busiest")] = 10.0
    isl: Annotated[int, Meta(ge=64, description="of a shape: mean tokens per prompt")] = 4000
    osl: Annotated[int, Meta(ge=2, description="of a shape: mean tokens per answer")] = 300
    shared: Annotated[float, Meta(ge=0, lt=1, description="of a shape: common share of the prompts")] = 0.3
    seed: Annotated[int, Meta(ge=0, description="of arrivals, lengths and ties")] = 0
    workers: Annotated[int, Meta(ge=0, description="aggregated workers at the beginning")] = 2
    prefill: Annotated[int, Meta(ge=0, description="prefill workers at the beginning, instead of --workers")] = 0
    decode: Annotated[int, Meta(ge=0, description="decode workers at the beginning, beside them")] = 0
    fixed: Annotated[
        tuple[str, ...], Meta(description="fleets of a fixed size to compare: 8, or 2+6 for prefill and decode")
    ] = ()
    predictors: Annotated[tuple[Predictor, ...], Meta(min_length=1, description="a planned run each")] = ("holt",)
    profile: Annotated[
        tuple[str, ...],
        Meta(
            description="folder or file of `penstock profile endpoint` or `profile sla --out`, two for prefill and "
            "decode: workers take as long as it says, instead of the mock's model"
        ),
    ] = ()
    slowness: Annotated[float, Meta(gt=0, description="factor on the time of each step of the mock's model")] = 2.0
    gpus: Annotated[int, Meta(ge=1, description="of each worker of the mock's model")] = 1
    transfer_us_per_token: Annotated[float, Meta(ge=0, description="handoff from prefill to decode")] = 0.5
    json: Annotated[str, Meta(description="file for figures and decisions")] = ""
    plot: Annotated[str, Meta(description="PNG file of the first planned run; needs penstock[bench]")] = ""


def run(settings: PlanSimulationSettings) -> int:
    """Simulate, print a table; 2 for flags that do not fit, 1 if a trace or a plot is missing."""
    try:
        counts = counts_of(settings)
        rules = {each: rules_of(settings, tuple(counts), each) for each in settings.predictors}
        sizes = [fixed_of(each, counts) for each in settings.fixed]
        engines = _engines(settings, counts)
        trace = _trace(settings)
    except (BadSettings, BadRules) as error:
        return fail("plan simulate", error, status=2)
    except (TraceError, BadProfile) as error:
        return fail("plan simulate", error)
    found: list[Simulated] = []
    for each in _runs(settings, engines, trace, counts, rules, sizes):
        found.append(each)
        print(f"{len(found)} of {len(rules) + len(sizes)}: {each.outcome.name}", file=sys.stderr)
    console = stdout()
    console.print(table([each.outcome for each in found], console.width))
    if settings.json:
        data = {"settings": settings, "runs": [{"outcome": each.outcome, "steps": _steps(each)} for each in found]}
        Path(settings.json).write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n")
    if settings.plot:
        try:
            draw(found[0], found[1:], rules[settings.predictors[0]], Path(settings.plot))
        except PlotsMissing as error:
            return fail("plan simulate", error)
    return 0


def counts_of(settings: PlanSimulationSettings) -> dict[Role, int]:
    """Workers at the beginning, by role.

    Raises:
        BadSettings: prefill without decode, or nothing at all.
    """
    if bool(settings.prefill) != bool(settings.decode):
        raise BadSettings("--prefill and --decode go together")
    if settings.prefill:
        return {"prefill": settings.prefill, "decode": settings.decode}
    if not settings.workers:
        raise BadSettings("--workers 0: start with at least one")
    return {"aggregated": settings.workers}


def fixed_of(text: str, counts: dict[Role, int]) -> dict[Role, int]:
    """
    Args:
        text: "8", or "2+6" for prefill and decode.

    Raises:
        BadSettings: it is neither, or has other roles than ``counts``.
    """
    parts = text.split("+")
    if len(parts) != len(counts) or not all(part.isdecimal() and int(part) for part in parts):
        wanted = "two numbers such as 2+6" if len(counts) > 1 else "a number of workers"
        raise BadSettings(f"--fixed {text}: give {wanted}")
    return dict(zip(counts, map(int, parts), strict=True))


# In narrow terminals, those with high numbers are left out.
_COLUMNS = (
    *(Column("fleet"), Column("requests", 3, right=True), Column("within both", right=True)),
    *(Column("TTFT kept", 2, right=True), Column("ITL kept", 2, right=True), Column("TTFT p50", 5, right=True)),
    *(Column("p95 ms", 4, right=True), Column("ITL p50", 5, right=True), Column("p95 ms", 4, right=True)),
    *(Column("GPU-hours", right=True), Column("mean GPUs", 6, right=True), Column("peak", 1, right=True)),
    Column("starts", 7, right=True),
)


def table(outcomes: list[PolicyOutcome], width: int) -> Table:
    """A row a fleet."""
    rows = [
        (
            each.name,
            f"{each.requests:,}" + (f" ({each.unserved} not served)" if each.unserved else ""),
            f"{each.attained:.1%}",
            f"{each.attained_ttft:.1%}",
            f"{each.attained_itl:.1%}",
            f"{each.ttft_p50_ms:,.0f}",
            f"{each.ttft_p95_ms:,.0f}",
            f"{each.itl_p50_ms:.1f}",
            f"{each.itl_p95_ms:.1f}",
            f"{each.gpu_hours:.2f}",
            f"{each.mean_gpus:.2f}",
            str(each.peak_gpus),
            str(each.starts),
        )
        for each in outcomes
    ]
    return fitting_table(_COLUMNS, rows, width)


def _trace(settings: PlanSimulationSettings) -> RequestTrace:
    if settings.trace:
        return read(Path(settings.trace)).limited(settings.requests)
    if settings.low > settings.high:
        raise BadSettings(f"--low {settings.low:g} is above --high {settings.high:g}")
    return generate(
        settings.shape,
        seed=settings.seed,
        seconds=settings.seconds,
        low=settings.low,
        high=settings.high,
        isl=settings.isl,
        osl=settings.osl,
        shared=settings.shared,
    )


def _engines(settings: PlanSimulationSettings, counts: dict[Role, int]) -> Engines:
    if len(settings.profile) > len(counts):
        raise BadSettings(
            f"--profile: {len(settings.profile)} for {' and '.join(counts)}; give one, or one for each role"
        )
    profiles: dict[Role, EngineTiming] = {}
    if settings.profile:
        for number, role in enumerate(counts):
            profiles[role] = EngineTiming(load(Path(settings.profile[min(number, len(settings.profile) - 1)]), role))
    return Engines(settings.slowness, settings.gpus, round(settings.transfer_us_per_token * 1e3), profiles)


def _runs(
    settings: PlanSimulationSettings,
    engines: Engines,
    trace: RequestTrace,
    counts: dict[Role, int],
    rules: dict[Predictor, Rules],
    sizes: list[dict[Role, int]],
) -> Iterator[Simulated]:
    speed = settings.speed if settings.trace else 1.0
    for predictor, own in rules.items():
        yield simulate(f"planned, {predictor}", trace, speed, engines, counts, own, planned=True, seed=settings.seed)
    first = rules[settings.predictors[0]]
    for size in sizes:
        name = f"fixed {'+'.join(map(str, size.values()))}"
        yield simulate(name, trace, speed, engines, size, first, planned=False, seed=settings.seed)


def _steps(found: Simulated) -> list[dict[str, object]]:
    return [{"at_s": step.at_s, "observed": step.observed, "decision": step.decision} for step in found.steps]
