"""The output for a candidate: recipes, a command, and values of the Helm chart. Pure."""

import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.configs.flags import BadFlags, flag_name, read
from penstock.configs.settings import WorkerSettings
from penstock.configs.up_settings import UpSettings
from penstock.deploy.kubernetes import KubernetesSpec, helm_commands, to_yaml, values_of
from penstock.deploy.values import SETTLED, Engine
from penstock.infra.engine_args.memory_estimate import GIB
from penstock.infra.engine_args.rules.rule import EngineRole
from penstock.infra.engine_args.tree import BadArguments
from penstock.launch.groups import EXTERNAL
from penstock.launch.plan import passed
from penstock.launch.recipes.catalogue import GPUS, RecipeEntry, entry_of
from penstock.launch.recipes.generate import EngineSpec, texts_of
from penstock.measure.profile.roofline import RooflineEngine
from penstock.measure.search.candidates import PoolSize, SizedDeployment, Sla
from penstock.schemas.plans import Role

ENGINE_IMAGE = "registry.example.com/penstock-{engine}:0.1.0"  # as the chart's own image: a name to be replaced
_SUFFIXES = {"aggregated": "agg", "prefill": "prefill", "decode": "decode"}
FLAGS = {"aggregated": "workers", "prefill": "prefill", "decode": "decode"}
_FILES = {
    "aggregated": "--extra-engine-args",
    "prefill": "--prefill-engine-args",
    "decode": "--decode-engine-args",
}


def recipes(
    candidate: SizedDeployment,
    engines: Mapping[str, RooflineEngine],
    sla: Sla,
    *,
    model: str,
    gpu: str,
    name: str,
    per_node: int,
    longest: int = 0,
) -> dict[str, str]:
    """The texts of TensorRT-LLM's engine arguments by file name, as the linter of recipes accepts them.

    Args:
        longest: tokens of the longest request; 0: all are as long as ``sla`` says.
    Raises:
        BadArguments: the rules refuse an engine that was chosen; the problems say why.
    """
    memory, blackwell = GPUS[gpu]
    specs: dict[EngineRole, EngineSpec] = {}
    shape = next(iter(engines.values())).shape
    for pool in candidate.pools:
        mapping = engines[pool.configuration].mapping
        specs[pool.role] = EngineSpec(
            role=pool.role,
            gpus=mapping.gpus,
            gpu_bytes=int(memory * GIB),
            blackwell=blackwell,
            isl=sla.isl,
            osl=sla.osl,
            longest=longest,
            concurrency=max(1, pool.concurrency),
            gpus_per_node=per_node,
            stages=mapping.pp,
            attention_dp=mapping.attention_dp if mapping.tp > 1 else None,
        )
    texts = texts_of(shape, specs, model=model, name=name, gpu=gpu)
    return {f"{each}.yaml": text for each, (text, _) in texts.items()}


def file_of(pool: PoolSize, name: str) -> str:
    """The file name of a pool's recipe."""
    return f"{name}-{_SUFFIXES[pool.role]}.yaml"


# The URL of the broker that a `penstock up` in this folder has started.
_OWN_URL = """$(python3 -c 'import json; print(json.load(open(".penstock/state.json"))["nats_url"])')"""


class Flags(NamedTuple):
    """Flags of `penstock up` for the workers of a pool; ``file`` names its engine arguments, or is empty."""

    engine: str
    file: str = ""


def commands(candidate: SizedDeployment, flags: Mapping[Role, Flags]) -> tuple[str, ...]:
    """The lines for a shell that start it on one machine with a broker of its own."""
    return machine({pool.role: pool.workers for pool in candidate.pools}, candidate, flags, "", _OWN_URL)


def machine(
    workers: Mapping[Role, int], candidate: SizedDeployment, flags: Mapping[Role, Flags], common: str, url: str = ""
) -> tuple[str, ...]:
    """The lines for one machine: a `penstock up`, and a `penstock worker` for each worker where pools differ.

    Args:
        workers: of the machine, by role.
        common: further flags of `penstock up`.
        url: of the broker, for workers beside `penstock up`; "": the shell has it.
    """
    engines = list(dict.fromkeys(flags[role].engine for role in workers))
    if len(engines) == 1:
        counts = [f"--{FLAGS[role]} {number}" for role, number in workers.items()]
        return (_joined("penstock up", common, engines[0], *counts, *(flags[role].file for role in workers)),)
    lines = [
        _joined("penstock up", common, engines[0], "--workers 0"),
        "# then, in a second shell, its workers, whose flags differ:",
        *([f'export PENSTOCK_NATS_URL="{url}"'] if url else []),
    ]
    each = {pool.role: pool.gpus // pool.workers for pool in candidate.pools}
    first = 0
    for role, number in workers.items():
        for _ in range(number):
            gpus = ",".join(str(gpu) for gpu in range(first, first + each[role]))
            first += each[role]
            worker = f"penstock worker --role {role} {flags[role].engine}"
            lines.append(f"CUDA_VISIBLE_DEVICES={gpus} {worker} &")
    return tuple(lines)


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def engine_file(pool: PoolSize, name: str, folder: str) -> str:
    """The flag of `penstock up` for a pool's recipe in a folder."""
    return f"{_FILES[pool.role]} {shlex.quote(f'{folder}/{file_of(pool, name)}')}"


def hosts(candidate: SizedDeployment, per_host: int) -> list[tuple[int, dict[Role, int]]]:
    """How many machines have which workers, by role: each role fills machines, and what is left over shares them.

    Args:
        per_host: GPUs of a machine; no worker has more.
    """
    found: list[tuple[int, dict[Role, int]]] = []
    rest: list[tuple[Role, int]] = []  # role and GPUs of each worker that fills no machine with its like
    for pool in candidate.pools:
        gpus = pool.gpus // pool.workers
        whole, left = divmod(pool.workers, per_host // gpus)
        if whole:
            found.append((whole, {pool.role: per_host // gpus}))
        rest += [(pool.role, gpus)] * left
    machines: list[tuple[int, dict[Role, int]]] = []  # free GPUs, and workers
    for role, gpus in sorted(rest, key=lambda each: -each[1]):
        at = next((at for at, (free, _) in enumerate(machines) if free >= gpus), None)
        if at is None:
            machines.append((per_host, {}))
            at = len(machines) - 1
        free, workers = machines[at]
        machines[at] = free - gpus, workers | {role: workers.get(role, 0) + 1}
    return found + [(1, workers) for _, workers in machines]


def helm_values(
    candidate: SizedDeployment,
    *,
    engine: Engine,
    model: str,
    texts: Mapping[str, str],
    name: str,
    flags: Mapping[str, str],
    file: str,
) -> tuple[str, list[str]]:
    """Values of the Helm chart, as `penstock kubernetes render` makes them of a recipe, and the lines that use them.

    Args:
        texts: of engine arguments by file name; none of engines without such files.
        flags: of `penstock up`, by configuration.
        file: of the values, as the lines name it.

    Raises:
        BadArguments: `penstock up` does not take the flags.
    """
    counts: dict[str, int] = {pool.role: pool.workers for pool in candidate.pools}
    image = ENGINE_IMAGE.format(engine=engine) if engine in EXTERNAL else ""
    wanted = KubernetesSpec(counts=counts, engine=engine, model=model, engine_image=image)
    members: dict[str, RecipeEntry] = {}
    own: dict[str, str] = {}
    for pool in candidate.pools:
        recipe = file_of(pool, name)
        if (text := texts.get(recipe)) and (entry := entry_of(recipe.removesuffix(".yaml"), recipe, text)):
            members[pool.role], own[pool.role] = entry, text
    values = values_of(wanted, members, own)
    for pool in candidate.pools:
        if settings := worker_settings(flags.get(pool.configuration, "")):
            values["workers"][pool.role].setdefault("settings", {}).update(settings)
    lines = helm_commands(wanted, values, shlex.quote(file))
    if image:
        lines.insert(0, f"# engineImage in {file} is a name to replace: see docs/containers.md")
    return to_yaml(wanted, values), lines


def worker_settings(flags: str) -> dict[str, Any]:
    """What flags of `penstock up` mean for a worker, by flag without its dashes.

    Raises:
        BadArguments: `penstock up` does not take them.
    """
    try:
        given = passed(read(UpSettings, shlex.split(flags)), WorkerSettings)
    except (BadFlags, ValueError) as error:
        raise BadArguments([f"--up {flags!r} of the profile: {error}"]) from None
    usual = passed(UpSettings(), WorkerSettings)
    return {
        flag_name(name).removeprefix("--"): value
        for name, value in given.items()
        if value != usual[name] and name not in SETTLED
    }
