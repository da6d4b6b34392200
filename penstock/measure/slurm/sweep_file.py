"""The sweep file of ``penstock slurm``: which deployments are measured, under which load and on which nodes. Pure."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.infra.engine_args.tree import BadArguments, Tree, parse_yaml
from penstock.launch.groups import PlanError
from penstock.launch.plan import check_workers, workers_by_role
from penstock.measure.pareto.records import MeasuredDeployment
from penstock.measure.sweep.endpoints import NAME, RESERVED

Count = Annotated[int, Meta(ge=0)]
Role = Literal["aggregated", "prefill", "decode", "encode"]
Flags = dict[str, str | int | float | bool | list[str | int | float]]
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_LINE = re.compile(r"[^\n\r\0]*")
_GPUS = re.compile(r"(\d+)gpus?", re.ASCII)


class BadSweep(ValueError):
    """A sweep file that cannot be used; the text names the key or the point."""


class _Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """Keys are written with dashes."""


class SlurmKey(_Part, frozen=True, kw_only=True):
    """The key ``slurm``.

    Attributes:
        tasks_per_node: engines' GPUs of a node, a task each.
        gres: what a GPU is called, such as "gpu" or "gpu:h100"; "": none is asked for.
        options: further options of sbatch.
        setup: lines of shell before anything else, such as `module load`.
        order: all at once, one after the other, or as arrays of jobs with equal nodes.
        at_once: jobs of an array that run at the same time; 0: all.
        bind: numa: processor cores and memory beside a worker's first GPU, by numactl.
        ready_s: until all workers are there.
        local_folder: on the head node, for the broker's store; never a network file system.
    """

    partition: str = ""
    account: str = ""
    job_name: str = "penstock"
    time: str = "04:00:00"
    tasks_per_node: Annotated[int, Meta(ge=1, le=1024)] = 4
    gres: str = "gpu"
    exclusive: bool = True
    options: tuple[str, ...] = ()
    setup: str = ""
    order: Literal["jobs", "chain", "array"] = "jobs"
    at_once: Count = 0
    bind: Literal["none", "numa"] = "none"
    ready_s: Annotated[float, Meta(gt=0)] = 1300.0
    local_folder: str = "/tmp"


class Container(_Part, frozen=True, kw_only=True):
    """The key ``container``. ``mounts`` are HOST:CONTAINER; the results and the local folder are always mounted."""

    image: str
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    mounts: tuple[str, ...] = ()


class SweepPoint(_Part, frozen=True, kw_only=True):
    """One deployment.

    Attributes:
        name: "": made of its sizes.
        tp: GPUs of an engine, also of prefill engines unless ``prefill_tp`` says otherwise.
        attention_dp: true: attention data parallelism (DEP), false: none (TEP); none: as the engine's arguments say.
        batch, tokens: sequences and tokens per step; 0: as the engine's arguments say.
        slots: expert slots of MoE load balancing; 0: none.
        mtp: tokens per step drafted by the model's own MTP layer.
        cells: each has a broker, a router and a part of the workers of each role.
        concurrency: () takes that of ``load``.
        worker: flags of `penstock worker`, over those for all points.
        engine_args: files of engine arguments, over which the sizes above are laid.
    """

    name: str = ""
    workers: Count = 0
    prefill: Count = 0
    decode: Count = 0
    encode: Count = 0
    tp: Annotated[int, Meta(ge=1)] = 1
    prefill_tp: Count = 0
    attention_dp: bool | None = None
    batch: Count = 0
    tokens: Count = 0
    memory_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.0
    slots: Count = 0
    mtp: Count = 0
    cells: Annotated[int, Meta(ge=1, le=16)] = 1
    concurrency: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    worker: Flags = {}
    engine_args: str = ""
    prefill_engine_args: str = ""
    decode_engine_args: str = ""

    @property
    def roles(self) -> dict[Role, int]:
        """Number of workers of each role that has any."""
        counts: dict[Role, int] = {
            "aggregated": self.workers, "prefill": self.prefill, "decode": self.decode, "encode": self.encode,
        }  # fmt: skip
        return {role: count for role, count in counts.items() if count}

    def gpus_of(self, role: Role) -> int:
        """GPUs, and tasks, of one worker."""
        return 1 if role == "encode" else (self.prefill_tp or self.tp) if role == "prefill" else self.tp

    @property
    def gpus(self) -> int:
        return sum(count * self.gpus_of(role) for role, count in self.roles.items())

    @property
    def kind(self) -> str:
        split = "disaggregated" if self.prefill else "aggregated"
        return f"{split}, MTP {self.mtp}" if self.mtp else split

    @property
    def mapping(self) -> str:
        """How a decoding engine uses its GPUs."""
        return {True: "dep", False: "tep", None: "tp"}[self.attention_dp]


class SweepFile(_Part, frozen=True, kw_only=True):
    """
    Attributes:
        gpu: type of the GPUs, as recipes and price files call it.
        penstock: the command.
        load: flags of `penstock bench sweep`.
        worker: flags of `penstock worker`.
        otlp_endpoint: OTLP URL for traces of all requests; "": none. The variable OTLP_ENDPOINT wins.
        environment: variables of all processes.
        out: folder of the results; all nodes see it.
    """

    points: tuple[SweepPoint, ...]
    model: str = ""
    served_model_name: str = ""
    engine: Literal["native", "mock", "trtllm", "vllm"] = "trtllm"
    gpu: str = ""
    penstock: str = "penstock"
    out: str = "bench-results"
    load: Flags = {}
    worker: Flags = {}
    router: Flags = {}
    slurm: SlurmKey = SlurmKey()
    container: Container | None = None
    environment: dict[str, str] = {}
    otlp_endpoint: str = ""


def parse(text: str) -> SweepFile:
    """
    Raises:
        BadSweep: the text names the key.
    """
    try:
        sweep = msgspec.convert(parse_yaml(text), SweepFile)
    except (msgspec.ValidationError, BadArguments) as error:
        raise BadSweep(str(error)) from None
    named = tuple(msgspec.structs.replace(each, name=each.name or name_of(each)) for each in sweep.points)
    sweep = msgspec.structs.replace(sweep, points=named)
    problems = [*_wrong_cluster(sweep), *_wrong_points(named)]
    if problems:
        raise BadSweep("; ".join(problems))
    return sweep


def _wrong_cluster(sweep: SweepFile) -> list[str]:
    cluster, problems = sweep.slurm, []
    if not _TIME.fullmatch(cluster.time):
        problems.append(f"slurm.time: {cluster.time!r} is not a time of Slurm, such as 04:00:00")
    lines = {"partition": (cluster.partition,), "account": (cluster.account,), "job-name": (cluster.job_name,)}
    if not _LINE.fullmatch(sweep.out):
        problems.append("out: one line is expected")
    problems += [
        f"environment: {key!r} is not a variable name" for key in sweep.environment if not _VARIABLE.fullmatch(key)
    ]
    for key, values in (lines | {"gres": (cluster.gres,), "options": cluster.options}).items():
        problems += [f"slurm.{key}: one line is expected" for each in values if not _LINE.fullmatch(each)]
    if any(not each.startswith("--") for each in cluster.options):
        problems.append("slurm.options: write each as --NAME=VALUE")
    if not cluster.local_folder.startswith("/"):
        problems.append("slurm.local-folder: expected an absolute path")
    if not sweep.points:
        problems.append("points: none is given")
    return problems


def _wrong_points(points: Sequence[SweepPoint]) -> list[str]:
    problems = []
    for each in points:
        if not NAME.fullmatch(each.name) or each.name in (*RESERVED, "slurm"):
            problems.append(f"point {each.name!r}: a name has letters, digits, '_' and '-'; plots and slurm are taken")
        if bool(each.prefill) != bool(each.decode):
            problems.append(f"point {each.name}: give prefill together with decode, or workers")
        elif not each.workers and not each.decode:
            problems.append(f"point {each.name}: no worker generates; give workers, or prefill and decode")
        try:
            check_workers(each.cells, workers_by_role(each.roles.items()))
        except PlanError as error:
            problems.append(f"point {each.name}: {str(error).removeprefix('--')}")
    names = [each.name for each in points]
    problems += [f"point {name}: given twice; name them" for name in sorted({n for n in names if names.count(n) > 1})]
    return problems


def name_of(point: SweepPoint) -> str:
    """A name that tells the point, such as ``prefill1_decode3_dep4_batch128_eplb0_mtp0``."""
    short = {"aggregated": "agg"}
    workers = [f"{short.get(role, role)}{count}" for role, count in point.roles.items()]
    prefill = [f"prefilltp{point.prefill_tp}"] if point.prefill_tp not in (0, point.tp) else []
    sizes = [f"{point.mapping}{point.tp}", f"batch{point.batch}", f"eplb{point.slots}", f"mtp{point.mtp}"]
    cells = [f"cells{point.cells}"] if point.cells > 1 else []
    return "_".join([*workers, *prefill, *sizes, *cells])


def deployment_of(sweep: SweepFile, point: SweepPoint) -> MeasuredDeployment:
    """What ``deployment.json`` beside the point's results says, for `penstock bench pareto`."""
    settings: dict[str, str | int | float | bool] = {"mapping": f"{point.mapping}{point.tp}"}
    settings |= {key: value for key in ("batch", "tokens", "slots", "mtp") if (value := getattr(point, key))}
    settings |= {"cells": point.cells} if point.cells > 1 else {}
    return MeasuredDeployment(
        kind=point.kind,
        model=sweep.served_model_name or sweep.model,
        total_gpus=point.gpus,
        gpu=sweep.gpu,
        workers=point.workers,
        prefill_workers=point.prefill,
        decode_workers=point.decode,
        settings=settings,
    )


def select(
    points: Sequence[SweepPoint], wanted: Sequence[str], best: Sequence[str] = (), mtp: str = "any"
) -> list[SweepPoint]:
    """The points that any of ``wanted`` means, in their order.

    Args:
        wanted: names with ``*`` and ``?``, or the words all, aggregated, disaggregated, tp, tep, dep, 8gpu (by GPUs
            in all) and pareto; empty: all.
        best: names of the points on a front of earlier results.
        mtp: "on" or "off" for points with and without drafted tokens.

    Raises:
        BadSweep: one of them means no point.
    """
    chosen: set[str] = set()
    for word in wanted or ("all",):
        found = [each.name for each in points if _means(word, each, best)]
        if not found:
            raise BadSweep(f"--points {word}: it means no point; there are {', '.join(each.name for each in points)}")
        chosen.update(found)
    kept = [each for each in points if each.name in chosen and mtp in ("any", "on" if each.mtp else "off")]
    if not kept:
        raise BadSweep(f"--mtp {mtp}: no chosen point is of that kind")
    return kept


def _means(word: str, point: SweepPoint, best: Sequence[str]) -> bool:
    if word in ("all", point.mapping, "disaggregated" if point.prefill else "aggregated"):
        return True
    if gpus := _GPUS.fullmatch(word.lower()):
        return point.gpus == int(gpus[1])
    return point.name in best if word == "pareto" else fnmatchcase(point.name, word)


def argv_of(flags: Mapping[str, Any]) -> list[str]:
    """A command line, one word a flag."""
    argv = []
    for key, value in flags.items():
        if isinstance(value, bool):
            argv.append(f"--{key}" if value else f"--no-{key}")
        else:
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            argv.append(f"--{key}={text}")
    return argv


def tree_over(point: SweepPoint, engine: str) -> Tree:
    """The point's sizes as engine arguments of TensorRT-LLM or vLLM."""
    if engine == "vllm":
        sizes = {"max_num_seqs": point.batch, "max_num_batched_tokens": point.tokens}
        tree: Tree = {key: value for key, value in sizes.items() if value}
        return tree | ({"gpu_memory_utilization": point.memory_fraction} if point.memory_fraction else {})
    tree = {key: value for key, value in (("max_batch_size", point.batch), ("max_num_tokens", point.tokens)) if value}
    if point.memory_fraction:
        tree["kv_cache_config"] = {"free_gpu_memory_fraction": point.memory_fraction}
    if point.attention_dp is not None and point.tp > 1:
        tree["enable_attention_dp"] = point.attention_dp
    if point.slots:
        tree["moe_config"] = {"load_balancer": {"num_slots": point.slots, "layer_updates_per_iter": 1}}
    return tree
