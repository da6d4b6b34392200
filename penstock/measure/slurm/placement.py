"""The workers of a point: the nodes and GPUs of an allocation on which each runs, and with which command line.

The variables that Slurm sets say what there is. Engine arguments are checked before anything waits in a queue.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from penstock.configs.flags import BadFlags, read
from penstock.configs.settings import WorkerSettings
from penstock.infra.engine_args.memory_estimate import GIB, Shape, UnknownShape
from penstock.infra.engine_args.rules import check
from penstock.infra.engine_args.rules.rule import up
from penstock.infra.engine_args.tree import BadArguments, Tree, decode, merge
from penstock.launch.recipes.catalogue import GPUS
from penstock.launch.recipes.generate import BLOCK, EngineSpec, engine_context, generate, sizes
from penstock.measure.slurm.sweep_file import BadSweep, Flags, Role, SweepFile, SweepPoint, argv_of, tree_over
from penstock.measure.sweep.sweep_command import SweepSettings
from penstock.measure.sweep.workload import levels_of, workload_of

_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)
_MOST_NODES = 65536


class BadAllocation(ValueError):
    """Nodes that the workers do not fit on, or variables that are not Slurm's; the text says what is missing."""


class SlurmNode(NamedTuple):
    """``tasks``: workers' GPUs, or processes without them, that it takes."""

    name: str
    tasks: int


class SlurmGroup(NamedTuple):
    """``number`` workers of ``size`` GPUs each."""

    role: str
    number: int
    size: int


class Instance(NamedTuple):
    """A worker on its nodes.

    Attributes:
        devices: indices of its GPUs, on each of its nodes.
    """

    name: str
    role: str
    nodes: tuple[str, ...]
    size: int
    devices: tuple[int, ...]


def nodes_of(names: str, tasks: str) -> list[SlurmNode]:
    """
    Args:
        names: SLURM_JOB_NODELIST, such as ``gpu[01-03,7],login``.
        tasks: SLURM_TASKS_PER_NODE, such as ``4(x2),3``.

    Raises:
        BadAllocation: they have another form, or are of different numbers of nodes.
    """
    hosts = list(expand(names))
    counts: list[int] = []
    for part in tasks.split(","):
        match = _TASKS.fullmatch(part.strip())
        if not match or int(match[2] or 1) > _MOST_NODES:
            raise BadAllocation(f"SLURM_TASKS_PER_NODE {tasks!r}: expected a form such as 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    if len(hosts) != len(counts):
        raise BadAllocation(
            f"SLURM_JOB_NODELIST {names} has {len(hosts)} nodes, and SLURM_TASKS_PER_NODE {tasks} says {len(counts)}"
        )
    return [SlurmNode(*each) for each in zip(hosts, counts, strict=True)]


def expand(names: str) -> Iterator[str]:
    """The hosts of Slurm's short form.

    Raises:
        BadAllocation: it has another form.
    """
    wrong = BadAllocation(f"SLURM_JOB_NODELIST {names!r}: expected a form such as gpu[01-03,7],login")
    words = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", names)
    if not words or ",".join(words) != names:
        raise wrong
    for word in words:
        yield from _expand_word(word, wrong)


def _expand_word(word: str, wrong: BadAllocation) -> Iterator[str]:
    before, bracket, rest = word.partition("[")
    if not bracket:
        yield word
        return
    ranges, _, after = rest.partition("]")
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise wrong
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _MOST_NODES:
            raise wrong
        for number in range(int(first), int(last) + 1):
            for end in _expand_word(after, wrong):
                yield f"{before}{number:0{len(first)}d}{end}"


def place(groups: Sequence[SlurmGroup], nodes: Sequence[SlurmNode]) -> list[Instance]:
    """Place each worker on the first node with room; one of several nodes gets whole ones.

    Raises:
        BadAllocation: there are too few tasks.
    """
    room = {node.name: list(range(node.tasks)) for node in nodes}
    whole = {node.name: node.tasks for node in nodes}
    placed = []
    for group in groups:
        for index in range(group.number):
            chosen = _room(group.size, room, whole)
            if not chosen:
                raise BadAllocation(_too_few(groups, nodes))
            per_node = group.size // len(chosen)
            devices = tuple(room[chosen[0]][:per_node])
            for node in chosen:
                del room[node][:per_node]
            stem = "worker" if group.role == "aggregated" else group.role
            placed.append(Instance(f"{stem}-{index}", group.role, chosen, group.size, devices))
    return placed


def _room(size: int, room: Mapping[str, list[int]], whole: Mapping[str, int]) -> tuple[str, ...]:
    for name, free in room.items():
        if len(free) >= size:
            return (name,)
    empty = [name for name, free in room.items() if free and len(free) == whole[name]]
    per_node = max((whole[name] for name in empty), default=0)
    if size <= per_node or not per_node or size % per_node:
        return ()
    alike = [name for name in empty if whole[name] == per_node]
    needed = size // per_node
    return tuple(alike[:needed]) if len(alike) >= needed else ()


def node_count(groups: Sequence[SlurmGroup], tasks_per_node: int) -> int:
    """How many nodes of ``tasks_per_node`` the workers need.

    Raises:
        BadAllocation: a worker does not fill its nodes.
    """
    for group in groups:
        if group.size > tasks_per_node and group.size % tasks_per_node:
            raise BadAllocation(
                f"a {group.role} worker of {group.size} GPUs does not fill nodes of {tasks_per_node}; use a multiple"
            )
    most = sum(group.number * math.ceil(group.size / tasks_per_node) for group in groups)
    used = {
        node for each in place(groups, [SlurmNode(str(n), tasks_per_node) for n in range(most)]) for node in each.nodes
    }
    return len(used)


def _too_few(groups: Sequence[SlurmGroup], nodes: Sequence[SlurmNode]) -> str:
    needs = " and ".join(f"{group.number} x {group.role} of {group.size}" for group in groups)
    total = sum(group.number * group.size for group in groups)
    have = ", ".join(f"{node.name} with {node.tasks}" for node in nodes)
    return (
        f"{needs} need {total} tasks, and the allocation has {sum(node.tasks for node in nodes)} ({have}): "
        "ask for more with --nodes and --ntasks-per-node"
    )


EXTERNAL = ("trtllm", "vllm")
_MANY_NODES = ("trtllm", "vllm", "mock")  # engines of which one may be on several nodes


class Worker(NamedTuple):
    """Workers of one role.

    Attributes:
        argv: of `penstock`, without what differs between them.
        arguments: text of their file of engine arguments; "": none.
        warnings: of the rules of engine arguments.
    """

    group: SlurmGroup
    argv: tuple[str, ...]
    arguments: str = ""
    warnings: tuple[str, ...] = ()


def load_of(sweep: SweepFile, point: SweepPoint) -> tuple[str, ...]:
    """Flags of `penstock bench sweep` for a point.

    Raises:
        BadSweep: they are none, or not the sweep's to give.
    """
    given: dict[str, Any] = dict(sweep.load)
    if point.concurrency:
        given["concurrency"] = list(point.concurrency)
    if sweep.model:
        given.setdefault("tokenizer", sweep.model)
    if own := sorted(given.keys() & {"endpoint", "metrics", "gpus", "out", "model"}):
        raise BadSweep(f"load.{own[0]}: the sweep sets it itself")
    argv = argv_of(given)
    try:
        read(SweepSettings, argv)
    except BadFlags as error:
        raise BadSweep(f"load: {error}") from None
    return tuple(argv)


def workers_of(
    sweep: SweepFile, point: SweepPoint, read_file: Callable[[str], Tree], shape: Callable[[str], Shape], file: str = ""
) -> list[Worker]:
    """The workers of a point, by role.

    Args:
        read_file: a file of engine arguments, as a tree.
        shape: of a model.
        file: where the engine arguments of ``{role}`` will be.

    Raises:
        BadSweep: flags or arguments that the workers would refuse.
    """
    made = []
    for role, count in point.roles.items():
        size = point.gpus_of(role)
        if sweep.engine == "native" and size > 1:
            raise BadSweep(f"point {point.name}: the native engine uses one GPU; give more workers instead of tp")
        if sweep.engine not in _MANY_NODES and size > sweep.slurm.tasks_per_node:
            raise BadSweep(
                f"point {point.name}: {role} workers of {size} GPUs, and nodes have {sweep.slurm.tasks_per_node}; "
                f"engines on several nodes need trtllm or vllm"
            )
        tree, warnings = _arguments(sweep, point, role, read_file, shape)
        path = file.format(role=role) if tree else ""
        argv = _argv(sweep, point, role, path)
        text = yaml.safe_dump(tree, sort_keys=False, default_flow_style=None) if tree else ""
        made.append(Worker(SlurmGroup(role, count, size), tuple(argv), text, warnings))
    return made


def _argv(sweep: SweepFile, point: SweepPoint, role: Role, path: str) -> list[str]:
    flags: Flags = {"engine": sweep.engine, "role": role}
    flags |= {key: value for key, value in (("model", sweep.model), ("extra-engine-args", path)) if value}
    if sweep.served_model_name:
        flags["served-model-name"] = sweep.served_model_name
    if sweep.engine not in EXTERNAL:
        if point.mtp or point.slots or point.attention_dp is not None:
            raise BadSweep(f"point {point.name}: mtp, slots and attention-dp are TensorRT-LLM's, not {sweep.engine}'s")
        sizes = {"max-running": point.batch, "max-batched-tokens": point.tokens}
        flags |= {key: value for key, value in sizes.items() if value}
        if point.memory_fraction and sweep.engine == "native":
            flags["kv-memory-fraction"] = point.memory_fraction
    argv = argv_of(flags | sweep.worker | point.worker)
    try:
        read(WorkerSettings, argv)
    except BadFlags as error:
        raise BadSweep(f"point {point.name}: worker: {error}") from None
    return ["worker", *argv]


def _arguments(
    sweep: SweepFile, point: SweepPoint, role: Role, read_file: Callable[[str], Tree], shape: Callable[[str], Shape]
) -> tuple[Tree, tuple[str, ...]]:
    given = {"prefill": point.prefill_engine_args, "decode": point.decode_engine_args}.get(role, "")
    path = given or point.engine_args
    if sweep.engine not in EXTERNAL:
        if path:
            raise BadSweep(f"point {point.name}: engine arguments are read by trtllm and vllm, not by {sweep.engine}")
        return {}, ()
    size = point.gpus_of(role)
    # A prefill engine's batch and mapping follow from its own rules.
    over = {} if role == "prefill" else tree_over(point, sweep.engine)
    if size > 1:
        over["tensor_parallel_size"] = size
    if path or sweep.engine == "vllm" or role == "encode":
        tree = merge(read_file(path) if path else {}, over)
        if sweep.engine == "trtllm":
            _decoded(point, role, tree)
        return tree, ()
    return _generated(sweep, point, role, over, shape)


def _generated(
    sweep: SweepFile, point: SweepPoint, role: Role, over: Tree, shape: Callable[[str], Shape]
) -> tuple[Tree, tuple[str, ...]]:
    if sweep.gpu not in GPUS:
        raise BadSweep(f"gpu: {sweep.gpu or 'none'} is not one of {', '.join(GPUS)}; or give the points engine-args")
    load = read(SweepSettings, load_of(sweep, point))
    memory, blackwell = GPUS[sweep.gpu]
    highest = max((level.value for level in levels_of(load) if level.kind == "concurrency"), default=64)
    workload = workload_of(load)
    spec = EngineSpec(
        role=role,
        gpus=point.gpus_of(role),
        gpu_bytes=int(memory * GIB),
        blackwell=blackwell,
        isl=math.ceil(workload.isl + 4 * workload.isl_stddev),
        osl=math.ceil(workload.osl + 4 * workload.osl_stddev),
        concurrency=max(1, math.ceil(highest / point.roles[role])),
        gpus_per_node=sweep.slurm.tasks_per_node,
        mtp=point.mtp,
        attention_dp=None if role == "prefill" else point.attention_dp,
    )
    try:
        size = shape(sweep.model)
        tree = merge(generate(size, spec).tree, over)
        if role != "prefill" and point.batch:
            tree["cuda_graph_config"] = {"enable_padding": True, "batch_sizes": sizes(point.batch)}
            if not point.tokens:  # a step has a token, and those drafted, of each sequence
                tree["max_num_tokens"] = max(tree["max_num_tokens"], up(point.batch * (1 + point.mtp), BLOCK))
        findings = check(decode(tree), engine_context(size, spec))
    except UnknownShape as error:
        raise BadSweep(f"model: {error}; or give the points engine-args") from None
    except BadArguments as error:
        raise BadSweep(f"point {point.name}: {role}: {'; '.join(error.problems)}") from None
    if wrong := [f"{each.where}: {each.message}; {each.fix}" for each in findings if each.level == "error"]:
        raise BadSweep(f"point {point.name}: {role}: {'; '.join(wrong)}")
    return tree, tuple(f"{point.name}: {role}: {each}" for each in findings)


def _decoded(point: SweepPoint, role: Role, tree: Tree) -> None:
    try:
        decode(tree)
    except BadArguments as error:
        raise BadSweep(f"point {point.name}: {role}: {'; '.join(error.problems)}") from None
