"""``penstock profile sla``: the deployment that serves most per GPU within given latencies, and how to start it."""

import itertools
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from penstock.cli.figures import counted
from penstock.cli.terminal import fail, stdout
from penstock.configs.flags import BadSettings
from penstock.deploy.values import Engine
from penstock.infra.engine_args.memory_estimate import UnknownShape
from penstock.infra.engine_args.tree import BadArguments
from penstock.infra.model.modeldir import DEMO, TINY
from penstock.launch.recipes.catalogue import shape_at
from penstock.measure.pareto.plots import draw_estimates
from penstock.measure.pareto.records import BadPrices, Prices, gpu_of, read_prices
from penstock.measure.plots import PlotsMissing
from penstock.measure.profile.data import SUGGESTION, BadProfile, file_of
from penstock.measure.search import answer
from penstock.measure.search.candidates import (
    Choices,
    PoolSize,
    Scope,
    SizedDeployment,
    Sla,
    candidates,
    lines,
    measured,
    mock,
    roofline,
    table,
)
from penstock.measure.search.simulated import Percentile, SimulatedLoad, longest, search
from penstock.schemas.plans import Role

_BASES = {
    "measured": "from measured profiles",
    "mock": "by the mock engine's timing model",
    "roofline": "estimated for {gpu}, not measured",
}
PLOT = "pareto.png"
_PACES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)  # of the SLA's time per token
_SLUG = re.compile(r"[^a-z0-9]+")


class SlaProfileSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock profile sla``."""

    source: Annotated[
        Literal["measured", "mock", "roofline"],
        Meta(description="of times: --data, the mock engine's model, or an estimate from --model and --gpu alone"),
    ] = "measured"
    data: Annotated[
        tuple[str, ...], Meta(description="measured: folders of `penstock profile endpoint`, a configuration each")
    ] = ("profile",)
    model: Annotated[
        str,
        Meta(
            description="roofline: directory with a config.json, or the model of a recipe; measured: what workers "
            "load, instead of what the profile says"
        ),
    ] = ""
    gpu: Annotated[
        Literal["", "A100", "H100", "H200", "B200", "GB200", "L40S"],
        Meta(description="roofline: kind of GPU; also for --prices"),
    ] = ""
    max_gpus: Annotated[int, Meta(ge=1, le=64, description="roofline: GPUs of one worker, at most")] = 8
    stages: Annotated[int, Meta(ge=1, le=8, description="roofline: pipeline stages of dense models, at most")] = 2
    gpus_per_node: Annotated[
        int, Meta(ge=1, description="GPUs of one machine: for recipes of several nodes, and for commands by machine")
    ] = 8
    mock_speedups: Annotated[
        tuple[Annotated[float, Meta(gt=0)], ...], Meta(min_length=1, description="mock: --mock-speedup, one each")
    ] = (1.0,)
    ttft: Annotated[float, Meta(gt=0, description="longest time to the first token, ms, queueing included")] = 300.0
    itl: Annotated[float, Meta(gt=0, description="longest time per token after the first, ms")] = 25.0
    percentile: Annotated[
        Percentile,
        Meta(description="statistic that is limited; the mean comes from a queueing model, others from simulation"),
    ] = "mean"
    spread: Annotated[
        float,
        Meta(ge=0, le=2, description="of simulated lengths: sigma of their logarithm, as in 0.6; 0: all are alike"),
    ] = 0.0
    seed: Annotated[int, Meta(ge=0, description="of simulated arrivals and lengths")] = 0
    isl: Annotated[int, Meta(ge=1, description="tokens per prompt")] = 4000
    osl: Annotated[int, Meta(ge=1, description="tokens per answer")] = 500
    hit_rate: Annotated[float, Meta(ge=0, lt=1, description="share of prompt tokens that a cache has")] = 0.0
    rate: Annotated[float, Meta(ge=0, description="requests per second; 0: the most per GPU, whatever that is")] = 0.0
    total_gpus: Annotated[int, Meta(ge=1, le=1024, description="GPUs of the deployment, at most")] = 16
    utilization: Annotated[
        float, Meta(gt=0, le=1, description="share of its capacity that a worker uses, at most; the rest is for bursts")
    ] = 0.8
    prices: Annotated[str, Meta(description="YAML file of prices, as of `penstock bench pareto`")] = ""
    show: Annotated[int, Meta(ge=1, description="deployments to list")] = 8
    out: Annotated[
        str,
        Meta(
            description="folder for the suggestion, values of the Helm chart, profiles for `penstock plan`, recipes; "
            "roofline: and a plot of what other paces allow"
        ),
    ] = ""


def run(settings: SlaProfileSettings) -> int:
    """Print candidates and the best one; 1 if none meets the SLA or a file cannot be used, 2 for missing flags."""
    sla = Sla(ttft_ms=settings.ttft, itl_ms=settings.itl, isl=settings.isl, osl=settings.osl)
    scope = _scope(settings)
    try:
        prices = _prices(settings)
        choices = _choices(settings, sla)
        found = candidates(choices.configurations, sla, scope)
        if settings.source == "roofline":
            found, refused = _accepted(settings, sla, choices, found)
            choices.left_out.update(refused)
        if settings.percentile != "mean":
            load = _load(settings, sla)
            found = search(found, choices.configurations, load, settings.show, _tell)
        _print_found(settings, sla, choices, found, prices)
        if not found:
            return 1
        texts = _recipes(settings, sla, choices, found[0]) if settings.out and settings.source == "roofline" else {}
        values, helm = _values(settings, choices, found[0], texts) if settings.out else ("", [])
        commands = _commands(settings, choices, found[0], helm)
        _print_best(settings, sla, found[0], commands)
        files = _files(settings, sla, choices, found, commands, {"values.yaml": values} | texts)
        plot = _plot(settings, sla, choices) if settings.out and settings.source == "roofline" else ""
    except BadSettings as error:
        return fail("profile sla", error, status=2)
    except (BadProfile, BadPrices, UnknownShape) as error:
        return fail("profile sla", error)
    except BadArguments as error:
        return fail("profile sla", "; ".join(error.problems))
    for name, text in files.items() if settings.out else ():
        path = Path(settings.out) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if settings.out:
        print(f"\n{', '.join([*files, *([PLOT] if plot == PLOT else [])])} in {settings.out}")
        if plot not in ("", PLOT):
            print(f"left out: {PLOT} ({plot})")
    return 0


def _plot(settings: SlaProfileSettings, sla: Sla, choices: Choices) -> str:
    """Draw the best throughput per GPU at other paces than that of the SLA; the file's name, or why there is none."""
    points: dict[str, list[tuple[float, float]]] = {}
    for factor in _PACES:
        paced = msgspec.structs.replace(sla, itl_ms=sla.itl_ms * factor)
        for each in candidates(choices.configurations, paced, msgspec.structs.replace(_scope(settings), rate=0.0)):
            kind = "aggregated" if len(each.pools) == 1 else "prefill and decode apart"
            points.setdefault(kind, []).append((1e3 / each.itl_ms, each.per_gpu * sla.osl))
    try:
        title = f"{settings.model} on {settings.gpu}, estimated"
        draw_estimates(points, title, 1e3 / sla.itl_ms, Path(settings.out) / PLOT)
    except PlotsMissing as error:
        return str(error)
    return PLOT


def _tell(what: str) -> None:
    print(f"simulating {what} …", file=sys.stderr, flush=True)


def _choices(settings: SlaProfileSettings, sla: Sla) -> Choices:
    if settings.source == "measured":
        return measured(settings.data, sla)
    if settings.source == "mock":
        return mock(settings.mock_speedups, sla)
    if not settings.model or not settings.gpu:
        raise BadSettings("--source roofline needs --model and --gpu")
    shape = shape_at(settings.model)
    return roofline(shape, settings.gpu, sla, most_gpus=settings.max_gpus, stages=settings.stages)


def _accepted(
    settings: SlaProfileSettings, sla: Sla, choices: Choices, found: Sequence[SizedDeployment]
) -> tuple[list[SizedDeployment], dict[str, str]]:
    """Deployments whose recipes the rules of engine arguments accept, and why the others before them are refused."""
    kept: list[SizedDeployment] = []
    refused: dict[str, list[str]] = {}
    for number, each in enumerate(found):
        if len(kept) >= settings.show and any(len(one.pools) == 1 for one in kept):
            return [*kept, *found[number:]], _by_reason(refused)
        try:
            _recipes(settings, sla, choices, each)
            kept.append(each)
        except BadArguments as error:
            refused.setdefault("; ".join(error.problems), []).append(each.name)
    return kept, _by_reason(refused)


def _by_reason(refused: dict[str, list[str]]) -> dict[str, str]:
    return {
        names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""): reason
        for reason, names in refused.items()
    }


def _load(settings: SlaProfileSettings, sla: Sla) -> SimulatedLoad:
    return SimulatedLoad(
        sla=sla,
        scope=_scope(settings),
        percentile=settings.percentile,
        sigma=settings.spread,
        seed=settings.seed,
    )


def _scope(settings: SlaProfileSettings) -> Scope:
    return Scope(
        total_gpus=settings.total_gpus,
        rate=settings.rate,
        utilization=settings.utilization,
        hit_rate=settings.hit_rate,
    )


def _longest(settings: SlaProfileSettings, sla: Sla, choices: Choices, candidate: SizedDeployment) -> int:
    """Tokens of the longest request that is to be served: of those that are simulated, or that the model takes."""
    length = sla.isl + sla.osl
    if settings.spread:
        length = max(length, longest(candidate.requests_per_s, _load(settings, sla)))
    limits = [each.shape.max_len for each in choices.engines.values() if each.shape.max_len]
    return min([length, *limits])


def _recipes(settings: SlaProfileSettings, sla: Sla, choices: Choices, candidate: SizedDeployment) -> dict[str, str]:
    return answer.recipes(
        candidate,
        choices.engines,
        sla,
        model=settings.model,
        gpu=settings.gpu,
        name=_name(settings),
        per_node=settings.gpus_per_node,
        longest=_longest(settings, sla, choices, candidate),
    )


def _prices(settings: SlaProfileSettings) -> Prices | None:
    if not settings.prices:
        return None
    try:
        prices = read_prices(Path(settings.prices).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise BadPrices(f"{settings.prices}: {error}") from None
    gpu_of(prices, settings.gpu)
    return prices


def _print_found(
    settings: SlaProfileSettings, sla: Sla, choices: Choices, found: Sequence[SizedDeployment], prices: Prices | None
) -> None:
    console = stdout()
    if found:
        shown = list(found[: settings.show])
        # Both kinds are to be seen, so that it is clear what splitting brings.
        for pools in {1, 2} - {len(each.pools) for each in shown}:
            shown += [each for each in found if len(each.pools) == pools][:1]
        limited = settings.percentile
        width, rate, gpu = console.width, settings.rate, settings.gpu
        console.print(table(shown, sla, width, limited=limited, rate=rate, gpu=gpu, prices=prices))
        more = len(found) - len(shown)
        if more > 0:
            print(f"and {more} more (--show)")
    for name, reason in choices.left_out.items():
        print(f"left out: {name} ({reason})")
    if not found:
        wanted = f"{settings.rate:g} requests/s with " if settings.rate else ""
        reason = f"no deployment serves {wanted}at most {settings.total_gpus} GPUs (--total-gpus) within the SLA"
        fail("profile sla", reason)


def _print_best(settings: SlaProfileSettings, sla: Sla, best: SizedDeployment, commands: Sequence[str]) -> None:
    basis = _BASES[settings.source].format(gpu=settings.gpu)
    about = lines(best, sla, basis, settings.utilization, settings.percentile)
    print("", *about, *(f"  {each}" for each in commands), sep="\n")


def _commands(
    settings: SlaProfileSettings, choices: Choices, best: SizedDeployment, helm: Sequence[str]
) -> tuple[str, ...]:
    """The lines for a shell that start it.

    Args:
        helm: those for the chart's values; none without ``--out``.
    """
    flags = {pool.role: _flags(settings, choices, pool) for pool in best.pools}
    files = [answer.file_of(pool, _name(settings)) for pool in best.pools] if settings.source == "roofline" else []
    notes = [f"# --out {_folder(settings)} writes {' and '.join(files)}"] if files and not settings.out else []
    if best.gpus <= settings.gpus_per_node:
        return (*notes, *answer.commands(best, flags))
    wide = [pool for pool in best.pools if pool.gpus > pool.workers * settings.gpus_per_node]
    if wide:
        notes.append(f"# a worker of {wide[0].configuration} spans machines of {settings.gpus_per_node} GPUs")
    else:
        notes += _by_host(settings, best, flags, files)
    if not helm:
        return (*notes, "# on Kubernetes: --out FOLDER writes the chart's values, and prints the commands")
    return (*notes, "# on Kubernetes:", *helm)


def _by_host(
    settings: SlaProfileSettings, best: SizedDeployment, flags: dict[Role, answer.Flags], files: Sequence[str]
) -> list[str]:
    """Of a deployment that is larger than a machine."""
    machines = answer.hosts(best, settings.gpus_per_node)
    count = sum(number for number, _ in machines)
    lines = [
        f"# {count} machines of {settings.gpus_per_node} GPUs (--gpus-per-node), each with a gateway and a router; "
        "docs/several-machines.md makes a broker that all reach, and operator.env",
        *([f"# each needs {' and '.join(files)} in {_folder(settings)}"] if files else []),
        "# copy ca.crt and operator.env, which has the operator's password, to /etc/penstock of each, for root only,",
        "# and write PENSTOCK_NATS_CA=/etc/penstock/ca.crt there. Units, as on that page, need a role's password only",
        "# on each, first:",
        "set -a; . /etc/penstock/operator.env; set +a",
    ]
    common = "--http-host 0.0.0.0 --require-keys"  # the broker is that of PENSTOCK_NATS_URL, in operator.env
    for number, workers in machines:
        lines.append(f"# on {counted(number, 'machine')}:")
        lines += answer.machine(workers, best, flags, common)
    lines.append("# once, on any: gateways refuse everyone until there is a key")
    lines.append("penstock keys create")
    return lines


def _folder(settings: SlaProfileSettings) -> str:
    return settings.out or "."


def _flags(settings: SlaProfileSettings, choices: Choices, pool: PoolSize) -> answer.Flags:
    """Flags of `penstock up` for a pool's workers, model and engine among them."""
    if settings.source == "roofline":
        file = answer.engine_file(pool, _name(settings), _folder(settings))
        return answer.Flags(f"--engine trtllm --model {shlex.quote(settings.model)}", file)
    given = choices.up[pool.configuration]
    words = {word.partition("=")[0] for word in shlex.split(given)}
    if "--engine" not in words and "--recipe" not in words:
        given = f"--engine native {given}".strip()
    if model := "" if words & {"--model", "--recipe"} else _model(settings, choices, pool.configuration):
        given = f"{given} --model {shlex.quote(model)}"
    return answer.Flags(given)


def _model(settings: SlaProfileSettings, choices: Choices, configuration: str) -> str:
    """What workers load; "": what `penstock up` serves by itself."""
    up = shlex.split(choices.up[configuration])
    named = [word for flag, word in itertools.pairwise(up) if flag == "--model"]
    named += [word.partition("=")[2] for word in up if word.startswith("--model=")]
    if settings.source != "measured" or named or settings.model:
        return (named or [settings.model])[0]
    model = next(each for each in choices.configurations if each.name == configuration).timing.profile.setup.model
    return "" if model in (DEMO.name, TINY.name) else model


def _name(settings: SlaProfileSettings) -> str:
    return _SLUG.sub("-", Path(settings.model).name.lower()).strip("-") or "model"


def _files(
    settings: SlaProfileSettings,
    sla: Sla,
    choices: Choices,
    found: Sequence[SizedDeployment],
    commands: Sequence[str],
    texts: dict[str, str],
) -> dict[str, str]:
    """The suggestion, other texts, and the profiles of its pools, by file name."""
    best = found[0]
    profiles = {
        file_of(each.name): msgspec.json.format(msgspec.json.encode(each.timing.profile)).decode()
        for each in choices.configurations
        if settings.source != "measured" and each.name in {pool.configuration for pool in best.pools}
    }
    suggestion: dict[str, Any] = {
        "sla": msgspec.to_builtins(sla),
        "source": settings.source,
        "gpu": settings.gpu,
        "percentile": settings.percentile,
        "spread": settings.spread,
        "rate": settings.rate,
        "longest_request": _longest(settings, sla, choices, best),
        "best": msgspec.to_builtins(best),
        "commands": list(commands),
        "others": [msgspec.to_builtins(each) for each in found[1 : settings.show]],
        "left_out": choices.left_out,
    }
    return {SUGGESTION: yaml.safe_dump(suggestion, sort_keys=False, allow_unicode=True)} | texts | profiles


def _values(
    settings: SlaProfileSettings, choices: Choices, best: SizedDeployment, texts: dict[str, str]
) -> tuple[str, list[str]]:
    """For the Helm chart, and the lines that use them."""
    engine: Engine = {"mock": "mock", "roofline": "trtllm"}.get(settings.source, "native")  # type: ignore[assignment]
    configuration = best.pools[0].configuration
    flags = choices.up[configuration].split()
    if settings.source == "measured" and "--engine" in flags[:-1]:
        engine = msgspec.convert(flags[flags.index("--engine") + 1], Engine)
    return answer.helm_values(
        best,
        engine=engine,
        model=_model(settings, choices, configuration),
        texts=texts,
        name=_name(settings),
        flags=choices.up,
        file=f"{_folder(settings)}/values.yaml",
    )
