"""``penstock profile sla``: the deployment that serves most per GPU within given latencies, and how to start it."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from infra.bench.pareto.cost import BadPrices, Prices, gpu_of
from infra.bench.pareto.cost import read as read_prices
from infra.bench.profile.data import FILE, BadProfile
from infra.bench.profile.search import answer, sources
from infra.bench.profile.search.candidates import Candidate, Scope, Sla, candidates
from infra.bench.profile.search.show import lines, table
from infra.bench.profile.search.simulated import Load, Percentile, search
from infra.bench.profile.search.sources import Choices
from infra.counts import counted
from infra.deploy.helm.values import Engine
from infra.engine_args.model_shape import UnknownShape
from infra.engine_args.tree import BadArguments
from infra.recipes.model_shape import shape_at
from infra.terminal import stdout

_BASES = {
    "measured": "from measured profiles",
    "mock": "by the mock engine's timing model",
    "roofline": "estimated for {gpu}, not measured",
}
_SLUG = re.compile(r"[^a-z0-9]+")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``penstock profile sla``."""

    source: Annotated[
        Literal["measured", "mock", "roofline"],
        Meta(description="of times: --data, the mock engine's model, or an estimate from --model and --gpu alone"),
    ] = "measured"
    data: Annotated[
        tuple[str, ...], Meta(description="measured: folders of `penstock profile endpoint`, a configuration each")
    ] = ("profile",)
    model: Annotated[
        str, Meta(description="roofline: directory with a config.json, or the model of a recipe; else its name")
    ] = ""
    gpu: Annotated[
        Literal["", "A100", "H100", "H200", "B200", "L40S"],
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
    itl: Annotated[float, Meta(gt=0, description="longest time per token behind it, ms")] = 25.0
    percentile: Annotated[
        Percentile,
        Meta(description="which time of all requests is limited; the mean by a queueing model, others by simulation"),
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
        Meta(description="folder for the suggestion, values of the Helm chart, profiles for `penstock plan`, recipes"),
    ] = ""


class BadSettings(ValueError):
    """Flags that are missing."""


def run(settings: Settings) -> int:
    """Print candidates and the best one; 1 if none meets the SLA or a file cannot be used, 2 for missing flags."""
    sla = Sla(ttft_ms=settings.ttft, itl_ms=settings.itl, isl=settings.isl, osl=settings.osl)
    scope = Scope(
        total_gpus=settings.total_gpus,
        rate=settings.rate,
        utilization=settings.utilization,
        hit_rate=settings.hit_rate,
    )
    try:
        prices = _prices(settings)
        choices = _choices(settings, sla)
        found = candidates(choices.configurations, sla, scope)
        if settings.source == "roofline":
            found, refused = _accepted(settings, sla, choices, found)
            choices.left_out.update(refused)
        if settings.percentile != "mean":
            load = Load(sla=sla, scope=scope, percentile=settings.percentile, sigma=settings.spread, seed=settings.seed)
            found = search(found, choices.configurations, load, settings.show, _tell)
        _print(settings, sla, choices, found, prices)
        if not found:
            return 1
        files = _files(settings, sla, choices, found)
    except BadSettings as error:
        return _explain(error, 2)
    except (BadProfile, BadPrices, UnknownShape) as error:
        return _explain(error, 1)
    except BadArguments as error:
        return _explain("; ".join(error.problems), 1)
    for name, text in files.items():
        path = Path(settings.out) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    if files:
        print(f"\n{', '.join(files)} in {settings.out}")
    return 0


def _tell(what: str) -> None:
    print(f"simulating {what} …", file=sys.stderr, flush=True)


def _explain(error: object, status: int) -> int:
    print(f"penstock profile sla: {error}", file=sys.stderr)
    return status


def _choices(settings: Settings, sla: Sla) -> Choices:
    if settings.source == "measured":
        return sources.measured(settings.data, sla)
    if settings.source == "mock":
        return sources.mock(settings.mock_speedups, sla)
    if not settings.model or not settings.gpu:
        raise BadSettings("--source roofline needs --model and --gpu")
    shape = shape_at(settings.model)
    return sources.roofline(shape, settings.gpu, sla, most_gpus=settings.max_gpus, stages=settings.stages)


def _accepted(
    settings: Settings, sla: Sla, choices: Choices, found: Sequence[Candidate]
) -> tuple[list[Candidate], dict[str, str]]:
    """Deployments whose recipes the rules of engine arguments accept, and why the others before them are refused."""
    kept: list[Candidate] = []
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


def _recipes(settings: Settings, sla: Sla, choices: Choices, candidate: Candidate) -> dict[str, str]:
    return answer.recipes(
        candidate,
        choices.engines,
        sla,
        model=settings.model,
        gpu=settings.gpu,
        name=_name(settings),
        per_node=settings.gpus_per_node,
    )


def _prices(settings: Settings) -> Prices | None:
    if not settings.prices:
        return None
    try:
        prices = read_prices(Path(settings.prices).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise BadPrices(f"{settings.prices}: {error}") from None
    gpu_of(prices, settings.gpu)
    return prices


def _print(settings: Settings, sla: Sla, choices: Choices, found: Sequence[Candidate], prices: Prices | None) -> None:
    console = stdout()
    if found:
        shown = list(found[: settings.show])
        # Both kinds are to be seen, so that it is clear what splitting brings.
        for pools in {1, 2} - {len(each.pools) for each in shown}:
            shown += [each for each in found if len(each.pools) == pools][:1]
        limited = settings.percentile
        console.print(table(shown, sla, limited=limited, rate=settings.rate, gpu=settings.gpu, prices=prices))
        more = len(found) - len(shown)
        if more > 0:
            print(f"and {more} more (--show)")
    for name, reason in choices.left_out.items():
        print(f"left out: {name} ({reason})")
    if not found:
        wanted = f"{settings.rate:g} requests/s with " if settings.rate else ""
        reason = f"no deployment serves {wanted}at most {settings.total_gpus} GPUs (--total-gpus) within the SLA"
        _explain(reason, 1)
        return
    basis = _BASES[settings.source].format(gpu=settings.gpu)
    commands = [f"  {each}" for each in _commands(settings, choices, found[0])]
    about = lines(found[0], sla, basis, settings.utilization, settings.percentile)
    print("", *about, *commands, sep="\n")


def _commands(settings: Settings, choices: Choices, best: Candidate) -> tuple[str, ...]:
    if best.gpus > settings.gpus_per_node:
        return _by_host(settings, choices, best)
    if settings.source == "roofline":
        return (answer.trtllm_command(best, settings.model, _name(settings), settings.out or "."),)
    return answer.commands(best, choices.up)


def _by_host(settings: Settings, choices: Choices, best: Candidate) -> tuple[str, ...]:
    """Of a deployment that is larger than a machine."""
    folder = settings.out or "."
    values = f"helm upgrade --install llm ./penstock-chart -f {shlex.quote(f'{folder}/values.yaml')}"
    kubernetes = (f"# on Kubernetes, with the values of --out: {values}",)
    wide = [pool for pool in best.pools if pool.gpus > pool.workers * settings.gpus_per_node]
    if wide:
        return (f"# a worker of {wide[0].configuration} spans machines of {settings.gpus_per_node} GPUs", *kubernetes)
    engine = f"--engine trtllm --model {shlex.quote(settings.model)} " if settings.source == "roofline" else ""
    files: dict[str, str] = {
        pool.role: f" {answer.engine_file(pool, _name(settings), folder)}" if settings.source == "roofline" else ""
        for pool in best.pools
    }
    flags: dict[str, str] = {pool.role: choices.up[pool.configuration] + files[pool.role] for pool in best.pools}
    machines = answer.hosts(best, settings.gpus_per_node)
    count = sum(number for number, _ in machines)
    lines = [
        f"# {count} machines of {settings.gpus_per_node} GPUs (--gpus-per-node) and a broker that all reach, see "
        "docs/operations.md; URL: the operator's; each machine has a gateway and a router, too"
    ]
    for number, counts in machines:
        own = " ".join(f"--{answer.FLAGS[role]} {workers}" for role, workers in counts.items())
        given = " ".join(dict.fromkeys(flags[role].strip() for role in counts))
        lines.append(f"# on {counted(number, 'machine')}:")
        lines.append(f"penstock up --nats-url URL {engine}{own} {given}".rstrip())
    return (*lines, *kubernetes)


def _name(settings: Settings) -> str:
    return _SLUG.sub("-", Path(settings.model).name.lower()).strip("-") or "model"


def _files(settings: Settings, sla: Sla, choices: Choices, found: Sequence[Candidate]) -> dict[str, str]:
    """The texts to write, by file name; none without ``--out``.

    Raises:
        BadArguments: the rules of engine arguments refuse the best one.
    """
    if not settings.out:
        return {}
    best = found[0]
    texts: dict[str, str] = {}
    if settings.source == "roofline":
        texts = _recipes(settings, sla, choices, best)
    profiles = {
        f"{_SLUG.sub('-', each.name)}/{FILE}": msgspec.json.format(msgspec.json.encode(each.timing.profile)).decode()
        for each in choices.configurations
        if settings.source != "measured" and each.name in {pool.configuration for pool in best.pools}
    }
    told: dict[str, Any] = {
        "sla": msgspec.to_builtins(sla),
        "source": settings.source,
        "best": msgspec.to_builtins(best),
        "commands": list(_commands(settings, choices, best)),
        "others": [msgspec.to_builtins(each) for each in found[1 : settings.show]],
        "left_out": choices.left_out,
    }
    return {
        "suggestion.yaml": yaml.safe_dump(told, sort_keys=False, allow_unicode=True),
        "values.yaml": _values(settings, choices, best, texts),
        **texts,
        **profiles,
    }


def _values(settings: Settings, choices: Choices, best: Candidate, texts: dict[str, str]) -> str:
    """For the Helm chart."""
    engine: Engine = {"mock": "mock", "roofline": "trtllm"}.get(settings.source, "native")  # type: ignore[assignment]
    flags = choices.up[best.pools[0].configuration].split()
    if settings.source == "measured" and "--engine" in flags[:-1]:
        engine = msgspec.convert(flags[flags.index("--engine") + 1], Engine)
    return answer.helm_values(
        best, engine=engine, model=settings.model, texts=texts, name=_name(settings), flags=choices.up
    )
